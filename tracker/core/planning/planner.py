"""The planner: gives every receiver a parent in every stripe.

Theory. Upload slots are allotted exactly (slots.py). Then each stripe is filled from the top: hosts
with slots first, each at the shallowest free slot, so that the tree is as flat as the slots allow.

Racks. In each stripe the first host of a rack imports, from the origin or from another rack, and
the others receive from inside. Hosts of other racks may take a slot of a rack only while the
remaining slots serve the hosts inside that wait, and never the last one that can be reached while a
host inside waits. Where the origin may be read, each site reads for itself; one that does not when
the first pieces come imports, so that a root that is lost half way has one successor. A site is a
zone, or the zones that name it.

Sites. Between sites lies a WAN, which everything crosses once: in each stripe one host of a site
that reads nothing from the origin imports, and no other does while a host of the site has the
stripe, however overloaded the hosts of the site become (single_import.py). The sites form a chain
in each stripe: each of them sends it to one other, so that no link to the WAN carries it twice in
one direction. Those with a budget (wan/imports.py) are at its end, the one that gets least last.

Where some hosts receive by trees and others by BitTorrent, newcomers of the latter kind come first
and so become roots: their peers get from them what they read, and so do their children in the
trees. What comes by trees alone no peer has, and BitTorrent brings it to no host.

A host without a piece of a stripe that several parents failed, each of which says that it has
pieces, is starved, and so is one that has stood still for long: those hosts may be strangers that
vouch for each other, and one of them the root. Such hosts, few a stripe, read the origin besides
the roots, and keep that lease until they have the stripe (rescue.py).

Repair uses the same pass: the children of a lost parent are receivers without a parent. The one
with the most pieces comes first and so gets the slot that became free. Where a rack lacks slots,
unallotted ones are used, then idle ones of other stripes, and then a host is overloaded. Only where
no host inside could serve at all does a second host of the rack receive from outside.

Cycles cannot arise: only hosts with a path up to the origin or to a whole copy are offered as
parents, and a host below one that waits for a parent has no such path.

A pass costs O(members of the racks in question) for each stripe that has work, however many hosts
join at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from tracker.core.host import SITE_END
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.monitor.progress import GOOD_SHARE
from tracker.core.planning.displacement import Displacement
from tracker.core.planning.rescue import is_missing, may_be_rescued, rescuer
from tracker.core.planning.single_import import end_second_imports, importing_sites, keep_one
from tracker.core.planning.slot_index import SlotIndex, slower
from tracker.core.planning.slots import allot, clear, outgrown
from tracker.core.swarm import Swarm


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans a swarm on request; keeps nothing between plans."""

    origin_streams_max: int = 1
    """Cap on the hosts that read one stripe from the origin at one site."""
    origin_sites: frozenset[str] = frozenset()
    """The sites whose hosts may read the origin; none: all."""

    def plan(self, swarm: Swarm, *, leases: int, rescues: int | None = None, imports: bool = True) -> None:
        """Give parents to all unplanned receivers for which one exists. `leases`: how many new ones
        may be granted; `rescues`: how many of them to starved hosts, where that is not the same;
        `imports`: whether hosts may be given parents at other sites."""
        for stripe in range(swarm.stripes):
            end_second_imports(swarm, stripe, self.origin_sites)
        if not any(swarm.members[host].present for _, host in swarm.edges.unplanned):
            return
        rescues = leases if rescues is None else rescues
        redraw = outgrown(swarm)
        granted = self._draw(swarm, leases, rescues, anew=redraw, imports=imports)
        if not redraw and outgrown(swarm):
            self._draw(swarm, leases - granted, rescues - granted, anew=True, imports=imports)

    def _draw(self, swarm: Swarm, leases: int, rescues: int, *, anew: bool, imports: bool) -> int:
        """Make one pass over all stripes that have work, in trees that are cleared before if
        `anew`; return how many leases it granted."""
        before: dict[str, tuple[str | None, ...]] = {}
        readers = [[swarm.members[root] for root in roots] for roots in swarm.edges.roots]
        reading = [{each.site for each in roots if stripe not in each.rescued} for stripe, roots in enumerate(readers)]
        if anew:
            before = clear(swarm)
            swarm.passes.clear_strain()
        waiting: dict[bool, dict[int, list[str]]] = {False: {}, True: {}}
        for stripe, host in swarm.edges.unplanned:
            member = swarm.members[host]
            if member.present:
                waiting[member.slow_receiver].setdefault(stripe, []).append(host)
        allot(swarm)
        granted = 0
        # Slow receivers come when the trees are complete, and it shows where they cost least.
        for hosts_by_stripe in waiting.values():
            rootless = sum(1 for stripe in hosts_by_stripe if not swarm.edges.roots[stripe])
            for stripe, hosts in hosts_by_stripe.items():
                roots = len(swarm.edges.roots[stripe])
                # A lease is kept for each stripe that no host reads yet, before another site gets
                # its own.
                rootless -= not roots
                left = leases - granted - rootless
                one = _StripePass(swarm, stripe, hosts, self, left, reading[stripe], imports=imports)
                one.run(rescues - granted, redraw=anew)
                granted += max(0, len(swarm.edges.roots[stripe]) - roots)
        for host, known in before.items():
            for stripe, parent in enumerate(swarm.members[host].parents):
                if parent and parent == known[stripe]:
                    swarm.edges.forget_change(host, stripe)
        if anew or not swarm.passes.drawn_for:
            swarm.passes.drawn(swarm.receivers)
        return granted


class _StripePass:
    """Fills one stripe's tree from the top with hosts that lack a parent."""

    def __init__(
        self,
        swarm: Swarm,
        stripe: int,
        hosts: list[str],
        limits: Planner,
        leases: int,
        reading: set[str],
        *,
        imports: bool,
    ) -> None:
        self.swarm, self.stripe = swarm, stripe
        self.limits, self.leases, self.reading, self.imports = limits, leases, reading, imports
        self.hosts = hosts
        self.slots = SlotIndex(swarm, stripe, hosts)
        self.displacement = Displacement(swarm, stripe)
        self.displaced: dict[str, None] = {}
        self.imported: dict[str, None] = {}
        self._parted: dict[str, list[str]] | None = None
        self._begun: bool | None = None
        self._importing: set[str] | None = None

    def run(self, rescues: int, *, redraw: bool = False) -> None:
        """Attach the hosts; hosts for which there is no parent stay unplanned. In a tree that is
        drawn anew the few pieces that hosts have do not matter. At most `rescues` leases go to
        starved hosts."""
        queues = self._queues(redraw)
        self._rescue(queues, rescues)
        while True:
            attached = self._import(queues)
            importing = any(queue and not self.slots.fed(rack) for rack, queue in queues.items())
            for rack, queue in queues.items():
                # One by one while other racks wait: their importers shall get the shallow slots.
                attached += self._fill(rack, queue, 1 if importing and len(queues) > 1 else len(queue))
            if not attached:
                break
        left = [host for queue in queues.values() for host in reversed(queue)]
        # A host that finds no parent at first may find one among the hosts that did.
        still = [rest for host in left if (rest := self._attach_anyhow(host)) is not None]
        if len(still) < len(left):
            for host in still:
                self._attach_anyhow(host)
        for rack in self.imported:
            importers = (host for host in self.swarm.racks[rack] if self._from_elsewhere(host))
            members = [self.swarm.members[host] for host in importers]
            keep_one(self.swarm, self.stripe, members, self.limits.origin_sites)
        end_second_imports(self.swarm, self.stripe, self.limits.origin_sites)

    def _rescue(self, queues: dict[str, list[str]], rescues: int) -> None:
        """Let starved hosts receive from hosts that were rescued, or read the origin, although
        their site has a root, or a host says that it has everything."""
        swarm, stripe = self.swarm, self.stripe
        for queue in queues.values() if swarm.starved else ():
            starved = [each for each in queue if each in swarm.starved and is_missing(swarm, stripe, each)]
            for host in (each for each in starved if swarm.members[each].site not in swarm.wan.closed):
                parent = rescuer(swarm, stripe, host)
                if parent is not None:
                    if parent.free(stripe) <= 0:
                        self.slots.grant(parent)
                    queue.remove(host)
                    self._attach(host, parent.host)
                elif rescues > 0 and self._site_reads(swarm.members[host]) and may_be_rescued(swarm, stripe, host):
                    rescues -= 1
                    queue.remove(host)
                    self._attach(host, FROM_ORIGIN)
                    swarm.edges.rescue(stripe, host)

    def _queues(self, redraw: bool) -> dict[str, list[str]]:
        """By rack the hosts that wait, the first one last: hosts that have pieces or children, the
        most pieces first, then newcomers."""
        members, stripe, mixed = self.swarm.members, self.stripe, self.swarm.mixed

        def order(host: str) -> tuple[bool, bool, int, int, int, int]:
            member = members[host]
            if not redraw and (member.children[stripe] or member.counts[stripe]):
                return False, not member.slots, -member.counts[stripe], -member.allotted[stripe], 0, member.order
            slots = member.allotted[stripe]
            apart = mixed and host not in self.swarm.swarming
            return True, slots == 0, apart, member.parents.count(FROM_ORIGIN), -slots, member.order

        queues: dict[str, list[str]] = {}
        for host in sorted(self.hosts, key=order, reverse=True):
            queues.setdefault(members[host].rack, []).append(host)
        racks = sorted(queues.items(), key=lambda item: self._root_order(item[0], item[1][-1], order))
        if rates := self.swarm.wan.rates:  # the sites that get most come first in the chain
            racks.sort(key=lambda item: -rates.get(members[item[1][-1]].site, inf))
        return dict(racks)

    def _root_order(
        self, rack: str, host: str, order: Callable[[str], tuple[bool, bool, int, int, int, int]]
    ) -> tuple[bool, bool, bool, bool, bool, int, tuple[bool, bool, int, int, int, int]]:
        """Order of a rack, and so of the host that becomes a root. First a rack whose host can
        serve. Where a root was lost, a host that has shown a good rate, in a rack that receives the
        stripe through no other. Then a rack with slots for others, and a newcomer that receives by
        BitTorrent if only some do. Then the rack with the most such slots, and a host that reads no
        other stripe."""
        swarm, stripe = self.swarm, self.stripe
        member = swarm.members[host]
        lost = bool(swarm.typical_rate) and not swarm.edges.roots[stripe]
        unproven = lost and max(member.rates) < GOOD_SHARE * swarm.typical_rate
        imports = lost and any(self._from_elsewhere(each) for each in swarm.racks[rack])
        over = self.slots.over(rack) if len(swarm.racks) > 1 else 0
        new, _, apart, *_ = order(host)
        return not member.slots, unproven, imports, over < 0, new and bool(apart), -over, order(host)

    def _import(self, queues: dict[str, list[str]]) -> int:
        """Let the first host of each rack that is not fed yet receive from outside; return how many
        do."""
        count, sites = 0, dict[str, None]()
        for rack, queue in queues.items():
            if queue and not self.slots.fed(rack):
                member = self.swarm.members[queue[-1]]
                parent = self._from_outside(member, first=member.site not in sites)
                sites[member.site] = None
                if parent is not None:
                    self._attach(queue.pop(), parent)
                    count += 1
        self.slots.open_fed_racks()
        return count

    def _from_outside(self, member: Member, *, first: bool) -> str | None:
        """A parent for a host that imports for its rack, the `first` one of its site."""
        if not self.slots.whole and self._may_read(member):
            return FROM_ORIGIN
        near = self.slots.near(member) if self._may_import(member) else "site"
        parent = self.slots.outside(member, near, spare_wan=True)
        return parent or (self.slots.chained(member) if near == "anywhere" and first else None)

    def _may_import(self, member: Member) -> bool:
        """Whether a host may be given a parent at another site. As with leases, a tracker that has
        just started does not know yet which hosts import, and waits for what they say. Nor do hosts
        of a site import whose budget is used up (wan/imports.py)."""
        return SITE_END not in member.zone or (self.imports and member.site not in self.swarm.wan.closed)

    def _fill(self, rack: str, queue: list[str], limit: int) -> int:
        count = 0
        while queue and count < limit:
            queue[-1] = self._displace(queue[-1])
            parent = self.slots.inside(self.swarm.members[queue[-1]])
            if parent is None:
                break
            self._attach(queue.pop(), parent)
            count += 1
        return count

    def _displace(self, host: str) -> str:
        """Give a host that feeds others the position of one that feeds fewer, and that one the next
        such position; return the host that is left over."""
        member = self.swarm.members[host]
        while self.swarm.layout.large and not member.slow_receiver and self.displacement.height(member.host):
            depth = self.slots.depth_for(member)
            position = self.displacement.find(member, depth) if depth is not None else None
            if position is None:
                break
            displaced, parent = position
            self.swarm.edges.detach(self.stripe, displaced)
            self.displaced[displaced] = None
            self.slots.displaced(self.swarm.members[displaced])
            self._attach(member.host, parent)
            member = self.swarm.members[displaced]
        return member.host

    def _attach_anyhow(self, host: str) -> str | None:
        """Find a parent beyond the allotted slots: in the rack, then outside, then the origin when
        all that could serve have failed; return the host that has none, the host or one whose
        position it took."""
        host = self._displace(host)
        member = self.swarm.members[host]
        slots = self.slots
        parent = slots.inside(member) or slots.extra_slot(member, member.rack)
        if parent is None:
            may_read = self._may_read(member)
            if may_read and not slots.whole:
                parent = FROM_ORIGIN
            else:
                if SITE_END in member.zone:
                    parent = self._parent_sparing_wan(member)
                if parent is None and self._may_import(member):
                    parent = slots.outside(member) or slots.extra_slot(member, None) or self._again(member)
                if parent is None and may_read:
                    parent = FROM_ORIGIN
        if parent is None:
            return host
        self._attach(host, parent)
        return None

    def _parent_sparing_wan(self, member: Member) -> str | None:
        """A parent at the host's own site, or at the site that feeds the fewest others, even beyond
        the allotted slots."""
        near = self.slots.near(member) if self._may_import(member) else "site"
        if near != "anywhere":
            return self.slots.outside(member, near) or self.slots.extra_slot(member, None, member.site)
        sites = sorted(self.slots.fed_sites(), key=lambda site: slower(self.swarm, self.stripe, site, member))
        found = (self.slots.extra_slot(member, None, site) for site in sites)
        return next((parent for parent in found if parent is not None), None)

    def _again(self, child: Member) -> str | None:
        """A parent from which the host was parted because little came: there is no better one, so
        the host itself is slow."""
        swarm, stripe = self.swarm, self.stripe
        if self._parted is None:  # once for all hosts that find none: both may be many
            self._parted = {}
            for host, parent in swarm.edges.parted:
                self._parted.setdefault(host, []).append(parent)
        parted = [
            member
            for parent in self._parted.get(child.host, ())
            if (member := swarm.members.get(parent)) is not None and member.serves
        ]
        fit = [
            parent_member
            for parent_member in parted
            if swarm.edges.rooted(stripe, parent_member.host)
            and not swarm.edges.receives_through(stripe, parent_member.host, child.host)
        ]
        return (
            max(
                fit, key=lambda parent_member: (parent_member.counts[stripe], -parent_member.load, parent_member.order)
            ).host
            if fit
            else None
        )

    def _attach(self, host: str, parent: str) -> None:
        member = self.swarm.members[host]
        self.slots.attaching(member, parent)
        self.swarm.edges.attach(self.stripe, host, parent)
        self.slots.attached(member, parent)
        if self.swarm.layout.large and member.children[self.stripe] and host not in self.displaced:
            for each in self.displacement.attached(member):
                self.slots.opened(each)
        above = self.swarm.members.get(parent)
        if above is not None and above.load > above.slots:
            self.swarm.passes.strain()
        if above is not None and above.site != member.site and self._importing is not None:
            self._importing.add(member.site)
        if parent == FROM_ORIGIN:
            self.leases -= 1
        if self._from_elsewhere(host) and len(self.swarm.racks) > 1:
            self.imported[self.swarm.members[host].rack] = None

    def _from_elsewhere(self, host: str) -> bool:
        """Whether a host receives from the origin or from another rack."""
        member = self.swarm.members[host]
        parent = member.parents[self.stripe]
        return parent is not None and (not parent or self.swarm.members[parent].rack != member.rack)

    def _site_reads(self, member: Member) -> bool:
        """Whether hosts of this one's site may read the origin."""
        if self.swarm.wan.closed.get(member.site):
            return False
        return not self.limits.origin_sites or member.site in self.limits.origin_sites

    def _may_read(self, member: Member) -> bool:
        """Whether a host may be granted the lease of the stripe: its site has none and may read the
        origin, it did not lie, and the origin has not just failed it. Once hosts have pieces, sites
        that did not read before import from one that does."""
        roots = [self.swarm.members[root] for root in self.swarm.edges.roots[self.stripe]]
        if member.host in self.swarm.origin.barred:
            return False
        if not self._site_reads(member):
            return False
        streams_max = self.limits.origin_streams_max
        serving = sum(1 for root in roots if root.site == member.site and not root.doubted_until)
        if self.leases <= 0 or serving >= streams_max or (member.doubted_until and self._others_lack(member)):
            return False
        if self._importing is None:  # once for all hosts
            self._importing = importing_sites(self.swarm, self.stripe, self.limits.origin_sites)
        if member.site in self._importing or self._others_read(member, roots):
            return False
        return (member.host, FROM_ORIGIN) not in self.swarm.edges.avoided

    def _others_read(self, member: Member, roots: list[Member]) -> bool:
        """Whether another site reads the stripe, of which hosts have pieces by now, and the host's
        own did not and may import at the rate that it may have."""
        if member.site in self.reading or member.site in self.swarm.wan.closed:
            return False
        if self._begun is None:  # once for all hosts
            self._begun = any(each.counts[self.stripe] for each in self.swarm.members.values())
        stripe, slower = self.stripe, self.swarm.wan.slower
        fit = [root for root in roots if root.serves and not root.slow_receiver and stripe not in root.rescued]
        return self._begun and any(not slower(root.site, member.site) for root in fit)

    def _others_lack(self, member: Member) -> bool:
        """Whether a host that would serve others could read the stripe in place of this one, which
        does not."""
        stripe, members = self.stripe, self.swarm.members.values()
        return any(each.serves and each is not member and not each.counts[stripe] for each in members)
