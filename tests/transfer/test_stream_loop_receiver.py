"""Where the pieces of a stream are taken: by a thread, or on the event loop while they come slowly
and are stored quickly."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from authority import Authority
from stream_rig import Pieces, Receiver, SampleBlob, Server, StartApp

from p2pdist.core.downlink import Downlink
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream import loop_receiver
from p2pdist.transfer.stream.events import Mailbox
from p2pdist.transfer.stream.loop_receiver import WINDOW, Share
from p2pdist.transfer.tls import Tls


class Writes:
    """Stores pieces, and notes which were written by the thread of the loop."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver, self.loop = receiver, threading.get_ident()
        self.on_loop: list[int] = []
        self.slow: set[int] = set()
        self.wrong: set[int] = set()

    def __call__(self, piece: int, data: memoryview) -> bool:
        if threading.get_ident() == self.loop:
            self.on_loop.append(piece)
        if piece in self.slow:
            time.sleep(0.6)  # longer than what is a stall
        return piece not in self.wrong and self.receiver.copy.write(piece, data)


@pytest.fixture
def willing(monkeypatch: pytest.MonkeyPatch, receiver: Receiver) -> None:
    """The loop takes whatever it may, but for what stalls it."""
    monkeypatch.setattr(loop_receiver, "WINDOW", 1)
    monkeypatch.setattr(loop_receiver, "STALL_S", 0.5)


@pytest.mark.usefixtures("willing")
async def test_the_loop_takes_the_pieces_after_the_first_window(
    server: Server, receiver: Receiver, blob: SampleBlob
) -> None:
    writes = Writes(receiver)
    stream = receiver.open(server.port, write=writes)
    assert (await receiver.closed(stream)).reason == "done"
    assert writes.on_loop == list(range(2, blob.layout.count))
    assert receiver.received(stream) == list(range(blob.layout.count))
    assert receiver.copy.path.read_bytes() == blob.data


@pytest.mark.usefixtures("willing")
async def test_the_loop_takes_what_comes_over_tls(
    receiver: Receiver, blob: SampleBlob, start_app: StartApp, tmp_path: Path
) -> None:
    tls, server = Tls(Authority(tmp_path).issue()), Server(blob)
    server.port = await start_app("POST", "/v1/streams", server.streams, ServerContext(tls))
    writes = Writes(receiver)
    stream = receiver.open(server.port, write=writes, tls=tls)
    assert (await receiver.closed(stream)).reason == "done"
    assert writes.on_loop == list(range(2, blob.layout.count))
    assert receiver.copy.path.read_bytes() == blob.data


@pytest.mark.usefixtures("willing")
async def test_a_disk_that_makes_writers_wait_is_left_to_a_thread(
    server: Server, receiver: Receiver, blob: SampleBlob
) -> None:
    writes = Writes(receiver)
    writes.slow = {5}
    stream = receiver.open(server.port, write=writes)
    assert (await receiver.closed(stream)).reason == "done"
    assert 5 in writes.on_loop
    assert 6 not in writes.on_loop
    assert writes.on_loop[-1] == blob.layout.count - 1, "it comes back to the loop"
    assert receiver.received(stream) == list(range(blob.layout.count))


@pytest.mark.usefixtures("willing")
async def test_wrong_bytes_on_the_loop_end_the_stream(server: Server, receiver: Receiver) -> None:
    writes = Writes(receiver)
    writes.wrong = {7}
    stream = receiver.open(server.port, write=writes)
    assert (await receiver.closed(stream)).reason == "corrupt"
    assert writes.on_loop[-1] == 7
    assert receiver.received(stream) == list(range(7))


@pytest.mark.usefixtures("willing")
async def test_who_must_pause_does_so_in_a_thread(server: Server, receiver: Receiver, blob: SampleBlob) -> None:
    """The limit begins to hold back when the loop has the stream; and the loop runs on
    meanwhile."""
    writes, downlink = Writes(receiver), Downlink()
    server.make = lambda layout, wanted: Pieces(layout, wanted, available={0, 1, 2, 3})
    stream = receiver.open(server.port, write=writes, pacer=Pacer(downlink))
    await receiver.until(lambda: receiver.received(stream) == [0, 1, 2, 3])
    assert writes.on_loop == [2, 3]
    downlink._tokens.limit_bytes_s = 2e5  # a third of a second for a piece, which no busy machine needs each time
    server.outgoing[0].available = None
    server.outgoing[0].news.set()
    await receiver.until(lambda: not set(receiver.received(stream)[4:]) <= set(writes.on_loop))
    downlink._tokens.limit_bytes_s = 1e9
    assert (await receiver.closed(stream)).reason == "done"
    assert receiver.received(stream) == list(range(blob.layout.count))


@pytest.mark.usefixtures("willing")
async def test_close_and_finish_reach_a_stream_on_the_loop(server: Server, receiver: Receiver) -> None:
    for end in ("close", "finish_piece_and_close"):
        server.make = lambda layout, wanted: Pieces(
            layout, wanted, available=set(wanted_first(layout.count, wanted.have))
        )
        writes = Writes(receiver)
        stream = receiver.open(server.port, write=writes)
        await receiver.until(lambda: len(writes.on_loop) == 2)  # noqa: B023
        await asyncio.to_thread(getattr(stream, end))
        assert (await receiver.closed(stream)).reason == "closed"


def wanted_first(count: int, have: bytes) -> list[int]:
    """The first four pieces that are lacking."""
    return [piece for piece in range(count) if not have[piece >> 3] >> (piece & 7) & 1][:4]


async def test_what_is_delivered_on_the_loop_comes_after_what_was_posted() -> None:
    got: list[int] = []
    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop(), got.extend)
    mailbox.post(1)
    mailbox.deliver(2)
    mailbox.deliver(3)
    assert got == [1, 2, 3]
    await asyncio.sleep(0.05)
    assert got == [1, 2, 3]


def stored(share: Share, pieces: int, *, took_s: float, each_s: float, begin: float = 0.0) -> float:
    for number in range(pieces):
        share.spent(took_s, begin + number * each_s)
    return begin + pieces * each_s


def test_slow_pieces_are_for_the_loop_and_quick_ones_for_a_thread() -> None:
    slow, quick, between = Share(), Share(), Share()
    stored(slow, WINDOW + 1, took_s=0.0001, each_s=0.02)
    stored(quick, WINDOW + 1, took_s=0.0001, each_s=0.001)
    stored(between, WINDOW + 1, took_s=0.0001, each_s=0.003)
    assert (slow.low, slow.high) == (True, False)
    assert (quick.low, quick.high) == (False, True)
    assert (between.low, between.high) == (False, False)


def test_nothing_is_said_before_a_window_is_full() -> None:
    share = Share()
    stored(share, WINDOW, took_s=0.0001, each_s=1.0)
    assert not share.low
    assert not share.high


def test_one_piece_that_waits_for_the_disk_is_too_much() -> None:
    share = Share()
    at = stored(share, WINDOW + 1, took_s=0.0001, each_s=10.0)
    share.spent(loop_receiver.STALL_S, at)
    assert share.high
    assert not share.low


def test_who_has_left_the_loop_comes_back_after_a_longer_window() -> None:
    share = Share()
    share.left_loop()
    at = stored(share, 2 * WINDOW, took_s=0.0001, each_s=1.0)
    assert not share.low
    share.spent(0.0001, at)
    assert share.low
