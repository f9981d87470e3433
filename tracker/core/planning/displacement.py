"""Displacement: a host that feeds others and lost its parent gets a position near the root again.

Theory. A host that dies leaves children of which one gets its slot. The slots that are free then
are those of hosts at the bottom of the tree, or in other stripes. A child that feeds others would
take all of them down there, and wait with them until the bottom has what they have: of 100,000
hosts one in ten depends on a host that dies, and the deepest ones would be three times as deep as
the tree was drawn. So it takes the position of a host that has fewer levels below it, as near to
the root as there is one; that host does the same, and so on, until a leaf is left over, which loses
nothing at the bottom. Each of them is one level deeper than it was, and waits for one piece. That
is worth their new streams where pieces are large: small ones pass a whole tree in no time.

Invariants: each host of a chain has fewer levels below it than the one before, so a chain ends. A
position is looked for in the host's rack alone, and taken only where it spares it LEVELS_MIN levels
at least, since each change of a parent is a new stream.
"""

from __future__ import annotations

import heapq

from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.swarm import Swarm

LEVELS_MIN = 2
BEHIND_PIECES = 4.0
"""The parent at a position may have so much less than the host; where the tree's order says that it
has more, it is late itself."""

TRIES = 8
"""Positions that are looked at with equally many levels below."""

Position = tuple[int, int, str, str]
"""Its depth, the order of the host that has it, that host's name, its parent's: the smallest is the
best."""


class Displacement:
    """The positions in one stripe's tree, by rack, as they are when the first is asked for."""

    def __init__(self, swarm: Swarm, stripe: int) -> None:
        self.swarm, self.stripe = swarm, stripe
        self._heights: dict[str, int] = {}
        self._depths: dict[str, int] = {}
        self._racks: dict[str, dict[int, list[Position]]] = {}

    def height(self, host: str) -> int:
        """Levels below a host in this stripe; slow receivers are none."""
        members, stripe, heights = self.swarm.members, self.stripe, self._heights
        path = [host] if host not in heights else []
        while path:
            below = [each for each in members[path[-1]].children[stripe] if not members[each].slow_receiver]
            unknown = [each for each in below if each not in heights]
            path += unknown
            if not unknown:
                heights[path.pop()] = max((heights[each] + 1 for each in below), default=0)
        return heights[host]

    def find(self, child: Member, depth: int) -> tuple[str, str] | None:
        """The position for a host that would be at `depth` otherwise: the host that has it, and
        that host's parent."""
        positions = self._racks.get(child.rack)
        if positions is None:
            positions = self._racks[child.rack] = self._positions(child.rack)
        best: Position | None = None
        for height in range(self.height(child.host)):  # of equally good ones that with the shortest chain
            first = self._first(positions.get(height, []), child)
            if first is not None and (best is None or first[0] < best[0]):
                best = first
        return (best[2], best[3]) if best is not None and best[0] <= depth - LEVELS_MIN else None

    def attached(self, child: Member) -> list[Member]:
        """A host that waited has a parent, and what is below it a path up; returns those of it that
        are in its rack."""
        members, below = self.swarm.members, [child.host]
        above: str | None = child.host
        while above:  # what was displaced there had fewer levels below
            self._heights.pop(above, None)
            above = members[above].parents[self.stripe]
        for name in below:
            below += members[name].children[self.stripe]
        inside = [members[name] for name in below[1:] if members[name].rack == child.rack]
        if (positions := self._racks.get(child.rack)) is not None:
            for name in below:
                self._depths.pop(name, None)
            for member in (child, *inside):
                self._offer(positions, member)
        return inside

    def _positions(self, rack: str) -> dict[int, list[Position]]:
        """The positions below hosts of a rack, in heaps by the levels below them."""
        positions = dict[int, list[Position]]()
        for name in self.swarm.racks[rack]:
            self._offer(positions, self.swarm.members[name])
        return positions

    def _offer(self, positions: dict[int, list[Position]], member: Member) -> None:
        """Add the position of a host, if it has one."""
        parent = self.swarm.members.get(member.parents[self.stripe] or "")
        if parent is None or parent.rack != member.rack or member.slow_receiver or not parent.serves:
            return
        if (depth := self._depth(member.host)) > 0:
            entry = depth, member.order, member.host, parent.host
            heapq.heappush(positions.setdefault(self.height(member.host), []), entry)

    def _first(self, heap: list[Position], child: Member) -> Position | None:
        """The best one of a heap that the host may take."""
        passed: list[Position] = []
        found = None
        while heap and found is None and len(passed) < TRIES:
            entry = heapq.heappop(heap)
            parent = self.swarm.members[entry[3]]
            if self.swarm.members[entry[2]].parents[self.stripe] != parent.host:
                continue  # it was taken
            passed.append(entry)
            if (child.host, parent.host) not in self.swarm.edges.avoided and self._suits(parent, child):
                found = entry
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def _suits(self, parent: Member, child: Member) -> bool:
        """Whether a parent has a path up, and about as many pieces as the child."""
        enough = self._pieces(parent) + BEHIND_PIECES >= self._pieces(child)
        return enough and self.swarm.edges.rooted(self.stripe, parent.host)

    def _pieces(self, member: Member) -> float:
        """What a host has by now: in a large fleet its last report may be old."""
        rate = min(member.rates[self.stripe], self.swarm.typical_rate)
        return member.counts[self.stripe] + rate * max(0.0, self.swarm.edges.now - member.heard_at)

    def _depth(self, host: str) -> int:
        """Hosts on the path from a host up to the origin or a whole stripe, itself included; below
        zero where there is no such path."""
        members, stripe, depths = self.swarm.members, self.stripe, self._depths
        total, path, current = self.swarm.totals[stripe], list[str](), host
        while current not in depths:
            parent = members[current].parents[stripe]
            if parent == FROM_ORIGIN or members[current].counts[stripe] == total:
                depths[current] = 1
            elif parent is None:
                depths[current] = -1
            else:
                path.append(current)
                current = parent
        for name in reversed(path):
            depths[name] = depths[current] + 1 if depths[current] > 0 else -1
            current = name
        return depths[host]
