"""The tail: those who are behind when others are done.

Theory. A stripe that fell behind cannot catch up through its own tree, whose inner hosts are busy with all their children. Once hosts have
the whole of a stripe and nobody left to serve, their uplinks are idle: each of them takes over a host that is still far from the end,
the one that lacks most first. That host then receives at the full rate of an idle uplink, and what it used to take is left to others.
Hosts are not moved for a few pieces, and stay within their rack.
"""

from __future__ import annotations

from tracker.core.member import Member
from tracker.core.swarm import Swarm

PIECES_MIN = 8
"""Moving a stream costs about a round trip and the slow start of a connection."""


def hand_over(swarm: Swarm) -> int:
    """Give hosts that lack much of a stripe to idle hosts that have all of it; returns how many were moved."""
    moved = 0
    for names in swarm.racks.values():
        members = [swarm.members[name] for name in names]
        # Not those whose uplinks are held to be slow.
        idle = [member for member in members if member.present and member.budget >= swarm.stripes and not member.load]
        if idle:
            for stripe in range(swarm.stripes):
                moved += _hand_over(swarm, stripe, members, idle)
    return moved


def _hand_over(swarm: Swarm, stripe: int, members: list[Member], idle: list[Member]) -> int:
    total = swarm.totals[stripe]
    whole = [member for member in idle if member.counts[stripe] == total and not member.load]
    if not whole:
        return 0
    late = [each for each in members if _may_move(swarm, each, stripe)]
    late.sort(key=lambda each: (each.counts[stripe], each.order))
    moved = 0
    for child, parent in zip(late, sorted(whole, key=lambda each: each.order), strict=False):
        if (child.host, parent.host) in swarm.avoided or swarm.below(stripe, parent.host, child.host):
            continue
        old = child.parents[stripe]
        if old and not child.light:
            above = swarm.members[old]
            if above.seats[stripe] >= above.taken[stripe]:
                above.seats[stripe] -= 1
        swarm.grant_seat(parent, stripe)
        swarm.attach(stripe, child.host, parent.host)
        moved += 1
    return moved


def _may_move(swarm: Swarm, member: Member, stripe: int) -> bool:
    """Whether a host lacks much and does not yet have a source to itself that has everything."""
    parent = member.parents[stripe]
    if not member.present or not parent or swarm.totals[stripe] - member.counts[stripe] < PIECES_MIN:
        return False
    above = swarm.members[parent]
    return above.counts[stripe] < swarm.totals[stripe] or above.load > 1
