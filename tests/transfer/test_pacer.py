"""Holding streams back as the downlink decides: after each piece, and no obstacle to closing
one."""

from __future__ import annotations

import asyncio
import threading

from stream_rig import Receiver, SampleBlob, Server
from waits import until

from p2pdist.model.messages import Priority
from p2pdist.transfer.pacer import Pacer

FOR_EVER_S = 3600.0


class Book:
    """A downlink that notes who received how much, and lets everybody pause `pause_s`, then as long
    as `held` says."""

    def __init__(self, pause_s: float = 0.0, held: list[float] | None = None) -> None:
        self.received_bytes: list[tuple[Priority, int]] = []
        self.times: list[float] = []
        self.pause_s, self.held = pause_s, held or []

    def received(self, priority: Priority, length: int, now: float) -> float:
        self.received_bytes.append((priority, length))
        self.times.append(now)
        return self.pause_s

    def held_s(self, priority: Priority, now: float) -> float:
        return self.held.pop(0) if self.held else 0.0


async def test_every_piece_is_told_with_its_priority(receiver: Receiver, server: Server, blob: SampleBlob) -> None:
    """The last one too, after which nobody pauses."""
    book = Book()
    pacer = Pacer(book, clock=lambda: 7.0)
    streams = [receiver.open(server.port, stripe=stripe, stripes=2, pacer=pacer) for stripe in (0, 1)]
    for stream in streams:
        assert (await receiver.closed(stream)).reason == "done"
    assert sum(length for _, length in book.received_bytes) == len(blob.data)
    assert {priority for priority, _ in book.received_bytes} == {"start"}
    assert set(book.times) == {7.0}


async def test_a_stream_that_is_held_reads_no_further(receiver: Receiver, server: Server) -> None:
    stream = receiver.open(server.port, pacer=Pacer(Book(FOR_EVER_S)))
    await receiver.until(lambda: receiver.received(stream) == [0])
    await until(lambda: stream.held_back)
    await asyncio.sleep(0.1)
    assert receiver.received(stream) == [0]
    stream.close()
    assert (await receiver.closed(stream)).reason == "closed"


async def test_it_goes_on_when_it_is_held_no_longer(receiver: Receiver, server: Server, blob: SampleBlob) -> None:
    stream = receiver.open(server.port, pacer=Pacer(Book(0.001, [0.001, 0.001])))
    assert (await receiver.closed(stream)).reason == "done"
    assert not stream.held_back
    assert receiver.copy.path.read_bytes() == blob.data


async def test_a_stream_that_is_held_takes_the_piece_under_way_and_ends(receiver: Receiver, server: Server) -> None:
    """It is asked to end after that piece: holding it back longer would only keep what replaces it
    waiting."""
    stream = receiver.open(server.port, pacer=Pacer(Book(FOR_EVER_S)))
    await receiver.until(lambda: receiver.received(stream) == [0])
    await until(lambda: stream.receiving == 1)
    stream.finish_piece_and_close()
    assert (await receiver.closed(stream)).reason == "closed"
    assert receiver.received(stream) == [0, 1]


async def test_on_the_event_loop_one_pauses_until_it_may_go_on_or_is_woken() -> None:
    book, woken = Book(held=[0.001, 0.001]), asyncio.Event()
    await asyncio.wait_for(Pacer(book).sleep("preseed", 0.001, woken), 60)
    assert not book.held
    sleeping = asyncio.create_task(Pacer(book).sleep("preseed", FOR_EVER_S, woken))
    await asyncio.sleep(0.05)
    assert not sleeping.done()
    woken.set()
    await asyncio.wait_for(sleeping, 60)


def test_a_pause_of_nothing_costs_nothing() -> None:
    """Not even a look at what may have woken it."""
    woken = threading.Event()
    Pacer(Book(held=[FOR_EVER_S])).wait("start", 0.0, woken)
    woken.set()
    Pacer(Book(held=[FOR_EVER_S])).wait("start", FOR_EVER_S, woken)
