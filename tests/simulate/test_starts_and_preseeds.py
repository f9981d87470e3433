"""Job starts and preseeds at once: a start takes hardly longer than alone, whatever is preseeded
meanwhile, and preseeds get done."""

from __future__ import annotations

import pytest

from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation

SIZE, RATE = 64 << 20, 20e6


def run(hosts: int, **more: float) -> tuple[Simulation, Report, list[float]]:
    """The simulation, its report, and when each blob was complete everywhere."""
    simulation = Simulation(Scenario(hosts, SIZE, RATE, **more))  # type: ignore[arg-type]
    report = simulation.run()
    ends = [
        max(
            host.pulls[blob.digest].completed_at or 0.0
            for host in simulation.hosts.values()
            if blob.digest in host.pulls
        )
        for blob in simulation.blobs
    ]
    return simulation, report, ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "starters", "more"),
    [
        (24, 0, {}),
        (24, 0, {"origin_bytes_s": RATE}),
        (40, 12, {}),
        (40, 3, {}),
    ],
    ids=["same hosts", "slow origin", "some of the hosts", "few of the hosts"],
)
def test_a_preseed_hardly_delays_a_start(hosts: int, starters: int, more: dict[str, float]) -> None:
    """Within a tenth of what the start takes alone. The hosts that only preseed have idle uplinks,
    and feed the hosts that start a job: these make the preseed wait. No host is called slow for
    giving way."""
    _, _, (alone,) = run(starters or hosts, **more)
    simulation, report, (start, preseed) = run(hosts, blobs=2, preseeds=1, starters=starters, **more)
    assert start <= 1.1 * alone
    assert preseed <= 2.5 * SIZE / RATE + 2.0
    assert report.origin_ratio == pytest.approx(1.0, abs=0.02)
    assert simulation.tracker.fleet is not None
    assert simulation.tracker.fleet.capacities.slow_hosts(now=0.0) == []


@pytest.mark.slow
def test_two_starts_share() -> None:
    """What the above would be without priorities."""
    _, _, (alone,) = run(24)
    _, _, (one, other) = run(24, blobs=2)
    assert min(one, other) >= 1.8 * alone


def test_preseeds_alone_are_as_fast_as_starts() -> None:
    _, _, (start,) = run(24)
    _, _, (preseed,) = run(24, preseeds=1)
    assert preseed == start
