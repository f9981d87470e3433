"""Hosts with slow downlinks are in the way of no others."""

from __future__ import annotations

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceLayout
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.planning.planner import Planner
from tracker.core.planning.slow_receivers import STAY_MAX_S, STAY_S, reclassify, relocate
from tracker.core.repair.remedies import demote
from tracker.core.swarm import Swarm

BLOB = digest_of(b"blob")
LAYOUT = PieceLayout(1024 << 16, 1 << 16)


def planned(hosts: int, *, racks: int = 1) -> Swarm:
    """A swarm of like hosts."""
    swarm = Swarm(BLOB, LAYOUT)
    for number in range(hosts):
        swarm.add(f"h{number}", [0, 0], slots=2, now=0.0, rack=f"r{number * racks // hosts}")
    Planner().plan(swarm, leases=2)
    return swarm


def slow_down(swarm: Swarm, names: list[str]) -> None:
    """Hosts are found to have slow downlinks, one after the other."""
    for name in names:
        demote(swarm, swarm.members[name], 0, now=1.0)
        reclassify(swarm, swarm.members[name], slow_receiver=True)
        Planner().plan(swarm, leases=2)
    settle_all(swarm)


def settle_all(swarm: Swarm) -> None:
    """They had been where they were for a while."""
    for each in slow_receiver(swarm):
        relocate(swarm, each, now=swarm.edges.now + STAY_MAX_S)


def slow_receiver(swarm: Swarm) -> list[Member]:
    return [each for each in swarm.members.values() if each.slow_receiver]


def check(swarm: Swarm) -> None:
    """No host waits, and each slow receiver has a parent of its own whose children are leaves."""
    assert not swarm.edges.unplanned
    for each in swarm.members.values():
        found = [child for names in each.children for child in names if swarm.members[child].slow_receiver]
        assert len(found) <= 1
        assert not found or not each.slow_receiver
        assert not found or not any(feeds_others(swarm, each))


def feeds_others(swarm: Swarm, member: Member) -> list[bool]:
    """Of each child whether it forwards to others that are no slow receivers."""
    children = [(stripe, swarm.members[name]) for stripe, names in enumerate(member.children) for name in names]
    return [any(not swarm.members[name].slow_receiver for name in each.children[stripe]) for stripe, each in children]


@pytest.mark.parametrize("hosts", [24, 64, 160])
def test_each_is_where_it_costs_least(hosts: int) -> None:
    swarm = planned(hosts)
    slow_down(swarm, [f"h{number}" for number in range(0, hosts, 8)])
    check(swarm)


def test_those_known_before_get_such_places_from_the_start() -> None:
    swarm = Swarm(BLOB, LAYOUT)
    for number in range(64):
        slow = number % 8 == 0
        swarm.add(f"h{number}", [0, 0], slots=0 if slow else 2, now=0.0).slow_receiver = slow
    Planner().plan(swarm, leases=2)
    check(swarm)


def test_each_stays_in_its_rack() -> None:
    swarm = planned(128, racks=4)
    slow_down(swarm, [f"h{number}" for number in range(0, 128, 8)])
    assert not swarm.edges.unplanned
    for each in slow_receiver(swarm):
        assert {swarm.members[name or ""].rack for name in each.parents} == {each.rack}


def test_one_that_is_not_slow_after_all_gets_a_slot() -> None:
    swarm = planned(64)
    slow_down(swarm, [f"h{number}" for number in range(0, 64, 8)])
    last = slow_receiver(swarm)[-1]
    last.slots = 2
    reclassify(swarm, last, slow_receiver=False)
    Planner().plan(swarm, leases=2)
    assert all(each.load <= each.slots for each in swarm.members.values())
    settle_all(swarm)
    check(swarm)


def test_one_that_has_come_to_be_in_the_way_moves_once_there_is_a_better_place() -> None:
    swarm = planned(16)
    slow_down(swarm, ["h3"])
    late = swarm.members["h3"]
    upper = next(each for each in swarm.members.values() if any(feeds_others(swarm, each)))
    swarm.edges.set_now(10.0)
    swarm.edges.attach(0, "h3", upper.host)
    assert not relocate(swarm, late, now=10.0 + STAY_S)
    late.moved_at = (10.5, *late.moved_at[1:])
    assert not relocate(swarm, late, now=10.0 + STAY_S / 2)
    assert relocate(swarm, late, now=10.0 + STAY_S)
    check(swarm)
    assert not relocate(swarm, late, now=20.0)


def test_one_that_has_got_no_piece_where_it_is_stays_for_longer() -> None:
    """What has come of the first is lost when it moves."""
    swarm = planned(16)
    slow_down(swarm, ["h3"])
    upper = next(each for each in swarm.members.values() if any(feeds_others(swarm, each)))
    swarm.edges.set_now(10.0)
    swarm.edges.attach(0, "h3", upper.host)
    assert not relocate(swarm, swarm.members["h3"], now=10.0 + STAY_MAX_S - 0.1)
    assert relocate(swarm, swarm.members["h3"], now=10.0 + STAY_MAX_S)


def test_it_stays_at_a_host_that_loses_its_slots() -> None:
    """As it takes none."""
    swarm = planned(16)
    slow_down(swarm, ["h3"])
    late = swarm.members["h3"]
    parent = swarm.members[late.parents[0] or ""]
    demote(swarm, parent, 0, now=2.0)
    assert late.parents[0] == parent.host
    assert list(parent.children[0]) == ["h3"]


def test_it_does_not_move_from_one_bad_place_to_another() -> None:
    """Three hosts in a row: the first feeds the second, and that the third and the slow one."""
    swarm = Swarm(BLOB, LAYOUT)
    for name in ("a", "b", "c", "slow"):
        swarm.add(name, [0, 512], slots=2, now=0.0)
    for child, parent in (("a", ""), ("b", "a"), ("c", "b"), ("slow", "a")):
        swarm.edges.attach(0, child, parent)
    for name in ("b", "c"):
        swarm.members[name].absent_since = 1.0
    reclassify(swarm, swarm.members["slow"], slow_receiver=True)
    swarm.edges.attach(0, "slow", "a")
    assert not relocate(swarm, swarm.members["slow"], now=100.0)
    assert swarm.members["slow"].parents[0] == "a"


def test_they_are_well_placed_by_the_first_plan() -> None:
    """Not only once the last tree stands and they are looked at again."""
    for hosts in (200, 1000):
        swarm = Swarm(BLOB, LAYOUT)
        for number in range(hosts):
            slow = number % 8 == 0
            swarm.add(f"h{number}", [0, 0], slots=0 if slow else 2, now=0.0).slow_receiver = slow
        Planner().plan(swarm, leases=2)
        assert not [each.host for each in slow_receiver(swarm) if relocate(swarm, each, now=STAY_MAX_S)]


def test_who_has_no_slots_carries_none_while_others_can() -> None:
    swarm = Swarm(BLOB, LAYOUT)
    for number in range(64):
        slow = number % 16 == 0
        swarm.add(f"h{number}", [0, 0], slots=0 if slow or number % 5 == 1 else 2, now=0.0).slow_receiver = slow
    Planner().plan(swarm, leases=2)
    settle_all(swarm)
    assert all(swarm.members[name].slots for each in slow_receiver(swarm) for name in each.parents if name)


def test_one_leaves_a_parent_that_has_no_slots_any_more() -> None:
    swarm = Swarm(BLOB, LAYOUT)
    for name, parent in (("a", ""), ("b", "a"), ("d", "a"), ("slow", "b")):
        swarm.add(name, [100, 512], slots=2, now=0.0)
        swarm.edges.attach(0, name, parent)
    reclassify(swarm, swarm.members["slow"], slow_receiver=True)
    swarm.edges.attach(0, "slow", "b")
    swarm.members["b"].slots = 0
    assert relocate(swarm, swarm.members["slow"], now=100.0)
    assert swarm.members["slow"].parents[0] == "d"
    assert swarm.members["slow"].attached_at[0] == 100.0


def test_who_is_slow_no_more_overloads_no_host() -> None:
    swarm = Swarm(BLOB, LAYOUT)
    for name in ("a", "b", "slow"):
        swarm.add(name, [0, 0], slots=2, now=0.0)
    swarm.members["slow"].slow_receiver = True
    for stripe in range(2):
        swarm.edges.attach(stripe, "a", "")
        swarm.edges.attach(stripe, "slow", "a")
    swarm.edges.attach(0, "b", "a")
    reclassify(swarm, swarm.members["slow"], slow_receiver=False)
    assert swarm.members["a"].load <= swarm.members["a"].slots


def test_the_slot_of_one_who_is_slow_no_more_is_not_given_away_in_another_stripe() -> None:
    swarm = Swarm(BLOB, LAYOUT)
    for name in ("a", "b", "slow"):
        swarm.add(name, [0, 0], slots=2, now=0.0)
    swarm.members["a"].allotted, swarm.members["slow"].slow_receiver = (0, 2), True
    for stripe in range(2):
        swarm.edges.attach(stripe, "a", "")
    swarm.edges.attach(0, "slow", "a")
    swarm.edges.attach(1, "b", "a")
    swarm.edges.detach(1, "slow")
    reclassify(swarm, swarm.members["slow"], slow_receiver=False)
    Planner().plan(swarm, leases=2)
    assert swarm.members["slow"].parents == ["a", "b"]


def test_nor_is_it_taken_from_the_stripe_in_which_the_host_has_its_first() -> None:
    """With four stripes a slot that it has just got looked idle when the next was looked for."""
    swarm = Swarm(BLOB, PieceLayout(4096 << 20, 1 << 20))
    first, second, third, fourth = swarm.totals
    swarm.add("a", list(swarm.totals), slots=4, now=0.0)
    for name, counts in (
        ("slow", [0, 0, third, fourth]),
        ("b", [first, second, third, 0]),
        ("c", [first, second, 0, fourth]),
        ("d", [first, second, third, 0]),
    ):
        swarm.add(name, counts, slots=0 if name == "slow" else 4, now=0.0)
    upper, slow = swarm.members["a"], swarm.members["slow"]
    slow.slow_receiver, upper.allotted = True, (1, 0, 1, 2)
    for name in "bcd":
        swarm.members[name].allotted = (0,) * 4
    for stripe, name in ((3, "b"), (0, "slow"), (1, "slow")):
        swarm.edges.attach(stripe, name, "a")
    reclassify(swarm, slow, slow_receiver=False)
    assert upper.free(0) == upper.free(1) == 0
    Planner().plan(swarm, leases=0)
    assert upper.load <= upper.slots
    assert slow.parents[:2] == ["a", "a"]


def test_a_host_that_was_given_more_children_than_slots_is_looked_at_again() -> None:
    swarm = Swarm(BLOB, LAYOUT)
    for number in range(8):
        swarm.add(f"h{number}", [0, 0], slots=1, now=0.0)
    Planner().plan(swarm, leases=2)
    assert any(each.load > each.slots for each in swarm.members.values())
    assert swarm.passes.strained


def test_a_rack_does_not_receive_through_a_slow_downlink() -> None:
    """When the importer of a rack is lost and a slow receiver happens to be fed from outside,
    another one imports, and feeds that too."""
    swarm = planned(16, racks=2)
    importer = next(each for each in swarm.members.values() if each.rack == " r1" and outside(swarm, each))
    slow = next(each for each in swarm.members.values() if each.rack == " r1" and each is not importer)
    demote(swarm, slow, 0, now=1.0)
    reclassify(swarm, slow, slow_receiver=True)
    feeder = next(name for name in swarm.racks[" r0"] if not swarm.edges.receives_through(0, name, slow.host))
    swarm.edges.attach(0, slow.host, feeder)
    swarm.remove(importer.host)
    for _ in range(2):
        Planner().plan(swarm, leases=2)
    imports = [each for each in swarm.members.values() if each.rack == " r1" and outside(swarm, each)]
    assert len(imports) == 1 and not imports[0].slow_receiver
    assert not any(swarm.members[name].children[0] for name in (each.host for each in slow_receiver(swarm)))


def test_one_that_brings_a_stripe_into_its_rack_moves_to_who_has_it_there() -> None:
    """Else it would be brought in twice, and over the whole time that a slow downlink takes."""
    swarm = planned(16, racks=2)
    slow_down(swarm, ["h12"])
    late = swarm.members["h12"]
    feeder = next(name for name in swarm.racks[" r0"] if not any(feeds_others(swarm, swarm.members[name])))
    swarm.edges.set_now(10.0)
    swarm.edges.attach(0, "h12", feeder)
    late.moved_at = (11.0, *late.moved_at[1:])
    assert relocate(swarm, late, now=10.0 + STAY_S)
    assert swarm.members[late.parents[0] or ""].rack == " r1"
    check(swarm)


def outside(swarm: Swarm, member: Member) -> bool:
    """Whether a host receives the first stripe from another rack, or from the origin."""
    parent = member.parents[0]
    return parent is not None and (not parent or swarm.members[parent].rack != member.rack)


def test_a_starved_slow_receiver_receives_from_a_rescued_host_of_another_rack() -> None:
    """Nobody has looked at that rack in this plan: the planner failed."""
    swarm = Swarm(BLOB, LAYOUT)
    for name, rack in (("root", "a"), ("rescued", "b"), ("starved", "a")):
        swarm.add(name, [0, 512], slots=4, now=0.0, rack=rack, slow_receiver=name == "starved")
    for name in ("root", "rescued"):
        swarm.edges.attach(0, name, FROM_ORIGIN)
    swarm.edges.rescue(0, "rescued")
    swarm.members["rescued"].grant_slot(0)
    swarm.starved["starved"] = None
    Planner().plan(swarm, leases=1)
    assert swarm.members["starved"].parents[0] == "rescued"
