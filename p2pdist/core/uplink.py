"""The uplink of one host: which stream sends which block next.

Theory. A host feeds several children over one link. Left to TCP, the shares are unfair enough to
ruin a tree, so the sender schedules: streams take turns by bytes given to the kernel, those that
somebody waits for before preseeds (turn_order.py), few blocks in flight. Within a stream pieces go
out in the order in which they were verified here, each once. HTTP clients that read a range take
turns like streams: they say when they have a block to send.

A block that the kernel does not take for long (a child that is dead or whose downlink is full)
stops counting against the blocks in flight, so it cannot hold up the others. Nor do blocks of a
stream that is known to be sluggish (block_times.py): it is the child, or the path to it, that is
slow, and its turns would be lost to the others. What such a stream could not take is not made up
for later: it would have every turn then. Nor do a preseed's where somebody waits: its child gives
way to other pulls, as this host does, and may be slow to take it.

Invariants: a stream has at most one block in flight; a piece is offered only after `Verified`;
blocks of one piece are sent in order and without another piece of that stream in between; a stream
ends only when every piece that it lacked was sent.

Capacity is bytes taken by the kernel while some stream waited for its turn, over that time. When
nobody waits, what is in flight tells how fast the children are, not this host. The time spent
waiting for the limit counts, so the measured capacity of a limited host is its limit; but not that
in which preseeds wait for theirs, since the link is free for others.

How long the kernel takes the blocks of each stream, and which streams are sluggish beside the
quickest.

Those that are left when the quick ones have gone are not quick for that: what a stream took that
was closed is forgotten slowly (FORGET_S). Else whoever came then would wait for each block of a
slow child, as if this host's link were that slow. Of open ones what counts is what their last
blocks took on average: a short one that an empty buffer takes at once says nothing about the link.

What a child is sent of one stripe: the pieces that verified here, in that order, cut into
blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from msgspec import Struct

from p2pdist.core.fair_queue import Claim, TurnOrder
from p2pdist.core.token_bucket import Bucket
from p2pdist.model.digest import Digest
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import PieceLayout, PieceSet

STUCK_TIMES = 4
STUCK_MAX_S = 1.0
SLUGGISH_TIMES = 5
SLUGGISH_MIN_S = 0.01
"""A block is stuck, and a stream sluggish, when it takes so many times as long as the quickest
stream's blocks, and at least so long; whatever these take, a block is stuck after STUCK_MAX_S."""

FORGET_S = 1.0
"""After so long twice the time of a stream that is gone counts as quick."""


@dataclass(slots=True)
class BlockTimes:
    """See the module's text. Times are in seconds."""

    _quickest_byte_s: float = 0.0
    _left_byte_s: float = 0.0
    _left_at: float = 0.0

    def learn(self, claim: Claim, byte_s: float, claims: Iterable[Claim], *, now: float) -> None:
        """The kernel took `byte_s` for a byte of this one of the `claims`."""
        claim.byte_s = byte_s if claim.byte_s == 0.0 else 0.75 * claim.byte_s + 0.25 * byte_s
        quickest = claim.byte_s
        for each in claims:  # for every block: no generator, and no call
            if 0.0 < each.byte_s < quickest:
                quickest = each.byte_s
        self._quickest_byte_s = min(quickest, self._remembered(now)) if self._left_byte_s else quickest

    def left(self, claim: Claim, *, now: float) -> None:
        """This one is gone. What it took is remembered if it was quick."""
        if claim.byte_s:
            self._left_byte_s, self._left_at = min(claim.byte_s, self._remembered(now) or claim.byte_s), now

    def _remembered(self, now: float) -> float:
        return self._left_byte_s * 2 ** min(64.0, (now - self._left_at) / FORGET_S)

    def usual_s(self, length: int) -> float:
        """How long a block of so many bytes may take."""
        return min(STUCK_MAX_S, STUCK_TIMES * self._quickest_byte_s * length)

    def sluggish(self, claim: Claim, length: int) -> bool:
        """Whether blocks of so many bytes take much longer than the quickest stream's would."""
        return claim.byte_s > SLUGGISH_TIMES * self._quickest_byte_s and claim.byte_s * length > SLUGGISH_MIN_S


@dataclass(slots=True, eq=False)
class Feed:
    """Verified pieces of one blob, per stripe in the order in which they verified."""

    layout: PieceLayout
    block_size: int
    order: list[list[int]]
    known: PieceSet
    streams: list[list[ChildStream]]
    limit: Bucket | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class ChildStream(Claim):
    """`cursor`: how many of the verified pieces it has passed; `behind`: of how many it was short
    when it was short of fewest."""

    feed: Feed
    stripe: int
    skip: PieceSet
    left: int
    cursor: int = 0
    behind: int
    length: int = 0
    ended: bool = False

    def advance(self) -> bool:
        """Whether a block is ready: cuts one from the piece under way, or from the next verified
        one that the child lacks."""
        feed = self.feed
        if self.piece < 0:
            order = feed.order[self.stripe]
            while self.cursor < len(order):
                piece = order[self.cursor]
                self.cursor += 1
                if piece not in self.skip:
                    self.piece, self.offset, self.length = piece, 0, feed.layout.length(piece)
                    break
            self.behind = min(self.behind, len(order) - self.cursor)
            if self.piece < 0:
                return False
        self.block = min(feed.block_size, self.length - self.offset)
        return True

    def take_off(self) -> None:
        """The block has been sent."""
        self.offset += self.block
        self.block = 0
        if self.offset >= self.length:
            self.piece = -1
            self.left -= 1


BLOCK_MIN = 32 << 10
BLOCK_MAX = 16 << 20
TIMED_MIN = 256 << 10
"""A shorter block of a range may fit the kernel's buffer, and taking it says nothing about the
path."""


def block_size_for(piece_size: int, blocks_per_piece: int) -> int:
    """Bytes of a block, between 32 KiB and 16 MiB. Small enough that turns are fair, large enough
    to be cheap."""
    return max(BLOCK_MIN, min(BLOCK_MAX, piece_size // blocks_per_piece))


# -- events; a Struct costs a tenth of a frozen dataclass, and some come with every block


@dataclass(frozen=True, slots=True)
class Held:
    """The host holds or receives this blob; `have` are the pieces that verified so far."""

    blob: Digest
    layout: PieceLayout
    stripes: int
    have: PieceSet


@dataclass(frozen=True, slots=True)
class Limited:
    """All blobs of one `limit` together are sent no faster than that; None for no limit but those
    that hold for all."""

    blob: Digest
    limit: Bucket | None


class Verified(Struct, frozen=True, gc=False):
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
    priority: Priority = "start"


@dataclass(frozen=True, slots=True)
class Ready:
    """The reader of a range, known by this number from now on, has a block of `length` bytes to
    send. It is answered by a Send."""

    stream: int
    length: int


class BlockSent(Struct, frozen=True, gc=False):
    """The kernel took the stream's block."""

    stream: int


@dataclass(frozen=True, slots=True)
class Closed:
    stream: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = Verified | BlockSent | Ready | Opened | Closed | Held | Limited | Dropped | Tick


# -- commands


class Send(Struct, frozen=True, gc=False):
    """Give the kernel `length` bytes of a piece, starting at `offset` in it; `piece` is -1 for the
    block of a range."""

    stream: int
    piece: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class End:
    """Everything that the child lacked was sent."""

    stream: int


Command = Send | End


@dataclass(slots=True)
class Uplink:
    """See the module's text. `blocks_in_flight` is how many blocks the kernel may be taking at
    once; pieces are cut into `blocks_per_piece` blocks within the limits of a block. With
    `limit_bytes_s` all blocks, with `preseed_limit_bytes_s` those of preseeds wait until that rate
    allows the next: see `wait_s`."""

    blocks_in_flight: int = 1
    blocks_per_piece: int = 1
    stuck_min_s: float = 0.05
    limit_bytes_s: float | None = None
    preseed_limit_bytes_s: float | None = None
    sent_bytes: int = 0
    busy_s: float = 0.0
    _feeds: dict[Digest, Feed] = field(default_factory=dict)
    _claims: dict[int, Claim] = field(default_factory=dict)
    _order: TurnOrder = field(init=False)
    _flying: list[Claim] = field(default_factory=list)
    _times: BlockTimes = field(default_factory=BlockTimes)
    _busy_since: float | None = None

    def __post_init__(self) -> None:
        self._order = TurnOrder(self.limit_bytes_s, self.preseed_limit_bytes_s)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        out: list[Command] = []
        match event:
            case BlockSent(number):
                self._sent(number, now, out)
            case Verified(blob, piece):
                self._verified(blob, piece, out)
            case Ready(number, length):
                self._ready(number, length)
            case Opened():
                self._open(event, out)
            case Closed(number):
                self._close(number, now)
            case Held(blob, layout, stripes, have):
                self._hold(blob, layout, stripes, have)
            case Limited(blob, limit):
                self._limit(blob, limit)
            case Dropped(blob):
                self._feeds.pop(blob, None)
            case Tick():
                pass
        if self._order.starts_waiting or self._order.preseeds_waiting:
            self._give_turns(now, out)
        if self._busy_since is not None or self._order.starts_waiting or self._order.preseeds_waiting:
            self._account(now)
        return out

    @property
    def streams(self) -> int:
        """Open streams and ranges."""
        return len(self._claims)

    @property
    def in_flight(self) -> int:
        """Streams and ranges whose block the kernel is taking."""
        return len(self._flying)

    @property
    def held_up(self) -> bool:
        """Whether somebody waits for his turn while the kernel takes a block."""
        return bool(self._flying and (self._order.starts_waiting or self._order.preseeds_waiting))

    def wait_s(self, now: float) -> float | None:
        """Seconds until the limits allow the next block, when that is what somebody waits for: a
        Tick is due then."""
        if not self._order.starts_waiting and not self._order.preseeds_waiting:
            return None
        if ((soon := self._order.free_at(preseeds=False)) is not None) and soon <= now:
            return None
        starts, all_kinds = self._in_the_way(now)
        free_at = self._order.free_at(preseeds=all_kinds < self.blocks_in_flight)
        if free_at is None or now >= free_at or starts >= self.blocks_in_flight:
            return None
        return free_at - now

    def lead(self, blob: Digest, stripe: int) -> int:
        """By how many pieces of a stripe all children fell behind, each from where it came nearest;
        0 while nobody receives the stripe from here. Who reads the origin waits while this is
        large: that would fill this host's downlink, where acknowledgements of what it sends would
        queue. A child that came late lacks what was read before, and is not waited for."""
        feed = self._feeds.get(blob)
        if feed is None or not feed.streams[stripe]:
            return 0
        verified = len(feed.order[stripe])
        return min(verified - stream.cursor - stream.behind for stream in feed.streams[stripe])

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
        self._feeds[blob] = Feed(
            layout, block_size_for(layout.piece_size, self.blocks_per_piece), order, known, [[] for _ in order]
        )

    def _limit(self, blob: Digest, limit: Bucket | None) -> None:
        if (feed := self._feeds.get(blob)) is not None:
            feed.limit = limit
            for stream in chain(*feed.streams):
                stream.limit = limit

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
        lacks = len(event.have.missing(event.stripe, len(feed.order)))
        queue = self._order.queue(event.priority)
        behind = len(feed.order[event.stripe])
        stream = ChildStream(
            event.stream, queue, feed=feed, stripe=event.stripe, skip=event.have, left=lacks, behind=behind
        )
        stream.limit = feed.limit
        self._claims[event.stream] = stream
        feed.streams[event.stripe].append(stream)
        self._wait(stream, out)

    def _ready(self, number: int, length: int) -> None:
        claim = self._claims.get(number)
        if claim is None:
            claim = self._claims[number] = Claim(number, self._order.queue("start"))
        assert not claim.block, "a range has one block at a time"
        claim.block = length
        claim.queue.enter(claim)

    def _close(self, number: int, now: float) -> None:
        claim = self._claims.pop(number, None)
        if claim is None:
            return
        self._times.left(claim, now=now)
        if claim.in_flight:
            self._flying.remove(claim)
        elif claim.block:
            claim.queue.waiting.remove(claim)
        if isinstance(claim, ChildStream):
            claim.ended = True
            claim.feed.streams[claim.stripe].remove(claim)

    def _wait(self, stream: ChildStream, out: list[Command]) -> None:
        """Queue a stream that has a block ready; end one that has been given everything."""
        if stream.ended or stream.block:
            return
        if stream.advance():
            stream.queue.enter(stream)
        elif stream.left == 0:
            stream.ended = True
            out.append(End(stream.number))

    def _sent(self, number: int, now: float, out: list[Command]) -> None:
        claim = self._claims.get(number)
        if claim is None or not claim.in_flight:
            return
        claim.in_flight = False
        self._flying.remove(claim)
        length = claim.block
        if isinstance(claim, ChildStream) or length >= TIMED_MIN:
            self._times.learn(claim, (now - claim.since) / length, self._claims.values(), now=now)
        if self._busy_since is not None:
            self.sent_bytes += length
        claim.virtual += length
        if not isinstance(claim, ChildStream):
            claim.block = 0
            return
        claim.take_off()
        if claim.advance():
            if self._times.sluggish(claim, length):
                claim.queue.enter(claim)
            else:
                # It has waited all along, and is not moved to the present virtual time.
                claim.queue.waiting.append(claim)
        else:
            self._wait(claim, out)

    def _give_turns(self, now: float, out: list[Command]) -> None:
        order = self._order
        while order.starts_waiting or order.preseeds_waiting:
            starts, all_kinds = self._in_the_way(now) if self._flying else (0, 0)
            if starts >= self.blocks_in_flight:
                return
            claim = order.take(now, preseeds=all_kinds < self.blocks_in_flight)
            if claim is None:
                return
            self._flying.append(claim)
            claim.in_flight, claim.since = True, now
            out.append(Send(claim.number, claim.piece, claim.offset, claim.block))

    def _in_the_way(self, now: float) -> tuple[int, int]:
        """Blocks in flight that keep streams which somebody waits for from theirs, and those that
        keep preseeds from theirs."""
        starts = preseeds = 0
        for claim in self._flying:
            flying_s = now - claim.since
            usual = flying_s < self.stuck_min_s or flying_s < self._times.usual_s(claim.block)
            if usual and not self._times.sluggish(claim, claim.block):
                if claim.queue.urgent:
                    starts += 1
                else:
                    preseeds += 1
        return starts, starts + preseeds

    def _account(self, now: float) -> None:
        if self._busy_since is not None:
            self.busy_s += now - self._busy_since
        self._busy_since = now if self._order.busy(now) else None
