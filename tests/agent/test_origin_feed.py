"""What a host brings from the origin into a swarm: what it may, what nobody has, and not more than
that."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from waits import until

from p2pdist.agent.bittorrent.fetch import OriginAccess, OriginFeed
from p2pdist.core.origin_seeding import GIVEN_MAX, SUPERPEER_PAUSE_S, Readers
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import P2PDistError, Unavailable
from p2pdist.model.messages import Reason
from p2pdist.model.pieces import PieceList
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore

PIECE = 64 << 10
COUNT = 40
DATA = random.Random(1).randbytes(COUNT * PIECE)


class Rig:
    """A feed of a blob of two stripes between an origin and a swarm that do as they are told."""

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self.leased: set[int] = set()
        self.superpeers: tuple[str, ...] = ()
        self.peers_have: set[int] = set()
        self.read: list[int] = []
        self.given: list[int] = []
        self.complaints: list[tuple[int, Reason]] = []
        self.taking = True
        self.delay_s = 0.001
        self.origin: Callable[[int], bytes] = lambda piece: DATA[piece * PIECE : (piece + 1) * PIECE]
        access = OriginAccess(self.readers, self.read_origin, self.complain_of_origin)
        self.feed = OriginFeed(blob, "h1", self, access)

    # -- the pull

    def readers(self) -> Readers:
        """No tracker answers the superpeers."""
        leased = frozenset(self.leased)
        return Readers(self.blob.digest, "h1", 2, leased, self.superpeers, alone=bool(self.superpeers))

    async def read_origin(self, piece: int) -> bytes:
        self.read.append(piece)
        await asyncio.sleep(self.delay_s)
        return self.origin(piece)

    def complain_of_origin(self, stripe: int, reason: Reason, error: P2PDistError) -> None:
        self.complaints.append((stripe, reason))

    # -- the transfer

    def give_piece(self, piece: int, data: bytes) -> None:
        self.given.append(piece)
        if self.taking:
            self.arrive(piece)

    def count_copies(self, report: Callable[[list[int]], object]) -> None:
        report([int(piece in self.peers_have) for piece in range(COUNT)])

    def arrive(self, piece: int) -> None:
        assert self.blob.write(piece, DATA[piece * PIECE : (piece + 1) * PIECE])
        asyncio.get_running_loop().call_soon(self.feed.held, piece)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    store = BlobStore(tmp_path)
    pieces = PieceList.of_stream(io.BytesIO(DATA), len(DATA))
    assert pieces.layout.stripes == 2
    made = Rig(store.begin(digest_of(DATA), pieces))
    yield made
    made.feed.stop()
    await asyncio.sleep(0.01)
    store.close()


async def test_the_holder_of_a_lease_reads_its_stripe_and_no_other(rig: Rig) -> None:
    rig.leased = {1}
    await until(lambda: len(rig.given) == COUNT // 2)
    await asyncio.sleep(0.3)
    assert sorted(rig.read) == list(range(1, COUNT, 2))
    assert rig.feed.given == set(rig.read)


async def test_what_a_peer_has_is_not_read(rig: Rig) -> None:
    rig.peers_have = set(range(0, COUNT, 4))
    rig.leased = {0}
    await until(lambda: len(rig.given) == COUNT // 4)
    await asyncio.sleep(0.3)
    assert set(rig.read) == set(range(2, COUNT, 4))


async def test_without_leave_nothing_is_read(rig: Rig) -> None:
    await asyncio.sleep(0.6)
    assert rig.read == []


async def test_pieces_that_libtorrent_has_not_written_yet_are_limited(rig: Rig) -> None:
    """And taken for lost only after long."""
    assert COUNT // 2 < GIVEN_MAX
    rig.taking, rig.leased = False, {0}
    await until(lambda: len(rig.given) == COUNT // 2)
    await asyncio.sleep(0.6)
    assert len(rig.given) == COUNT // 2


@pytest.mark.slow
async def test_a_keeper_reads_when_nothing_turns_up_and_waits_when_something_does(rig: Rig) -> None:
    """Of two superpeers this is the one that comes next; it would take more than a second to read
    what is for the other."""
    loop = asyncio.get_running_loop()
    start, rig.superpeers, rig.delay_s = loop.time(), ("h1", "h2"), 0.1
    readers = rig.readers()
    others = [piece for piece in range(COUNT) if readers.rank(piece)]
    for piece in range(COUNT):
        if piece not in others:
            assert rig.blob.write(piece, DATA[piece * PIECE : (piece + 1) * PIECE])
    await until(lambda: bool(rig.read))
    assert loop.time() - start >= SUPERPEER_PAUSE_S
    rig.peers_have = {others[-1]}
    await asyncio.sleep(0.4)
    settled = len(rig.read)
    assert settled < len(others) - 1
    await asyncio.sleep(0.9)
    assert len(rig.read) == settled


async def test_an_origin_that_does_not_answer_is_complained_of_and_tried_again(rig: Rig) -> None:
    answers = rig.origin

    def fails(piece: int) -> bytes:
        raise Unavailable("it is away")

    rig.origin, rig.leased = fails, {0}
    await until(lambda: (0, "unavailable") in rig.complaints)
    assert len(rig.read) <= 4
    rig.origin = answers
    await until(lambda: len(rig.given) == COUNT // 2)


async def test_wrong_bytes_are_not_given_to_anybody(rig: Rig) -> None:
    rig.origin, rig.leased = (lambda piece: bytes(PIECE)), {1}
    await until(lambda: (1, "corrupt") in rig.complaints)
    assert rig.given == []
