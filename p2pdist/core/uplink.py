"""The uplink of one host: which stream sends which block next.

Theory. A host feeds several children over one link. Left to TCP, the shares are unfair enough to
ruin a tree, so the sender schedules: the streams are flows of a fair queue by bytes given to the
kernel, starts before preseeds (fair_queue.py), with one block in flight, which is a piece or part
of a large one. A stream sends pieces in the order in which they were verified here, each once. HTTP
clients that read a range are flows, too: they say when they have a block to send.

A block that the kernel does not take for long (a child that is dead or has a full downlink)
stops counting against the blocks in flight, so it cannot hold up other flows. Nor do blocks of a
sluggish stream, whose blocks take much longer than the blocks of the quickest one: the child is
slow, or the path to it, and the uplink would idle for it. What such a stream could not take is not
made up for later: it would have the whole uplink then. Nor do a preseed's blocks count where a
start waits: its child gives way to other pulls, as this host does, and may be slow to take them.

The streams that are left when the quick ones have gone are not quick for that: how long a byte of a
closed stream took is forgotten slowly (FORGET_S). Else a stream that came then would wait for each
block of a slow child, as if this host's link were that slow. Of open streams the average of their
last blocks counts: a short block that an empty buffer takes at once says nothing about the link.

A child may wait for single pieces of a stripe (`Urgency`). A stream of its own asks for them, and
rides on the one that brings the child the stripe: this sends them before all else, over a
connection that is up to speed, and the child gets no more than its share. What a reader waits for
comes before what a reader is going to wait for, and of pieces alike the lowest that is here: of
many parts that a client asks for at once, the first is to be whole first. A rider sends by itself
what its carrier may not: what the child said it had, and everything once the carrier is gone.

Capacity is bytes taken by the kernel while some flow waited, over that time. When none waits, what
is in flight tells how fast the children are, not this host. The time spent waiting for the limit
counts, so the measured capacity of a limited host is its limit; the time in which preseeds wait for
theirs does not, since the link is free for other flows.

Invariants: a stream has at most one block in flight; a piece is offered only after `Verified`;
blocks of one piece are sent in order and without another piece of that stream in between; a stream
ends only when every piece that it lacked was sent. All times are in seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from msgspec import Struct

from p2pdist.core.fair_queue import FairQueue, Flow, TokenBucket
from p2pdist.core.stream_slots import Peer
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
"""Each time this has passed, twice as long for a byte as the quickest closed stream took counts as
quick."""


@dataclass(slots=True)
class BlockTimes:
    """How long the kernel takes the blocks of each flow, and which flows are sluggish."""

    _quickest_byte_s: float = 0.0
    """How long a byte of the quickest flow takes (`learn`)."""
    _left_byte_s: float = 0.0
    """How long it took with the quickest closed flow (`left`)."""
    _left_at: float = 0.0

    def learn(self, flow: Flow, byte_s: float, flows: Iterable[Flow], *, now: float) -> None:
        """Note that the kernel took `byte_s` for a byte of one of the `flows`."""
        flow.byte_s = byte_s if flow.byte_s == 0.0 else 0.75 * flow.byte_s + 0.25 * byte_s
        quickest = flow.byte_s
        for other in flows:  # for every block: no generator, and no call
            if 0.0 < other.byte_s < quickest:
                quickest = other.byte_s
        self._quickest_byte_s = min(quickest, self._remembered(now)) if self._left_byte_s else quickest

    def left(self, flow: Flow, *, now: float) -> None:
        """Note that a flow is closed; how long it took is remembered if it was quick."""
        if flow.byte_s:
            self._left_byte_s, self._left_at = min(flow.byte_s, self._remembered(now) or flow.byte_s), now

    def _remembered(self, now: float) -> float:
        return self._left_byte_s * 2 ** min(64.0, (now - self._left_at) / FORGET_S)

    def usual_s(self, length: int) -> float:
        """How long a block of so many bytes may take."""
        return min(STUCK_MAX_S, STUCK_TIMES * self._quickest_byte_s * length)

    def sluggish(self, flow: Flow, length: int) -> bool:
        """Whether blocks of so many bytes take much longer than the quickest stream's would."""
        return flow.byte_s > SLUGGISH_TIMES * self._quickest_byte_s and flow.byte_s * length > SLUGGISH_MIN_S


NOBODY = Peer()
"""The peer of a stream for which none is named."""

Urgency = Literal["waited for", "soon waited for", "none"]
"""Whether a reader at the child, or at a child of the child, waits for what a stream brings, or is
going to. The most urgent first."""

_URGENCIES: tuple[Urgency, ...] = ("waited for", "soon waited for", "none")


@dataclass(slots=True, eq=False)
class ServedBlob:
    """The verified pieces of one blob, and the streams that send them."""

    layout: PieceLayout
    block_size: int
    order: list[list[int]]
    """Per stripe the pieces in the order in which they verified."""
    verified: PieceSet
    streams: list[list[ChildStream]]
    """Per stripe the open streams."""
    limit: TokenBucket | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class ChildStream(Flow):
    """What a child is sent of one stripe: the pieces that verified here, cut into blocks. They come
    in the order in which they verified; those for which a reader waits, the lowest first."""

    served: ServedBlob
    stripe: int
    peer: Peer
    urgency: Urgency
    skip: PieceSet
    """The pieces that the child held when it asked, and others that it is not sent any more."""
    left: int
    """How many pieces the child lacks."""
    cursor: int = 0
    """How many of the stripe's verified pieces it has passed."""
    behind: int
    """How many verified pieces it had not passed when these were fewest."""
    length: int = 0
    """Bytes of the piece under way."""
    begun: PieceSet
    """The pieces that it has begun to send, or is about to."""
    due: list[int] = field(default_factory=list)
    """A heap of the verified pieces that it has passed and not begun; of an urgent stream alone."""
    riding: list[int] = field(default_factory=list)
    """A heap of those that its carrier is to send."""
    carrier: ChildStream | None = None
    riders: list[ChildStream] = field(default_factory=list)
    """Streams that ride on this one."""
    ended: bool = False

    def ride(self, others: Iterable[ChildStream]) -> None:
        """Have the newest of these that brings the same child the stripe carry what this one asks
        for."""
        for other in others:
            alike = other.peer == self.peer and other.queue is self.queue
            if alike and other.urgency == "none" and not other.ended:
                self.carrier = other
        if self.carrier is not None:
            self.carrier.riders.append(self)

    def dismount(self) -> None:
        """Ride no more: send what has not been begun."""
        if self.carrier is not None:
            self.carrier.riders.remove(self)
            self.carrier = None
            self.due = sorted(self.due + self.riding)
            self.riding = []

    def advance(self) -> bool:
        """Cut a block from the piece under way, or from the next verified piece that the child
        lacks; returns whether there is one."""
        if self.piece < 0:
            piece = self._next_of_riders() if self.riders else None
            piece = piece if piece is not None else self._next()
            if piece is None:
                return False
            self.begun.add(piece)
            self.piece, self.offset, self.length = piece, 0, self.served.layout.length(piece)
        self.block = min(self.served.block_size, self.length - self.offset)
        if self.own is not None and self.own.limit_bytes_s is not None:  # evenly, not a piece at a time
            self.block = min(self.block, max(BLOCK_MIN, int(PACED_BLOCK_S * self.own.limit_bytes_s)))
        return True

    def _next(self) -> int | None:
        """The next verified piece, by the order of this stream."""
        order, following = self.served.order[self.stripe], None
        while self.cursor < len(order) and following is None:
            piece = order[self.cursor]
            self.cursor += 1
            if piece in self.skip:
                continue
            if self.urgency == "none":
                following = piece
            elif self.carrier is not None and piece in self.carrier.begun:
                self._leave(piece)
            elif self.carrier is not None and piece not in self.carrier.skip:
                heapq.heappush(self.riding, piece)
            else:
                heapq.heappush(self.due, piece)
        self.behind = min(self.behind, len(order) - self.cursor)
        return heapq.heappop(self.due) if self.due else following

    def _next_of_riders(self) -> int | None:
        """The next piece for which a reader waits."""
        for rider in self.riders:
            own = rider._next()
            if own is not None:
                heapq.heappush(rider.due, own)
        while ready := [rider for rider in self.riders if rider.riding]:
            rider = min(ready, key=_by_urgency)
            piece = heapq.heappop(rider.riding)
            rider._leave(piece)
            if piece not in self.begun:
                self.skip.add(piece)
                return piece
        return None

    def lose(self, piece: int, index: int) -> None:
        """A verified piece, the one at this index of its stripe, is no more. What was sent already
        is not sent again over this stream: the child asks anew for what it dropped."""
        self.begun.discard(piece)
        if index < self.cursor:
            self.cursor -= 1
            if not self._forget(piece):
                self.skip.add(piece)

    def leave_out(self, piece: int) -> None:
        """Do not send a piece, unless that has begun."""
        order = self.served.order[self.stripe]
        passed = piece in self.served.verified and order.index(piece) < self.cursor
        if piece not in self.skip and (not passed or self._forget(piece)):
            self._leave(piece)

    def _leave(self, piece: int) -> None:
        self.skip.add(piece)
        self.left -= 1

    def _forget(self, piece: int) -> bool:
        """Take a piece that is not begun out of those that are due; returns whether it was one."""
        for heap in (self.due, self.riding):
            if piece in heap:
                heap.remove(piece)
                heapq.heapify(heap)
                return True
        return False

    def withdraw(self) -> None:
        """Do not begin with the piece that was to come next."""
        self.queue.waiting.remove(self)
        self.skip.discard(self.piece)  # it is sent once it has verified anew
        self.begun.discard(self.piece)
        self.block, self.piece = 0, -1

    def take_off(self) -> None:
        """Note that the block has been sent."""
        self.offset += self.block
        self.block = 0
        if self.offset >= self.length:
            self.piece = -1
            self.left -= 1


def _by_urgency(rider: ChildStream) -> tuple[int, int]:
    return _URGENCIES.index(rider.urgency), rider.riding[0]


PACED_MIN_BYTES_S = 4096.0
"""No stream is asked to be slower: its slot would be taken for good."""

PACED_BLOCK_S = 0.25
"""A block of a stream with a limit of its own takes so long by that."""

BLOCK_MIN = 32 << 10
BLOCK_MAX = 16 << 20
TIMED_MIN = 256 << 10
"""A shorter block of a range may fit the kernel's buffer, and taking it says nothing about the
path."""


def block_size_for(piece_size: int, blocks_per_piece: int) -> int:
    """Bytes of a block, between 32 KiB and 16 MiB: small enough for fair shares, large enough to be
    cheap."""
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
    """All blobs of one `limit` together are sent no faster than that; None: the limits of the host
    alone hold."""

    blob: Digest
    limit: TokenBucket | None


class Verified(Struct, frozen=True, gc=False):
    """A piece has verified, and may be sent."""

    blob: Digest
    piece: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Pieces that had verified are no more, as their list has changed; they verify anew."""

    blob: Digest
    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """The host no longer holds the blob; its streams must have been closed."""

    blob: Digest


@dataclass(frozen=True, slots=True)
class Opened:
    """A child asks for a stripe, or for the pieces of it for which readers wait; `have` is what it
    holds, or does not ask for. It is sent no more than `bytes_s`, 0 for no limit."""

    stream: int
    blob: Digest
    stripe: int
    have: PieceSet
    priority: Priority = "start"
    peer: Peer = NOBODY
    urgency: Urgency = "none"
    rides: bool = False
    """The child takes the pieces over its stream of the stripe as well."""
    bytes_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    """The reader of a range, known by this number from now on, has a block of `length` bytes to
    send. It is answered by a Send."""

    stream: int
    length: int


@dataclass(frozen=True, slots=True)
class Diverted:
    """Another stream brings these pieces to the child of this one."""

    stream: int
    pieces: tuple[int, ...]


class BlockSent(Struct, frozen=True, gc=False):
    """The kernel took the stream's block."""

    stream: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A stream or the reader of a range is gone."""

    stream: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Verified | BlockSent | Ready | Opened | Diverted | Closed | Held | Limited | Lost | Dropped | Tick


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
    """Schedules what one host sends."""

    blocks_in_flight: int = 1
    """How many blocks the kernel may be taking at once."""
    blocks_per_piece: int = 1
    """Pieces are cut into so many, within BLOCK_MIN and BLOCK_MAX."""
    stuck_min_s: float = 0.05
    """No block is stuck sooner."""
    limit_bytes_s: float | None = None
    """All blocks wait until this rate allows the next; see `wait_s`."""
    preseed_limit_bytes_s: float | None = None
    """Blocks of preseeds also wait for this rate."""
    sent_bytes: int = 0
    """What the kernel took while some flow waited, since the last sample (`take_sample`)."""
    busy_s: float = 0.0
    """Time in which some flow waited, since the last sample."""
    _blobs: dict[Digest, ServedBlob] = field(default_factory=dict)
    _flows: dict[int, Flow] = field(default_factory=dict)
    """Open streams and readers of ranges."""
    _queue: FairQueue = field(init=False)
    _flying: list[Flow] = field(default_factory=list)
    """The flows whose block the kernel is taking."""
    _times: BlockTimes = field(default_factory=BlockTimes)
    _busy_since: float | None = None
    """When busy time was accounted last, None while no flow waits (`_account`)."""

    def __post_init__(self) -> None:
        self._queue = FairQueue(self.limit_bytes_s, self.preseed_limit_bytes_s)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """What to do about an event, in this order."""
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
            case Diverted(number, pieces):
                self._divert(number, pieces, out)
            case Closed(number):
                self._close(number, now, out)
            case Held(blob, layout, stripes, have):
                self._hold(blob, layout, stripes, have)
            case Limited(blob, limit):
                self._limit(blob, limit)
            case Lost(blob, pieces):
                self._lose(blob, pieces, out)
            case Dropped(blob):
                self._blobs.pop(blob, None)
            case Tick():
                pass
        if self._queue.starts_waiting or self._queue.preseeds_waiting:
            self._serve(now, out)
        if self._busy_since is not None or self._queue.starts_waiting or self._queue.preseeds_waiting:
            self._account(now)
        return out

    def stripes(self, blob: Digest) -> int:
        """How many stripes a held blob has."""
        return len(self._blobs[blob].order)

    def stuck_s(self, now: float) -> dict[int, float]:
        """For how long the kernel has been taking the present block of each stream and range."""
        return {number: now - flow.since for number, flow in self._flows.items() if flow.in_flight}

    @property
    def streams(self) -> int:
        """Open streams and ranges."""
        return len(self._flows)

    @property
    def in_flight(self) -> int:
        """Streams and ranges whose block the kernel is taking."""
        return len(self._flying)

    @property
    def held_up(self) -> bool:
        """Whether a flow waits while the kernel takes a block."""
        return bool(self._flying and (self._queue.starts_waiting or self._queue.preseeds_waiting))

    def wait_s(self, now: float) -> float | None:
        """Seconds until the limits allow the next block, when a flow waits for that: a Tick is due
        then. None when none does."""
        if not self._queue.starts_waiting and not self._queue.preseeds_waiting:
            return None
        if ((soon := self._queue.free_at(preseeds=False)) is not None) and soon <= now:
            return None
        starts, all_kinds = self._in_the_way(now)
        free_at = self._queue.free_at(preseeds=all_kinds < self.blocks_in_flight)
        if free_at is None or now >= free_at or starts >= self.blocks_in_flight:
            return None
        return free_at - now

    def lead(self, blob: Digest, stripe: int) -> int:
        """By how many pieces of a stripe all children fell behind, each from where it came nearest;
        0 while no child receives the stripe from here. A reader of the origin waits while this is
        large: it would fill this host's downlink, where acknowledgements of what it sends would
        queue. A child that came late lacks what was read before, and is not waited for."""
        served = self._blobs.get(blob)
        if served is None or not served.streams[stripe]:
            return 0
        verified = len(served.order[stripe])
        return min(verified - stream.cursor - stream.behind for stream in served.streams[stripe])

    def take_sample(self, now: float) -> tuple[int, float]:
        """Bytes sent and seconds busy since the last sample."""
        self._account(now)
        sample = (self.sent_bytes, self.busy_s)
        self.sent_bytes, self.busy_s = 0, 0.0
        return sample

    def _hold(self, blob: Digest, layout: PieceLayout, stripes: int, have: PieceSet) -> None:
        if blob in self._blobs:
            return
        order = [
            [piece for piece in range(stripe, layout.count, stripes) if piece in have] for stripe in range(stripes)
        ]
        verified = PieceSet(have.count, have.bits)
        self._blobs[blob] = ServedBlob(
            layout, block_size_for(layout.piece_size, self.blocks_per_piece), order, verified, [[] for _ in order]
        )

    def _limit(self, blob: Digest, limit: TokenBucket | None) -> None:
        if (served := self._blobs.get(blob)) is not None:
            served.limit = limit
            for stream in chain(*served.streams):
                stream.limit = limit

    def _lose(self, blob: Digest, pieces: tuple[int, ...], out: list[Command]) -> None:
        served = self._blobs.get(blob)
        for piece in pieces if served is not None else ():
            assert served is not None
            if piece in served.verified:
                served.verified.discard(piece)
                stripe = piece % len(served.order)
                index = served.order[stripe].index(piece)
                del served.order[stripe][index]
                for stream in served.streams[stripe]:
                    stream.lose(piece, index)
                    if stream.piece == piece and not stream.offset and not stream.in_flight:
                        stream.withdraw()
                        self._wait(stream, out)

    def _verified(self, blob: Digest, piece: int, out: list[Command]) -> None:
        served = self._blobs.get(blob)
        if served is None or not served.verified.add(piece):
            return
        stripe = piece % len(served.order)
        served.order[stripe].append(piece)
        for stream in served.streams[stripe]:
            self._wait(stream, out)

    def _open(self, event: Opened, out: list[Command]) -> None:
        served = self._blobs[event.blob]
        lacks = len(event.have.missing(event.stripe, len(served.order)))
        queue = self._queue.queue(event.priority)
        behind = len(served.order[event.stripe])
        stream = ChildStream(
            event.stream,
            queue,
            served=served,
            stripe=event.stripe,
            peer=event.peer,
            urgency=event.urgency,
            skip=event.have,
            left=lacks,
            behind=behind,
            begun=PieceSet(served.layout.count),
        )
        stream.limit, stream.own = served.limit, _own_limit(event)
        if event.rides:
            stream.ride(served.streams[event.stripe])
        self._flows[event.stream] = stream
        served.streams[event.stripe].append(stream)
        self._wait(stream, out)

    def _divert(self, number: int, pieces: tuple[int, ...], out: list[Command]) -> None:
        stream = self._flows.get(number)
        if isinstance(stream, ChildStream):
            for piece in pieces:
                stream.leave_out(piece)
            self._wait(stream, out)

    def _ready(self, number: int, length: int) -> None:
        flow = self._flows.get(number)
        if flow is None:
            flow = self._flows[number] = Flow(number, self._queue.queue("start"))
        assert not flow.block, "a range has one block at a time"
        flow.block = length
        flow.queue.enter(flow)

    def _close(self, number: int, now: float, out: list[Command]) -> None:
        flow = self._flows.pop(number, None)
        if flow is None:
            return
        self._times.left(flow, now=now)
        if flow.in_flight:
            self._flying.remove(flow)
        elif flow.block:
            flow.queue.waiting.remove(flow)
        if isinstance(flow, ChildStream):
            flow.ended = True
            flow.served.streams[flow.stripe].remove(flow)
            flow.dismount()
            for rider in flow.riders[:]:
                rider.dismount()
                self._wait(rider, out)

    def _wait(self, stream: ChildStream, out: list[Command]) -> None:
        """Queue a stream that has a block ready; end one that has been given everything."""
        if stream.ended or stream.block:
            return
        if stream.advance():
            stream.queue.enter(stream)
        elif stream.left == 0:
            stream.ended = True
            out.append(End(stream.number))
        if stream.riders:
            self._end_riders(stream, out)

    def _end_riders(self, stream: ChildStream, out: list[Command]) -> None:
        for rider in stream.riders[:]:
            self._wait(rider, out)
            if rider.ended:
                rider.dismount()

    def _sent(self, number: int, now: float, out: list[Command]) -> None:
        flow = self._flows.get(number)
        if flow is None or not flow.in_flight:
            return
        flow.in_flight = False
        self._flying.remove(flow)
        length = flow.block
        if isinstance(flow, ChildStream) or length >= TIMED_MIN:
            self._times.learn(flow, (now - flow.since) / length, self._flows.values(), now=now)
        if self._busy_since is not None:
            self.sent_bytes += length
        flow.virtual += length
        if not isinstance(flow, ChildStream):
            flow.block = 0
            return
        flow.take_off()
        if flow.advance():
            if flow.riders:
                self._end_riders(flow, out)
            if self._times.sluggish(flow, length):
                flow.queue.enter(flow)
            else:
                # It has waited all along, so it keeps its start tag.
                flow.queue.waiting.append(flow)
        else:
            self._wait(flow, out)

    def _serve(self, now: float, out: list[Command]) -> None:
        queue = self._queue
        while queue.starts_waiting or queue.preseeds_waiting:
            starts, all_kinds = self._in_the_way(now) if self._flying else (0, 0)
            if starts >= self.blocks_in_flight:
                return
            flow = queue.next_flow(now, preseeds=all_kinds < self.blocks_in_flight)
            if flow is None:
                return
            self._flying.append(flow)
            flow.in_flight, flow.since = True, now
            out.append(Send(flow.number, flow.piece, flow.offset, flow.block))

    def _in_the_way(self, now: float) -> tuple[int, int]:
        """How many blocks in flight hold up starts, and how many hold up preseeds."""
        starts = preseeds = 0
        for flow in self._flying:
            flying_s = now - flow.since
            usual = flying_s < self.stuck_min_s or flying_s < self._times.usual_s(flow.block)
            if usual and not self._times.sluggish(flow, flow.block):
                if flow.queue.urgent:
                    starts += 1
                else:
                    preseeds += 1
        return starts, starts + preseeds

    def _account(self, now: float) -> None:
        if self._busy_since is not None:
            self.busy_s += now - self._busy_since
        self._busy_since = now if self._queue.busy(now) else None


def _own_limit(opened: Opened) -> TokenBucket | None:
    """The limit of a stream that the child asked for."""
    return TokenBucket(max(PACED_MIN_BYTES_S, opened.bytes_s)) if opened.bytes_s else None
