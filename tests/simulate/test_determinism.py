"""The same seed gives the same run, whatever the process."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from p2pdist.simulate.faults import schedule
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation

RUN = """
from dataclasses import replace
from p2pdist.simulate.faults import TrackerLoss, TrackerLosses, schedule
from p2pdist.simulate.scenario import crash_share, slow_share
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation
for seed in (3, 7, 14):
    names = [f"h{number:05d}" for number in range(30)]
    faults = schedule(seed, names, pieces=64, duration_s=4.0)
    print(Simulation(Scenario(30, 64 * 65536, 1e6, seed=seed, faults=faults, blobs=2)).run())
base = Scenario(
    30, 64 * 65536, 1e6, seed=5, racks=5, rack_bytes_s=1.5e6, zones=2, arrivals="ramp", arrivals_s=3.0, other_nics=((5e5, 0.1),)
)
faults = (*slow_share(base, 0.1, 0.1), *crash_share(base, 0.1), TrackerLosses(6.5, 0.5))
print(Simulation(replace(base, faults=faults)).run())
for policy in ("auto", "swarm"):
    print(Simulation(replace(base, faults=(*faults[:-1], TrackerLoss(3.0, 20.0)), transport=policy)).run())
"""


def run_with(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_processes_with_different_hash_seeds_run_alike() -> None:
    """No order of a set or of memory addresses reaches a decision: every figure and the fingerprint
    agree."""
    first = run_with("1")
    assert first.count("fingerprint") == 6
    assert first == run_with("2") == run_with("31337")


def test_seeds_differ() -> None:
    """The fingerprint tells runs apart, or the test above would prove nothing."""
    base = Scenario(10, 64 * 65536, 1e6, arrivals="uniform", arrivals_s=1.0)
    prints = {Simulation(replace(base, seed=seed)).run().fingerprint for seed in range(4)}
    assert len(prints) == 4


def test_a_schedule_depends_on_its_seed_alone() -> None:
    names = [f"h{number:05d}" for number in range(60)]
    for seed in range(20):
        assert schedule(seed, names, pieces=96, duration_s=6.0) == schedule(seed, names, pieces=96, duration_s=6.0)
    assert len({schedule(seed, names, pieces=96, duration_s=6.0) for seed in range(50)}) == 50
