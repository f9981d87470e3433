"""What a pull tells of the bytes that it brought."""

from __future__ import annotations

import asyncio
import io
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waits import until

from p2pdist.agent.pull import streams
from p2pdist.agent.pull.blob import TICK_S, BlobPull, DemandedBody, Looks
from p2pdist.agent.uplink import Uplink
from p2pdist.core.downlink import Downlink
from p2pdist.core.sources import Sources
from p2pdist.model.address import Vicinity
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Unavailable
from p2pdist.model.messages import StreamRequest
from p2pdist.model.pieces import PieceLayout, PieceList, PieceSet
from p2pdist.model.plan import Plan, Source, StripePlan
from p2pdist.store.store import BlobStore
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream.client import IncomingStream
from p2pdist.transfer.stream.events import PieceReceived, StreamClosed, StreamEvent

PIECE = 64 << 10
COUNT = 40
DATA = random.Random(1).randbytes(COUNT * PIECE)


class Stream(IncomingStream):
    """An open stream, through which the test lets pieces come: it never connects."""

    opened: list[Stream]

    def __init__(
        self,
        source: Source,
        request: StreamRequest,
        layout: PieceLayout,
        write: Callable[[int, Any], bool],
        post: Callable[[StreamEvent], None],
        **rest: Any,
    ) -> None:
        super().__init__(source, request, layout, write, post, **rest)
        self._write, self._post = write, post
        self.asked = tuple(PieceSet(layout.count, request.have).missing(request.stripe, request.stripes))

    @property
    def quiet(self) -> bool:
        return False

    def start(self) -> None:
        self.opened.append(self)

    def give(self, piece: int) -> None:
        ok = self._write(piece, DATA[piece * PIECE : (piece + 1) * PIECE])
        self._post(PieceReceived(self.number, piece, ok))

    def close(self) -> None:
        self._post(StreamClosed(self.number, "closed", "", None))

    def finish_piece_and_close(self) -> None:
        self.close()


class Around:
    """An agent that counts what came."""

    host, tls, connections, swarming, peer_wait_s = "h1", None, None, None, 0.0
    vicinity = Vicinity("127.0.0.1")

    def __init__(self) -> None:
        self.uplink, self.sources, self.writers = Uplink(), Sources(), Counter[Digest]()
        self.received: Counter[str] = Counter()

    def pacer_of(self, blob: Digest) -> None:
        return None

    def proof(self, blob: Digest) -> tuple[str, None]:
        return "", None

    def ask_ticket(self, blob: Digest, holding: object, *, refused: bool = False) -> None:
        pass

    def send_to_tracker(self, message: object) -> None:
        pass

    def is_revoked(self, host: str) -> bool:
        return False

    def count_received(self, source: str, length: int) -> None:
        self.received[source] += length


async def test_a_piece_that_two_sources_had_under_way_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "opened", [], raising=False)
    monkeypatch.setattr(streams, "IncomingStream", Stream)
    pieces = PieceList.of_stream(io.BytesIO(DATA), len(DATA))
    assert pieces.layout.stripes == 2
    around: Any = Around()
    pull = BlobPull(BlobStore(tmp_path).begin(digest_of(DATA), pieces), around, tracker_present=True)
    pull.start()
    parents = [Source("h2", "h2:1"), Source("h3", "h3:1")]
    pull.planned(Plan(pull.blob.digest, tuple(StripePlan(stripe, parents[stripe]) for stripe in (0, 1))))
    first, second = Stream.opened
    for piece in range(COUNT):
        (first if piece % 2 == 0 else second).give(piece)
        if piece == 8:
            second.give(piece)
    await asyncio.wait_for(pull.done, 60)
    assert pull.receipts.before == 0
    assert pull.receipts.by_source == {"origin": 0, "peer": len(DATA)}
    assert around.received == {"peer": len(DATA) + PIECE, "twice": PIECE}, "it was received all the same"


async def test_a_demand_waits_for_its_pieces_in_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pieces do not come: many children may demand them."""
    monkeypatch.setattr(Stream, "opened", [], raising=False)
    monkeypatch.setattr(streams, "IncomingStream", Stream)
    pieces = PieceList.of_stream(io.BytesIO(DATA), len(DATA))
    around: Any = Around()
    pull = BlobPull(BlobStore(tmp_path).begin(digest_of(DATA), pieces), around, tracker_present=True)
    pull.start()
    before = len(asyncio.all_tasks())
    demands = [asyncio.create_task(pull.demand(range(number, COUNT))) for number in range(5)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) - before <= 2 * len(demands)
    parents = [Source("h2", "h2:1"), Source("h3", "h3:1")]
    pull.planned(Plan(pull.blob.digest, tuple(StripePlan(stripe, parents[stripe]) for stripe in (0, 1))))
    for piece in random.Random(2).sample(range(COUNT), COUNT):
        assert not all(demand.done() for demand in demands)
        Stream.opened[piece % 2].give(piece)
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*demands, pull.done), 60)


async def test_a_client_that_waits_has_its_part_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The piece that it waits for has a stream of its own, what it reads next another one; nothing
    behind the part is asked for."""
    monkeypatch.setattr(Stream, "opened", [], raising=False)
    monkeypatch.setattr(streams, "IncomingStream", Stream)
    pieces = PieceList.of_stream(io.BytesIO(DATA), len(DATA))
    around: Any = Around()
    pull = BlobPull(BlobStore(tmp_path).begin(digest_of(DATA), pieces), around, tracker_present=True)
    pull.start()
    parents = [Source("h2", "h2:1"), Source("h3", "h3:1")]
    pull.planned(Plan(pull.blob.digest, tuple(StripePlan(stripe, parents[stripe]) for stripe in (0, 1))))
    body = DemandedBody(pull, range(30, 36), 6 * PIECE)
    waiting = asyncio.create_task(body.piece(30))
    await until(lambda: len(Stream.opened) == 5)
    asked = {stream.asked: stream for stream in Stream.opened[2:]}
    assert set(asked) == {(30,), (32, 34), (31, 33, 35)}
    asked[30,].give(30)
    await asyncio.wait_for(waiting, 60)
    assert set(pull.blob.have) == {30}
    body.close()
    pull.reject(Unavailable("the test ends"))
    with pytest.raises(Unavailable):
        await body.piece(31)


async def test_a_preseed_says_that_it_yields_while_a_reader_waits_or_a_start_receives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing came; a start yields to no reader."""
    monkeypatch.setattr(Stream, "opened", [], raising=False)
    monkeypatch.setattr(streams, "IncomingStream", Stream)
    pieces = PieceList.of_stream(io.BytesIO(DATA), len(DATA))
    clock = [0.0]
    pacer = Pacer(Downlink(), clock=lambda: clock[0])
    parents = [Source("h2", "h2:1"), Source("h3", "h3:1")]
    for priority in ("preseed", "start"):
        around: Any = Around()
        around.pacer_of = lambda blob: pacer
        store = BlobStore(tmp_path / priority)
        pull = BlobPull(store.begin(digest_of(DATA), pieces), around, tracker_present=True, priority=priority)
        pull.start()
        pull.planned(Plan(pull.blob.digest, tuple(StripePlan(stripe, parents[stripe]) for stripe in (0, 1))))
        assert pull.advance() is None
        reading = asyncio.create_task(pull.demand([31]))
        await until(lambda: any(stream.asked == (31,) for stream in Stream.opened))
        for _ in range(2):
            advance = pull.advance()
            assert (advance is not None and advance.yields) == (priority == "preseed")
        demanded = Stream.opened.pop()
        demanded.give(31)
        demanded.close()
        await asyncio.wait_for(reading, 60)
        advance = pull.advance()
        assert advance is not None and advance.counts == (0, 1) and advance.yields == (priority == "preseed")
        assert pull.advance() is None, "nothing holds it back any more"
        pacer.received("start", PIECE)
        pacer.received("preseed", PIECE)
        assert (pull.advance() is not None) == (priority == "preseed")
        clock[0] += 60.0
        pull.advance()
        assert pull.advance() is None
        Stream.opened.clear()
        pull.reject(Unavailable("the test ends"))


def test_a_look_is_spared_where_each_stripe_gave_a_piece() -> None:
    """But not for longer than TICK_S, and not where one stripe gave none."""
    looks = Looks()
    assert not looks.spared([0, 0], 5.0), "the first look"
    looks.looked(5.0)
    assert looks.next_s([3, 4], TICK_S / 2, 5.0) == TICK_S / 2
    due = 5.0 + TICK_S / 2
    assert looks.spared([4, 5], due)
    assert not looks.spared([4, 4], due) and not looks.spared([3, 9], due)
    assert looks.next_s([4, 5], TICK_S, due) == pytest.approx(TICK_S / 2), "until the look that comes in any case"
    assert not looks.spared([5, 6], 5.0 + TICK_S)
