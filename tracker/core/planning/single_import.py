"""Single import: a rack or a site receives a stripe once from outside.

A second importer comes about where the path up from the first one was broken for a moment, and
while no tracker answered: an agent turned to an alternate at another site, or, as a superpeer, to
the origin, and told the next tracker of a stream that runs (repair/remedies.py, `reattach`). Both
go on by themselves and bring the same bytes over the same link, so one of them gets a parent inside
instead as soon as both have a path up.

A slow receiver does not do for others, nor does one whose bytes are in doubt. A host that was
starved (rescue.py) reads for itself, and one that still is receives from such a host wherever that
is: the importer of its own rack or site may be what starves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tracker.core.host import SITE_END
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.planning.rescue import below_rescue
from tracker.core.swarm import Swarm

AHEAD_SHARE, AHEAD_PIECES = 0.02, 2
"""A reader of the origin is kept rather than a host that receives from another one only where it is
ahead by more than this part of the stripe, and more than so many pieces."""


def importing_sites(swarm: Swarm, stripe: int, origin_sites: frozenset[str]) -> set[str]:
    """The sites of which a host receives the stripe from another site, so that the others there may
    receive from it. `origin_sites`: those whose hosts may read the origin; none: all."""
    members = [swarm.members[host] for host in swarm.edges.importers[stripe]]
    return {each.site for each in members if not each.slow_receiver and _goes_on(swarm, stripe, each, origin_sites)}


def end_second_imports(swarm: Swarm, stripe: int, origin_sites: frozenset[str]) -> None:
    """Where a site with a WAN receives a stripe twice, one of the two hosts waits for a parent
    inside. `origin_sites` as above: an importer below a host of another site that reads, as it may
    not, does not replace one that may."""
    by_site: dict[str, list[Member]] = {}
    for host in swarm.edges.importers[stripe]:
        member = swarm.members[host]
        if SITE_END in member.zone:
            by_site.setdefault(member.site, []).append(member)
    if by_site:
        for host in swarm.edges.roots[stripe]:
            by_site.get(swarm.members[host].site, []).append(swarm.members[host])
    for importers in by_site.values():
        if len(importers) > 1:
            keep_one(swarm, stripe, importers, origin_sites)


def keep_one(swarm: Swarm, stripe: int, importers: Iterable[Member], origin_sites: frozenset[str]) -> None:
    """Of hosts that import a stripe for the same others one goes on; the rest waits for a parent
    inside."""
    fit = {
        each.host: each
        for each in importers
        if not _is_rescued(swarm, stripe, each) and _goes_on(swarm, stripe, each, origin_sites)
    }
    if len(fit) < 2:
        return  # the second importer of another rack was above them
    ahead = max(AHEAD_PIECES, int(AHEAD_SHARE * swarm.totals[stripe]))

    def order(member: Member) -> tuple[bool, bool, bool, int, int]:
        below = any(above.host in fit for above in _above(swarm, stripe, member))
        pieces = member.counts[stripe] - (ahead if member.parents[stripe] == FROM_ORIGIN else 0)
        return not below, not member.slow_receiver, bool(member.slots), pieces, member.order

    best = max(fit.values(), key=order)
    above_best = {member.host for member in _above(swarm, stripe, best)}
    for other in fit.values() if best.slots else ():
        if other is best or other.host in above_best or best.slow_receiver > other.slow_receiver:
            continue
        if (other.host, best.host) not in swarm.edges.avoided:
            swarm.edges.detach(stripe, other.host)


def _is_rescued(swarm: Swarm, stripe: int, member: Member) -> bool:
    if stripe in member.rescued:
        return True
    return member.host in swarm.starved and below_rescue(swarm, stripe, member.host)


def _goes_on(swarm: Swarm, stripe: int, member: Member, origin_sites: frozenset[str]) -> bool:
    """Whether all hosts are there through which a host receives, up to one that reads the origin
    and may, or has the whole stripe, and none of them is in doubt."""
    top = member
    for top in (member, *_above(swarm, stripe, member)):
        if not top.serves:
            return False
    if top.parents[stripe] == FROM_ORIGIN:
        return not origin_sites or top.site in origin_sites
    return top.counts[stripe] == swarm.totals[stripe]


def _above(swarm: Swarm, stripe: int, member: Member) -> Iterator[Member]:
    """The hosts through which a host receives, its parent first."""
    while parent := member.parents[stripe]:
        member = swarm.members[parent]
        yield member
