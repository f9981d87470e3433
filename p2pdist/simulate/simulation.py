"""One simulation: hosts, tracker, origin and network put together, disturbed by the faults of the
scenario, and run until every pull has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.pieces import PieceLayout
from p2pdist.simulate.bittorrent import Mesh
from p2pdist.simulate.clock import World
from p2pdist.simulate.cluster.nodes import Cluster
from p2pdist.simulate.context import Context
from p2pdist.simulate.faults import (
    Busy,
    Crash,
    DatabaseLoss,
    Fault,
    Late,
    Leave,
    LyingVoucher,
    OriginOutage,
    OriginWrong,
    Partition,
    RollingRestart,
    Silent,
    Slow,
    TrackerCut,
    TrackerFreeze,
    TrackerLoss,
    TrackerLosses,
    UpstreamBreak,
    UpstreamChange,
    UpstreamStall,
    UpstreamWhole,
    WrongBytes,
    failures,
    late_hosts,
)
from p2pdist.simulate.host import Host, Pull, StreamServer
from p2pdist.simulate.invariants import Invariants
from p2pdist.simulate.network import TRACKER_NAME, Link, Network, Rack
from p2pdist.simulate.origin import Blob, Origin
from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.tracker import Tracker
from p2pdist.simulate.vouching.listing import Listing, hash_of
from tracker.core.fleet import Fleet
from tracker.core.planning.planner import Planner
from tracker.core.policy.book import PolicyBook
from tracker.core.policy.table import PolicyTable

SLICE_EVENTS = 200_000
"""Progress is reported after so many events."""

QUIET_S = 1.25
QUIET_INTERVALS = 2.5
QUIET_TRIES = 60
"""After the last pull the simulation goes on for QUIET_S and so many report intervals, and again,
QUIET_TRIES times at most, until every host has a session."""

LEAVE_POLL_S = 0.02
"""How often a host that leaves looks whether it still has children."""

Progress = Callable[[int, int], None]
"""Gets the pieces delivered and the pieces to deliver, every SLICE_EVENTS."""


class Simulation:
    """A scenario with all its parts. `run` may be called once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario = scenario.filled()
        self.world = World(scenario.seed)
        self.network = Network(self.world, scenario.latency_s, scenario.wan_s)
        self.origin = Origin(self.world, self.network, scenario.origin_bytes_s)
        self.invariants = Invariants(self.world, scenario.seed, scenario.origin_streams_max)
        #: The tracker, or the first of several.
        self.tracker = self._make_tracker(TRACKER_NAME)
        self.cluster = self._make_cluster(scenario.trackers) if scenario.trackers > 1 else None
        layout = PieceLayout(scenario.size, scenario.piece_size)
        starts = scenario.blobs - scenario.preseeds
        self.blobs = [
            Blob(digest_of(b"blob %d" % number), layout, "start" if number < starts else "preseed")
            for number in range(scenario.blobs)
        ]
        #: By name, in the order of the scenario.
        self.hosts: dict[str, Host] = {}
        self.meshes: dict[Digest, Mesh] = {}
        self.sites = [Rack(f"s{number}", scenario.wan_bytes_s) for number in range(scenario.sites)]
        self.racks = self._make_racks()
        self.parties = scenario.parties()
        #: Hosts that are gone for good.
        self.lost: dict[str, None] = {}
        #: When the last pull ended, in seconds.
        self.ended_at = 0.0
        #: How many pulls have not ended, of hosts that are not lost.
        self._pulls_open = 0
        for blob in self.blobs if scenario.vouched else ():
            self.invariants.lists.hashes[blob.digest] = blob.hashes = [
                hash_of(blob, piece, 0) for piece in range(layout.count)
            ]
        senders: dict[str, StreamServer] = {}
        context = Context(
            self.world,
            self.network,
            self.origin,
            self.tracker,
            self.invariants,
            scenario.blocks_per_piece,
            scenario.patience_s,
            senders,
            self._pull_ended,
            scenario.transport_of,
            self._listing_of,
            self.meshes,
            self.cluster,
        )
        if scenario.transport != "trees":
            self.meshes |= {blob.digest: Mesh(blob.digest, context, self.hosts) for blob in self.blobs}
        for number, (name, rate) in enumerate(zip(scenario.host_names(), scenario.rates(), strict=True)):
            link, site = Link(rate, rate), scenario.site_of(number)
            rack = self.racks[scenario.rack_of(number) if scenario.racks else site] if self.racks else None
            zone = f"z{scenario.zone_of(number)}" if scenario.zones else ""
            if self.sites:
                self.network.sites[name] = self.sites[site]
            blobs = self.blobs if number < (scenario.starters or scenario.hosts) else self.blobs[starts:]
            host = self.hosts[name] = Host(name, link, blobs, context, rack, zone, f"s{site}" if self.sites else "")
            senders[name] = host.server
            self._pulls_open += len(blobs)

    def run(self, progress: Progress | None = None) -> Report:
        """Run until all pulls have ended and the tracker knows it. Raises InvariantBroken."""
        scenario = self.scenario
        if self.cluster is not None:
            self.cluster.start()
        else:
            self.tracker.start()
        late = late_hosts(scenario.faults)
        for host, party in zip(self.hosts.values(), self.parties, strict=True):
            if host.name not in late:
                self.world.at(party.starts_at, host.start)
        for fault in scenario.faults:
            self.inject(fault)
        while self.world.run(until=scenario.time_limit_s, events_max=SLICE_EVENTS):
            if progress is not None:
                progress(*self._delivered())
        if self._pulls_open:
            waiting = [
                name
                for name, host in self.hosts.items()
                if name not in self.lost and any(not pull.ended for pull in host.pulls.values())
            ]
            self.invariants.broken(f"{len(waiting)} hosts wait forever: {', '.join(waiting[:10])}")
        self._quiet()
        self.invariants.check_end(self.trackers, self.hosts.values(), failures(scenario.faults))
        report = Report.of(
            scenario,
            self.hosts,
            self.racks[: scenario.racks],
            self.origin,
            lost=self.lost,
            messages=sum(tracker.messages for tracker in self.trackers),
            events=self.world.events,
        )
        entered = tuple(site.bytes_in / report.size for site in self.sites)
        lists, report = self.invariants.lists, replace(report, slow_uplinks=_told_slow(self.trackers))
        return replace(report, rounds=lists.rounds, blamed=tuple(lists.blamed), site_rx_ratios=entered)

    @property
    def ended(self) -> bool:
        """Whether every pull has ended."""
        return not self._pulls_open

    def _make_racks(self) -> list[Rack]:
        """The racks; where there are sites and no racks one without a name for each site, as
        everything that enters or leaves it crosses its boundary."""
        scenario = self.scenario
        for number, tracker in enumerate(self.trackers if self.sites else ()):
            self.network.sites[tracker.name] = self.sites[number % len(self.sites)]
        if self.sites and not scenario.racks:
            return [Rack("", 0.0, site) for site in self.sites]
        rate_bytes_s, count = scenario.rack_bytes_s, scenario.racks
        hosts = {scenario.rack_of(host): host for host in range(scenario.hosts)} if self.sites else {}
        return [
            Rack(f"r{number}", rate_bytes_s, self.sites[scenario.site_of(hosts[number])] if self.sites else None)
            for number in range(count)
        ]

    @property
    def trackers(self) -> list[Tracker]:
        """All trackers."""
        return [self.tracker] if self.cluster is None else [node.tracker for node in self.cluster.nodes.values()]

    def tracker_of(self, blob: Digest) -> Tracker:
        """The tracker that plans a blob."""
        return self.tracker if self.cluster is None else self.cluster.owner_of(blob).tracker

    def _make_tracker(self, name: str) -> Tracker:
        tracker = Tracker(self.world, self.network, self.invariants.fleet_handled, self._make_fleet, name)
        tracker.look = self.origin.seen
        return tracker

    def _make_cluster(self, count: int) -> Cluster:
        others = [self._make_tracker(f"{TRACKER_NAME}{number}") for number in range(2, count + 1)]
        return Cluster(self.world, [self.tracker, *others])

    def _make_fleet(self, now: float) -> Fleet:
        return fleet_of(self.scenario, now)

    def _listing_of(self, name: str, blob: Digest) -> Listing | None:
        host = self.hosts.get(name)
        return host.pulls[blob].listing if host is not None and host.running and blob in host.pulls else None

    def _pull_ended(self, host: Host, pull: Pull) -> None:
        self.invariants.counted(pull)
        self._pulls_open -= 1
        self._stop_if_ended()

    def _stop_if_ended(self) -> None:
        if not self._pulls_open:
            self.world.stopped = True

    def _quiet(self) -> None:
        """Let the last reports arrive, and hosts that lost the tracker find it again."""
        self.ended_at = self.world.now
        for _ in range(QUIET_TRIES):
            at_rest = self._all_welcome()
            self.world.stopped = False
            until = self.world.now + max(QUIET_S, QUIET_INTERVALS * self.scenario.report_interval_s)
            while self.world.run(until=until, events_max=SLICE_EVENTS):
                pass
            if at_rest and self._all_welcome():
                break

    def _all_welcome(self) -> bool:
        """Whether the tracker of its blobs answers every host that runs and is not cut from it, and
        no tracker has swarms to give away."""
        if self.cluster is not None and not self.cluster.at_rest:
            return False
        trackers = [(blob.digest, self.tracker_of(blob.digest)) for blob in self.blobs]
        return all(tracker.fleet is not None for _, tracker in trackers) and all(
            host.session.answers(blob) or not self.network.paths.reachable(host.name, tracker.name)
            for host in self.hosts.values()
            if host.running
            for blob, tracker in trackers
            if blob in host.pulls
        )

    def _delivered(self) -> tuple[int, int]:
        pulls = [pull for host in self.hosts.values() for pull in host.pulls.values()]
        return sum(len(pull.have) for pull in pulls), sum(pull.blob.layout.count for pull in pulls)

    # -- faults

    def inject(self, fault: Fault) -> None:
        """Let a fault happen at its time."""
        world, paths, origin, tracker = self.world, self.network.paths, self.origin, self.tracker
        match fault:
            case Crash(_, at_s, _, _):
                world.at(at_s, self._crash, fault)
            case Leave(_, at_s, _, _):
                world.at(at_s, self._leave, fault)
            case Slow(name, at_s, share, both, up):
                world.at(at_s, self.hosts[name].link.slow_to, share, up, both or not up)
            case Partition(cut, at_s, for_s):
                world.at(at_s, paths.cut, cut)
                if for_s is not None:
                    world.at(at_s + for_s, paths.heal, cut)
            case WrongBytes(name, at_s, share):
                world.at(at_s, self.hosts[name].server.spoil, share)
            case Silent(name, at_s):
                world.at(at_s, self.hosts[name].server.fall_silent)
            case TrackerLoss() | TrackerFreeze() | TrackerCut() | DatabaseLoss() | RollingRestart() if self.cluster:
                world.at(fault.at_s, self.cluster.disturb, fault, self.blobs[0].digest)
            case TrackerLoss(at_s, back_after_s, _):
                world.at(at_s, tracker.kill)
                if back_after_s is not None:
                    world.at(at_s + back_after_s, tracker.start)
            case TrackerLosses(every_s, _):
                world.at(every_s, self._lose_tracker, fault)
            case OriginOutage(at_s, for_s):
                world.at(at_s, origin.set_available, False)
                if for_s is not None:
                    world.at(at_s + for_s, origin.set_available, True)
            case OriginWrong(pieces):
                origin.spoil(pieces, self.blobs)
            case UpstreamChange(pieces, at_s, for_s):
                world.at(at_s, origin.change, pieces, self.blobs)
                if for_s is not None:
                    world.at(at_s + for_s, origin.change, frozenset(), self.blobs)
            case UpstreamStall(at_s, for_s):
                world.at(at_s, origin.stall, True)
                world.at(at_s + for_s, origin.stall, False)
            case UpstreamBreak(at_s):
                world.at(at_s, origin.break_off)
            case UpstreamWhole():
                origin.ranges = False
            case LyingVoucher():
                self._let_lie(fault)
            case Late(name, at_s):
                world.at(at_s, self.hosts[name].start)
            case Busy(at_s, for_s, share):
                world.at(at_s, self._slow_processors, fault, share, at_s + for_s)
                world.at(at_s + for_s, self._slow_processors, fault, 1.0, at_s + for_s)

    def _let_lie(self, fault: LyingVoucher) -> None:
        """A host lies; without a name the host that reads the first piece of a stripe."""
        if not fault.host:
            self.invariants.lists.first_readers[fault.reader] = fault
        for name, host in self.hosts.items():
            if name == fault.host:
                self.invariants.lists.lies(host, fault)

    def _slow_processors(self, fault: Busy, share: float, until: float) -> None:
        processors = {name: host.processor for name, host in self.hosts.items()}
        processors |= {tracker.name: tracker.processor for tracker in self.trackers}
        for name in processors if fault.hosts is None else sorted(fault.hosts):
            processors[name].slow_to(share, until=until)

    def _crash(self, fault: Crash) -> None:
        host = self.hosts[fault.host]
        if host.running:
            host.crash(power=fault.power)
            self._gone(host, fault)

    def _leave(self, fault: Leave) -> None:
        host = self.hosts[fault.host]
        if host.running and not host.leaving:
            host.leave()
            self.world.after(LEAVE_POLL_S, self._end_if_childless, fault, self.world.now + fault.within_s)

    def _end_if_childless(self, fault: Leave, end_at: float) -> None:
        host = self.hosts[fault.host]
        if not host.running or not host.leaving:
            return  # another fault has ended it meanwhile
        if host.server.outgoing and self.world.now < end_at:
            self.world.after(LEAVE_POLL_S, self._end_if_childless, fault, end_at)
            return
        host.crash(power=False)
        self._gone(host, fault)

    def _gone(self, host: Host, fault: Crash | Leave) -> None:
        """A host's process has ended: it comes back, or the host is lost."""
        if fault.back_after_s is not None:
            self.world.after(fault.back_after_s, self._restart, fault)
            return
        self.lost[host.name] = None
        self._pulls_open -= sum(1 for pull in host.pulls.values() if not pull.ended)
        self._stop_if_ended()

    def _restart(self, fault: Crash | Leave) -> None:
        if isinstance(fault, Crash) and fault.power:
            self.network.paths.power(fault.host, on=True)
        self.hosts[fault.host].start()

    def _lose_tracker(self, fault: TrackerLosses) -> None:
        if not self.ended:
            if self.cluster is not None:
                self.cluster.disturb(TrackerLoss(self.world.now, fault.back_after_s), self.blobs[0].digest)
            else:
                self.tracker.kill()
                self.world.after(fault.back_after_s, self.tracker.start)
            self.world.after(fault.every_s, self._lose_tracker, fault)


def fleet_of(scenario: Scenario, now: float) -> Fleet:
    """The core of a tracker that starts now."""
    budgets = {budget.name: budget for budget in scenario.budgets}
    return Fleet(
        now,
        origin_streams_max=scenario.origin_streams_max,
        report_interval_s=scenario.report_interval_s,
        planner=Planner(origin_sites=scenario.origin_sites),
        policies=PolicyBook(PolicyTable((), budgets)),
    )


def _told_slow(trackers: Iterable[Tracker]) -> tuple[str, ...]:
    """The hosts of which the trackers that run told people that they have a slow uplink."""
    fleets = [tracker.fleet for tracker in trackers if tracker.fleet is not None]
    events = [event for fleet in fleets for event in fleet.history.take() if event.kind == "host-slow"]
    return tuple(dict.fromkeys(event.host for event in events if event.reason.startswith("slow uplink")))
