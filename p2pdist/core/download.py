"""One blob's pull at one host: which source each stripe comes from, what to do when one fails, when
it is done or hopeless.

Theory. The tracker names a parent and alternates for every stripe (`Planned`). One stream per
stripe is open at a time. A stream that fails is complained of and replaced by the next usable
alternate at once; the tracker answers with a better plan when it can. A stripe that stands still
while its stream is open is complained of: after STALL_FIRST_S, or several times as long as its
pieces took of late, and then with pauses that double until a piece arrives, whoever it comes from;
over a slow link a piece may take long. Only the tracker can tell a slow parent from a starved one,
so the host leaves the tracker's choice by itself only while no tracker answers. An alternate is the
host's own choice, perhaps of a host that receives through this one by now, and is left as soon as
it stands still. A plan that names a source which failed this host a moment ago is answered with a
complaint, or the tracker would wait for what never comes.

While no tracker answers, the host finds its way by itself (candidates.py): it goes through the
tracker's last choices and the keepers of its zone, and reads the origin when it is a keeper and
those before it failed it. What stands still then is held against nobody: where one stands still all
below it do.

A stripe that gets far fewer pieces than another over SLOW_WINDOW_S is complained of as slow, again
with growing pauses; that changes nothing here, and lets the tracker look closer. While it is
paused, another transport brings the pieces and no stream is opened.

Invariants: a piece counts once; a source that sent wrong bytes is not opened again while it is
avoided; no stream is opened for a stripe that lacks nothing; exactly one of Completed and GaveUp is
given, and nothing after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from p2pdist.core.origin_seeding import Readers
from p2pdist.core.sources import Candidates, Sources
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable
from p2pdist.model.messages import Reason
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan

STALL_FIRST_S, STALL_MAX_S = 0.6, 30.0
STALL_PACES = 4.0
COMES_MIN_S = 0.2
COMES_PACES = 3.0
"""A piece under way is waited for when a stream is replaced, unless the stream has been quiet for
so long."""

SLOW_WINDOW_S = 0.5
SLOW_SHARE = 0.4
SLOW_PIECES = 8
"""A stripe is slow that gets less than this share of what the best one got in a window, when that
got at least so many pieces."""

REOPEN_S = 0.05
TROUBLE_S = 2.0
"""What a source failed with is worth telling once nothing has come for so long."""

ORIGIN_CORRUPT_MAX = 3

# -- events


class PieceStored(Struct, frozen=True, gc=False):
    """A piece from `stream` verified and is on disk."""

    stream: int
    piece: int


@dataclass(frozen=True, slots=True)
class Planned:
    plan: Plan


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """`reason` is "done" (the source gave everything it was asked for), "closed" (as commanded),
    "failed" (this host's own disk or bug: `error` says which) or why the source failed."""

    stream: int
    reason: Reason | str
    piece: int | None = None
    error: P2PDistError | None = None


@dataclass(frozen=True, slots=True)
class TrackerChanged:
    """Whether a tracker answers."""

    present: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """The tracker says that the swarm cannot go on."""

    error: P2PDistError


@dataclass(frozen=True, slots=True)
class Tick:
    pass


@dataclass(frozen=True, slots=True)
class Paused:
    """Another transport brings the pieces from now on, once the streams have ended; or does so no
    more."""

    paused: bool


Event = PieceStored | Planned | StreamEnded | TrackerChanged | Rejected | Paused | Tick

# -- commands


@dataclass(frozen=True, slots=True)
class OpenStream:
    stream: int
    source: Source
    stripe: int


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close a stream; `after_piece` lets the piece under way arrive first."""

    stream: int
    after_piece: bool


@dataclass(frozen=True, slots=True)
class Complain:
    stripe: int
    source: Source
    reason: Reason
    piece: int | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    pass


@dataclass(frozen=True, slots=True)
class GaveUp:
    error: P2PDistError


Command = OpenStream | CloseStream | Complain | Completed | GaveUp


@dataclass(slots=True)
class _Stripe:
    number: int
    missing: int
    candidates: Candidates
    source: Source | None = None
    stream: int | None = None
    delivered: int = 0
    doubted: bool = False
    stored_at: float = 0.0
    pace_s: float = 0.0
    quiet_since: float = 0.0
    complaints: int = 0
    retry_at: float = 0.0
    gained: int = 0
    slow_windows: int = 0


@dataclass(slots=True)
class Download:
    """See the module's text. `patience_s`: how long no piece at all may arrive before the pull is
    given up; `host`: this host's name."""

    blob: Digest
    layout: PieceLayout
    stripes: int
    have: PieceSet
    sources: Sources
    started_at: float
    patience_s: float = 120.0
    host: str = ""
    finished: bool = False
    counts: list[int] = field(default_factory=list)
    writing: set[int] = field(default_factory=set)
    """Streams that were opened and have not ended."""
    _stripes: list[_Stripe] = field(default_factory=list)
    _streams: dict[int, _Stripe] = field(default_factory=dict)
    _finishing: dict[int, int] = field(default_factory=dict)
    _next_stream: int = 1
    _progressed_at: float = 0.0
    _tracker: bool = True
    _paused: bool = False
    _dealt: bool = False
    _keepers: tuple[str, ...] = ()
    _alone_since: float = 0.0
    _origin_corrupt: int = 0
    _window_from: float = 0.0
    _last_failure: str = ""
    _failed_at: float = -1.0

    def __post_init__(self) -> None:
        self.have = PieceSet(self.have.count, self.have.bits)
        self.counts = self.have.stripe_counts(self.stripes)
        self._progressed_at = self.started_at
        for number, count in enumerate(self.counts):
            total = len(range(number, self.layout.count, self.stripes))
            candidates = Candidates(self.host, self.blob, number)
            self._stripes.append(_Stripe(number, total - count, candidates, stored_at=self.started_at))

    def handle(self, event: Event, *, now: float) -> list[Command]:
        out: list[Command] = []
        if self.finished:
            return out
        match event:
            case PieceStored(number, piece):
                self._stored(number, piece, now, out)
            case Planned(plan):
                self._dealt, self._keepers = plan.dealt, tuple(each.host for each in plan.keepers) or self._keepers
                for stripe in self._stripes if plan.keepers else ():
                    stripe.candidates.kept_by(plan.keepers)
                for stripe_plan in plan.stripes:
                    self._planned(stripe_plan, now, out)
            case StreamEnded():
                self._ended(event, now, out)
            case TrackerChanged(present):
                if present != self._tracker:
                    self._tracker, self._alone_since = present, now
                    for stripe in self._stripes:
                        stripe.retry_at = 0.0
            case Rejected(error):
                self._give_up(error, out)
            case Paused(paused):
                self._paused = paused
                if paused:
                    self._close_all(out, after_piece=True)
            case Tick():
                self._tick(now, out)
        if not self.finished and self.have.complete:
            self._close_all(out)
            self.finished = True
            out.append(Completed())
        return out

    def parents(self) -> tuple[str | None, ...]:
        """Per stripe the host that pieces come from: "" for the origin, None for nobody."""
        return tuple(
            stripe.source.host if stripe.source and stripe.stream is not None else None for stripe in self._stripes
        )

    @property
    def fed(self) -> bool:
        """Whether every stripe that lacks something has a source."""
        return all(stripe.stream is not None or not stripe.missing for stripe in self._stripes)

    def trouble(self, now: float) -> str:
        """Why nothing has come for TROUBLE_S, where a source failed meanwhile; empty while pieces
        come."""
        told = now - self._progressed_at >= TROUBLE_S and self._failed_at >= self._progressed_at
        return self._last_failure if told and not self.finished else ""

    def readers(self) -> Readers:
        """Who may bring what from the origin into a swarm."""
        leased = frozenset(each.number for each in self._stripes if each.candidates.parent == ORIGIN)
        return Readers(self.blob, self.host, self.stripes, leased, self._keepers, self._dealt, not self._tracker)

    def _stored(self, number: int, piece: int, now: float, out: list[Command]) -> None:
        if not self.have.add(piece):
            return
        self._progressed_at = now
        index = piece % self.stripes
        self.counts[index] += 1
        stripe = self._stripes[index]
        stripe.missing -= 1
        stripe.gained += 1
        stripe.pace_s += 0.25 * (now - stripe.stored_at - stripe.pace_s)
        stripe.stored_at = stripe.quiet_since = now
        stripe.complaints = 0
        if stripe.source is not None and number == stripe.stream:
            stripe.delivered += 1
            stripe.candidates.fed(stripe.source, now=now)
            self.sources.delivered(stripe.source)
        if stripe.missing == 0 and stripe.stream is not None:
            self._close(stripe, out, after_piece=True)

    def _planned(self, plan: StripePlan, now: float, out: list[Command]) -> None:
        if plan.stripe >= self.stripes:
            return
        stripe = self._stripes[plan.stripe]
        stripe.candidates.planned(plan.parent, plan.alternates)
        stripe.retry_at = 0.0
        wanted = plan.parent
        if wanted is not None and wanted != stripe.source and stripe.missing:
            reason = self.sources.complaint(wanted, now=now)
            if reason is not None and not wanted.is_origin:
                out.append(Complain(stripe.number, wanted, reason))
            elif reason is None and stripe.source is not None:
                # A piece that does not come would keep the stream, and its place among those that
                # are expected, for long.
                comes = now - stripe.stored_at < max(COMES_MIN_S, COMES_PACES * stripe.pace_s)
                self._close(stripe, out, after_piece=comes)
        self._open(stripe, now, out)

    def _open(self, stripe: _Stripe, now: float, out: list[Command]) -> None:
        if self._paused or stripe.stream is not None or stripe.missing == 0 or now < stripe.retry_at:
            return
        source, stripe.retry_at = stripe.candidates.choose(self.sources, alone=not self._tracker, now=now)
        if source is None:
            return
        stripe.stream, stripe.source = self._next_stream, source
        stripe.stored_at = stripe.quiet_since = now
        stripe.delivered = 0
        self._streams[self._next_stream] = stripe
        self.writing.add(self._next_stream)
        out.append(OpenStream(self._next_stream, source, stripe.number))
        self._next_stream += 1

    def _close(self, stripe: _Stripe, out: list[Command], *, after_piece: bool) -> None:
        if stripe.stream is None:
            return
        out.append(CloseStream(stripe.stream, after_piece))
        if after_piece:
            self._finishing[stripe.stream] = stripe.number
        del self._streams[stripe.stream]
        stripe.stream = stripe.source = None

    def _close_all(self, out: list[Command], *, after_piece: bool = False) -> None:
        for stripe in self._stripes:
            self._close(stripe, out, after_piece=after_piece)

    def _ended(self, event: StreamEnded, now: float, out: list[Command]) -> None:
        self.writing.discard(event.stream)
        stripe = self._streams.get(event.stream)
        # What a keeper cannot read of its own accord it may still get from others; with a lease
        # others wait for what it finds out.
        unasked = stripe is not None and stripe.source == ORIGIN and stripe.candidates.parent != ORIGIN
        if event.reason == "failed" and not (unasked and isinstance(event.error, Unavailable)):
            self._give_up(event.error or P2PDistError(f"{self.blob} could not be stored"), out)
            return
        self._streams.pop(event.stream, None)
        self._finishing.pop(event.stream, None)
        if stripe is None or stripe.source is None:
            return
        source = stripe.source
        stripe.stream = stripe.source = None
        ended_well = event.reason in {"done", "closed"}
        if ended_well and not stripe.delivered and stripe.number in self._finishing.values():
            # The source was told that this piece is under way from another one, and has nothing
            # else to give.
            stripe.retry_at = now + max(REOPEN_S, stripe.pace_s)
            return
        if ended_well and (stripe.delivered or not stripe.missing or not stripe.doubted):
            # The piece that was under way when the last stream was closed may have been lost, and
            # with it nothing was left to send. A source that says twice running that it gave
            # everything, and gave nothing, does not keep its word.
            stripe.doubted = bool(stripe.missing) and not stripe.delivered
            stripe.retry_at = now + REOPEN_S if stripe.missing else 0.0
            return
        reason: Reason = "short" if ended_well else "unavailable" if event.reason == "failed" else event.reason  # type: ignore[assignment]
        self._last_failure = f"{source}: {event.error.what if event.error else reason}"
        self._failed_at = now
        if source == ORIGIN and not unasked and event.error is not None and event.error.exit_code in (3, 4):
            out.append(Complain(stripe.number, source, reason, event.piece))
            self._give_up(event.error, out)
            return
        stripe.candidates.failed(source)
        self.sources.failed(source, reason, now=now)
        out.append(Complain(stripe.number, source, reason, event.piece))
        if reason == "corrupt" and source == ORIGIN:
            self._origin_corrupt += 1
            if self._origin_corrupt >= ORIGIN_CORRUPT_MAX:
                what = event.error.what if event.error else "pieces do not match their hashes"
                self._give_up(
                    Corrupt(f"the origin's copy of {self.blob} is corrupt: {what}", remedy="Push it again"), out
                )
                return
        self._open(stripe, now, out)

    def _tick(self, now: float, out: list[Command]) -> None:
        if now - self._progressed_at > self.patience_s:
            last = f"; the last failure was {self._last_failure}" if self._last_failure else ""
            tracker = "" if self._tracker else "; no tracker answers"
            self._give_up(
                Unavailable(
                    f"nothing of {self.blob} arrived for {self.patience_s:.0f} s{tracker}{last}",
                    remedy="What has arrived is kept: pull again when the tracker and the origin are back",
                ),
                out,
            )
            return
        for stripe in self._stripes:
            if stripe.stream is None:
                self._open(stripe, now, out)
            elif stripe.source is None or not stripe.missing:
                continue
            elif not self._tracker and stripe.candidates.wants_back(stripe.source, self.sources, now=now):
                self._close(stripe, out, after_piece=True)
                self._open(stripe, now, out)
            else:
                self._check_stall(stripe, stripe.source, now, out)
        if now - self._window_from >= SLOW_WINDOW_S:
            self._window_from = now
            self._compare(out)

    def _compare(self, out: list[Command]) -> None:
        """Complain of stripes that got far less than another in the window that ends now."""
        best = max(stripe.gained for stripe in self._stripes)
        for stripe in self._stripes:
            slow = stripe.missing and best >= SLOW_PIECES and stripe.gained < SLOW_SHARE * best
            stripe.slow_windows = stripe.slow_windows + 1 if slow and stripe.stream is not None else 0
            stripe.gained = 0
            windows = stripe.slow_windows
            if windows and windows & (windows - 1) == 0 and stripe.source is not None:
                out.append(Complain(stripe.number, stripe.source, "slow"))

    def _check_stall(self, stripe: _Stripe, source: Source, now: float, out: list[Command]) -> None:
        stall_s = max(STALL_FIRST_S, STALL_PACES * stripe.pace_s)
        if self._tracker:
            quiet_s, limit_s = now - stripe.quiet_since, min(STALL_MAX_S, stall_s * 2 ** min(stripe.complaints, 10))
        else:
            quiet_s = now - max(stripe.stored_at, self._alone_since)
            limit_s = stripe.candidates.patience_s(source, stall_s, fed=stripe.delivered > 0)
        if quiet_s < limit_s:
            return
        stripe.complaints += 1
        stripe.quiet_since = now
        out.append(Complain(stripe.number, source, "stalled"))
        if not self._tracker or source != stripe.candidates.parent:
            stripe.candidates.failed(source, still=not self._tracker)
            if self._tracker:
                self.sources.failed(source, "stalled", now=now)
            self._close(stripe, out, after_piece=False)
            self._open(stripe, now, out)

    def _give_up(self, error: P2PDistError, out: list[Command]) -> None:
        self._close_all(out)
        self.finished = True
        out.append(GaveUp(error))
