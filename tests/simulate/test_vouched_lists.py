"""Broadcasts without a piece list: hosts vouch for what they read, lie, and upstream is as odd as
upstreams are.

A run raises InvariantBroken when a host takes wrong bytes for whole, a wrong list is held, or a
host is blamed that stated nothing wrong.
"""

from __future__ import annotations

from random import Random

import pytest

from p2pdist.core.download.download import Download
from p2pdist.core.vouched.read_ahead import LEAD_MIN, ReadAhead
from p2pdist.core.vouched.whole import WholeChecked
from p2pdist.model.errors import Corrupt, P2PDistError
from p2pdist.simulate.faults import (
    Crash,
    Fault,
    Late,
    LyingVoucher,
    OriginOutage,
    OriginWrong,
    TrackerLoss,
    TrackerLosses,
    UpstreamBreak,
    UpstreamChange,
    UpstreamStall,
    UpstreamWhole,
    WrongBytes,
    schedule,
)
from p2pdist.simulate.invariants import InvariantBroken
from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation
from p2pdist.simulate.vouching.listing import Listing
from tracker.core.vouching import pause

HOSTS, PIECES = 16, 64
SIZE = PIECES * 65536
NIC, ORIGIN = 5e6, 10e6
LIARS, CHUNK = 1000, 20
SCHEDULES = 200


def scenario(*faults: Fault, seed: int = 1, hosts: int = HOSTS, size: int = SIZE, vouched: bool = True) -> Scenario:
    return Scenario(hosts, size, NIC, seed=seed, origin_bytes_s=ORIGIN, latency_s=0.001, vouched=vouched, faults=faults)


def run(*faults: Fault, seed: int = 1, **more: int) -> tuple[Simulation, Report]:
    simulation = Simulation(scenario(*faults, seed=seed, **more))
    return simulation, simulation.run()


def errors(simulation: Simulation) -> list[P2PDistError]:
    return [pull.error for host in simulation.hosts.values() for pull in host.pulls.values() if pull.error]


# -- without faults


def test_a_list_that_grows_with_the_reading_costs_next_to_nothing() -> None:
    """Beside a broadcast whose list was made before: one copy, and hardly a moment more."""
    took = {}
    for vouched in (False, True):
        report = Simulation(scenario(size=8 * SIZE, vouched=vouched)).run()
        assert report.complete == HOSTS
        assert report.origin_ratio == 1.0
        assert report.rejected == report.duplicates == 0
        took[vouched] = report.makespan_s
    assert took[True] <= 1.03 * took[False]


@pytest.mark.parametrize("ahead", [True, False], ids=["as it is", "a few pieces ahead"])
def test_in_a_large_fleet_readers_are_ahead_of_the_list(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Hashes gather there for as long as many pieces take to be read, as here with a longer pause:
    a reader that waited for its children would wait for the list each time."""
    monkeypatch.setattr(pause, "PAUSE_S_PER_HOST", 1.0 / HOSTS)
    if not ahead:
        monkeypatch.setattr(ReadAhead, "lead_max", LEAD_MIN)
    took = {vouched: Simulation(scenario(size=4 * SIZE, vouched=vouched)).run().makespan_s for vouched in (False, True)}
    assert (took[True] <= 2 * took[False]) == ahead


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_small_swarms_need_no_others(hosts: int) -> None:
    _, report = run(hosts=hosts)
    assert report.complete == hosts
    assert report.origin_ratio == 1.0


def test_a_blob_of_one_piece() -> None:
    _, report = run(size=1000)
    assert report.complete == HOSTS
    assert report.origin_ratio == 1.0


def test_late_hosts_are_sent_the_list() -> None:
    _, report = run(*(Late(f"h{number:05d}", 0.1 * number) for number in range(1, HOSTS)))
    assert report.complete == HOSTS
    assert report.origin_ratio == 1.0


def test_without_vouching_nothing_is_sent_of_lists() -> None:
    simulation = Simulation(scenario(vouched=False))
    simulation.run()
    assert simulation.tracker.fleet is not None
    assert not simulation.tracker.fleet.vouching._cases


# -- lies


def liar(seed: int) -> LyingVoucher:
    """The first reader of a stripe lies, in one of the ways that there are."""
    random = Random(f"liar {seed}")
    return LyingVoucher(
        share=random.choice((1.0, 0.2, 0.03)),
        stores=random.random() < 0.6,
        judges=random.random() < 0.4,
        reader=random.choice((0, 1)),
    )


@pytest.mark.parametrize(
    "seeds",
    [
        range(6),
        *(pytest.param(range(first, first + CHUNK), marks=pytest.mark.long) for first in range(6, LIARS + 6, CHUNK)),
    ],
    ids=lambda seeds: f"from {seeds[0]}",
)
def test_a_lying_voucher_is_found(seeds: range) -> None:
    """All hosts finish, none with wrong bytes, the liar is blamed and no other host, and upstream
    is read about once more."""
    for seed in seeds:
        simulation, report = run(liar(seed), seed=seed)
        assert report.complete == HOSTS, seed
        assert set(report.blamed) == set(simulation.invariants.lists.misled), seed
        assert report.rounds == len(report.blamed), seed
        assert report.origin_ratio <= 2.5, (seed, report.origin_ratio)


def test_two_liars_are_found() -> None:
    simulation, report = run(LyingVoucher(reader=0), LyingVoucher(reader=1))
    assert report.complete == HOSTS
    assert len(report.blamed) == 2
    assert set(report.blamed) == set(simulation.invariants.lists.liars)


def test_a_liar_among_two_hosts() -> None:
    """The other one finds out, and reads itself."""
    simulation, report = run(LyingVoucher(), hosts=2)
    assert report.complete == 2
    assert set(report.blamed) <= set(simulation.invariants.lists.liars)


def test_a_host_whose_upstream_gives_it_other_bytes_alone_completes() -> None:
    """It is its own arbiter."""
    simulation, report = run(UpstreamChange(frozenset({3, 9}), 0.0, 0.5), hosts=1)
    assert simulation.invariants.lists.misled
    assert report.complete == 1
    assert report.blamed == ()


def test_wrong_bytes_of_a_host_on_the_way_are_found_by_the_list() -> None:
    _, report = run(WrongBytes("h00003", 0.0, 1.0))
    assert report.complete == HOSTS
    assert report.rounds == 0


# -- odd upstreams


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pieces", [{0}, set(range(0, PIECES, 7)), set(range(PIECES))], ids=["one", "some", "all"])
def test_an_upstream_that_changes_for_a_while(seed: int, pieces: set[int]) -> None:
    """Its readers cannot know; once it has the right bytes again an arbiter reads them."""
    simulation, report = run(UpstreamChange(frozenset(pieces), 0.2, 0.5), seed=seed)
    assert report.complete == HOSTS
    assert report.rounds <= 2
    assert set(report.blamed) <= set(simulation.invariants.lists.misled)


@pytest.mark.parametrize("fault", [OriginWrong(frozenset({3})), UpstreamChange(frozenset({3, 7}), 0.0, None)])
def test_an_upstream_that_is_wrong_ends_the_pulls(fault: Fault) -> None:
    """After two copies: no third reader would tell more."""
    simulation, report = run(fault)
    assert report.complete == 0
    assert report.failed == HOSTS
    assert all(isinstance(error, Corrupt) and "upstream" in error.what for error in errors(simulation))
    assert report.origin_ratio <= 2.2
    assert report.blamed == ()


@pytest.mark.parametrize(
    "fault",
    [UpstreamStall(0.3, 3.0), OriginOutage(0.3, 2.0), UpstreamBreak(0.3), UpstreamWhole()],
    ids=["stalls", "away", "breaks off", "no ranges"],
)
def test_odd_upstreams_cost_time_and_no_trust(fault: Fault) -> None:
    _, report = run(fault)
    assert report.complete == HOSTS
    assert report.rounds == 0
    assert report.blamed == ()
    assert report.origin_ratio <= 2.1


# -- the tracker, and hosts that go


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("away_s", [0.5, 3.0, None])
def test_a_tracker_that_is_lost_on_the_way(seed: int, away_s: float | None) -> None:
    """Hosts give each other what they know of the list, and a new tracker learns it from them."""
    _, report = run(TrackerLoss(0.4, away_s), seed=seed)
    assert report.complete == HOSTS
    assert report.origin_ratio <= 1.5


def test_a_tracker_that_dies_again_and_again() -> None:
    _, report = run(TrackerLosses(0.7, 0.2), size=4 * SIZE)
    assert report.complete == HOSTS
    assert report.origin_ratio <= 1.6


def test_a_tracker_that_is_lost_in_a_dispute_learns_of_it_again() -> None:
    simulation, report = run(LyingVoucher(), TrackerLoss(1.05, 0.5))
    assert report.complete == HOSTS
    assert set(report.blamed) <= set(simulation.invariants.lists.liars)


def test_late_hosts_of_a_new_tracker_hear_the_whole_list() -> None:
    """The hosts that read are complete, or gone; the others were told."""
    late = [Late(f"h{number:05d}", 3.0) for number in range(12, HOSTS)]
    _, report = run(TrackerLoss(1.5, 0.5), *late)
    assert report.complete == HOSTS
    assert report.origin_ratio <= 1.1


@pytest.mark.parametrize("seed", range(3))
def test_readers_that_die_take_no_list_with_them(seed: int) -> None:
    """What they stated is known; what they read and did not state is read again."""
    simulation = Simulation(scenario(seed=seed))
    simulation.run()
    readers = [
        name for name, host in simulation.hosts.items() if any(pull.bytes_origin for pull in host.pulls.values())
    ]
    _, report = run(*(Crash(name, 0.4, None) for name in readers), seed=seed)
    assert report.complete >= HOSTS - len(readers)
    assert report.origin_ratio <= 2.0


@pytest.mark.parametrize("seed", range(3))
def test_an_arbiter_that_dies_is_replaced(seed: int) -> None:
    """The host that has the most pieces when a round begins is not known before the run; crashes
    spread over all but the readers hit it now and then."""
    crashes = [Crash(f"h{number:05d}", 1.0 + 0.05 * number, None) for number in range(2, 12)]
    simulation, report = run(LyingVoucher(), *crashes, seed=seed)
    assert report.complete + report.lost >= HOSTS
    assert set(report.blamed) <= set(simulation.invariants.lists.liars)


@pytest.mark.parametrize(
    "seeds",
    [
        range(2),
        *(pytest.param(range(first, first + 20), marks=pytest.mark.long) for first in range(2, SCHEDULES + 2, 20)),
    ],
    ids=lambda seeds: f"from {seeds[0]}",
)
@pytest.mark.parametrize("lies", [False, True], ids=["honest", "liar"])
def test_any_faults(seeds: range, lies: bool) -> None:
    """Every host completes or fails as it must, whatever else goes wrong, and a liar may be among
    them."""
    for seed in seeds:
        plain = Scenario(30, 96 * 65536, 1e6, seed=seed).filled()
        faults = schedule(seed, plain.host_names(), pieces=96, duration_s=plain.size / plain.nic_bytes_s)
        faults = (*faults, liar(seed)) if lies else faults
        simulation = Simulation(Scenario(30, plain.size, 1e6, seed=seed, latency_s=0.001, faults=faults, vouched=True))
        report = simulation.run()
        assert report.complete + report.failed + report.lost >= 30, seed
        assert set(report.blamed) <= set(simulation.invariants.lists.misled), seed


# -- the checks themselves


def test_a_host_that_takes_wrong_bytes_for_whole_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Listing._checked

    def careless(self: Listing, download: Download, check: int) -> None:
        if self._host.name == "h00005":
            self._host.submit(self._pull, WholeChecked(True, check))
        else:
            checked(self, download, check)

    monkeypatch.setattr(Listing, "_checked", careless)
    with pytest.raises(InvariantBroken, match="wrong bytes for the whole"):
        run(LyingVoucher())
