"""The invariants notice what they are there for: each defect here is put into the cores or the
shell on purpose."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from p2pdist.core import uplink
from p2pdist.core.download import download as core
from p2pdist.core.download import events as download
from p2pdist.core.download.download import Download
from p2pdist.simulate.faults import Crash, OriginWrong, Partition, Slow, TrackerLoss, WrongBytes, schedule
from p2pdist.simulate.host import StreamClient
from p2pdist.simulate.invariants import InvariantBroken
from p2pdist.simulate.network import Cut, Stream
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation
from tracker.core import edges
from tracker.core.fleet import Fleet
from tracker.core.planning import planner

FAULTS = (
    Crash("h00004", 1.0, 2.0),
    Crash("h00009", 2.0, None),
    Slow("h00002", 0.0, 0.1),
    WrongBytes("h00005", 0.0, 0.5),
    Partition(Cut(frozenset({"h00001", "h00002", "h00003"}), True, True, False), 1.5, 4.0),
    TrackerLoss(3.0, 1.0),
)


def run(seeds: int = 3, **more: Any) -> None:
    for seed in range(seeds):
        Simulation(Scenario(12, 48 * 65536, 1e6, seed=seed, latency_s=0.001, faults=FAULTS, **more)).run()
    plain = Scenario(60, 96 * 65536, 1e6, seed=3, latency_s=0.001, **more)
    drawn = schedule(3, plain.host_names(), pieces=96, duration_s=6.29)
    Simulation(replace(plain, faults=drawn)).run()


def test_without_a_defect_nothing_is_noticed() -> None:
    run()


def store_unverified(self: StreamClient, stream: Stream, piece: int) -> None:
    self._context.checks.stored(stream.pull, piece, False)


def forward_all(self: uplink.Uplink, blob: Any, layout: Any, stripes: int, have: Any) -> None:
    hold(self, blob, layout, stripes, type(have).full(have.count))


hold = uplink.Uplink._hold


def lose_reports(self: Fleet, name: str, report: Any, now: float) -> None:
    if name != "h00007":
        take_report(self, name, report, now)


take_report = Fleet._report


def open_twice(self: Download, stripe: Any, now: float, out: list[Any]) -> None:
    """Opens another stream for a stripe that has got one."""
    open_once(self, stripe, now, out)
    match out[-1:]:
        case [download.OpenStream(_, source, number)]:
            out.append(download.OpenStream(self._streams._number(), source, number))


open_once = Download._open


def settle_early(self: Download, event: Any, *, now: float) -> list[Any]:
    """Takes the blob for complete when one piece is missing."""
    out = handle(self, event, now=now)
    if not self.finished and len(self.have) == self.have.count - 1:
        self.finished = True
        out.append(download.Completed())
    return out


handle = Download.handle


@pytest.mark.parametrize(
    ("owner", "name", "defect", "noticed"),
    [
        (StreamClient, "_reject", store_unverified, "were stored"),
        (uplink.Uplink, "_hold", forward_all, "before it has verified"),
        (edges.Edges, "receives_through", lambda *_: False, "cycle"),
        (Fleet, "_report", lose_reports, "the tracker takes h00007 to hold|wait forever|gave up"),
        (Download, "handle", settle_early, "lacks 1 pieces"),
        (Download, "_open", open_twice, "second stream"),
        (planner._StripePass, "_may_read", lambda *_: True, "two leases"),
        (edges.Edges, "finish", lambda *_: None, "of which it lacks nothing|that it needs not|cycle"),
    ],
    ids=["store unverified", "forward unverified", "cycle", "lost report", "early end", "second stream", "leases", "edges"],
)  # fmt: skip
def test_a_defect_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, defect: Callable[..., Any], noticed: str
) -> None:
    """A simulation with the defect ends with a broken invariant, or with an assertion of the core
    itself, that says what is wrong."""
    monkeypatch.setattr(owner, name, defect)
    with pytest.raises((InvariantBroken, AssertionError), match=noticed):
        run(10, time_limit_s=200.0, patience_s=60.0)


def test_giving_up_for_no_reason_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Content that is right everywhere cannot end a pull as corrupt."""
    monkeypatch.setattr(core, "ORIGIN_CORRUPT_MAX", 0)
    scenario = Scenario(6, 32 * 65536, 1e6, faults=(OriginWrong(frozenset({3})),))
    assert Simulation(scenario).run().failed == 6
    monkeypatch.setattr("p2pdist.simulate.simulation.failures", lambda faults: ())
    with pytest.raises(InvariantBroken, match="for no good reason"):
        Simulation(scenario).run()
