"""Seats: on which stripes the budgets of hosts are spent.

Theory. A stripe with n receivers and one root needs n - 1 seats, and all budgets together have just enough. So seats are dealt exactly.
Each stripe first gets one that can be reached (of a host that receives the stripe already), or its newcomers would find no place but
on top of somebody's budget; then roots serve the stripe that they read; then the rest goes stripe after stripe, so that a host
forwards in one stripe or, at a boundary, in two.

Hosts that join in small batches hang below one another, and every level costs the time of a piece. As long as a swarm is young, so
that moving costs next to nothing, its trees are therefore drawn anew each time it has grown by GROWTH; that is seldom enough to cost
O(1) a host.
"""

from __future__ import annotations

from hashlib import blake2b

from tracker.core.swarm import FROM_ORIGIN, Member, Swarm

GROWTH = 1.25
YOUNG = 0.08
PIECES_MIN = 64
"""A blob of fewer pieces is there before its trees could be drawn anew."""


def deal(swarm: Swarm) -> None:
    """Allot seats that belong to no stripe to the stripes that lack some."""
    spare = [member for member in swarm.members.values() if member.spare > 0 and member.present]
    if not spare:
        return
    dealt = [sum(member.seats[stripe] for member in swarm.members.values()) for stripe in range(swarm.stripes)]
    roots = 0 if any(member.seed for member in swarm.members.values()) else 1
    lacking = [max(0, swarm.receivers - roots - count) for count in dealt]
    for stripe in range(swarm.stripes):
        if lacking[stripe] and not any(
            _attached(swarm, each, stripe) and each.free(stripe) > 0 for each in _present(swarm)
        ):
            candidates = [each for each in spare if each.spare > 0 and _attached(swarm, each, stripe)]
            best = max(candidates, key=lambda each: (each.host in swarm.roots[stripe], each.spare), default=None)
            if best is not None:
                _give(best, stripe, lacking, 1)
    for stripe, holders in enumerate(swarm.roots):
        for host in holders:
            _give(swarm.members[host], stripe, lacking, swarm.members[host].spare)
    # Taken from the end: members that serve a stripe already, then those with the largest budgets.
    pool = [member for member in spare if member.spare > 0]
    pool.sort(key=lambda member: (any(member.seats), member.budget, mixed(swarm.blob, member.host)))
    for stripe in sorted(range(swarm.stripes), key=lambda stripe: -lacking[stripe]):
        while lacking[stripe] and pool:
            _give(pool[-1], stripe, lacking, pool[-1].spare)
            if not pool[-1].spare:
                pool.pop()


def outgrown(swarm: Swarm) -> bool:
    """Whether a young swarm has grown so much since its trees were drawn that drawing them anew pays."""
    if not swarm.drawn_for or swarm.under_way or swarm.layout.count < PIECES_MIN:
        return False
    if swarm.receivers < GROWTH * swarm.drawn_for or swarm.receivers != len(swarm.members):
        return False
    limit = YOUNG * swarm.layout.count
    return all(member.present and sum(member.counts) < limit for member in swarm.members.values())


def clear(swarm: Swarm) -> dict[tuple[str, int], str]:
    """Take all seats and all edges but those of the roots away; returns the parents that were, by (host, stripe)."""
    parents: dict[tuple[str, int], str] = {}
    for member in swarm.members.values():
        member.seats = [0] * swarm.stripes
        for stripe, parent in enumerate(member.parents):
            if parent is not None and parent != FROM_ORIGIN:
                if (member.host, stripe) not in swarm.changed:
                    parents[member.host, stripe] = parent
                swarm.detach(stripe, member.host)
    return parents


def mixed(blob: str, host: str) -> int:
    """A number that orders hosts differently for each blob, the same in every process."""
    return int.from_bytes(blake2b(f"{blob}/{host}".encode(), digest_size=8).digest(), "big")


def _present(swarm: Swarm) -> list[Member]:
    return [member for member in swarm.members.values() if member.present]


def _attached(swarm: Swarm, member: Member, stripe: int) -> bool:
    """Whether others can receive the stripe from the host now."""
    return member.parents[stripe] is not None or member.counts[stripe] == swarm.totals[stripe]


def _give(member: Member, stripe: int, lacking: list[int], seats: int) -> None:
    taken = min(seats, member.spare, lacking[stripe])
    member.seats[stripe] += taken
    lacking[stripe] -= taken
