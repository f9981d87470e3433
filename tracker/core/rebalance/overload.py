"""Overload: moves children of hosts that serve more than their upload slots, a few at a time.

Theory. Where hosts fail or turn out slow, a host serves an additional child, and all its children,
with all hosts below them, get a fraction of the rate. If another host of the rack has an idle slot,
in whatever stripe, the child moves there. If slots are short everywhere, hosts all of whose
children are leaves in their stripe bear the overload, so that no host further down loses. Among
these it goes round: the leaf that lost most is exchanged for the one that lost least. All lose a
little then, and none much. A running stream is not restarted: the child changes its parent between
two pieces. It may move to a host that has fewer pieces, and waits for them once, where that is less
than what the overload costs.

Hosts with idle slots are at the bottom of the tree, and what an overloaded host near the root feeds
is ahead of them by a piece for each level, which takes long where pieces are large. So where none
of its children fits anywhere, the one with the fewest levels below it waits for the planner, which
has it take a position near the root (planning/displacement.py), or, as a leaf, go to the bottom.
"""

from __future__ import annotations

from math import inf

from tracker.core.edges import only_leaves
from tracker.core.member import Member
from tracker.core.planning.displacement import LEVELS_MIN, Displacement
from tracker.core.swarm import Swarm

PAUSE_S = 0.5
PAUSE_S_PER_MEMBER = 1e-5
"""A pass looks at all members, so in a large swarm it comes more seldom."""

MOVES_SHARE = 1 / 16
BEHIND_PIECES = 4
BEHIND_S = 0.5
"""A host is taken as a parent although it is so much behind its child: the child waits once, and
goes on faster than one of three."""

BEHIND_SHARE = 0.25
"""Or by this part of what the overload costs: a host that serves half as many again as it has slots
for takes half as long again for all that is left."""

UNEVEN_S = 0.4
"""Leaves are exchanged when one has lost so much more than the other."""

TRIES = 64


def pause_s(swarm: Swarm) -> float:
    """How long a swarm is left as it is after a pass."""
    return max(PAUSE_S, PAUSE_S_PER_MEMBER * len(swarm.members))


def spread_overload(swarm: Swarm, *, now: float) -> int:
    """Move children away from overloaded hosts; return how many moved. Clears Passes.strained when
    no host is overloaded."""
    swarm.passes.spread(now)
    overloaded = [member for member in swarm.members.values() if sum(member.taken) > member.slots > 0]
    if not overloaded:
        swarm.passes.clear_strain()
        return 0
    limit = max(4, int(len(swarm.members) * MOVES_SHARE))
    moved = 0
    racks: dict[str, _Rack] = {}
    rooted = _Rooted(swarm)
    left: list[Member] = []
    inner = {
        member.host: any(not only_leaves(swarm.members, s, member) for s in range(swarm.stripes))
        for member in overloaded
    }
    for member in sorted(overloaded, key=lambda each: (not inner[each.host], _lowest(swarm, each), each.order)):
        if moved >= limit:
            break
        rack = racks.get(member.rack)
        if rack is None:
            rack = racks[member.rack] = _Rack(swarm, member.rack, rooted)
        gained = rack.relieve(member, inner[member.host])
        if swarm.layout.large and not gained and inner[member.host] and rack.leaver(member)[1]:
            left.append(member)
        moved += gained
    # All that moves above has a path up, which what is below these loses for a moment.
    return moved + sum(_release(swarm, racks[member.rack], member) for member in left[: max(0, limit - moved)])


def _release(swarm: Swarm, rack: _Rack, member: Member) -> int:
    """Let one child of an overloaded host of a rack wait for another parent; return how many do.
    Where moves have taken the room meanwhile, hosts that feed leaves alone bear the overload."""
    stripe = min(range(swarm.stripes), key=member.free)
    child, _ = rack.leaver(member)
    if child:
        swarm.edges.detach(stripe, child)
    return int(bool(child))


class _Rooted:
    """Which hosts have a path up to the origin or to a whole stripe, each looked for once: a move
    takes that from no host, as only hosts that have it become parents."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self._known: list[dict[str, bool]] = [{} for _ in range(swarm.stripes)]
        #: How often hosts got a path since.
        self.changes = 0

    def __call__(self, stripe: int, host: str) -> bool:
        """Whether a host has such a path."""
        known, members, total = self._known[stripe], self.swarm.members, self.swarm.totals[stripe]
        path: list[str] = []
        current: str | None = host
        while current and current not in known and members[current].counts[stripe] != total:
            path.append(current)
            current = members[current].parents[stripe]
            assert len(path) <= len(members), f"the way up from {host} is a cycle"
        answer = current is not None and known.get(current, True)
        for name in path:
            known[name] = answer
        return answer

    def moved(self, stripe: int, host: str) -> None:
        """A host receives from another one, which has a path: so has the host, and what is below
        it."""
        if self._known[stripe].get(host) is False:
            self._known[stripe].clear()
            self.changes += 1


class _Rack:
    """Hosts of one rack that could serve more: `idle` ones have an unused slot, `bearing` ones as
    many children as slots, all of them leaves."""

    def __init__(self, swarm: Swarm, rack: str, rooted: _Rooted) -> None:
        self.swarm, self.rooted = swarm, rooted
        self._heights = [Displacement(swarm, stripe).height for stripe in range(swarm.stripes)]
        self.behind = max(BEHIND_PIECES, BEHIND_S * swarm.typical_rate)
        self.idle: list[Member] = []
        self._full: list[Member] = []
        for name in swarm.racks[rack]:
            member = swarm.members[name]
            if member.slots and member.absent_since is None:
                load = sum(member.taken)
                if load < member.slots:
                    self.idle.append(member)
                elif load == member.slots:
                    self._full.append(member)
        self.idle.sort(key=lambda each: (each.load - each.slots, each.order))
        self._bearing: list[Member] | None = None
        #: By stripe most(), and for which hosts that was.
        self._most: dict[int, tuple[tuple[int, int, int], float]] = {}

    @property
    def bearing(self) -> list[Member]:
        """The bearing hosts, those first whose children have most; found when they are asked for,
        as that takes long and idle hosts come first."""
        if self._bearing is None:
            stripes, members = range(self.swarm.stripes), self.swarm.members
            self._bearing = [
                each for each in self._full if all(only_leaves(members, stripe, each) for stripe in stripes)
            ]
            self._bearing.sort(key=lambda each: (-_lowest(self.swarm, each), each.order))
        return self._bearing

    def leaver(self, member: Member) -> tuple[str, bool]:
        """Which child an overloaded host should lose in the stripe with most children beyond its
        slots, and whether a host has room for it: one with an unused slot, and a path up that does
        not lead through the child, which would come back. It is the one with the fewest levels
        below it for which there is room, else of all; empty where all are slow receivers."""
        swarm, stripe = self.swarm, min(range(self.swarm.stripes), key=member.free)
        room = [each.host for each in self.idle[:TRIES] if self.rooted(stripe, each.host)]
        children = [name for name in member.children[stripe] if not swarm.members[name].slow_receiver]
        height = Displacement(swarm, stripe).height  # moves may have changed what it was before
        children.sort(key=lambda name: (height(name), -swarm.members[name].order))
        for child in children:
            if any(self._opens(stripe, child, host) for host in room):
                return child, True
        return (children[0] if children else ""), False

    def _opens(self, stripe: int, child: str, host: str) -> bool:
        """Whether a host may be the parent of a child that waits."""
        edges = self.swarm.edges
        return (child, host) not in edges.avoided and not edges.receives_through(stripe, host, child)

    def most(self, stripe: int) -> float:
        """The pieces of a stripe that the best of those hosts has that are tried first, and that
        have a path up. In a large swarm reports are old, and often none has
        enough."""
        looked_at = len(self.idle), len(self.bearing), self.rooted.changes  # hosts only leave the lists
        known = self._most.get(stripe)
        if known is None or known[0] != looked_at:
            tried = (*self.idle[:TRIES], *self.bearing[:TRIES])
            counts = (each.counts[stripe] for each in tried if self.rooted(stripe, each.host))
            known = self._most[stripe] = looked_at, max(counts, default=-inf)
        return known[1]

    def relieve(self, member: Member, inner: bool) -> int:
        """Make an overloaded host's children better off, if that can be; return how many hosts
        changed their parents. `inner`: whether a child forwards to others."""
        children = [
            (stripe, self.swarm.members[name])
            for stripe, names in enumerate(member.children)
            for name in names
            if not self.swarm.members[name].slow_receiver
        ]
        large = self.swarm.layout.large
        size = {
            (stripe, child.host): self._heights[stripe](child.host) if large else len(child.children[stripe])
            for stripe, child in children
        }
        children.sort(key=lambda each: (size[each[0], each[1].host], -each[1].counts[each[0]], each[1].order))
        for stripe, child in children:
            for carrier in self.idle[:TRIES]:
                if self._near(stripe, child, carrier) and self._fits(stripe, child, carrier):
                    self._move(stripe, child, carrier)
                    return 1
        if not inner:
            return self._change_places(*min(children, key=lambda each: (each[1].counts[each[0]], each[1].order)))
        if large and self.leaver(member)[1]:
            return 0
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
            if self.most(stripe) + self.behind < leaf.counts[stripe]:
                continue
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
        how many moved. The host serves as many as before, so the leaf does not wait for what ends
        no overload: the other one may be ahead only as it came from there a moment ago, and
        waits."""
        swarm, upper = self.swarm, _parent(self.swarm, late, stripe)
        for carrier in self.bearing[:TRIES]:
            leaves = [swarm.members[name] for name in carrier.children[stripe]]
            if not leaves or carrier.counts[stripe] + self.behind < late.counts[stripe]:
                continue
            if not self._fits(stripe, late, carrier):
                continue
            early = max(leaves, key=lambda each: (each.counts[stripe], each.order))
            gain = early.counts[stripe] - late.counts[stripe]
            if gain > max(BEHIND_PIECES, UNEVEN_S * swarm.typical_rate) and self._fits(stripe, early, upper):
                self._attach(stripe, late, carrier)
                self._attach(stripe, early, upper)
                self.bearing.remove(carrier)
                return 2
        return 0

    def _near(self, stripe: int, child: Member, carrier: Member) -> bool:
        """Whether a child would stay about as near to the root, where that matters."""
        if not self.swarm.layout.large or not child.children[stripe]:
            return True
        depth = self.swarm.edges.depth
        return depth(stripe, carrier.host) < depth(stripe, child.host) + LEVELS_MIN

    def _fits(self, stripe: int, child: Member, carrier: Member) -> bool:
        """Whether a carrier may become the child's parent."""
        swarm = self.swarm
        if (
            carrier is child
            or child.parents[stripe] == carrier.host
            or (child.host, carrier.host) in swarm.edges.avoided
        ):
            return False
        if carrier.counts[stripe] + self._behind(stripe, child) < child.counts[stripe]:
            return False
        if not self.rooted(stripe, carrier.host):
            return False
        return not child.children[stripe] or not swarm.edges.receives_through(stripe, carrier.host, child.host)

    def _behind(self, stripe: int, child: Member) -> float:
        """How many pieces less than a child its next parent may have: it waits for them once, and
        all children of its parent lose more in the time that it takes to receive the rest."""
        above = _parent(self.swarm, child, stripe)
        rest = self.swarm.totals[stripe] - child.counts[stripe]
        return max(self.behind, BEHIND_SHARE * max(0.0, above.load / above.slots - 1) * rest)

    def _attach(self, stripe: int, child: Member, carrier: Member) -> None:
        """Change a child's parent for one that has as many slots as before."""
        self.rooted.moved(stripe, child.host)
        self.swarm.edges.attach(stripe, child.host, carrier.host)

    def _move(self, stripe: int, child: Member, carrier: Member) -> None:
        """Change a child's parent for one that allots a slot for it."""
        self.rooted.moved(stripe, child.host)
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
