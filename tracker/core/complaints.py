"""Complaints: what the tracker does when a host says that a source failed it.

Theory. A complaint names a source, a stripe and a reason. Where the source is a peer, the edge to
it is taken apart and the pair is avoided for a while, so that the planner finds another parent. A
peer that refuses or sends wrong bytes loses reputation, if the tracker had named it to the host
that complains: each address has one vote, and hosts that get good pieces outweigh it. Where the
source is the origin, the lease moves to another host, or the swarm ends. While all hosts are late
(monitor/lateness.py), complaints of standing still are ignored: no parent is at fault.

In a large fleet hosts report seldom. So a host that stands still or lags, its parent and the
parent's other children are asked to report often for a while (monitor/probing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2pdist.model.address import by_name
from p2pdist.model.errors import NotFound
from p2pdist.model.messages import Complaint, Reject
from tracker.core.events import Command, Send
from tracker.core.history.history import History
from tracker.core.host import Host
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.membership import Membership
from tracker.core.monitor.probing import PROBE_INTERVAL_S, Probing, ask_reports
from tracker.core.planning.rescue import below_rescue, lacks, may_be_rescued, rescuer
from tracker.core.planning.schedule import Schedule
from tracker.core.repair.claims import Claims
from tracker.core.repair.remedies import (
    AVOID_S,
    GIVES_S,
    GIVING_COMPLAINTS,
    SLOW_RECEIVER_COMPLAINTS,
    STUCK_COMPLAINTS,
    at_fault,
    avoid_s,
    free_blocked,
    move_lease,
    origin_failed,
    pass_on_lease,
    under_way,
)
from tracker.core.repair.reputation import Reputation
from tracker.core.swarm import Swarm
from tracker.core.vouching.vouching import Vouching

NAMELESS_S = 15.0
"""So long a host without answering name servers is given no other that is known by name."""

UNHEARD_S = 1.5
"""So long after the tracker's start agents that live have mostly opened a session again."""


@dataclass(frozen=True, slots=True)
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
    vouching: Vouching
    """Withdraws complaints of wrong bytes where the list turns out wrong."""
    history: History
    """Hears which hosts sent wrong bytes."""

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
        if source == FROM_ORIGIN:
            self._of_origin(swarm, swarm.members[host.name], complaint, now, out)
            return out
        if complaint.starved:
            if not complaint.waits or swarm.members[host.name].promised >> complaint.stripe & 1:
                self._starving(swarm, swarm.members[host.name], swarm.members[source], complaint.stripe, now)
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
            if under_way(swarm, child, stripe, rate_bytes_s, now=now):
                return
        if reason == "stalled" and self._unheard(swarm.members[source], now):
            return
        child.complain(stripe)
        if was_told(child, source):
            if reason in {"stalled", "short"}:
                self.claims.complained(swarm, child, stripe, source, now=now)
            self._starves(swarm, child, swarm.members[source], complaint, now)
        if reason == "stalled" and child.parents[stripe] == source and not at_fault(swarm, child, stripe):
            if free_blocked(swarm, stripe, child.host, now=now) or pass_on_lease(swarm, stripe, child.host, now=now):
                self.schedule.ask(swarm.key, "stuck", now)
            return
        if reason == "stalled" and child.parents[stripe] == source:
            self.reputation.testimony.stalled(swarm, child, stripe, self.membership.hosts, now=now)
        parent, gives = self.membership.hosts.get(source), self._gives(source, now)
        if reason == "stalled" and child.complaints[stripe] < (GIVING_COMPLAINTS if gives else STUCK_COMPLAINTS):
            edges.part(child.host, source, now + AVOID_S)
        else:  # not its own rate, then
            edges.forget_parted(child.host)
        edges.avoid(child.host, source, now + avoid_s(child, stripe, reason))
        if child.parents[stripe] == source:
            edges.detach(stripe, child.host)
            if reason in {"stalled", "corrupt"} or self._shows_nothing(swarm, source, stripe):
                move_lease(swarm, stripe, source, now=now, at_once=False)
        if parent is not None and reason in {"refused", "reset", "short", "corrupt", "protocol"}:
            if parent.session is None and source in swarm.members:
                self.membership.leave(parent, swarm, "dead", now=now)
            elif was_told(child, source) and (reason != "reset" or not self.reputation.excused(swarm, now=now)):
                voter = self.membership.hosts[child.host].voter or child.host
                self.reputation.penalise(parent, voter, reason, now=now)
                if reason == "corrupt":
                    self.vouching.accused(swarm, source, voter)
                    self.history.sent_wrong_bytes(parent, self.membership.hosts[child.host], swarm, now=now)
        self.schedule.ask(swarm.key, reason, now)

    def _unheard(self, parent: Member, now: float) -> bool:
        """Whether a parent has not spoken for itself since the tracker started, and is still
        expected to: until then nothing tells whether it could give more."""
        return parent.hearsay and now - self.membership.presence.started_at < UNHEARD_S

    def _gives(self, source: str, now: float) -> bool:
        """Whether a host has sent something of late."""
        host = self.membership.hosts.get(source)
        return host is not None and now - host.sent_at < GIVES_S

    def _starves(self, swarm: Swarm, child: Member, parent: Member, complaint: Complaint, now: float) -> None:
        """A parent that says that it has more of a stripe than a host gives it nothing. Once the
        host is starved it leaves the parents of all such stripes for the origin, or for another
        host that was."""
        stripe, claims = complaint.stripe, parent.counts[complaint.stripe] > child.counts[complaint.stripe]
        if not child.counts[stripe]:
            starved = claims and child.starve().fail_by(stripe, parent.host)
        elif complaint.reason in {"stalled", "short"}:
            starvation = child.starve()
            starvation.stand_still(now=now)
            if claims and (not child.slow_receiver or child.complaints[stripe] >= SLOW_RECEIVER_COMPLAINTS):
                starvation.stop_by(stripe, parent.host, gives=self._gives(parent.host, now))
            starved = starvation.stopped_in(stripe, now=now)
        else:
            return
        if not starved:
            return
        swarm.starved[child.host] = None
        swarm.edges.set_now(now)
        for number in _stripes_from_peers(child):
            if lacks(swarm, number, child.host) and not below_rescue(swarm, number, child.host):
                swarm.edges.detach(number, child.host)
        self.schedule.ask(swarm.key, "starved", now)

    def _starving(self, swarm: Swarm, child: Member, parent: Member, stripe: int, now: float) -> None:
        """A host without any piece says that a parent gives nothing yet. Where that is so of all
        its parents that say that they have pieces, it leaves them where it can be rescued. It is
        too early to hold it against them. A parent that waits itself counts only where it said that
        it had pieces before it became the parent: else it may have got its first one just now."""
        claims = parent.counts[stripe] and child.parents[stripe] == parent.host and was_told(child, parent.host)
        if not claims or any(child.counts):
            return
        starvation = child.starve()
        starvation.starve(stripe, parent.host)
        claiming = [
            (number, child.parents[number] or "")
            for number in _stripes_from_peers(child)
            if swarm.members[child.parents[number] or ""].counts[number]
        ]
        if any(starvation.starved_by.get(number) != host for number, host in claiming):
            return
        for number, host in claiming:
            avoided = (child.host, host) in swarm.edges.avoided
            swarm.edges.avoid(child.host, host, now + AVOID_S)
            if rescuer(swarm, number, child.host) or may_be_rescued(swarm, number, child.host):
                swarm.starved[child.host] = None
                swarm.edges.detach(number, child.host)
                self.schedule.ask(swarm.key, "starved", now)
            elif not avoided:
                del swarm.edges.avoided[child.host, host]

    def _shows_nothing(self, swarm: Swarm, host: str, stripe: int) -> bool:
        """Whether a host has not a single piece of a stripe: as a root that fails its child, it is
        not worth waiting for."""
        return not swarm.members[host].counts[stripe]

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
        moved, error = origin_failed(swarm, stripe, member.host, reason, now=now)
        if moved:
            self.schedule.ask(swarm.key, reason, now)
        if error is None:
            return
        if isinstance(error, NotFound) and self.vouching.keeps(swarm):
            error = NotFound(
                f"upstream does not have {swarm.blob}",
                remedy="Look whether the image is still there, and pull it again",
            )
        for receiver in swarm.members.values():
            session = self.membership.hosts[receiver.host].session
            if session is not None and not receiver.seed:
                out.append(Send(session, Reject(error.problem(), swarm.blob)))


def _stripes_from_peers(member: Member) -> list[int]:
    """The stripes that a host receives from other hosts."""
    return [stripe for stripe, parent in enumerate(member.parents) if parent]


def was_told(child: Member, source: str) -> bool:
    """Whether a plan of late names a host as parent or alternate of another."""
    return any(source in names for names in child.told)
