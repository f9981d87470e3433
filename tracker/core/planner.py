"""The planner: gives every receiver a parent in every stripe.

Theory. Seats are dealt exactly (see seats.py). Then each stripe is filled from the top: hosts with seats first, each at the
shallowest free seat, so that the tree is as flat as the seats allow.

Repair uses the same pass: a lost parent's children are receivers without a parent. The one with the most pieces comes first and so
takes the place that became free. Where a stripe lacks seats, spare ones of the budget are used, then idle ones of other stripes, and
only then is somebody overloaded.

Cycles cannot arise: only hosts whose way up ends at the origin or at a whole copy are offered as parents, and whoever hangs below a host
that waits for a parent has no such way.

The whole pass costs O(members) for each stripe that has work, however many hosts join at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from p2pdist.model.plan import Source, StripePlan
from tracker.core.seats import clear, deal, mixed, outgrown
from tracker.core.swarm import FROM_ORIGIN, Member, Swarm

ALTERNATES = 2
Seat = tuple[int, int, int, str]


@dataclass(frozen=True, slots=True)
class Planner:
    """`origin_streams_max` limits the origin readers of one stripe."""

    origin_streams_max: int = 1

    def plan(self, swarm: Swarm, *, leases: int) -> None:
        """Give parents to all unplanned receivers for whom one exists. `leases`: how many new ones may be granted."""
        waiting: dict[int, list[str]] = {}
        for stripe, host in swarm.unplanned:
            if swarm.members[host].present:
                waiting.setdefault(stripe, []).append(host)
        if not waiting:
            return
        redraw = outgrown(swarm)
        before = clear(swarm) if redraw else {}
        if redraw:
            waiting = {}
            for stripe, host in swarm.unplanned:
                waiting.setdefault(stripe, []).append(host)
        deal(swarm)
        for stripe, hosts in waiting.items():
            roots = len(swarm.roots[stripe])
            _StripePass(swarm, stripe, min(self.origin_streams_max, roots + leases)).run(hosts, redraw=redraw)
            leases -= max(0, len(swarm.roots[stripe]) - roots)
        for (host, stripe), parent in before.items():
            if swarm.members[host].parents[stripe] == parent:
                swarm.changed.pop((host, stripe), None)
        if redraw or not swarm.drawn_for:
            swarm.drawn_for = swarm.receivers


class _StripePass:
    """Fills one stripe's tree, from the top, with hosts that lack a parent."""

    def __init__(self, swarm: Swarm, stripe: int, origin_streams: int) -> None:
        self.swarm, self.stripe = swarm, stripe
        self.origin_streams = origin_streams
        self.depths: dict[str, int] = {}
        self.free: list[Seat] = []
        total = swarm.totals[stripe]
        self.whole_copy = any(each.counts[stripe] == total and each.present for each in swarm.members.values())
        for member in swarm.members.values():
            if member.free(stripe) > 0:
                self._offer(member)
        heapq.heapify(self.free)

    def run(self, hosts: list[str], *, redraw: bool = False) -> None:
        """Attach `hosts`; those for whom there is no parent stay unplanned. In a tree that is drawn anew the few pieces that hosts have do
        not matter."""
        stripe, members = self.stripe, self.swarm.members
        heads: list[str] = []
        others = hosts
        if not redraw:
            heads = [host for host in hosts if members[host].children[stripe] or members[host].counts[stripe]]
            others = [host for host in hosts if not (members[host].children[stripe] or members[host].counts[stripe])]
        heads.sort(
            key=lambda host: (not members[host].budget, -members[host].counts[stripe], -members[host].seats[stripe])
        )
        others.sort(key=self._order)
        # Whoever finds no parent at first may find one among those who did.
        left = [host for host in heads + others if not self._attach(host)]
        if len(left) < len(hosts):
            for host in left:
                self._attach(host)

    def _attach(self, host: str) -> bool:
        """Give a host a parent; returns whether there is one."""
        member, stripe = self.swarm.members[host], self.stripe
        parent = self._parent_for(member)
        if parent is None:
            return False
        self.swarm.attach(stripe, host, parent)
        depth = self.depths[host] = self.depths.get(parent, 0) + 1
        if member.free(stripe) > 0 and member.present:
            heapq.heappush(self.free, (depth, 0, member.load, host))
        return True

    def _order(self, host: str) -> tuple[bool, int, int, int]:
        """Newcomers: those with seats first, and among them those that read the origin for no other stripe yet."""
        member = self.swarm.members[host]
        seats = member.seats[self.stripe]
        return seats == 0, member.parents.count(FROM_ORIGIN), -seats, mixed(self.swarm.blob, host)

    def _offer(self, member: Member) -> None:
        if member.present and self.swarm.rooted(self.stripe, member.host):
            depth = self.depths[member.host] = self.swarm.depth(self.stripe, member.host)
            self.free.append((depth, 0, member.load, member.host))

    def _parent_for(self, child: Member) -> str | None:
        """The best parent: the origin while the stripe has no root and no whole copy can serve, else the shallowest free seat. The origin
        again when those that could serve have all failed this child."""
        may_read = len(self.swarm.roots[self.stripe]) < self.origin_streams
        may_read = may_read and (child.host, FROM_ORIGIN) not in self.swarm.avoided
        if may_read and not self.whole_copy:
            return FROM_ORIGIN
        return self._seat_for(child) or self._spare_for(child) or (FROM_ORIGIN if may_read else None)

    def _seat_for(self, child: Member) -> str | None:
        passed: list[Seat] = []
        found = None
        while self.free:
            seat = heapq.heappop(self.free)
            member = self.swarm.members[seat[3]]
            if member.free(self.stripe) <= 0:
                continue
            if self._failed(member, child):
                passed.append(seat)
                continue
            found = member.host
            if member.free(self.stripe) > 1:
                heapq.heappush(self.free, (seat[0], seat[1] + 1, seat[2] + 1, member.host))
            break
        for seat in passed:
            heapq.heappush(self.free, seat)
        return found

    def _spare_for(self, child: Member) -> str | None:
        """A parent outside the allotted seats: unallotted budget, then seats that stand idle in other stripes, then the least loaded."""
        swarm, stripe = self.swarm, self.stripe
        best: tuple[tuple[int, float, int, str], Member] | None = None
        for member in swarm.members.values():
            if not member.present or member is child:
                continue
            idle = member.budget - member.load
            rank = 0 if idle > 0 else 1 if member.budget else 2
            load = -idle if rank == 0 else member.load / max(member.budget, 0.25)
            depth = self.depths.get(member.host)
            if depth is None:
                if not swarm.rooted(stripe, member.host):
                    continue
                depth = self.depths[member.host] = swarm.depth(stripe, member.host)
            key = (rank, load, depth, member.host)
            if (best is None or key < best[0]) and not self._failed(member, child):
                best = (key, member)
        if best is None:
            return None
        member = best[1]
        swarm.grant_seat(member, stripe)
        return member.host

    def _failed(self, parent: Member, child: Member) -> bool:
        """Whether `parent` failed `child` a moment ago."""
        return (child.host, parent.host) in self.swarm.avoided


def changed_plans(swarm: Swarm, source: Callable[[str], Source | None]) -> dict[str, list[StripePlan]]:
    """What hosts are to be told since the last call: by host name, the stripes whose parents changed. `source` says where a parent is
    reached; children of a parent that has not said yet where it is are told once it has."""
    names = list(swarm.members)
    plans: dict[str, list[StripePlan]] = {}
    for host, stripe in swarm.changed:
        name = swarm.members[host].parents[stripe]
        parent = source(name) if name is not None else None
        if parent is not None:
            found = (source(each) for each in alternates(swarm, names, stripe, host))
            others = tuple(each for each in found if each is not None)
            plans.setdefault(host, []).append(StripePlan(stripe, parent, others))
    swarm.changed.clear()
    return plans


def alternates(swarm: Swarm, names: list[str], stripe: int, host: str) -> list[str]:
    """Up to ALTERNATES hosts that could feed `host` in this stripe should its parent fail: the parent's own parent and
    hosts that stand elsewhere in the tree; never the host's descendants. `names` are the swarm's members, listed once by the caller."""
    found: list[str] = []
    parent = swarm.members[host].parents[stripe]
    if parent:
        grand = swarm.members[parent].parents[stripe]
        if grand and swarm.members[grand].present:
            found.append(grand)
    start = mixed(swarm.blob, host) + stripe
    for step in range(min(len(names), 16)):
        if len(found) >= ALTERNATES:
            break
        other = swarm.members[names[(start + step * 7919) % len(names)]]
        if other.host in {host, parent, *found} or not other.present or not other.budget:
            continue
        if swarm.below(stripe, other.host, host) or not swarm.rooted(stripe, other.host):
            continue
        found.append(other.host)
    return found
