"""The tracker's core: hosts, their sessions, and the swarms that they form.

Theory. Agents say what they hold and want (`Holding`), how far they are (`Report`) and who failed
them (`Complaint`); the core answers with plans (`Assign`). Everything about swarms is soft: after a
restart agents say what they hold and from whom they receive, and their running streams are adopted
as the tree. A host that someone receives from but that has not come back yet stands in as absent.

A host whose session breaks, or that falls silent while others wait for it, is absent in its swarms
(presence.py): it gets no new parents and no new children, and what it does not confirm in time is
taken from it.

Invariants: the number of origin leases never passes `origin_streams_max`, and each stripe of a blob
has at most one, beside those that agents brought along; for GRACE_S after the start a swarm that
was under way gets no new lease, since its roots may still come back.

Joins of the same moment are planned together (schedule.py); lost and failing parents are replaced
at once; those for whom there was no parent are looked at again every RETRY_S.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Complaint,
    FromAgent,
    Hello,
    Holding,
    Holdings,
    Leaving,
    Left,
    Pace,
    Reject,
    Report,
    Welcome,
)
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import by_name
from p2pdist.model.url import redacted
from tracker.core.capacity import Capacities
from tracker.core.events import Command, Described, Drop, Event, Received, Send, SessionClosed, SessionOpened, Tick
from tracker.core.host import Host
from tracker.core.monitor.lateness import Lateness
from tracker.core.monitor.presence import GRACE_S, Presence
from tracker.core.monitor.probing import PROBE_INTERVAL_S, SELDOM_S, Probing
from tracker.core.monitor.progress import (
    FAIR_REPORTS,
    gets_fair_share,
    limited,
    note_rates,
    silent_parents,
    slow_edges,
    slow_host,
)
from tracker.core.origin.leases import Leases, origin_limits
from tracker.core.origin.superpeers import share_origin
from tracker.core.planning.assignments import assignments
from tracker.core.planning.planner import Planner
from tracker.core.planning.schedule import JOIN_BATCH_S, Schedule
from tracker.core.planning.slow_receivers import relocate
from tracker.core.policy.book import PolicyBook
from tracker.core.rebalance.overload import PAUSE_S, spread_overload
from tracker.core.rebalance.tail import Tail
from tracker.core.repair.repair import (
    AVOID_S,
    GIVES_S,
    GIVING_COMPLAINTS,
    STUCK_COMPLAINTS,
    at_fault,
    avoid_s,
    free_blocked,
    move_lease,
    origin_failed,
    reattach,
    spare_origin,
)
from tracker.core.repair.reputation import Reputation
from tracker.core.report_rate import SHORTEST_S
from tracker.core.swarm import FROM_ORIGIN, Member, Swarm, key_of, layout_of

RETRY_S = 0.5
PARTED_S = 30.0
"""For so long two hosts are not parted again because little comes from the one to the other."""
NAMELESS_S = 15.0
"""So long a host whose name servers do not answer is given no other that is known by name."""

HOSTS_MAX = 200_000
SWARMS_MAX = 100_000


@dataclass(slots=True)
class Fleet:
    """See the module's text. `origin` is the URL of central storage as every agent is told it,
    without what may be secret in it. `origin_streams_max` is the cap on leases over all swarms,
    `origin_bytes_s` (0 for none) on what all read. Hosts that were just told to report more often
    may still do it as seldom as every `patience_s`."""

    started_at: float
    origin: str = ""
    origin_streams_max: int = 64
    origin_bytes_s: float = 0.0
    report_interval_s: float = SHORTEST_S
    patience_s: float = 0.0
    hosts: dict[str, Host] = field(default_factory=dict)
    swarms: dict[Digest, Swarm] = field(default_factory=dict)
    capacities: Capacities = field(default_factory=Capacities)
    policies: PolicyBook = field(default_factory=PolicyBook)
    _sessions: dict[int, str] = field(default_factory=dict)
    _layouts: dict[Digest, PieceLayout] = field(default_factory=dict)
    """How blobs are cut, as manifests say."""
    schedule: Schedule = field(default_factory=Schedule)
    reputation: Reputation = field(init=False)
    _presence: Presence = field(init=False)
    _tail: Tail = field(default_factory=Tail)
    _lateness: Lateness = field(default_factory=Lateness)
    probing: Probing = field(default_factory=Probing)
    _planner: Planner = field(default_factory=Planner)

    def __post_init__(self) -> None:
        self.origin = redacted(self.origin)
        self._presence = Presence(self.hosts, self.swarms, self.started_at)
        self.reputation = Reputation(self.hosts, self.swarms, self.schedule, self.capacities)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        out: list[Command] = []
        match event:
            case Received(session, message):
                self._received(session, message, now, out)
            case SessionOpened(session, hello):
                self._opened(session, hello, now, out)
            case SessionClosed(session):
                self._closed(session, now)
            case Tick():
                self._tick(now, out)
            case Described(layouts):
                for blob, layout in layouts:
                    self._describe(blob, layout, now)
        self._plan_due(now, out)  # Due asks for nothing else
        return out

    @property
    def lost(self) -> dict[str, Host]:
        """Hosts that ended without a word in the last hour, by name; for people, and nothing is
        planned with them."""
        return self._presence.gone

    def leases(self) -> int:
        """Origin leases that are out."""
        return sum(swarm.leases() for swarm in self.swarms.values())

    # -- sessions

    def _opened(self, session: int, hello: Hello, now: float, out: list[Command]) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            error = UsageError(
                f"{hello.host} speaks protocol {hello.protocol}, this tracker {PROTOCOL_VERSION}",
                remedy="Run the same version of p2pdist everywhere",
            )
            out += [Send(session, Reject(error.problem())), Drop(session)]
            return
        if hello.host not in self.hosts and len(self.hosts) >= HOSTS_MAX:
            out += [Send(session, Reject(UsageError("this tracker has too many hosts").problem())), Drop(session)]
            return
        host = self.hosts.setdefault(hello.host, Host(hello.host))
        self.lost.pop(hello.host, None)
        if host.session is not None:
            self._sessions.pop(host.session, None)
            out.append(Drop(host.session))
        host.expire_penalties(now=now, started_anew=True)
        host.address, host.zone, host.rack, host.bt_port = hello.address, hello.zone, hello.rack, hello.bt_port
        host.tls, host.instance = hello.tls, hello.instance
        host.session, host.absent_since, host.origin_limit_bytes_s, host.leaving = session, None, 0.0, False
        host.download_bytes_s = hello.download_bytes_s
        self.capacities.declare(host.name, hello.upload_bytes_s)
        self._sessions[session] = hello.host
        if host.swarms:
            self._presence.lost(host, now)
        out.append(Send(session, Welcome(PROTOCOL_VERSION, self.report_interval_s, self.origin)))

    def _closed(self, session: int, now: float) -> None:
        name = self._sessions.pop(session, None)
        if name is None:
            return
        host = self.hosts[name]
        host.session, host.absent_since = None, now
        self._presence.lost(host, now)

    def _received(self, session: int, message: FromAgent, now: float, out: list[Command]) -> None:
        name = self._sessions.get(session)
        if name is None:
            return
        about: Digest | None = None
        try:
            match message:
                case Report():
                    self._report(name, message, now)
                case Holding() if not self.hosts[name].leaving:
                    self._hold(self.hosts[name], message, now)
                case Holdings(blobs):
                    for holding in blobs:
                        # Each for itself: one that cannot be true must not keep the others from
                        # being known.
                        self._received(session, holding, now, out)
                case Complaint():
                    self._complaint(name, message, now, out)
                case Left(blob):
                    if (key := self.hosts[name].key(blob)) in self.hosts[name].swarms:
                        self.reputation.leave(self.hosts[name], self.swarms[key], "left", now=now)
                case Leaving():
                    self.reputation.depart(self.hosts[name], now=now)
                case Hello():
                    raise UsageError("a session says hello once")
        except P2PDistError as error:
            if isinstance(message, Holding | Complaint):
                about = message.blob
            out.append(Send(session, Reject(error.problem(), about)))

    # -- swarms

    def _hold(self, host: Host, holding: Holding, now: float) -> None:
        self.policies.admit(host.zone, holding)
        swarm = self._swarm(holding)
        counts = list(holding.counts)
        swarm.check_counts(counts)
        if host.name in holding.parents:
            raise UsageError(f"{host.name} says that it receives from itself")
        other = host.key(holding.blob)
        if other != swarm.key and other in host.swarms:
            self.reputation.leave(host, self.swarms[other], "it says that the blob is cut differently", now=now)
        self.swarms[swarm.key] = swarm
        member = swarm.members.get(host.name)
        if member is None:
            member = self.reputation.join(host, swarm, counts, now=now)
            swarm.under_way = swarm.under_way or any(counts)
            swarm.record(now, f"{host.name} joins with {sum(counts)} pieces")
        else:
            swarm.set_location(host.name, host.zone, host.rack)
            self._recount(swarm, member, counts, now)
            member.slots = max(member.slots, self.reputation.slots(host, swarm, now=now))
            if not member.present:
                swarm.notify_children(host.name)
        member.absent_since, member.silent, member.heard_at = None, False, now
        swarm.set_priority(host.name, holding.priority)
        swarm.set_transport(host.name, holding.swarm)
        self.reputation.sort(host, swarm)
        if not member.seed:
            streams = len(holding.parents) == swarm.stripes
            for stripe, parent in enumerate(holding.parents if streams else (None,) * swarm.stripes):
                reattach(swarm, member, stripe, parent, lambda name: self._add_absent(swarm, name, now))
        spare_origin(swarm, host.name)
        self.schedule.join(swarm, now)

    def _swarm(self, holding: Holding) -> Swarm:
        """The swarm of hosts that say the same of how the blob is cut. The swarm of what a manifest
        says has the blob's digest as its key; without a manifest, the swarm of what was said
        first."""
        layout, blob = layout_of(holding), holding.blob
        first, other = self.swarms.get(blob), key_of(blob, layout)
        if first is not None and first.layout == layout:
            return first
        if other in self.swarms:
            return self.swarms[other]
        if len(self.swarms) >= SWARMS_MAX:
            raise UsageError("this tracker has too many swarms")
        main = first is None and self._layouts.get(blob, layout) == layout
        return Swarm(blob, layout, key=blob if main else other)

    def _describe(self, blob: Digest, layout: PieceLayout, now: float) -> None:
        """A manifest says how a blob is cut. The first one counts."""
        if blob in self._layouts:
            return
        while len(self._layouts) >= SWARMS_MAX:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[blob] = layout
        claimed = self.swarms.get(blob)
        if claimed is not None and claimed.layout != layout:
            self.reputation.rename(claimed, key_of(blob, claimed.layout), now=now)
        if (right := self.swarms.get(key_of(blob, layout))) is not None:
            self.reputation.rename(right, blob, now=now)

    def _recount(self, swarm: Swarm, member: Member, counts: list[int], now: float) -> None:
        if any(new < old for new, old in zip(counts, member.counts, strict=True)):
            swarm.forget_pieces(member.host, counts)
            self.reputation.sort(self.hosts[member.host], swarm)
            self.schedule.ask(swarm.key, "lost pieces", now + JOIN_BATCH_S)
            return
        note_rates(swarm, member, counts, now=now)
        whole = sum(member.counts[stripe] == total for stripe, total in enumerate(swarm.totals))
        complete = swarm.advance(member.host, counts, now=now)
        if sum(member.counts[stripe] == total for stripe, total in enumerate(swarm.totals)) > whole:
            self._tail.note(swarm.key)
        self.reputation.sort(self.hosts[member.host], swarm)
        if spare_origin(swarm, member.host):
            self.schedule.ask(swarm.key, "whole copy", now)
        if complete:
            swarm.record(now, f"{member.host} is complete")
            self.schedule.ask(swarm.key, "complete", now + JOIN_BATCH_S)

    def _add_absent(self, swarm: Swarm, name: str, now: float) -> bool:
        """Take a host into a swarm because another receives from it; it is absent until it speaks
        for itself."""
        host = self.hosts.get(name)
        if host is None:
            if len(self.hosts) >= HOSTS_MAX:
                return False
            host = self.hosts[name] = Host(name, absent_since=now)
        if host.leaving or host.key(swarm.blob) in host.swarms:  # in a swarm of the blob it speaks for itself
            return False
        self.reputation.join(host, swarm, [0] * swarm.stripes, now=now)
        self._presence.assumed(host, swarm, now)
        return True

    def _report(self, name: str, report: Report, now: float) -> None:
        host = self.hosts[name]
        for blob in self._presence.heard(host):
            self.schedule.ask(blob, "back", now)
        advanced = {host.key(advance.blob): list(advance.counts) for advance in report.blobs}
        for blob, counts in advanced.items():
            swarm = self.swarms.get(blob)
            if swarm is not None and name in swarm.members:
                swarm.check_counts(counts)
                self._recount(swarm, swarm.members[name], counts, now)
        self.capacities.sample(name, report.sent_bytes, report.busy_s)
        if report.sent_bytes:
            host.sent_at = now
        self._lateness.reported(host, interval_s=self._interval_s, now=now)
        late = self._late(now)
        for blob in host.receiving:
            self._watch(self.swarms[blob], name, now, still=blob not in advanced, late=late)

    @property
    def _interval_s(self) -> float:
        """How long hosts may take between two reports."""
        return max(self.report_interval_s, self.patience_s)

    def _late(self, now: float) -> bool:
        """Whether the fleet as a whole is late with its reports, so that nobody can be judged."""
        return self._lateness.late(interval_s=self._interval_s, now=now)

    def _watch(self, swarm: Swarm, name: str, now: float, *, still: bool, late: bool) -> None:
        """Look whether somebody holds up the host that has just reported, unless the fleet is
        `late`; `still`: nothing came; agents leave out what did not change."""
        member = swarm.members[name]
        if still:
            note_rates(swarm, member, member.counts, now=now)
        member.heard_at = now
        if name in swarm.swarming:
            return  # a swarm finds its own way around those who are slow
        if late:
            member.lags = [None] * swarm.stripes
            return
        for parent in silent_parents(swarm, member, self.probing.asked_at, interval_s=self._interval_s, now=now):
            self._presence.silent(self.hosts[parent], now)
            for blob in self.hosts[parent].swarms:
                self.schedule.ask(blob, "silent", now)
        if self.policies.paced(swarm.blob):
            return  # who keeps to a policy's rate is not slow
        member.fair_reports = member.fair_reports + 1 if member.slow_receiver and gets_fair_share(swarm, member) else 0
        if member.fair_reports >= FAIR_REPORTS:
            self.reputation.clear_slow_receiver(self.hosts[name], now=now)
        found = limited(swarm, member, self.hosts[name].download_bytes_s) or slow_host(swarm, member, now=now)
        if found is not None and self.reputation.excused(swarm, now=now):
            found = None
        if found is not None and self.capacities.mark_slow(found[0], found[1], downlink=found[2], now=now):
            self.reputation.relieve(self.hosts[found[0]], "lags" if found[2] else "children lag", now=now)
            self.probing.judged(found[0], now=now)
        else:
            self._part(swarm, member, now)

    def _part(self, swarm: Swarm, member: Member, now: float) -> None:
        """Take a host away from parents from whom it gets too little, though neither of the two is
        slow, or where it is in the way."""
        if relocate(swarm, member, now=now):
            self.schedule.ask(swarm.key, "in the way", now)
        for stripe in slow_edges(swarm, member, now=now) if not member.slow_receiver else ():
            parent = member.parents[stripe] or ""
            if (member.host, parent) in swarm.parted:
                continue  # it got no other parent, or no more from another
            swarm.parted[member.host, parent] = now + PARTED_S
            swarm.record(now, f"{member.host} gets too little of stripe {stripe} from {parent}")
            swarm.avoided[member.host, parent] = now + AVOID_S
            swarm.detach(stripe, member.host)
            self.schedule.ask(swarm.key, "slow edge", now)

    def _complaint(self, name: str, complaint: Complaint, now: float, out: list[Command]) -> None:
        swarm = self.swarms.get(self.hosts[name].key(complaint.blob))
        if swarm is None or name not in swarm.members or not 0 <= complaint.stripe < swarm.stripes:
            return
        source, reason = complaint.source, complaint.reason
        if source != FROM_ORIGIN and (source == name or source not in swarm.members):
            return
        swarm.record(now, f"{name} complains of {source or 'the origin'} in stripe {complaint.stripe}: {reason}")
        if reason in {"stalled", "slow"} and self._late(now):
            return  # all stand still at once: it is nobody's fault
        if source == FROM_ORIGIN:
            self._origin_complaint(swarm, name, complaint.stripe, reason, now, out)
            return
        child, stripe = swarm.members[name], complaint.stripe
        if reason in {"stalled", "slow"} and self.report_interval_s > SELDOM_S:
            sisters, where = swarm.members[source].children[stripe], (swarm.key, stripe)
            self.probing.complained(name, source, sisters, where, now=now)
            self._set_report_rate(self.probing.begin(now=now), PROBE_INTERVAL_S, out)
        if reason == "slow":
            return
        if complaint.nameless:
            self._nameless(swarm, child, now)
            if child.parents[stripe] == source:
                swarm.detach(stripe, name)
            return
        child.complaints[stripe] += 1
        if reason == "stalled" and child.parents[stripe] == source and not at_fault(swarm, child, stripe):
            if free_blocked(swarm, stripe, name, now=now):
                self.schedule.ask(swarm.key, "stuck", now)
            return
        gives = source in self.hosts and now - self.hosts[source].sent_at < GIVES_S
        if reason == "stalled" and child.complaints[stripe] < (GIVING_COMPLAINTS if gives else STUCK_COMPLAINTS):
            swarm.parted[name, source] = now + AVOID_S
        else:  # not its own pace, then: whoever else gave it little may be just as far away
            swarm.parted = {pair: until for pair, until in swarm.parted.items() if pair[0] != name}
        swarm.avoided[name, source] = now + avoid_s(child, stripe, reason)
        if child.parents[stripe] == source:
            swarm.detach(stripe, name)
            if reason in {"stalled", "corrupt"}:
                move_lease(swarm, stripe, source, now=now, at_once=False)
        host = self.hosts.get(source)
        if host is not None and reason in {"refused", "reset", "short", "corrupt", "protocol"}:
            if host.session is None and source in swarm.members:
                self.reputation.leave(host, swarm, "dead", now=now)
            elif reason != "reset" or not self.reputation.excused(swarm, now=now):
                self.reputation.penalise(host, name, reason, now=now)
        self.schedule.ask(swarm.key, reason, now)

    def _nameless(self, swarm: Swarm, child: Member, now: float) -> None:
        """A host cannot look names up: for a while it is given no host that is known by name, and
        none of them is at fault. What it receives from some of them goes on."""
        named = [name for name in swarm.members if by_name(self.hosts[name].address)]
        swarm.avoided.update({(child.host, name): now + NAMELESS_S for name in named if name != child.host})
        self.schedule.ask(swarm.key, "nameless", now)

    def _set_report_rate(self, names: Iterable[str], interval_s: float, out: list[Command]) -> None:
        """Ask hosts to report at this interval."""
        sessions = (self.hosts[name].session for name in names if name in self.hosts)
        out += [Send(session, Pace(interval_s)) for session in sessions if session is not None]

    def _origin_complaint(
        self, swarm: Swarm, name: str, stripe: int, reason: str, now: float, out: list[Command]
    ) -> None:
        """The holder of a lease cannot read the origin: somebody else may, or the swarm ends."""
        if name not in swarm.roots[stripe]:
            if reason != "unavailable" and name in swarm.readers():
                swarm.sharing_failed = True
                self.schedule.ask(swarm.key, reason, now)
            return  # only the holder of the lease reads there
        member = swarm.members[name]
        member.complaints[stripe] += 1
        if reason == "stalled" and member.complaints[stripe] < STUCK_COMPLAINTS:
            return  # a reader waits for its children, too, when they are slow to take what it has read
        moved, error = origin_failed(swarm, stripe, name, reason, now=now)
        if moved:
            self.schedule.ask(swarm.key, reason, now)
        if error is None:
            return
        for member in swarm.members.values():
            session = self.hosts[member.host].session
            if session is not None and not member.seed:
                out.append(Send(session, Reject(error.problem(), swarm.blob)))

    # -- time

    def _tick(self, now: float, out: list[Command]) -> None:
        self._lateness.count(self.hosts, interval_s=self._interval_s, now=now)
        self.reputation.expire(now=now)
        self._presence.expire(now)
        for host, blob in self._presence.overdue(now):
            self.reputation.leave(host, self.swarms[blob], "absent", now=now)
            if host.session is not None:
                # It is taken for gone and is not: in a new session it says again what it holds.
                out.append(Drop(host.session))
        for swarm in self.swarms.values():
            if swarm.avoided:
                swarm.avoided = {pair: until for pair, until in swarm.avoided.items() if until > now}
            if swarm.parted:
                swarm.parted = {pair: until for pair, until in swarm.parted.items() if until > now}
            if swarm.unplanned:
                self.schedule.retry(swarm.key, now + RETRY_S)
            if swarm.strained and now - swarm.spread_at >= PAUSE_S:
                swarm.now = now
                self.reputation.retry(swarm, now=now)
                if spread_overload(swarm, now=now):
                    self.schedule.ask(swarm.key, "balance", now)
        for blob in self._tail.catch_up(self.swarms, now=now):
            self.schedule.ask(blob, "late", now)
        self._set_report_rate(self.probing.ended(now), self.report_interval_s, out)
        self._set_report_rate(self.probing.begin(now=now), PROBE_INTERVAL_S, out)

    def _plan_due(self, now: float, out: list[Command]) -> None:
        due = self.schedule.take(self.swarms, now)
        leases = Leases(self.swarms.values() if due else (), self.origin_streams_max, self.policies)
        for swarm in due:
            swarm.now = now
            before = swarm.leases()
            self.reputation.set_fanout(swarm, now=now)
            may_be_out = now - self.started_at < GRACE_S and swarm.under_way
            self._planner.plan(swarm, leases=0 if may_be_out else leases.free(swarm))
            share_origin(swarm, leases.room(swarm, before))
            leases.granted(swarm, swarm.leases() - before)
            if swarm.leases() > before and self.report_interval_s > SELDOM_S:  # a slow root holds everybody up
                self._set_report_rate(self.probing.probe(chain(*swarm.roots), now=now), PROBE_INTERVAL_S, out)
            out += assignments(swarm, self.hosts)
        if due:
            out += origin_limits(self.swarms.values(), self.hosts, self.origin_bytes_s)
