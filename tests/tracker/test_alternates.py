"""Hosts that leave a parent which stands still, and receive from an alternate."""

from __future__ import annotations

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Assign, Complaint, Hello, Holding, Reject, Report
from tracker.core.events import Received, Send, SessionOpened, Tick
from tracker.core.fleet import Fleet

PIECE, PIECES = 65536, 64
BLOB = digest_of(b"blob")
STEP_S = 0.05


class Chain:
    """A seed, `parent` below it and `child` below that, in the first stripe of a blob, and another
    host. The second stripe they have. They report what they have of the first one."""

    def __init__(self) -> None:
        self.fleet, self.now = Fleet(-100.0), 0.0
        self.hosts = ["seed", "parent", "child", "other"]
        self.has = dict.fromkeys(self.hosts, 4) | {"seed": PIECES // 2}
        self.told: dict[str, list[str | None]] = {name: [] for name in self.hosts}
        above = {"seed": (), "parent": ("seed", None), "child": ("parent", None), "other": ("seed", None)}
        for number, name in enumerate(self.hosts):
            self._handle(SessionOpened(number, Hello(PROTOCOL_VERSION, name, f"10.0.0.{number}:1"), f"10.0.0.{number}"))
            self._say(name, Holding(BLOB, PIECES * PIECE, PIECE, self._counts(name), above[name]))
        self.run(0.5, "parent", "child", "other")
        assert self.parent_of("child") == "parent"

    def parent_of(self, name: str) -> str | None:
        """The host from which the tracker has a host receive."""
        return self.fleet.swarms[BLOB].members[name].parents[0]

    def complain(self) -> None:
        """The child says that its parent stands still, and turns to an alternate."""
        self._say("child", Complaint(BLOB, 0, "parent", "stalled"))

    def run(self, seconds: float, *reporting: str, gains: tuple[str, ...] = ()) -> None:
        """Let time pass in which these hosts report; those that gain get a piece in each step."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += STEP_S
            self._handle(Tick())
            for name in reporting:
                self.has[name] = min(PIECES // 2 - 1, self.has[name] + (name in gains))
                self._say(name, Report((Advance(BLOB, self._counts(name)),)))

    def _counts(self, name: str) -> tuple[int, int]:
        return self.has[name], PIECES // 2

    def _say(self, name: str, message: object) -> None:
        self._handle(Received(self.hosts.index(name), message))  # type: ignore[arg-type]

    def _handle(self, event: object) -> None:
        for command in self.fleet.handle(event, now=self.now):  # type: ignore[arg-type]
            assert not (isinstance(command, Send) and isinstance(command.message, Reject)), command
            if isinstance(command, Send) and isinstance(command.message, Assign):
                names = [each.parent.host if each.parent else None for each in command.message.plan.stripes]
                self.told[self.hosts[command.session]] += names


def test_a_parent_that_ended_is_absent_though_its_child_gets_pieces_from_an_alternate() -> None:
    """The child stands still for a moment alone: what it gets since says nothing of the parent."""
    chain = Chain()
    chain.complain()
    assert chain.parent_of("child") == "parent", "it has no more than the child: who holds it up is not known yet"
    chain.run(1.0, "child", "other", gains=("child",))
    assert chain.parent_of("child") not in (None, "parent")
    assert not chain.fleet.swarms[BLOB].members["parent"].present


def test_a_host_goes_back_to_its_parent_once_that_goes_on() -> None:
    """The parent was held up by a host above it. At the alternate its child takes the slot of
    another host."""
    chain = Chain()
    chain.complain()
    chain.run(0.6, "parent", "child", "other", gains=("child",))
    chain.told["child"].clear()
    chain.run(0.3, "parent", "child", "other")
    assert chain.told["child"] == [], "the parent still stands where it stood"
    chain.run(0.6, "parent", "child", "other", gains=("parent",))
    chain.run(0.6, "parent", "child", "other", gains=("parent", "child"))
    assert chain.told["child"] == ["parent"], "once"
    assert chain.parent_of("child") == "parent"


def test_a_host_does_not_go_back_to_a_parent_that_has_far_less_than_it() -> None:
    """There it would stand still again."""
    chain = Chain()
    chain.complain()
    chain.run(0.6, "parent", "child", "other", gains=("child",))
    chain.told["child"].clear()
    chain.run(0.05, "parent", "child", "other", gains=("parent",))
    chain.run(0.5, "parent", "child", "other")
    assert chain.told["child"] == []


def test_a_parent_that_has_more_and_stands_still_again_loses_its_child() -> None:
    """What it says that it has draws the child back once, not again and again."""
    chain = Chain()
    chain.complain()
    chain.run(0.6, "parent", "child", "other")
    chain.run(0.1, "parent", "child", "other", gains=("parent",))
    assert chain.told["child"][-1] == "parent"
    chain.complain()
    chain.run(0.3, "parent", "child", "other")
    assert chain.parent_of("child") not in (None, "parent")
