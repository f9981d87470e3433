"""Adoption: streams that run already become edges of the tree that this tracker keeps.

After a restart, or a break of its session, an agent says from whom it receives. Such a stream goes
on as it is, unless it would close a circle or read from the origin what another host of its zone
reads or any host has. While no tracker answered, a keeper may have begun to read
(p2pdist/core/sources.py): it gets the lease now, or a parent.
"""

from __future__ import annotations

from collections.abc import Callable

from tracker.core.member import Member
from tracker.core.repair import yield_lease
from tracker.core.swarm import FROM_ORIGIN, Swarm


def adopt(swarm: Swarm, member: Member, stripe: int, parent: str | None, stand_in: Callable[[str], bool]) -> None:
    """Take over a stream that runs already. A host without one is told its parent again, or given
    another when that is away. `stand_in` takes an unknown parent into the swarm and says whether it
    could."""
    host, known = member.host, member.parents[stripe]
    member.keepers = ()  # its agent may have started anew
    if member.counts[stripe] == swarm.totals[stripe] or parent == known:
        return
    if known is not None:
        swarm.changed[host, stripe] = None
        if parent is None and known != FROM_ORIGIN and not swarm.members[known].present:
            swarm.detach(stripe, host)
    if parent is None or (parent == FROM_ORIGIN and (_is_whole(swarm, stripe) or not yield_lease(swarm, stripe, host))):
        return
    if parent != FROM_ORIGIN:
        if parent not in swarm.members and not stand_in(parent):
            return
        if swarm.below(stripe, parent, host):
            return
        upper = swarm.members[parent]
        if upper.free(stripe) <= 0:
            swarm.grant_seat(upper, stripe)
    swarm.attach(stripe, host, parent)
    swarm.under_way = True


def _is_whole(swarm: Swarm, stripe: int) -> bool:
    """Whether somebody present has the whole stripe."""
    return any(each.present and each.counts[stripe] == swarm.totals[stripe] for each in swarm.members.values())
