"""Streams waiting for their turn: they end when they must, and hold nobody up."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from waits import until

from p2pdist.agent.uplink import AT_ONCE_BYTES, LEAD_MAX, LEAD_WAIT_S, Uplink
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Unavailable
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.transfer.stream.server import Block

BLOB, OTHER = digest_of(b"blob"), digest_of(b"other")
PIECE = 64 << 10
LAYOUT = PieceLayout(15 * PIECE, PIECE)


async def test_a_stream_ends_although_a_block_was_given_to_it_just_before() -> None:
    """A block that nobody has taken yet must not let the stream wait for a next one that never
    comes."""
    uplink = Uplink()
    uplink.held(BLOB, LAYOUT, 1, PieceSet.full(15))
    flow = uplink.open(BLOB, 0, PieceSet(15))
    uplink.dropped(BLOB)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(flow.next_block(), 60)
    assert uplink.streams == 0


async def test_all_streams_end_when_the_agent_stops() -> None:
    uplink = Uplink()
    uplink.held(BLOB, LAYOUT, 1, PieceSet(15))
    waiting = [asyncio.create_task(uplink.open(BLOB, 0, PieceSet(15)).next_block()) for _ in range(3)]
    await asyncio.sleep(0)
    uplink.stop()
    done, pending = await asyncio.wait(waiting, timeout=60)
    assert not pending and all(isinstance(task.exception(), Unavailable) for task in done)


async def test_a_child_that_takes_nothing_does_not_stop_the_reader_of_the_origin() -> None:
    uplink = Uplink()
    uplink.held(BLOB, LAYOUT, 1, PieceSet(15))
    uplink.open(BLOB, 0, PieceSet(15))
    for piece in range(LEAD_MAX + 3):
        uplink.verified(BLOB, piece)
    started = asyncio.get_running_loop().time()
    async with asyncio.timeout(60), uplink.reading(BLOB, 0):
        assert asyncio.get_running_loop().time() - started >= LEAD_WAIT_S / 2, "but it waits for a while"


async def test_what_is_being_read_from_the_origin_counts_as_ahead_of_the_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else all readers begin at once when the children have caught up a little, and the link is
    full of one stripe."""
    monkeypatch.setattr("p2pdist.agent.uplink.LEAD_WAIT_S", 3600.0)
    uplink = Uplink()
    uplink.held(BLOB, LAYOUT, 1, PieceSet(15))
    child, begun = uplink.open(BLOB, 0, PieceSet(15)), 0
    for piece in range(LEAD_MAX):  # the first is given to the child at once
        uplink.verified(BLOB, piece)

    async def read() -> None:
        nonlocal begun
        async with uplink.reading(BLOB, 0):
            begun += 1
            await asyncio.Event().wait()

    reads = [asyncio.create_task(read()) for _ in range(4)]
    await until(lambda: begun == 2)
    await asyncio.sleep(0.01)
    assert begun == 2, "so many may be ahead"
    block = await child.next_block()
    assert block is not None
    child.block_sent(block.length)
    await until(lambda: begun == 3)
    await asyncio.sleep(0.01)
    assert begun == 3, "one for each that the child took"
    for each in reads:
        each.cancel()
    await asyncio.gather(*reads, return_exceptions=True)


async def test_without_children_nothing_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdist.agent.uplink.LEAD_WAIT_S", 3600.0)
    uplink = Uplink()
    uplink.held(BLOB, LAYOUT, 1, PieceSet(15))
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as reads:
        for piece in range(2 * LEAD_MAX):
            await reads.enter_async_context(uplink.reading(BLOB, 0))
            uplink.verified(BLOB, piece)


async def test_a_limited_uplink_keeps_to_its_limit_and_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight streams whose kernels take everything at once: 120 pieces at 400 a second. No other
    tick helps the limit on."""
    monkeypatch.setattr("p2pdist.agent.uplink.TICK_S", 3600.0)
    uplink = Uplink(limit_bytes_s=400 * PIECE)
    uplink.held(BLOB, LAYOUT, 1, PieceSet.full(15))
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def child() -> int:
        flow, taken = uplink.open(BLOB, 0, PieceSet(15)), 0
        while (block := await flow.next_block()) is not None:
            taken += block.length
            flow.block_sent(block.length)
        flow.close()
        return taken

    async with asyncio.timeout(60):
        assert await asyncio.gather(*(child() for _ in range(8))) == [15 * PIECE] * 8
    assert loop.time() - began > 118 / 400 - 0.03
    uplink.stop()


async def test_blocks_that_the_socket_takes_at_once_need_nobody_to_be_woken() -> None:
    uplink = Uplink()
    uplink.held(BLOB, LAYOUT, 1, PieceSet(15))
    flow = uplink.open(BLOB, 0, PieceSet(15))
    waiting = asyncio.create_task(flow.next_block())
    await asyncio.sleep(0)
    taken: list[int] = []

    def send(block: Block) -> bool:
        taken.append(block.piece)
        return block.piece != 2

    flow.at_once(send)
    for piece in range(4):
        uplink.verified(BLOB, piece)
    assert taken == [0, 1, 2] and uplink.sent_bytes_total == 2 * PIECE, "one that is not taken whole holds up the next"
    assert await waiting == Block(2, 0, PIECE)
    flow.block_sent(PIECE)
    assert await flow.next_block() == Block(3, 0, PIECE), "nobody waited when it was given"
    flow.at_once(None)
    flow.block_sent(PIECE)
    waiting = asyncio.create_task(flow.next_block())
    await asyncio.sleep(0)
    uplink.verified(BLOB, 4)
    assert await waiting == Block(4, 0, PIECE) and taken == [0, 1, 2]
    flow.close()


async def test_a_socket_that_takes_everything_does_not_keep_the_loop() -> None:
    count = 3 * AT_ONCE_BYTES // PIECE
    uplink = Uplink()
    uplink.held(BLOB, PieceLayout(count * PIECE, PIECE), 1, PieceSet(count))
    flow = uplink.open(BLOB, 0, PieceSet(count))
    waiting = asyncio.create_task(flow.next_block())
    await asyncio.sleep(0)
    flow.at_once(lambda block: True)
    uplink.held(OTHER, PieceLayout(count * PIECE, PIECE), 1, PieceSet.full(count))
    other = uplink.open(OTHER, 0, PieceSet(count))
    for piece in range(count):
        uplink.verified(BLOB, piece)
    at_once = uplink.sent_bytes_total
    assert await asyncio.wait_for(other.next_block(), 60) == Block(0, 0, PIECE)
    other.close()
    assert uplink.sent_bytes_total - at_once >= PIECE, "what waited for the other goes now"
    assert uplink.sent_bytes_total - at_once <= AT_ONCE_BYTES
    assert await asyncio.wait_for(waiting, 60) is not None
    flow.close()
