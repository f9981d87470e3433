"""Superpeers: which they are, what it costs to know, which hosts are told when; and which of those
that read the origin go on once a tracker is back."""

from collections import defaultdict
from random import Random
from typing import Any

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Assign, FromAgent, Hello, Holding
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import Plan
from p2pdist.model.rendezvous import ranked
from tracker.core.edges import pairs
from tracker.core.events import Command, Received, Send, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.member import FROM_ORIGIN
from tracker.core.origin import superpeers as keepers_module
from tracker.core.origin.superpeers import SUPERPEERS, superpeers
from tracker.core.swarm import ZONES_MAX, Swarm

BLOB = digest_of(b"blob")
PIECE = 65536
PIECES = 8


def swarm_of(hosts: int, zones: int = 1) -> Swarm:
    swarm = Swarm(BLOB, PieceLayout(PIECES * PIECE, PIECE))
    for number in range(hosts):
        add(swarm, number, f"z{number % zones}")
    return swarm


def add(swarm: Swarm, number: int, zone: str = "z0") -> None:
    swarm.add(f"h{number}", [0] * swarm.stripes, slots=2, now=0.0, zone=zone, rack=f"r{number % 7}")


def best(swarm: Swarm, zone: str = "z0") -> tuple[str, ...]:
    names = [member.host for member in swarm.members.values() if member.zone == zone]
    return tuple(ranked(BLOB.encode(), names, SUPERPEERS))


def test_superpeers_are_the_highest_of_their_zone() -> None:
    swarm = swarm_of(100, zones=3)
    for zone in ("z0", "z1", "z2"):
        assert superpeers(swarm, zone) == best(swarm, zone)
    assert superpeers(swarm, "z") == ()


def test_a_zone_of_few_has_few() -> None:
    assert len(superpeers(swarm_of(3), "z0")) == 3


def test_those_who_serve_no_host_or_receive_slowly_are_passed_over() -> None:
    swarm = swarm_of(30)
    first, second, *others = best(swarm)
    swarm.members[first].slots = 0
    swarm.set_slow_receiver(swarm.members[second], True)
    assert superpeers(swarm, "z0")[: SUPERPEERS - 2] == tuple(others)


def test_who_leaves_or_moves_to_another_zone_is_replaced() -> None:
    swarm = swarm_of(50)
    first, second, *others = superpeers(swarm, "z0")
    swarm.remove(first)
    assert superpeers(swarm, "z0") == best(swarm) and superpeers(swarm, "z0")[0] == second
    swarm.set_location(second, "z1", "r")
    assert superpeers(swarm, "z0")[: SUPERPEERS - 2] == tuple(others)
    assert superpeers(swarm, "z1") == (second,)


def test_a_zone_whose_name_begins_that_of_another_does_not_grow_with_it() -> None:
    """Where a zone grew by less than a quarter its choice stands, though others would be chosen
    now."""
    swarm = swarm_of(0)
    for number in range(24):
        add(swarm, number, "z1")
    chosen = superpeers(swarm, "z1")
    for number in range(24, 100):
        add(swarm, number, "z10" if number < 95 else "z1")
    assert superpeers(swarm, "z1") == chosen != best(swarm, "z1")
    assert superpeers(swarm, "z10") == best(swarm, "z10")
    add(swarm, 100, "z1")
    assert superpeers(swarm, "z1") == best(swarm, "z1")


def test_who_moves_to_another_rack_of_its_zone_stays_a_superpeer() -> None:
    swarm = swarm_of(50)
    chosen = superpeers(swarm, "z0")
    swarm.set_location(chosen[0], "z0", "elsewhere")
    assert superpeers(swarm, "z0") == chosen
    assert chosen[0] in swarm.sites["z0"] and swarm.racks["z0 elsewhere"] == {chosen[0]: None}


@pytest.mark.parametrize("seed", range(10))
def test_zones_and_racks_name_those_who_stand_there(seed: int) -> None:
    """Whichever hosts join, move and leave: the same as what one finds by asking each member, and
    no place that is empty."""
    random, swarm = Random(seed), swarm_of(0)
    for _ in range(300):
        host, zone, rack = f"h{random.randrange(20)}", random.choice(["", "z1", "z10"]), random.choice(["", "r", "1"])
        if host not in swarm.members:
            swarm.add(host, [0] * swarm.stripes, slots=2, now=0.0, zone=zone, rack=rack)
        elif random.random() < 0.4:
            swarm.remove(host)
        else:
            swarm.set_location(host, zone, rack)
        zones, racks = defaultdict[str, dict[str, None]](dict), defaultdict[str, dict[str, None]](dict)
        for member in swarm.members.values():
            zones[member.zone][member.host] = racks[member.rack][member.host] = None
        assert swarm.sites == zones and swarm.racks == racks


class Watched(dict[str, Any]):
    """A dict that knows how many of its entries were gone through."""

    seen = 0

    def __iter__(self) -> Any:
        self.seen += len(self)
        return super().__iter__()

    def keys(self) -> Any:
        self.seen += len(self)
        return super().keys()

    def values(self) -> Any:
        self.seen += len(self)
        return super().values()

    def items(self) -> Any:
        self.seen += len(self)
        return super().items()


def test_the_hosts_of_other_zones_are_not_looked_at() -> None:
    """Neither one by one nor by their racks, so that to ask for all zones costs no more than their
    hosts."""
    swarm = swarm_of(300, zones=100)
    swarm.members, swarm.racks, swarm.sites = Watched(swarm.members), Watched(swarm.racks), Watched(swarm.sites)
    first = superpeers(swarm, "z7")
    swarm.remove(first[0])
    assert superpeers(swarm, "z7") == first[1:]
    assert (swarm.members.seen, swarm.racks.seen, swarm.sites.seen) == (0, 0, 0)


def test_a_zone_is_looked_through_only_when_a_superpeer_is_gone_or_it_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often superpeers are asked for while 1,000 hosts join one by one: each doubling costs
    a few looks."""
    looks: list[int] = []

    def counted(key: bytes, names: object, count: int) -> list[str]:
        found = list(names)  # type: ignore[call-overload]
        looks.append(len(found))
        return ranked(key, found, count)

    monkeypatch.setattr(keepers_module, "ranked", counted)
    swarm = Swarm(BLOB, PieceLayout(PIECES * PIECE, PIECE))
    for number in range(1000):
        add(swarm, number)
        for _ in range(3):
            superpeers(swarm, "z0")
    assert len(looks) < 40 and sum(looks) < 6 * 1000
    before = len(looks)
    for name in superpeers(swarm, "z0"):
        swarm.remove(name)
        superpeers(swarm, "z0")
    for member in [each for each in swarm.members if each not in superpeers(swarm, "z0")][:300]:
        swarm.remove(member)
        superpeers(swarm, "z0")
    assert len(looks) == before + SUPERPEERS


def test_zones_without_end_are_forgotten() -> None:
    swarm = swarm_of(1)
    for number in range(2 * ZONES_MAX):
        swarm.set_location("h0", f"z{number}", "r")
        assert superpeers(swarm, f"z{number}") == ("h0",)
    assert len(swarm.origin.superpeers) <= ZONES_MAX


class Control:
    """A fleet, its sessions by host name, the time, and the plans that hosts were told."""

    def __init__(self, started_at: float = -100.0) -> None:
        self.fleet = Fleet(started_at)
        self.sessions: dict[str, int] = {}
        self.plans: dict[str, list[Plan]] = {}
        self.now = 0.0
        self._number = 0

    def open(self, *hosts: str, zone: str = "") -> None:
        for host in hosts:
            self._number += 1
            self.sessions[host] = self._number
            hello = Hello(PROTOCOL_VERSION, host, f"{host}:1", zone)
            self._take(self.fleet.handle(SessionOpened(self._number, hello), now=self.now))

    def close(self, host: str) -> None:
        self._take(self.fleet.handle(SessionClosed(self.sessions.pop(host)), now=self.now))

    def say(self, host: str, message: FromAgent) -> None:
        self._take(self.fleet.handle(Received(self.sessions[host], message), now=self.now))

    def hold(self, host: str, count: int = 0, parent: str | None = None) -> None:
        self.say(host, Holding(BLOB, PIECES * PIECE, PIECE, (count,), (parent,)))

    def tick(self, after_s: float = 0.1) -> None:
        self.now += after_s
        self._take(self.fleet.handle(Tick(), now=self.now))

    def _take(self, commands: list[Command]) -> None:
        names = {session: host for host, session in self.sessions.items()}
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, Assign):
                self.plans.setdefault(names[command.session], []).append(command.message.plan)

    def told(self, host: str) -> list[list[str]]:
        """The superpeers in each plan that the host was told."""
        return [[superpeer.host for superpeer in plan.keepers] for plan in self.plans.get(host, [])]

    @property
    def swarm(self) -> Swarm:
        return self.fleet.swarms[BLOB]


def joined(*hosts: str) -> Control:
    control = Control()
    control.open(*hosts)
    for host in hosts:
        control.hold(host)
    control.tick()
    return control


def test_the_first_plan_brings_the_superpeers_and_the_next_ones_do_not() -> None:
    hosts = [f"h{number}" for number in range(5)]
    control = joined(*hosts)
    expected = ranked(BLOB.encode(), hosts, SUPERPEERS)
    assert all(control.told(host) == [expected] for host in hosts)
    child = next(host for host in hosts if control.swarm.members[host].parents[0])
    control.swarm.edges.detach(0, child)
    control.tick(0.6)
    control.tick(0.6)
    assert control.told(child) == [expected, []]


def test_after_the_superpeers_changed_the_next_plan_brings_them() -> None:
    """No plan goes out for their sake."""
    control = joined("h1", "h2", "h3")
    control.open("h4")
    control.hold("h4")
    control.tick()
    everybody = ranked(BLOB.encode(), ["h1", "h2", "h3", "h4"], SUPERPEERS)
    assert control.told("h4") == [everybody]
    child = next(host for host in ("h1", "h2", "h3") if control.swarm.members[host].parents[0])
    assert len(control.plans[child]) == 1
    control.swarm.edges.detach(0, child)
    control.tick(0.6)
    control.tick(0.6)
    assert control.told(child)[1] == everybody


def test_each_zone_has_its_own() -> None:
    control = Control()
    control.open("a1", "a2", zone="a")
    control.open("b1", zone="b")
    for host in ("a1", "a2", "b1"):
        control.hold(host)
    control.tick()
    assert sorted(control.told("a1")[0]) == ["a1", "a2"]
    assert control.told("b1") == [["b1"]]


def test_who_is_absent_is_not_named() -> None:
    control = joined("h1", "h2", "h3")
    control.close("h2")
    control.open("h4")
    control.hold("h4")
    control.tick()
    assert sorted(control.told("h4")[0]) == ["h1", "h3", "h4"]


def test_an_agent_that_started_anew_is_told_again() -> None:
    control = joined("h1", "h2")
    control.close("h2")
    control.open("h2")
    control.hold("h2")
    control.tick()
    assert control.told("h2")[-1] == control.told("h2")[0] != []


def readers(control: Control) -> list[str]:
    return [child for child, parent in pairs(control.swarm.edges, 0) if parent == FROM_ORIGIN]


@pytest.mark.parametrize("order", [("h1", "h2", "h3"), ("h3", "h2", "h1")])
def test_of_superpeers_that_read_the_origin_one_goes_on(order: tuple[str, ...]) -> None:
    """The one with the most pieces, whichever speaks first; the others are given parents."""
    control = Control(started_at=0.0)
    control.open(*order)
    for host in order:
        control.hold(host, {"h1": 1, "h2": 3, "h3": 2}[host], FROM_ORIGIN)
    control.tick()
    assert readers(control) == ["h2"]
    control.tick(1.0)
    assert control.swarm.members["h1"].parents[0] and control.swarm.members["h3"].parents[0]
    for host in ("h1", "h3"):
        parent = control.plans[host][-1].stripes[0].parent
        assert parent is not None and not parent.is_origin


def test_each_zone_keeps_a_reader() -> None:
    control = Control(started_at=0.0)
    control.open("a1", "a2", zone="a")
    control.open("b1", zone="b")
    for host, count in (("a1", 2), ("b1", 3), ("a2", 1)):
        control.hold(host, count, FROM_ORIGIN)
    control.tick()
    assert sorted(readers(control)) == ["a1", "b1"]


@pytest.mark.parametrize("seed_first", [True, False])
def test_where_somebody_has_the_whole_no_host_reads_on(seed_first: bool) -> None:
    control = Control(started_at=0.0)
    control.open("h1", "h2")
    for host in ("h2", "h1") if seed_first else ("h1", "h2"):
        control.hold(host, *((3, FROM_ORIGIN) if host == "h1" else (PIECES, None)))
    control.tick()
    assert not readers(control)
    control.tick(1.0)
    assert control.swarm.members["h1"].parents[0] == "h2"


def test_a_superpeer_that_lost_its_session_only_is_told_its_parent_again() -> None:
    """The tracker never was away for the others, and their root reads on."""
    control = joined("h1", "h2", "h3")
    (root,) = readers(control)
    superpeer = next(host for host in ("h1", "h2", "h3") if host != root)
    parent = control.swarm.members[superpeer].parents[0]
    control.hold(root, 4, FROM_ORIGIN)
    control.close(superpeer)
    control.open(superpeer)
    control.hold(superpeer, 3, FROM_ORIGIN)
    control.tick()
    assert readers(control) == [root]
    source = control.plans[superpeer][-1].stripes[0].parent
    assert source is not None and source.host == parent
