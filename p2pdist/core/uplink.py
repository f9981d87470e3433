"""The uplink of one host: which stream sends which block next.

Theory. A host feeds several children over one link. Left to TCP, the shares are unfair enough to ruin a tree, so the sender
schedules: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over streams by bytes given to the kernel, few blocks in
flight. A stream that becomes active starts at the current virtual time, so it can neither claim the past nor be starved. Within a
stream pieces go out in the order in which they were verified here, each once.

A block that the kernel does not take for long (a child that is dead or whose downlink is full) stops counting against the blocks
in flight, so it cannot hold up the others. Nor do blocks of a stream that is known to be sluggish: the kernel takes them many times slower
than the quickest stream's, so it is the child, or the path to it, that is slow, and its turns would be lost to the others.

Invariants: a stream has at most one block in flight; a piece is offered only after `Verified`; blocks of one piece are sent in
order and without another piece of that stream in between; a stream ends only when every piece that it lacked was sent.

A limit is a bucket of tokens that may owe: a block goes out once all before it are paid for. The time spent waiting for it is time in
which somebody waited, so the measured capacity of a limited host is its limit.

Capacity is bytes taken by the kernel while some stream waited for its turn, over that time. When nobody waits, what is in flight tells how
fast the children are, not this host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from p2pdist.model.digest import Digest
from p2pdist.model.pieces import PieceLayout, PieceSet

BLOCK_MIN = 32 << 10
BLOCK_MAX = 16 << 20
BURST_S = 0.02
"""Under a limit: how much of it, unused a moment ago, may be caught up, so that late timers cost nothing."""
STUCK_TIMES = 4
STUCK_MAX_S = 1.0
SLUGGISH_TIMES = 5
SLUGGISH_MIN_S = 0.01
"""A block is stuck, and a stream sluggish, when it takes so many times as long as the quickest stream's blocks, and at least so long;
whatever these take, a block is stuck after STUCK_MAX_S."""


def block_size_for(piece_size: int, blocks_per_piece: int) -> int:
    """Bytes of a block, between 32 KiB and 16 MiB. Small enough that turns are fair, large enough to be cheap."""
    return max(BLOCK_MIN, min(BLOCK_MAX, piece_size // blocks_per_piece))


# -- events


@dataclass(frozen=True, slots=True)
class Held:
    """The host holds or receives this blob; `have` are the pieces that verified so far."""

    blob: Digest
    layout: PieceLayout
    stripes: int
    have: PieceSet


@dataclass(frozen=True, slots=True)
class Verified:
    blob: Digest
    piece: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The host no longer holds the blob; its streams must have been closed."""

    blob: Digest


@dataclass(frozen=True, slots=True)
class Opened:
    """A child asks for a stripe; `have` is what it holds."""

    stream: int
    blob: Digest
    stripe: int
    have: PieceSet


@dataclass(frozen=True, slots=True)
class BlockSent:
    """The kernel took the stream's block."""

    stream: int


@dataclass(frozen=True, slots=True)
class Closed:
    stream: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = Verified | BlockSent | Opened | Closed | Held | Dropped | Tick


# -- commands


@dataclass(frozen=True, slots=True)
class Send:
    """Give the kernel `length` bytes of a piece, starting at `offset` in it."""

    stream: int
    piece: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class End:
    """Everything that the child lacked was sent."""

    stream: int


Command = Send | End


@dataclass(slots=True, eq=False)
class _Feed:
    """Verified pieces of one blob, per stripe in the order in which they verified."""

    layout: PieceLayout
    block_size: int
    order: list[list[int]]
    known: PieceSet
    streams: list[list[_Stream]]


@dataclass(slots=True, eq=False)
class _Stream:
    number: int
    feed: _Feed
    stripe: int
    skip: PieceSet
    left: int
    cursor: int = 0
    virtual: float = 0.0
    active: bool = False
    piece: int = -1
    offset: int = 0
    length: int = 0
    since: float = 0.0
    in_flight: bool = False
    ended: bool = False
    byte_s: float = 0.0

    def advance(self) -> bool:
        """Whether a block is ready: takes the next verified piece that the child lacks."""
        if self.piece >= 0:
            return True
        order = self.feed.order[self.stripe]
        while self.cursor < len(order):
            piece = order[self.cursor]
            self.cursor += 1
            if piece not in self.skip:
                self.piece, self.offset, self.length = piece, 0, self.feed.layout.length(piece)
                return True
        return False


@dataclass(slots=True)
class Uplink:
    """See the module's text. `blocks_in_flight` is how many blocks the kernel may be taking at once; pieces are cut into
    `blocks_per_piece` blocks within the limits of a block. With `limit_bytes_s` blocks wait until that rate allows the next: see
    `wait_s`."""

    blocks_in_flight: int = 1
    blocks_per_piece: int = 1
    stuck_min_s: float = 0.05
    limit_bytes_s: float | None = None
    sent_bytes: int = 0
    busy_s: float = 0.0
    _feeds: dict[Digest, _Feed] = field(default_factory=dict)
    _streams: dict[int, _Stream] = field(default_factory=dict)
    _waiting: list[_Stream] = field(default_factory=list)
    _flying: list[_Stream] = field(default_factory=list)
    _virtual: float = 0.0
    _quickest_byte_s: float = 0.0
    _busy_since: float | None = None
    _free_at: float = -math.inf

    def handle(self, event: Event, *, now: float) -> list[Command]:
        out: list[Command] = []
        match event:
            case BlockSent(number):
                self._sent(number, now, out)
            case Verified(blob, piece):
                self._verified(blob, piece, out)
            case Opened():
                self._open(event, out)
            case Closed(number):
                self._close(number)
            case Held(blob, layout, stripes, have):
                self._hold(blob, layout, stripes, have)
            case Dropped(blob):
                self._feeds.pop(blob, None)
            case Tick():
                pass
        if self._waiting:
            self._give_turns(now, out)
        self._account(now)
        return out

    @property
    def streams(self) -> int:
        """Open streams."""
        return len(self._streams)

    @property
    def in_flight(self) -> int:
        """Streams whose block the kernel is taking."""
        return len(self._flying)

    def wait_s(self, now: float) -> float | None:
        """Seconds until the limit allows the next block, when that is what somebody waits for: a Tick is due then."""
        if not self._waiting or now >= self._free_at or not self._may_send(now):
            return None
        return self._free_at - now

    def lead(self, blob: Digest, stripe: int) -> int:
        """Verified pieces of a stripe that no child has been given yet; 0 while nobody receives the stripe from here.

        A reader of the origin waits while this is large: reading further ahead helps nobody and fills this host's downlink, where
        the acknowledgements of what it sends would queue.
        """
        feed = self._feeds.get(blob)
        if feed is None or not feed.streams[stripe]:
            return 0
        return len(feed.order[stripe]) - max(stream.cursor for stream in feed.streams[stripe])

    def take_sample(self, now: float) -> tuple[int, float]:
        """Bytes sent and seconds busy since the last sample."""
        self._account(now)
        sample = (self.sent_bytes, self.busy_s)
        self.sent_bytes, self.busy_s = 0, 0.0
        return sample

    def _hold(self, blob: Digest, layout: PieceLayout, stripes: int, have: PieceSet) -> None:
        if blob in self._feeds:
            return
        order = [
            [piece for piece in range(stripe, layout.count, stripes) if piece in have] for stripe in range(stripes)
        ]
        known = PieceSet(have.count, have.bits)
        self._feeds[blob] = _Feed(
            layout, block_size_for(layout.piece_size, self.blocks_per_piece), order, known, [[] for _ in order]
        )

    def _verified(self, blob: Digest, piece: int, out: list[Command]) -> None:
        feed = self._feeds.get(blob)
        if feed is None or not feed.known.add(piece):
            return
        stripe = piece % len(feed.order)
        feed.order[stripe].append(piece)
        for stream in feed.streams[stripe]:
            self._wait(stream, out)

    def _open(self, event: Opened, out: list[Command]) -> None:
        feed = self._feeds[event.blob]
        lacks = sum(1 for piece in range(event.stripe, feed.layout.count, len(feed.order)) if piece not in event.have)
        stream = _Stream(event.stream, feed, event.stripe, event.have, lacks)
        self._streams[event.stream] = stream
        feed.streams[event.stripe].append(stream)
        self._wait(stream, out)

    def _close(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        stream.ended = True
        stream.feed.streams[stream.stripe].remove(stream)
        if stream.in_flight:
            self._flying.remove(stream)
        if stream.active and not stream.in_flight:
            self._waiting.remove(stream)

    def _wait(self, stream: _Stream, out: list[Command]) -> None:
        """Queue a stream that has a block ready; end one that has been given everything."""
        if stream.ended or stream.in_flight or stream.active:
            return
        if stream.advance():
            stream.active = True
            stream.virtual = max(stream.virtual, self._virtual)
            self._waiting.append(stream)
        elif stream.left == 0:
            stream.ended = True
            out.append(End(stream.number))

    def _sent(self, number: int, now: float, out: list[Command]) -> None:
        stream = self._streams.get(number)
        if stream is None or not stream.in_flight:
            return
        stream.in_flight = False
        self._flying.remove(stream)
        length = min(stream.feed.block_size, stream.length - stream.offset)
        self._time(stream, (now - stream.since) / length)
        if self._busy_since is not None:
            self.sent_bytes += length
        stream.virtual += length
        stream.offset += length
        if stream.offset >= stream.length:
            stream.piece = -1
            stream.left -= 1
        if stream.advance():
            self._waiting.append(stream)
        else:
            stream.active = False
            self._wait(stream, out)

    def _give_turns(self, now: float, out: list[Command]) -> None:
        while self._waiting and now >= self._free_at and self._may_send(now):
            stream = min(self._waiting, key=_by_progress) if len(self._waiting) > 1 else self._waiting[0]
            self._waiting.remove(stream)
            self._flying.append(stream)
            stream.in_flight, stream.since = True, now
            self._virtual = max(self._virtual, stream.virtual)
            length = min(stream.feed.block_size, stream.length - stream.offset)
            if self.limit_bytes_s is not None:
                self._free_at = max(self._free_at, now - BURST_S) + length / self.limit_bytes_s
            out.append(Send(stream.number, stream.piece, stream.offset, length))

    def _time(self, stream: _Stream, byte_s: float) -> None:
        """Learn how long the kernel takes a byte of this stream, and of the quickest one."""
        stream.byte_s = byte_s if stream.byte_s == 0.0 else 0.75 * stream.byte_s + 0.25 * byte_s
        self._quickest_byte_s = min((each.byte_s for each in self._streams.values() if each.byte_s), default=0.0)

    def _may_send(self, now: float) -> bool:
        counted = 0
        for stream in self._flying:
            length = min(stream.feed.block_size, stream.length - stream.offset)
            usual_s = max(self.stuck_min_s, min(STUCK_MAX_S, STUCK_TIMES * self._quickest_byte_s * length))
            sluggish = (
                stream.byte_s > SLUGGISH_TIMES * self._quickest_byte_s and stream.byte_s * length > SLUGGISH_MIN_S
            )
            counted += not sluggish and now - stream.since < usual_s
        return counted < self.blocks_in_flight

    def _account(self, now: float) -> None:
        if self._busy_since is not None:
            self.busy_s += now - self._busy_since
        self._busy_since = now if self._waiting else None


def _by_progress(stream: _Stream) -> tuple[float, int]:
    return stream.virtual, stream.number
