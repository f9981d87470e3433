"""Slow receivers: the parents of hosts with slow downlinks.

Theory. A slow receiver takes no upload slot, as it takes next to nothing of an uplink. But each of
several below one host takes a part, its first blocks delay the other children, and all hosts below
these lose by it. So each slow receiver has a parent of its own with leaves alone as children,
and moves to such a one when things change around it. Slow receivers could as well feed one another;
but one that was called slow by mistake could then never show that it is not.
"""

from __future__ import annotations

import heapq
from collections import Counter

from tracker.core.member import Member
from tracker.core.swarm import Swarm

STAY_S, STAY_MAX_S = 2.0, 10.0
"""How long a slow receiver keeps its parent before the edge is looked at again; the second where it
has got no piece meanwhile."""

TRIES = 64
"""Hosts of its rack among which a better parent is sought each time."""

Carrier = tuple[bool, bool, int, bool, int, str]
"""A host that could feed one more slow receiver: whether it has no slots; whether its children
forward the stripe; how many slow receivers it feeds; whether all its slots are taken; its order;
its name. The smallest costs least."""


class Carriers:
    """The hosts of a rack that could feed slow receivers in a stripe."""

    def __init__(self, swarm: Swarm, stripe: int, rack: str) -> None:
        self.swarm = swarm
        members = (swarm.members[host] for host in swarm.racks[rack])
        self._heap = [
            self._carrier(each)
            for each in members
            if each.serves and not each.slow_receiver and swarm.edges.rooted(stripe, each.host)
        ]
        heapq.heapify(self._heap)

    def best(self, child: Member) -> str | None:
        """The parent where a slow receiver costs least, if there is one."""
        passed: list[Carrier] = []
        parent = None
        while self._heap and parent is None:
            key = heapq.heappop(self._heap)
            current = self._carrier(self.swarm.members[key[5]])
            if current > key:
                heapq.heappush(self._heap, current)
                continue
            passed.append(current)
            if (child.host, current[5]) not in self.swarm.edges.avoided:
                parent = current[5]
        for key in passed:
            heapq.heappush(self._heap, key)
        return parent

    def add(self, member: Member) -> None:
        """A host of the rack has a path up now."""
        if not member.slow_receiver:
            heapq.heappush(self._heap, self._carrier(member))

    def _carrier(self, member: Member) -> Carrier:
        swarm, full = self.swarm, member.load >= member.slots
        inner, slow_receiver = _inner(swarm, member), _slow_children(swarm, member)
        return not member.slots, inner, slow_receiver, full, member.order, member.host


def relocate(swarm: Swarm, member: Member, *, now: float) -> bool:
    """Move a slow receiver that has come to be in the way of others, because of what happened
    around it since it got its parent, or that imports a stripe into its rack for itself alone;
    return whether it moved. It does not move from one such parent to another, since it would wait
    for its first blocks there."""
    moved = False
    for stripe, name in enumerate(member.parents if member.slow_receiver and member.present else ()):
        if not name or not _stayed(member, stripe, now):
            continue
        parent = swarm.members[name]
        if parent.rack == member.rack and _can_carry(swarm, parent, slow_receiver=1):
            continue
        names = list(swarm.racks[member.rack])
        first = member.order % len(names)
        candidates = (swarm.members[candidate] for candidate in (names[first:] + names[:first])[:TRIES])
        better = next((candidate for candidate in candidates if _fits(swarm, stripe, member, candidate)), None)
        if better is not None:
            swarm.edges.set_now(now)  # the report may have told nothing new of this swarm
            swarm.edges.attach(stripe, member.host, better.host)
            moved = True
    return moved


def reclassify(swarm: Swarm, member: Member, *, slow_receiver: bool) -> None:
    """A host is a slow receiver from now on, or no longer. Where it does not fit then it waits for
    another parent."""
    if member.slow_receiver == slow_receiver:
        return
    slots: Counter[str] = Counter()
    for stripe, name in enumerate(member.parents):
        parent = swarm.members.get(name or "")
        if parent is None:
            continue
        if slow_receiver or parent.load + slots[parent.host] >= parent.slots:
            swarm.edges.detach(stripe, member.host)
        else:
            slots[parent.host] += 1
    swarm.set_slow_receiver(member, slow_receiver)
    # Else another child would get the slot that is left over in another stripe. All slots that it
    # takes count by now.
    for stripe, name in enumerate(member.parents if not slow_receiver else ()):
        parent = swarm.members.get(name or "")
        if parent is not None and parent.free(stripe) < 0:
            parent.grant_slot(stripe)


def _stayed(member: Member, stripe: int, now: float) -> bool:
    """Whether a slow receiver has had its parent long enough, and has got a piece from it: what has
    come of the next would be lost."""
    stayed_s = now - member.attached_at[stripe]
    return stayed_s >= STAY_MAX_S or (stayed_s >= STAY_S and member.moved_at[stripe] > member.attached_at[stripe])


def _fits(swarm: Swarm, stripe: int, child: Member, parent: Member) -> bool:
    """Whether a slow receiver may move to this parent."""
    if (
        parent is child
        or not parent.present
        or parent.slow_receiver
        or (child.host, parent.host) in swarm.edges.avoided
    ):
        return False
    if not _can_carry(swarm, parent, slow_receiver=0) or swarm.edges.receives_through(stripe, parent.host, child.host):
        return False
    return swarm.edges.rooted(stripe, parent.host)


def _can_carry(swarm: Swarm, parent: Member, *, slow_receiver: int) -> bool:
    """Whether a host with slots feeds no more than so many slow receivers, and its children forward
    to no others."""
    return bool(parent.slots) and _slow_children(swarm, parent) <= slow_receiver and not _inner(swarm, parent)


def _slow_children(swarm: Swarm, parent: Member) -> int:
    """Slow receivers below a host, in all stripes."""
    return sum(swarm.members[child].slow_receiver for names in parent.children for child in names)


def _inner(swarm: Swarm, parent: Member) -> bool:
    """Whether a host's children forward to others that are no slow receivers."""
    below = (swarm.members[child].children[stripe] for stripe, names in enumerate(parent.children) for child in names)
    return any(not swarm.members[each].slow_receiver for names in below for each in names)
