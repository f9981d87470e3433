"""Shares of the hosts that are slow, die or have another link, and a tracker that dies again and
again."""

from dataclasses import replace

import pytest

from p2pdist.simulate.faults import Fault, TrackerLosses, origin_limit
from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario, crash_share, slow_share
from p2pdist.simulate.simulation import Simulation

BASE = Scenario(40, 96 << 16, 2e6, latency_s=0.001)


def run(*faults: Fault, base: Scenario = BASE) -> tuple[Simulation, Report]:
    simulation = Simulation(replace(base, faults=faults))
    return simulation, simulation.run()


def test_a_share_is_drawn_from_the_seed() -> None:
    drawn = slow_share(BASE, 0.05, 0.1)
    assert len({slow.host for slow in drawn}) == 2
    assert {(slow.at_s, slow.share, slow.both) for slow in drawn} == {(0.0, 0.1, False)}
    assert drawn == slow_share(BASE, 0.05, 0.1) != slow_share(replace(BASE, seed=2), 0.05, 0.1)
    assert (len(slow_share(BASE, 0.001, 0.1)), slow_share(BASE, 0.0, 0.1)) == (1, ())
    assert len(slow_share(BASE, 1.0, 0.1)) == len(crash_share(BASE, 1.0)) == 40


def test_slow_uplinks_are_no_healthy_hosts_but_have_fast_downlinks() -> None:
    """Every tenth host sends at a tenth: all complete in a time that no slow downlink would
    allow."""
    faults = slow_share(BASE, 0.1, 0.1)
    simulation, report = run(*faults)
    assert (report.complete, report.healthy) == (40, 36)
    for fault in faults:
        link = simulation.hosts[fault.host].link
        assert (link.up_bytes_s, link.down_bytes_s) == (pytest.approx(2e5), 2e6)
    assert report.bound_s == pytest.approx(40 * (96 << 16) / (4e6 + 36 * 2e6 + 4 * 2e5))
    assert report.healthy_bound_s <= report.bound_s
    assert (
        report.healthy_p50_s <= report.healthy_p99_s <= report.healthy_p999_s <= report.makespan_s < 10 * report.bound_s
    )


def test_slow_downlinks_wait_for_themselves_alone() -> None:
    """Their own time is ten times the others' at least, and the percentiles of healthy hosts do not
    show it."""
    _, report = run(*slow_share(BASE, 0.05, 0.1, both=True))
    needs_s = (96 << 16) / 2e6
    assert report.complete == 40
    assert report.bound_s == pytest.approx(10 * needs_s)
    assert report.healthy_bound_s < 1.1 * needs_s
    assert report.makespan_s >= 10 * needs_s > report.healthy_p999_s


def test_crashed_hosts_are_lost_and_the_others_complete() -> None:
    faults = crash_share(BASE, 0.1)
    assert len(faults) == 4 and {fault.power for fault in faults} == {False, True}
    assert all(
        0.0 <= fault.at_s <= BASE.filled().bound_s(BASE.parties()) and fault.back_after_s is None for fault in faults
    )
    _, report = run(*faults)
    assert (report.complete, report.lost, report.healthy) == (36, 4, 36)
    assert report.duplicate_ratio <= 0.05


def test_hosts_that_come_later_die_later() -> None:
    base = replace(BASE, arrivals="uniform", arrivals_s=100.0)
    starts = dict(zip(base.host_names(), (party.starts_at for party in base.parties()), strict=True))
    assert all(fault.at_s >= starts[fault.host] for fault in crash_share(base, 0.5))


def test_a_tracker_that_dies_every_second_delays_little() -> None:
    """It dies at least twice within the transfer, and no longer once all is done."""
    base = replace(BASE, size=192 << 16)
    simulation, report = run(TrackerLosses(1.0, 0.4), base=base)
    assert report.complete == 40
    assert simulation.tracker._life >= 4
    assert report.makespan_s <= 2.0 * report.bound_s
    assert report.origin_ratio <= origin_limit([TrackerLosses(1.0, 0.4)])
    assert simulation.tracker.fleet is not None


def test_other_rates_are_links_of_some_hosts() -> None:
    """A tenth has a quarter of the rate, up and down: they are last, and the bound knows it."""
    simulation, report = run(base=replace(BASE, other_nics=((5e5, 0.1),)))
    slow = [host for host in simulation.hosts.values() if host.link.down_bytes_s == 5e5]
    assert (len(slow), report.complete, report.healthy) == (4, 40, 40)
    assert report.bound_s == pytest.approx((96 << 16) / 5e5)
    ends = {host.name: pull.completed_at or 0.0 for host in simulation.hosts.values() for pull in host.pulls.values()}
    assert min(ends[host.name] for host in slow) >= report.bound_s


def test_bytes_that_came_for_nothing_are_counted() -> None:
    """What was on its way to a closed stream counts too, not only what was stored twice."""
    simulation, report = run(*crash_share(BASE, 0.25), *slow_share(BASE, 0.25, 0.05))
    pulls = [pull for host in simulation.hosts.values() for pull in host.pulls.values()]
    again = sum(pull.bytes_again for pull in pulls)
    assert again >= sum(pull.duplicates for pull in pulls) * 65536
    assert report.duplicate_ratio == again / sum(pull.bytes_origin + pull.bytes_peers for pull in pulls)
    assert 0.0 < report.duplicate_ratio < 0.1
