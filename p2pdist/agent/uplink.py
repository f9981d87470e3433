"""The uplink of an agent: the streams and readers of ranges that share it, as flows of the uplink
core, which decides which child's block is next.

A flow whose socket has room gets its block at once, from within the event that made the block
available. A task is woken only for what the socket did not take.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence

from p2pdist.core.fair_queue import TokenBucket
from p2pdist.core.stream_slots import Displace, Peer, StreamSlots
from p2pdist.core.uplink import (
    NOBODY,
    BlockSent,
    Closed,
    Diverted,
    Dropped,
    End,
    Event,
    Held,
    Limited,
    Lost,
    Opened,
    Ready,
    Send,
    Tick,
    Urgency,
    Verified,
)
from p2pdist.core.uplink import Uplink as UplinkCore
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, Unavailable
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.transfer.stream.server import Block

logger = logging.getLogger(__name__)

TICK_S = 0.1
STREAMS_MAX = 256
"""Streams served at once, and as many readers of ranges, where the process may have enough files
open."""


AT_ONCE_BYTES = 1 << 20
"""Bytes that one event gives to sockets before the loop runs other tasks."""

LEAD_MAX = 4
"""Pieces of a stripe that this host may read from the origin ahead of its children, pieces being
read included. More at once, after a pause, would fill its downlink and delay the stripes that come
from peers."""

LEAD_WAIT_S = 0.75
"""How long it waits for them: children that take nothing must not keep a stripe from this host and
from all others."""

READERS_MAX = 64
"""Readers of samples, each a session with a tracker."""


class Flow:
    """One outgoing stream of the uplink (an Outgoing of transfer/stream/server.py)."""

    def __init__(self, uplink: Uplink, number: int, cut: Callable[[], None] | None = None) -> None:
        self.cut = cut
        """Breaks the connection, although a block is on its way."""
        self._uplink = uplink
        self._loop = asyncio.get_running_loop()
        self._number = number
        self._failure: P2PDistError | None = None
        """Why the stream ends as truncated; set by `fail`."""
        self._given: deque[Block | None] = deque()
        """Blocks that the core gave and `next_block` has not taken; None is the end."""
        self._waiter: asyncio.Future[None] | None = None
        """What `next_block` waits for."""
        self._send: Callable[[Block], bool] | None = None
        """Sends a block that the socket takes whole; set by `at_once`."""

    def at_once(self, send: Callable[[Block], bool] | None) -> None:
        """Try `send` for blocks while `next_block` waits; it returns whether the socket took the
        block."""
        self._send = send

    def give(self, block: Block | None, *, at_once: bool = False) -> bool:
        """Give the stream its next block, None for the end. With `at_once` the block goes straight
        to the socket if that takes it; returns whether it did."""
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
        """Wait for the next block; None at the end of the stream. Raises what `fail` was given."""
        while not self._given and self._failure is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure
        return self._given.popleft()

    def block_sent(self, length: int) -> None:
        """The block that `next_block` returned is in the socket."""
        self._uplink.sent_bytes_total += length
        self._uplink.submit(BlockSent(self._number))

    def close(self) -> None:
        """Leave the uplink."""
        self._uplink.close(self._number)


class RangeFlow(Flow):
    """One reader of a range of the uplink (a ReaderFlow of transfer/stream/ranges.py)."""

    async def wait(self, length: int) -> None:
        """Wait until so many bytes may be sent."""
        self._uplink.submit(Ready(self._number, length))
        await self.next_block()

    def block_sent(self, length: int) -> None:
        """So many bytes are in the socket."""
        self._uplink.submit(BlockSent(self._number))


class Uplink:
    """The uplink of this host, with `limit_bytes_s` never faster than that, for preseeds never
    faster than `preseed_limit_bytes_s`, and `streams_max` streams at once. All methods are called
    on the event loop."""

    def __init__(
        self,
        *,
        limit_bytes_s: float | None = None,
        preseed_limit_bytes_s: float | None = None,
        streams_max: int = STREAMS_MAX,
    ) -> None:
        self.sent_bytes_total = 0
        """Bytes of all streams so far."""
        self._core = UplinkCore(limit_bytes_s=limit_bytes_s, preseed_limit_bytes_s=preseed_limit_bytes_s)
        self._slots, self._range_slots = StreamSlots(streams_max), StreamSlots(streams_max)
        self._samples: dict[str, tuple[int, float]] = {}
        """By reader, what was sent since it took its last sample, and in how many seconds."""
        self._flows: dict[int, Flow] = {}
        """Streams and readers of ranges, by number."""
        self._streams: dict[int, tuple[Digest, int, Peer]] = {}
        """Blob, stripe and peer of each stream; readers of ranges are not in it."""
        self._numbers = itertools.count(1)
        self._moved: asyncio.Future[None] | None = None
        """What `reading` waits for: a child has received, or a read has ended."""
        self._reading: Counter[tuple[Digest, int]] = Counter()
        """Pieces of each blob and stripe that are being read from the origin."""
        self._emptied: asyncio.Future[None] | None = None
        """What `idle` waits for."""
        self._ticking: asyncio.TimerHandle | None = None
        """The next tick of the core."""

    @property
    def streams(self) -> int:
        """The number of open streams."""
        return len(self._streams)

    @property
    def open_count(self) -> int:
        """The number of open streams and readers of ranges."""
        return len(self._flows)

    async def idle(self) -> None:
        """Wait until no stream or reader is open."""
        while self._flows:
            if self._emptied is None:
                self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._emptied])

    def held(self, blob: Digest, layout: PieceLayout, stripes: int, have: PieceSet) -> None:
        """Serve the pieces of a blob that are in `have`, and later pieces as they are verified."""
        self.submit(Held(blob, layout, stripes, have))

    def feeds(self, blob: Digest) -> bool:
        """Whether other hosts receive a blob from here."""
        return any(other == blob for other, _, _ in self._streams.values())

    def limit(self, blob: Digest, bucket: TokenBucket | None) -> None:
        """The streams of a held blob share `bucket` from now on, which other blobs may share as
        well; None for no limit but those of the host."""
        self.submit(Limited(blob, bucket))

    def verified(self, blob: Digest, piece: int) -> None:
        """A piece of a held blob may be served from now on."""
        self.submit(Verified(blob, piece))

    def lost(self, blob: Digest, pieces: Sequence[int]) -> None:
        """Pieces of a held blob turned out to be wrong: they are served no more until they verify
        again. A child that is being sent one finds out by itself."""
        self.submit(Lost(blob, tuple(pieces)))

    def dropped(self, blob: Digest) -> None:
        """Stop serving a blob: its streams end, and its children receive from other hosts."""
        ended = [self._flows[number] for number, (other, _, _) in self._streams.items() if other == blob]
        self._end(ended, f"{blob} is served here no more")
        self.submit(Dropped(blob))

    def stop(self) -> None:
        """The agent stops: all streams end, and all ranges."""
        self._end(list(self._flows.values()), "the agent stops")
        if self._ticking is not None:
            self._ticking.cancel()

    def _end(self, flows: list[Flow], why: str) -> None:
        for flow in flows:
            flow.fail(Unavailable(why))
            flow.close()

    def open(
        self,
        blob: Digest,
        stripe: int,
        have: PieceSet,
        priority: Priority = "start",
        *,
        peer: Peer = NOBODY,
        cut: Callable[[], None] | None = None,
        urgency: Urgency = "none",
        rides: bool = False,
        bytes_s: float = 0.0,
    ) -> Flow:
        """Open a stream to a child, of no more than `bytes_s` (0: no limit); the caller closes it
        when the connection ends. `cut` breaks its connection. What is urgent the peer's other
        streams of the stripe leave out, unless this one `rides` on them. Raises Unavailable when
        `peer` finds no slot (core/stream_slots.py)."""
        self._make_room(self._slots, peer, "streams")
        number = next(self._numbers)
        flow = self._flows[number] = Flow(self, number, cut)
        if (
            urgency != "none" and not rides and self._core.stripes(blob) > 1
        ):  # else the length of a response may have been said
            brought = tuple(have.missing(stripe, self._core.stripes(blob)))
            for other in [other for other, key in self._streams.items() if key == (blob, stripe, peer)]:
                self.submit(Diverted(other, brought))
        self._streams[number] = blob, stripe, peer
        self._slots.opened(number, peer)
        self.submit(Opened(number, blob, stripe, have, priority, peer, urgency, rides, bytes_s))
        return flow

    def open_range(self, *, peer: Peer = NOBODY, cut: Callable[[], None] | None = None) -> RangeFlow:
        """Open a flow for the reader of a range; the caller closes it in the end. `cut` breaks its
        connection. Raises Unavailable when `peer` finds no slot."""
        self._make_room(self._range_slots, peer, "readers")
        number = next(self._numbers)
        flow = self._flows[number] = RangeFlow(self, number, cut)
        self._range_slots.opened(number, peer)
        return flow

    def _make_room(self, slots: StreamSlots, peer: Peer, what: str) -> None:
        """Raises Unavailable when `peer` finds no slot."""
        match slots.room(peer, self._core.stuck_s(time.monotonic())):
            case Displace(number):
                flow = self._flows[number]
                logger.debug("flow %d is not read and ends: %s needs its slot", number, peer.address)
                flow.fail(Unavailable("another peer needs the slot of a stream that is not read"))
                flow.close()
                if flow.cut is not None:
                    flow.cut()
            case False:
                raise Unavailable(f"this agent serves as many {what} as it may", remedy="Try another peer")

    def close(self, number: int) -> None:
        """Close a flow."""
        self._streams.pop(number, None)
        self._slots.closed(number)
        self._range_slots.closed(number)
        if self._flows.pop(number, None) is not None:
            self.submit(Closed(number))
        if not self._flows and self._emptied is not None:
            self._emptied.set_result(None)
            self._emptied = None

    @contextlib.asynccontextmanager
    async def reading(self, blob: Digest, stripe: int, lead_max: int = LEAD_MAX) -> AsyncIterator[None]:
        """Read a piece of a stripe from the origin within: begins once this host's children are no
        more than `lead_max` pieces behind what it has and reads, or after LEAD_WAIT_S."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LEAD_WAIT_S
        while (lead := self._core.lead(blob, stripe)) and lead + self._reading[blob, stripe] > lead_max:
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
        """Wake the readers of the origin that wait in `reading`."""
        if self._moved is not None:
            self._moved.set_result(None)
            self._moved = None

    def take_sample(self, reader: str = "") -> tuple[int, float]:
        """Bytes sent, and seconds in which data waited to be sent, since the last sample that this
        reader took. Of READERS_MAX readers the one that was the first forgets its sample."""
        sent_bytes, busy_s = self._core.take_sample(time.monotonic())
        self._samples.setdefault(reader, (0, 0.0))
        if len(self._samples) > READERS_MAX:
            del self._samples[next(iter(self._samples))]
        if sent_bytes or busy_s:
            self._samples = {name: (sent + sent_bytes, busy + busy_s) for name, (sent, busy) in self._samples.items()}
        taken, self._samples[reader] = self._samples.get(reader, (0, 0.0)), (0, 0.0)
        return taken

    def submit(self, event: Event) -> None:
        """Pass an event to the core, and its blocks to the flows."""
        events, sent_bytes = deque((event,)), 0
        while events:
            event = events.popleft()
            # The loop's own time stands still within an iteration of uvloop, in whole milliseconds.
            now = time.monotonic()
            if self._moved is not None and isinstance(event, BlockSent | Closed | Opened):
                self._move()
            for command in self._core.handle(event, now=now):
                flow = self._flows.get(command.stream)
                if flow is None:
                    continue
                match command:
                    case Send(number, piece, offset, length):
                        if flow.give(Block(piece, offset, length), at_once=sent_bytes < AT_ONCE_BYTES):
                            sent_bytes += length
                            events.append(BlockSent(number))
                    case End():
                        flow.give(None)
        self.sent_bytes_total += sent_bytes
        self._tick_later(now)

    def _tick_later(self, now: float) -> None:
        """Schedule the next tick: when the limits allow more, and at the latest after TICK_S while
        a stream waits for a block in flight."""
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
        """Have the core check whether the block in flight is stuck and other flows should go on."""
        self._ticking = None
        self.submit(Tick())
