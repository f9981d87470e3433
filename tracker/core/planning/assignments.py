"""Assignments: the messages that tell hosts their parents and the superpeers of their site.

The superpeers go with a host's first plan, and after they changed with the next plan that goes to
it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from p2pdist.model.messages import Assign
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan
from tracker.core.edges import changes
from tracker.core.events import Send
from tracker.core.host import SITE_END, Host
from tracker.core.member import FROM_ORIGIN
from tracker.core.origin.superpeers import superpeers
from tracker.core.swarm import Swarm

ALTERNATES = 2
TRIES = 16
STEP = 7919
"""A prime, so that from any start many members are met before one comes again."""


def assignments(swarm: Swarm, hosts: Mapping[str, Host], epoch: int = 0) -> list[Send]:
    """The messages to the hosts that got other parents since the last call. `epoch` is that of the
    ownership by which the swarm is this tracker's, 0 where it is alone."""

    named: dict[str, Source | None] = {FROM_ORIGIN: ORIGIN}

    def source(name: str) -> Source | None:
        if name not in named:
            address = hosts[name].address
            named[name] = Source(name, address) if address else None
        return named[name]

    messages = []
    sites: dict[str, tuple[Source, ...]] = {}
    plans, untold = changed_plans(swarm, source), swarm.wan.tell()
    for name in untold:
        if name in swarm.members and not swarm.members[name].seed:
            plans.setdefault(name, [])
    for name in list(plans):
        stripes = plans.pop(name)  # of each host once only: all at once they take much memory
        session, member = hosts[name].session, swarm.members[name]
        if session is not None:
            if member.site not in sites:
                chosen = swarm.origin.shares.get(member.site) or superpeers(swarm, member.site)
                sites[member.site] = present_superpeers(swarm, chosen, source)
            news = sites[member.site] if sites[member.site] != member.superpeers else ()
            if news:
                member.set_superpeers(news)
            dealt = name in swarm.swarming and member.site in swarm.origin.shares
            held = swarm.wan.waiting.get(member.site, "") if name in untold else None
            plan = Plan(swarm.blob, tuple(stripes), news, dealt, epoch, held)
            member.tell(plan.stripes)
            messages.append(Send(session, Assign(plan)))
    return messages


def present_superpeers(
    swarm: Swarm, names: tuple[str, ...], source: Callable[[str], Source | None]
) -> tuple[Source, ...]:
    """Those of the superpeers that are present, with the addresses where they are reached."""
    sources = (source(name) for name in names if name in swarm.members and swarm.members[name].present)
    return tuple(peer for peer in sources if peer is not None)


def changed_plans(swarm: Swarm, source: Callable[[str], Source | None]) -> dict[str, list[StripePlan]]:
    """The stripes with other parents since the last call, by host name. `source` says where a
    parent is reached; children of a parent that has not said yet where it is are told once it
    has."""
    names = list(swarm.members)
    sites: dict[str, list[str]] = {}
    racks: dict[str, list[str]] = {}
    plans: dict[str, list[StripePlan]] = {}
    for host, stripe in changes(swarm.edges):
        name = swarm.members[host].parents[stripe]
        parent = source(name) if name is not None else None
        if name is None and (host, stripe) in swarm.wan.stopped:
            plans.setdefault(host, []).append(StripePlan(stripe, None))
        if parent is not None:
            site, rack = swarm.members[host].site, swarm.members[host].rack
            if SITE_END in swarm.members[host].zone and site not in sites:
                sites[site] = list(swarm.sites[site])
            if len(swarm.racks) > 1 and rack not in racks:
                racks[rack] = list(swarm.racks[rack])
            near = racks.get(rack, []), sites.get(site, names)
            found = (source(each) for each in alternates(swarm, near, stripe, host))
            others = tuple(each for each in found if each is not None)
            bytes_s = swarm.wan.imports.get((host, stripe), 0.0)
            plans.setdefault(host, []).append(StripePlan(stripe, parent, others, bytes_s))
    swarm.edges.notified()
    return plans


def alternates(swarm: Swarm, near: tuple[list[str], ...], stripe: int, host: str) -> list[str]:
    """Up to ALTERNATES hosts that could feed `host` in this stripe should its parent fail: the
    parent's own parent and hosts elsewhere in the tree, never its descendants. `near` are the
    members to look among, the nearest first: those of its rack where there are several, and those
    of its own site where it names one, else all. The caller lists each once for all hosts."""
    chosen: list[str] = []
    member = swarm.members[host]
    parent = member.parents[stripe]
    if parent:
        grandparent = swarm.members[parent].parents[stripe]
        inside = member.site not in swarm.wan.closed or swarm.members[grandparent or parent].site == member.site
        if grandparent and swarm.members[grandparent].serves and inside:
            chosen.append(grandparent)
    for candidates in near:
        for step in range(min(len(candidates), TRIES)):
            if len(chosen) >= ALTERNATES:
                return chosen
            other = swarm.members[candidates[(member.order + stripe + step * STEP) % len(candidates)]]
            if other.host in {host, parent, *chosen} or not other.serves or not other.slots:
                continue
            if swarm.edges.receives_through(stripe, other.host, host) or not swarm.edges.rooted(stripe, other.host):
                continue
            chosen.append(other.host)
    return chosen
