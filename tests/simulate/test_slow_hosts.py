"""Slow hosts in a fleet that knows nothing of them yet: wherever they stand in the trees, the
others go on."""

from dataclasses import replace

import pytest

from p2pdist.simulate.scenario import Scenario, slow_share
from p2pdist.simulate.simulation import Simulation

NIC_BYTES_S = 3.2e6
HOSTS, RACKS = 64, 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [12, 13, 15])
def test_hosts_that_are_not_slow_are_done_nearly_in_time(seed: int) -> None:
    """In these runs a slow host stood at the top of a stripe, below another slow one, or with more
    children than upload slots: healthy hosts once took 1.5 to 11.8 times the bound."""
    rack_bytes_s = HOSTS / RACKS * NIC_BYTES_S / 4
    scenario = Scenario(HOSTS, 32 << 20, NIC_BYTES_S, seed=seed, racks=RACKS, rack_bytes_s=rack_bytes_s).filled()
    scenario = replace(scenario, time_limit_s=0.0)
    slow = tuple(slow_share(scenario, 0.06, 0.1, both=True))
    report = Simulation(replace(scenario, faults=slow)).run()
    assert report.healthy_p99_s <= 1.35 * report.healthy_bound_s
    assert report.rack_rx_ratio_max <= 1.05


def test_a_very_slow_host_is_not_sent_from_one_parent_to_the_next() -> None:
    """What has come of a piece is lost with each change: these hosts once took 2.6 times as long as
    their links do, and others gave up."""
    rack_bytes_s = 16 * NIC_BYTES_S / 4
    scenario = Scenario(32, 16 << 20, NIC_BYTES_S, seed=1, racks=2, rack_bytes_s=rack_bytes_s).filled()
    scenario = replace(scenario, time_limit_s=0.0)
    slow = tuple(slow_share(scenario, 0.06, 0.04, both=True))
    report = Simulation(replace(scenario, faults=slow)).run()
    assert report.makespan_s <= 1.2 * report.bound_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 7, 8, 9, 10])
@pytest.mark.parametrize("factor", [0.1, 0.02])
def test_people_are_told_of_a_slow_uplink_and_of_no_slow_downlink(seed: int, factor: float) -> None:
    """With a fiftieth of the rate its children leave the host before a piece has come. (With seed 6
    the host serves no other, and nothing shows.)"""
    scenario = Scenario(24, 16 << 20, NIC_BYTES_S, seed=seed).filled()
    for up in (True, False):
        slow = slow_share(scenario, 0.04, factor, up=up)
        report = Simulation(replace(scenario, faults=slow, time_limit_s=0.0)).run()
        assert report.slow_uplinks == tuple(fault.host for fault in slow if up)
