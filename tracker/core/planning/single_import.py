"""Single import: a rack or a site receives a stripe once from outside.

A second importer comes about where the path up from the first one was broken for a moment, and
while no tracker answered: an agent turned to an alternate at another site, or, as a superpeer, to
the origin, and told the next tracker of a stream that runs (repair/remedies.py, `reattach`). Both
go on by themselves and bring the same bytes over the same link, so one of them gets a parent inside
instead as soon as both have a path up.

A slow receiver does not do for others, nor does one whose bytes are in doubt; and a host that was
starved (rescue.py) reads for itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from tracker.core.host import SITE_END
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.swarm import Swarm

AHEAD_SHARE, AHEAD_PIECES = 0.02, 2
"""A reader of the origin is kept rather than a host that receives from another one only where it is
ahead by more than this part of the stripe, and more than so many pieces."""


def end_second_imports(swarm: Swarm, stripe: int) -> None:
    """Where a site with a WAN receives a stripe twice, one of the two hosts waits for a parent
    inside."""
    edges, members = swarm.edges, swarm.members
    if not edges.importers[stripe]:
        return
    by_site: dict[str, list[Member]] = {}
    for host in (*edges.importers[stripe], *edges.roots[stripe]):
        member = members[host]
        if SITE_END in member.zone:
            by_site.setdefault(member.site, []).append(member)
    for importers in by_site.values():
        if len(importers) > 1:
            keep_one(swarm, stripe, importers)


def keep_one(swarm: Swarm, stripe: int, importers: Iterable[Member]) -> None:
    """Of hosts that import a stripe for the same others one goes on; the rest waits for a parent
    inside."""
    edges = swarm.edges
    fit = [
        each
        for each in importers
        if each.present and not each.doubted_until and stripe not in each.rescued and edges.rooted(stripe, each.host)
    ]
    if len(fit) < 2:
        return  # the second importer of another rack was above them
    ahead = max(AHEAD_PIECES, int(AHEAD_SHARE * swarm.totals[stripe]))

    def order(member: Member) -> tuple[bool, bool, bool, int, int]:
        below = any(edges.receives_through(stripe, member.host, each.host) for each in fit if each is not member)
        reads = member.parents[stripe] == FROM_ORIGIN
        pieces = member.counts[stripe] - reads * ahead
        return not below, not member.slow_receiver, bool(member.slots), pieces, member.order

    best = max(fit, key=order)
    for other in fit:
        if other is best or not best.slots or best.slow_receiver > other.slow_receiver:
            continue
        if (other.host, best.host) not in edges.avoided and not edges.receives_through(stripe, best.host, other.host):
            edges.detach(stripe, other.host)
