"""Hosts that start one after another."""

import pytest

from p2pdist.simulate.scenario import KINDS, Scenario, start_times
from p2pdist.simulate.simulation import Simulation


@pytest.mark.parametrize("kind", KINDS)
def test_starts_depend_on_the_seed_and_the_first_is_at_0(kind: str) -> None:
    times = start_times(kind, 30.0, 500, 7)
    assert times == start_times(kind, 30.0, 500, 7)
    assert (len(times), min(times)) == (500, 0.0)
    assert (times != start_times(kind, 30.0, 500, 8)) is (kind != "burst")


def test_the_curves_have_their_shapes() -> None:
    """How many of 2,000 hosts have started by half of the time: all, half, about half, a
    quarter."""
    early = {kind: sum(1 for time in start_times(kind, 60.0, 2000, 1) if time <= 30.0) / 2000 for kind in KINDS}
    assert early["burst"] == 1.0
    assert early["uniform"] == pytest.approx(0.5, abs=0.05)
    assert early["poisson"] == pytest.approx(0.5, abs=0.06)
    assert early["ramp"] == pytest.approx(0.25, abs=0.04)
    assert max(start_times("uniform", 60.0, 2000, 1)) <= 60.0
    assert max(start_times("poisson", 60.0, 2000, 1)) == pytest.approx(60.0, rel=0.1)
    with pytest.raises(ValueError, match="no arrivals of the kind 'flood'"):
        start_times("flood", 1.0, 2, 1)


@pytest.mark.parametrize("kind", ["uniform", "poisson", "ramp"])
def test_a_hosts_time_counts_from_its_own_start(kind: str) -> None:
    """The blob takes 2 s alone, the hosts come over 20 s: each is nearly as fast as alone, and the
    last ends after the last start."""
    scenario = Scenario(20, 64 << 16, 2.1e6, arrivals=kind, arrivals_s=20.0)
    simulation = Simulation(scenario)
    report = simulation.run()
    last = max(party.starts_at for party in simulation.parties)
    assert report.complete == 20
    assert report.bound_s == pytest.approx(last + (64 << 16) / 2.1e6)
    assert report.p50_s <= 4.0 < last <= report.makespan_s
    assert 1.0 <= report.origin_ratio <= 1.4
    assert 1.0 <= report.own_ratio_max == pytest.approx(max(owns(simulation)) / ((64 << 16) / 2.1e6))
    assert report.completions[-1] == report.makespan_s


def owns(simulation: Simulation) -> list[float]:
    found = []
    for host, party in zip(simulation.hosts.values(), simulation.parties, strict=True):
        for pull in host.pulls.values():
            assert pull.joined_at == party.starts_at
            found.append((pull.completed_at or 0.0) - party.starts_at)
    return found


def test_no_host_is_held_up_by_hosts_that_start_later() -> None:
    """24 hosts over half the bound: what each needs beyond its own bound are the levels above it,
    not the hosts that start after it."""
    scenario = Scenario(24, 64 << 20, 5e6, arrivals="uniform", arrivals_s=6.7, piece_size=65536)
    assert Simulation(scenario).run().own_ratio_max <= 1.06
