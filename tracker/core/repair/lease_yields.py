"""Leases that hosts with more pieces take from those that read.

Theory. A tracker that takes a swarm over from one that hangs hears first of hosts that come new,
and one of these reads the origin from the first piece on. Those that were there before follow
seconds later, once they know that their tracker is gone. They may have nearly all of a stripe, so
that only its last pieces are still to be read. So the one that has the most takes the lease of a
reader that is far behind, which then receives from it. At other times a lead is a claim that costs
nothing, and takes no lease from anybody.
"""

from __future__ import annotations

from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.repair.remedies import AVOID_S
from tracker.core.swarm import Swarm

LEAD_PART = 8
"""A host is far ahead that has one of so many parts of the stripe more."""


def yield_leases(swarm: Swarm, *, now: float) -> int:
    """Take the leases of readers from which hosts of their site that wait for a parent are far
    ahead; returns how many, for the planner to give to these."""
    edges, ahead = swarm.edges, dict[tuple[int, str], Member]()
    for stripe, host in edges.unplanned:
        member = swarm.members[host]
        best = ahead.get((stripe, member.site))
        fit = member.present and member.slots and (host, FROM_ORIGIN) not in edges.avoided
        if fit and (best is None or member.counts[stripe] > best.counts[stripe]):
            ahead[stripe, member.site] = member
    taken = 0
    for stripe, site in ahead:
        lead = max(1, swarm.totals[stripe] // LEAD_PART)
        for host in list(edges.roots[stripe]):
            reader, best = swarm.members[host], ahead[stripe, site]
            if reader.site == site and best.counts[stripe] >= reader.counts[stripe] + lead:
                edges.avoid(host, FROM_ORIGIN, now + AVOID_S)
                edges.detach(stripe, host)
                swarm.record(now, f"{host} leaves the lease of stripe {stripe} to {best.host}, which is ahead")
                taken += 1
    return taken
