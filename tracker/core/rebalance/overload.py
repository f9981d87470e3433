"""Overload: moves children of hosts that serve more than their upload slots, a few at a time.

Theory. Where hosts fail or turn out slow, a host serves an additional child, and all its children,
with all hosts below them, get a fraction of the rate. If another host of the rack has an idle slot,
in whatever stripe, the child moves there. If slots are short everywhere, hosts all of whose
children are leaves in their stripe bear the overload, so that no host further down loses. Among
these it goes round: the leaf that lost most is exchanged for the one that lost least. All lose a
little then, and none much. A running stream is not restarted: the child changes its parent between
two pieces.
"""

from __future__ import annotations

from tracker.core.edges import only_leaves
from tracker.core.member import Member
from tracker.core.swarm import Swarm

PAUSE_S = 0.5
MOVES_SHARE = 1 / 16
BEHIND_PIECES = 4
BEHIND_S = 0.5
"""A host is taken as a parent although it is so much behind its child: the child waits once, and
goes on faster than one of three."""

UNEVEN_S = 0.4
"""Leaves are exchanged when one has lost so much more than the other."""

TRIES = 64


def spread_overload(swarm: Swarm, *, now: float) -> int:
    """Move children away from overloaded hosts; return how many moved. Clears Passes.strained when
    no host is overloaded."""
    swarm.passes.spread(now)
    overloaded = [member for member in swarm.members.values() if member.slots and member.load > member.slots]
    if not overloaded:
        swarm.passes.clear_strain()
        return 0
    limit = max(4, int(len(swarm.members) * MOVES_SHARE))
    moved = 0
    racks: dict[str, _Rack] = {}
    inner = {
        member.host: any(not only_leaves(swarm.members, s, member) for s in range(swarm.stripes))
        for member in overloaded
    }
    for member in sorted(overloaded, key=lambda each: (not inner[each.host], _lowest(swarm, each), each.order)):
        if moved >= limit:
            break
        rack = racks.get(member.rack)
        if rack is None:
            rack = racks[member.rack] = _Rack(swarm, member.rack)
        moved += rack.relieve(member, inner[member.host])
    return moved


class _Rack:
    """Hosts of one rack that could serve more: `idle` ones have an unused slot, `bearing` ones as
    many children as slots, all of them leaves."""

    def __init__(self, swarm: Swarm, rack: str) -> None:
        self.swarm = swarm
        present = [each for each in (swarm.members[name] for name in swarm.racks[rack]) if each.present and each.slots]
        self.idle = sorted(
            (each for each in present if each.load < each.slots),
            key=lambda each: (each.load - each.slots, each.order),
        )
        self.bearing = [
            each
            for each in present
            if each.load == each.slots
            and all(only_leaves(swarm.members, stripe, each) for stripe in range(swarm.stripes))
        ]
        self.bearing.sort(key=lambda each: (-_lowest(swarm, each), each.order))

    def relieve(self, member: Member, inner: bool) -> int:
        """Make an overloaded host's children better off, if that can be; return how many hosts
        changed their parents. `inner`: whether a child forwards to others."""
        children = [
            (stripe, self.swarm.members[name])
            for stripe, names in enumerate(member.children)
            for name in names
            if not self.swarm.members[name].slow_receiver
        ]
        children.sort(key=lambda each: (len(each[1].children[each[0]]), -each[1].counts[each[0]], each[1].order))
        for stripe, child in children:
            for carrier in self.idle[:TRIES]:
                if self._fits(stripe, child, carrier):
                    self._move(stripe, child, carrier)
                    return 1
        if not inner:
            return self._change_places(*min(children, key=lambda each: (each[1].counts[each[0]], each[1].order)))
        for stripe, child in children:
            for carrier in self.bearing[:TRIES]:
                if not carrier.children[stripe] or not self._fits(stripe, child, carrier):
                    continue
                if not child.children[stripe]:
                    self._move(stripe, child, carrier)
                    return 1
                if self._displace(stripe, child, carrier):
                    return 2
        return 0

    def _displace(self, stripe: int, child: Member, carrier: Member) -> bool:
        """Let a child that forwards to others replace a leaf, for which a third host has room;
        return whether it could."""
        for name in carrier.children[stripe]:
            leaf = self.swarm.members[name]
            for other in (*self.idle[:TRIES], *self.bearing[:TRIES]):
                if other is carrier or other is child or other.host == child.parents[stripe]:
                    continue
                if self._fits(stripe, leaf, other):
                    self._move(stripe, leaf, other)
                    self._move(stripe, child, carrier)
                    return True
        return False

    def _change_places(self, stripe: int, late: Member) -> int:
        """Exchange the leaf of an overloaded host that lost most for one that lost least; return
        how many moved."""
        swarm, upper = self.swarm, _parent(self.swarm, late, stripe)
        for carrier in self.bearing[:TRIES]:
            leaves = [swarm.members[name] for name in carrier.children[stripe]]
            if not leaves or not self._fits(stripe, late, carrier):
                continue
            early = max(leaves, key=lambda each: (each.counts[stripe], each.order))
            gain = early.counts[stripe] - late.counts[stripe]
            if gain > max(BEHIND_PIECES, UNEVEN_S * swarm.typical_rate) and self._fits(stripe, early, upper):
                swarm.edges.attach(stripe, late.host, carrier.host)
                swarm.edges.attach(stripe, early.host, upper.host)
                self.bearing.remove(carrier)
                return 2
        return 0

    def _fits(self, stripe: int, child: Member, carrier: Member) -> bool:
        """Whether a carrier may become the child's parent."""
        swarm = self.swarm
        if (
            carrier is child
            or child.parents[stripe] == carrier.host
            or (child.host, carrier.host) in swarm.edges.avoided
        ):
            return False
        if carrier.counts[stripe] + max(BEHIND_PIECES, BEHIND_S * swarm.typical_rate) < child.counts[stripe]:
            return False
        return not swarm.edges.receives_through(stripe, carrier.host, child.host) and swarm.edges.rooted(
            stripe, carrier.host
        )

    def _move(self, stripe: int, child: Member, carrier: Member) -> None:
        """Change a child's parent."""
        self.swarm.edges.move(stripe, child, carrier)
        if carrier.load >= carrier.slots and carrier in self.idle:
            self.idle.remove(carrier)
        if carrier.load > carrier.slots and carrier in self.bearing:
            self.bearing.remove(carrier)


def _parent(swarm: Swarm, child: Member, stripe: int) -> Member:
    """The member from which a child receives a stripe; the origin is none."""
    return swarm.members[child.parents[stripe] or ""]


def _lowest(swarm: Swarm, member: Member) -> int:
    """Pieces of that child of a host that lost most."""
    return min(
        (swarm.members[child].counts[stripe] for stripe, names in enumerate(member.children) for child in names),
        default=0,
    )
