"""Slot index: where in one stripe's tree a host may be attached, while the planner fills it.

For each rack the free slots that can be reached are kept in a heap, the shallowest first, and
counted; so are the slots of hosts that have no path up yet, and the hosts that wait. A slot may go
to another rack while the remaining ones serve the hosts that wait inside.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from tracker.core.edges import only_leaves
from tracker.core.host import SITE_END
from tracker.core.member import FROM_ORIGIN, Member, site_of
from tracker.core.planning.slow_receivers import Carriers
from tracker.core.swarm import Swarm

FreeSlot = tuple[int, int, int, str]
"""Depth, slots of the host taken in this pass, its load, its name: the smallest is the best."""

ExtraSlot = tuple[int, bool, float, int, str]
"""How far from its slots a host is (0: it has unused ones, 1: none, 2: it never had any), whether
its children forward the stripe, its load, its depth, its name: the smallest is the best to take one
more."""


@dataclass(slots=True)
class _Rack:
    """One rack in one stripe."""

    free: list[FreeSlot] = field(default_factory=list)
    """Heap of free slots that can be reached; some may be taken by now."""
    reachable: int = 0
    """Free slots of hosts with a path up."""
    slots: int = 0
    """Free slots of all its hosts."""
    waiting: int = 0
    """Hosts without a parent that take a slot."""
    fed: bool = False
    """Whether a host of the rack receives the stripe, or has it."""
    extras: list[ExtraSlot] | None = None
    """Heap of hosts that could be overloaded; None until one is needed."""
    carriers: Carriers | None = None
    """Hosts that could feed slow receivers; None until one is needed."""

    @property
    def over(self) -> int:
        """Slots beyond those that the rack itself needs."""
        return self.slots - self.waiting

    def open(self, *, short: bool = False) -> bool:
        """Whether a slot may go to a host of another rack now; with `short` even one that the rack
        itself needs."""
        return (short or self.over > 0) and self.reachable > (1 if self.waiting else 0)


class _SiteExports:
    """How many other sites import one stripe from each site; counted once it is asked for."""

    def __init__(self, swarm: Swarm, stripe: int) -> None:
        self._swarm, self._stripe = swarm, stripe
        self._counts: dict[str, int] | None = None

    def of(self, site: str) -> int:
        """How many other sites import from a site."""
        if self._counts is None:
            self._counts = {}
            members = self._swarm.members
            for member in members.values():
                if parent := member.parents[self._stripe]:
                    self.attached(members[parent].site, member.site)
        return self._counts.get(site, 0)

    def attached(self, above: str, below: str) -> None:
        """A host of site `below` receives from one of site `above` from now on."""
        if self._counts is not None and above != below:
            self._counts[above] = self._counts.get(above, 0) + 1


class _RackSlots:
    """The slots of single racks in one stripe, free ones and those beyond."""

    def __init__(self, swarm: Swarm, stripe: int, waiting: list[str]) -> None:
        self.swarm, self.stripe = swarm, stripe
        self._depths: dict[str, int] = {}
        self._racks: dict[str, _Rack] = {}
        self._everywhere: dict[str, list[tuple[ExtraSlot, str]]] = {}
        self._displaced: dict[str, None] = {}
        self._light = bool(waiting) and swarm.members[waiting[0]].slow_receiver
        self._waiting: dict[str, int] = {}
        for host in waiting:
            member = swarm.members[host]
            self._waiting[member.rack] = self._waiting.get(member.rack, 0) + (not member.slow_receiver)

    def depth_for(self, child: Member) -> int | None:
        """The depth that a host would get in its rack, if there is a parent."""
        rack = self._rack(child.rack)
        while rack.free and self.swarm.members[rack.free[0][3]].free(self.stripe) <= 0:
            heapq.heappop(rack.free)  # it is taken, and the next one of the list need not be the shallowest
        free = rack.free[0][0] if rack.free else None
        if free is None and (best := self._best_extra(self._extras(child.rack), child)) is not None:
            free = best[3]
        return None if free is None else free + 1

    def displaced(self, child: Member) -> None:
        """The child lost its parent, of its own rack, to another one, and what is below it comes
        with it."""
        rack = self._rack(child.rack)
        rack.slots, rack.reachable, rack.waiting = rack.slots + 1, rack.reachable + 1, rack.waiting + 1
        self._displaced[child.host] = None

    def opened(self, member: Member) -> None:
        """A host has a path up, since one above it, which waited, has a parent."""
        rack, free = self._rack(member.rack), member.free(self.stripe)
        if free > 0 and member.serves:
            rack.reachable += free
            heapq.heappush(rack.free, (self._depth(member), 0, member.load, member.host))
        if rack.extras is not None and member.serves:
            self._offer_extra(rack, member)

    def grant(self, member: Member) -> None:
        """Allot one more slot of the stripe to a host that can be reached."""
        its_rack = self._rack(member.rack)
        free = member.free(self.stripe)
        member.grant_slot(self.stripe)
        granted = member.free(self.stripe) - free
        its_rack.slots += granted
        its_rack.reachable += granted

    def _rack(self, name: str) -> _Rack:
        rack = self._racks.get(name)
        if rack is None:
            rack = self._racks[name] = _Rack(waiting=self._waiting.get(name, 0))
            for host in self.swarm.racks[name]:
                member = self.swarm.members[host]
                if not member.serves:
                    continue
                free = member.free(self.stripe)
                if (not rack.fed or free > 0) and self.swarm.edges.rooted(self.stripe, host):
                    rack.fed = rack.fed or self._light or not member.slow_receiver
                    if free > 0:
                        rack.reachable += free
                        rack.free.append((self._depth(member), 0, member.load, host))
                rack.slots += max(0, free)
            heapq.heapify(rack.free)
        return rack

    def _take(self, rack: _Rack, child: Member) -> str | None:
        passed: list[FreeSlot] = []
        parent = None
        while rack.free:
            slot = heapq.heappop(rack.free)
            member = self.swarm.members[slot[3]]
            if member.free(self.stripe) <= 0:
                continue
            if self._failed(member, child):
                passed.append(slot)
                continue
            parent = member.host
            if member.free(self.stripe) > 1 or child.slow_receiver:
                heapq.heappush(rack.free, (slot[0], slot[1] + 1, slot[2] + 1, member.host))
            break
        for slot in passed:
            heapq.heappush(rack.free, slot)
        return parent

    def _offer_extra(self, rack: _Rack, member: Member) -> None:
        """Add a host to the heaps of those that could be overloaded."""
        assert rack.extras is not None
        key = self._extra_key(member)
        heapq.heappush(rack.extras, key)
        for site in {"": None, member.site: None}:
            if site in self._everywhere:
                heapq.heappush(self._everywhere[site], (key, member.rack))

    def _extras(self, rack: str) -> list[ExtraSlot]:
        its_rack = self._rack(rack)
        if its_rack.extras is None:
            its_rack.extras = []
            for host in self.swarm.racks[rack]:
                member = self.swarm.members[host]
                if member.serves and self.swarm.edges.rooted(self.stripe, host):
                    its_rack.extras.append(self._extra_key(member))
            heapq.heapify(its_rack.extras)
        return its_rack.extras

    def _best_extra(self, heap: list[ExtraSlot], child: Member) -> ExtraSlot | None:
        passed, best = [], None
        while heap and best is None:
            key = heapq.heappop(heap)
            member = self.swarm.members[key[4]]
            current = self._extra_key(member)
            if current > key:
                heapq.heappush(heap, current)
                continue
            passed.append(current)
            if member is not child and not self._failed(member, child):
                best = current
        for key in passed:
            heapq.heappush(heap, key)
        return best

    def _extra_key(self, member: Member) -> ExtraSlot:
        idle = member.slots - member.load
        rank = 0 if idle > 0 else 1 if member.slots else 2
        load = -float(idle) if rank == 0 else member.load / max(member.slots, 0.25)
        inner = rank > 0 and not only_leaves(self.swarm.members, self.stripe, member)
        return rank, inner, load, self._depth(member), member.host

    def _depth(self, member: Member) -> int:
        depth = self._depths.get(member.host)
        if depth is None:
            depth = self._depths[member.host] = self.swarm.edges.depth(self.stripe, member.host)
        return depth

    def _failed(self, parent: Member, child: Member) -> bool:
        """Whether `parent` failed `child` a moment ago, or is below it."""
        edges = self.swarm.edges
        below = child.host in self._displaced and edges.receives_through(self.stripe, parent.host, child.host)
        return below or (child.host, parent.host) in edges.avoided


class SlotIndex(_RackSlots):
    """Finds parents in one stripe for hosts that wait; these are all slow receivers, or none is."""

    def __init__(self, swarm: Swarm, stripe: int, waiting: list[str]) -> None:
        super().__init__(swarm, stripe, waiting)
        self._exports: dict[str, list[tuple[int, str]]] | None = None
        self._site_exports = _SiteExports(swarm, stripe)
        self._fresh: list[str] = []
        self._zones: dict[str, None] | None = None
        total = swarm.totals[stripe]
        self.whole = any(each.counts[stripe] == total and each.serves for each in swarm.members.values())

    def fed(self, rack: str) -> bool:
        """Whether a host of the rack receives the stripe, or has it. Slow receivers count for slow
        receivers alone: the others would get the stripe at the rate of a slow downlink."""
        return self._rack(rack).fed

    def over(self, rack: str) -> int:
        """Slots of the rack beyond its own need."""
        return self._rack(rack).over

    def inside(self, child: Member) -> str | None:
        """The host with the shallowest free slot in the child's own rack; a slow receiver, which
        takes none, gets the parent where it costs least."""
        rack = self._rack(child.rack)
        if not child.slow_receiver:
            return self._take(rack, child)
        if rack.carriers is None:
            rack.carriers = Carriers(self.swarm, self.stripe, child.rack)
        return rack.carriers.best(child)

    def near(self, child: Member) -> str:
        """How far a host may look for the one from which its rack imports: in its "zone", if some
        rack there is fed, else at its "site", if some rack there is, else "anywhere"."""
        fed = self._zones_fed()
        if child.zone in fed:
            return "zone"
        return "site" if SITE_END in child.zone and any(site_of(zone) == child.site for zone in fed) else "anywhere"

    def chained(self, child: Member) -> str | None:
        """The shallowest slot at a site that feeds no other one, though its rack may need it: of a
        host that imports the stripe for its whole site, all of that site would be as deep as the
        last slots are, and where slots are short no rack has any over."""
        if SITE_END not in child.zone:
            return None
        racks = [
            (rack.free[0], name)
            for name in self.swarm.racks
            if (rack := self._rack(name)).open(short=True)
            and rack.free
            and name not in self._fresh
            and not self._site_exports.of(site_of(name.partition(" ")[0]))
        ]
        return self._take(self._racks[min(racks)[1]], child) if racks else None

    def outside(self, child: Member, near: str = "anywhere", *, spare_wan: bool = False) -> str | None:
        """The shallowest slot that another rack has over, no farther away than `near` says: the
        child's zone comes first, then its site, then the others. `spare_wan`: no site that feeds
        another one already, whose link to the WAN would carry the stripe once more, and none that
        gets less than the child's."""
        if len(self.swarm.racks) < 2:
            return None
        exports = self._exporting()
        for zone in _zones_from(child, near, exports):
            site = site_of(zone)
            if (
                spare_wan
                and SITE_END in zone
                and site != child.site
                and (self._site_exports.of(site) or slower(self.swarm, self.stripe, site, child))
            ):
                continue
            heap, passed, parent = exports.get(zone, []), [], None
            while heap and parent is None:
                depth, name = heapq.heappop(heap)
                rack = self._racks[name]
                if not rack.open() or name == child.rack or not rack.free:
                    if name == child.rack:
                        passed.append((depth, name))
                    continue
                if rack.free[0][0] > depth:
                    heapq.heappush(heap, (rack.free[0][0], name))
                    continue
                parent = self._take(rack, child)
                passed.append((depth, name))
            for entry in passed:
                heapq.heappush(heap, entry)
            if not heap:
                exports.pop(zone, None)
            if parent is not None:
                return parent
        return None

    def extra_slot(self, child: Member, rack: str | None, site: str = "") -> str | None:
        """A parent beyond the allotted slots, in one rack or (None) anywhere, at one site where
        that is named: a host with unallotted slots, then one whose slots are idle in other stripes,
        then the least loaded, of those first whose children are leaves."""
        best = self._best_anywhere(child, site) if rack is None else self._best_extra(self._extras(rack), child)
        if best is None:
            return None
        member = self.swarm.members[best[4]]
        self.grant(member)
        return member.host

    def attaching(self, child: Member, parent: str) -> None:
        """The child is about to get a parent: the racks of both are counted, so that `attached`
        adds what this changes. The rack of a rescued host may not have been looked at before."""
        self._rack(child.rack)
        if parent != FROM_ORIGIN:
            self._rack(self.swarm.members[parent].rack)

    def attached(self, child: Member, parent: str) -> None:
        """The child has `parent` as its parent now, and can be a parent itself. `attaching` came
        before."""
        rack, upper = self._rack(child.rack), None
        if parent != FROM_ORIGIN:
            upper = self.swarm.members[parent]
            if not child.slow_receiver:
                above = self._rack(upper.rack)
                above.slots -= 1
                above.reachable -= 1
            self._site_exports.attached(upper.site, child.site)
        rack.waiting -= not child.slow_receiver
        if not rack.fed:
            rack.fed = True
            self._fresh.append(child.rack)
            if self._zones is not None:
                self._zones[child.zone] = None
        depth = self._depths[child.host] = (self._depth(upper) if upper is not None else 0) + 1
        free = child.free(self.stripe)
        if free > 0 and child.serves:
            rack.reachable += free
            heapq.heappush(rack.free, (depth, 0, child.load, child.host))
        if rack.extras is not None:
            self._offer_extra(rack, child)
        if rack.carriers is not None:
            rack.carriers.add(child)
        if child.rack not in self._fresh:
            self._offer(child.rack)
        if upper is not None and upper.rack != child.rack and upper.rack not in self._fresh:
            self._offer(upper.rack)

    def open_fed_racks(self) -> None:
        """Racks that are fed since the last call feed others from now on. If they did at once,
        racks would form a chain."""
        fresh, self._fresh = self._fresh, []
        for rack in fresh:
            self._offer(rack)

    def fed_sites(self) -> list[str]:
        """The sites of which some rack is fed, those first that feed the fewest others."""
        sites = dict.fromkeys(site_of(zone) for zone in self._zones_fed())
        return sorted(sites, key=self._site_exports.of)

    # -- inner

    def _exporting(self) -> dict[str, list[tuple[int, str]]]:
        """By zone the racks that have slots over, the shallowest first."""
        if self._exports is None:
            self._exports = {}
            for name in self.swarm.racks:
                self._rack(name)
                self._offer(name)
        return self._exports

    def _zones_fed(self) -> dict[str, None]:
        if self._zones is None:
            self._zones = {name.partition(" ")[0]: None for name in self.swarm.racks if self._rack(name).fed}
        return self._zones

    def _offer(self, name: str) -> None:
        rack = self._racks[name]
        if self._exports is not None and rack.open() and rack.free:
            zone = name.partition(" ")[0]
            heapq.heappush(self._exports.setdefault(zone, []), (rack.free[0][0], name))

    def _best_anywhere(self, child: Member, site: str) -> ExtraSlot | None:
        """The best of all racks, or of those of a site, whose best ones are kept in a heap: looking
        at every rack for every host would take minutes."""
        heap = self._everywhere.get(site)
        if heap is None:
            names = [name for name in self.swarm.racks if not site or site_of(name.partition(" ")[0]) == site]
            heap = self._everywhere[site] = [(found[0], name) for name in names if (found := self._extras(name))]
            heapq.heapify(heap)
        passed, best = [], None
        while heap and best is None:
            key, name = heapq.heappop(heap)
            extras = self._extras(name)
            best = self._best_extra(extras, child)
            if best is not None and best > key:
                heapq.heappush(heap, (best, name))
                best = None
            elif extras:
                passed.append((extras[0], name))
        for entry in passed:
            heapq.heappush(heap, entry)
        return best


def slower(swarm: Swarm, stripe: int, site: str, child: Member) -> bool:
    """Whether a site gets the stripe more slowly than the child's site may, by their budgets; one
    that has all of it does not."""
    if not swarm.wan.slower(site, child.site):
        return False
    total, there = swarm.totals[stripe], (swarm.members[name] for name in swarm.sites[site])
    return not any(member.serves and member.counts[stripe] == total for member in there)


def _zones_from(child: Member, near: str, exports: Iterable[str]) -> tuple[str, ...]:
    """The zones in which a parent is looked for, in this order."""
    if near == "zone":
        return (child.zone,)
    others = [zone for zone in exports if zone != child.zone]
    if SITE_END in child.zone:
        others.sort(key=lambda zone: site_of(zone) != child.site)
        if near == "site":
            others = [zone for zone in others if site_of(zone) == child.site]
    return (child.zone, *others)
