"""The origin is read about once also while no tracker grants leases: trackers away, for a while and
for good, roots and superpeers dead, hosts cut off from each other, the origin itself away. No run
breaks an invariant; which hosts may read the origin is one of them."""

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from p2pdist.core.download.events import Command, OpenStream
from p2pdist.core.sources import Candidates
from p2pdist.model.messages import Complaint, Reason
from p2pdist.model.plan import ORIGIN, Source
from p2pdist.model.rendezvous import ranked
from p2pdist.simulate.faults import Crash, OriginOutage, Partition, TrackerLoss
from p2pdist.simulate.host import Host, Pull
from p2pdist.simulate.invariants import InvariantBroken
from p2pdist.simulate.network import Cut
from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation
from tracker.core.events import LookAtOrigin, OriginSeen
from tracker.core.origin.superpeers import superpeers

HOSTS = 60
PIECES = 96
NIC_BYTES_S = 1e6
SHORTEST_S = PIECES * 65536 / NIC_BYTES_S
LOST_AT_S = 0.3 * SHORTEST_S


def all_keepers(self: Candidates, keepers: tuple[Source, ...]) -> None:
    """Every host takes itself for the first superpeer."""
    self.rank, self._superpeers = 0, (ORIGIN,)


def always_alone(self: Candidates, alone: bool) -> Iterator[Source]:
    """Superpeers are asked, and read the origin, whether a tracker answers or not."""
    return order_of(self, True)


order_of = Candidates._order


class Run:
    """A simulation in which the tracker is lost at 30 %, and what depends on who reads the origin
    then."""

    def __init__(
        self,
        seed: int,
        *,
        hosts: int = HOSTS,
        pieces: int = PIECES,
        back_after_s: float | None = None,
        zones: int = 0,
    ) -> None:
        self.random = Random(f"origin guard {seed}")
        scenario = Scenario(hosts, pieces * 65536, NIC_BYTES_S, seed=seed, latency_s=0.001, zones=zones)
        self.simulation = Simulation(scenario)
        self.world = self.simulation.world
        self.names = list(self.simulation.hosts)
        self._back_after_s = back_after_s
        self._crashes: tuple[int, bool, bool] | None = None
        self.world.at(LOST_AT_S, self._lose)

    def crash(self, others: int = 0, *, power: bool = False, first_keepers: bool = False) -> None:
        """Once the tracker is lost, let the roots die, with `first_keepers` the first of each
        stripe, and so many others."""
        self._crashes = others, power, first_keepers

    def _lose(self) -> None:
        fleet = self.simulation.tracker.fleet
        assert fleet is not None
        (swarm,) = fleet.swarms.values()
        self.simulation.inject(TrackerLoss(self.world.now, self._back_after_s))
        if self._crashes is None:
            return
        others, power, first_keepers = self._crashes
        victims = {root: None for roots in swarm.edges.roots for root in roots}
        if first_keepers:
            names = [
                name
                for zone in {member.zone: None for member in swarm.members.values()}
                for name in superpeers(swarm, zone)
            ]
            victims |= {ranked(f"{swarm.blob}/{stripe}".encode(), names, 1)[0]: None for stripe in range(swarm.stripes)}
        rest = [name for name in self.names if name not in victims]
        for name in (*victims, *self.random.sample(rest, others)):
            at = self.world.now + self.random.uniform(0.0, 0.5 * SHORTEST_S)
            self.simulation.inject(Crash(name, at, None, power))

    def end(self) -> Report:
        """Run it: all hosts that did not crash must be complete."""
        report = self.simulation.run()
        assert report.failed == 0 and report.complete + report.lost >= len(self.names)
        return report

    def origin_streams(self) -> Counter[int]:
        """How many hosts read each stripe from the origin now."""
        return Counter(
            each.stripe for each in self.simulation.network.streams if each.parent is None and each.child_open
        )


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 24, 8))
def test_a_swarm_without_a_tracker_completes_though_its_roots_die(first: int) -> None:
    """The tracker is lost for good, and one host in ten dies: what the origin sends again is what
    the dead roots had not passed on."""
    for seed in range(first, first + 8):
        run = Run(seed)
        run.crash(4, first_keepers=seed % 2 == 0)
        report = run.end()
        assert report.lost >= 5
        assert report.origin_ratio <= 1.3, seed


@pytest.mark.slow
def test_it_completes_though_no_host_learns_that_they_died() -> None:
    """Hosts without power: no stream ends, and what they fed only stops."""
    for seed in range(8):
        run = Run(seed)
        run.crash(4, power=True, first_keepers=seed % 2 == 0)
        assert run.end().origin_ratio <= 1.5, seed


@pytest.mark.parametrize("hosts", range(2, 12))
def test_small_swarms_complete_as_well(hosts: int) -> None:
    """Here every host, or nearly, is a superpeer, and often feeds the one that it asks."""
    for seed in range(5):
        run = Run(seed, hosts=hosts)
        run.crash()
        assert run.end().origin_ratio <= 1.4, seed


def test_one_host_that_is_left_completes_alone() -> None:
    run = Run(1, hosts=8)
    run.crash(others=5)
    report = run.end()
    assert report.lost in (6, 7) and report.complete >= 1


@pytest.mark.slow
def test_each_side_of_a_cut_reads_about_once() -> None:
    """Half the hosts are cut off from the others for good, without a tracker: no host there can
    know what the others read."""
    for seed in range(6):
        run = Run(seed)
        group = frozenset(run.random.sample(run.names, HOSTS // 2))
        at = LOST_AT_S + run.random.uniform(0.0, 0.3 * SHORTEST_S)
        run.simulation.inject(Partition(Cut(group), at, 1e6))
        assert run.end().origin_ratio <= 2.4, seed


def test_each_zone_reads_about_once() -> None:
    for seed in range(5):
        run = Run(seed, zones=3)
        run.crash()
        report = run.end()
        assert len(report.zone_origin_ratios) == 3
        assert max(report.zone_origin_ratios.values()) <= 1.3, (seed, report.zone_origin_ratios)


@pytest.mark.slow
@pytest.mark.parametrize("away_s", [1.0, 10.0])
def test_a_tracker_that_comes_back_costs_nothing(away_s: float) -> None:
    """It finds the streams as they run, and none is moved."""
    for seed in range(6):
        run = Run(seed, hosts=30, pieces=3 * PIECES, back_after_s=away_s)
        report = run.end()
        assert report.makespan_s > LOST_AT_S + away_s
        assert report.origin_ratio <= 1.1, seed


@pytest.mark.slow
def test_with_a_tracker_back_one_host_reads_each_stripe() -> None:
    """Superpeers had begun to read of their own accord, and here and there two of them."""
    away_s, settled_s = 8.0, 5.0
    before: list[int] = []
    for seed in range(4):
        run = Run(seed, pieces=3 * PIECES, back_after_s=away_s)
        run.crash()
        after: list[Counter[int]] = []

        def look(run: Run = run, after: list[Counter[int]] = after) -> None:
            after.append(run.origin_streams())
            if not run.simulation.ended:
                run.world.after(0.5, look)

        run.world.at(LOST_AT_S + away_s - 0.1, lambda run=run: before.append(run.origin_streams().total()))
        run.world.at(LOST_AT_S + away_s + settled_s, look)
        assert run.end().origin_ratio <= 1.2, seed
        assert len(after) > 10
        assert max(count for each in after for count in each.values()) == 1, (seed, after)
    assert sum(before) > 0, "no host read the origin while the tracker was away"


@pytest.mark.slow
def test_an_origin_that_is_away_is_not_stormed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tracker, roots dead and the origin away for 15 s: superpeers try it now and then,
    and each stripe is read about once after."""
    for seed in range(5):
        run = Run(seed)
        run.crash()
        begin, end = LOST_AT_S + 1.0, LOST_AT_S + 16.0
        run.simulation.inject(OriginOutage(begin, end - begin))
        tries: list[float] = []
        checks = run.simulation.invariants
        commanded = checks.commanded

        def counted(host: Host, pull: Pull, command: Command, commanded=commanded, tries=tries, run=run) -> None:  # type: ignore[no-untyped-def]
            if isinstance(command, OpenStream) and command.source.is_origin:
                tries.append(run.world.now)
            commanded(host, pull, command)

        monkeypatch.setattr(checks, "commanded", counted)
        assert run.end().origin_ratio <= 2.0, seed
        assert sum(1 for each in tries if begin <= each < end) <= 60, seed


@pytest.mark.parametrize(
    ("name", "defect", "noticed"),
    [("superpeers_named", all_keepers, "is no superpeer"), ("_order", always_alone, "has a tracker to ask")],
)
def test_a_host_that_may_not_read_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, defect: Callable[..., Any], noticed: str
) -> None:
    """Each defect, put into the core on purpose, ends a run."""
    monkeypatch.setattr(Candidates, name, defect)
    with pytest.raises(InvariantBroken, match=noticed):
        for seed in range(20):
            run = Run(seed, hosts=20, back_after_s=4.0)
            run.crash(others=6)
            run.simulation.run()


@pytest.mark.parametrize("reason", ["missing", "corrupt"])
def test_hosts_that_lie_of_the_origin_end_no_pull(reason: Reason) -> None:
    """The first three that get a lease say that they cannot read whenever they have one: the
    tracker looks, and others read."""
    simulation = Simulation(Scenario(HOSTS, PIECES * 65536, NIC_BYTES_S, seed=3, latency_s=0.001))
    liars: dict[str, None] = {}
    looks: list[OriginSeen] = []
    look = simulation.tracker.look

    def lie() -> None:
        fleet = simulation.tracker.fleet
        assert fleet is not None
        for swarm in fleet.swarms.values():
            for stripe, roots in enumerate(swarm.edges.roots):
                for host in roots if len(liars) < 3 else filter(liars.__contains__, roots):
                    liars[host] = None
                    simulation.hosts[host].session.send(Complaint(swarm.blob, stripe, "", reason))
        if simulation.world.now < SHORTEST_S / 2:
            simulation.world.after(0.02, lie)

    def seen(wanted: LookAtOrigin) -> OriginSeen:
        looks.append(look(wanted))
        return looks[-1]

    simulation.tracker.look = seen
    simulation.world.at(0.02, lie)
    report = simulation.run()
    assert report.failed == 0 and report.complete == HOSTS
    assert looks and {saw.state for saw in looks} == {"right"}
