"""Hosts that are asked to end, in a broadcast: their children lose nothing."""

from __future__ import annotations

import pytest

from p2pdist.simulate.faults import Leave, TrackerLoss, origin_limit, schedule
from p2pdist.simulate.host import StreamClient
from p2pdist.simulate.network import Stream
from p2pdist.simulate.report import Report
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation

HOSTS = 40
PIECES = 192
TWICE_MAX = 5
"""A host that gets a lease reads the piece that is just coming from its last parent from the origin
as well, if that is quicker."""


def run(
    *faults: Leave | TrackerLoss, seed: int = 1, monkeypatch: pytest.MonkeyPatch
) -> tuple[Simulation, Report, list[str]]:
    """40 hosts, 192 pieces of 64 KiB at 1 MB/s: 12.6 s when nothing goes wrong. Also the streams
    that ended otherwise than by the child's will or because all was sent."""
    broken: list[str] = []
    scenario = Scenario(HOSTS, PIECES * 65536, 1e6, seed=seed, latency_s=0.001, faults=faults)
    simulation = Simulation(scenario)
    ended = StreamClient.ended

    def watched(client: StreamClient, stream: Stream, reason: str) -> None:
        if stream.child_open and stream.finishing < 0 and reason != "done":
            broken.append(f"{stream.parent and stream.parent.name} {reason}")
        ended(client, stream, reason)

    monkeypatch.setattr(StreamClient, "ended", watched)
    return simulation, simulation.run(), broken


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_a_quarter_of_the_fleet_leaves_and_no_stream_breaks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, roots among them. The origin sends again only what had not been passed
    on."""
    names = [f"h{(7 * number + seed) % HOSTS:05d}" for number in range(10)]
    leaves = [Leave(name, 2.0 + 0.5 * number, None) for number, name in enumerate(names)]
    simulation, report, broken = run(*leaves, seed=seed, monkeypatch=monkeypatch)
    assert broken == []
    assert report.complete + report.lost == HOSTS
    assert report.duplicates <= TWICE_MAX
    assert report.origin_ratio <= 1.15
    assert report.makespan_s <= 2.0 * report.bound_s
    assert all(not simulation.hosts[name].running for name in names)


def test_a_restart_of_all_hosts_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade: each host leaves and is back after a moment, with what its disk holds."""
    leaves = [Leave(f"h{number:05d}", 1.0 + 0.3 * number, 0.5) for number in range(HOSTS)]
    _, report, broken = run(*leaves, monkeypatch=monkeypatch)
    assert broken == []
    assert report.complete == HOSTS
    assert report.duplicates <= TWICE_MAX
    assert report.origin_ratio <= 1.5


def test_the_tracker_is_away_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears that the host leaves when it is back, or the host ends with its time."""
    leaves = [Leave("h00003", 3.0, 1.0), Leave("h00004", 3.0, None, 0.5)]
    faults = (*leaves, TrackerLoss(2.9, 1.0))
    _, report, _ = run(*faults, monkeypatch=monkeypatch)
    assert report.complete + report.lost >= HOSTS
    assert report.origin_ratio <= origin_limit(faults)


@pytest.mark.slow
def test_drawn_schedules() -> None:
    for seed in range(10):
        plain = Scenario(HOSTS, 96 * 65536, 1e6, seed=seed, latency_s=0.001).filled()
        faults = schedule(seed, plain.host_names(), pieces=96, duration_s=6.0, kinds=("leave",))
        assert {type(fault) for fault in faults} == {Leave}
        report = Simulation(Scenario(HOSTS, 96 * 65536, 1e6, seed=seed, latency_s=0.001, faults=faults)).run()
        assert report.complete + report.lost >= HOSTS
        assert report.origin_ratio <= origin_limit(faults), (seed, report.origin_ratio)
