"""Chains: in the tail those who are late pass a stripe on from one to the next.

Theory. A subtree that lost time keeps its distance to the others for as long as every edge runs at
its share of an uplink. When the others are done, uplinks stand idle, but none of those is in the
subtree's rack, or it has nothing that the subtree lacks: then a host feeds four that lag as one, at
a quarter of its uplink each, while their own serve nobody. So they line up: one child stays, the
next receives from it, and so on, and the stripe runs through all of them with the whole uplink of
each. A longer way costs the time of one piece per host. Where the one who brings the stripe into
the rack is itself one of many children, it goes to an idle host of another rack that has the whole
stripe; what it has it does not fetch again, so no more comes into the rack than before.

When a host will be done is reckoned in the time that a whole uplink takes for one piece: not before
its parent and one piece, not before its parent's uplink has sent what it lacks to all that share
it, and not before its own downlink has taken what it lacks of all stripes. So nobody moves while
all stripes are still to come: the downlink has no room. Reports are old, so what hosts got since is
reckoned, too. Each one in turn, who lacks least and stands highest first, takes the place in its
rack where it is done soonest, or stays if it gains little. A host changes its parent at most every
SETTLE_S, so that reports tell how it fares.
"""

from __future__ import annotations

import heapq
from math import inf

from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.swarm import Swarm

PIECES_MIN = 8
"""Moving a stream costs about a round trip and the slow start of a connection."""

GAIN_SHARE = 0.25
"""Of the time left that a move must save: what is reckoned is rough."""

STAY_S = 0.5
AHEAD_S = 1.5
"""A host is taken to go on at its last pace for so long after a report."""

PAUSE_S = 0.1
PAUSE_S_PER_MEMBER = 1e-5
"""Between two looks at a swarm, which cost time in proportion to its members."""

TRIES = 4
MOVES_SHARE = 1 / 4
MOVES_MIN, MOVES_MAX = 16, 500
"""Moves in one look: each of them is a message."""

Candidate = tuple[float, int, str]
"""When a host is done, its order, its name."""


def due(swarm: Swarm, *, now: float) -> bool:
    """Whether the last look was long enough ago for another one."""
    return now - swarm.passes.lined_up_at >= PAUSE_S + PAUSE_S_PER_MEMBER * len(swarm.members)


def line_up(swarm: Swarm, *, now: float) -> int:
    """Let late hosts receive from each other, and racks from idler ones; returns how many were
    moved."""
    swarm.passes.lined_up(now)
    swarm.edges.set_now(now)
    left = _Left(swarm, now)
    limit = min(MOVES_MAX, max(MOVES_MIN, int(len(swarm.members) * MOVES_SHARE)))
    moved = 0
    for stripe in range(swarm.stripes):
        if moved >= limit:
            break
        late = [member for member in left.late if left.may_gain(member, stripe)]
        if late and len(swarm.racks) > 1:
            moved += _import_anew(swarm, stripe, left, late, limit - moved)
        racks: dict[str, list[Member]] = {}
        for member in late:
            racks.setdefault(member.rack, []).append(member)
        for members in racks.values():
            if moved < limit:
                moved += _Line(swarm, stripe, left, members).run(limit - moved)
    return moved


class _Left:
    """What hosts are still to get, as far as can be reckoned, when they will be done with it, and
    how many share each uplink. `late` are those who have a stripe and lack much of another; while
    all stripes are still to come nobody's downlink has room."""

    def __init__(self, swarm: Swarm, now: float) -> None:
        self.swarm, self.now = swarm, now
        self.late: list[Member] = []
        self.exports: dict[str, int] = {}
        self._lacks: dict[str, list[float]] = {}
        self._ended: dict[str, int] = {}
        self._ends: list[dict[str, float]] = [{} for _ in range(swarm.stripes)]
        for member in swarm.members.values():
            if not member.seed:
                self._add(member)

    def _any_ends(self, member: Member) -> bool:
        """Whether a host has some stripe by now."""
        ahead_s = self._ahead_s(member)
        for total, count, rate in zip(self.swarm.totals, member.counts, member.rates, strict=True):
            if count + rate * ahead_s > total - 1:
                return True
        return False

    def _ahead_s(self, member: Member) -> float:
        return min(AHEAD_S, max(0.0, self.now - member.heard_at))

    def _add(self, member: Member) -> None:
        for parent in member.parents:
            if parent and (above := self.swarm.members[parent]).rack != member.rack:
                self.exports[above.rack] = self.exports.get(above.rack, 0) + 1
        if not self._any_ends(member):
            return
        late = False
        for parent, lack in zip(member.parents, self.lacks(member), strict=True):
            if parent and lack < 1 and not member.slow_receiver:
                self._ended[parent] = self._ended.get(parent, 0) + 1
            late = late or lack >= PIECES_MIN
        if late and member.present and not member.slow_receiver:
            self.late.append(member)

    def lacks(self, member: Member) -> list[float]:
        """By stripe, in pieces."""
        known = self._lacks.get(member.host)
        if known is None:
            ahead_s = self._ahead_s(member)
            known = self._lacks[member.host] = [
                max(0.0, total - count - rate * ahead_s)
                for total, count, rate in zip(self.swarm.totals, member.counts, member.rates, strict=True)
            ]
        return known

    def load(self, member: Member) -> int:
        """How many share a host's uplink by now."""
        return member.load - self._ended.get(member.host, 0)

    def may_gain(self, member: Member, stripe: int) -> bool:
        """Whether a host lacks much, has been where it is for a while, and would gain if it had an
        uplink to itself."""
        if not member.parents[stripe] or self.lacks(member)[stripe] < PIECES_MIN:
            return False
        if self.now - member.attached_at[stripe] < STAY_S:
            return False
        return _gains(self.ends(member, stripe), self.time(member, stripe, 0.0, 1))

    def time(self, member: Member, stripe: int, above: float, shared: int) -> float:
        """When a host is done whose parent is done at `above` and serves so many."""
        lacks = self.lacks(member)
        return max(above + 1, lacks[stripe] * shared, sum(lacks))

    def ends(self, member: Member, stripe: int) -> float:
        """When a host is done with a stripe as things are."""
        known, way, at = self._ends[stripe], [], member
        while at.host not in known:
            lack, parent = self.lacks(at)[stripe], at.parents[stripe]
            if lack < 1:
                known[at.host] = 0.0
            elif parent is None:
                known[at.host] = inf
            elif parent == FROM_ORIGIN:
                known[at.host] = self.time(at, stripe, 0.0, self.swarm.stripes)
            else:
                way.append(at)
                at = self.swarm.members[parent]
        for each in reversed(way):
            known[each.host] = self.time(each, stripe, known[at.host], max(1, self.load(at)))
            at = each
        return known[member.host]

    def placed(self, member: Member, stripe: int, ends: float) -> None:
        """When a host will be done that has its place now."""
        self._ends[stripe][member.host] = ends

    def forget_ends(self, stripe: int) -> None:
        """Others come by the stripe in another way since."""
        self._ends[stripe].clear()


def _import_anew(swarm: Swarm, stripe: int, left: _Left, late: list[Member], limit: int) -> int:
    """Let those who bring a stripe into their rack receive it from idle hosts of other racks;
    returns how many were moved."""
    late = [each for each in late if swarm.members[each.parents[stripe] or ""].rack != each.rack]
    if not late:
        return 0
    sources = _Sources(swarm, stripe, left)
    late.sort(key=lambda each: (left.lacks(each)[stripe], each.order))
    moved = 0
    for child in late:
        if moved >= limit:
            break
        above = swarm.members[child.parents[stripe] or ""]
        stays = left.time(child, stripe, left.ends(above, stripe), max(1, left.load(above)))  # others have gone by now
        source = sources.take(child) if _gains(stays, left.time(child, stripe, 0.0, 1)) else None
        if source is not None:
            swarm.edges.move(stripe, child, source)
            moved += 1
    if moved:
        left.forget_ends(stripe)
    return moved


class _Sources:
    """Idle hosts that have a whole stripe, by zone and rack; the racks that serve others least come
    first."""

    def __init__(self, swarm: Swarm, stripe: int, left: _Left) -> None:
        self.swarm, self.stripe = swarm, stripe
        self.whole: dict[str, list[Member]] = {}
        total = swarm.totals[stripe]
        for member in swarm.members.values():
            if member.counts[stripe] == total and not left.load(member) and _serves(swarm, member, member.load):
                self.whole.setdefault(member.rack, []).append(member)
        self.zones: dict[str, list[tuple[int, int, str]]] = {}
        for rack, members in self.whole.items():
            members.sort(key=lambda each: (sum(map(len, each.children)), each.order), reverse=True)
            candidate = left.exports.get(rack, 0), members[-1].order, rack
            self.zones.setdefault(members[0].zone, []).append(candidate)
        for candidates in self.zones.values():
            heapq.heapify(candidates)

    def take(self, child: Member) -> Member | None:
        """One for a host: of its own zone, or else of that of its parent. None where its rack has
        one itself."""
        if child.rack in self.whole:
            return None
        above = self.swarm.members[child.parents[self.stripe] or ""]
        for zone in dict.fromkeys((child.zone, above.zone)):
            candidates = self.zones.get(zone)
            while candidates:
                serving, order, rack = candidates[0]
                members = self.whole[rack]
                if not members:
                    heapq.heappop(candidates)
                    continue
                heapq.heapreplace(candidates, (serving + 1, order, rack))
                source = members.pop()
                if _may_feed(self.swarm, self.stripe, child, source):
                    return source
        return None


class _Line:
    """One rack in one stripe, and those who are to be placed, `late`. `loads` and `seats` say how
    many share the uplink of each host by now, and how many seats are taken as far as is known,
    without those who are yet to be placed; `free` are the hosts that may take another one, by
    load."""

    def __init__(self, swarm: Swarm, stripe: int, left: _Left, late: list[Member]) -> None:
        self.swarm, self.stripe, self.left = swarm, stripe, left
        known: dict[str, tuple[float, int]] = {}
        self.late = sorted(late, key=lambda each: (*self._behind(each, known), each.slots < swarm.stripes, each.order))
        members = [swarm.members[name] for name in swarm.racks[late[0].rack]]
        self.loads = {each.host: left.load(each) for each in members}
        self.taken = {each.host: each.load for each in members}
        self.free: list[list[Candidate]] = [[] for _ in range(max(swarm.stripes, swarm.fanout))]
        for each in self.late:
            self._count(each.parents[stripe] or "", -1)
        placed = {each.host for each in self.late}
        for each in members:
            if each.host not in placed:
                self._offer(each)

    def _behind(self, member: Member, known: dict[str, tuple[float, int]]) -> tuple[float, int]:
        """What a host lacks, or somebody above it in its rack, and how many are above: who comes
        later is above nobody who came before."""
        way = [member]
        while way[-1].host not in known:
            at = way[-1]
            above = self.swarm.members.get(at.parents[self.stripe] or "")
            if above is None or above.rack != at.rack:
                known[at.host] = self.left.lacks(at)[self.stripe], 0
            else:
                way.append(above)
        while len(way) > 1:
            lack, hosts = known[way.pop().host]
            known[way[-1].host] = max(lack, self.left.lacks(way[-1])[self.stripe]), hosts + 1
        return known[member.host]

    def _count(self, parent: str, children: int) -> None:
        """A host, if it stands in the rack, has got or lost children."""
        if parent in self.loads:
            self.loads[parent] += children
            self.taken[parent] += children

    def _offer(self, member: Member) -> None:
        """Take a host into account as a parent."""
        load = self.loads[member.host]
        if load < len(self.free) and _serves(self.swarm, member, self.taken[member.host]):
            candidate = self.left.ends(member, self.stripe), member.order, member.host
            heapq.heappush(self.free[load], candidate)

    def run(self, limit: int) -> int:
        """Place the hosts; returns how many were moved. Beyond the limit those still move whose
        seats were taken."""
        moved, left, stripe = 0, self.left, self.stripe
        for child in self.late:
            above = self.swarm.members[child.parents[stripe] or ""]
            ends = self._stays(child, above)
            found = self._best(child, above, ends) if moved < limit or ends == inf else None
            if found is not None:
                ends, above = found
                self.swarm.edges.move(stripe, child, above)
                moved += 1
            elif ends == inf:
                self.swarm.passes.strain()  # one too many stays
            left.placed(child, stripe, ends)
            self._count(above.host, 1)
            for each in (above, child):
                if each.host in self.loads:
                    self._offer(each)
        return moved

    def _stays(self, child: Member, above: Member) -> float:
        """When a host is done if it stays; who came before may have taken its seat."""
        if above.host not in self.loads:
            shared = max(1, self.left.load(above))
        elif above.slots > self.taken[above.host]:
            shared = self.loads[above.host] + 1
        else:
            return inf
        return self.left.time(child, self.stripe, self.left.ends(above, self.stripe), shared)

    def _best(self, child: Member, above: Member, stays: float) -> tuple[float, Member] | None:
        """When a host is done soonest, and where; None if it stays. Nobody goes where as many share
        an uplink as now."""
        best: tuple[float, Candidate] | None = None
        loads = self.left.load(above) - 1 if stays < inf else len(self.free)
        for load, candidates in enumerate(self.free[: max(1, loads)]):
            candidate = self._first(child, above, load, candidates)
            if candidate is not None:
                ends = self.left.time(child, self.stripe, candidate[0], load + 1)
                if best is None or ends < best[0]:
                    best = ends, candidate
        if best is None or not _gains(stays, best[0]):
            return None
        return best[0], self.swarm.members[best[1][2]]

    def _first(self, child: Member, above: Member, load: int, candidates: list[Candidate]) -> Candidate | None:
        """The first of those with a load that may feed the child."""
        passed: list[Candidate] = []
        found = None
        while candidates and found is None and len(passed) < TRIES:
            candidate = heapq.heappop(candidates)
            name = candidate[2]
            if self.loads[name] != load:
                continue
            passed.append(candidate)
            if name != above.host and _may_feed(self.swarm, self.stripe, child, self.swarm.members[name]):
                found = candidate
        for candidate in passed:
            heapq.heappush(candidates, candidate)
        return found


def _gains(stays: float, goes: float) -> bool:
    """Whether being done at one time instead of another is worth a move."""
    return goes < inf if stays == inf else stays - goes >= max(PIECES_MIN, GAIN_SHARE * stays)


def _serves(swarm: Swarm, member: Member, load: int) -> bool:
    """Whether a host with this load may feed another one: it is there, and its uplink is not held
    to be slow."""
    return member.present and not member.slow_receiver and swarm.stripes <= member.slots > load


def _may_feed(swarm: Swarm, stripe: int, child: Member, parent: Member) -> bool:
    """Whether a host may receive from another one: that did not fail it a moment ago, and does not
    receive from it."""
    return (child.host, parent.host) not in swarm.edges.avoided and not swarm.edges.receives_through(
        stripe, parent.host, child.host
    )
