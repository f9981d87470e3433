"""Lease turnover: leases that bring nothing go to hosts and swarms that wait for one.

Theory. Any process may say that it wants a blob, and a lease is granted before it has shown
anything. So a lease is kept by progress alone: a holder that has no verified piece of its stripe
within a deadline is idle. The deadline follows what other holders take for their first piece.

Within a swarm an idle lease moves on as soon as another member lacks the stripe, to one that got
pieces of other stripes where there is any. Between swarms it is taken only while a swarm waits for
a lease and none is left: those of blobs that no manifest read here names come first, then those of
the hosts that hold the most. Where that is not enough, blobs that no manifest names keep half of
the leases: progress is what their holders say, and no host other than these may be there to see it.
Swarms wait in an order: blobs of manifests first, then those that lost the fewest leases so, then
those of hosts that hold the fewest, then in the order in which they came.

Leases that agents brought along, as they do after a restart of the tracker, may exceed the cap: as
many are taken as are over it.

A swarm that waits for a lease and has no other source is not planned again before there is one:
what strangers want in vain costs nothing from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from p2pdist.model.digest import Digest
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.origin.leases import RESCUES_BEYOND, Leases, OriginRates
from tracker.core.planning.rescue import first_idle, is_full
from tracker.core.planning.schedule import Schedule
from tracker.core.policy.book import PolicyBook
from tracker.core.repair.remedies import AVOID_S, move_lease
from tracker.core.report_rate import SHORTEST_S
from tracker.core.swarm import Swarm

FIRST_PIECE_S = 0.25
"""What a first piece is taken to need before any came."""

FIRST_PIECE_WEIGHT = 0.2
"""Weight of the latest first piece in the running mean."""

DEADLINE_FIRST_PIECES = 4
"""An idle holder has had the time of so many first pieces."""

DEADLINE_MIN_S, DEADLINE_MAX_S = 1.0, 20.0
PATIENCE = 4
"""Within a swarm a holder has so many deadlines: its children complain of it before, unless it is
the origin that is slow."""

AVOID_IDLE_S = 30.0
"""So long a starved host that read nothing is not to read again."""

TAKEN_MAX = 256
"""Leases that one look takes."""

FED_MAX = 16
"""Waiting swarms for which one look makes room."""

LOOK_S = 0.2
MEMBERS_SEEN = 8
"""Members of a waiting swarm of which the one with the fewest leases gives its place."""


@dataclass(slots=True)
class LeaseTurnover:
    """Knows the swarms with leases and those that wait for one, and takes idle leases."""

    swarms: dict[Digest, Swarm]
    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    policies: PolicyBook
    """Limits the readers of some packages."""
    described: Callable[[Digest], bool]
    """Whether a manifest that was read here names a blob."""
    leases_max: int
    """Cap on leases over all swarms of all trackers."""
    fraction: Callable[[], float] = lambda: 1.0
    """The part of that which is this tracker's, where there are several."""
    first_piece_s: float = FIRST_PIECE_S
    """Running mean of the time from a grant to the first verified piece. `progressed`."""
    measured: bool = False
    """Whether any such time is known: else the origin may be slow for all. `progressed`."""
    rates: OriginRates = field(default_factory=OriginRates)
    """How fast holders may read, as they were told."""
    waiting: dict[Digest, None] = field(default_factory=dict)
    """Keys of swarms that wait for a lease. `planned`, `look`."""
    _reading: dict[Digest, None] = field(default_factory=dict)
    """Keys of swarms that may hold leases. `note`, `reading`."""
    _looked_at: float = 0.0
    """Time of the last look. `look`."""
    _interval_s: float = SHORTEST_S
    """How often hosts report. `look`."""

    # -- what happens

    def note(self, swarm: Swarm) -> None:
        """A swarm may hold leases from now on."""
        if any(swarm.edges.roots) or swarm.origin.shares:
            self._reading[swarm.key] = None

    def planned(self, swarm: Swarm, leases: Leases) -> None:
        """A swarm was planned: whether it holds leases, and whether it waits for one."""
        self.note(swarm)
        rootless = swarm.edges.unplanned and swarm.receivers == len(swarm.members) and not all(swarm.edges.roots)
        if rootless and not leases.free(swarm):
            self.waiting.setdefault(swarm.key)
        else:
            self.waiting.pop(swarm.key, None)

    def progressed(self, member: Member, counts: tuple[int, ...], *, now: float) -> None:
        """A member reports these counts, which it is still to be given: a holder's first piece says
        how long one takes."""
        for stripe, parent in enumerate(member.parents):
            if parent == FROM_ORIGIN and counts[stripe] > member.counts[stripe] and _untouched(member, stripe):
                took = min(DEADLINE_MAX_S, max(0.0, now - member.attached_at[stripe]))
                self.measured = True
                self.first_piece_s += FIRST_PIECE_WEIGHT * (took - self.first_piece_s)

    def parked(self, swarm: Swarm) -> bool:
        """Whether only a lease, or the budget of a site, can help a swarm's members, so that
        planning it again is no use."""
        edges = swarm.edges
        if swarm.wan.rests:
            return True
        return swarm.key in self.waiting and not (any(edges.roots) or edges.avoided or edges.parted)

    # -- questions

    def reading(self) -> Iterator[Swarm]:
        """The swarms that hold leases."""
        for key in list(self._reading):
            swarm = self.swarms.get(key)
            if swarm is None or not (any(swarm.edges.roots) or swarm.origin.shares):
                del self._reading[key]
            else:
                yield swarm

    def leases(self) -> Leases:
        """The leases that are out now."""
        return Leases(self.reading(), self._cap, self.policies)

    @property
    def _cap(self) -> int:
        return max(1, int(self.leases_max * self.fraction()))

    def deadline_s(self, interval_s: float) -> float:
        """How long a holder may take for its first piece, where hosts report every `interval_s`."""
        wait_s = min(DEADLINE_MAX_S, max(DEADLINE_MIN_S, DEADLINE_FIRST_PIECES * self.first_piece_s))
        return wait_s + 2 * interval_s

    def overdue_s(self, *, waits: bool) -> float:
        """After how long without a first piece a holder that has proved nothing may be holding its
        lease for nothing; `waits`: it says that it waits for the origin. An agent responds at once,
        so of a silent one no report is waited for where it is known how long a first piece
        takes."""
        if not waits:
            return self.first_piece_s + (0.0 if self.measured else self._interval_s)
        return max(DEADLINE_MIN_S, DEADLINE_FIRST_PIECES * self.first_piece_s) if self.measured else DEADLINE_MAX_S

    @property
    def unread_s(self) -> float:
        """After how long its holder, if it reads, has reported a first piece of a stripe."""
        return self.first_piece_s + self._interval_s

    # -- what time brings

    def look(self, *, interval_s: float, now: float) -> None:
        """Move idle leases on, and plan the swarms for which there is a lease. Called often and
        regularly; hosts report every `interval_s`."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at, self._interval_s = now, interval_s
        deadline_s = self.deadline_s(interval_s)
        patience_s = PATIENCE * deadline_s if self.measured else max(DEADLINE_MAX_S, PATIENCE * deadline_s)
        for swarm in self.reading():
            if len(swarm.members) > 1:
                self._move(swarm, deadline_s, patience_s, now)
        if self.waiting:
            self._feed(now - deadline_s, now)

    def make_room(self, swarm: Swarm, stripe: int, *, now: float) -> None:
        """A starved host is to read a stripe: where as many do as may, here or in all swarms, the
        lease of one that was starved and has read nothing is taken. Any process can say that it
        starves."""
        if is_full(swarm, stripe) and self._take_idle(swarm, stripe, now):
            self.schedule.ask(swarm.key, "idle lease", now)
        if self.leases().left + RESCUES_BEYOND <= 0:
            for other in self.reading():  # which are planned again later, or they would take it back
                other.edges.set_now(now)
                if any(self._take_idle(other, number, now) for number in range(other.stripes)):
                    return

    def _take_idle(self, swarm: Swarm, stripe: int, now: float) -> bool:
        idle_s = self.first_piece_s + 2 * self._interval_s if self.measured else DEADLINE_MAX_S
        idle = first_idle(swarm, stripe, idle_s)
        if idle is None:
            return False
        swarm.edges.avoid(idle.host, FROM_ORIGIN, now + AVOID_IDLE_S)
        swarm.edges.detach(stripe, idle.host)
        swarm.record(now, f"{idle.host} loses the lease of stripe {stripe}: it was starved, and has read nothing")
        return True

    def _move(self, swarm: Swarm, deadline_s: float, patience_s: float, now: float) -> None:
        """Move the idle leases of a swarm to other members: after the deadline to one that shows
        that the origin can be read, else after a longer time."""
        for stripe, holders in enumerate(swarm.edges.roots):
            for host in list(holders):
                member = swarm.members[host]
                paced = member.site in swarm.wan.paced  # by a budget: its first piece may take long
                if member.counts[stripe] or paced or not _idle(member, stripe, now - deadline_s):
                    continue
                self.hand_on(swarm, stripe, member, anyhow=_idle(member, stripe, now - patience_s), now=now)

    def hand_on(self, swarm: Swarm, stripe: int, holder: Member, *, anyhow: bool, now: float) -> None:
        """The holder of a lease has read nothing: another host of its site gets it that shows that
        the origin can be read; without one it moves only where it does `anyhow`. A lease that a
        starved host has besides the one of its site (planning/rescue.py) ends with it."""
        heir, besides = _heir(swarm, stripe, holder.site), stripe in holder.rescued
        early = heir is not None and not swarm.layout.large  # or one piece may take as long
        if (early or anyhow) and move_lease(swarm, stripe, holder.host, now=now, at_once=False):
            swarm.record(now, f"{holder.host} loses the lease of stripe {stripe}: it has read nothing")
            if heir is not None and not besides:
                swarm.edges.attach(stripe, heir.host, FROM_ORIGIN)
            self.schedule.ask(swarm.key, "idle lease", now)

    def _feed(self, before: float, now: float) -> None:
        """Find leases for the swarms that wait."""
        leases = self.leases()
        held = Counter(host for swarm in self.reading() for host in swarm.readers())
        queue = list(islice(self._queue(held), FED_MAX))
        wanted = sum(sum(1 for holders in swarm.edges.roots if not holders) for swarm in queue)
        short = min(TAKEN_MAX, wanted - leases.left)
        if short > 0:
            self._take(short, held, before, by_manifest=bool(queue) and self.described(queue[0].blob), now=now)
            leases = self.leases()
        for swarm in queue:
            if leases.free(swarm):
                self.schedule.ask(swarm.key, "lease", now)

    def _queue(self, held: Counter[str]) -> Iterator[Swarm]:
        """The swarms that wait for a lease, the first one first."""
        for key in [key for key in self.waiting if key not in self.swarms]:
            del self.waiting[key]

        def order(swarm: Swarm) -> tuple[bool, int, int]:
            named, losses = self.described(swarm.blob), swarm.origin.leases_lost
            return not named, losses, min(held[name] for name in islice(swarm.members, MEMBERS_SEEN))

        return iter(sorted((self.swarms[key] for key in self.waiting), key=order))

    def _take(self, count: int, held: Counter[str], before: float, *, by_manifest: bool, now: float) -> None:
        """Take so many leases that bring nothing, if there are so many. `by_manifest`: a manifest
        names the blob that waits first."""
        out: list[tuple[bool, bool, int, float, Swarm, int, str]] = []
        unnamed = 0
        for swarm in self.reading():
            named = self.described(swarm.blob)
            for stripe, holders in enumerate(swarm.edges.roots):
                for host in holders:
                    member = swarm.members[host]
                    idle = _idle(member, stripe, before)
                    unnamed += not named
                    out.append((not idle, named, -held[host], member.attached_at[stripe], swarm, stripe, host))
        over = unnamed - self._cap // 2 if by_manifest else 0
        for busy, named, _, _, swarm, stripe, host in sorted(out, key=lambda each: each[:4]):
            if count <= 0:
                return
            if busy and (named or over <= 0):
                continue
            over -= not named
            count -= 1
            swarm.origin.lose_lease()
            swarm.edges.avoid(host, FROM_ORIGIN, now + AVOID_S)
            swarm.edges.detach(stripe, host)
            swarm.record(now, f"{host} loses the lease of stripe {stripe} to another blob")
            self.schedule.ask(swarm.key, "lease taken", now + AVOID_S)


def _heir(swarm: Swarm, stripe: int, site: str) -> Member | None:
    """Who of a site is to read a stripe that its holder did not: the host that got most of other
    stripes and nothing of this one, wherever it is in the tree. Else the lease goes from one that
    reads nothing to the next, and a host below them waits for all."""
    members = swarm.members
    fit = (
        member
        for host, held in swarm.bytes_held.items()  # most have nothing, or have pieces of this stripe, too
        if held
        and not (member := members[host]).counts[stripe]
        and member.site == site
        and member.present
        and not (member.claimed or member.slow_receiver or member.hearsay)
        and (member.host, FROM_ORIGIN) not in swarm.edges.avoided
    )
    return max(fit, key=lambda member: (sum(member.counts), member.order), default=None)


def _untouched(member: Member, stripe: int) -> bool:
    """Whether no piece of a stripe came since the member has its parent."""
    return member.moved_at[stripe] == member.attached_at[stripe]


def _idle(member: Member, stripe: int, before: float) -> bool:
    """Whether a holder has had its lease since `before` and shown no piece."""
    return member.attached_at[stripe] <= before and _untouched(member, stripe)
