"""Judging hosts whose reports come more often than their pieces, since pieces are large."""

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Hello, Holding, Report
from tracker.core.events import Received, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.member import Member

BLOB = digest_of(b"large pieces")
PIECE = 16 << 20
PIECES = 640
HALF = PIECES // 2
PIECE_S = 1.3
"""A host gets a piece of each stripe in this time, as over 200 Mbit/s."""
REPORT_S = 0.25
"""Between two reports of a host that is probed."""


class Tail:
    """The end of a broadcast, as a new tracker finds it: late hosts, each below a seed of its own
    in both stripes, that lack `LACK` pieces of each. Times are in seconds."""

    LACK = 60

    def __init__(self, late: int = 4) -> None:
        self.fleet, self.now = Fleet(-100.0, report_interval_s=10.0), 0.0
        self.late = {f"h{number}": [HALF - self.LACK] * 2 for number in range(late)}
        self.stuck: set[str] = set()
        names = [f"s{number}" for number in range(late)] + list(self.late)
        self.sessions = {name: number for number, name in enumerate(names)}
        for name, session in self.sessions.items():
            self.fleet.handle(SessionOpened(session, Hello(PROTOCOL_VERSION, name, f"{name}:1")), now=self.now)
            counts, parents = self.late.get(name, [HALF, HALF]), (f"s{session - late}",) * 2
            holding = Holding(BLOB, PIECES * PIECE, PIECE, tuple(counts), parents if name in self.late else ())
            self.fleet.handle(Received(session, holding), now=self.now)

    def go(self, seconds: float) -> None:
        """Let time pass: pieces come to each host at times of its own, and it reports."""
        until = self.now + seconds
        while self.now < until:
            self.now += REPORT_S
            for number, (name, counts) in enumerate(self.late.items()):
                got = [
                    int((self.now + 0.3 * number + stripe * PIECE_S / 2) / PIECE_S) - self.LACK + HALF
                    for stripe in range(2)
                ]
                news = name not in self.stuck and got != counts
                counts[:] = got if news else counts
                report = Report((Advance(BLOB, tuple(counts)),) if news else ())
                self.fleet.handle(Received(self.sessions[name], report), now=self.now)
            self.fleet.handle(Tick(), now=self.now)

    def member(self, name: str) -> Member:
        return self.fleet.swarms[BLOB].members[name]


def test_a_host_that_waits_for_a_large_piece_keeps_its_parent() -> None:
    """Most of its reports tell of no piece. Once the host was moved each time, lost what had come
    of the piece, and was done last by far."""
    tail = Tail()
    for _ in range(50):
        tail.go(1.0)
        for number, name in enumerate(tail.late):
            assert tail.member(name).parents == [f"s{number}"] * 2, (tail.now, tail.fleet.swarms[BLOB].story)
    assert all(member.slots == 2 for member in tail.fleet.swarms[BLOB].members.values())


def test_reports_between_two_large_pieces_do_not_raise_what_is_usual() -> None:
    tail = Tail()
    tail.go(50.0)
    assert tail.fleet.swarms[BLOB].typical_rate == pytest.approx(1 / PIECE_S, rel=0.2)


def test_a_parent_that_gives_no_large_piece_is_left() -> None:
    """Patience ends after a few times as long as pieces take."""
    tail = Tail()
    tail.go(5.0)
    tail.stuck.add("h0")
    tail.go(8 * PIECE_S)
    assert tail.member("h0").parents != ["s0", "s0"]
    assert all(tail.member(f"h{number}").parents == [f"s{number}"] * 2 for number in range(1, 4))
