"""Fleet: the tracker's core, with all hosts, their sessions, and the swarms that they form.

Theory. Agents say what they hold and want (`Holding`), how far they are (`Report`) and which source
failed them (`Complaint`); the core answers with plans (`Assign`). Everything about swarms is soft:
after a restart agents say what they hold and from which hosts they receive, and the core takes
these streams for the edges of its trees. A host that others receive from and that has not
reconnected yet is a member that is absent.

A host whose session ends, or that is silent while others wait for it, is absent in its swarms
(monitor/presence.py): it gets no new parents and no new children, and what it does not confirm in
time is taken from it. Joins of the same moment are planned together (planning/schedule.py); lost
and failing parents are replaced at once; receivers for which there was no parent are looked at
again every RETRY_S.

Invariants: the number of origin leases never exceeds `origin_streams_max`, and each stripe of a
blob has at most one, beside those that agents brought along; for START_GRACE_S after the start a
swarm that was under way gets no new lease, since its roots may still reconnect.

Where several trackers share the swarms (p2pdist/model/ownership.py), this one plans the swarms that
it owns, and its plans carry the epoch.

Around it: `Handover` says which swarms are this tracker's, `Membership` adds hosts to
swarms, `Complaints` handles failed sources, `Slowness` judges hosts by their reports, `Reputation`
says how many upload slots a host has, `Planner` gives receivers their parents, `Vouching` keeps the
piece lists that hosts vouch for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from math import inf

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Complaint,
    FromAgent,
    Hello,
    Holding,
    Holdings,
    Judged,
    Leaving,
    Left,
    PullFailed,
    Reject,
    Report,
    Vouched,
)
from p2pdist.model.url import redacted
from tracker.core.capacity import Capacities
from tracker.core.complaints import Complaints
from tracker.core.counts import Counts
from tracker.core.events import (
    Command,
    Described,
    Drop,
    Due,
    Event,
    Followed,
    HostDrained,
    LeasesAllowed,
    ListFound,
    OriginSeen,
    Received,
    Send,
    SessionClosed,
    SessionOpened,
    Tick,
)
from tracker.core.history.history import History
from tracker.core.host import Host
from tracker.core.membership import HOSTS_MAX, Membership
from tracker.core.monitor.lateness import Lateness
from tracker.core.monitor.presence import Presence
from tracker.core.monitor.probing import PROBE_INTERVAL_S, SELDOM_S, Probing, ask_reports
from tracker.core.origin.superpeers import share_origin
from tracker.core.ownership.handover import Handover
from tracker.core.planning.assignments import Assignments
from tracker.core.planning.planner import Planner
from tracker.core.planning.schedule import Schedule
from tracker.core.policy.book import PolicyBook
from tracker.core.rebalance.overload import pause_s, spread_overload
from tracker.core.rebalance.tail import Tail
from tracker.core.repair.claims import Claims
from tracker.core.repair.lease_turnover import LeaseTurnover
from tracker.core.repair.lease_yields import yield_leases
from tracker.core.repair.remedies import reattach, release_leases
from tracker.core.repair.reputation import Reputation
from tracker.core.repair.slowness import Slowness
from tracker.core.repair.unheard_complaints import Unheard
from tracker.core.report_rate import SHORTEST_S
from tracker.core.swarm import Swarm
from tracker.core.vouching.vouching import Vouching
from tracker.core.wan.imports import Imports

RETRY_S = 0.5
LEAVES_MAX = 10_000
"""Hosts that one tick takes out of swarms, each swarm of a host counted: a tenth of a second. Where
a switch takes thousands of hosts along the others go with the next ticks."""


@dataclass(slots=True)
class Fleet:
    """All hosts of a tracker, and their swarms. Changes only through `handle`."""

    started_at: float
    origin: str = ""
    """URL of central storage as every agent is told it, without what may be secret in it."""
    origin_streams_max: int = 64
    """Cap on leases over all swarms, and on the readers of one stripe at one site."""
    origin_bytes_s: float = 0.0
    """Cap on what all hosts together read of the origin; 0 for none."""
    report_interval_s: float = SHORTEST_S
    """How often agents are asked to report. The service writes it."""
    patience_s: float = 0.0
    """Hosts just asked to report more often may still take so long. The service writes it."""
    hosts: dict[str, Host] = field(default_factory=dict)
    """Hosts by name. `handle`, Membership, Presence."""
    swarms: dict[Digest, Swarm] = field(default_factory=dict)
    """Swarms by key. Membership."""
    capacities: Capacities = field(default_factory=Capacities)
    """Uplinks and downlinks as far as known; outlives swarms and sessions."""
    policies: PolicyBook = field(default_factory=PolicyBook)
    schedule: Schedule = field(default_factory=Schedule)
    probing: Probing = field(default_factory=Probing)
    """Hosts that are asked to report often for a while."""
    reputation: Reputation = field(init=False)
    """Upload slots of hosts, and penalties."""
    _sessions: dict[int, str] = field(default_factory=dict)
    """Host names by session. `_opened`, `_closed`."""
    _tail: Tail = field(default_factory=Tail)
    _lateness: Lateness = field(default_factory=Lateness)
    planner: Planner = field(default_factory=Planner)
    _presence: Presence = field(init=False)
    membership: Membership = field(init=False)
    """Which hosts are in which swarms."""
    _complaints: Complaints = field(init=False)
    _slowness: Slowness = field(init=False)
    _turnover: LeaseTurnover = field(init=False)
    _claims: Claims = field(init=False)
    _counts: Counts = field(init=False)
    _assignments: Assignments = field(init=False)
    imports: Imports = field(init=False)
    handover: Handover = field(init=False)
    """Which swarms are this tracker's, where there are several trackers."""
    history: History = field(init=False)
    """What is reported to people."""
    vouching: Vouching = field(init=False)
    """The piece lists of blobs that no manifest has one for."""

    def __post_init__(self) -> None:
        self.origin = redacted(self.origin)
        schedule, probing, sites = self.schedule, self.probing, self.planner.origin_sites
        self.handover = Handover(self.hosts, self.swarms, self.started_at)
        self.history = log = History(self.hosts, self.capacities, self.policies, self.origin_bytes_s)
        self._presence = Presence(self.hosts, self.swarms, self.started_at, log.lost, log.back)
        self.reputation = Reputation(self.hosts, self.swarms, schedule, self.capacities)
        self.membership = Membership(self.hosts, self.swarms, schedule, self.reputation, self._presence, log.left)
        self._claims = Claims(self.hosts, self.swarms, schedule, self.reputation)
        described, limit = self.membership.described, (self.origin_streams_max, self.handover.fraction)
        self._turnover = LeaseTurnover(self.swarms, schedule, self.policies, described, *limit)
        self.imports = Imports(self.swarms, schedule, self.policies, limit[1], log.site_waits)
        hears = self._claims, self._turnover, self._tail, log.broadcasts, self.imports
        self._counts = Counts(self.membership, schedule, *hears)
        self.vouching = Vouching(self.hosts, self.swarms, schedule, self.reputation, described)
        self.membership.renamed, self.membership.rests = self.vouching.renamed, self._lateness.rests
        self._assignments = Assignments(self.swarms, self.hosts)
        judges = self._claims, self._turnover, self.vouching, log, Unheard(self.swarms, self.started_at)
        self._complaints = Complaints(self.membership, self.reputation, schedule, probing, *judges, sites)
        about = self.reputation, schedule, probing
        self._slowness = Slowness(self.hosts, *about, self.capacities, self.policies, self._presence, log, self.swarms)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Take an event and plan what is due; returns what is to be sent."""
        out: list[Command] = []
        goes_on = not self._assignments.waiting or isinstance(event, (Due, Tick))
        match event:
            case Received(session, message):
                self._received(session, message, now, out)
            case SessionOpened():
                self._opened(event, now, out)
            case SessionClosed(session, why):
                self._closed(session, why, now)
            case Tick(utc_s):
                self.imports.look(now=now, utc_s=utc_s)
                self._tick(now, out)
            case Described(layouts):
                for blob, layout in layouts:
                    self.membership.describe(blob, layout, now=now)
            case ListFound():
                out += self.vouching.take_found(event)
            case OriginSeen():
                out += self._complaints.seen(event, now=now)
            case HostDrained(name, drained):
                self.reputation.drain(name, drained=drained, now=now)
            case Followed() | LeasesAllowed():
                self.handover.handle(event, self._sessions, now=now)
        if now >= self.schedule.next_at:
            self._plan_due(now, out)  # Due asks for nothing else
        if goes_on and self._assignments.waiting:  # the events of a moment would have all hosts told at once
            out += self._assignments.take(self.handover.epoch, self.handover.mine)
        return out

    @property
    def lost(self) -> dict[str, Host]:
        """Hosts that ended without saying so in the last hour, by name; for people alone."""
        return self._presence.gone

    @property
    def wake_at(self) -> float:
        """Time at which the core wants to hear that it has come (Due)."""
        return -inf if self._assignments.waiting else self.schedule.wake_at

    def leases(self) -> int:
        """Origin leases that are out."""
        return sum(swarm.leases() for swarm in self.swarms.values())

    # -- sessions

    def _opened(self, opened: SessionOpened, now: float, out: list[Command]) -> None:
        session, hello = opened.session, opened.hello
        if (refusal := _refusal(hello, self.hosts)) is not None:
            out += [Send(session, Reject(refusal.problem())), Drop(session)]
            return
        host = self.hosts.setdefault(hello.host, Host(hello.host, drained=hello.host in self.reputation.drained))
        self._presence.found(host, now)
        if host.session is not None:
            self._sessions.pop(host.session, None)
            out.append(Drop(host.session))
        host.connect(opened, now=now)
        self.history.connected(host, now=now)
        self.capacities.declare(host.name, hello.upload_bytes_s)
        self._sessions[session] = hello.host
        if host.swarms:
            self._presence.lost(host, now)
        out.append(Send(session, self.handover.welcome(self.report_interval_s, self.origin)))

    def _closed(self, session: int, why: str, now: float) -> None:
        if (name := self._sessions.pop(session, None)) is None:
            return
        self.handover.closed(session)
        host = self.hosts[name]
        host.disconnect(now, why)
        self._lateness.rests(host)
        self._presence.lost(host, now)

    # -- messages

    def _received(self, session: int, received: FromAgent, now: float, out: list[Command]) -> None:
        name = self._sessions.get(session)
        if name is None:
            return
        if (message := self.handover.admit(session, received, out)) is not None:
            self._take(session, self.hosts[name], message, now, out)

    def _take(self, session: int, host: Host, message: FromAgent, now: float, out: list[Command]) -> None:
        """Do what a host says, or tell it why not."""
        try:
            match message:
                case Report():
                    self._report(host.name, message, now)
                case Holding() if not host.leaving:
                    self._hold(host, message, now)
                    out += self.vouching.holding(host, message, now=now)
                case Holdings(blobs):
                    for holding in blobs:
                        # One at a time: one that cannot be true must not keep the others from being
                        # known.
                        self._take(session, host, holding, now, out)
                case Complaint():
                    probes = self.report_interval_s > SELDOM_S
                    out += self._complaints.handle(host, message, late=self._late, probes=probes, now=now)
                case Vouched():
                    out += self.vouching.vouched(host, message, now=now)
                case Judged():
                    out += self.vouching.judged(host, message, now=now)
                case Left(blob):
                    if (key := host.key(blob)) in host.swarms:
                        self._claims.left(host, self.swarms[key], now=now)
                        self.membership.leave(host, self.swarms[key], "left", now=now)
                case Leaving():
                    self.membership.drain(host, now=now)
                case PullFailed():
                    self.history.pull_failed(host, message, now=now)
                case Hello():
                    raise UsageError("a session says hello once")
        except P2PDistError as error:
            about = message.blob if isinstance(message, Holding | Complaint | Vouched | Judged) else None
            out.append(Send(session, Reject(error.problem(), about)))

    def _hold(self, host: Host, holding: Holding, now: float) -> None:
        """A host says what it holds of a blob, and from which hosts it receives it."""
        self.policies.admit(host.zone, holding, host.site)
        swarm = self.membership.swarm_of(host, holding)
        counts = holding.counts
        swarm.check_counts(counts)
        if host.name in holding.parents:
            raise UsageError(f"{host.name} says that it receives from itself")
        self.membership.enter(host, swarm, now=now)
        member = swarm.members.get(host.name)
        if member is None:
            member = self.membership.join(host, swarm, counts, now=now)
            self._claims.entered(host, swarm, counts, timed=self.handover.is_stable(swarm.blob, now=now), now=now)
            swarm.record(now, f"{host.name} joins with {sum(counts)} pieces")
        else:
            swarm.set_location(host.name, host.location, host.rack)
            self._counts.take(swarm, member, counts, judge=self.handover.is_stable(swarm.blob, now=now), now=now)
            member.set_slots(max(member.slots, self.reputation.slots(host, swarm, now=now)))
            if not member.present:
                swarm.edges.notify_children(host.name)
        self.imports.joined(swarm, member)
        member.mark_present()
        member.hear(now)
        swarm.set_priority(host.name, holding.priority)
        swarm.set_transport(host.name, holding.swarm)
        self.membership.sort(host, swarm)
        if not member.seed:
            named = len(holding.parents) == swarm.stripes
            for stripe, parent in enumerate(holding.parents if named else (None,) * swarm.stripes):
                reattach(swarm, member, stripe, parent, lambda name: self.membership.add_absent(swarm, name, now=now))
        release_leases(swarm, host.name)
        self._turnover.note(swarm)
        self.history.broadcasts.join(swarm, member, now=now)
        self.schedule.join(swarm, now)

    def _report(self, name: str, report: Report, now: float) -> None:
        """A host says how far it is; agents leave out the blobs of which nothing came."""
        host = self.hosts[name]
        for blob in self._presence.heard(host):
            self.schedule.ask(blob, "back", now)
        advanced = {host.keys.get(advance.blob, advance.blob): advance for advance in report.blobs}
        for blob, advance in advanced.items():
            swarm, counts = self.swarms.get(blob), advance.counts
            if swarm is not None and name in swarm.members:
                swarm.check_counts(counts)
                judge = self.handover.is_stable(swarm.blob, now=now)
                self._counts.take(swarm, swarm.members[name], counts, advance.origin_bytes, judge=judge, now=now)
        self.capacities.sample(name, report.sent_bytes, report.busy_s)
        if report.sent_bytes:
            host.note_sent(now)
        interval_s = self._interval_s
        self._lateness.reported(host, interval_s=interval_s, now=now)
        late = self._lateness.late(interval_s=interval_s, now=now)
        for blob in host.receiving:
            swarm, advance_here = self.swarms[blob], advanced.get(blob)
            self._slowness.judge(swarm, host, advance_here, late=late, interval_s=interval_s, now=now)

    @property
    def _interval_s(self) -> float:
        """How long hosts may take between two reports."""
        return max(self.report_interval_s, self.patience_s)

    def _late(self, now: float) -> bool:
        """Whether the fleet as a whole is late with its reports, so that no host can be judged."""
        return self._lateness.late(interval_s=self._interval_s, now=now)

    # -- time

    def _tick(self, now: float, out: list[Command]) -> None:
        """Do what the time asks for: hand over, expire, rebalance, and end probes."""
        out += self.handover.tick(partial(self.membership.dissolve, now=now))
        self.history.tick(now=now)
        self._lateness.count(interval_s=self._interval_s, now=now)
        self.reputation.expire(now=now)
        self._presence.expire(now)
        out += _leave_overdue(self._presence, self.membership, now)
        for key in list(self.schedule.restless):
            _attend(self.swarms[key], self.reputation, self.schedule, self._turnover, now)
        out += self.vouching.tick(now=now)
        self._claims.look(late=self._late(now), now=now)
        self._complaints.look(late=self._late(now), interval_s=self._interval_s, now=now)
        for blob in self._tail.catch_up(self.swarms, now=now):
            self.schedule.ask(blob, "late", now)
        out += ask_reports(self.hosts, self.probing.ended(now), self.report_interval_s)
        out += ask_reports(self.hosts, self.probing.begin(now=now), PROBE_INTERVAL_S)

    def _plan_due(self, now: float, out: list[Command]) -> None:
        """Plan the swarms that are due, and tell their hosts."""
        due = [swarm for swarm in self.schedule.take(self.swarms, now) if self.handover.mine(swarm.blob)]
        if not due:
            return
        leases, owned = self._turnover.leases(), self.handover
        for swarm in due:
            swarm.edges.set_now(now)
            before, knows = swarm.leases(), owned.granting(swarm, now=now)
            self.reputation.set_fanout(swarm, now=now)
            free, rescues = (leases.free(swarm), leases.rescues(swarm)) if owned.leases_allowed else (0, 0)
            self.imports.prepare(swarm)
            free = free * knows + (yield_leases(swarm, now=now) if owned.gathers(swarm.blob, now=now) else 0)
            self.planner.plan(swarm, leases=free, rescues=rescues, imports=knows or not owned.leases_allowed)
            if owned.leases_allowed:
                share_origin(swarm, leases.room(swarm, before))
            leases.granted(swarm, swarm.leases() - before)
            if swarm.leases() > before and self.report_interval_s > SELDOM_S:  # a slow root holds up all hosts
                probed = self.probing.probe(chain(*swarm.edges.roots), now=now)
                out += ask_reports(self.hosts, probed, PROBE_INTERVAL_S)
            self._turnover.planned(swarm, leases)
            self.vouching.planned(swarm)
            self._claims.planned(swarm, interval_s=self._interval_s, now=now)
            self.imports.planned(swarm, now=now)
            self._assignments.planned(swarm)
        out += self._turnover.rates.take(self._turnover.reading(), self.hosts, self.origin_bytes_s, owned)


def _attend(swarm: Swarm, reputation: Reputation, schedule: Schedule, turnover: LeaseTurnover, now: float) -> None:
    """Do what the time asks for in a swarm for which something was asked."""
    swarm.edges.expire(now)
    if swarm.passes.strained and now - swarm.passes.spread_at >= pause_s(swarm):
        swarm.edges.set_now(now)
        reputation.retry(swarm, now=now)
        if spread_overload(swarm, now=now):
            schedule.ask(swarm.key, "balance", now)
    waits = bool(swarm.edges.unplanned) and not turnover.parked(swarm)
    schedule.rest(swarm, now + RETRY_S if waits else None)


def _leave_overdue(presence: Presence, membership: Membership, now: float) -> list[Drop]:
    """Take the hosts out of their swarms that were absent for too long, some of them at a time."""
    drops = []
    for host, blob in islice(presence.overdue(now), LEAVES_MAX):
        swarm = membership.swarms[blob]
        spoke = not swarm.members[host.name].hearsay
        membership.leave(host, swarm, "absent", now=now)
        if host.session is not None and spoke:
            # It is taken for gone and is not: in a new session it says again what it holds.
            drops.append(Drop(host.session))
    return drops


def _refusal(hello: Hello, hosts: Collection[str]) -> UsageError | None:
    """Why a host that says hello is not taken in; None where it is. `hosts` are there already."""
    if hello.protocol != PROTOCOL_VERSION:
        return UsageError(
            f"{hello.host} speaks protocol {hello.protocol}, this tracker {PROTOCOL_VERSION}",
            remedy="Run the same version of p2pdist everywhere",
        )
    if hello.host not in hosts and len(hosts) >= HOSTS_MAX:
        return UsageError("this tracker has too many hosts")
    return None
