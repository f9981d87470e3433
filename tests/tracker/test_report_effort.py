"""What a report costs a tracker, in calls of functions: the same on every machine, busy or not."""

from __future__ import annotations

import sys
from types import FrameType

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Hello, Holding, Report
from p2pdist.model.pieces import PieceLayout
from tracker.core.events import Received, SessionOpened, Tick
from tracker.core.fleet import Fleet

HOSTS = 40
BLOB = digest_of(b"blob")
LAYOUT = PieceLayout(4096 << 20, 1 << 20)
CALLS_MAX = 60
"""There were 121 where a report asked the same questions again and again, and 72 where it asked of
each stripe what one comparison of all shows."""


def test_a_report_of_a_host_that_gets_its_share_takes_few_calls() -> None:
    fleet, now = Fleet(0.0), 10.0
    for number in range(HOSTS):
        hello = Hello(PROTOCOL_VERSION, f"h{number}", f"10.0.0.{number}:7071", "z", f"r{number // 20}")
        fleet.handle(SessionOpened(number, hello), now=now)
        fleet.handle(Received(number, Holding(BLOB, LAYOUT.size, LAYOUT.piece_size, (0,) * LAYOUT.stripes)), now=now)
    for _ in range(40):
        now += 0.05
        fleet.handle(Tick(1e9 + now), now=now)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    for pieces in (100, 110, 120):
        calls = 0
        for number in range(HOSTS):
            now += 0.25 / HOSTS
            report = Received(number, Report((Advance(BLOB, (pieces,) * LAYOUT.stripes),), 10_000_000, 0.25))
            before = sys.getprofile()
            sys.setprofile(count)
            try:
                fleet.handle(report, now=now)
            finally:
                sys.setprofile(before)
    assert calls / HOSTS <= CALLS_MAX
