"""The stripes of one blob at one host: which source each comes from, what to do when one fails,
when the blob is complete and when its pull is hopeless.

Theory. The tracker names a parent and alternates for every stripe (`Planned`), and one stream per
stripe is open at a time. A stripe is in one of three states:

    Waiting -> Receiving     its time has come, the download is not paused, and a source may be
                             tried: OpenStream
    Receiving -> Waiting     the stream ended, or was closed for another source or a pause
    either -> Complete       its last piece was stored

A stream that fails is complained of and replaced by the next usable alternate at once; the tracker
answers with a better plan when it can. A stripe that stands still while its stream is open is
complained of after STALL_FIRST_S, or after several times as long as its pieces took of late, and
then with pauses that double until a piece arrives from any source; over a slow link a piece may
take long, and over a long path the first one of a stream. Only the tracker can tell a slow parent
from a starved one, so the host leaves the tracker's choice by itself only while no tracker answers.
An alternate is the host's own choice, perhaps a host that receives through this one by now, and is
left as soon as it stands still. A plan that names a source which failed this host a moment ago is
answered with a complaint, or the tracker would wait for what never comes.

A source that has given nothing yet and is silent is no starved parent: an agent responds at once,
and says when it has nothing to send (`Quiet`). It is complained of as stalled as soon as its
silence lasts longer than is usual (sources.py), and left at once where there is another source to
try. One that trickles is silent, too. Long before that, a host that has no piece of the blob from
any source says so (`Starved`): its sources may be hosts that claim pieces and have none. It says so
of a source that waits itself, too: the tracker knows whether that one claims to have pieces.

While no tracker answers, the host chooses by itself (`Candidates` in sources.py): it tries the
tracker's last choices and the superpeers of its zone, and reads the origin when it is a superpeer
and the sources before it failed. What stands still then is held against no source: where one host
stands still so do all that receive through it.

A stripe that gets far fewer pieces than another over SLOW_WINDOW_S is complained of as slow, again
with growing pauses; that changes nothing here, and lets the tracker look closer. While the download
is paused another transport brings the pieces and no stream is opened.

A stripe stands still much earlier than that by the measure of its own pull: once nothing has come
for a few times as long as its pieces, and the gaps between pieces of all stripes, took so far. The
next piece is then asked for from another choice of the tracker as well, beside the stream that
stands still (a hedge; Dean and Barroso, "The Tail at Scale", CACM 2013), and the source that gives
it first brings the stripe. Hedges are few, so little comes twice. Where they bring nothing either
and the whole pull stands still, the host says so (`Starved`): what its sources claim may be false.

Where the host's site may import nothing now (Plan.held), what it lacks may not come for hours, and
no source is at fault: the stripes whose parent is taken away end after the piece under way, nothing
is complained of, and the pull is not given up. A stripe that crosses a WAN with a limit
(StripePlan.bytes_s) is given the time that this takes.

A reader may wait for single pieces (`Wanted`). Streams of their own bring these, beside the stream
of the stripe, which may bring them again. Nothing is complained of for them: the stripe's own
stream finds out what is wrong with a source. A stream that this host itself holds back
(`HeldBack`), as it does with preseeds while starts receive, stands still and is not complained of
either.

Where the blob has a vouched piece list (vouched/whole.py) a piece may have to wait for its hash
(`Awaiting`): its source is neither slow nor silent meanwhile. Pieces that turn out to be listed
otherwise are lost and come again, and the download is complete only when its owner says that the
whole matches (`WholeMatches`). Bytes from the origin that do not match the list are stated to the
tracker, and say nothing of the origin.

Invariants: a piece counts once; a source that sent wrong bytes is not opened again while it is
avoided; no stream is opened for a complete stripe; exactly one of Completed and GaveUp is given,
and nothing after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log2
from typing import Literal

from msgspec import Struct

from p2pdist.core.origin_seeding import Readers
from p2pdist.core.sources import Candidates, Sources
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable
from p2pdist.model.messages import DEMAND_PIECES_MAX, Reason
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan

STALL_FIRST_S, STALL_MAX_S = 0.6, 30.0
STALL_PACES = 4.0
STALL_TURNS, FILL_TURNS = 3.0, 12.0
"""Where pieces are large a stripe stands still between two of them, while the other stripes have
their turns at the downlink (PieceLayout.turn_s). It may do so for STALL_TURNS turns as long as they
took of late, and before its first piece, which comes through a tree of some depth, for FILL_TURNS,
but not longer than for STALL_TURNS turns on a slow link."""

STILL_MIN_S, STILL_PACES, STILL_GAPS = 0.15, 4.0, 2.0
"""A stripe stands still that got nothing for so many times as long as its pieces take, and as the
longest gap of late between two pieces of any stripe, and for STILL_MIN_S."""

GAP_FADES = 0.98
"""With each piece the longest gap counts for less."""

STILL_PIECES = 3
"""Pieces of a stripe that show how long one takes."""

STARVED_STILLS = 1.1
"""A host that has pieces says that it gets no more after so many times as long."""

HEDGES_LEAST, HEDGES_SHARE = 4, 1 / 64
"""A hedge brings one piece; a pull has so many, or this share of its pieces."""

INITIAL_WINDOW_BYTES = 10 * 1448
"""What TCP sends in the first round trip of a connection (RFC 6928); it doubles in each."""

COMES_MIN_S = 0.2
COMES_PACES = 3.0
"""A stream that is replaced may finish the piece under way, unless it has been quiet for
COMES_MIN_S and for several times as long as a piece takes."""

SLOW_WINDOW_S = 0.5
SLOW_SHARE = 0.4
SLOW_PIECES = 8
"""A stripe is slow that gets less than this share of what the best one got in a window, when that
got at least so many pieces."""

MOVING_BYTES_S = 4096.0
"""A stream that has given no piece yet is silent while bytes come more slowly than that."""

STALE_S = 0.5
STALE_MAX = 3
"""A source that sent what was listed before is tried again after so long, up to so often: it has
not heard yet."""

DENIED_S = 1.0
DENIALS_MAX = 10
"""A source that asks for another ticket is tried again after so long, and is complained of from
this number of denials in a row on: a ticket that has just expired is no fault of the source."""

STARVED_MAX = 2
"""So often a stripe's sources are said to starve this host, before it has a piece of the blob."""

REOPEN_S = 0.05
TROUBLE_S = 2.0
"""The user is told why a source failed once nothing has come for so long."""

WANTED_S = 2.0
"""A wanted piece that has not come for so long is requested from the next source as well."""

PROMISE_MIN_S = 0.25
PROMISE_PACES = 4.0
"""A wanted piece that its source has sent over the stream of the stripe is not requested again for
so long, and as long as so many pieces of the stripe take."""

DEMANDS_MAX = 4
"""Streams at once that bring wanted pieces of one stripe."""

PREFETCHES_MAX = 2
"""Streams beside these that bring pieces of one stripe for which a reader is going to wait."""

ORIGIN_CORRUPT_MAX = 3
"""The pull is given up after so many wrong pieces from the origin."""

# -- events


class PieceStored(Struct, frozen=True, gc=False):
    """A piece from `stream` verified and is on disk."""

    stream: int
    piece: int


@dataclass(frozen=True, slots=True)
class Planned:
    """The tracker has planned, or the agent has in its place."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Wanted:
    """A reader waits for these pieces, or with `prefetch` is going to. It is said again until they
    are stored, or no reader waits for them."""

    pieces: tuple[int, ...]
    prefetch: bool = False


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream has let go of the file. `reason` is "done" (the source gave everything it was asked
    for), "closed" (as commanded), "failed" (this host's own disk or bug: `error` says which),
    "denied" (the source does not take this host's ticket) or why the source failed; `piece` is the
    one that was wrong."""

    stream: int
    reason: Reason | str
    piece: int | None = None
    error: P2PDistError | None = None


@dataclass(frozen=True, slots=True)
class Quiet:
    """A stream has given no piece so far: whether the source has responded, how many bytes have
    come over the connection, whether the source said that it had none to send, and how long its
    response and the connection took (None: not known)."""

    stream: int
    responded: bool
    received_bytes: int
    waits: bool = False
    response_s: float = 0.0
    connected_s: float | None = None


@dataclass(frozen=True, slots=True)
class TrackerChanged:
    """A tracker answers from now on, or none does."""

    present: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """The tracker says that the swarm cannot go on."""

    error: P2PDistError


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Another transport brings the pieces once the streams have ended; or does so no more."""

    paused: bool


@dataclass(frozen=True, slots=True)
class HeldBack:
    """This host reads nothing of this stream for now, since it gives way to others: that says
    nothing of its source."""

    stream: int


@dataclass(frozen=True, slots=True)
class Awaiting:
    """A piece of this stream waits until its hash is listed. Valid until a piece of the stream is
    stored."""

    stream: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Pieces that were stored are no more: they come again, in a plan that is to come."""

    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WholeMatches:
    """The whole of a vouched blob matches its digest."""


Event = (
    PieceStored
    | Planned
    | Wanted
    | StreamEnded
    | Quiet
    | TrackerChanged
    | Rejected
    | Paused
    | Tick
    | HeldBack
    | Awaiting
    | Lost
    | WholeMatches
)

# -- commands


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Receive a stripe from a source."""

    stream: int
    source: Source
    stripe: int


@dataclass(frozen=True, slots=True)
class OpenDemand:
    """Receive these pieces of a stripe from a source, before what streams bring meanwhile. With
    `prefetch` no reader waits for them yet. A `hedge` is for no reader, and streams that are opened
    meanwhile bring the pieces as well."""

    stream: int
    source: Source
    stripe: int
    pieces: tuple[int, ...]
    prefetch: bool = False
    hedge: bool = False


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close a stream; `after_piece` lets the piece under way arrive first."""

    stream: int
    after_piece: bool


@dataclass(frozen=True, slots=True)
class Complain:
    """Tell the tracker that a source failed for a stripe, stands still, or is slow."""

    stripe: int
    source: Source
    reason: Reason
    piece: int | None = None


@dataclass(frozen=True, slots=True)
class Starved:
    """Tell the tracker that nothing of the blob has come yet, or has come for a while from any
    source, though the source of a stripe had the time to send. It stays the source until the
    tracker names another. `waits`: it said that it had no piece to send."""

    stripe: int
    source: Source
    waits: bool = False


@dataclass(frozen=True, slots=True)
class AskTicket:
    """Ask the tracker for another ticket: a source did not take the one that this host has."""


@dataclass(frozen=True, slots=True)
class Completed:
    """All pieces are stored."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The pull is hopeless."""

    error: P2PDistError


Command = OpenStream | OpenDemand | CloseStream | Complain | Starved | AskTicket | Completed | GaveUp


# -- state


@dataclass(frozen=True, slots=True)
class Waiting:
    """No stream brings the stripe, and none is opened before `until`."""

    until: float = 0.0


@dataclass(slots=True)
class Receiving:
    """A stream from `source` brings the stripe."""

    stream: int
    source: Source
    quiet_since: float
    """When a piece of the stripe was stored last, its stream opened or complained of."""
    opened_at: float
    delivered: int = 0
    """Pieces that the stream brought."""
    moved_at: float = 0.0
    """When bytes came last, the source responded, or its silence was complained of (`Quiet`)."""
    responded: bool = False
    received_bytes: int = 0
    """As of `moved_at`."""
    response_s: float = 0.0
    """How long the source took to respond, which is a round trip at least; 0 while not known
    (`silent`)."""
    awaiting: bool = False
    """A piece has come and waits for its hash."""
    starves: bool = False
    """It was said that the source gives nothing to this host, which has nothing (`starved`)."""
    still_at: float = -1.0
    """When a piece of the blob came last, as of when it was said that the source gives no more
    (`_Standstill`)."""
    hedged: dict[Source, None] = field(default_factory=dict)
    """Sources that were asked as well since it gave a piece (`_Standstill`)."""

    def silent_s(self, event: Quiet, *, now: float) -> float:
        """For how long the source has been silent, before its first piece."""
        moved_bytes = event.received_bytes - self.received_bytes
        moves = moved_bytes > 0 and moved_bytes >= MOVING_BYTES_S * (now - self.moved_at)
        if moves or event.responded != self.responded:
            self.moved_at, self.responded, self.received_bytes = now, event.responded, event.received_bytes
        return now - self.moved_at


@dataclass(frozen=True, slots=True)
class Complete:
    """The stripe lacks nothing."""


End = Literal["has nothing else", "gave", "failed"]
"""What the end of a stream says of its source: the stripe's last pieces are under way from another
one; it gave what it had; it failed."""


@dataclass(slots=True)
class _Stripe:
    number: int
    missing: int
    """Pieces that are not stored."""
    candidates: Candidates
    state: Waiting | Receiving | Complete
    stored_at: float
    """When a piece was stored last, or a stream opened."""
    doubted: bool = False
    """Whether the last stream that ended well brought nothing (`_ended`)."""
    pace_s: float = 0.0
    """How long a piece takes, smoothed."""
    complaints: int = 0
    """How often its sources were complained of as stalled since a piece was stored."""
    stale: int = 0
    """How often sources sent what was listed before, since a piece was stored."""
    denials: int = 0
    """How often sources did not take this host's ticket since a piece was stored."""
    starved_by: int = 0
    """How often its sources were said to starve this host (`starved`)."""
    pieces: int = 0
    """Pieces stored since the pull began."""
    gained: int = 0
    """Pieces stored since the window began (`is_slow`)."""
    slow_windows: int = 0
    """Windows in a row in which the stripe was slow."""
    bytes_s: float = 0.0
    """No faster than this it comes, by the last plan; 0 for no limit."""

    def stored(self, *, now: float) -> None:
        """One of its pieces was stored."""
        self.missing -= 1
        self.pieces += 1
        self.gained += 1
        self.pace_s += 0.25 * (now - self.stored_at - self.pace_s)
        self.stored_at = now
        self.complaints = self.denials = self.stale = 0

    def lost(self, *, planned: bool) -> None:
        """A piece that was stored is no more. `planned`: a tracker will say where it comes from."""
        self.missing += 1
        if isinstance(self.state, Complete):
            self.state = Waiting()
            if planned:
                self.candidates.planned(None, ())

    def await_hash(self) -> None:
        """A piece of its stream waits for its hash."""
        if isinstance(self.state, Receiving):
            self.state.awaiting = True

    def wants_back(self, sources: Sources, *, now: float) -> bool:
        """Whether it is time to leave its source for one that the tracker prefers."""
        return isinstance(self.state, Receiving) and self.candidates.wants_back(self.state.source, sources, now=now)

    @property
    def awaits(self) -> Source | None:
        """The source of a piece that waits for its hash."""
        return self.state.source if isinstance(self.state, Receiving) and self.state.awaiting else None

    def excuses(self, event: StreamEnded, receiving: Receiving) -> bool:
        """Whether a list explains other bytes than are listed: the source has not heard of the
        latest round, unless that happens again and again, or the origin differs from the list. An
        error with it says what else is wrong with the origin, such as its length."""
        self.stale += event.reason == "stale"
        differs = event.reason == "corrupt" and receiving.source == ORIGIN and event.error is None
        return differs or (event.reason == "stale" and self.stale <= STALE_MAX)

    def retry(self) -> None:
        """Let a waiting stripe try its sources at once."""
        if isinstance(self.state, Waiting):
            self.state = Waiting()

    @property
    def reads_unasked(self) -> bool:
        """Whether it comes from the origin without a lease."""
        reads_origin = isinstance(self.state, Receiving) and self.state.source == ORIGIN
        return reads_origin and self.candidates.parent != ORIGIN

    def end_of(self, receiving: Receiving, reason: str, *, finishing: bool) -> End:
        """What the end of its stream says of the source. `finishing`: another stream brings pieces
        of the stripe."""
        if reason not in ("done", "closed"):
            return "failed"
        if receiving.delivered:
            return "gave"
        if finishing:  # the source was told that this piece is under way from another one
            return "has nothing else"
        # The piece that was under way when the last stream was closed may have been lost, and with
        # it nothing was left to send. A source that says twice running that it gave everything, and
        # gave nothing, does not keep its word.
        return "failed" if self.doubted else "gave"

    def stalled(self, receiving: Receiving, least_s: float, *, alone_since: float | None, now: float) -> bool:
        """Whether it has stood still for so long, at least `least_s`, that its source is complained
        of. `alone_since`: since when no tracker answers, None while one does."""
        if receiving.awaiting:
            return False
        stall_s = max(least_s, STALL_PACES * self.pace_s)
        if alone_since is None:
            longest_s = max(STALL_MAX_S, least_s) if self.bytes_s else STALL_MAX_S
            limit_s = min(longest_s, stall_s * 2.0 ** min(self.complaints, 10))
            return now - receiving.quiet_since >= limit_s
        limit_s = self.candidates.patience_s(receiving.source, stall_s, fed=receiving.delivered > 0)
        return now - max(self.stored_at, alone_since) >= limit_s

    def silent(self, event: Quiet, sources: Sources, *, now: float) -> Source | None:
        """Its source, if that has been silent for too long before its first piece."""
        receiving = self.state
        if not isinstance(receiving, Receiving) or receiving.delivered or receiving.source.is_origin:
            return None
        receiving.response_s = event.response_s
        if receiving.awaiting or event.waits:
            return None
        limit_s = sources.silence_s(receiving.source, responded=event.responded)
        if receiving.silent_s(event, now=now) < limit_s:
            return None
        receiving.moved_at = receiving.quiet_since = now
        return receiving.source

    def starved(self, sources: Sources, layout: PieceLayout, event: Quiet, *, now: float) -> list[Starved]:
        """What is to be said of its source, which has given nothing so far to this host, which has
        nothing."""
        receiving = self.state
        if not isinstance(receiving, Receiving) or receiving.source.is_origin or receiving.awaiting:
            return []
        late = now - receiving.opened_at >= sources.times.starved_s(layout.piece_size, event.connected_s)
        if receiving.starves or self.starved_by >= STARVED_MAX or not late:
            return []
        receiving.starves = True
        self.starved_by += 1
        return [Starved(self.number, receiving.source, event.waits)]

    def is_slow(self, best: int) -> bool:
        """Whether a complaint is due since it got far less than the `best` in the window that ends
        now: at the first such window, the second, the fourth ... in a row."""
        gained, self.gained = self.gained, 0
        receives = isinstance(self.state, Receiving) and not self.state.awaiting
        slow = receives and best >= SLOW_PIECES and gained < SLOW_SHARE * best
        self.slow_windows = self.slow_windows + 1 if slow else 0
        return self.slow_windows.bit_count() == 1


def first_piece_s(piece_size: int, round_trip_s: float) -> float:
    """How long a new connection takes to carry its first piece, however fast the path is. Over a
    long path that is no stall: a stream that is opened anew begins from the smallest window
    again."""
    return round_trip_s * ceil(log2(1 + piece_size / INITIAL_WINDOW_BYTES))


@dataclass(slots=True)
class _Demand:
    """A stream that brings wanted pieces of a stripe."""

    stripe: int
    pieces: frozenset[int]
    source: Source
    opened_at: float
    prefetch: bool
    hedges: int = 0
    """The number of the stream that stands still, 0 where a reader waits."""
    closed: bool = False
    """Whether it was commanded to end."""


@dataclass(slots=True)
class _Streams:
    """The streams of a download, by number: one for each stripe that is Receiving, others that
    finish a piece, and others that bring wanted pieces."""

    writing: set[int] = field(default_factory=set)
    """Those that were opened and have not ended."""
    stripes: dict[int, _Stripe] = field(default_factory=dict)
    """The stripes that are Receiving."""
    finishing: dict[int, int] = field(default_factory=dict)
    """Those that were closed after the piece under way and have not ended: numbers of stripes."""
    demands: dict[int, _Demand] = field(default_factory=dict)
    """Those that bring wanted pieces."""
    _promised: dict[int, float] = field(default_factory=dict)
    """Wanted pieces that are to come over the stream of their stripe: until when (`ended`)."""
    _last: int = 0

    def _number(self) -> int:
        self._last += 1
        self.writing.add(self._last)
        return self._last

    def open(self, stripe: _Stripe, source: Source, *, now: float) -> OpenStream:
        """Have a waiting stripe come from a source."""
        stream = self._number()
        stripe.state, stripe.stored_at = Receiving(stream, source, now, now, moved_at=now), now
        self.stripes[stream] = stripe
        return OpenStream(stream, source, stripe.number)

    def close(self, stripe: _Stripe, *, after_piece: bool) -> Iterator[CloseStream]:
        """Have a stripe wait, if it is Receiving."""
        if isinstance(stripe.state, Receiving):
            stream, stripe.state = stripe.state.stream, Waiting()
            if after_piece:
                self.finishing[stream] = stripe.number
            self.stripes.pop(stream, None)
            yield CloseStream(stream, after_piece)

    def demand(
        self, stripes: Sequence[_Stripe], pieces: set[int], sources: Sources, *, prefetch: bool, now: float
    ) -> list[OpenDemand | CloseStream]:
        """Open streams for wanted pieces: one for each stripe of which no stream brings them."""
        opened = list[OpenDemand | CloseStream]()
        for stripe in stripes:
            mine = {piece for piece in pieces if piece % len(stripes) == stripe.number}
            if prefetch and mine:
                opened += self._displace(stripe, min(mine))
            if mine and (demand := self._demand_of(stripe, mine, sources, prefetch, now=now)) is not None:
                stream = self._number()
                self.demands[stream] = demand
                chosen = tuple(sorted(demand.pieces))
                opened.append(OpenDemand(stream, demand.source, stripe.number, chosen, prefetch))
        return opened

    def _displace(self, stripe: _Stripe, piece: int) -> Iterator[CloseStream]:
        """Where as many streams as may bring what readers are going to wait for, and none of them
        so low a piece, have the last one make room: readers take turns from the lowest on."""
        lowest = {
            min(demand.pieces): stream
            for stream, demand in self.demands.items()
            if demand.prefetch and demand.stripe == stripe.number
        }
        if len(lowest) >= PREFETCHES_MAX and min(lowest) > piece:
            del self.demands[lowest[max(lowest)]]
            yield CloseStream(lowest[max(lowest)], False)

    def _demand_of(
        self, stripe: _Stripe, wanted: set[int], sources: Sources, prefetch: bool, *, now: float
    ) -> _Demand | None:
        """From where a stripe comes, else from another choice of the tracker. What is late counts
        as not coming, unless no reader waits for it yet."""
        wanted = {piece for piece in wanted if self._promised.get(piece, now) <= now}
        opened = [demand for demand in self.demands.values() if demand.stripe == stripe.number]
        late = {demand.source for demand in opened if now - demand.opened_at >= WANTED_S and not prefetch}
        wanted = wanted.difference(*(demand.pieces for demand in opened if demand.source not in late))
        state, candidates = stripe.state, stripe.candidates
        first = state.source if isinstance(state, Receiving) else None
        for source in (first, candidates.parent, *candidates.alternates):
            if source is not None and source not in late and sources.usable(source, now=now):
                alike = sum(demand.prefetch == prefetch for demand in opened)
                many = not wanted or alike >= (PREFETCHES_MAX if prefetch else DEMANDS_MAX)
                first_ones = frozenset(sorted(wanted)[:DEMAND_PIECES_MAX])
                return None if many else _Demand(stripe.number, first_ones, source, now, prefetch)
        return None

    def hedge(self, demand: _Demand) -> OpenDemand:
        """Open a stream beside one that stands still."""
        stream = self._number()
        self.demands[stream] = demand
        return OpenDemand(stream, demand.source, demand.stripe, tuple(demand.pieces), hedge=True)

    def leave_demands(self, stripe: _Stripe, source: Source) -> Iterator[CloseStream]:
        """Have wanted pieces of a stripe requested anew that do not come from its source."""
        for stream, demand in list(self.demands.items()):
            if demand.stripe == stripe.number and demand.source != source:
                del self.demands[stream]
                yield CloseStream(stream, False)

    def hold_back(self, stream: int, *, now: float) -> None:
        """A stream is held back here."""
        stripe = self.stripes.get(stream)
        if stripe is not None and isinstance(stripe.state, Receiving):
            stripe.state.quiet_since = stripe.stored_at = now

    def finish(self, stripe: _Stripe) -> bool:
        """Whether another stream than its own brings pieces of a stripe."""
        demanded = any(demand.stripe == stripe.number for demand in self.demands.values())
        return demanded or stripe.number in self.finishing.values()

    def ended(self, event: StreamEnded, stripes: Sequence[_Stripe], have: PieceSet, *, now: float) -> _Stripe | None:
        """A stream has let go of the file. Returns the stripe that came by it until now."""
        self.writing.discard(event.stream)
        demand = self.demands.pop(event.stream, None)
        if demand is not None and event.reason == "done":
            until = now + min(WANTED_S, max(PROMISE_MIN_S, PROMISE_PACES * stripes[demand.stripe].pace_s))
            self._promised = {piece: late for piece, late in self._promised.items() if late > now}
            self._promised.update((piece, until) for piece in demand.pieces if piece not in have)
        self.finishing.pop(event.stream, None)
        return self.stripes.pop(event.stream, None)


@dataclass(slots=True)
class _Window:
    """A window of SLOW_WINDOW_S, in which the stripes are compared."""

    began_at: float = 0.0

    def complaints(self, stripes: list[_Stripe], *, now: float) -> Iterator[Complain]:
        """The stripes that turn out slow at the end of a window, which is now."""
        self.began_at = now
        best = max(stripe.gained for stripe in stripes)
        for stripe in stripes:
            if stripe.is_slow(best) and isinstance(stripe.state, Receiving):
                yield Complain(stripe.number, stripe.state.source, "slow")


@dataclass(slots=True)
class _Turns:
    """How long turns at the downlink take, in which each stripe has a piece."""

    layout: PieceLayout
    stripes: int
    _first_at: float = 0.0
    """When the first piece came."""
    _last_at: float = 0.0
    """When the last one came."""
    _pieces: int = 0
    """Pieces that came."""

    def stored(self, *, now: float) -> None:
        """A piece was stored."""
        if not self._pieces:
            self._first_at = now
        self._pieces, self._last_at = self._pieces + 1, now

    def stall_s(self, receiving: Receiving, bytes_s: float = 0.0, *, begun: bool) -> float:
        """For how long a stripe may stand still at least, where it comes no faster than `bytes_s`
        (0: no limit). `begun`: a piece of it has come."""
        opening_s = 0.0 if receiving.delivered else first_piece_s(self.layout.piece_size, receiving.response_s)
        opening_s += STALL_PACES * self.layout.piece_size / bytes_s if bytes_s else 0.0
        if not self.layout.large:
            return STALL_FIRST_S + opening_s
        limit_s = STALL_TURNS * self.layout.turn_s()
        if self._pieces > 1:
            turn_s = self.stripes * (self._last_at - self._first_at) / (self._pieces - 1)
            limit_s = STALL_TURNS * turn_s if begun else min(limit_s, FILL_TURNS * turn_s)
        return max(STALL_FIRST_S, limit_s) + opening_s


@dataclass(slots=True)
class _Superpeers:
    """The superpeers of this host's zone, as plans named them."""

    hosts: tuple[str, ...] = ()
    """Of the last plan that named any."""
    shared: bool = False
    """Whether they share the reading of the origin, by the last plan."""

    def planned(self, plan: Plan, stripes: Sequence[_Stripe]) -> None:
        """A plan has come."""
        self.shared = plan.dealt
        if plan.keepers:
            self.hosts = tuple(superpeer.host for superpeer in plan.keepers)
            for stripe in stripes:
                stripe.candidates.superpeers_named(plan.keepers)


@dataclass(slots=True)
class _Standstill:
    """Finds stripes that stand still by the measure of their pull, and hedges."""

    streams: _Streams
    layout: PieceLayout
    sources: Sources
    stripes: Sequence[_Stripe]
    hedges: int = field(init=False)
    """How many pieces may still be asked for so."""
    turns: _Turns = field(init=False)
    _longest_s: float = 0.0
    """The longest gap of late between two pieces of one stream."""

    def __post_init__(self) -> None:
        self.hedges = max(HEDGES_LEAST, int(HEDGES_SHARE * self.layout.count))
        self.turns = _Turns(self.layout, len(self.stripes))

    def gap(self, seconds: float) -> None:
        """A stream gave a piece so long after the one before."""
        self._longest_s = max(seconds, GAP_FADES * self._longest_s)

    def due_s(self, *, now: float) -> float:
        """In how many seconds a stripe may stand still at the earliest."""
        receiving = [(stripe, state) for stripe in self.stripes if (state := self._judged(stripe)) is not None]
        still = [(stripe.stored_at - now, self._still_s(stripe, state)) for stripe, state in receiving]
        due = [since + share * still_s for since, still_s in still for share in (1.0, STARVED_STILLS)]
        return min((left_s for left_s in due if left_s > 0), default=STILL_MIN_S)

    def look(self, have: PieceSet, progressed_at: float, *, now: float) -> list[Command]:
        """Ask other sources for the next pieces of stripes that stand still, and say it where the
        whole pull does; a piece of the blob came last at `progressed_at`."""
        return [*self._hedge(have, now), *self._starved(progressed_at, now)]

    def _hedge(self, have: PieceSet, now: float) -> Iterator[Command]:
        open_hedges = {demand.hedges: stream for stream, demand in self.streams.demands.items() if demand.hedges}
        for stripe in self.stripes:
            state = self._judged(stripe)
            if state is None or now - stripe.stored_at < self._still_s(stripe, state):
                continue
            stream = open_hedges.pop(state.stream, None)
            if stream is not None and now - self.streams.demands[stream].opened_at < self._still_s(stripe, None):
                continue
            if stream is not None:
                yield from self._close(stream)
            named = (stripe.candidates.parent, *stripe.candidates.alternates)
            untried = (each for each in named if each is not None and each != state.source and each not in state.hedged)
            source = next((each for each in untried if not each.is_origin and self.sources.usable(each, now=now)), None)
            if source is not None and self.hedges > 0:
                self.hedges -= 1
                state.hedged[source] = None
                missing = range(stripe.number, self.layout.count, len(self.stripes))
                piece = next(piece for piece in missing if piece not in have)
                yield self.streams.hedge(_Demand(stripe.number, frozenset((piece,)), source, now, False, state.stream))
        for stream in open_hedges.values():  # of streams that gave a piece since, or have ended
            yield from self._close(stream)

    def winner(self, stripe: _Stripe, number: int) -> Source | None:
        """The source of a hedge that gave its piece while the source of the stripe gave nothing."""
        hedge, state = self.streams.demands.get(number), stripe.state
        if hedge is None or not isinstance(state, Receiving) or hedge.hedges != state.stream:
            return None
        return hedge.source if stripe.stored_at <= hedge.opened_at else None

    def _starved(self, progressed_at: float, now: float) -> list[Starved]:
        """What is to be said of the sources, once the whole pull stands still."""
        lacking = [(stripe, self._judged(stripe)) for stripe in self.stripes if stripe.missing]
        still_s = STARVED_STILLS * max((self._still_s(stripe, state) for stripe, state in lacking), default=0.0)
        since = max(progressed_at, *(stripe.stored_at for stripe, _ in lacking))  # of one that is held back: now
        if now - since < still_s:
            return []
        told = []
        for stripe, state in lacking:
            if state is None:
                return []
            if state.still_at != progressed_at:
                state.still_at = progressed_at
                told.append(Starved(stripe.number, state.source))
        return told

    def _judged(self, stripe: _Stripe) -> Receiving | None:
        """How a stripe is received, if it can be told how long its pieces take."""
        state = stripe.state
        if not isinstance(state, Receiving) or state.awaiting or state.source.is_origin:
            return None
        return state if stripe.pieces >= STILL_PIECES and not self.layout.large else None

    def _still_s(self, stripe: _Stripe, state: Receiving | None) -> float:
        """After how long without a piece a stripe stands still; `state` None: a hedge for it."""
        opening_s = (
            0.0 if state is not None and state.delivered else self.sources.times.starved_s(self.layout.piece_size)
        )
        return max(STILL_MIN_S, STILL_PACES * stripe.pace_s, STILL_GAPS * self._longest_s, opening_s)

    def _close(self, stream: int) -> Iterator[CloseStream]:
        if not self.streams.demands[stream].closed:
            self.streams.demands[stream].closed = True
            yield CloseStream(stream, after_piece=False)


@dataclass(slots=True)
class _Patience:
    """How long a download has stood still, and why."""

    progressed_at: float = 0.0
    """When a piece was stored last, or the site ceased to wait."""
    failure: tuple[str, float] = ("", -1.0)
    """Why a source failed last, in words for the user; and when."""
    held: str = ""
    """Why this host's site waits, by the last plan that said so; empty where it does not, or no
    tracker answers."""

    def hold(self, why: str | None, stripes: Iterable[_Stripe], *, now: float) -> None:
        """The site waits from now on; goes on where `why` is empty, as if no time had passed; or
        does as before (None)."""
        if why is None:
            return
        if self.held and not why:
            self.progressed_at = now
            for stripe in stripes:
                if isinstance(stripe.state, Receiving):
                    stripe.state.quiet_since = stripe.state.moved_at = now
        self.held = why

    def trouble(self, *, awaits_hosts: bool, now: float) -> str:
        """Why nothing has come for TROUBLE_S, where a source failed meanwhile, the site waits or no
        tracker answers; empty while pieces come."""
        if now - self.progressed_at < TROUBLE_S:
            return ""
        failure = self.failure[0] if self.failure[1] >= self.progressed_at else ""
        awaited = "no tracker answers, and the hosts that it named give nothing" if awaits_hosts else ""
        return self.held or ": ".join(filter(None, (awaited, failure)))


@dataclass(slots=True)
class Download:
    """Receives one blob by streams, and counts its pieces whichever transport brings them."""

    blob: Digest
    layout: PieceLayout
    stripes: int
    have: PieceSet
    """The pieces that are stored; a copy of what is given, and grows."""
    sources: Sources
    started_at: float
    patience_s: float = 120.0
    """The pull is given up when no piece at all arrives for so long."""
    host: str = ""
    """The name of this host."""
    alone_patience_s: float = 0.0
    """The same while no tracker answers and hosts are known that may come back, where longer."""
    hedges: bool = False
    """Stripes that stand still are asked for elsewhere as well. PullCore."""
    vouched: bool = False
    """The whole must match (`WholeMatches`) before the download is complete. `handle`."""
    finished: bool = False
    """Completed or GaveUp was commanded."""
    counts: list[int] = field(default_factory=list)
    """Pieces stored per stripe."""
    _stripes: list[_Stripe] = field(default_factory=list)
    _streams: _Streams = field(default_factory=_Streams)
    _patience: _Patience = field(default_factory=_Patience)
    _tracker: bool = True
    """Whether a tracker answers."""
    _alone_since: float = 0.0
    """When `_tracker` changed last."""
    _paused: bool = False
    _superpeers: _Superpeers = field(default_factory=_Superpeers)
    _origin_corrupt: int = 0
    """Wrong pieces that the origin sent."""
    _window: _Window = field(default_factory=_Window)
    _standstill: _Standstill = field(init=False)
    """Made by `__post_init__`."""

    def __post_init__(self) -> None:
        self.have = PieceSet(self.have.count, self.have.bits)
        self.counts = self.have.stripe_counts(self.stripes)
        self._patience.progressed_at = self.started_at
        for number, count in enumerate(self.counts):
            missing = len(range(number, self.layout.count, self.stripes)) - count
            self._stripes.append(_stripe(number, missing, Candidates(self.host, self.blob, number), self.started_at))
        self._standstill = _Standstill(self._streams, self.layout, self.sources, self._stripes)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """What to do about an event, in this order."""
        out: list[Command] = []
        if self.finished:
            return out
        match event:
            case PieceStored(number, piece):
                self._stored(number, piece, now, out)
            case Planned(plan):
                self._planned(plan, now, out)
            case Wanted(pieces, prefetch) if not self._paused:  # else a swarm writes, and brings them
                missing = {piece for piece in pieces if piece not in self.have}
                out += self._streams.demand(self._stripes, missing, self.sources, prefetch=prefetch, now=now)
            case StreamEnded():
                self._ended(event, now, out)
            case Quiet():
                _quiet(self, event, now, out)
            case TrackerChanged(present):
                if present != self._tracker:
                    self._tracker, self._alone_since = present, now
                    self._patience.hold("", self._stripes, now=now)
                    for stripe in self._stripes:
                        stripe.retry()
            case Rejected(error):
                self._give_up(error, out)
            case Paused(paused):
                self._paused = paused
                if paused:
                    self._close_all(out, after_piece=True)
            case Tick():
                self._tick(now, out)
            case HeldBack(number):
                self._streams.hold_back(number, now=now)
            case Awaiting(number) if waiting := self._streams.stripes.get(number):
                waiting.await_hash()
            case Lost(pieces):
                self._lose(pieces)
            case WholeMatches():
                self.vouched = False
        if not self.finished and self.have.complete and not self.vouched:
            self._close_all(out)
            self.finished = True
            out.append(Completed())
        return out

    def parents(self) -> tuple[str | None, ...]:
        """The host that each stripe comes from: "" for the origin, None for no host."""
        return tuple(each.state.source.host if isinstance(each.state, Receiving) else None for each in self._stripes)

    def due_s(self, now: float) -> float:
        """In how many seconds a stripe may stand still at the earliest: a Tick is due then."""
        return self._standstill.due_s(now=now) if self.hedges and self._tracker else inf

    @property
    def writing(self) -> set[int]:
        """The streams that were opened and have not ended."""
        return self._streams.writing

    @property
    def fed(self) -> bool:
        """Whether every stripe that lacks something has a source."""
        return not any(isinstance(stripe.state, Waiting) for stripe in self._stripes)

    def awaiting(self) -> list[Source]:
        """The sources of streams of which a piece waits for its hash."""
        return [source for stripe in self._stripes if (source := stripe.awaits) is not None]

    def trouble(self, now: float) -> str:
        """Why nothing has come for a while, in words for the user; empty while pieces come."""
        return "" if self.finished else self._patience.trouble(awaits_hosts=_awaits_hosts(self), now=now)

    @property
    def held(self) -> str:
        """Why this host's site waits; empty where it does not."""
        return self._patience.held

    def readers(self) -> Readers:
        """Which hosts may bring which pieces from the origin into a swarm."""
        leased = frozenset(stripe.number for stripe in self._stripes if stripe.candidates.parent == ORIGIN)
        named = self._superpeers
        return Readers(self.blob, self.host, self.stripes, leased, named.hosts, named.shared, not self._tracker)

    def _stored(self, number: int, piece: int, now: float, out: list[Command]) -> None:
        if not self.have.add(piece):
            return
        self._patience.progressed_at = now
        self._standstill.turns.stored(now=now)
        index = piece % self.stripes
        self.counts[index] += 1
        stripe = self._stripes[index]
        state, before, winner = stripe.state, stripe.stored_at, self._standstill.winner(stripe, number)
        stripe.stored(now=now)
        if isinstance(state, Receiving) and winner is None:
            state.quiet_since = now
            state.awaiting = state.awaiting and number != state.stream
            if number == state.stream:
                if state.delivered:
                    self._standstill.gap(now - before)
                state.delivered += 1
                stripe.candidates.fed(state.source, now=now)
                self.sources.delivered(state.source, now - state.opened_at if state.delivered == 1 else None)
        elif isinstance(state, Receiving) and winner is not None and stripe.missing:
            self._leave(stripe, state.source, now, out)
            out.append(self._streams.open(stripe, winner, now=now))
        if stripe.missing == 0:
            self._close(stripe, out, after_piece=True)
            stripe.state = Complete()

    def _lose(self, pieces: tuple[int, ...]) -> None:
        for piece in filter(self.have.__contains__, pieces):
            self.have.discard(piece)
            self.counts[piece % self.stripes] -= 1
            self._stripes[piece % self.stripes].lost(planned=self._tracker)

    def _planned(self, plan: Plan, now: float, out: list[Command]) -> None:
        self._superpeers.planned(plan, self._stripes)
        self._patience.hold(plan.held, self._stripes, now=now)
        for choice in plan.stripes:
            if choice.stripe < self.stripes:
                self._replanned(self._stripes[choice.stripe], choice, now, out)

    def _replanned(self, stripe: _Stripe, choice: StripePlan, now: float, out: list[Command]) -> None:
        """Turn to the parent that the tracker has chosen for a stripe, or say why not."""
        parent, stripe.bytes_s = choice.parent, choice.bytes_s
        stripe.candidates.planned(parent, choice.alternates)
        stripe.retry()
        match stripe.state:
            case Complete():
                return
            case Receiving(source=source) if source == parent:
                return
            case Receiving() if parent is None and self.held:
                self._close(stripe, out, after_piece=True)
        reason = self.sources.complaint(parent, now=now) if parent is not None else None
        if parent is not None and reason is not None and not parent.is_origin:
            out.append(Complain(stripe.number, parent, reason))
        elif parent is not None and reason is None:
            # A piece that does not come would keep the stream, and its slot, for long.
            comes = now - stripe.stored_at < max(COMES_MIN_S, COMES_PACES * stripe.pace_s)
            out.extend(self._streams.leave_demands(stripe, parent))
            self._close(stripe, out, after_piece=comes)
        self._open(stripe, now, out)

    def _open(self, stripe: _Stripe, now: float, out: list[Command]) -> None:
        """Receive a waiting stripe from the best source that may be tried now."""
        if self._paused or not isinstance(stripe.state, Waiting) or now < stripe.state.until:
            return
        source, until = stripe.candidates.choose(self.sources, alone=not self._tracker, now=now)
        if source is None:
            stripe.state = Waiting(until)
            return
        out.append(self._streams.open(stripe, source, now=now))

    def _close(self, stripe: _Stripe, out: list[Command], *, after_piece: bool) -> None:
        out.extend(self._streams.close(stripe, after_piece=after_piece))

    def _close_all(self, out: list[Command], *, after_piece: bool = False) -> None:
        out.extend(CloseStream(stream, after_piece) for stream in self._streams.demands)
        for stripe in self._stripes:
            self._close(stripe, out, after_piece=after_piece)

    def _ended(self, event: StreamEnded, now: float, out: list[Command]) -> None:
        stripe = self._streams.ended(event, self._stripes, self.have, now=now)
        # A superpeer that cannot read the origin of its own accord may still receive from other
        # hosts; with a lease other hosts wait for what it finds out.
        unasked = stripe is not None and stripe.reads_unasked
        if event.reason == "failed" and not (unasked and isinstance(event.error, Unavailable)):
            self._give_up(event.error or P2PDistError(f"{self.blob} could not be stored"), out)
            return
        if stripe is None or not isinstance(stripe.state, Receiving):
            return
        receiving = stripe.state
        finishing = self._streams.finish(stripe)
        match stripe.end_of(receiving, event.reason, finishing=finishing):
            case "has nothing else":
                stripe.state = Waiting(now + max(REOPEN_S, stripe.pace_s))
            case "gave":
                stripe.doubted = not receiving.delivered
                stripe.state = Waiting(now + REOPEN_S)
            case "failed" if self.vouched and stripe.excuses(event, receiving):
                stripe.state = Waiting(now + STALE_S)
            case "failed" if event.reason == "denied" and stripe.denials < DENIALS_MAX:
                stripe.denials += 1
                stripe.state = Waiting(now + DENIED_S)
                stripe.candidates.failed(receiving.source)
                out.append(AskTicket())
            case "failed":
                stripe.state = Waiting()
                self._failed(stripe, receiving.source, event, now, out)

    def _failed(self, stripe: _Stripe, source: Source, event: StreamEnded, now: float, out: list[Command]) -> None:
        """Complain of a source and turn to the next one, unless it is the origin and hopeless."""
        reason = _complaint(event.reason)
        self._patience.failure = f"{source}: {event.error.what if event.error else reason}", now
        out.append(Complain(stripe.number, source, reason, event.piece))
        leased = source == ORIGIN and stripe.candidates.parent == ORIGIN
        if leased and event.error is not None and event.error.exit_code in (3, 4):
            self._give_up(event.error, out)
            return
        stripe.candidates.failed(source)
        self.sources.failed(source, reason, now=now)
        self._origin_corrupt += reason == "corrupt" and source == ORIGIN
        if self._origin_corrupt >= ORIGIN_CORRUPT_MAX:
            self._give_up((self.vouched and event.error) or _corrupt_at_origin(self.blob, event.error), out)
            return
        self._open(stripe, now, out)

    def _tick(self, now: float, out: list[Command]) -> None:
        if not self.have.complete and (error := _out_of_patience(self, now)) is not None:
            self._give_up(error, out)
            return
        for stripe in self._stripes:
            match stripe.state:
                case Waiting():
                    self._open(stripe, now, out)
                case Receiving() if not self._tracker and stripe.wants_back(self.sources, now=now):
                    self._close(stripe, out, after_piece=True)
                    self._open(stripe, now, out)
                case Receiving() if self.held:
                    pass
                case Receiving(quiet_since=since) if not self._tracker or now - since >= STALL_FIRST_S:
                    self._check_stall(stripe, stripe.state, now, out)
        if self.held:
            return
        if self._tracker and self.hedges and not self._paused:
            out += self._standstill.look(self.have, self._patience.progressed_at, now=now)
        if now - self._window.began_at >= SLOW_WINDOW_S:
            out += self._window.complaints(self._stripes, now=now)

    def _check_stall(self, stripe: _Stripe, receiving: Receiving, now: float, out: list[Command]) -> None:
        """Complain of a source that stands still, and leave it where this host chose it itself."""
        alone_since = None if self._tracker else self._alone_since
        least_s = self._standstill.turns.stall_s(receiving, stripe.bytes_s, begun=self.counts[stripe.number] > 0)
        if not stripe.stalled(receiving, least_s, alone_since=alone_since, now=now):
            return
        source = receiving.source
        stripe.complaints += 1
        receiving.quiet_since = now
        if not self._tracker or source != stripe.candidates.parent:
            self._leave(stripe, source, now, out)
            self._open(stripe, now, out)
        else:
            out.append(Complain(stripe.number, source, "stalled"))

    def _leave(self, stripe: _Stripe, source: Source, now: float, out: list[Command]) -> None:
        """Complain of a source that stands still, and leave it."""
        out.append(Complain(stripe.number, source, "stalled"))
        stripe.candidates.failed(source, still=not self._tracker)
        if self._tracker:
            self.sources.failed(source, "stalled", now=now)
        self._close(stripe, out, after_piece=False)

    def _give_up(self, error: P2PDistError, out: list[Command]) -> None:
        self._close_all(out)
        self.finished = True
        out.append(GaveUp(error))


def _quiet(download: Download, event: Quiet, now: float, out: list[Command]) -> None:
    """Complain of a source that was silent for too long, and leave it if there is another."""
    streams, sources = download._streams, download.sources
    stripe = streams.stripes.get(event.stream) if download._tracker and not download.held else None
    if stripe is not None and not len(download.have):
        out += stripe.starved(sources, download.layout, event, now=now)
    source = stripe.silent(event, sources, now=now) if stripe is not None else None
    if stripe is None or source is None:
        return
    sources.silent(source, now=now)
    out.append(Complain(stripe.number, source, "stalled"))
    download._patience.failure = f"{source}: sends nothing", now
    if stripe.candidates.others(source, sources, now=now):
        stripe.candidates.failed(source)
        download._close(stripe, out, after_piece=False)
        download._open(stripe, now, out)


def _awaits_hosts(download: Download) -> bool:
    """Whether a pull without a tracker knows hosts that may come back."""
    return not download._tracker and any(stripe.candidates.hosts for stripe in download._stripes if stripe.missing)


def _out_of_patience(download: Download, now: float) -> Unavailable | None:
    """Why a pull is given up of which nothing has come for too long. Without a tracker it waits
    longer, as hosts may come back; once one answers again, the time counts from then."""
    tracker, since, patience_s = download._tracker, download._patience.progressed_at, download.patience_s
    if tracker:
        since = max(since, download._alone_since)
    elif _awaits_hosts(download):
        patience_s = max(patience_s, download.alone_patience_s)
    if now - since <= patience_s or download.held:
        return None
    return _starved(download.blob, patience_s, download._patience.failure[0], tracker=tracker)


def _complaint(reason: str) -> Reason:
    """What is complained of where a stream ended for this reason."""
    meant = {"done": "short", "closed": "short", "failed": "unavailable", "denied": "refused", "stale": "missing"}
    return meant.get(reason, reason)  # type: ignore[return-value]


def _stripe(number: int, missing: int, candidates: Candidates, now: float) -> _Stripe:
    return _Stripe(number, missing, candidates, Waiting() if missing else Complete(), now)


def _starved(blob: Digest, patience_s: float, last: str, *, tracker: bool) -> Unavailable:
    """Why a pull ends of which nothing has come for long; `last` is how a source failed."""
    also = f"{'' if tracker else '; no tracker answers'}{f'; the last failure was {last}' if last else ''}"
    return Unavailable(
        f"nothing of {blob} arrived for {patience_s:.0f} s{also}",
        remedy="What has arrived is kept: pull again when the tracker and the origin are back",
    )


def _corrupt_at_origin(blob: Digest, error: P2PDistError | None) -> Corrupt:
    what = error.what if error else "pieces do not match their hashes"
    return Corrupt(f"the origin's copy of {blob} is corrupt: {what}", remedy="Push it again")
