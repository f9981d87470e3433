"""Joins the uplink core with what it feeds: each stream, and each reader of a range, waits here for
its turn."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable

from p2pdist.core.token_bucket import TokenBucket
from p2pdist.core.uplink import (
    BlockSent,
    Closed,
    Dropped,
    End,
    Event,
    Held,
    Limited,
    Opened,
    Ready,
    Send,
    Tick,
    Uplink,
    Verified,
)
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, Unavailable
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.transfer.stream.server import Block

TICK_S = 0.1
STREAMS_MAX = 256
"""Streams served at once, and as many readers of ranges."""

AT_ONCE_BYTES = 1 << 20
"""Bytes that are given to sockets before the loop serves others."""

LEAD_MAX = 4
"""Pieces of a stripe that a reader of the origin may be ahead of this host's children, those that
it is reading included. More at once, after a pause, would fill this host's downlink, and keep the
stripe that comes from a peer out of it."""

LEAD_WAIT_S = 0.75
"""How long it waits for them: children that take nothing must not keep a stripe from this host and
from everybody else."""


class Turn:
    """One outgoing stream (see Outgoing in transfer/stream/server.py)."""

    def __init__(self, turns: Turns, number: int) -> None:
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._number = number
        self._failure: P2PDistError | None = None
        self._given: deque[Block | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._send: Callable[[Block], bool] | None = None

    def at_once(self, send: Callable[[Block], bool] | None) -> None:
        """See Outgoing."""
        self._send = send

    def give(self, block: Block | None, *, at_once: bool = False) -> bool:
        """Whether the block was sent, which is tried if it may be sent at once; else somebody waits
        for it, and now no longer."""
        waits = self._waiter is not None and not self._waiter.done()
        if (
            at_once
            and waits
            and block is not None
            and self._send is not None
            and self._failure is None
            and self._send(block)
        ):
            return True
        self._given.append(block)
        self._wake()
        return False

    def fail(self, error: P2PDistError) -> None:
        """End the stream as truncated, whatever was given and not yet taken."""
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_block(self) -> Block | None:
        while not self._given and self._failure is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure
        return self._given.popleft()

    def block_sent(self, length: int) -> None:
        self._turns.sent_bytes_total += length
        self._turns.submit(BlockSent(self._number))

    def close(self) -> None:
        self._turns.close(self._number)


class RangeTurn(Turn):
    """One reader of a range (see Turn in transfer/stream/ranges.py)."""

    async def wait(self, length: int) -> None:
        self._turns.submit(Ready(self._number, length))
        await self.next_block()

    def block_sent(self, length: int) -> None:
        self._turns.submit(BlockSent(self._number))


class Turns:
    """The uplink of this host, with `limit_bytes_s` never faster than that, for preseeds never
    faster than `preseed_limit_bytes_s`. All methods are called on the event loop."""

    def __init__(self, *, limit_bytes_s: float | None = None, preseed_limit_bytes_s: float | None = None) -> None:
        self.sent_bytes_total = 0
        self.limit_of: Callable[[Digest], TokenBucket | None] = lambda blob: None
        self._core = Uplink(limit_bytes_s=limit_bytes_s, preseed_limit_bytes_s=preseed_limit_bytes_s)
        self._turns: dict[int, Turn] = {}
        self._blobs: dict[int, Digest] = {}
        self._numbers = itertools.count(1)
        self._moved: asyncio.Future[None] | None = None
        self._reading: Counter[tuple[Digest, int]] = Counter()
        self._emptied: asyncio.Future[None] | None = None
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def streams(self) -> int:
        return len(self._blobs)

    @property
    def open_count(self) -> int:
        """Streams and readers of ranges."""
        return len(self._turns)

    async def idle(self) -> None:
        """Return once there is neither stream nor reader."""
        while self._turns:
            if self._emptied is None:
                self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._emptied])

    def held(self, blob: Digest, layout: PieceLayout, stripes: int, have: PieceSet) -> None:
        """The blob can be served from now on, as far as it is there."""
        self.submit(Held(blob, layout, stripes, have))
        self.relimit(blob)

    def relimit(self, blob: Digest) -> None:
        """`limit_of`, which says what limit a blob shares with others, may say otherwise now."""
        self.submit(Limited(blob, self.limit_of(blob)))

    def verified(self, blob: Digest, piece: int) -> None:
        self.submit(Verified(blob, piece))

    def dropped(self, blob: Digest) -> None:
        """The blob is served no more; its streams end, and its children turn elsewhere."""
        ended = [self._turns[number] for number, each in self._blobs.items() if each == blob]
        self._end(ended, f"{blob} is served here no more")
        self.submit(Dropped(blob))

    def stop(self) -> None:
        """The agent stops: all streams end, and all ranges."""
        self._end(list(self._turns.values()), "the agent stops")
        if self._ticking is not None:
            self._ticking.cancel()

    def _end(self, turns: list[Turn], why: str) -> None:
        for turn in turns:
            turn.fail(Unavailable(why))
            turn.close()

    def open(self, blob: Digest, stripe: int, have: PieceSet, priority: Priority = "start") -> Turn:
        """Let a child take turns; `close` the result when its connection ends. Raises Unavailable
        over STREAMS_MAX streams."""
        if len(self._blobs) >= STREAMS_MAX:
            raise Unavailable(f"this agent serves {STREAMS_MAX} streams already", remedy="Try another peer")
        number = next(self._numbers)
        turn = self._turns[number] = Turn(self, number)
        self._blobs[number] = blob
        self.submit(Opened(number, blob, stripe, have, priority))
        return turn

    def open_range(self) -> RangeTurn:
        """Let the reader of a range take turns; `close` the result in the end. Raises Unavailable
        over STREAMS_MAX of them."""
        if len(self._turns) - len(self._blobs) >= STREAMS_MAX:
            raise Unavailable(f"this agent answers {STREAMS_MAX} readers already", remedy="Try another peer")
        number = next(self._numbers)
        turn = self._turns[number] = RangeTurn(self, number)
        return turn

    def close(self, number: int) -> None:
        self._blobs.pop(number, None)
        if self._turns.pop(number, None) is not None:
            self.submit(Closed(number))
        if not self._turns and self._emptied is not None:
            self._emptied.set_result(None)
            self._emptied = None

    @contextlib.asynccontextmanager
    async def reading(self, blob: Digest, stripe: int) -> AsyncIterator[None]:
        """Read a piece of a stripe from the origin within: begins once this host's children are not
        far behind what it has and reads, or after LEAD_WAIT_S."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LEAD_WAIT_S
        while (lead := self._core.lead(blob, stripe)) and lead + self._reading[blob, stripe] > LEAD_MAX:
            if loop.time() >= deadline:
                break
            if self._moved is None:
                self._moved = loop.create_future()
            await asyncio.wait([self._moved], timeout=deadline - loop.time())
        self._reading[blob, stripe] += 1
        try:
            yield
        finally:
            self._reading[blob, stripe] -= 1
            if not self._reading[blob, stripe]:
                del self._reading[blob, stripe]
            self._move()

    def _move(self) -> None:
        """Have those look again who wait to read."""
        if self._moved is not None:
            self._moved.set_result(None)
            self._moved = None

    def take_sample(self) -> tuple[int, float]:
        """Bytes sent and seconds in which data was waiting, since the last sample."""
        return self._core.take_sample(time.monotonic())

    def submit(self, event: Event) -> None:
        events, sent_bytes = deque((event,)), 0
        while events:
            event = events.popleft()
            now = (
                time.monotonic()
            )  # the loop's own time stands still within a turn of uvloop, and has milliseconds only
            if self._moved is not None and isinstance(event, BlockSent | Closed | Opened):
                self._move()
            for command in self._core.handle(event, now=now):
                turn = self._turns.get(command.stream)
                if turn is None:
                    continue
                match command:
                    case Send(number, piece, offset, length):
                        if turn.give(Block(piece, offset, length), at_once=sent_bytes < AT_ONCE_BYTES):
                            sent_bytes += length
                            events.append(BlockSent(number))
                    case End():
                        turn.give(None)
        self.sent_bytes_total += sent_bytes
        self._tick_later(now)

    def _tick_later(self, now: float) -> None:
        """Look again when the limits allow more, and now and then while somebody waits for a block
        in flight."""
        wait_s = self._core.wait_s(now)
        if wait_s is None and (self._ticking is not None or not self._core.held_up):
            return
        if self._ticking is not None:
            self._ticking.cancel()
        # Rounded up: uvloop counts in milliseconds, and a timer that comes too early comes again
        # and again. Never later than TICK_S: a block that goes into flight meanwhile may get stuck.
        delay_s = TICK_S if wait_s is None else min(TICK_S, math.ceil(wait_s * 1000) / 1000)
        self._ticking = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        """Look whether the block in flight is stuck and the others should go on."""
        self._ticking = None
        self.submit(Tick())
