"""Simulated beside real."""

from __future__ import annotations

import pytest

from bench.broadcast import Run
from bench.cases import SIMULATED, Links, cases
from bench.compare import Comparison, compare, difference_percent, simulated_ratio, table

SMALL = Links(hosts=6, size_mib=4)
[UNIFORM] = cases("uniform", SMALL)


def test_difference_is_in_percent_of_the_real_figure() -> None:
    assert difference_percent(1.15, 1.0) == pytest.approx(15.0)
    assert difference_percent(1.0, 1.25) == pytest.approx(-20.0)


@pytest.mark.parametrize(
    ("simulated", "real", "within"), [(1.14, 1.0, True), (0.86, 1.0, True), (1.16, 1.0, False), (0.84, 1.0, False)]
)
def test_goal_holds_in_both_directions(simulated: float, real: float, within: bool) -> None:
    assert Comparison(UNIFORM, simulated, real, 1).within_goal is within


def test_real_figure_is_the_median_of_our_valid_runs_of_that_case() -> None:
    bound_s = UNIFORM.bound_s
    runs = [
        Run("p2pdist", UNIFORM, number, {"makespan_s": ratio * bound_s}) for number, ratio in enumerate((1.1, 1.3, 1.2))
    ]
    runs.append(Run("p2pdist", UNIFORM, 3, {"makespan_s": 9 * bound_s}, "a copy is not what was sent"))
    runs.append(Run("aria2", UNIFORM, 0, {"makespan_s": 8 * bound_s}))
    runs.append(Run("p2pdist", cases("few", SMALL)[0], 0, {"makespan_s": 7 * bound_s}))
    found = compare(UNIFORM, runs, seeds=(1,))
    assert found.real == pytest.approx(1.2)
    assert found.runs == 3
    assert found.difference == pytest.approx(difference_percent(found.simulated, 1.2))


def test_without_a_real_run_nothing_is_claimed() -> None:
    found = compare(UNIFORM, [], seeds=(1,))
    assert (found.real, found.difference, found.within_goal) == (None, None, False)
    assert "no run succeeded" in table([found])


@pytest.mark.parametrize("name", SIMULATED)
def test_every_case_can_be_simulated(name: str) -> None:
    """Nobody beats the bound, and the same seeds give the same figure."""
    case = cases(name, SMALL)[-1]
    ratio = simulated_ratio(case, seeds=(1, 2))
    assert ratio >= 1.0
    assert simulated_ratio(case, seeds=(1, 2)) == ratio


def test_a_killed_host_is_simulated_as_lost() -> None:
    [killed] = cases("killed", SMALL)
    assert simulated_ratio(killed, seeds=(1,)) > simulated_ratio(UNIFORM, seeds=(1,))


def test_table_marks_what_is_beyond_the_goal() -> None:
    case = cases("uniform", Links())[0]
    lines = table([Comparison(case, 1.05, 1.0, 3), Comparison(case, 1.3, 1.0, 3)]).splitlines()
    assert lines[4].split() == ["uniform", "1.050", "1.000", "+5.0", "%", "3"]
    assert lines[5].endswith("+30.0 %          3  MISSED: goal 15 %")
