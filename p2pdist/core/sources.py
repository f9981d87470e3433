"""The sources that a host may receive from: which it trusts to try, which it asks for a stripe, in
which order, and how long it waits for each.

Theory of trust (`Sources`). A source that fails is left alone for a time that doubles with each
failure in a row; one that sent wrong bytes is left alone for CORRUPT_S. The origin is never avoided
for wrong bytes: the download that reads it decides how often to try again. A source that is silent
is left alone with all others at its address, since one process answers for them.

Theory of silence (`ResponseTimes`). An agent responds to a stream at once, whether or not it has a
piece to send, and says if it has none. So a response that is late says something of its agent
before any piece could. How late is late follows what responses, and first pieces, usually take
here, as a TCP sender's retransmission timeout follows round trips (RFC 6298), between a floor and a
ceiling. When one source after another is silent the fault may be this host's or its network's, and
they are given more time. A host that has nothing of a blob says so much sooner, and accuses no
source: the tracker can let it read the origin.

Theory of the order (`Candidates`). The tracker's choice comes first: the parent, then the
alternates. While no tracker answers the superpeers follow, a few hosts of the zone that the tracker
named for this, in the order of rendezvous hashing on blob and stripe. It is the same order at every
host, so hosts that lost their sources meet at the first superpeer that works. A superpeer has the
origin in the place of itself, and reads it of its own accord: once all before it have failed it,
and after a pause that grows with its rank and differs from host to host. So hosts that stand still
in a circle, each waiting for the next, come to a superpeer that reads the origin, or to a host that
receives from it. Each candidate is tried once in a round; rounds give ever more time.

When a host near the root fails, all that receive through it stand still at once, and must not turn
to one superpeer at once. The hosts next to the failure see their streams end, and move. The others
wait for the source that fed them: the first superpeer least, since it is to read the origin, the
next ones longer, and the rest for a time from an exponential distribution that is cut off
(Nonnenmacher and Biersack, "Scalable Feedback for Large Groups", IEEE/ACM Transactions on
Networking 1999). Few move early however many wait, and the hosts that receive through one of these
get pieces again and stay. The core draws no lots; what differs from host to host it takes from
hashes.

A host that moved because the tracker's choice stood still visits it now and then, with growing
pauses, and stays once it gives pieces again: it may only have waited as well. So the trees grow
together around a gap, and a superpeer ceases to read the origin where it need not. Between visits
the host is at its refuge, the source that feeds it.

Invariants: the origin is chosen only as the parent that the tracker named, which is the lease, or
at a superpeer while no tracker answers; a host is never its own candidate. All times are in
seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import log

from p2pdist.model.digest import Digest
from p2pdist.model.messages import Reason
from p2pdist.model.plan import ORIGIN, Source
from p2pdist.model.rendezvous import fraction, ranked

ORIGIN_PAUSE_S = 0.5
"""A superpeer waits for this time, multiplied by its rank and a part of one, before it reads the
origin."""

SETTLED_PACES = 3.0
SETTLED_SPREAD = 8.0
CROWD = 10_000
"""A source that fed this host may stand still for SETTLED_PACES to (1 + SETTLED_SPREAD) times as
many; of CROWD hosts that wait, about one moves at the beginning of that time."""

SUPERPEER_PACES = 4.0
SUPERPEER_PACES_OF_SUPERPEERS = 12.0
SUPERPEER_PACES_A_RANK = 3.0
"""A superpeer is given longer than other candidates: it may have to turn to the origin first.
Another superpeer waits even longer for the superpeers before it, the longer the higher its rank,
since it would read the origin itself."""

VISIT_S = 2.0
DOUBLINGS_MAX = 8
WAIT_MAX_S = 40.0


@dataclass(slots=True)
class Candidates:
    """Chooses the source of one stripe at one host."""

    host: str
    blob: Digest
    stripe: int
    parent: Source | None = None
    """The tracker's choice (`planned`)."""
    alternates: tuple[Source, ...] = ()
    """Its choices after that."""
    rank: int | None = None
    """This host's place among the superpeers, None when it is none (`superpeers_named`)."""
    _superpeers: tuple[Source, ...] = ()
    """The superpeers of the zone in their order, the origin in the place of this host."""
    _tried: dict[Source, None] = field(default_factory=dict)
    """Sources that failed in this round."""
    _rounds: int = 0
    """Rounds that failed in a row, up to DOUBLINGS_MAX."""
    _origin_at: float | None = None
    """When this superpeer may read the origin; None before its pause has begun."""
    _still: dict[Source, None] = field(default_factory=dict)
    """Choices of the tracker that stood still while none answered."""
    _refuge: Source | None = None
    """The source that feeds this host between visits."""
    _visiting: Source | None = None
    """The choice of the tracker that is tried again."""
    _visit_at: float | None = None
    """When the next visit is due, None while none is."""
    _visits: int = 0
    """Visits since the tracker's choice stood still."""

    def planned(self, parent: Source | None, alternates: tuple[Source, ...]) -> None:
        """Take the tracker's choice: what happened before counts no more."""
        self.parent, self.alternates = parent, alternates
        self._begin_round()
        self._forget_visits()

    def superpeers_named(self, superpeers: tuple[Source, ...]) -> None:
        """Take the superpeers of this host's zone that the tracker names."""
        by_name = {superpeer.host: superpeer for superpeer in superpeers if not superpeer.is_origin}
        names = ranked(self._key, by_name, len(by_name))
        self.rank = names.index(self.host) if self.host in by_name else None
        self._superpeers = tuple(ORIGIN if name == self.host else by_name[name] for name in names)
        self._forget_visits()

    @property
    def hosts(self) -> bool:
        """Whether it knows other hosts."""
        named = (self.parent, *self.alternates, *self._superpeers)
        return any(source is not None and not source.is_origin for source in named)

    def fed(self, source: Source, *, now: float) -> None:
        """Note that a piece came from the chosen source."""
        if self._tried or self._rounds or self._origin_at is not None:
            self._begin_round()
        if not self._still:
            return
        if source == self.parent:
            self._forget_visits()
            return
        self._still.pop(source, None)
        self._refuge, self._visiting = source, None
        if self._visit_at is None and self._better_than(source):
            self._visit_at = now + VISIT_S * 2 ** min(self._visits, DOUBLINGS_MAX)

    def failed(self, source: Source, *, still: bool = False) -> None:
        """Note that a source failed, or stood `still`: the others of this round come first."""
        self._tried[source] = None
        self._origin_at = self._visit_at = None
        self._still.pop(source, None)
        if still and (source == self.parent or source in self.alternates):
            self._still[source] = None
        if source == self._visiting:
            self._visiting = None
        if source == self._refuge:
            self._refuge = None

    def choose(self, sources: Sources, *, alone: bool, now: float) -> tuple[Source | None, float]:
        """The source to receive from now, or None and when to look again. `alone`: no tracker
        answers."""
        order = list(self._order(alone))
        usable = [source for source in order if sources.usable(source, now=now)]
        if not usable:
            return None, min(map(sources.usable_at, order), default=0.0)
        source = next((candidate for candidate in usable if candidate not in self._tried), None)
        if source is None:
            rounds = self._rounds
            self._begin_round()
            self._rounds = min(DOUBLINGS_MAX, rounds + 1)
            source = usable[0]
        if source.is_origin and source not in (self.parent, self._refuge) and self.rank is not None:
            if self._origin_at is None:
                self._origin_at = now + ORIGIN_PAUSE_S * (self.rank + fraction(self._key, self.host))
            if now < self._origin_at:
                return None, self._origin_at
        return source, now

    def others(self, source: Source, sources: Sources, *, now: float) -> bool:
        """Whether the tracker named another source that may be tried now."""
        named = (self.parent, *self.alternates)
        return any(other is not None and other != source and sources.usable(other, now=now) for other in named)

    def wants_back(self, source: Source, sources: Sources, *, now: float) -> bool:
        """Whether it is time to leave `source` for a visit, which `choose` then names. Only while
        no tracker answers."""
        if self._visit_at is None or now < self._visit_at:
            return False
        better = self._better_than(source)
        self._visiting = next((candidate for candidate in better if sources.usable(candidate, now=now)), None)
        if self._visiting is None:
            return False
        self._visit_at = None
        self._visits += 1
        return True

    def patience_s(self, source: Source, stall_s: float, *, fed: bool) -> float:
        """How long `source` may stand still while no tracker answers, where a piece that takes
        longer than `stall_s` is late. `fed`: whether it has given this host something since it was
        chosen."""
        if source.is_origin:
            return WAIT_MAX_S  # a piece that it does not give is nowhere else
        superpeer = source in self._superpeers
        if superpeer and self.rank is not None and self._superpeers.index(source) < self.rank:
            paces = (SUPERPEER_PACES_OF_SUPERPEERS + SUPERPEER_PACES_A_RANK * self.rank) * 2.0**self._rounds
        elif fed or (source == self.parent and not self._rounds and not self._visits):
            paces = 1.0 + self.rank if self.rank is not None else SETTLED_PACES * (1 + SETTLED_SPREAD * self._lateness)
        else:
            paces = (SUPERPEER_PACES if superpeer and self.rank is None else 1.0) * 2.0**self._rounds
        return min(WAIT_MAX_S, paces * stall_s)

    def _order(self, alone: bool) -> Iterator[Source]:
        tracker = (self.parent, *self.alternates)
        order = (self._visiting, self._refuge, *tracker, *self._superpeers) if alone else tracker
        return (source for source in order if source is not None)

    def _better_than(self, source: Source) -> list[Source]:
        """Sources that only stood still, and that the tracker prefers to `source`."""
        preferred = (self.parent,) if source in self.alternates else (self.parent, *self.alternates)
        return [candidate for candidate in self._still if candidate in preferred]

    def _begin_round(self) -> None:
        self._tried.clear()
        self._rounds, self._origin_at = 0, None

    def _forget_visits(self) -> None:
        """Forget the sources to go back to."""
        self._still.clear()
        self._refuge = self._visiting = self._visit_at = None
        self._visits = 0

    @property
    def _key(self) -> bytes:
        return f"{self.blob}/{self.stripe}".encode()

    @property
    def _lateness(self) -> float:
        """From 0 to 1, most of it near 1: when this host moves among all that stand still."""
        return max(0.0, 1 + log(fraction(self._key, self.host)) / log(CROWD))


RESPONSE_MIN_S, FIRST_PIECE_MIN_S = 0.3, 1.0
RESPONSE_UNKNOWN_S, FIRST_PIECE_UNKNOWN_S = 0.6, 1.0
"""What is waited for where nothing has been measured yet."""

SILENCE_MAX_S = 20.0
DEVIATIONS = 4.0
STARVED_MIN_S, STARVED_UNKNOWN_S = 0.15, 0.2
STARVED_NEAR_S, STARVED_CONNECTS = 0.1, 20.0
STARVED_BYTES_S = float(1 << 20)
"""A host that has nothing of a blob says so once a first piece is late: a response takes so long at
least where it is usually quicker, and where none was measured yet, or near a source to which it
connected much more quickly, and a piece comes at that rate at least. That accuses no source, so it
may be said long before one is silent."""

STARVED_CERTIFIED = 2.0
"""Times as long where all sources have certificates of the fleet: each stream may begin with a TLS
handshake, which many hosts that start at once on one machine make one after the other; and no
stranger is among them."""

SILENT_ROW = 4
"""After so many silent sources in a row the next ones have twice the time, after twice as many
three times."""

SILENT_FIRST_S, SILENT_MAX_S = 2.0, 120.0
"""How long an address that was silent is left alone; twice as long each time."""


@dataclass(slots=True)
class _Smoothed:
    """A smoothed time and its deviation (RFC 6298, 2)."""

    mean_s: float = -1.0
    deviation_s: float = 0.0

    def add(self, seconds: float) -> None:
        if self.mean_s < 0:
            self.mean_s, self.deviation_s = seconds, seconds / 2
            return
        self.deviation_s += 0.25 * (abs(seconds - self.mean_s) - self.deviation_s)
        self.mean_s += 0.125 * (seconds - self.mean_s)

    def limit_s(self, least_s: float, unknown_s: float) -> float:
        return unknown_s if self.mean_s < 0 else max(least_s, self.mean_s + DEVIATIONS * self.deviation_s)


@dataclass(slots=True)
class ResponseTimes:
    """How long sources take to respond, and to give their first piece, at this host."""

    certified: bool = False
    """Whether all sources have certificates of the fleet."""
    _responses: _Smoothed = field(default_factory=_Smoothed)
    _first_pieces: _Smoothed = field(default_factory=_Smoothed)
    _silent_row: int = 0
    """Sources that were silent since one gave a piece."""
    _unanswered: bool = False
    """Whether a source was left before it responded, and none has responded since. What its
    response would have taken is not known, so more time is given, once (as in RFC 6298, 5.5), but
    where it was connected at once: then the path is short."""

    def responded(self, seconds: float) -> None:
        """Note how long a response took."""
        self._responses.add(seconds)
        self._unanswered = False

    def unanswered(self, connected_s: float | None) -> None:
        """Note that this host left a source before it responded; `connected_s` is how long it took
        to connect, None where it has not."""
        self._unanswered = connected_s is None or connected_s > STARVED_MIN_S / 2

    def gave(self, seconds: float) -> None:
        """Note how long a stream took to its first piece."""
        self._first_pieces.add(seconds)
        self._silent_row = 0

    def silent(self) -> None:
        """Note that a source was silent."""
        self._silent_row += 1

    def limit_s(self, *, responded: bool) -> float:
        """How long a source may be silent, before it has responded or after that."""
        if responded:
            usual_s = self._first_pieces.limit_s(FIRST_PIECE_MIN_S, FIRST_PIECE_UNKNOWN_S)
        else:
            usual_s = self._responses.limit_s(RESPONSE_MIN_S, RESPONSE_UNKNOWN_S)
        return min(SILENCE_MAX_S, usual_s * (1 + self._silent_row // SILENT_ROW))

    def starved_s(self, piece_size: int, connected_s: float | None = None) -> float:
        """How long this host waits for its first piece of a blob before it says that it has none,
        from a source to which it took `connected_s` to connect, if that is known."""
        usual_s = self._responses.limit_s(STARVED_MIN_S, STARVED_UNKNOWN_S) * (1 + self._unanswered)
        if connected_s is not None:  # the kernel of the source answers, and shows how long the path is
            usual_s = min(usual_s, max(STARVED_NEAR_S, STARVED_CONNECTS * connected_s))
        usual_s *= STARVED_CERTIFIED if self.certified else 1.0
        return min(SILENCE_MAX_S, usual_s + piece_size / STARVED_BYTES_S)


BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 15.0
CORRUPT_S = 600.0
SOURCES_MAX = 4096


@dataclass(slots=True)
class _Record:
    failures: int
    avoid_until: float
    reason: Reason


@dataclass(slots=True)
class Sources:
    """What this host has seen of all its sources. At most SOURCES_MAX are remembered, and as many
    addresses, the oldest forgotten first."""

    times: ResponseTimes = field(default_factory=ResponseTimes)
    _records: dict[Source, _Record] = field(default_factory=dict)
    _silent: dict[str, _Record] = field(default_factory=dict)
    """Addresses that were silent."""

    def failed(self, source: Source, reason: Reason, *, now: float) -> None:
        """Note that `source` failed for `reason`."""
        old = self._records.pop(source, None)
        failures = old.failures + 1 if old else 1
        if reason == "corrupt" and not source.is_origin:
            until = now + CORRUPT_S
        else:
            until = now + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(failures - 1, 10))
        if old is not None and old.reason == "corrupt" and not source.is_origin:
            reason = "corrupt"
        self._records[source] = _Record(failures, max(until, old.avoid_until if old else 0.0), reason)
        if len(self._records) > SOURCES_MAX:
            del self._records[next(iter(self._records))]

    def forgive(self, source: Source) -> None:
        """Forget that `source` sent wrong bytes: the list that they were compared with was
        wrong."""
        record = self._records.get(source)
        if record is not None and record.reason == "corrupt":
            del self._records[source]

    def silent(self, source: Source, *, now: float) -> None:
        """Note that `source` did not respond in time, or sent nothing, though it did not say that
        it had nothing."""
        old = self._silent.pop(source.address, None)
        failures = old.failures + 1 if old else 1
        until = now + min(SILENT_MAX_S, SILENT_FIRST_S * 2 ** min(failures - 1, 10))
        self._silent[source.address] = _Record(failures, until, "stalled")
        if len(self._silent) > SOURCES_MAX:
            del self._silent[next(iter(self._silent))]
        self.times.silent()

    def silence_s(self, source: Source, *, responded: bool) -> float:
        """How long `source` may be silent: twice as long each time that its address was."""
        old = self._silent.get(source.address)
        doublings = min(old.failures, 10) if old else 0
        return min(SILENCE_MAX_S, self.times.limit_s(responded=responded) * 2.0**doublings)

    def _reasons(self, source: Source) -> Iterator[_Record]:
        """Why `source` may have to be left alone."""
        if (record := self._records.get(source)) is not None:
            yield record
        if self._silent and (record := self._silent.get(source.address)) is not None:
            yield record

    def delivered(self, source: Source, first_s: float | None = None) -> None:
        """Note that `source` gave a good piece: failures are forgiven, wrong bytes are not.
        `first_s`: it was the first one of its stream, which took so long."""
        if first_s is not None and not source.is_origin:
            self.times.gave(first_s)
        if self._silent:
            self._silent.pop(source.address, None)
        record = self._records.get(source) if self._records else None  # with every piece: no hash of it
        if record is not None and (record.reason != "corrupt" or source.is_origin):
            del self._records[source]

    def usable(self, source: Source, *, now: float) -> bool:
        """Whether the source may be tried."""
        return all(now >= record.avoid_until for record in self._reasons(source))

    def complaint(self, source: Source, *, now: float) -> Reason | None:
        """Why the source is not usable; None when it is."""
        return next((record.reason for record in self._reasons(source) if now < record.avoid_until), None)

    def usable_at(self, source: Source) -> float:
        """When the source may be tried again, 0 for at once."""
        return max((record.avoid_until for record in self._reasons(source)), default=0.0)
