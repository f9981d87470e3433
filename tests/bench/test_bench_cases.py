"""A case means the same to the yardstick and to the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.cases import NAMES, Links, cases, payload_bytes_s
from p2pdist.simulate.faults import Crash, Late, Slow

LINKS = Links()


def bound_by_hand(links: Links, ups_mbit: float) -> float:
    """The yardstick's bound_wire_s, written as its README states it."""
    mbit = links.size * 8 / 1e6
    fluid = (mbit / links.origin_mbit, mbit / links.rate_mbit, links.hosts * mbit / (links.origin_mbit + ups_mbit))
    return max(fluid) / (1448 / 1514)


def options(name: str, links: Links = LINKS, variant: int = 0) -> str:
    return " ".join(cases(name, links)[variant].options())


@pytest.mark.parametrize(
    "links",
    [LINKS, Links(hosts=8), Links(hosts=200, origin_mbit=20), Links(hosts=50, rate_mbit=10, origin_mbit=5)],
    ids=str,
)
def test_bound_is_the_yardsticks(links: Links) -> None:
    [uniform] = cases("uniform", links)
    assert uniform.bound_s == pytest.approx(bound_by_hand(links, links.hosts * links.rate_mbit))
    for slow in cases("slow", links):
        assert slow.bound_s == pytest.approx(bound_by_hand(links, (links.hosts - 0.9) * links.rate_mbit))


def test_the_usual_links() -> None:
    [uniform] = cases("uniform", LINKS)
    assert options("uniform") == "--hosts 24 --size-mib 64 --rate-mbit 40 --origin-mbit 80"
    assert uniform.bound_s == pytest.approx(14.034, abs=0.001)
    assert payload_bytes_s(40) == pytest.approx(4_782_034, abs=1)


def test_slow_hosts_stand_in_three_places() -> None:
    places = [case.slow for case in cases("slow", LINKS)]
    assert places == [(0,), (12,), (23,)]
    assert options("slow", variant=1).endswith("--slow-host 12 --slow-factor 0.1")
    assert cases("slow", LINKS)[1].scenario().faults == (Slow("h00012", 0.0, 0.1),)


def test_killed_host_is_lost_silently_for_good() -> None:
    [killed] = cases("killed", LINKS)
    assert options("killed").endswith("--kill-host 12 --kill-at 0.5 --kill-mode link+proc")
    assert killed.scenario().faults == ()
    assert killed.scenario(killed_at_s=7.0).faults == (Crash("h00012", 7.0, None, power=True),)


def test_racks_hold_eight_hosts_and_carry_two_links() -> None:
    [racks] = cases("racks", LINKS)
    assert options("racks").endswith("--racks 3 --rack-mbit 80")
    scenario = racks.scenario()
    assert (scenario.racks, scenario.rack_bytes_s) == (3, pytest.approx(2 * scenario.nic_bytes_s))
    assert cases("uniform", LINKS)[0].scenario().rack_bytes_s == 0


def test_joins_spread_over_half_the_bound() -> None:
    """Host i of N joins at i/N of the spread, and the last one's start counts in the bound."""
    [uniform], [spread] = cases("uniform", LINKS), cases("spread", LINKS)
    assert spread.spread_s == pytest.approx(uniform.bound_s / 2)
    faults = spread.scenario().faults
    assert len(faults) == 23
    assert faults[-1] == Late("h00023", spread.spread_s * 23 / 24)
    assert spread.bound_s == pytest.approx(uniform.bound_s + spread.spread_s * 23 / 24)
    assert "--join-spread 7.017" in options("spread")


def test_sizes_and_numbers() -> None:
    assert "--size-mib 256" in options("big")
    assert "--hosts 8 " in options("few")
    assert "--hosts 40 " in options("many")
    assert options("restart").endswith("--restart-ctl-at 0.5 --restart-after 1")


@pytest.mark.parametrize("name", NAMES)
def test_every_case_exists_also_when_small(name: str) -> None:
    found = cases(name, Links(hosts=2, size_mib=1))
    assert found
    assert all(case.name == name and max(case.slow + case.killed, default=0) < case.links.hosts for case in found)
    assert len({case.label for case in found}) == len(found)


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no case 'sunny'"):
        cases("sunny", LINKS)


def test_the_same_case_is_equal() -> None:
    """Runs are found again by their case."""
    assert cases("spread", LINKS) == cases("spread", replace(LINKS))
