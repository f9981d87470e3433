"""Light hosts: where those with slow downlinks receive.

Theory. A light host takes no seat, as it takes next to nothing of an uplink. But several of them below one host take a good part of it,
and everybody below that host lacks it. Its own uplink, slow as it is, is enough for another of its kind: with one child in each stripe it
gives as much as it gets. So light hosts hang below each other, at most CHAIN_MAX in a row as each adds the time of a piece at a slow
pace, and the first of them where it costs least: at a host all of whose children are leaves, each at another one.

One that gets less from a light parent than that has is parted from it as others are (progress.py), and tries the next.
"""

from __future__ import annotations

import heapq

from tracker.core.member import Member
from tracker.core.swarm import Swarm

CHAIN_MAX = 8
SETTLE_S = 2.0
"""How long a light host stays where it is before it is looked at again."""

Carrier = tuple[int, int, bool, int, str]
"""Who could carry one more: 0 for a light host, 2 for one below whose children others hang, 1 for others; the light hosts in its row, or
among its children; whether all its seats are taken; its order; its name. The smallest costs least."""


class Carriers:
    """The hosts of a rack that could feed light ones in a stripe."""

    def __init__(self, swarm: Swarm, stripe: int, rack: str) -> None:
        self.swarm, self.stripe = swarm, stripe
        members = (swarm.members[host] for host in swarm.racks[rack])
        found = [self._carrier(each) for each in members if each.present and swarm.rooted(stripe, each.host)]
        self._heap = [each for each in found if each is not None]
        heapq.heapify(self._heap)

    def best(self, child: Member) -> str | None:
        """Where a light host costs least, if anywhere."""
        passed: list[Carrier] = []
        found = None
        while self._heap and found is None:
            key = heapq.heappop(self._heap)
            now = self._carrier(self.swarm.members[key[4]])
            if now is None:
                continue
            if now > key:
                heapq.heappush(self._heap, now)
                continue
            passed.append(now)
            if now[4] != child.host and (child.host, now[4]) not in self.swarm.avoided:
                found = now[4]
        for key in passed:
            heapq.heappush(self._heap, key)
        return found

    def add(self, member: Member) -> None:
        """A host of the rack has a way up now."""
        key = self._carrier(member)
        if key is not None:
            heapq.heappush(self._heap, key)

    def _carrier(self, member: Member) -> Carrier | None:
        swarm, stripe = self.swarm, self.stripe
        if not member.light:
            kind, full = 1 + _inner(swarm, member), member.load >= member.budget
            return kind, _light_children(swarm, member), full, member.order, member.host
        if not _chain_goes_on(swarm, stripe, member):
            return None
        return 0, _chained(swarm, stripe, member), False, member.order, member.host


def settle(swarm: Swarm, member: Member, *, now: float) -> bool:
    """Move a light host that has come to be in others' way, because of what happened around it since it got its place; returns whether it
    moved. Not from one such place to another: whoever gets it waits for its first blocks."""
    moved = False
    for stripe, name in enumerate(member.parents if member.light else ()):
        if not name or now - member.attached_at[stripe] < SETTLE_S or swarm.members[name].light:
            continue
        if _bears(swarm, swarm.members[name], light=1):
            continue
        better = (each for each in map(swarm.members.__getitem__, swarm.racks[member.rack]) if each is not member)
        found = next((each for each in better if _would_do(swarm, stripe, member, each)), None)
        if found is not None:
            swarm.attach(stripe, member.host, found.host)
            moved = True
    return moved


def _would_do(swarm: Swarm, stripe: int, child: Member, parent: Member) -> bool:
    if not parent.present or (child.host, parent.host) in swarm.avoided:
        return False
    fits = _chain_goes_on(swarm, stripe, parent) if parent.light else _bears(swarm, parent, light=0)
    return fits and swarm.rooted(stripe, parent.host) and not swarm.below(stripe, parent.host, child.host)


def _bears(swarm: Swarm, parent: Member, *, light: int) -> bool:
    """Whether a host with seats has so many light children at most, and no others hang below its children."""
    return _light_children(swarm, parent) <= light and not _inner(swarm, parent)


def _light_children(swarm: Swarm, parent: Member) -> int:
    """In all stripes."""
    return sum(swarm.members[child].light for names in parent.children for child in names)


def _inner(swarm: Swarm, parent: Member) -> bool:
    """Whether others hang below a host's children; those below light ones do not count."""
    for stripe, names in enumerate(parent.children):
        for name in names:
            child = swarm.members[name]
            if child.children[stripe] and not child.light:
                return True
    return False


def _chain_goes_on(swarm: Swarm, stripe: int, last: Member) -> bool:
    """Whether another light host may receive a stripe from this one."""
    return not last.children[stripe] and _chained(swarm, stripe, last) < CHAIN_MAX


def _chained(swarm: Swarm, stripe: int, member: Member) -> int:
    """How many light hosts there are in a row, this one being the last."""
    count, at = 0, member
    while at.light:
        count, parent = count + 1, at.parents[stripe]
        if not parent:
            break
        at = swarm.members[parent]
    return count


def become(swarm: Swarm, member: Member, *, light: bool) -> None:
    """A host is light from now on, or no longer. Where it does not fit then the planner finds it another place: among its kind, or at a
    seat."""
    if member.light == light:
        return
    for stripe, name in enumerate(member.parents):
        parent = swarm.members.get(name or "")
        if parent is not None and (light or parent.light or parent.load >= parent.budget):
            swarm.detach(stripe, member.host)
    swarm.set_light(member, light)
