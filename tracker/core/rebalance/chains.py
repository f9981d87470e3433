"""Chains: in the tail late hosts pass a stripe on from one to the next.

Theory. A subtree that lost time keeps its distance to the others for as long as every edge gets its
share of an uplink. When the others are done, uplinks are idle, but none of those is in the
subtree's rack, or its host has nothing that the subtree lacks. Then a host feeds four that lag as
one, at a quarter of its uplink each, while theirs serve no host. So they line up: one child stays,
the next receives from it, and so on, and the stripe passes through all of them with the whole
uplink of each. A longer path costs the time of one piece per host. Where the importer of the rack
is itself one of many children, it moves to an idle host of another rack that has the whole stripe;
it does not fetch again what it has, so no more enters the rack than before.

When a host will be done is reckoned in the time that a whole uplink takes for one piece: not before
its parent and one piece, not before its parent's uplink has sent what it lacks to all that share
it, and not before its own downlink has taken what it lacks of all stripes. So no host moves while
all stripes are still to come: the downlink has no room. Reports are old, so what hosts got since is
reckoned, too. Each host in turn, the one that lacks least and is highest first, takes the parent in
its rack with which it is done soonest, or keeps its own if it gains little. A host changes its
parent at most every STAY_S, so that reports show what the change did. A receiver that yields stays
where it is.
"""

from __future__ import annotations

import heapq
from math import inf

from tracker.core.member import FROM_ORIGIN, Member, yields
from tracker.core.swarm import Swarm

PIECES_MIN = 8
"""Moving a stream costs about a round trip and the slow start of a connection."""

GAIN_SHARE = 0.25
"""Of the time left that a move must save: what is reckoned is rough."""

STAY_S = 0.5
AHEAD_S = 1.5
"""A host is taken to go on at its last rate for so long after a report."""

PAUSE_S = 0.1
PAUSE_S_PER_MEMBER = 1e-5
"""A look at a swarm costs time in proportion to its members, and so does the pause after it."""

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
    """Let late hosts receive from each other, and importers from idler hosts; return how many
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
    """What hosts still lack, as far as can be reckoned, when they will be done with it, and how
    many share each uplink. `late` are the hosts that have a stripe and lack much of another; while
    all stripes are still to come no downlink has room."""

    def __init__(self, swarm: Swarm, now: float) -> None:
        self.swarm, self.now = swarm, now
        self.late: list[Member] = []
        self.exports: dict[str, int] = {}
        self._missing: dict[str, list[float]] = {}
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
        for parent, lack in zip(member.parents, self.missing(member), strict=True):
            if parent and lack < 1 and not member.slow_receiver:
                self._ended[parent] = self._ended.get(parent, 0) + 1
            late = late or lack >= PIECES_MIN
        if late and member.present and not (member.slow_receiver or yields(member)):
            self.late.append(member)

    def missing(self, member: Member) -> list[float]:
        """Pieces that a host lacks, by stripe."""
        missing = self._missing.get(member.host)
        if missing is None:
            ahead_s = self._ahead_s(member)
            missing = self._missing[member.host] = [
                max(0.0, total - count - rate * ahead_s)
                for total, count, rate in zip(self.swarm.totals, member.counts, member.rates, strict=True)
            ]
        return missing

    def load(self, member: Member) -> int:
        """Children that share a host's uplink by now."""
        return member.load - self._ended.get(member.host, 0)

    def may_gain(self, member: Member, stripe: int) -> bool:
        """Whether a host lacks much, has had its parent for a while, and would gain if it had
        an uplink to itself."""
        if not member.parents[stripe] or self.missing(member)[stripe] < PIECES_MIN:
            return False
        if self.now - member.attached_at[stripe] < STAY_S:
            return False
        return _gains(self.ends(member, stripe), self.time(member, stripe, 0.0, 1))

    def time(self, member: Member, stripe: int, above: float, shared: int) -> float:
        """When a host is done below a parent that is done at `above` and serves so many."""
        missing = self.missing(member)
        return max(above + 1, missing[stripe] * shared, sum(missing))

    def ends(self, member: Member, stripe: int) -> float:
        """When a host is done with a stripe as things are."""
        ends, path, current = self._ends[stripe], [], member
        while current.host not in ends:
            lack, parent = self.missing(current)[stripe], current.parents[stripe]
            if lack < 1:
                ends[current.host] = 0.0
            elif parent is None:
                ends[current.host] = inf
            elif parent == FROM_ORIGIN:
                ends[current.host] = self.time(current, stripe, 0.0, self.swarm.stripes)
            else:
                path.append(current)
                current = self.swarm.members[parent]
        for below in reversed(path):
            ends[below.host] = self.time(below, stripe, ends[current.host], max(1, self.load(current)))
            current = below
        return ends[member.host]

    def placed(self, member: Member, stripe: int, ends: float) -> None:
        """Note when a host will be done that has its parent now."""
        self._ends[stripe][member.host] = ends

    def forget_ends(self, stripe: int) -> None:
        """The paths of a stripe have changed since."""
        self._ends[stripe].clear()


def _import_anew(swarm: Swarm, stripe: int, left: _Left, late: list[Member], limit: int) -> int:
    """Move importers to idle hosts of other racks; return how many moved."""
    late = [each for each in late if swarm.members[each.parents[stripe] or ""].rack != each.rack]
    if not late:
        return 0
    sources = _Sources(swarm, stripe, left)
    late.sort(key=lambda each: (left.missing(each)[stripe], each.order))
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
        """An idle host for an importer: of its own zone, or else of that of its parent. None where
        its rack has one itself."""
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
    """One rack in one stripe, and the late hosts that are to get parents. `loads` and `taken` say
    how many share the uplink of each host by now, and how many slots are taken as far as is known,
    without the hosts that are yet to get parents; `free` are the hosts that may take another child,
    by load."""

    def __init__(self, swarm: Swarm, stripe: int, left: _Left, late: list[Member]) -> None:
        self.swarm, self.stripe, self.left = swarm, stripe, left
        behind: dict[str, tuple[float, int]] = {}
        self.late = sorted(
            late, key=lambda member: (*self._behind(member, behind), member.slots < swarm.stripes, member.order)
        )
        members = [swarm.members[name] for name in swarm.racks[late[0].rack]]
        self.loads = {member.host: left.load(member) for member in members}
        self.taken = {member.host: member.load for member in members}
        self.free: list[list[Candidate]] = [[] for _ in range(max(swarm.stripes, swarm.fanout))]
        for member in self.late:
            self._count(member.parents[stripe] or "", -1)
        placed = {member.host for member in self.late}
        for member in members:
            if member.host not in placed:
                self._offer(member)

    def _behind(self, member: Member, behind: dict[str, tuple[float, int]]) -> tuple[float, int]:
        """What a host lacks, or a host above it in its rack, and how many are above: a later host
        is above no earlier one."""
        path = [member]
        while path[-1].host not in behind:
            current = path[-1]
            above = self.swarm.members.get(current.parents[self.stripe] or "")
            if above is None or above.rack != current.rack:
                behind[current.host] = self.left.missing(current)[self.stripe], 0
            else:
                path.append(above)
        while len(path) > 1:
            lack, hosts = behind[path.pop().host]
            behind[path[-1].host] = max(lack, self.left.missing(path[-1])[self.stripe]), hosts + 1
        return behind[member.host]

    def _count(self, parent: str, children: int) -> None:
        """A host of the rack has got or lost children."""
        if parent in self.loads:
            self.loads[parent] += children
            self.taken[parent] += children

    def _offer(self, member: Member) -> None:
        """Consider a host as a parent."""
        load = self.loads[member.host]
        if load < len(self.free) and _serves(self.swarm, member, self.taken[member.host]):
            candidate = self.left.ends(member, self.stripe), member.order, member.host
            heapq.heappush(self.free[load], candidate)

    def run(self, limit: int) -> int:
        """Give the late hosts their parents; return how many moved. Beyond the limit
        only hosts that lost their slots move."""
        moved, left, stripe = 0, self.left, self.stripe
        for child in self.late:
            above = self.swarm.members[child.parents[stripe] or ""]
            ends = self._stays(child, above)
            move = self._best(child, above, ends) if moved < limit or ends == inf else None
            if move is not None:
                ends, above = move
                self.swarm.edges.move(stripe, child, above)
                moved += 1
            elif ends == inf:
                self.swarm.passes.strain()  # one too many stays
            left.placed(child, stripe, ends)
            self._count(above.host, 1)
            for changed in (above, child):
                if changed.host in self.loads:
                    self._offer(changed)
        return moved

    def _stays(self, child: Member, above: Member) -> float:
        """When a host is done if it keeps its parent; an earlier host may have taken its slot."""
        if above.host not in self.loads:
            shared = max(1, self.left.load(above))
        elif above.slots > self.taken[above.host]:
            shared = self.loads[above.host] + 1
        else:
            return inf
        return self.left.time(child, self.stripe, self.left.ends(above, self.stripe), shared)

    def _best(self, child: Member, above: Member, stays: float) -> tuple[float, Member] | None:
        """When a host is done soonest, and with which parent; None if it keeps its own. No host
        moves where as many share an uplink as now."""
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
        """The first of the candidates with a load that may feed the child."""
        passed: list[Candidate] = []
        first = None
        while candidates and first is None and len(passed) < TRIES:
            candidate = heapq.heappop(candidates)
            name = candidate[2]
            if self.loads[name] != load:
                continue
            passed.append(candidate)
            if name != above.host and _may_feed(self.swarm, self.stripe, child, self.swarm.members[name]):
                first = candidate
        for candidate in passed:
            heapq.heappush(candidates, candidate)
        return first


def _gains(stays: float, goes: float) -> bool:
    """Whether being done at one time instead of another is worth a move."""
    return goes < inf if stays == inf else stays - goes >= max(PIECES_MIN, GAIN_SHARE * stays)


def _serves(swarm: Swarm, member: Member, load: int) -> bool:
    """Whether a host with this load may feed another one: it is present, and its uplink is not held
    to be slow."""
    return member.present and not member.slow_receiver and swarm.stripes <= member.slots > load


def _may_feed(swarm: Swarm, stripe: int, child: Member, parent: Member) -> bool:
    """Whether a host may receive from another one, which did not fail it a moment ago and does not
    receive from it."""
    return (child.host, parent.host) not in swarm.edges.avoided and not swarm.edges.receives_through(
        stripe, parent.host, child.host
    )
