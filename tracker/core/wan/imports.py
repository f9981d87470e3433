"""Imports: keeps what crosses the WAN of sites to their budgets.

Theory. By the planner one host of a site imports each stripe, from another site or the origin
(planning/planner.py); the others receive inside. So all that crosses a site's WAN comes over these
few edges, whose hosts report how many pieces came. This counts them (usage.py), and decides two
things.

A site that may import nothing now, since it is not its hour or its budget is used up, is closed for
each swarm that keeps to budgets: its imports end after the pieces under way, and the planner gives
no new ones. Its hosts go on to receive from each other, and hosts elsewhere that receive through
them get other parents: the planner lets no site import from one that gets less. Where a host finds
no parent then, its site waits, and all receivers there are told why: they neither give up nor turn
to BitTorrent. What came meanwhile stays, and the site goes on from there.

A site with a rate gives each import under way an equal part of it, which the plan names: the sender
keeps to it, and a reader of the origin does so itself. When the number of imports changes, those
that have too much are told at once, and those that have too little now and then, as a change opens
the stream anew.

Where several trackers share the swarms each has its part of every budget, by its share of the
blobs.

Invariant: what a swarm that ignores budgets imports is counted, and neither ends nor is paced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from p2pdist.model.digest import Digest
from tracker.core.edges import changes
from tracker.core.host import SITE_END
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.planning.schedule import Schedule
from tracker.core.policy.book import PolicyBook
from tracker.core.policy.budget import SiteBudget
from tracker.core.swarm import Swarm
from tracker.core.wan.usage import Usage

LOOK_S = 0.5
LOWER_SHARE, RAISE_SHARE = 0.9, 1.25
"""An import is told another rate once its part is less than this share of what it was told, or more
than that, then RAISE_S after the last time at the earliest."""

RAISE_S = 5.0


@dataclass(slots=True)
class Imports:
    """Of all swarms of a tracker."""

    swarms: Mapping[Digest, Swarm]
    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    policies: PolicyBook
    """Has the budgets, and says which packages ignore them."""
    fraction: Callable[[], float]
    """The part of each budget that is this tracker's."""
    waits: Callable[[str, Swarm, str | None], None] = lambda site, swarm, why: None
    """Hears that a site waits with a swarm, and why; "", that it goes on; None, that it has nothing
    to wait for any more."""
    usage_by_site: dict[str, Usage] = field(default_factory=dict)
    """By site with a budget. `look`."""
    refusals: dict[str, str] = field(default_factory=dict)
    """By site that is closed now, why. `look`."""
    _watched: dict[Digest, Swarm] = field(default_factory=dict)
    """Swarms that have receivers and hosts at sites with a budget, by key. `prepare`, `look`."""
    _looked_at: float = -inf
    _raised_at: float = -inf

    @property
    def budgets(self) -> Mapping[str, SiteBudget]:
        """By site."""
        return self.policies.table.budgets

    def allowed(self, site: str) -> float | None:
        """Bytes that this tracker lets come to a site in an hour; None for no limit."""
        budget = self.budgets.get(site)
        hourly = budget.hourly_bytes if budget is not None else None
        return hourly * self._part if hourly is not None else None

    @property
    def _part(self) -> float:
        """The part of each budget that is this tracker's. One without a share gives its blobs away
        just now, and does not end what comes."""
        return self.fraction() or 1.0

    # -- what happens

    def joined(self, swarm: Swarm, member: Member) -> None:
        """A host says what it holds: it may not know any more what it was told."""
        if self.budgets and member.site in self.budgets:
            swarm.wan.untold[member.host] = None

    def advanced(self, swarm: Swarm, member: Member, counts: tuple[int, ...], *, now: float) -> None:
        """A member reports these counts, which it is still to be given."""
        wan = swarm.wan
        usage = self.usage_by_site.get(member.site) if wan.imports or wan.stopped else None
        if usage is None:
            return
        pieces = sum(
            max(0, counts[stripe] - member.counts[stripe])
            for stripe in range(swarm.stripes)
            if (edge := (member.host, stripe)) in wan.imports or edge in wan.stopped
        )
        if pieces:
            usage.count(min(swarm.layout.size, pieces * swarm.layout.piece_size), now=now)

    def prepare(self, swarm: Swarm) -> None:
        """A swarm is about to be planned: its sites are closed or open as of the last look."""
        budgets, wan = self.budgets, swarm.wan
        if not budgets and not wan.closed:
            return
        sites = [site for site in swarm.sites if site in budgets] if swarm.receivers else []
        if sites:
            self._watched[swarm.key] = swarm
        ignores = bool(sites) and self.policies.ignores_budget(swarm.blob, swarm.priority)
        keeping = [] if ignores else sites
        closed = {site: budgets[site].counts_origin for site in keeping if site in self.refusals}
        wan.close(closed, {site: 0.0 if site in closed else budgets[site].usual_bytes_s for site in keeping})

    def planned(self, swarm: Swarm, *, now: float) -> None:
        """A swarm has been planned, and its hosts are not told yet: note its imports and which
        sites wait."""
        if swarm.key not in self._watched:
            return
        wan, came = swarm.wan, False
        for host, stripe in changes(swarm.edges):
            edge = host, stripe
            if self._crosses(swarm, host, stripe):
                came = came or edge not in wan.imports
                wan.imports.setdefault(edge, inf)
            else:
                wan.imports.pop(edge, None)
            if swarm.members[host].parents[stripe] is not None:
                wan.stopped.pop(edge, None)
        if came:
            self._share(now)
        waiting, others = dict[str, str](), False
        for _, host in swarm.edges.unplanned if wan.closed else ():
            site = swarm.members[host].site
            if site in wan.closed:
                waiting[site] = self.refusals.get(site, "")
            else:
                others = True
        wan.rests = bool(waiting) and not (others or swarm.edges.avoided or swarm.edges.parted)
        for site in {**wan.waiting, **waiting}:
            if (why := waiting.get(site, "")) != wan.waiting.get(site, ""):
                wan.untold |= dict.fromkeys(swarm.sites.get(site, ()))
                self.waits(site, swarm, why if site in swarm.sites else None)
        wan.wait(waiting)

    # -- what time brings

    def look(self, *, now: float, utc_s: float) -> None:
        """Close the sites that may import nothing any more, and open those that may again."""
        if now - self._looked_at < LOOK_S or not (self.budgets or self._watched):
            return
        self._looked_at = now
        self.usage_by_site = {site: self.usage_by_site.get(site) or Usage() for site in self.budgets}
        fraction = self._part
        self.refusals = {
            site: f"site {site} waits: {why}"
            for site, usage in self.usage_by_site.items()
            if (why := usage.refusal(self.budgets[site], fraction, now=now, utc_s=utc_s))
        }
        for swarm in self._swarms():
            before = swarm.wan.closed
            self.prepare(swarm)
            stopped = self._stop(swarm)
            for site in swarm.wan.closed.keys() - before.keys():
                _free_others(swarm, site)
            if stopped or before != swarm.wan.closed:
                self.schedule.ask(swarm.key, "budget", now)
        self._share(now)

    def _swarms(self) -> Iterator[Swarm]:
        """The swarms that are watched."""
        for key, swarm in list(self._watched.items()):
            there = self.swarms.get(key) is swarm
            if there:
                yield swarm
            budgeted = self.budgets.keys() & swarm.sites.keys() or swarm.wan.closed or swarm.wan.waiting
            if not there or not budgeted or not swarm.receivers:
                del self._watched[key]
                for site in swarm.wan.waiting:
                    self.waits(site, swarm, None)
                swarm.wan.wait({})

    def _stop(self, swarm: Swarm) -> bool:
        """End the imports of the sites that are closed; whether there were any."""
        wan = swarm.wan
        over = [edge for edge in wan.imports if swarm.members[edge[0]].site in wan.closed] if wan.closed else []
        for edge in over:
            host, stripe = edge
            del wan.imports[edge]
            if self._crosses(swarm, host, stripe):
                wan.stopped[edge] = None
                swarm.edges.detach(stripe, host)
                swarm.edges.notify(host, stripe)
        return bool(over)

    def _share(self, now: float) -> None:
        """Say how fast each import may be, where that is another rate than before."""
        swarms = list(self._swarms())
        counts, paced = Counter[str](), []
        for swarm in swarms:
            imports, members = swarm.wan.imports, swarm.members
            for edge in [edge for edge in imports if edge[0] not in members or not self._crosses(swarm, *edge)]:
                del imports[edge]
            if not self.policies.ignores_budget(swarm.blob, swarm.priority):
                paced.append(swarm)
                counts.update(members[host].site for host, _ in imports)
        fraction, raises = self._part, now - self._raised_at >= RAISE_S
        for swarm in swarms:
            keeps, changed = swarm in paced, False
            swarm.wan.set_rated({site for site in swarm.sites if keeps and self._rate(site)})
            for edge, told in swarm.wan.imports.items():
                site = swarm.members[edge[0]].site
                part = fraction * self._rate(site) / counts[site] if keeps else 0.0
                if _differs(told, part, raises=raises):
                    self._raised_at = now if part > told else self._raised_at
                    swarm.wan.imports[edge] = part
                    swarm.edges.notify(*edge)
                    changed = True
            if changed:
                self.schedule.ask(swarm.key, "budget", now)

    def _rate(self, site: str) -> float:
        """What may come to a site in a second; 0 for no limit."""
        budget = self.budgets.get(site)
        return (budget.rate_bytes_s or 0.0) if budget is not None else 0.0

    def _crosses(self, swarm: Swarm, host: str, stripe: int) -> bool:
        """Whether a stripe comes to a host over the WAN of a site with a budget."""
        member = swarm.members[host]
        budget = self.budgets.get(member.site) if SITE_END in member.zone else None
        parent = member.parents[stripe]
        if budget is None or parent is None:
            return False
        return budget.counts_origin if parent == FROM_ORIGIN else swarm.members[parent].site != member.site


def _free_others(swarm: Swarm, site: str) -> None:
    """A site is closed from now on: hosts at other sites that would wait with it get other
    parents."""
    edges = swarm.edges
    for name in swarm.sites[site]:
        for stripe, children in enumerate(swarm.members[name].children):
            others = [child for child in children if swarm.members[child].site != site]
            for child in others if others and not edges.rooted(stripe, name) else ():
                edges.detach(stripe, child)


def _differs(told: float, part: float, *, raises: bool) -> bool:
    """Whether an import that was told a rate (0: none; infinity: nothing yet) is told another
    one."""
    if told == part:
        return False
    if told == inf or not (told and part):
        return True
    return part < LOWER_SHARE * told or (raises and part > RAISE_SHARE * told)
