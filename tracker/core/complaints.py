"""Complaints: what the tracker does when a host says that a source failed it.

Theory. A complaint names a source, a stripe and a reason. Where the source is a peer, the edge to
it is taken apart and the pair is avoided for a while, so that the planner finds another parent. A
peer that refuses or sends wrong bytes loses reputation, if the tracker had named it to the host
that complains. Any process may complain, so a host that never gave a piece to another has one vote
a network, and none against one that did; else each address has one vote, and hosts that get good
pieces outweigh it. Where the source is the origin, the lease moves to another host, or the swarm
ends. While all hosts are late (monitor/lateness.py), complaints of standing still are ignored: no
parent is at fault.

In a large fleet hosts report seldom. So a host that stands still or lags, its parent and the
parent's other children are asked to report often for a while (monitor/probing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from p2pdist.model.address import by_name
from p2pdist.model.errors import NotFound, P2PDistError
from p2pdist.model.messages import Complaint, Reason, Reject
from tracker.core.events import Command, OriginSeen, Send
from tracker.core.history.history import History
from tracker.core.host import Host
from tracker.core.member import FROM_ORIGIN, STARVED_BY, Member
from tracker.core.membership import Membership
from tracker.core.monitor.probing import PROBE_INTERVAL_S, Probing, ask_reports
from tracker.core.planning.schedule import Schedule
from tracker.core.repair.claims import Claims
from tracker.core.repair.lease_turnover import LeaseTurnover
from tracker.core.repair.origin_failures import origin_failed, origin_seen
from tracker.core.repair.remedies import (
    AVOID_S,
    GIVING_COMPLAINTS,
    STUCK_COMPLAINTS,
    at_fault,
    avoid_s,
    free_blocked,
    in_flight,
    move_lease,
    pass_on_lease,
)
from tracker.core.repair.reputation import Reputation
from tracker.core.repair.starvation import StarvedHosts, was_named
from tracker.core.repair.unheard_complaints import Unheard
from tracker.core.swarm import Swarm
from tracker.core.vouching.vouching import Vouching

NAMELESS_S = 15.0
"""So long a host without answering name servers is given no other that is known by name."""


@dataclass(slots=True)
class Complaints:
    """Handles complaints with the parts of the fleet that it shares."""

    membership: Membership
    """Takes dead hosts out of swarms; holds the fleet's hosts and swarms."""
    reputation: Reputation
    """Hears which hosts failed others."""
    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    probing: Probing
    """Says which hosts are asked to report often."""
    claims: Claims
    """Doubts hosts that give nothing of what they claim."""
    turnover: LeaseTurnover
    """Says how long a first piece takes; finds leases for starved hosts."""
    vouching: Vouching
    """Withdraws complaints of wrong bytes where the list turns out wrong."""
    history: History
    """Hears which hosts sent wrong bytes."""
    unheard: Unheard
    """Keeps complaints of hosts that have yet to speak."""
    origin_sites: frozenset[str] = frozenset()
    """The sites whose hosts may read the origin; none: all."""
    _starved: StarvedHosts = field(init=False)
    """What becomes of hosts that get nothing."""

    def __post_init__(self) -> None:
        hosts, swarms = self.membership.hosts, self.membership.swarms
        self._starved = StarvedHosts(hosts, swarms, self.schedule, self.turnover)

    def look(self, *, late: bool, interval_s: float, now: float) -> None:
        """Judge the complaints that waited for a parent to speak, and what starved hosts said,
        where time has shown it meanwhile, and move idle leases on. Called often and regularly;
        `late`: the whole fleet is late with its reports, which come every `interval_s`."""
        for swarm, child, complaint in self.unheard.due(now=now):
            if not late:
                self._of_peer(swarm, child, complaint, now)
        self._starved.look(late=late, now=now)
        self.turnover.look(interval_s=interval_s, now=now)

    def handle(
        self, host: Host, complaint: Complaint, *, late: Callable[[float], bool], probes: bool, now: float
    ) -> list[Command]:
        """A host complains. `late` says whether the whole fleet is late with its reports; `probes`:
        the fleet reports so seldom that probing pays. Complaints that cannot be true are
        ignored."""
        out: list[Command] = []
        swarm = self.membership.swarms.get(host.key(complaint.blob))
        if swarm is None or host.name not in swarm.members or not 0 <= complaint.stripe < swarm.stripes:
            return out
        source, reason = complaint.source, complaint.reason
        if source != FROM_ORIGIN and (source == host.name or source not in swarm.members):
            return out
        if not complaint.waits:
            swarm.record(
                now, f"{host.name} complains of {source or 'the origin'} in stripe {complaint.stripe}: {reason}"
            )
        if reason in {"stalled", "slow"} and late(now):
            return out  # all stand still at once: no host is at fault
        if _avoids(swarm, host.name, complaint):
            return out
        if source == FROM_ORIGIN:
            self._of_origin(swarm, swarm.members[host.name], complaint, now, out)
            return out
        if complaint.starved:
            child, parent = swarm.members[host.name], swarm.members[source]
            self._starved.says_so(swarm, child, parent, complaint.stripe, waits=complaint.waits, now=now)
            return out
        if reason in {"stalled", "slow"} and probes:
            sisters, where = swarm.members[source].children[complaint.stripe], (swarm.key, complaint.stripe)
            self.probing.complained(host.name, source, sisters, where, now=now)
            out += ask_reports(self.membership.hosts, self.probing.begin(now=now), PROBE_INTERVAL_S)
        if reason != "slow":
            self._of_peer(swarm, swarm.members[host.name], complaint, now)
        return out

    def _of_peer(self, swarm: Swarm, child: Member, complaint: Complaint, now: float) -> None:
        """A peer gives nothing, or what cannot be used: part it from the child, and give the child
        another parent."""
        stripe, source, reason = complaint.stripe, complaint.source, complaint.reason
        edges = swarm.edges
        if complaint.nameless:
            self._nameless(swarm, child, now)
            if child.parents[stripe] == source:
                edges.detach(stripe, child.host)
            return
        if reason == "stalled" and swarm.layout.large and child.parents[stripe] == source:
            rate_bytes_s = self.reputation.capacities.typical()
            if in_flight(swarm, child, stripe, rate_bytes_s, now=now):
                return
        if reason == "stalled" and self.unheard.keep(swarm, child, complaint, now=now):
            return
        child.complain(stripe)
        if was_named(child, source):
            if reason in {"stalled", "short"}:
                self.claims.complained(swarm, child, stripe, source, now=now)
            self._starved.gives_nothing(swarm, child, swarm.members[source], complaint, now)
        if reason == "stalled" and child.parents[stripe] == source and not at_fault(swarm, child, stripe):
            edges.leave(stripe, child.host, now=now)
            if free_blocked(swarm, stripe, child.host, now=now) or pass_on_lease(swarm, stripe, child.host, now=now):
                self.schedule.ask(swarm.key, "stuck", now)
            return
        if reason == "stalled" and child.parents[stripe] == source:
            self.reputation.testimony.stalled(swarm, child, stripe, self.membership.hosts, now=now)
        parent, gives = self.membership.hosts.get(source), self._starved.gives(source, now)
        if reason == "stalled" and child.complaints[stripe] < (GIVING_COMPLAINTS if gives else STUCK_COMPLAINTS):
            edges.part(child.host, source, now + AVOID_S)
        else:  # not its own rate, then
            edges.forget_parted(child.host)
        edges.avoid(child.host, source, now + avoid_s(child, stripe, reason))
        if child.parents[stripe] == source:
            edges.detach(stripe, child.host)
            if reason in {"stalled", "corrupt"} or _shows_nothing(swarm, source, stripe):
                move_lease(swarm, stripe, source, now=now, at_once=False)
        if parent is not None and reason in {"refused", "reset", "short", "corrupt", "protocol"}:
            if parent.session is None and source in swarm.members:
                self.membership.leave(parent, swarm, "dead", now=now)
            elif was_named(child, source) and (reason != "reset" or not self.reputation.excused(swarm, now=now)):
                self._penalise(swarm, self.membership.hosts[child.host], parent, reason, now)
        if child.complaints[stripe] >= STARVED_BY and child.parents[stripe] is None:
            self._starved.forsaken(swarm, child, stripe, now)
        self.schedule.ask(swarm.key, reason, now)

    def _penalise(self, swarm: Swarm, child: Host, parent: Host, reason: Reason, now: float) -> None:
        """A host complains of another one. Any process can say so at once of every host, and have
        the fleet's best seeds banned, unless its word counts by what it has done."""
        if reason != "corrupt" and _cut_off(swarm, swarm.members[child.name]):
            return
        if vote := child.vote(parent):
            self.reputation.penalise(parent, vote, reason, now=now)
        if reason == "corrupt":
            if vote:
                self.vouching.accused(swarm, parent.name, vote)
            self.history.sent_wrong_bytes(parent, child, swarm, now=now)

    def _nameless(self, swarm: Swarm, child: Member, now: float) -> None:
        """A host cannot look names up: for a while it is given no parent that is known by name, and
        none of these is at fault. What it receives from some of them goes on."""
        for name in swarm.members:
            if name != child.host and by_name(self.membership.hosts[name].address):
                swarm.edges.avoid(child.host, name, now + NAMELESS_S)
        self.schedule.ask(swarm.key, "nameless", now)

    def _of_origin(self, swarm: Swarm, member: Member, complaint: Complaint, now: float, out: list[Command]) -> None:
        """A reader cannot read the origin: another host may, or the swarm ends for all."""
        stripe, reason = complaint.stripe, complaint.reason
        if member.host not in swarm.edges.roots[stripe]:
            if reason != "unavailable" and member.host in swarm.readers():
                swarm.origin.fail_sharing()
                self.schedule.ask(swarm.key, reason, now)
            return  # only the holder of the lease reads there
        member.complain(stripe)
        if reason == "stalled" and member.complaints[stripe] < STUCK_COMPLAINTS:
            return  # a reader waits for its children, too, when they are slow to take what it has read
        witness, seeing = self._witness(swarm, member), not self.vouching.keeps(swarm)
        readers = [each.host for each in swarm.members.values() if self._may_read(swarm, each)]
        moved, error, looks = origin_failed(
            swarm, member.host, complaint, witness=witness, seeing=seeing, readers=readers, now=now
        )
        out += looks
        if moved:
            self.schedule.ask(swarm.key, reason, now)
        if error is not None:
            self._end(swarm, error, out)

    def seen(self, event: OriginSeen, *, now: float) -> list[Command]:
        """The tracker has looked at the origin, for the hosts that could not read it."""
        out: list[Command] = []
        if (swarm := self.membership.swarms.get(event.swarm)) is not None:
            if (error := origin_seen(swarm, event, now=now)) is not None:
                self._end(swarm, error, out)
            self.schedule.ask(swarm.key, "looked", now)
        return out

    def _end(self, swarm: Swarm, error: P2PDistError, out: list[Command]) -> None:
        """Tell all receivers of a swarm why it cannot go on."""
        if isinstance(error, NotFound) and self.vouching.keeps(swarm):
            error = NotFound(
                f"upstream does not have {swarm.blob}",
                remedy="Look whether the image is still there, and pull it again",
            )
        for receiver in swarm.members.values():
            session = self.membership.hosts[receiver.host].session
            if session is not None and not receiver.seed:
                out.append(Send(session, Reject(error.problem(), swarm.blob)))

    def _may_read(self, swarm: Swarm, member: Member) -> bool:
        """Whether a receiver may be granted a lease at some time."""
        reads = not self.origin_sites or member.site in self.origin_sites
        return reads and not member.seed and member.host not in swarm.origin.barred

    def _witness(self, swarm: Swarm, member: Member) -> str:
        """In whose name a host says that content is wrong or missing at the origin: all hosts at
        one address are one witness, where hosts at several addresses want the blob. Else two
        strangers on one machine could end it for all."""
        hosts = self.membership.hosts
        voters = {hosts[each.host].voter or each.host: None for each in swarm.members.values() if not each.seed}
        return hosts[member.host].voter or member.host if len(voters) > 1 else member.host


def _cut_off(swarm: Swarm, child: Member) -> bool:
    """Whether a host that has pieces complained in every stripe that it lacks, more than once in
    all, and no piece came since: rather than that all its parents fail it, its own link is cut, or
    that of its rack or site."""
    lacking = [count for stripe, count in enumerate(child.complaints) if child.counts[stripe] < swarm.totals[stripe]]
    return any(child.counts) and all(lacking) and sum(lacking) > 1


def _shows_nothing(swarm: Swarm, host: str, stripe: int) -> bool:
    """Whether a host has not a single piece of a stripe: as a root that fails its child, it is not
    worth waiting for."""
    return not swarm.members[host].counts[stripe]


def _avoids(swarm: Swarm, child: str, complaint: Complaint) -> bool:
    """Whether a host that has another parent complains again of a source that it is not given any
    more: that says nothing new, and planning again each time would be work for nothing."""
    parent, source = swarm.members[child].parents[complaint.stripe], complaint.source
    return parent is not None and source not in {FROM_ORIGIN, parent} and (child, source) in swarm.edges.avoided
