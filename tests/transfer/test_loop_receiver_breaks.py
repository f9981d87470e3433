"""Connections that break, and streams that go back to a thread, while the event loop has them; and
many streams at once."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import threading
import time

import pytest
from stream_rig import PIECE, Pieces, Receiver, SampleBlob, Server
from test_stream_faults import HEAD, StartPeer, frame
from test_stream_loop_receiver import Writes, stored

from p2pdist.transfer.stream import loop_receiver
from p2pdist.transfer.stream.loop_receiver import LOOP_SHARE_MAX, SHARE_LOW, WINDOW, Share


@pytest.fixture
def willing(monkeypatch: pytest.MonkeyPatch, receiver: Receiver) -> None:
    """The loop takes whatever it may, but for what stalls it."""
    monkeypatch.setattr(loop_receiver, "WINDOW", 1)
    monkeypatch.setattr(loop_receiver, "STALL_S", 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("willing")
@pytest.mark.parametrize("part", [0, 3, 1000, PIECE + 8, PIECE + 500])
async def test_a_reset_ends_the_stream_after_what_came_before(
    receiver: Receiver, blob: SampleBlob, raw_peer: StartPeer, part: int
) -> None:
    """The loop finds both at once, and hears of the reset no second time."""
    writes, taken = Writes(receiver), threading.Event()

    def behave(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        for piece in range(4):
            connection.sendall(frame(piece, blob.piece(piece)))
        assert taken.wait(60)
        connection.sendall((frame(4, blob.piece(4)) + frame(5, blob.piece(5)))[:part])
        time.sleep(0.1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    stream = receiver.open(raw_peer(behave).port, write=writes)
    await receiver.until(lambda: len(writes.on_loop) == 2)
    taken.set()
    time.sleep(0.3)  # the loop is kept from looking meanwhile
    assert (await receiver.closed(stream)).reason == "reset"
    assert receiver.received(stream) == list(range(4 + part // (PIECE + 8)))
    assert stream.receiving is None


@pytest.mark.usefixtures("willing")
async def test_a_thread_that_takes_over_gets_a_socket_that_blocks(
    server: Server, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would turn round and round where it should wait for the rest of a piece."""
    writes = Writes(receiver)
    writes.slow = {4}
    server.make = lambda layout, wanted: Pieces(layout, wanted, available=set(range(5)))
    stream = receiver.open(server.port, write=writes)
    await receiver.until(lambda: len(receiver.received(stream)) == 5)
    assert writes.on_loop == [2, 3, 4]
    await asyncio.sleep(0.05)
    connection = stream._stream.connection
    assert connection is not None
    assert not fcntl.fcntl(connection.fileno(), fcntl.F_GETFL) & os.O_NONBLOCK
    stream.close()
    assert (await receiver.closed(stream)).reason == "closed"


async def test_many_streams_that_take_little_do_not_take_all_of_the_loop() -> None:
    loop, on_loop = asyncio.get_running_loop(), []
    for _ in range(100):
        share = Share()
        stored(share, WINDOW + 1, took_s=0.01, each_s=1.1 * 0.01 / SHARE_LOW)
        assert share.low
        if share.enter(loop):
            on_loop.append(share)
    each = SHARE_LOW / 1.1
    assert LOOP_SHARE_MAX - each - 0.001 < each * len(on_loop) <= LOOP_SHARE_MAX
    more = on_loop[0]
    more.begin()
    stored(more, WINDOW + 1, took_s=0.01, each_s=0.25)
    assert more.high, "all together take too much, though it alone does not"
    more.leave()
    more.leave()
    assert share.enter(loop), "there is room again"
    for each_share in (*on_loop, share):
        each_share.leave()
