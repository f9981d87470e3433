"""The bound, each of its terms in turn."""

import pytest

from p2pdist.simulate.faults import Late, Slow
from p2pdist.simulate.scenario import Party, Scenario, bound, own_bounds


def alike(hosts: int, rate: float, starts_at: float = 0.0, rack: int = -1) -> list[Party]:
    return [Party(starts_at, rate, rate, rack)] * hosts


def test_of_equal_hosts_it_is_the_largest_of_three() -> None:
    assert bound(100, alike(1, 10.0), 5.0) == 20.0
    assert bound(100, alike(4, 10.0), 50.0) == 10.0
    assert bound(100, alike(1000, 10.0), 11.0) == pytest.approx(10.0, rel=0.01)
    assert bound(120, alike(3, 10.0), 10.0) == 12.0
    assert bound(100, [], 10.0) == 0.0


def test_a_slow_downlink_counts_when_its_host_must_complete() -> None:
    slow = Party(0.0, 10.0, 1.0)
    assert bound(100, [*alike(4, 10.0), slow], 50.0) == 100.0
    assert bound(100, [*alike(4, 10.0), slow._replace(counts=False)], 50.0) == 10.0


def test_slow_uplinks_leave_less_to_share() -> None:
    """Ten hosts want 1,000 bytes in all; their uplinks send 61 a second, and the origin 39."""
    parties = [*alike(4, 10.0), *alike(5, 4.0), Party(0.0, 1.0, 10.0)]
    parties = [party._replace(down_bytes_s=100.0) for party in parties]
    assert bound(100, parties, 39.0) == pytest.approx(1000 / (39 + 40 + 20 + 1))


def test_a_rack_takes_in_one_copy() -> None:
    assert bound(100, alike(4, 10.0, rack=0), 50.0, 2.0) == 50.0
    assert bound(100, alike(4, 10.0, rack=-1), 50.0, 2.0) == 10.0


def test_a_host_that_starts_later_is_complete_later_and_sends_later() -> None:
    assert bound(100, [*alike(3, 10.0), Party(30.0, 10.0, 10.0)], 50.0) == 40.0
    assert bound(100, [Party(5.0, 10.0, 10.0)], 5.0) == 25.0
    # 11 copies of 100 bytes: 10 a second until 20, then 10 + 10 x 10.
    parties = [Party(0.0, 0.0, 100.0)] + [Party(20.0, 10.0, 100.0)] * 10
    assert bound(100, parties, 10.0) == pytest.approx(20 + 900 / 110)


def test_what_a_host_needs_from_its_own_start() -> None:
    """The first waits for the origin, a host that starts after all others for its downlink."""
    parties = [
        Party(0.0, 10.0, 10.0, 0),
        Party(15.0, 10.0, 10.0, 0),
        Party(90.0, 10.0, 10.0, 0),
        Party(90.0, 10.0, 10.0, 1),
    ]
    assert own_bounds(100, parties, 5.0) == [20.0, 10.0, 10.0, 10.0]
    assert own_bounds(100, parties, 5.0, 4.0) == [25.0, 10.0, 10.0, 25.0]


def test_a_scenario_knows_its_parties() -> None:
    scenario = Scenario(
        10, 100, 10.0, other_nics=((5.0, 0.2),), racks=5, faults=(Slow("h00001", 0.0, 0.5, True), Late("h00002", 7.0))
    )
    parties = scenario.parties(without={"h00003"})
    rates = scenario.rates()
    assert sorted(rates) == [5.0] * 2 + [10.0] * 8
    assert (parties[1].up_bytes_s, parties[1].down_bytes_s) == (rates[1] / 2, rates[1] / 2)
    assert [party.starts_at for party in parties[1:3]] == [0.0, 7.0]
    assert [party.rack for party in parties[:4]] == [0, 0, 1, 1]
    assert [party.counts for party in parties].index(False) == 3
