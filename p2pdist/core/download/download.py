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
try. One that trickles is silent, too. Long before that, a host that has no piece of a stripe from
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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from p2pdist.core.download.events import (
    AskTicket,
    Awaiting,
    CloseStream,
    Command,
    Complain,
    Completed,
    Event,
    GaveUp,
    HeldBack,
    Lost,
    Paused,
    PieceStored,
    Planned,
    Quiet,
    Rejected,
    StreamEnded,
    Tick,
    TrackerChanged,
    Wanted,
    WholeMatches,
)
from p2pdist.core.download.stillness import SLOW_WINDOW_S, STALL_FIRST_S, Standstill, Window
from p2pdist.core.download.streams import COMING_BYTES, Streams
from p2pdist.core.download.stripe import Complete, Receiving, Stripe, Waiting
from p2pdist.core.origin_seeding import Readers
from p2pdist.core.sources import Candidates, Sources
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable, Unsuitable
from p2pdist.model.messages import Reason
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan

STALE_S = 0.5
"""A source that sent what was listed before is tried again after so long."""

COMES_MIN_S = 0.2
COMES_PACES = 3.0
"""A stream that is replaced may finish the piece under way, unless it has been quiet for
COMES_MIN_S and for several times as long as a piece takes."""

DENIED_S = 1.0
DENIALS_MAX = 10
"""A source that asks for another ticket is tried again after so long, and is complained of from
this number of denials in a row on: a ticket that has just expired is no fault of the source."""

REOPEN_S = 0.05
TROUBLE_S = 2.0
"""The user is told why a source failed once nothing has come for so long."""

ORIGIN_CORRUPT_MAX = 3
"""The pull is given up after so many wrong pieces from the origin."""


@dataclass(slots=True)
class _Superpeers:
    """The superpeers of this host's zone, as plans named them."""

    hosts: tuple[str, ...] = ()
    """Of the last plan that named any."""
    shared: bool = False
    """Whether they share the reading of the origin, by the last plan."""

    def planned(self, plan: Plan, stripes: Sequence[Stripe]) -> None:
        """A plan has come."""
        self.shared = plan.dealt
        if plan.keepers:
            self.hosts = tuple(superpeer.host for superpeer in plan.keepers)
            for stripe in stripes:
                stripe.candidates.superpeers_named(plan.keepers)


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

    def hold(self, why: str | None, stripes: Iterable[Stripe], *, now: float) -> None:
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
    _stripes: list[Stripe] = field(default_factory=list)
    _streams: Streams = field(default_factory=Streams)
    _patience: _Patience = field(default_factory=_Patience)
    _tracker: bool = True
    """Whether a tracker answers."""
    _alone_since: float = 0.0
    """When `_tracker` changed last."""
    _paused: bool = False
    _superpeers: _Superpeers = field(default_factory=_Superpeers)
    _origin_corrupt: int = 0
    """Wrong pieces that the origin sent."""
    _window: Window = field(default_factory=Window)
    _standstill: Standstill = field(init=False)

    def __post_init__(self) -> None:
        self.have = PieceSet(self.have.count, self.have.bits)
        self.counts = self.have.stripe_counts(self.stripes)
        self._patience.progressed_at = self.started_at
        self._streams.next_ones = max(1, COMING_BYTES // self.layout.piece_size)
        for number, count in enumerate(self.counts):
            missing = len(range(number, self.layout.count, self.stripes)) - count
            self._stripes.append(_stripe(number, missing, Candidates(self.host, self.blob, number), self.started_at))
        self._standstill = Standstill(self._streams, self.layout, self.sources, self._stripes)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """What to do about an event, in this order."""
        out: list[Command] = []
        if self.finished:
            return out
        match event:
            case PieceStored():
                return self.stored(event, now=now)
            case Planned(plan):
                self._planned(plan, now, out)
            case Wanted(pieces, prefetch) if not self._paused:  # else a swarm writes, and brings them
                missing = {piece for piece in pieces if piece not in self.have}
                out += self._streams.demand(self._stripes, missing, self.sources, self.have, prefetch=prefetch, now=now)
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
                _lose(self, pieces)
            case WholeMatches():
                self.vouched = False
        _finish(self, out)
        return out

    def stored(self, event: PieceStored, *, now: float) -> list[Command]:
        """What to do about a piece. As `handle`, and shorter, since it comes with every piece."""
        out: list[Command] = []
        if not self.finished and self.have.add(event.piece):
            self._stored(event.stream, event.piece, now, out)
        _finish(self, out)
        return out

    def _stored(self, number: int, piece: int, now: float, out: list[Command]) -> None:
        still = self._standstill
        self._patience.progressed_at = now
        still.turns.stored(now=now)
        index = piece % self.stripes
        self.counts[index] += 1
        stripe = self._stripes[index]
        state, before = stripe.state, stripe.stored_at
        winner = still.winner(stripe, number) if number in self._streams.demands else None
        stripe.stored(now=now)
        if isinstance(state, Receiving) and winner is None:
            state.quiet_since = now
            state.awaiting = state.awaiting and number != state.stream
            if number == state.stream:
                if state.delivered:
                    still.gap(now - before)
                state.delivered += 1
                stripe.candidates.fed(state.source, now=now)
                self.sources.delivered(state.source, now - state.opened_at if state.delivered == 1 else None)
        elif isinstance(state, Receiving) and winner is not None and stripe.missing:
            self._leave(stripe, state.source, now, out)
            out.append(self._streams.open(stripe, winner, now=now))
        if stripe.missing == 0:
            out += self._streams.close(stripe, after_piece=True)
            stripe.state = Complete()

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

    def _planned(self, plan: Plan, now: float, out: list[Command]) -> None:
        self._superpeers.planned(plan, self._stripes)
        self._patience.hold(plan.held, self._stripes, now=now)
        for choice in plan.stripes:
            if choice.stripe < self.stripes:
                self._replanned(self._stripes[choice.stripe], choice, now, out)

    def _replanned(self, stripe: Stripe, choice: StripePlan, now: float, out: list[Command]) -> None:
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
                out += self._streams.close(stripe, after_piece=True)
        reason = self.sources.complaint(parent, now=now) if parent is not None else None
        if parent is not None and reason is not None and not parent.is_origin:
            out.append(Complain(stripe.number, parent, reason))
        elif parent is not None and reason is None:
            # A piece that does not come would keep the stream, and its slot, for long.
            comes = now - stripe.stored_at < max(COMES_MIN_S, COMES_PACES * stripe.pace_s)
            out.extend(self._streams.leave_demands(stripe, parent))
            out += self._streams.close(stripe, after_piece=comes)
        self._open(stripe, now, out)

    def _open(self, stripe: Stripe, now: float, out: list[Command]) -> None:
        """Receive a waiting stripe from the best source that may be tried now."""
        if self._paused or not isinstance(stripe.state, Waiting) or now < stripe.state.until:
            return
        source, until = stripe.candidates.choose(self.sources, alone=not self._tracker, now=now)
        if source is None:
            stripe.state = Waiting(until)
            return
        out.append(self._streams.open(stripe, source, now=now))

    def _close_all(self, out: list[Command], *, after_piece: bool = False) -> None:
        out.extend(CloseStream(stream, after_piece) for stream in self._streams.demands)
        for stripe in self._stripes:
            out.extend(self._streams.close(stripe, after_piece=after_piece))

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

    def _failed(self, stripe: Stripe, source: Source, event: StreamEnded, now: float, out: list[Command]) -> None:
        """Complain of a source and turn to the next one, unless it is the origin and hopeless."""
        reason = _complaint(event.reason)
        self._patience.failure = f"{source}: {event.error.what if event.error else reason}", now
        out.append(Complain(stripe.number, source, reason, event.piece))
        leased = source == ORIGIN and stripe.candidates.parent == ORIGIN
        if leased and event.error is not None and _is_lasting(event.error):
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
                    out += self._streams.close(stripe, after_piece=True)
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

    def _check_stall(self, stripe: Stripe, receiving: Receiving, now: float, out: list[Command]) -> None:
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

    def _leave(self, stripe: Stripe, source: Source, now: float, out: list[Command]) -> None:
        """Complain of a source that stands still, and leave it."""
        out.append(Complain(stripe.number, source, "stalled"))
        stripe.candidates.failed(source, still=not self._tracker)
        if self._tracker:
            self.sources.failed(source, "stalled", now=now)
        out += self._streams.close(stripe, after_piece=False)

    def _give_up(self, error: P2PDistError, out: list[Command]) -> None:
        self._close_all(out)
        self.finished = True
        out.append(GaveUp(error))


def _lose(download: Download, pieces: tuple[int, ...]) -> None:
    for piece in filter(download.have.__contains__, pieces):
        download.have.discard(piece)
        download.counts[piece % download.stripes] -= 1
        download._stripes[piece % download.stripes].lost(planned=download._tracker)


def _finish(download: Download, out: list[Command]) -> None:
    """Where all pieces are there the pull ends, unless what they are to be is only vouched for."""
    if not download.finished and download.have.complete and not download.vouched:
        download._close_all(out)
        download.finished = True
        out.append(Completed())


def _quiet(download: Download, event: Quiet, now: float, out: list[Command]) -> None:
    """Complain of a source that was silent for too long, and leave it if there is another."""
    streams, sources = download._streams, download.sources
    stripe = streams.stripes.get(event.stream) if download._tracker and not download.held else None
    if stripe is not None and not download.counts[stripe.number]:
        out += stripe.starved(sources, download.layout, event, now=now)
    source = stripe.silent(event, sources, now=now) if stripe is not None else None
    if stripe is None or source is None:
        return
    sources.silent(source, now=now)
    out.append(Complain(stripe.number, source, "stalled"))
    download._patience.failure = f"{source}: sends nothing", now
    if stripe.candidates.others(source, sources, now=now):
        stripe.candidates.failed(source)
        out += streams.close(stripe, after_piece=False)
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


def _is_lasting(error: P2PDistError) -> bool:
    """Whether reading the origin again would fail as well."""
    return error.exit_code in (3, 4) or isinstance(error, Unsuitable)


def _complaint(reason: str) -> Reason:
    """What is complained of where a stream ended for this reason."""
    meant = {"done": "short", "closed": "short", "failed": "unavailable", "denied": "refused", "stale": "missing"}
    return meant.get(reason, reason)  # type: ignore[return-value]


def _stripe(number: int, missing: int, candidates: Candidates, now: float) -> Stripe:
    return Stripe(number, missing, candidates, Waiting() if missing else Complete(), now)


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
