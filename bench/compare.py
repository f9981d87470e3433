"""One case simulated and real: how far the simulator can be trusted.

Both ratios are to the same bound (bench/cases.py). A simulated case is run with several seeds and
its median taken. A host that is killed "at half" dies in the simulation at half of the time that
the same case takes without the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.broadcast import Run, remarks
from bench.cases import KILLED_AT, Case
from bench.methods import OURS
from bench.table import figure, median, render
from p2pdist.simulate.simulation import Simulation

SEEDS = (1, 2, 3, 4, 5)
GOAL_PERCENT = 15.0


def difference_percent(simulated: float, real: float) -> float:
    """By how many percent of the real figure the simulated one is above it; negative below."""
    return 100 * (simulated - real) / real


def simulated_ratio(case: Case, seeds: Sequence[int] = SEEDS) -> float:
    """The median over the seeds of the makespan over the case's bound. Raises InvariantBroken."""
    found = median(_makespan_s(case, seed) / case.bound_s for seed in seeds)
    assert found is not None, "there are seeds"
    return found


def _makespan_s(case: Case, seed: int) -> float:
    makespan_s = Simulation(case.scenario(seed)).run().makespan_s
    if case.killed:
        return Simulation(case.scenario(seed, killed_at_s=KILLED_AT * makespan_s)).run().makespan_s
    return makespan_s


@dataclass(frozen=True)
class Comparison:
    """One case both ways; `real` is None when no run succeeded, `runs` how many did."""

    case: Case
    simulated: float
    real: float | None
    runs: int

    @property
    def difference(self) -> float | None:
        """In percent of the real figure."""
        return None if self.real is None else difference_percent(self.simulated, self.real)

    @property
    def within_goal(self) -> bool:
        return self.difference is not None and abs(self.difference) <= GOAL_PERCENT

    def document(self) -> dict[str, Any]:
        """For --json."""
        return {
            "case": self.case.label,
            "simulated": self.simulated,
            "real": self.real,
            "difference_percent": self.difference,
            "runs": self.runs,
            "within_goal": self.within_goal,
        }


def compare(case: Case, runs: Sequence[Run], seeds: Sequence[int] = SEEDS) -> Comparison:
    """Simulate a case and set it beside this system's runs of it."""
    own = [run.ratio for run in runs if run.case == case and run.method == OURS and not run.error]
    return Comparison(case, simulated_ratio(case, seeds), median(own), len(own))


def table(comparisons: Sequence[Comparison]) -> str:
    """Ratios side by side, differences beyond the goal marked."""
    rows = []
    for comparison in comparisons:
        note = (
            ""
            if comparison.within_goal
            else "no run succeeded"
            if comparison.real is None
            else f"MISSED: goal {GOAL_PERCENT:.0f} %"
        )
        difference = "-" if comparison.difference is None else f"{comparison.difference:+.1f} %"
        rows.append(
            [
                comparison.case.label,
                figure(comparison.simulated, 3),
                figure(comparison.real, 3),
                difference,
                str(comparison.runs),
                note,
            ]
        )
    heads = ("case", "simulated", "real", "difference", "real runs", "note")
    notes = remarks([comparison.case for comparison in comparisons])
    return render("simulated and real, ratios to the same bound", heads, rows, notes)
