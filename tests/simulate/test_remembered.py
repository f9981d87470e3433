"""What the tracker of a simulated fleet remembers of a broadcast, against what happened there."""

from __future__ import annotations

import pytest

from p2pdist.simulate.faults import Crash
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation


def test_the_report_of_a_broadcast_agrees_with_the_simulator() -> None:
    """Hosts report a moment after they are complete, and one is lost on the way."""
    simulation = Simulation(Scenario(12, 64 << 16, 1e6, faults=(Crash("h00004", 0.5, None),)))
    known = simulation.run()
    history = simulation.tracker.fleet.history
    ((_, report),) = list(history.broadcasts.end(now=1e6))
    assert (report.hosts, report.complete) == (12, known.complete) == (12, 11)
    assert report.to_100_s is None and report.stragglers[0].host == "h00004"
    assert known.makespan_s - 0.5 <= report.seconds <= known.makespan_s + 1.0
    assert report.own_p50_s == pytest.approx(known.p50_s, abs=1.0)
    assert report.origin_copies is not None and report.origin_copies <= known.origin_ratio * 1.05
    assert report.origin_copies >= 0.5
