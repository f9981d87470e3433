"""From trees to a swarm and back in the middle of a blob, when trackers are lost and hosts are cut
off from each other: what has come by one transport counts, the origin is spared, and every host
that can be reached ends with everything.

A run raises InvariantBroken as soon as one transport begins beside the other, a host requests a
piece that it holds, or reads the origin and may not. p2pdist/simulate/bittorrent.py says what takes
the part of libtorrent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from statistics import mean
from typing import Any

import pytest

from p2pdist.core.download.download import Download
from p2pdist.core.download.events import Paused
from p2pdist.core.origin_seeding import Readers
from p2pdist.core.transport import Policy, TransportSwitch
from p2pdist.simulate.bittorrent import Member
from p2pdist.simulate.faults import Crash, Fault, Partition, TrackerLoss
from p2pdist.simulate.host import Pull
from p2pdist.simulate.invariants import InvariantBroken
from p2pdist.simulate.network import Cut
from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation

HOSTS = 24
PIECES = 96
PIECE = 65536
NIC_BYTES_S = 1e6
SHORTEST_S = PIECES * PIECE / NIC_BYTES_S
NAMES = [f"h{number:05d}" for number in range(HOSTS)]
SUPERPEERS = 8
STRIPES = 2
SEEDS, CHUNK = 300, 25

CASES = (
    "tracker away for a second",
    "tracker away for a minute",
    "tracker away for good",
    "tracker back in the middle",
    "half cut off for a while",
    "half cut off for good",
    "half cut off from the origin, too",
    "half cut off from the tracker alone",
)
POLICIES: tuple[Policy, ...] = ("auto", "auto", "swarm")

COPIES_MAX = {"tracker": 1.6, "half": 2.8}
COPIES_MEAN_MAX = {"tracker": 1.3, "half": 2.0}
"""Of the blob, that the origin sends in a run, and on average. Each side of a cut needs what the
other holds; superpeers that cannot reach each other, or of which one goes by trees and the other by
a swarm, do not know what the other reads. Trees alone cost as much."""

AGAIN_MAX = {"auto": 0.04, "swarm": 0.12}
"""Bytes that come for nothing, of all: under way when a transport was left, or sent twice within a
swarm."""


def faults(case: str, policy: Policy, seed: int) -> tuple[Fault, ...]:
    """What goes wrong in a case: something is lost while all are in the middle, and where a tracker
    is, a few hosts with it."""
    random = Random(f"handoff {case} {seed}")
    begun_s = 2.0 if policy == "swarm" else 0.0  # their torrents are known by then
    at = begun_s + random.uniform(0.2, 0.7) * SHORTEST_S
    half = frozenset(random.sample(NAMES, HOSTS // 2))
    dead = random.sample(NAMES, 4)
    deaths = [Crash(name, at + random.uniform(0.0, 2.0), None, random.random() < 0.5) for name in dead]
    match case:
        case "tracker away for a second":
            return (TrackerLoss(at, 1.0), *deaths)
        case "tracker away for a minute":
            return (TrackerLoss(at, 60.0), *deaths)
        case "tracker away for good":
            return (TrackerLoss(at, None), *deaths)
        case "tracker back in the middle":
            return (TrackerLoss(at, random.uniform(6.0, 12.0)), *deaths)
        case "half cut off for a while":
            return (Partition(Cut(half, True, True, False), at, random.uniform(4.0, 30.0)),)
        case "half cut off for good":
            return (Partition(Cut(half, True, True, False), at, None),)
        case "half cut off from the origin, too":
            return (Partition(Cut(half, True, True, True), at, random.uniform(8.0, 30.0)),)
        case _:
            return (Partition(Cut(half, False, True, False), at, random.uniform(8.0, 30.0)), *deaths)


class Run:
    """One case with one seed."""

    def __init__(self, case: str, policy: Policy, seed: int) -> None:
        self.case, self.seed = case, seed
        drawn = faults(case, policy, seed)
        self.simulation = Simulation(
            Scenario(HOSTS, PIECES * PIECE, NIC_BYTES_S, seed=seed, latency_s=0.001, faults=drawn, transport=policy)
        )
        self.readers_most = 0
        self.simulation.world.after(0.1, self._look)

    def _look(self) -> None:
        """Count the hosts that read the origin at the moment."""
        streams = self.simulation.network.streams
        reading = {each.child.name: None for each in streams if each.parent is None and each.child_open}
        self.readers_most = max(self.readers_most, len(reading))
        if not self.simulation.ended:
            self.simulation.world.after(0.1, self._look)

    @property
    def pulls(self) -> list[Pull]:
        return self.pulls_of(self.simulation)

    @staticmethod
    def pulls_of(simulation: Simulation) -> list[Pull]:
        return [pull for host in simulation.hosts.values() for pull in host.pulls.values()]

    def end(self) -> Report:
        """Run it: all hosts that did not crash are complete, the origin was spared, and hardly a
        byte came for nothing."""
        report = self.simulation.run()
        what = (self.case, self.seed, report)
        assert report.failed == 0 and report.complete + report.lost >= HOSTS, what
        assert report.origin_ratio <= COPIES_MAX[self.case.partition(" ")[0]], what
        assert report.duplicate_ratio <= AGAIN_MAX[self.simulation.scenario.transport], what
        parts = 2 if self.case.startswith("half") else 1
        if self.simulation.scenario.transport == "auto":  # for a swarm more superpeers read
            assert self.readers_most <= parts * (SUPERPEERS + STRIPES), what
        return report


def changed(run: Run) -> int:
    """How many hosts got some of the blob by each transport."""
    return sum(0 < pull.bytes_swarm < pull.bytes_origin + pull.bytes_peers for pull in run.pulls)


@pytest.mark.slow
def test_every_connected_host_ends_with_everything() -> None:
    """Each seed takes one case; in all of them together many hosts finish by another transport
    than they began with."""
    both: Counter[str] = Counter()
    for seed in range(3 * len(CASES)):
        case = CASES[seed % len(CASES)]
        run = Run(case, POLICIES[seed // len(CASES)], seed)
        run.end()
        both[case] += changed(run)
    assert all(both[case] for case in CASES[1:]), both


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_all_cases_with_many_seeds(first: int) -> None:
    both: Counter[str] = Counter()
    copies: dict[str, list[float]] = {case: [] for case in CASES}
    for seed in range(first, first + CHUNK):
        for case in CASES:
            run = Run(case, POLICIES[seed % len(POLICIES)], seed)
            copies[case].append(run.end().origin_ratio)
            both[case] += changed(run)
    assert all(both[case] >= CHUNK for case in CASES[1:]), both
    for case in CASES:
        assert mean(copies[case]) <= COPIES_MEAN_MAX[case.partition(" ")[0]], (case, copies[case])


def test_without_trouble_no_host_leaves_the_trees() -> None:
    """`auto` is then the same as trees, in time and bytes; a swarm from the start costs the origin
    hardly more."""
    reports = {}
    for policy in ("trees", "auto", "swarm"):
        base = Scenario(HOSTS, PIECES * PIECE, NIC_BYTES_S, seed=1, latency_s=0.001, transport=policy)
        simulation = Simulation(base)
        reports[policy] = simulation.run(), sum(pull.bytes_swarm for pull in Run.pulls_of(simulation))
    trees, auto, swarm = (reports[policy][0] for policy in ("trees", "auto", "swarm"))
    assert (auto.makespan_s, auto.origin_ratio) == pytest.approx((trees.makespan_s, trees.origin_ratio), rel=0.05)
    assert reports["auto"][1] == 0 and swarm.complete == HOSTS and swarm.origin_ratio <= 1.15
    assert reports["swarm"][1] == HOSTS * PIECES * PIECE


@pytest.mark.parametrize(
    "apart", [1, pytest.param(HOSTS // 2, marks=pytest.mark.slow), pytest.param(HOSTS - 1, marks=pytest.mark.slow)]
)
def test_where_some_have_no_bittorrent_the_origin_is_read_once(apart: int) -> None:
    """They receive by trees for good; the others read for all, and hardly any host has to leave the
    swarm for what only trees bring."""
    for seed in range(3):
        tree_hosts = frozenset(Random(f"apart {seed}").sample(NAMES, apart))
        base = Scenario(
            HOSTS, PIECES * PIECE, NIC_BYTES_S, seed=seed, latency_s=0.001, transport="swarm", tree_hosts=tree_hosts
        )
        simulation = Simulation(base)
        report = simulation.run()
        assert report.complete == HOSTS and report.origin_ratio <= 1.05, (apart, seed, report)
        pulls = {host.name: pull for host in simulation.hosts.values() for pull in host.pulls.values()}
        assert all(not pulls[name].bytes_swarm for name in tree_hosts)
        swarming = [pull for name, pull in pulls.items() if name not in tree_hosts]
        assert sum(pull.bytes_swarm for pull in swarming) >= 0.8 * len(swarming) * PIECES * PIECE, (apart, seed)


def test_what_hosts_without_bittorrent_have_is_not_read_again() -> None:
    """With a fast origin and few hosts, where the hosts in trees may well be done first."""
    for seed in range(8):
        base = Scenario(
            4,
            256 * PIECE,
            20 * NIC_BYTES_S,
            seed=seed,
            latency_s=0.001,
            origin_bytes_s=20 * NIC_BYTES_S,
            transport="swarm",
            tree_hosts=frozenset(NAMES[1:4:2]),
        )
        report = Simulation(base).run()
        assert report.complete == 4 and report.origin_ratio <= 1.02, (seed, report)


def test_what_came_by_trees_is_not_fetched_by_the_swarm() -> None:
    """All trees break in the middle: what a host held when it moved and what came after add up to
    the blob."""
    dead = tuple(Crash(name, 3.0, None, True) for name in NAMES[:6])
    simulation = Simulation(
        Scenario(
            HOSTS,
            PIECES * PIECE,
            NIC_BYTES_S,
            latency_s=0.001,
            transport="auto",
            faults=(TrackerLoss(3.0, None), *dead),
        )
    )
    simulation.run()
    moved = [pull for pull in Run.pulls_of(simulation) if pull.moves and pull.completed_at is not None]
    assert len(moved) >= 4
    for pull in moved:
        assert pull.bytes_origin + pull.bytes_peers == PIECES * PIECE
        assert pull.bytes_swarm > 0 and pull.bytes_again <= 8 * PIECE


# -- defects that are put in on purpose


def begin_at_once(self: TransportSwitch, choice: Any, **said: Any) -> Any:
    """Does not wait for the writers."""
    return steer(self, choice, **{**said, "writers": 0})


steer = TransportSwitch.steer


def hear_of_nothing(self: Member, piece: int) -> None:
    """A member does not know what its host holds."""


def lease_to_all(self: Download) -> Readers:
    """Every host takes itself for the holder of all leases."""
    return Readers(self.blob, self.host, self.stripes, frozenset(range(self.stripes)))


def pause_for_nothing(self: Download, event: Any, *, now: float) -> Any:
    """Streams go on beside the swarm."""
    return [] if event == Paused(True) else handle(self, event, now=now)


handle = Download.handle


@pytest.mark.parametrize(
    ("owner", "name", "defect", "noticed"),
    [
        (TransportSwitch, "steer", begin_at_once, "still has|while a swarm writes"),
        (Member, "held", hear_of_nothing, "which it holds"),
        (Download, "readers", lease_to_all, "never had the lease"),
        (Download, "handle", pause_for_nothing, "while a swarm writes|and still has"),
    ],
    ids=["two writers", "held pieces", "readers", "streams go on"],
)
def test_a_defect_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, defect: Callable[..., Any], noticed: str
) -> None:
    monkeypatch.setattr(owner, name, defect)
    with pytest.raises(InvariantBroken, match=noticed):
        for seed in range(6):
            Run(CASES[3 + seed % 2], POLICIES[1 + seed // 2 % 2], seed).simulation.run()
