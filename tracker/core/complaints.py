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
from dataclasses import dataclass
from math import inf

from p2pdist.model.address import by_name
from p2pdist.model.errors import NotFound, P2PDistError
from p2pdist.model.messages import Complaint, Reason, Reject
from tracker.core.events import Command, OriginSeen, Send
from tracker.core.history.history import History
from tracker.core.host import Host
from tracker.core.member import FROM_ORIGIN, STARVED_BY, Member
from tracker.core.membership import Membership
from tracker.core.monitor.probing import PROBE_INTERVAL_S, Probing, ask_reports
from tracker.core.planning.rescue import below_rescue, lacks, may_be_rescued, rescuer
from tracker.core.planning.schedule import Schedule
from tracker.core.repair.claims import Claims
from tracker.core.repair.early_words import STARVED_S, EarlyWords
from tracker.core.repair.lease_turnover import LeaseTurnover
from tracker.core.repair.origin_failures import origin_failed, origin_seen
from tracker.core.repair.remedies import (
    AVOID_S,
    DRY_SOON_S,
    GIVES_S,
    GIVING_COMPLAINTS,
    SLOW_RECEIVER_COMPLAINTS,
    STUCK_COMPLAINTS,
    at_fault,
    avoid_s,
    free_blocked,
    move_lease,
    pass_on_lease,
    source_above,
    top_of,
    under_way,
)
from tracker.core.repair.reputation import Reputation
from tracker.core.repair.unheard import Unheard
from tracker.core.swarm import Swarm
from tracker.core.vouching.vouching import Vouching

NAMELESS_S = 15.0
"""So long a host without answering name servers is given no other that is known by name."""


@dataclass(frozen=True, slots=True)
class OriginComplaints:
    """Handles complaints of the origin with the parts of the fleet that it shares: another host
    reads it, or the swarm ends for all. The tracker looks at the origin itself before it ends one
    (repair/origin_failures.py)."""

    membership: Membership
    """Holds the fleet's hosts and swarms."""
    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    vouching: Vouching
    """Says which blobs have lists of pieces that hosts vouched for."""

    def handle(self, swarm: Swarm, member: Member, complaint: Complaint, now: float, out: list[Command]) -> None:
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
        moved, error, looks = origin_failed(swarm, member.host, complaint, witness=witness, seeing=seeing, now=now)
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

    def _witness(self, swarm: Swarm, member: Member) -> str:
        """In whose name a host says that content is wrong or missing at the origin: all hosts at
        one address are one witness, where hosts at several addresses want the blob. Else two
        strangers on one machine could end it for all."""
        hosts = self.membership.hosts
        voters = {hosts[each.host].voter or each.host: None for each in swarm.members.values() if not each.seed}
        return hosts[member.host].voter or member.host if len(voters) > 1 else member.host


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
    turnover: LeaseTurnover
    """Says how long a first piece takes; finds leases for starved hosts."""
    vouching: Vouching
    """Withdraws complaints of wrong bytes where the list turns out wrong."""
    history: History
    """Hears which hosts sent wrong bytes."""
    origin: OriginComplaints
    """Handles those of the origin."""
    early: EarlyWords
    """Keeps what starved hosts said too early."""
    unheard: Unheard
    """Keeps complaints of hosts that have yet to speak."""

    def look(self, *, late: bool, now: float) -> None:
        """Judge the complaints that waited for a parent to speak, and what starved hosts said,
        where time has shown it meanwhile. Called often and regularly; `late`: the whole fleet is
        late with its reports."""
        for swarm, child, complaint in self.unheard.due(now=now):
            if not late:
                self._of_peer(swarm, child, complaint, now)
        if not late:
            for swarm, child, parent, stripe, waits in self.early.due(now=now):
                self._starving(swarm, child, parent, stripe, waits=waits, now=now)

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
            self.origin.handle(swarm, swarm.members[host.name], complaint, now, out)
            return out
        if complaint.starved:
            child, parent = swarm.members[host.name], swarm.members[source]
            self._starving(swarm, child, parent, complaint.stripe, waits=complaint.waits, now=now)
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
        if reason == "stalled" and self.unheard.keep(swarm, child, complaint, now=now):
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
            if reason in {"stalled", "corrupt"} or _shows_nothing(swarm, source, stripe):
                move_lease(swarm, stripe, source, now=now, at_once=False)
        if parent is not None and reason in {"refused", "reset", "short", "corrupt", "protocol"}:
            if parent.session is None and source in swarm.members:
                self.membership.leave(parent, swarm, "dead", now=now)
            elif was_told(child, source) and (reason != "reset" or not self.reputation.excused(swarm, now=now)):
                self._penalise(swarm, self.membership.hosts[child.host], parent, reason, now)
        if child.complaints[stripe] >= STARVED_BY and child.parents[stripe] is None:
            self._forsaken(swarm, child, stripe, now)
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

    def _starving(self, swarm: Swarm, child: Member, parent: Member, stripe: int, *, waits: bool, now: float) -> None:
        """A host without any piece says that a parent gives nothing yet. Where that is so of all
        its parents that should have given, it leaves them where it can be rescued. It is too early
        to hold it against them. A parent that waits itself counts only where it said that it had
        pieces before it became the parent, else it may have got its first one just now, or where
        that takes long. Where it may yet come to that, the word is kept until then."""
        if child.parents[stripe] != parent.host or not was_told(child, parent.host):
            return
        if now - child.attached_at[stripe] < STARVED_S:
            return
        long_at = self._long_at(parent, stripe, waits=waits)
        if now <= long_at < inf:
            self.early.keep(long_at, swarm, child, stripe, waits=waits)
        if waits and not (child.promised >> stripe & 1 or now > long_at):
            return
        if any(child.counts):
            root = top_of(swarm, stripe, child)
            if child.counts[stripe] or root.counts[stripe]:
                self._stands_still(swarm, child, parent, stripe, now)
            else:
                self._unread(swarm, child, root, stripe, now)
            return
        claiming = [
            (number, child.parents[number] or "")
            for number in _stripes_from_peers(child)
            if self._should_give(swarm.members[child.parents[number] or ""], number, waits=waits, now=now)
        ]
        if (stripe, parent.host) not in claiming:
            return
        starvation = child.starve()
        starvation.starve(stripe, parent.host)
        if all(starvation.starved_by.get(number) == host for number, host in claiming):
            self._rescue(swarm, child, [number for number, _ in claiming], now)

    def _should_give(self, parent: Member, stripe: int, *, waits: bool, now: float) -> bool:
        """Whether a parent says that it has pieces, hoards leases, or takes long."""
        hoards = self.membership.hosts[parent.host].wanted_in_vain > 1
        return bool(parent.counts[stripe]) or hoards or now > self._long_at(parent, stripe, waits=waits)

    def _long_at(self, parent: Member, stripe: int, *, waits: bool) -> float:
        """From when on a parent takes long that never gave a piece, and has none yet although
        others had theirs after so long; infinity for others. It counts for a silent one from when
        it joined, as it may open its session again and again; for one that waits, or was starved
        itself, from when it got its own parent, and the former may take longer, as agents say so at
        once. Any process may want a blob, hold its lease and do nothing."""
        if parent.counts[stripe] or self.membership.hosts[parent.host].gave:
            return inf
        if stripe in parent.rescued and not waits:
            return parent.attached_at[stripe] + self.turnover.unread_s
        return (parent.attached_at[stripe] if waits else parent.joined_at) + self.turnover.overdue_s(waits=waits)

    def _unread(self, swarm: Swarm, child: Member, root: Member, stripe: int, now: float) -> None:
        """A host that gets other stripes has nothing of this one. Where the holder of its lease has
        read nothing either, and never gave a piece, it may never: it hands the lease on."""
        if root.parents[stripe] != FROM_ORIGIN or self.membership.hosts[root.host].gave:
            return
        unread_at = root.attached_at[stripe] + self.turnover.unread_s
        if now <= unread_at:
            self.early.keep(unread_at, swarm, child, stripe, waits=False)
        elif root.site not in swarm.wan.paced:  # by a budget: its first piece may take long
            swarm.edges.set_now(now)
            self.turnover.hand_on(swarm, stripe, root, anyhow=False, now=now)

    def _stands_still(self, swarm: Swarm, child: Member, parent: Member, stripe: int, now: float) -> None:
        """The whole pull of a host that has pieces stands still, in all stripes that it says so of.
        Honest parents pause, and most often wait for their own: so the host is rescued only where
        all its stripes come from, or through, hosts that joined with more than it has, or after
        several parents in turn that had more and gave to no host. Where the holder of a stripe's
        lease has no more either, the lease is passed on."""
        starvation = child.starve()
        starvation.starve(stripe, parent.host)
        above = source_above(swarm, stripe, child.host)
        if above is None:
            if pass_on_lease(swarm, stripe, child.host, now=now, dry_s=DRY_SOON_S):
                self.schedule.ask(swarm.key, "stuck", now)
            return
        starvation.stand_still(now=now)
        if parent is above:
            starvation.stop_by(stripe, parent.host, gives=self._gives(parent.host, now))
        stripes = _stripes_from_peers(child)
        if any(starvation.starved_by.get(number) != child.parents[number] for number in stripes):
            return
        sources = [source_above(swarm, number, child.host) for number in stripes]
        joined = all(source is not None and source.claimed for source in sources)
        if joined or starvation.stopped_soon(now=now):
            self._rescue(swarm, child, stripes, now)

    def _forsaken(self, swarm: Swarm, child: Member, stripe: int, now: float) -> None:
        """A host that has complained several times since its last piece: where it leaves alone all
        that say that they have more, no complaint of its will come any more, and it is starved."""
        more = [each for each in swarm.members.values() if each.serves and each.counts[stripe] > child.counts[stripe]]
        if len(more) < STARVED_BY or any((child.host, each.host) not in swarm.edges.avoided for each in more):
            return
        swarm.edges.set_now(now)
        if rescuer(swarm, stripe, child.host) or may_be_rescued(swarm, stripe, child.host):
            swarm.starved[child.host] = None
            if child.counts[stripe]:
                child.starve().give_up(stripe)

    def _rescue(self, swarm: Swarm, child: Member, stripes: list[int], now: float) -> None:
        """Have a starved host leave its parents in these stripes, where it can be rescued."""
        swarm.edges.set_now(now)
        for stripe in stripes:
            parent = child.parents[stripe] or ""
            avoided = (child.host, parent) in swarm.edges.avoided
            swarm.edges.avoid(child.host, parent, now + AVOID_S)
            self.turnover.make_room(swarm, stripe, now=now)
            if rescuer(swarm, stripe, child.host) or may_be_rescued(swarm, stripe, child.host):
                swarm.starved[child.host] = None
                if child.counts[stripe]:
                    child.starve().give_up(stripe)
                swarm.edges.detach(stripe, child.host)
                self.schedule.ask(swarm.key, "starved", now)
            elif not avoided:
                del swarm.edges.avoided[child.host, parent]

    def _nameless(self, swarm: Swarm, child: Member, now: float) -> None:
        """A host cannot look names up: for a while it is given no parent that is known by name, and
        none of these is at fault. What it receives from some of them goes on."""
        for name in swarm.members:
            if name != child.host and by_name(self.membership.hosts[name].address):
                swarm.edges.avoid(child.host, name, now + NAMELESS_S)
        self.schedule.ask(swarm.key, "nameless", now)


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


def _stripes_from_peers(member: Member) -> list[int]:
    """The stripes that a host receives from other hosts."""
    return [stripe for stripe, parent in enumerate(member.parents) if parent]


def _avoids(swarm: Swarm, child: str, complaint: Complaint) -> bool:
    """Whether a host that has another parent complains again of a source that it is not given any
    more: that says nothing new, and planning again each time would be work for nothing."""
    parent, source = swarm.members[child].parents[complaint.stripe], complaint.source
    return parent is not None and source not in {FROM_ORIGIN, parent} and (child, source) in swarm.edges.avoided


def was_told(child: Member, source: str) -> bool:
    """Whether a plan of late names a host as parent or alternate of another."""
    return any(source in names for names in child.told)
