"""Faults one at a time: what each may cost, and how pulls end."""

import pytest

from p2pdist.model.errors import Corrupt, Unavailable
from p2pdist.simulate.faults import (
    Crash,
    Fault,
    Late,
    OriginOutage,
    OriginWrong,
    Partition,
    Silent,
    Slow,
    TrackerLoss,
    WrongBytes,
    schedule,
)
from p2pdist.simulate.network import Cut
from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation

PIECES = 128


def run(*faults: Fault, hosts: int = 24, seed: int = 1, patience_s: float = 120.0) -> tuple[Simulation, Report]:
    """24 hosts, 128 pieces of 64 KiB at 1 MB/s: 8.4 s when nothing goes wrong."""
    scenario = Scenario(
        hosts, PIECES * 65536, 1e6, seed=seed, latency_s=0.001, faults=tuple(faults), patience_s=patience_s
    )
    simulation = Simulation(scenario)
    return simulation, simulation.run()


def test_losing_the_tracker_costs_nothing() -> None:
    """Streams go on while the tracker is away; the next one takes them over as they are. Also when
    it dies again and again."""
    _, undisturbed = run()
    for losses in ([TrackerLoss(3.0, 1.0)], [TrackerLoss(1.0 + 1.5 * number, 0.5) for number in range(5)]):
        _, report = run(*losses)
        assert report.complete == 24
        assert report.origin_ratio == 1.0
        assert report.duplicates == 0
        assert report.makespan_s <= undisturbed.makespan_s * 1.02


def test_a_crashed_host_does_not_stop_the_others() -> None:
    """Wherever it stands in the trees: the others complete within twice the bound, and the origin
    reads little again."""
    for number in range(0, 24, 4):
        simulation, report = run(Crash(f"h{number:05d}", 3.0, None))
        assert (report.complete, report.lost) == (23, 1)
        assert report.makespan_s <= 2.2 * report.bound_s
        assert report.origin_ratio <= 1.15
        assert simulation.hosts[f"h{number:05d}"].running is False


@pytest.mark.parametrize("power", [False, True])
def test_a_host_that_comes_back_goes_on_with_what_its_disk_holds(power: bool) -> None:
    """What was verified before the crash is not fetched again."""
    simulation, report = run(Crash("h00007", 4.0, 1.5, power))
    assert report.complete == 24
    pull = simulation.hosts["h00007"].pulls[simulation.blobs[0].digest]
    assert pull.duplicates == 0
    assert pull.bytes_peers + pull.bytes_origin == PIECES * 65536


def test_wrong_bytes_are_never_stored_and_their_source_is_left_alone() -> None:
    """Two hosts spoil all or some of what they send: all hosts complete, and few pieces are
    rejected."""
    _, report = run(WrongBytes("h00003", 0.0, 1.0), WrongBytes("h00011", 0.0, 0.3))
    assert report.complete == 24
    assert 0 < report.rejected <= 24


def test_a_silent_host_is_left() -> None:
    """It takes part, receives, and gives nothing: its children move on."""
    _, report = run(Silent("h00005", 0.0))
    assert report.complete == 24
    assert report.makespan_s <= 2.5 * report.bound_s


def test_a_slow_host_loses_its_upload_slots() -> None:
    """One uplink at a tenth: no host waits for it for long."""
    for number in range(0, 24, 6):
        _, report = run(Slow(f"h{number:05d}", 0.0, 0.1))
        assert report.complete == 24
        assert report.makespan_s <= 2.0 * report.bound_s


def test_both_sides_of_a_partition_complete_once_it_heals() -> None:
    """Half of the hosts are cut off from the rest, from the tracker and from the origin."""
    group = frozenset(f"h{number:05d}" for number in range(12))
    _, report = run(Partition(Cut(group, True, True, True), 3.0, 6.0))
    assert report.complete == 24
    assert report.makespan_s <= 3.0 + 6.0 + 2 * report.bound_s


def test_an_origin_that_is_away_for_a_while_is_waited_for() -> None:
    _, report = run(OriginOutage(2.0, 5.0))
    assert report.complete == 24
    assert report.origin_ratio <= 1.3


def test_an_origin_that_stays_away_is_given_up() -> None:
    """What the origin has not given no host can have: every pull ends as unavailable, after its
    patience."""
    simulation, report = run(OriginOutage(2.0, None), patience_s=20.0)
    assert (report.complete, report.failed) == (0, 24)
    errors = [pull.error for host in simulation.hosts.values() for pull in host.pulls.values()]
    assert all(isinstance(error, Unavailable) for error in errors)


@pytest.mark.parametrize("wrong", [{5}, {0, 127}, set(range(PIECES))])
def test_wrong_content_at_the_origin_ends_every_pull(wrong: set[int]) -> None:
    """No host stores it, and none waits for long: two hosts that met it are enough."""
    simulation, report = run(OriginWrong(frozenset(wrong)))
    assert (report.complete, report.failed) == (0, 24)
    assert simulation.ended_at <= 1.5 * report.bound_s
    for host in simulation.hosts.values():
        for pull in host.pulls.values():
            assert isinstance(pull.error, Corrupt)
            assert not any(piece in pull.have for piece in wrong)


def test_late_hosts_are_served_by_complete_hosts() -> None:
    """They come when all is over: the origin is not read again."""
    _, report = run(*(Late(f"h{number:05d}", 12.0 + number / 10) for number in range(8)))
    assert report.complete == 24
    assert report.origin_ratio == 1.0


def test_a_piece_that_takes_seconds_is_no_stall() -> None:
    """Over a very slow link a piece takes longer than the first stall limit; patience grows instead
    of the tree being torn up for ever."""
    scenario = Scenario(8, 8 * 65536, 30e3, seed=1, latency_s=0.02)
    report = Simulation(scenario).run()
    assert report.complete == 8
    assert report.origin_ratio <= 3.5


def test_a_schedule_of_named_kinds_has_these_only() -> None:
    names = [f"h{number:05d}" for number in range(60)]
    for seed in range(20):
        drawn = schedule(seed, names, pieces=96, duration_s=6.0, kinds=("crash", "tracker"))
        assert {type(fault) for fault in drawn} == {Crash, TrackerLoss}
