"""One simulation: hosts, tracker, origin and network put together, run until every pull has
ended."""

from __future__ import annotations

from collections.abc import Callable

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.pieces import PieceLayout
from p2pdist.simulate.bittorrent import Mesh
from p2pdist.simulate.clock import World
from p2pdist.simulate.context import Surroundings
from p2pdist.simulate.faults import failures, inject, late_hosts
from p2pdist.simulate.host import Blob, Host, Pull
from p2pdist.simulate.invariants import Invariants
from p2pdist.simulate.network import TRACKER_NAME, Link, Network, Rack
from p2pdist.simulate.origin import Origin
from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.tracker import Tracker
from tracker.core.fleet import Fleet

SLICE_EVENTS = 200_000
QUIET_S = 1.25
QUIET_INTERVALS = 2.5
QUIET_TRIES = 60

Progress = Callable[[int, int], None]
"""Told pieces delivered and pieces to deliver, now and then."""


class Simulation:
    """See the module's text."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario = scenario.filled()
        self.world = World(scenario.seed)
        self.network = Network(self.world, scenario.latency_s)
        self.origin = Origin(self.world, self.network, scenario.origin_bytes_s)
        self.invariants = Invariants(self.world, scenario.seed, scenario.origin_streams_max)
        self.tracker = Tracker(self.world, self.network, self.invariants.fleet_handled, self._make_fleet)
        layout = PieceLayout(scenario.size, scenario.piece_size)
        starts = scenario.blobs - scenario.preseeds
        self.blobs = [
            Blob(digest_of(b"blob %d" % number), layout, "start" if number < starts else "preseed")
            for number in range(scenario.blobs)
        ]
        self.hosts: dict[str, Host] = {}
        self.meshes: dict[Digest, Mesh] = {}
        self.racks = [Rack(f"r{number}", scenario.rack_bytes_s) for number in range(scenario.racks)]
        self.parties = scenario.parties()
        self.lost: dict[str, None] = {}
        self.ended_at = 0.0
        self._unsettled = 0
        around = Surroundings(
            self.world,
            self.network,
            self.origin,
            self.tracker,
            self.invariants,
            scenario.blocks_per_piece,
            scenario.patience_s,
            self.hosts,
            self._settled,
            scenario.transport_of,
            self.meshes,
        )
        if scenario.transport != "trees":
            self.meshes |= {blob.digest: Mesh(blob.digest, around) for blob in self.blobs}
        for number, (name, rate) in enumerate(zip(scenario.host_names(), scenario.rates(), strict=True)):
            link = Link(rate, rate)
            rack = self.racks[scenario.rack_of(number)] if self.racks else None
            zone = f"z{scenario.zone_of(number)}" if scenario.zones else ""
            wanted = self.blobs if number < (scenario.starters or scenario.hosts) else self.blobs[starts:]
            self.hosts[name] = Host(name, link, wanted, around, rack, zone)
            self._unsettled += len(wanted)

    def run(self, progress: Progress | None = None) -> Report:
        """Run until every pull has ended and the tracker has heard of it; raises
        InvariantBroken."""
        scenario = self.scenario
        self.tracker.start()
        late = late_hosts(scenario.faults)
        for host, party in zip(self.hosts.values(), self.parties, strict=True):
            if host.name not in late:
                self.world.at(party.starts_at, host.start)
        for fault in scenario.faults:
            inject(self, fault)
        while self.world.run(until=scenario.time_limit_s, events_max=SLICE_EVENTS):
            if progress is not None:
                progress(*self._delivered())
        if self._unsettled:
            waiting = [name for name, host in self.hosts.items() if name not in self.lost and not _settled(host)]
            self.invariants.broken(f"{len(waiting)} hosts wait forever: {', '.join(waiting[:10])}")
        self._quiet()
        self.invariants.check_end(self.tracker.fleet, self.hosts.values(), failures(scenario.faults))
        return Report.of(self)

    @property
    def ended(self) -> bool:
        """Whether every pull has ended."""
        return not self._unsettled

    def lose(self, host: Host) -> None:
        """A host is gone for good."""
        self.lost[host.name] = None
        self._unsettled -= sum(1 for pull in host.pulls.values() if not pull.settled)
        self._look_around()

    def _make_fleet(self, now: float) -> Fleet:
        scenario = self.scenario
        return Fleet(now, origin_streams_max=scenario.origin_streams_max, report_interval_s=scenario.report_interval_s)

    def _settled(self, host: Host, pull: Pull) -> None:
        self.invariants.counted(pull)
        self._unsettled -= 1
        self._look_around()

    def _look_around(self) -> None:
        if not self._unsettled:
            self.world.stopped = True

    def _quiet(self) -> None:
        """Let the last reports arrive, and those who lost the tracker find it again."""
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
        """Whether a tracker answers every host that runs and is not cut from it for good."""
        return self.tracker.fleet is not None and all(
            host.session.welcomed or not self.network.reachable(host.name, TRACKER_NAME)
            for host in self.hosts.values()
            if host.running
        )

    def _delivered(self) -> tuple[int, int]:
        pulls = [pull for host in self.hosts.values() for pull in host.pulls.values()]
        return sum(len(pull.have) for pull in pulls), sum(pull.blob.layout.count for pull in pulls)


def _settled(host: Host) -> bool:
    return all(pull.settled for pull in host.pulls.values())
