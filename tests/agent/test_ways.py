"""One way writes into a blob at a time: the other one begins when nobody writes any more."""

from __future__ import annotations

import asyncio
import io
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from p2pdist.agent.swarm_fetch import SWARM
from p2pdist.agent.ways import Ways
from p2pdist.core.handover import LEAVE_S
from p2pdist.core.readers import Readers
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import P2PDistError, Unavailable
from p2pdist.model.messages import Priority, Reason
from p2pdist.model.pieces import PieceLayout, PieceList
from p2pdist.model.torrent import Torrent, decode_torrent, torrent_info
from p2pdist.store.blob import Blob
from p2pdist.store.blobs import BlobStore
from p2pdist.transfer.stream_events import StreamClosed, StreamEvent

DATA = random.Random(1).randbytes(20 * 65536)


class Torrents:
    """Knows the torrent of the blob as soon as it is let."""

    def __init__(self) -> None:
        self.known = asyncio.Event()
        self.torrent: Torrent | None = decode_torrent(torrent_info(io.BytesIO(DATA), len(DATA), "x"))
        self.forgotten: list[Digest] = []

    async def find(self, digest: Digest, layout: PieceLayout) -> Torrent | None:
        await self.known.wait()
        return self.torrent

    async def count_peers(self, torrent: Torrent) -> int:
        return 0

    def forget(self, digest: Digest) -> None:
        self.forgotten.append(digest)


class Swarming:
    """An agent whose BitTorrent does not start."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.torrents = Torrents()
        self.opened = 0
        self.answering = asyncio.Event()
        self.answering.set()

    def policy_of(self, blob: Digest) -> str:
        return self.policy

    async def open(self) -> Any:
        self.opened += 1
        await self.answering.wait()
        raise Unavailable("it does not listen")

    def left(self, blob: Blob, peers: object, done: object) -> None: ...


class Rig:
    """A pull that notes what it is told."""

    def __init__(self, blob: Blob, policy: str) -> None:
        self.blob = blob
        self.priority: Priority = "start"
        self.story: list[str] = []
        self.writers: Counter[Digest] = Counter()
        self.swarming = Swarming(policy)
        self.ways = Ways(self, "h1", self.swarming, self.writers, self.hear)  # type: ignore[arg-type]

    def pause(self, paused: bool) -> None:
        self.story.append("paused" if paused else "resumed")

    def close_streams(self) -> None:
        self.story.append("closed")

    def fed(self) -> bool:
        return True

    def readers(self) -> Readers:
        return Readers(self.blob.digest, "h1", self.blob.layout.stripes)

    async def read_origin(self, piece: int) -> bytes:
        raise AssertionError("nobody may read")

    def complain_of_origin(self, stripe: int, reason: Reason, error: P2PDistError) -> None: ...

    def hear(self, event: StreamEvent) -> None:
        assert isinstance(event, StreamClosed)
        assert event.stream == SWARM
        self.story.append(event.reason)
        self.ways.end_write()
        self.ways.swarm_closed(event)
        self.ways.steer()


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[[str], Rig]]:
    store = BlobStore(tmp_path)
    made: list[Rig] = []

    def rig(policy: str) -> Rig:
        pieces = PieceList.of_stream(io.BytesIO(DATA), len(DATA))
        made.append(Rig(store.begin(digest_of(DATA), pieces), policy))
        return made[-1]

    yield rig
    for each in made:
        each.ways.end()
    await asyncio.sleep(0.01)
    store.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_swarm_begins_only_when_no_stream_writes_any_more(make: Callable[[str], Rig]) -> None:
    """That of an earlier pull counts as well. What takes too long to finish its piece is closed."""
    rig = make("swarm")
    rig.ways.begin_write()
    rig.ways.start()
    assert rig.story == ["paused"]
    rig.swarming.torrents.known.set()
    await asyncio.sleep(0.1)
    rig.ways.steer()
    assert rig.swarming.opened == 0
    assert rig.story == ["paused"]
    await asyncio.sleep(LEAVE_S)
    rig.ways.steer()
    assert rig.story == ["paused", "closed"]
    assert rig.swarming.opened == 0
    rig.ways.end_write()
    rig.ways.steer()
    await until(lambda: rig.swarming.opened == 1)


async def test_where_bittorrent_fails_the_trees_go_on(make: Callable[[str], Rig]) -> None:
    """And stay: it is not tried again for this blob."""
    rig = make("swarm")
    rig.swarming.torrents.known.set()
    rig.ways.start()
    await until(lambda: "resumed" in rig.story)
    assert rig.story == ["paused", "failed", "resumed"]
    assert not rig.writers
    rig.ways.steer()
    assert rig.swarming.opened == 1


async def test_without_a_torrent_nothing_is_broken_off(make: Callable[[str], Rig]) -> None:
    rig = make("auto")
    rig.swarming.torrents.torrent = None
    rig.swarming.torrents.known.set()
    rig.ways.start()
    rig.ways.tracker_changed(False)
    await asyncio.sleep(0.05)
    rig.ways.steer()
    assert rig.story == []


async def test_a_torrent_that_lies_is_forgotten(make: Callable[[str], Rig]) -> None:
    rig = make("auto")
    rig.ways.start()
    rig.ways.swarm_closed(StreamClosed(SWARM, "corrupt", "another blob"))
    assert rig.swarming.torrents.forgotten == [rig.blob.digest]


async def test_a_pull_that_ends_waits_for_its_transfer(make: Callable[[str], Rig]) -> None:
    rig = make("swarm")
    rig.swarming.torrents.known.set()
    rig.swarming.answering.clear()
    rig.ways.start()
    await until(lambda: bool(rig.writers))
    assert not rig.ways.end()
    rig.swarming.answering.set()
    await until(lambda: "failed" in rig.story)
    assert rig.ways.end()
    assert rig.story[-1] == "failed", "nothing is begun any more"
