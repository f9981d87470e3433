"""Five hundred seeded schedules of faults, 60 hosts each: every host ends complete or correctly
failed, and no invariant is broken.

A run raises InvariantBroken, with its seed and the virtual time, as soon as something does not
hold. To see one again: `p2pdist simulate --hosts 60 --size 6MiB --nic 1MB/s --latency 1ms --faults
any --seed SEED`.
"""

import pytest

from p2pdist.model.errors import Corrupt
from p2pdist.simulate.faults import OriginWrong, origin_limit, schedule
from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation

HOSTS = 60
PIECES = 96
SEEDS = 500
CHUNK = 25
FEW, MORE = 3, 8
"""So many are of `make test`, so many of `make test-slow` besides; `make test-long` runs all."""

DUPLICATES_MAX = 30
"""Of the 5,760 pieces of a run, so many may arrive twice at most: pieces under way when a host
changes parents."""


def scenario(seed: int) -> Scenario:
    plain = Scenario(HOSTS, PIECES * 65536, 1e6, seed=seed, latency_s=0.001).filled()
    faults = schedule(seed, plain.host_names(), pieces=PIECES, duration_s=plain.size / plain.nic_bytes_s)
    return Scenario(HOSTS, plain.size, plain.nic_bytes_s, seed=seed, latency_s=0.001, faults=faults)


def outcome(seed: int) -> tuple[Simulation, Report]:
    simulation = Simulation(scenario(seed))
    return simulation, simulation.run()


@pytest.mark.parametrize(
    "seeds",
    [
        range(FEW),
        pytest.param(range(FEW, MORE), marks=pytest.mark.slow),
        *(
            pytest.param(range(first, first + CHUNK), marks=pytest.mark.long)
            for first in range(MORE, SEEDS + MORE, CHUNK)
        ),
    ],
    ids=lambda seeds: f"from {seeds[0]}",
)
def test_every_host_completes_or_fails_as_it_must(seeds: range) -> None:
    """No host waits forever, nothing wrong is stored, the origin is spared, and hardly a piece is
    received twice."""
    for seed in seeds:
        simulation, report = outcome(seed)
        faults = simulation.scenario.faults
        assert report.complete + report.failed + report.lost >= HOSTS, seed
        assert report.origin_ratio <= origin_limit(faults), (seed, report.origin_ratio)
        assert report.duplicates <= DUPLICATES_MAX, (seed, report.duplicates)
        errors = [pull.error for host in simulation.hosts.values() for pull in host.pulls.values() if pull.error]
        if any(isinstance(fault, OriginWrong) for fault in faults):
            assert report.complete == 0 and all(isinstance(error, Corrupt) for error in errors), seed
        else:
            assert not errors and report.complete >= HOSTS - report.lost, seed
