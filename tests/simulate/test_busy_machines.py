"""What slows every host at once (a busy or paused machine, a shared link, a limit) is no host's
fault: leases stay where they are, and the origin is read once."""

from __future__ import annotations

import pytest

from p2pdist.simulate.faults import Busy, Fault, Late, Partition, Slow
from p2pdist.simulate.network import TRACKER_NAME, Cut
from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation

HOSTS, SIZE, NIC_BYTES_S = 48, 12 << 20, 1e6
NAMES = Scenario(HOSTS, SIZE, NIC_BYTES_S).host_names()
AT_S, FOR_S = 4.0, 3.0


def broadcast(*faults: Fault, seed: int = 1, hosts: int = HOSTS) -> tuple[Report, Simulation]:
    simulation = Simulation(Scenario(hosts, SIZE, NIC_BYTES_S, seed=seed, faults=faults))
    return simulation.run(), simulation


def copies(simulation: Simulation) -> float:
    return simulation.origin.bytes_sent / SIZE


@pytest.mark.parametrize(
    "fault",
    [
        Busy(AT_S, FOR_S, 0.1),
        pytest.param(Busy(AT_S, FOR_S, 0.3), marks=pytest.mark.slow),
        pytest.param(Busy(0.5, FOR_S, 0.1), marks=pytest.mark.slow),
        Busy(AT_S, FOR_S, 0.0),
        pytest.param(Busy(AT_S, 3 * FOR_S, 0.15), marks=pytest.mark.slow),
        pytest.param(Busy(AT_S, FOR_S, 0.1, frozenset(NAMES)), marks=pytest.mark.slow),
        Busy(AT_S, FOR_S, 0.0, frozenset([TRACKER_NAME])),
    ],
    ids=["a tenth", "a third", "at the start", "paused", "for long", "hosts alone", "the tracker alone"],
)
def test_the_origin_is_read_once_while_all_processes_are_slow(fault: Busy) -> None:
    """Up to a quarter was once read again: each host complained of its parent at the same moment,
    and readers lost their leases."""
    report, simulation = broadcast(fault)
    assert copies(simulation) <= 1.01
    assert report.makespan_s <= 1.1 * report.bound_s + fault.for_s


def test_the_origin_is_read_once_while_all_links_are_slow() -> None:
    """As behind a switch that others use as well. A host waits for the piece under way, and
    complains of no parent for giving nothing else."""
    names = NAMES[: HOSTS // 2]
    _, simulation = broadcast(*(Slow(name, AT_S, 0.1, both=True) for name in names), hosts=len(names))
    assert copies(simulation) <= 1.03
    assert simulation.tracker.fleet is not None
    assert not [host.name for host in simulation.tracker.fleet.hosts.values() if host.penalties]


def test_a_host_that_receives_slowly_does_not_turn_from_the_only_peer_to_the_origin() -> None:
    """It came when the other had everything. No other parent gives it more, and the origin would
    not either."""
    late = NAMES[1]
    _, simulation = broadcast(Late(late, 20.0), Slow(late, 0.0, 0.05, both=True), hosts=2)
    assert copies(simulation) == 1.0


def test_a_peer_that_pauses_for_a_moment_is_waited_for() -> None:
    holder, late = NAMES[:2]
    _, simulation = broadcast(Late(late, 20.0), Busy(22.0, 1.0, 0.0, frozenset([holder])), hosts=2)
    assert copies(simulation) == 1.0


def test_hosts_outside_a_cut_wait_for_no_parent_within_it() -> None:
    """Some were parted from hosts that the cut put out of reach, and were given these again and
    again instead of the origin."""
    names = Scenario(40, 24 << 20, 4e6).host_names()
    cut = Cut(frozenset(names[each] for each in (2, 6, 22, 23, 26, 28, 30, 32)))
    simulation = Simulation(Scenario(40, 24 << 20, 4e6, seed=12, faults=(Partition(cut, 3.7138, 40.0),)))
    report = simulation.run()
    assert report.p50_s < 30.0
    assert report.origin_ratio < 1.5
