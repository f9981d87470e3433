"""Rescue: where a host receives that others starved.

A host that has nothing, and that several hosts gave nothing although they say that they have
pieces, may be among hosts that vouch for each other. It receives from a host that reads the origin
because it was starved itself, or that receives the stripe through such a host. Where there is none
it reads the origin, besides the roots. A host that was rescued may be one of those that starve
others, so another is rescued once it gave nothing either, up to RESCUES_MAX a stripe.

The same holds for a host that has pieces and has stood still for long, since several hosts that say
that they have more gave nothing after that; and soon for one that has only parents that brought
what they have from elsewhere, all of which stopped giving at once.
"""

from __future__ import annotations

from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.swarm import Swarm

RESCUES_MAX = 3
"""So many starved hosts read a stripe from the origin at once, besides the roots."""


def is_missing(swarm: Swarm, stripe: int, host: str) -> bool:
    """Whether a host, if it is starved, is so in this stripe."""
    member = swarm.members[host]
    starvation = member.starvation
    if not member.counts[stripe] or starvation is None:
        return not member.counts[stripe]
    return stripe in starvation.given_up or starvation.stopped_in(stripe, now=swarm.edges.now)


def rescuer(swarm: Swarm, stripe: int, host: str) -> Member | None:
    """The host nearest to the origin that could give a stripe to a starved one."""
    level = _rescued(swarm, stripe)
    while level:
        for member in level:
            room = member.free(stripe) > 0 or member.unallotted > 0
            if room and member.serves and member.host != host and (host, member.host) not in swarm.edges.avoided:
                return member
        level = [swarm.members[child] for member in level for child in member.children[stripe] if child != host]
    return None


def may_be_rescued(swarm: Swarm, stripe: int, host: str) -> bool:
    """Whether a starved host for which there is no rescuer may read a stripe from the origin: the
    hosts that were rescued there gave it nothing, or serve none any more."""
    barred = host in swarm.origin.barred or (host, FROM_ORIGIN) in swarm.edges.avoided
    return not is_full(swarm, stripe) and not barred


def first_idle(swarm: Swarm, stripe: int, idle_s: float) -> Member | None:
    """The first starved host that may read a stripe, and has read nothing of it for `idle_s`."""
    idle = [
        each
        for each in _rescued(swarm, stripe)
        if not each.counts[stripe] and swarm.edges.now - each.attached_at[stripe] > idle_s
    ]
    return min(idle, key=lambda member: (member.attached_at[stripe], member.order), default=None)


def is_full(swarm: Swarm, stripe: int) -> bool:
    """Whether as many starved hosts read a stripe as may."""
    return len(_rescued(swarm, stripe)) >= RESCUES_MAX


def below_rescue(swarm: Swarm, stripe: int, host: str) -> bool:
    """Whether a host receives a stripe from a host that was rescued, or through one."""
    rescued = {member.host for member in _rescued(swarm, stripe)}
    current: str | None = host if rescued else None
    while current and current not in rescued:
        current = swarm.members[current].parents[stripe]
    return bool(current)


def _rescued(swarm: Swarm, stripe: int) -> list[Member]:
    members = swarm.members
    return [members[host] for host in swarm.edges.roots[stripe] if stripe in members[host].rescued]
