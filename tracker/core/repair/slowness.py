"""Slowness: what the tracker does about hosts that hold others up, after each report.

A report of a host shows whether it gets its share (monitor/progress.py says what is shown). A
silent parent is taken for absent, a host with a slow uplink or downlink loses upload slots, and two
hosts between which alone too little comes are parted. Hosts that receive by BitTorrent are not
judged, since a BitTorrent swarm finds its own way around slow peers, nor is a swarm with a rate
that a policy sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from p2pdist.model.digest import Digest
from p2pdist.model.messages import Advance
from tracker.core.capacity import SURE_SHARES, Capacities
from tracker.core.history.history import History
from tracker.core.host import Host
from tracker.core.member import Member
from tracker.core.monitor.presence import Presence
from tracker.core.monitor.probing import Probing
from tracker.core.monitor.progress import (
    FAIR_REPORTS,
    OTHERS_MAX,
    SLOW_SHARE,
    gets_fair_share,
    limited,
    little_beside,
    note_rates,
    receiving_in,
    share_over_all,
    silent_parents,
    slow_alone,
    slow_edges,
    slow_host,
)
from tracker.core.planning.schedule import Schedule
from tracker.core.planning.slow_receivers import relocate
from tracker.core.policy.book import PolicyBook
from tracker.core.repair.remedies import AVOID_S, GIVES_S, call_back
from tracker.core.repair.reputation import Reputation
from tracker.core.swarm import Swarm

PARTED_S = 30.0
"""For so long two hosts are not parted again because little comes from the one to the other."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """Judges after reports, with the parts of the fleet that it shares."""

    hosts: Mapping[str, Host]
    reputation: Reputation
    """Takes upload slots from slow hosts."""
    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    probing: Probing
    """Says which hosts are asked to report often."""
    capacities: Capacities
    """Remembers which hosts are slow."""
    policies: PolicyBook
    """Says in which swarms a policy sets the rate."""
    presence: Presence
    """Hears which hosts are silent."""
    history: History
    """Hears which hosts are slow."""
    swarms: Mapping[Digest, Swarm]
    """In which a host may take part besides the one that its report is about."""

    def judge(
        self, swarm: Swarm, host: Host, advance: Advance | None, *, late: bool, interval_s: float, now: float
    ) -> None:
        """A host has reported: find what holds it up, unless the whole fleet is `late`. `advance`
        is what the report says of this swarm: None because nothing came. Hosts report at least
        every `interval_s`."""
        member = swarm.members[host.name]
        if advance is None:
            note_rates(swarm, member, member.counts, now=now)
        member.hear(now, yields=advance is not None and advance.yields)
        limited_rate = self.policies.limits_rate(swarm.blob)
        counts = not (late or limited_rate or host.name in swarm.swarming or self.reputation.excused(swarm, now=now))
        self._hear_testimony(swarm, member, counts=counts, now=now)
        if host.name in swarm.swarming:
            return
        if late:
            member.clear_lags()
            return
        self._silence(swarm, member, interval_s=interval_s, now=now)
        if swarm.edges.left and call_back(swarm, member, now=now):
            self.schedule.ask(swarm.key, "goes back", now)
        wan = swarm.wan
        if limited_rate or member.site in wan.paced or member.site in wan.waiting:
            return
        member.count_fair_report(member.slow_receiver and self._fair(swarm, member))
        if member.fair_reports >= FAIR_REPORTS:
            self.reputation.clear_slow_receiver(host, now=now)
        turns = receiving_in(self._swarms_of(host.name), host.name) if len(host.swarms) > 1 else 1
        slow = limited(swarm, member, host.download_bytes_s) or slow_host(swarm, member, turns=turns, now=now)
        if slow is not None and (self.reputation.excused(swarm, now=now) or not self._alone_slow(swarm, *slow)):
            slow = None
        if slow is not None and self.capacities.mark_slow(slow[0], slow[1], downlink=slow[2], now=now):
            self.reputation.fit_children(self.hosts[slow[0]], "lags" if slow[2] else "children lag", now=now)
            self.probing.judged(slow[0], now=now)
            if slow[2] or SURE_SHARES[0] < slow[1] < SURE_SHARES[1]:  # else a child must say so, too
                self.history.slow(self.hosts[slow[0]], swarm, slow[1], downlink=slow[2], now=now)
        else:
            self._part(swarm, member, now)

    def _hear_testimony(self, swarm: Swarm, member: Member, *, counts: bool, now: float) -> None:
        """Take what the report says of the parents' uplinks, where that `counts`, and tell people
        of those that are slow."""
        testimony = self.reputation.testimony
        testimony.reported(swarm, member, self.hosts, counts=counts, now=now)
        if not counts or not testimony.speaks(member.host):
            return
        for host, share in testimony.against(member.host, self.swarms, self.hosts, self.capacities.slow_uplink):
            if self.capacities.report_slow(host, now=now):
                swarm.record(now, f"{host} has a slow uplink, as its children say")
                self.history.slow(self.hosts[host], swarm, share, downlink=False, now=now)

    def _alone_slow(self, swarm: Swarm, name: str, share: float, downlink: bool) -> bool:
        """Whether a host that is slow in one swarm is so in all its swarms together, and beside
        other hosts, which may all get little now."""
        here = self._swarms_of(name)
        if share_over_all(here, name, downlink=downlink) >= SLOW_SHARE:
            return False
        comparable = (each for each, other in swarm.members.items() if each != name and other.present)
        others = islice((each for each in comparable if not swarm.members[each].slow_receiver), OTHERS_MAX)
        return little_beside(here, name, ((each, self._swarms_of(each)) for each in others), share, downlink=downlink)

    def _fair(self, swarm: Swarm, member: Member) -> bool:
        """Whether a host gets its share in a swarm, or in all its swarms together."""
        share = share_over_all(self._swarms_of(member.host), member.host, downlink=True)
        return share > SLOW_SHARE or gets_fair_share(swarm, member)

    def _swarms_of(self, name: str) -> list[Swarm]:
        return [self.swarms[key] for key in self.hosts[name].swarms if key in self.swarms]

    def _silence(self, swarm: Swarm, member: Member, *, interval_s: float, now: float) -> None:
        """Take parents for absent that do not report while this child of theirs stands still."""
        for parent in silent_parents(swarm, member, self.probing.asked_at, interval_s=interval_s, now=now):
            self.presence.silent(self.hosts[parent], now)
            for key in self.hosts[parent].swarms:
                self.schedule.ask(key, "silent", now)

    def _part(self, swarm: Swarm, member: Member, now: float) -> None:
        """Part a host from parents that give it too little, though neither of the two is slow, or
        move it where it is in the way."""
        if member.slow_receiver and relocate(swarm, member, now=now):
            self.schedule.ask(swarm.key, "in the way", now)
        if member.slow_receiver:
            return
        slow = slow_alone(swarm, member, now=now)
        if any(member.lags):
            slow = sorted({*slow, *slow_edges(swarm, member, now=now)})
        for stripe in slow:
            parent = member.parents[stripe]
            if not parent or (member.host, parent) in swarm.edges.parted:
                continue  # it got no other parent, or no more from another
            if member.counts[stripe] and member.moved_at[stripe] == member.attached_at[stripe]:
                gives = now - self.hosts[parent].sent_at < GIVES_S
                member.starve().stop_by(stripe, parent, gives=gives)  # it goes without complaining
            swarm.edges.part(member.host, parent, now + PARTED_S)
            swarm.record(now, f"{member.host} gets too little of stripe {stripe} from {parent}")
            swarm.edges.avoid(member.host, parent, now + AVOID_S)
            swarm.edges.detach(stripe, member.host)
            self.schedule.ask(swarm.key, "slow edge", now)
