"""The tail: late hosts move to where the larger part of an uplink is, and no others do."""

from __future__ import annotations

from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceLayout
from tracker.core.member import Member
from tracker.core.rebalance.chains import PIECES_MIN
from tracker.core.rebalance.tail import hand_over
from tracker.core.swarm import Swarm

LAYOUT = PieceLayout(1024 << 16, 1 << 16)
WHOLE = LAYOUT.count // 2


class Tail:
    """Two stripes, of which all have the second one. `busy` has as many children of the first as
    were named, each lacking `lack`."""

    def __init__(self, *children: str, lack: int = 100, slow_receiver: tuple[str, ...] = ()) -> None:
        self.swarm = Swarm(digest_of(b"blob"), LAYOUT)
        assert self.swarm.stripes == 2
        self.whole("busy")
        for name in children:
            self.add(name, lack)
            self.swarm.set_slow_receiver(self.swarm.members[name], name in slow_receiver)
            self.receive(name, "busy")

    def add(self, name: str, lack: int) -> Member:
        return self.swarm.add(name, [WHOLE - lack, WHOLE], slots=4, now=0.0)

    def whole(self, name: str) -> Member:
        return self.add(name, 0)

    def receive(self, name: str, parent: str) -> None:
        self.swarm.edges.attach(0, name, parent)

    def parents(self) -> dict[str, str | None]:
        return {name: member.parents[0] for name, member in self.swarm.members.items() if member.parents[0]}


def test_a_host_that_serves_one_takes_another_from_one_that_serves_four() -> None:
    """Half of an uplink is more than a quarter; a third child would not gain enough to be moved."""
    tail = Tail("a", "b", "c", "d", lack=50)
    tail.whole("helper")
    tail.add("own", 20)
    tail.receive("own", "helper")
    assert hand_over(tail.swarm) == 1
    assert hand_over(tail.swarm) == 0
    assert sorted(parent or "" for parent in tail.parents().values()) == ["busy", "busy", "busy", "helper", "helper"]
    assert tail.parents()["own"] == "helper"


def test_the_latest_goes_first_and_idle_hosts_without_slow_children_are_best() -> None:
    """A slow child counts for nothing in a load, but a new one would wait for it."""
    tail = Tail("a", "b", "c")
    member = tail.swarm.members["b"]
    member.counts = (member.counts[0] - 50, *member.counts[1:])
    tail.whole("burdened")
    tail.whole("free")
    tail.add("slow", 400)
    tail.swarm.set_slow_receiver(tail.swarm.members["slow"], True)
    tail.receive("slow", "burdened")
    assert hand_over(tail.swarm) >= 1
    assert tail.parents()["b"] == "free"


def test_hosts_with_slow_downlinks_stay_where_they_are() -> None:
    tail = Tail("a", "b", "slow", slow_receiver=("slow",))
    tail.whole("idle")
    tail.whole("idle too")
    while hand_over(tail.swarm):
        pass
    parents = tail.parents()
    assert parents["slow"] == "busy"
    assert len({parents["a"], parents["b"]}) == 2, "one of the others has moved"


def test_receivers_that_yield_stay_where_they_are() -> None:
    """They lack much because programs on their hosts wait for other pieces."""
    tail = Tail("a", "b", "c")
    tail.swarm.members["b"].hear(1.0, yields=True)
    for number in range(3):
        tail.whole(f"idle {number}")
    while hand_over(tail.swarm):
        pass
    parents = tail.parents()
    assert parents.pop("b") == "busy"
    assert "busy" not in parents.values() or len(set(parents.values())) == 2


def test_no_host_moves_for_a_few_pieces_or_to_a_host_that_is_as_busy() -> None:
    few = Tail("a", "b", "c", lack=PIECES_MIN - 1)
    few.whole("idle")
    assert hand_over(few.swarm) == 0
    even = Tail("a", "b")
    even.whole("helper")
    even.add("own", 20)
    even.receive("own", "helper")
    assert hand_over(even.swarm) == 0


def test_no_host_gets_more_children_than_slots() -> None:
    """Neither when it could take a host in each stripe."""
    swarm = Swarm(digest_of(b"blob"), LAYOUT)
    for name, slots in (("busy", 8), ("helper", 2)):
        swarm.add(name, [WHOLE, WHOLE], slots=slots, now=0.0)
    for stripe in range(2):
        for number in range(4):
            name = f"{stripe} {number}"
            swarm.add(name, [WHOLE - 100 * (each == stripe) for each in range(2)], slots=0, now=0.0)
            swarm.edges.attach(stripe, name, "busy")
    swarm.add("own", [WHOLE - 20, WHOLE], slots=0, now=0.0)
    swarm.edges.attach(0, "own", "helper")
    while hand_over(swarm):
        pass
    assert swarm.members["helper"].load == 2
