"""A stripe stream between a real server and real receiver threads."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from stream_rig import PIECE, Pieces, Receiver, SampleBlob, Server, StartApp

from p2pdist.model.errors import DiskFull
from p2pdist.model.pieces import PieceSet
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.stream.events import StreamClosed
from p2pdist.transfer.stream.frames import FRAME
from p2pdist.transfer.tls import Tls


async def test_a_whole_stripe_arrives_in_order(server: Server, receiver: Receiver, blob: SampleBlob) -> None:
    stream = receiver.open(server.port, stripe=1, stripes=4)
    assert (await receiver.closed(stream)).reason == "done"
    assert receiver.received(stream) == list(range(1, blob.layout.count, 4))
    assert server.outgoing[0].sent == sum(blob.layout.length(piece) for piece in range(1, blob.layout.count, 4))


@pytest.mark.parametrize("block", [1000, 32 << 10, 1 << 20])
async def test_all_stripes_at_once_make_the_whole_blob(
    server: Server, receiver: Receiver, blob: SampleBlob, block: int
) -> None:
    server.make = lambda layout, wanted: Pieces(layout, wanted, block=block)
    streams = [receiver.open(server.port, stripe=stripe, stripes=4) for stripe in range(4)]
    assert [(await receiver.closed(stream)).reason for stream in streams] == ["done"] * 4
    assert receiver.copy.path.read_bytes() == blob.data


async def test_a_stream_of_which_little_may_lie_unread_has_little_come_while_it_is_not_read(
    server: Server, receiver: Receiver, blob: SampleBlob
) -> None:
    """Limited while it is under way, and before it begins. The kernel counts the room of a segment,
    which is more than its bytes, so it may hold twice the limit, but never what it would else."""
    limit = 80 << 10
    unread = list[int]()

    def write(piece: int, data: memoryview) -> bool:
        time.sleep(0.02)
        unread.append(stream.received_bytes - head_bytes - (FRAME.size + PIECE) * (len(unread) + 1))
        return receiver.copy.write(piece, data)

    head_bytes = 1 << 10  # of the response, at most
    stream = receiver.open(server.port, write=write, start=False)
    stream.limit_unread(limit)
    stream.start()
    assert (await receiver.closed(stream)).reason == "done"
    assert len(unread) == blob.layout.count
    assert max(unread) <= 2 * limit


async def test_resume_sends_only_what_is_lacking(server: Server, receiver: Receiver, blob: SampleBlob) -> None:
    have = PieceSet(blob.layout.count)
    for piece in (0, 2, 3, 39, 40):
        have.add(piece)
    stream = receiver.open(server.port, stripe=0, stripes=2, have=have.to_bytes())
    assert (await receiver.closed(stream)).reason == "done"
    assert receiver.received(stream) == [piece for piece in range(0, 41, 2) if piece not in (0, 2, 40)]


async def test_a_stripe_that_is_complete_ends_at_once(server: Server, receiver: Receiver, blob: SampleBlob) -> None:
    stream = receiver.open(server.port, have=PieceSet.full(blob.layout.count).to_bytes())
    assert (await receiver.closed(stream)).reason == "done"
    assert receiver.received(stream) == []


async def test_cut_through_a_piece_is_passed_on_while_the_stream_waits_for_the_next(
    server: Server, receiver: Receiver, blob: SampleBlob
) -> None:
    available = {0, 1}
    server.make = lambda layout, wanted: Pieces(layout, wanted, available=available)
    stream = receiver.open(server.port)
    await receiver.until(lambda: receiver.received(stream) == [0, 1])
    assert stream.receiving is None
    for piece in range(2, blob.layout.count):
        available.add(piece)
        server.outgoing[0].news.set()
        if piece % 10 == 2:
            await receiver.until(lambda piece=piece: receiver.received(stream) == list(range(piece + 1)))  # type: ignore[misc]
    assert (await receiver.closed(stream)).reason == "done"
    assert receiver.copy.path.read_bytes() == blob.data


async def test_wrong_bytes_end_the_stream_and_are_not_stored(
    server: Server, receiver: Receiver, blob: SampleBlob
) -> None:
    altered = bytearray(blob.data)
    altered[5 * (64 << 10) + 77] ^= 1
    blob.path.write_bytes(altered)
    stream = receiver.open(server.port)
    closed = await receiver.closed(stream)
    assert closed.reason == "corrupt"
    assert "piece 5" in closed.detail and "parent" in closed.detail
    assert receiver.received(stream) == [0, 1, 2, 3, 4]
    assert len(receiver.copy.path.read_bytes()) == 5 * (64 << 10)


async def test_a_failing_write_ends_the_stream_with_its_error(server: Server, receiver: Receiver) -> None:
    def full(piece: int, data: memoryview) -> bool:
        raise DiskFull("the store", needed=len(data), free=0)

    closed = await receiver.closed(receiver.open(server.port, write=full))
    assert closed.reason == "failed"
    assert isinstance(closed.error, DiskFull)


async def test_a_defect_in_write_is_reported_and_leaves_no_thread(server: Server, receiver: Receiver) -> None:
    def broken(piece: int, data: memoryview) -> bool:
        raise ZeroDivisionError

    closed = await receiver.closed(receiver.open(server.port, write=broken))
    assert closed.reason == "failed"
    assert closed.error is not None


async def test_close_from_another_thread_wakes_a_blocked_receive(server: Server, receiver: Receiver) -> None:
    server.make = lambda layout, wanted: Pieces(layout, wanted, available={0})
    stream = receiver.open(server.port)
    await receiver.until(lambda: receiver.received(stream) == [0])
    threading.Thread(target=stream.close).start()
    assert (await receiver.closed(stream)).reason == "closed"


async def test_close_in_the_middle_of_a_piece_stores_nothing_of_it(server: Server, receiver: Receiver) -> None:
    class Half(Pieces):
        async def next_block(self):  # type: ignore[no-untyped-def]
            if self.offset:
                await asyncio.sleep(60)
            return await super().next_block()

    server.make = Half
    stream = receiver.open(server.port)
    while stream.receiving != 0:
        await asyncio.sleep(0.01)
    stream.close()
    assert (await receiver.closed(stream)).reason == "closed"
    assert receiver.received(stream) == []
    assert receiver.copy.path.read_bytes() == b""


async def test_close_during_a_write_lets_no_later_piece_in(server: Server, receiver: Receiver) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def slow(piece: int, data: memoryview) -> bool:
        writing.set()
        go_on.wait(60)
        return receiver.copy.write(piece, data)

    stream = receiver.open(server.port, write=slow)
    await asyncio.to_thread(writing.wait, 60)
    stream.close()
    go_on.set()
    assert (await receiver.closed(stream)).reason == "closed"
    assert receiver.received(stream) == [0]


async def test_finish_piece_and_close_takes_the_piece_under_way(server: Server, receiver: Receiver) -> None:
    """It does not wait for the next frame, which here never comes."""
    gate = asyncio.Event()

    class Halting(Pieces):
        async def next_block(self):  # type: ignore[no-untyped-def]
            if self.offset and self.todo[0] == 3:
                await gate.wait()
            return await super().next_block()

    server.make = lambda layout, wanted: Halting(layout, wanted, available={0, 1, 2, 3})
    stream = receiver.open(server.port)
    while stream.receiving != 3:
        await asyncio.sleep(0.01)
    stream.finish_piece_and_close()
    await asyncio.sleep(0.05)
    assert not any(isinstance(event, StreamClosed) for event in receiver.events)
    gate.set()
    assert (await receiver.closed(stream)).reason == "closed"
    assert receiver.received(stream) == [0, 1, 2, 3]


async def test_finish_piece_and_close_between_pieces_closes_now(server: Server, receiver: Receiver) -> None:
    server.make = lambda layout, wanted: Pieces(layout, wanted, available={0})
    stream = receiver.open(server.port)
    await receiver.until(lambda: receiver.received(stream) == [0])
    while stream.receiving is not None:
        await asyncio.sleep(0.001)
    stream.finish_piece_and_close()
    assert (await receiver.closed(stream)).reason == "closed"


async def test_close_before_start_connects_to_nobody(server: Server, receiver: Receiver) -> None:
    stream = receiver.open(server.port, start=False)
    stream.close()
    stream.start()
    assert (await receiver.closed(stream)).reason == "closed"
    assert server.outgoing == []


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "over TLS"])
async def test_a_source_may_leave_out_what_another_stream_brings(
    receiver: Receiver, blob: SampleBlob, start_app: StartApp, tls: Tls, secured: bool
) -> None:
    """Also when the receiver already sleeps until much more has come than the closing frame."""
    server, available = Server(blob), {1, 5, 9}
    server.make = lambda layout, wanted: Pieces(layout, wanted, available=available)
    server.port = await start_app("POST", "/v1/streams", server.streams, ServerContext(tls) if secured else None)
    stream = receiver.open(server.port, stripe=1, stripes=4, tls=tls if secured else None)
    await receiver.until(lambda: receiver.received(stream) == [1, 5, 9])
    await asyncio.sleep(0.05)
    stream.share()
    server.outgoing[0].todo[1:] = []  # the next one is waited for
    available.add(13)
    server.outgoing[0].news.set()
    async with asyncio.timeout(10):
        assert (await receiver.closed(stream)).reason == "done"
    assert receiver.received(stream) == [1, 5, 9, 13]
