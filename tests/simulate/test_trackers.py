"""Several trackers share the blobs: whatever happens to them, every transfer ends as if nothing had
happened, and the origin is read about once."""

import functools
from dataclasses import replace

import pytest

from p2pdist.simulate.faults import (
    CLUSTER_KINDS,
    DatabaseLoss,
    Fault,
    RollingRestart,
    TrackerCut,
    TrackerFreeze,
    TrackerLoss,
    TrackerLosses,
    origin_limit,
    schedule,
)
from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation

HOSTS = 60
PIECES = 192
BASE = Scenario(HOSTS, PIECES * 65536, 1e6, latency_s=0.001, trackers=3)
SEEDS, MORE, FEW, CHUNK = 200, 4, 1, 25
"""FEW are of `make test`, MORE of `make test-slow` besides, and the others of `make test-long`."""


def run(*faults: Fault, base: Scenario = BASE) -> tuple[Simulation, Report]:
    simulation = Simulation(replace(base, faults=faults))
    return simulation, simulation.run()


@functools.cache
def healthy() -> Report:
    """The transfer to which nothing happens."""
    return run()[1]


def test_several_trackers_are_as_good_as_one() -> None:
    """Each blob is planned by its owner alone."""
    blobs = replace(BASE, blobs=8, size=16 * 65536, hosts=12)
    simulation, report = run(base=blobs)
    _, alone = run(base=replace(blobs, trackers=1))
    assert report.complete == alone.complete == 8 * 12
    assert report.makespan_s <= 1.3 * alone.makespan_s
    assert report.origin_ratio <= 1.05 * alone.origin_ratio
    assert sum(tracker.fleet is not None and bool(tracker.fleet.swarms) for tracker in simulation.trackers) > 1


FAULTS = {
    "the owner dies": TrackerLoss(4.0, None),
    "the owner dies and is back at once": TrackerLoss(4.0, 0.5),
    "the owner dies and comes back": TrackerLoss(4.0, 6.0),
    "the owner stands still": TrackerFreeze(4.0, 8.0),
    "the owner stands still for a moment": TrackerFreeze(4.0, 2.0),
    "the owner is cut off": TrackerCut(4.0, 8.0, frozenset(f"h{number:05d}" for number in range(0, HOSTS, 2))),
    "the owner is cut off from the database": TrackerCut(4.0, 8.0, frozenset()),
    "the database is away": DatabaseLoss(4.0, 60.0),
    "all are restarted in turn": RollingRestart(3.0),
    "an owner dies every two seconds": TrackerLosses(2.0, 0.5),
}
QUICK = ("the owner dies", "the owner is cut off", "the database is away")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_nothing_that_happens_to_a_tracker_delays_a_transfer_by_much(name: str) -> None:
    """Streams run on: the same transfer with three healthy trackers takes hardly less."""
    fault = FAULTS[name]
    _, report = run(fault)
    assert report.complete == HOSTS and not report.failed
    assert report.makespan_s <= 1.25 * healthy().makespan_s, report.makespan_s
    assert report.origin_ratio <= origin_limit([fault]), report.origin_ratio


def test_all_trackers_but_one_die() -> None:
    _, report = run(TrackerLoss(2.0, None, 0), TrackerLoss(4.0, None, 2))
    assert report.complete == HOSTS
    assert report.origin_ratio <= origin_limit([TrackerLoss(2.0, None)])


def test_an_owner_that_stands_still_at_the_end_hears_of_all_that_came() -> None:
    """Nobody takes over while the database is away; the books agree once the owner goes on."""
    simulation, report = run(DatabaseLoss(7.0, 12.0), TrackerFreeze(11.5, 12.0))
    assert report.complete == HOSTS
    assert simulation.world.now > 11.5 + 12.0


def test_hosts_that_start_while_the_owner_is_dead_find_the_next() -> None:
    late = replace(BASE, arrivals="uniform", arrivals_s=20.0)
    simulation, report = run(TrackerLoss(3.0, None), base=late)
    assert report.complete == HOSTS
    assert simulation.cluster is not None and simulation.cluster.database.stored is not None
    assert len(simulation.cluster.database.stored.trackers) == 2


@pytest.mark.slow
def test_a_tracker_that_is_back_gets_its_share_in_steps() -> None:
    """And many blobs move to it while they are pulled."""
    base = replace(BASE, hosts=6, blobs=16, size=48 * 65536)
    _, undisturbed = run(base=base)
    simulation, report = run(TrackerLoss(2.0, 5.0, 1), base=base)
    assert report.complete == 6 * 16
    assert report.origin_ratio <= undisturbed.origin_ratio + 0.5
    assert report.makespan_s <= 1.25 * undisturbed.makespan_s
    assert simulation.cluster is not None and simulation.cluster.database.stored is not None
    assert simulation.cluster.database.stored.epoch > 3


@pytest.mark.parametrize(
    "seeds",
    [
        range(FEW),
        pytest.param(range(FEW, MORE), marks=pytest.mark.slow),
        *(pytest.param(range(first, first + CHUNK), marks=pytest.mark.long) for first in range(MORE, SEEDS, CHUNK)),
    ],
    ids=lambda seeds: f"from {seeds[0]}",
)
def test_every_host_completes_or_fails_as_it_must(seeds: range) -> None:
    """Seeded schedules with faults of trackers among them; each ends with the invariants whole."""
    for seed in seeds:
        plain = replace(BASE, seed=seed).filled()
        duration_s = plain.size / plain.nic_bytes_s
        kinds = () if seed % 2 else (CLUSTER_KINDS[seed // 2 % len(CLUSTER_KINDS)], "crash")
        faults = schedule(
            seed, plain.host_names(), pieces=PIECES, duration_s=duration_s, kinds=kinds, trackers=BASE.trackers
        )
        _, report = run(*faults, base=replace(BASE, seed=seed))
        assert report.complete + report.failed + report.lost >= HOSTS, seed
        assert report.origin_ratio <= origin_limit(faults), (seed, report.origin_ratio)


def test_the_same_seed_gives_the_same_run() -> None:
    faults = (TrackerLoss(4.0, 6.0), TrackerFreeze(6.0, 4.0, 1))
    assert run(*faults)[1].fingerprint == run(*faults)[1].fingerprint
