"""Whatever parts trackers from each other, two of them never plan a blob by the same epoch, and a
stripe has one lease at a time of the one that does: 300 seeds of each case.

A run raises InvariantBroken, with its seed and the virtual time, as soon as something does not hold
(p2pdist/simulate/cluster/checks.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import Assign
from p2pdist.simulate.cluster.checks import LeaseChecks
from p2pdist.simulate.faults import (
    Crash,
    RollingRestart,
    TrackerCut,
    TrackerFreeze,
    TrackerLoss,
    origin_limit,
    schedule,
)
from p2pdist.simulate.invariants import InvariantBroken
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation
from tracker.core.fleet import Fleet

HOSTS, PIECES, TRACKERS = 24, 96, 3
BASE = Scenario(HOSTS, PIECES * 65536, 1e6, latency_s=0.001, trackers=TRACKERS)
SEEDS, FEW, CHUNK = 300, 2, 20

planned = LeaseChecks.planned

CASES = {
    "the owner dies": ("owner",),
    "the owner stands still": ("freeze",),
    "the owner is cut off": ("isolate",),
    "the database is away": ("database",),
    "all are restarted in turn": ("roll",),
    "the owner is cut off and hosts die": ("isolate", "crash"),
    "the owner stands still and hosts leave": ("freeze", "leave"),
    "the owner dies without a database": ("owner", "database"),
}


def scenario(case: str, seed: int) -> Scenario:
    """One case of one seed. In every third of them hosts come while it happens."""
    plain = replace(BASE, seed=seed).filled()
    if seed % 3 == 0:
        plain = replace(plain, arrivals="uniform", arrivals_s=8.0)
    duration_s = plain.size / plain.nic_bytes_s
    faults = schedule(
        seed, plain.host_names(), pieces=PIECES, duration_s=duration_s, kinds=CASES[case], trackers=TRACKERS
    )
    return replace(plain, faults=faults, time_limit_s=0.0)


@pytest.mark.parametrize(
    "seeds",
    [
        range(FEW),
        *(pytest.param(range(first, min(first + CHUNK, SEEDS)), marks=pytest.mark.long) for first in range(FEW, SEEDS, CHUNK)),
    ],
    ids=lambda seeds: f"from {seeds[0]}",
)  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_a_stripe_has_one_lease_an_epoch_and_every_host_completes(case: str, seeds: range) -> None:
    for seed in seeds:
        chosen = scenario(case, seed)
        report = Simulation(chosen).run()
        assert report.complete + report.lost >= HOSTS and not report.failed, (case, seed)
        under_way = 3 * report.stripes / report.pieces  # as the owner changes, as it comes back, as a reader leaves
        assert report.origin_ratio <= origin_limit(chosen.faults) + under_way, (case, seed, report.origin_ratio)


def test_a_tracker_that_plans_by_the_epoch_of_another_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each has a session, the trackers take every blob for their own."""
    monkeypatch.setattr(LeaseChecks, "planned", planned_by_all)
    with pytest.raises(InvariantBroken, match=r" and \S+ plan \S+ in epoch"):
        Simulation(replace(BASE, hosts=12, blobs=8, size=16 * 65536)).run()


def planned_by_all(self: LeaseChecks, fleet: Fleet, message: Assign) -> None:
    """As if all plans of an epoch were of one blob."""
    plan = replace(message.plan, blob=digest_of(b"the same"))
    planned(self, fleet, structs.replace(message, plan=plan))


def test_cases_differ_from_seed_to_seed() -> None:
    """And hosts crash or leave where the case says so."""
    drawn = [scenario(case, seed).faults for case in CASES for seed in range(20)]
    assert len({*drawn}) == len(drawn)
    kinds = {type(fault) for faults in drawn for fault in faults}
    assert kinds >= {TrackerLoss, TrackerFreeze, TrackerCut, RollingRestart, Crash}
