"""Balance: children of hosts that carry more than their seats, moved a few at a time.

Theory. Where hosts fall out or turn out slow, somebody carries an additional child, and all its children, with everybody below them, go
at a fraction of the pace. If another host of the rack has a seat that stands idle, in whatever stripe, the child moves there. If seats
are short everywhere, the burden is borne by hosts all of whose children in the stripe are leaves, so that nobody further down loses, and
goes round among them: every ROTATE_S it passes, with the leaf that has lost least, to a host whose children have lost least. All lose a
little then, and nobody much. A running stream is not restarted: the child changes its parent between two pieces.
"""

from __future__ import annotations

from tracker.core.swarm import Member, Swarm, only_leaves

PAUSE_S = 0.5
ROTATE_S = 1.0
MOVES_SHARE = 1 / 32
BEHIND_PIECES = 4
BEHIND_S = 0.5
"""A host is taken as a parent although it is so much behind its child: that waits once, and goes on faster than a child of three."""

TRIES = 64


def balance(swarm: Swarm, *, now: float) -> int:
    """Move children away from overloaded hosts; returns how many moved. Clears `strained` when nobody is overloaded."""
    swarm.balanced_at = now
    overloaded = [member for member in swarm.members.values() if member.budget and member.load > member.budget]
    if not overloaded:
        swarm.strained = False
        return 0
    limit = max(2, int(len(swarm.members) * MOVES_SHARE))
    moved = 0
    racks: dict[str, list[Member]] = {}
    for member in sorted(overloaded, key=lambda each: (each.burdened_at, each.order)):
        if moved >= limit:
            break
        if member.burdened_at < 0:
            member.burdened_at = now
        if member.rack not in racks:
            racks[member.rack] = _carriers(swarm, member.rack, now)
        moved += _relieve(swarm, member, racks[member.rack], now)
    return moved


def _carriers(swarm: Swarm, rack: str, now: float) -> list[Member]:
    """Who could carry one more: hosts with an idle seat, then those whose children have lost least."""
    members = [swarm.members[name] for name in swarm.racks[rack]]
    found = [each for each in members if each.present and each.load < each.budget]
    rested = [
        each
        for each in members
        if each.present
        and each.budget
        and each.load == each.budget
        and now - each.burdened_at >= 2 * ROTATE_S
        and any(_bears(swarm, stripe, each) for stripe in range(swarm.stripes))
    ]
    rested.sort(key=lambda each: (_loss(swarm, each), each.order))
    return sorted(found, key=lambda each: (each.load - each.budget, each.order)) + rested


def _loss(swarm: Swarm, member: Member) -> int:
    """By how many pieces the child of a host that has lost most is behind it."""
    return max(
        member.counts[stripe] - swarm.members[child].counts[stripe]
        for stripe, children in enumerate(member.children)
        for child in children
    )


def _relieve(swarm: Swarm, member: Member, carriers: list[Member], now: float) -> int:
    """Move one child of an overloaded host, if a better place is there; returns how many hosts changed their parents."""
    children = [(stripe, swarm.members[name]) for stripe, names in enumerate(member.children) for name in names]
    # Leaves first, and of these the one that has lost least: it goes on sharing.
    children.sort(key=lambda each: (len(each[1].children[each[0]]), -each[1].counts[each[0]], each[1].order))
    rests = now - member.burdened_at >= ROTATE_S
    for carrier in carriers[:TRIES]:
        idle = carrier.load < carrier.budget
        for stripe, child in children:
            leaf = not child.children[stripe]
            if carrier is member or not _fits(swarm, stripe, child, carrier):
                continue
            if idle or (leaf and rests and _bears(swarm, stripe, carrier)):
                _move(swarm, stripe, child, carrier, carriers)
                return 1
            if not leaf and _bears(swarm, stripe, carrier) and _displace(swarm, stripe, child, carrier, carriers):
                return 2
    return 0


def _displace(swarm: Swarm, stripe: int, child: Member, carrier: Member, carriers: list[Member]) -> bool:
    """Let a child that others hang below take the place of a leaf, for which a third host finds room; returns whether it could."""
    for name in carrier.children[stripe]:
        leaf = swarm.members[name]
        for other in carriers[:TRIES]:
            if other is carrier or other is child or other.host == child.parents[stripe]:
                continue
            room = other.load < other.budget or _bears(swarm, stripe, other)
            if room and _fits(swarm, stripe, leaf, other):
                _move(swarm, stripe, leaf, other, carriers)
                _move(swarm, stripe, child, carrier, carriers)
                return True
    return False


def _bears(swarm: Swarm, stripe: int, carrier: Member) -> bool:
    """Whether nobody but leaves loses when the carrier takes one more leaf on."""
    return bool(carrier.children[stripe]) and only_leaves(swarm, stripe, carrier)


def _fits(swarm: Swarm, stripe: int, child: Member, carrier: Member) -> bool:
    if carrier is child or child.parents[stripe] == carrier.host or (child.host, carrier.host) in swarm.avoided:
        return False
    if carrier.counts[stripe] + max(BEHIND_PIECES, BEHIND_S * swarm.typical_pace) < child.counts[stripe]:
        return False
    return not swarm.below(stripe, carrier.host, child.host) and swarm.rooted(stripe, carrier.host)


def _move(swarm: Swarm, stripe: int, child: Member, carrier: Member, carriers: list[Member]) -> None:
    """Change a child's parent; whoever is full then can carry no more for a while."""
    parent = swarm.members[child.parents[stripe] or carrier.host]
    if parent.seats[stripe] >= len(parent.children[stripe]):
        parent.seats[stripe] -= 1
    swarm.grant_seat(carrier, stripe)
    swarm.attach(stripe, child.host, carrier.host)
    if parent.load <= parent.budget:
        parent.burdened_at = swarm.now
    if carrier.load > carrier.budget:
        carrier.burdened_at = swarm.now
    if carrier.load >= carrier.budget and carrier in carriers:
        carriers.remove(carrier)
