"""Balance: children of hosts that carry more than their seats, moved a few at a time.

Theory. Where hosts fall out or turn out slow, somebody carries an additional child, and all its children, with everybody below them, go
at a fraction of the pace. If another host of the rack has a seat that stands idle, in whatever stripe, the child moves there. If seats
are short everywhere the burden goes round: every ROTATE_S it passes to hosts that have not carried it lately, so that all lose a little and
nobody much. A running stream is not restarted: the child changes its parent between two pieces.
"""

from __future__ import annotations

from tracker.core.swarm import Member, Swarm

PAUSE_S = 0.5
ROTATE_S = 1.0
MOVES_SHARE = 1 / 32
BEHIND_PIECES = 4
"""A host is taken as a parent although it is so much behind its child: it goes on faster than a child of three."""

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
        if member.rack not in racks:
            racks[member.rack] = _carriers(swarm, member.rack, now)
        moved += _relieve(swarm, member, racks[member.rack], now)
    return moved


def _carriers(swarm: Swarm, rack: str, now: float) -> list[Member]:
    """Who could carry one more: hosts with an idle seat, then those that carried none too many for the longest time."""
    members = [swarm.members[name] for name in swarm.racks[rack]]
    found = [each for each in members if each.present and each.load < each.budget]
    rested = [
        each
        for each in members
        if each.present and each.budget and each.load == each.budget and now - each.burdened_at >= 2 * ROTATE_S
    ]
    rested.sort(key=lambda each: (each.burdened_at, each.order))
    return sorted(found, key=lambda each: (each.load - each.budget, each.order)) + rested


def _relieve(swarm: Swarm, member: Member, carriers: list[Member], now: float) -> int:
    """Move one child of an overloaded host, if a better place is there."""
    if member.burdened_at < 0:
        member.burdened_at = now
    children = [(stripe, swarm.members[name]) for stripe, names in enumerate(member.children) for name in names]
    # Those with the fewest below them first: what moves is at half pace for a moment.
    children.sort(key=lambda each: (each[1].load, each[1].order))
    for position, carrier in enumerate(carriers[:TRIES]):
        idle = carrier.load < carrier.budget
        if carrier is member or (not idle and now - member.burdened_at < ROTATE_S):
            continue
        for stripe, child in children:
            if _fits(swarm, stripe, child, carrier):
                _move(swarm, stripe, child, member, carrier)
                if not idle:
                    carrier.burdened_at = now
                if carrier.load >= carrier.budget:
                    del carriers[position]
                return 1
    return 0


def _fits(swarm: Swarm, stripe: int, child: Member, carrier: Member) -> bool:
    if carrier is child or (child.host, carrier.host) in swarm.avoided:
        return False
    if carrier.counts[stripe] + BEHIND_PIECES < child.counts[stripe]:
        return False
    return not swarm.below(stripe, carrier.host, child.host) and swarm.rooted(stripe, carrier.host)


def _move(swarm: Swarm, stripe: int, child: Member, member: Member, carrier: Member) -> None:
    if member.seats[stripe] >= len(member.children[stripe]):
        member.seats[stripe] -= 1
    swarm.grant_seat(carrier, stripe)
    swarm.attach(stripe, child.host, carrier.host)
    if member.load <= member.budget:
        member.burdened_at = swarm.now
