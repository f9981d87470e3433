"""Assignments: the messages that tell hosts their parents and the superpeers of their site.

The superpeers go with a host's first plan, and after they changed with the next plan that goes to
it anyway.

A plan for all hosts of a large swarm at once takes much memory until it is sent. So the hosts are
told SLICE by SLICE: the core asks to be called again (Fleet.wake_at) as soon as the messages that
it has given out are on their way. What else happens meanwhile is in the messages that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from p2pdist.model.digest import Digest
from p2pdist.model.messages import Assign
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan
from tracker.core.events import Send
from tracker.core.host import SITE_END, Host
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.origin.superpeers import superpeers
from tracker.core.swarm import Swarm

SLICE = 256
"""Hosts that are told in one go."""

ALTERNATES = 2
TRIES = 16
STEP = 7919
"""A prime, so that from any start many members are met before one comes again."""


@dataclass(slots=True)
class Assignments:
    """Tells hosts their parents, some of them at a time."""

    swarms: Mapping[Digest, Swarm]
    """The fleet's swarms by key."""
    hosts: Mapping[str, Host]
    """The fleet's hosts by name."""
    _untold: dict[Digest, None] = field(default_factory=dict)
    """Keys of swarms of which hosts may have to be told. `planned`, `take`."""

    @property
    def waiting(self) -> bool:
        """Whether hosts are still to be told."""
        return bool(self._untold)

    def planned(self, swarm: Swarm) -> None:
        """A swarm was planned: its hosts are to be told."""
        self._untold[swarm.key] = None

    def take(self, epoch: int, mine: Callable[[Digest], bool]) -> list[Send]:
        """The messages to the next hosts that got other parents, SLICE of them at most. `epoch` is
        that of the ownership by which swarms are this tracker's, 0 where it is alone; `mine` says
        whether a blob is."""
        messages: list[Send] = []
        room = SLICE
        for key in list(self._untold):
            if room <= 0:
                break
            del self._untold[key]
            swarm = self.swarms.get(key)
            if swarm is None or not mine(swarm.blob):
                continue
            names = list(dict.fromkeys(islice(chain(swarm.edges.changed, swarm.wan.untold), room)))
            messages += _messages(swarm, self.hosts, names, epoch)
            room -= len(names)
            if swarm.edges.changed or swarm.wan.untold:
                self._untold[key] = None  # behind the others
        return messages


def _messages(swarm: Swarm, hosts: Mapping[str, Host], names: list[str], epoch: int) -> Iterator[Send]:
    """The messages to these hosts of what changed for them, which are told with that."""
    named: dict[str, Source | None] = {FROM_ORIGIN: ORIGIN}

    def source(name: str) -> Source | None:
        if name not in named:
            address = hosts[name].address
            named[name] = Source(name, address) if address else None
        return named[name]

    sites: dict[str, tuple[Source, ...]] = {}
    near = _Near(swarm)
    for name in names:
        stripes, untold = _changed(swarm, name, near, source), name in swarm.wan.untold
        swarm.edges.plan_sent(name)
        swarm.wan.plan_sent(name)
        member = swarm.members.get(name)
        session = hosts[name].session if member is not None else None
        if member is None or session is None or not (stripes or (untold and not member.seed)):
            continue
        if member.site not in sites:
            chosen = swarm.origin.shares.get(member.site) or superpeers(swarm, member.site)
            sites[member.site] = present_superpeers(swarm, chosen, source)
        news = sites[member.site] if sites[member.site] != member.superpeers else ()
        if news:
            member.set_superpeers(news)
        dealt = name in swarm.swarming and member.site in swarm.origin.shares
        held = swarm.wan.waiting.get(member.site, "") if untold else None
        plan = Plan(swarm.blob, stripes, news, dealt, epoch, held)
        member.record_plan(plan.stripes)
        yield Send(session, Assign(plan))


def present_superpeers(
    swarm: Swarm, names: tuple[str, ...], source: Callable[[str], Source | None]
) -> tuple[Source, ...]:
    """Those of the superpeers that are present, with the addresses where they are reached."""
    sources = (source(name) for name in names if name in swarm.members and swarm.members[name].present)
    return tuple(peer for peer in sources if peer is not None)


class _Near:
    """The members among which a host finds alternates, the nearest first: those of its rack where
    there are several, and those of its own site where it names one, else all. Each is listed once
    for all hosts."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm, self._all = swarm, list(swarm.members)
        self._sites: dict[str, list[str]] = {}
        self._racks: dict[str, list[str]] = {}

    def of(self, member: Member) -> tuple[list[str], list[str]]:
        site, rack = member.site, member.rack
        if SITE_END in member.zone and site not in self._sites:
            self._sites[site] = list(self._swarm.sites[site])
        if len(self._swarm.racks) > 1 and rack not in self._racks:
            self._racks[rack] = list(self._swarm.racks[rack])
        return self._racks.get(rack, []), self._sites.get(site, self._all)


def _changed(swarm: Swarm, host: str, near: _Near, source: Callable[[str], Source | None]) -> tuple[StripePlan, ...]:
    """The stripes of which a host is still to be told the parent. `source` says where a parent is
    reached; children of a parent that has not said yet where it is are told once it has."""
    plans = []
    for stripe in swarm.edges.changed.get(host, ()):
        member = swarm.members[host]
        name = member.parents[stripe]
        parent = source(name) if name is not None else None
        if name is None and (host, stripe) in swarm.wan.stopped:
            plans.append(StripePlan(stripe, None))
        if parent is not None:
            found = (source(each) for each in alternates(swarm, near.of(member), stripe, host))
            others = tuple(each for each in found if each is not None)
            plans.append(StripePlan(stripe, parent, others, swarm.wan.imports.get((host, stripe), 0.0)))
    return tuple(plans)


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
