"""Member: one host in a swarm, as the tracker knows it.

A member is a receiver (it lacks pieces) or a seed (it has all of them). A receiver has one parent
in each stripe that it still lacks: another member, the origin, or none yet. A member has a number
of upload slots (child streams). They are allotted to stripes, and each child takes one, unless the
child is a slow receiver: its downlink takes next to nothing of an uplink.

A member is absent after its session ended, or while it is silent, until it says again what it
holds. Its streams may well run on, so its edges stay for a while, but it gets no new parents and no
new children.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from p2pdist.model.plan import Source, StripePlan
from tracker.core.host import PLACES_MAX, SITE_END

FROM_ORIGIN = ""
"""Stands for the origin where a parent's host name is expected."""


STARVED_BY = 3
"""A host without a piece of some stripes that so many parents failed there, each named to it by the
tracker, is starved: these parents may be any, and vouch for each other."""

FAILED_MAX = 16
"""Stripes and parents of which one host says that they failed it."""

STILL_S = 4.0
"""A host that has pieces is starved only where nothing of any stripe has come for so long since it
first complained. Honest parents may all pause for a while, as on a busy machine, and what a second
host reads of the origin is read twice."""

STILL_SOON_S = 0.4
"""The same where the host says that it stands still longer than its own pieces explain
(p2pdist/core/download), and none of these parents says that it gave anything to any host."""

GIVING_STILL_S = 18.0
"""Parents that give to others, as they say, count from then on: before, it is more likely that the
paths from them are cut."""

TOLD_MAX = 8
"""Plans in which a host may complain of parents and alternates; it forgets earlier ones itself."""

YIELDS_MAX_S = 120.0
"""A host is a receiver that yields for so long in all, in one swarm: then it is judged as others
are, whatever it says."""


ROWS_MAX = 1024
"""Rows that members share, with an entry for each stripe: most members have one of few."""


@lru_cache(ROWS_MAX)
def shared(row: tuple[int, ...]) -> tuple[int, ...]:
    """The row that is kept for all members that have an equal one; of few slots or stripes, not of
    counts, which differ."""
    return row


def add(row: tuple[int, ...], stripe: int, count: int) -> tuple[int, ...]:
    """A row with `count` more in one stripe."""
    return shared((*row[:stripe], row[stripe] + count, *row[stripe + 1 :]))


def set_times(row: tuple[float, ...], stripes: list[int], times: tuple[float, ...]) -> tuple[float, ...]:
    """A row with the times of another one in some stripes; that one itself where both are equal."""
    if len(stripes) == len(row):
        return times
    later = list(row)
    for stripe in stripes:
        later[stripe] = times[stripe]
    return times if (changed := tuple(later)) == times else changed


def set_time(row: tuple[float, ...], stripe: int, times: tuple[float, ...]) -> tuple[float, ...]:
    """A row with the time of another one in one stripe; that one itself where both are equal."""
    later = (*row[:stripe], times[stripe], *row[stripe + 1 :])
    return times if later == times else later


@lru_cache(PLACES_MAX)
def site_of(zone: str) -> str:
    """The site of a zone, as a member has it."""
    return zone.partition(SITE_END)[0]


@lru_cache(PLACES_MAX)
def rack_in(zone: str, rack: str) -> str:
    """The name of a rack, as a member has it: racks of one name in two zones are two, and names
    hold no white space, so a space keeps them apart."""
    return f"{zone} {rack}"


@dataclass(frozen=True, slots=True)
class Lag:
    """A host lags behind its parent in a stripe."""

    since: float
    """Time at which it began to."""
    count: int
    """Pieces of the stripe that the host had then."""


@dataclass(slots=True)
class Starvation:
    """The parents of a host that gave it nothing."""

    failed_by: dict[tuple[int, str], None] = field(default_factory=dict)
    """Stripes of which the host has no piece, with parents that the tracker named and that gave it
    nothing of them; at most FAILED_MAX. `fail_by`, `feed`."""
    starved_by: dict[int, str] = field(default_factory=dict)
    """By stripe the parent of which the host said that nothing came, while it has no piece of any.
    `starve`, `feed`."""
    still_since: float | None = None
    """Time at which the host, which has pieces, first complained since it got the last one, of any
    stripe; None where it has not. `stand_still`, `feed`."""
    given_up: set[int] = field(default_factory=set)
    """Stripes of which the host has pieces, and gets more where it can be rescued: its parents
    there said that they have more, and gave nothing while its whole pull stood still. `give_up`,
    `feed`."""
    stopped_by: dict[tuple[int, str], bool] = field(default_factory=dict)
    """Stripes of which the host has pieces, with parents that the tracker named, that said that
    they have more and gave nothing since its last piece, and whether they gave to others, as they
    say; at most FAILED_MAX. `stop_by`, `feed`."""

    def fail_by(self, stripe: int, parent: str) -> bool:
        """A parent gave nothing of a stripe of which the host has no piece; whether it is
        starved."""
        if len(self.failed_by) < FAILED_MAX:
            self.failed_by[stripe, parent] = None
        return self._starved

    def starve(self, stripe: int, parent: str) -> None:
        """The host, which has no piece, says that nothing has come from its parent yet."""
        self.starved_by[stripe] = parent

    def give_up(self, stripe: int) -> None:
        """The host, which has pieces, leaves a parent of which it said that nothing comes."""
        self.given_up.add(stripe)

    def stand_still(self, *, now: float) -> None:
        """The host, which has pieces, complains that it gets no more."""
        self.still_since = now if self.still_since is None else self.still_since

    def stop_by(self, stripe: int, parent: str, *, gives: bool) -> None:
        """A parent that says that it has more of a stripe gave nothing since the host's last piece;
        `gives`: it says that it sent something of late."""
        if len(self.stopped_by) < FAILED_MAX:
            self.stopped_by[stripe, parent] = gives

    def stopped_in(self, stripe: int, *, now: float) -> bool:
        """Whether the host has got nothing for long, and so many parents stopped giving, one of
        them in this stripe, that they may be in league."""
        still_s = 0.0 if self.still_since is None else now - self.still_since
        if still_s < STILL_S:
            return False
        stopped = [each for each, gives in self.stopped_by.items() if not gives or still_s >= GIVING_STILL_S]
        return any(number == stripe for number, _ in stopped) and len({parent for _, parent in stopped}) >= STARVED_BY

    def stopped_soon(self, *, now: float) -> bool:
        """Whether so many parents stopped giving, and give to none, that they may be in league."""
        still_s = 0.0 if self.still_since is None else now - self.still_since
        return (
            still_s >= STILL_SOON_S
            and len({parent for (_, parent), gives in self.stopped_by.items() if not gives}) >= STARVED_BY
        )

    def feed(self, counts: tuple[int, ...], moved: list[int]) -> bool:
        """The host has so many pieces by stripe, of some at least one, and got some of the `moved`
        ones; whether it is starved still, of another stripe."""
        self.failed_by = {each: None for each in self.failed_by if not counts[each[0]]}
        self.stopped_by = {each: gives for each, gives in self.stopped_by.items() if each[0] not in moved}
        self.still_since = None if moved else self.still_since
        if moved:
            self.starved_by.clear()
        self.given_up.difference_update(moved)
        return self._starved or self._stopped or bool(self.given_up)

    @property
    def _starved(self) -> bool:
        """Whether so many parents gave nothing that they may be in league."""
        return len({parent for _, parent in self.failed_by}) >= STARVED_BY

    @property
    def _stopped(self) -> bool:
        """Whether so many parents stopped giving that they may be in league."""
        return len({parent for _, parent in self.stopped_by}) >= STARVED_BY


@dataclass(slots=True, eq=False)
class Member:
    """One host in a swarm. `Edges` writes parents, children and taken slots, `Swarm` counts and
    location, `Claims` what it brought; everything else changes through the methods below. Lists
    and tuples of numbers have an entry for each stripe; most equal tuples are one object."""

    host: str
    counts: tuple[int, ...]
    """Verified pieces. Swarm.advance, Swarm.forget_pieces."""
    allotted: tuple[int, ...]
    """Upload slots allotted to the stripe. `allot`, `grant_slot`, `clear_slots`, Edges.move."""
    parents: list[str | None]
    """Host name, FROM_ORIGIN or None. Edges."""
    children: list[tuple[str, ...]]
    """Host names in the order in which they were attached. Edges."""
    joined_at: float
    """Time at which the host joined the swarm."""
    had: bool
    """Whether it joined with pieces: then what it has says nothing of how fast they came."""
    slots: int
    """Upload slots in all stripes together; below zero never. `set_slots`, `reduce_slots`."""
    complaints: tuple[int, ...]
    """Complaints since the host last got a piece of the stripe. `complain`, `forgive`."""
    moved_at: tuple[float, ...]
    """Time at which pieces last came or the parent changed. Swarm.advance, Edges.attach."""
    attached_at: tuple[float, ...]
    """Time at which the parent changed. Edges.attach."""
    rates: Sequence[float]
    """Pieces a second between the last two reports. `set_rates`."""
    lags: tuple[Lag | None, ...]
    """Since when the host lags behind its parent. `set_lag`, `clear_lags`."""
    order: int
    """Orders hosts differently for each blob, and the same in every tracker."""
    zone: str = ""
    """Name of the zone; with a site this comes first, and SITE_END. Swarm.set_location."""
    site: str = ""
    """Name of the site; that of the zone, where this names no site. Swarm.set_location."""
    rack: str = ""
    """Zone and rack with a space between them. Swarm.set_location."""
    seed: bool = False
    """Whether the host has every piece. Swarm.advance, Swarm.forget_pieces."""
    absent_since: float | None = None
    """Time at which the host became absent; None while it is present. `mark_absent`,
    `mark_present`."""
    silent: bool = False
    """Absent because it sends no reports though it has a session. `mark_absent`, `mark_present`."""
    doubted_until: float = 0.0
    """Until when it is not believed that it has its pieces; 0 where it is. `doubt`."""
    heard_at: float = 0.0
    """Time of its last report. `hear`."""
    yielded_at: float = -inf
    """Time of the last report that said that the host's preseed held back for its readers.
    `hear`."""
    yielded_s: float = 0.0
    """For how many seconds reports have said so. `hear`."""
    hearsay: bool = False
    """Another host named it as its parent, and it has not spoken of the blob itself.
    `mark_hearsay`, `mark_present`."""
    slow_receiver: bool = False
    """Its downlink is so slow that it takes no slot of its parents. Swarm.set_slow_receiver."""
    relieved_at: float = -inf
    """Time at which its slots were reduced. `reduce_slots`."""
    fair_reports: int = 0
    """Reports in a row that show that a slow receiver is none. `count_fair_report`."""
    taken: tuple[int, ...] = ()
    """Upload slots that children take. Edges."""
    claimed: bool = False
    """Whether it brought pieces that no parent here gave it. Claims."""
    starvation: Starvation | None = None
    """What parents did not give; None where all gave something. `starve`, Swarm.advance."""
    promised: int = 0
    """Bit i: the parent of stripe i said that it had pieces of it before it became the parent.
    Edges.attach."""
    rescued: frozenset[int] = frozenset()
    """Stripes that the host reads although its site has a root, since it was starved. Edges."""
    told: tuple[str, ...] = ()
    """The hosts that were named in the plans that the host was sent last, at most TOLD_MAX; those
    of the latest plan come first, and FROM_ORIGIN stands between two plans. `record_plan`."""
    superpeers: tuple[Source, ...] = ()
    """The superpeers that the host was told of in its session. `set_superpeers`."""

    @property
    def present(self) -> bool:
        """Whether the host has said in its present session what it holds."""
        return self.absent_since is None

    @property
    def serves(self) -> bool:
        """Whether others may receive from the host: it is present, and what it says that it holds
        is believed."""
        return self.absent_since is None and not self.doubted_until

    @property
    def unallotted(self) -> int:
        """Upload slots that are allotted to no stripe."""
        return self.slots - sum(self.allotted)

    @property
    def load(self) -> int:
        """Upload slots that children take, in all stripes."""
        return sum(self.taken)

    def free(self, stripe: int) -> int:
        """Allotted upload slots of a stripe that no child takes; below zero where there are too
        few."""
        return self.allotted[stripe] - self.taken[stripe]

    def allot(self, stripe: int, count: int) -> None:
        """Give a stripe `count` of the unallotted slots; below zero it loses as many."""
        self.allotted = add(self.allotted, stripe, count)

    def grant_slot(self, stripe: int) -> None:
        """Allot one more slot to a stripe, from the unallotted ones or from a stripe where one is
        idle. A host that has neither is overloaded and keeps its allotment."""
        if self.unallotted <= 0:
            stripes = range(len(self.allotted))
            donor = next((other for other in stripes if other != stripe and self.free(other) > 0), None)
            if donor is None:
                return
            self.allot(donor, -1)
        self.allot(stripe, 1)

    def allot_all(self) -> None:
        """Allot every slot to the one stripe of a small blob."""
        self.allotted = shared((self.slots, *self.allotted[1:]))

    def clear_slots(self) -> None:
        """Take all slots from the stripes."""
        self.allotted = shared((0,) * len(self.allotted))

    def set_slots(self, slots: int) -> None:
        """The host may serve so many children."""
        self.slots = slots

    def reduce_slots(self, slots: int, *, now: float) -> None:
        """The host turned out slow, or is banned: none of its slots is allotted from now on."""
        self.slots, self.relieved_at = slots, now
        self.clear_slots()

    def doubt(self, until: float) -> None:
        """The host is not believed until then, and serves no host; 0: it is believed."""
        self.doubted_until = until
        if until:
            self.slots = 0
            self.clear_slots()

    def complain(self, stripe: int) -> None:
        """The host complains of its parent in a stripe."""
        self.complaints = (*self.complaints[:stripe], self.complaints[stripe] + 1, *self.complaints[stripe + 1 :])

    def forgive(self, stripe: int) -> None:
        """The host got a piece of a stripe."""
        if self.complaints[stripe]:
            self.complaints = (*self.complaints[:stripe], 0, *self.complaints[stripe + 1 :])

    def hear(self, now: float, *, yields: bool = False) -> None:
        """A report of the host came. `yields`: it says that the host's preseed held back since the
        last one, which is believed for YIELDS_MAX_S in all."""
        if yields:
            self.yielded_s += max(0.0, now - max(self.heard_at, self.joined_at))
            self.yielded_at = now if self.yielded_s < YIELDS_MAX_S else self.yielded_at
        self.heard_at = now

    def mark_absent(self, now: float, *, silent: bool = False) -> None:
        """The host has no session, has not yet said what it holds, or is silent."""
        self.absent_since, self.silent = now, silent

    def mark_present(self) -> None:
        """The host says what it holds, or reports again after it was silent."""
        self.absent_since, self.silent, self.hearsay = None, False, False

    def mark_hearsay(self, now: float) -> None:
        """Another host names it as its parent."""
        self.absent_since, self.hearsay = now, True

    def set_rates(self, rates: list[float]) -> None:
        """The host's last report shows so many pieces a second, by stripe."""
        self.rates = rates

    def set_lag(self, stripe: int, lag: Lag | None) -> None:
        """The host begins to lag behind its parent, or does so no longer."""
        if lag is not self.lags[stripe]:
            self.lags = (*self.lags[:stripe], lag, *self.lags[stripe + 1 :])

    def clear_lags(self) -> None:
        """Forget what shows that the host lags."""
        self.lags = (None,) * len(self.lags)

    def count_fair_report(self, fair: bool) -> None:
        """A report of a slow receiver shows a fair share of pieces, or one does not."""
        self.fair_reports = self.fair_reports + 1 if fair else 0

    def record_plan(self, stripes: Iterable[StripePlan]) -> None:
        """The host is sent this plan."""
        sources = (source for plan in stripes for source in (plan.parent, *plan.alternates) if source is not None)
        named = tuple(dict.fromkeys(source.host for source in sources if not source.is_origin))
        earlier = self.told
        if earlier.count(FROM_ORIGIN) == TOLD_MAX - 1:
            earlier = earlier[: len(earlier) - 1 - earlier[::-1].index(FROM_ORIGIN)]
        self.told = (*named, FROM_ORIGIN, *earlier) if earlier else named

    def starve(self) -> Starvation:
        """What parents did not give, from now on."""
        if self.starvation is None:
            self.starvation = Starvation()
        return self.starvation

    def set_superpeers(self, superpeers: tuple[Source, ...]) -> None:
        """The host is told of these superpeers; none: its agent may have started anew."""
        self.superpeers = superpeers


def yields(member: Member) -> bool:
    """Whether a host is a receiver that yields, as its last report said."""
    return member.yielded_at >= member.heard_at
