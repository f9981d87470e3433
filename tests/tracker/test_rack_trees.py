"""Trees across racks: one importer a rack and stripe, the rest feed from inside; zones read for
themselves."""

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceLayout
from tracker.core.edges import Edges, pairs
from tracker.core.member import FROM_ORIGIN
from tracker.core.planning.planner import Planner
from tracker.core.swarm import Swarm

BLOB = digest_of(b"blob")


def planned(hosts: int, racks: int, *, zones: int = 1, batch: int = 0, leases: int = 64) -> Swarm:
    swarm = Swarm(BLOB, PieceLayout(64 << 20, 65536))
    for number in range(hosts):
        rack = number * racks // hosts
        slots = swarm.stripes
        swarm.add(f"h{number}", [0] * slots, slots=slots, now=0.0, zone=f"z{rack * zones // racks}", rack=f"r{rack}")
        if batch and (number + 1) % batch == 0:
            Planner().plan(swarm, leases=leases)
    Planner().plan(swarm, leases=leases)
    return swarm


def imports(swarm: Swarm, stripe: int) -> dict[str, int]:
    """By rack how many of its hosts receive from outside."""
    found = dict.fromkeys(swarm.racks, 0)
    for child, parent in pairs(swarm.edges, stripe):
        if parent == FROM_ORIGIN or swarm.members[parent].rack != swarm.members[child].rack:
            found[swarm.members[child].rack] += 1
    return found


@pytest.mark.parametrize(("hosts", "racks"), [(24, 3), (24, 4), (100, 7), (320, 10), (64, 64), (3200, 100)])
def test_each_rack_imports_each_stripe_once_and_no_host_is_overloaded(hosts: int, racks: int) -> None:
    swarm = planned(hosts, racks)
    assert not swarm.edges.unplanned
    for stripe in range(swarm.stripes):
        assert set(imports(swarm, stripe).values()) == {1}
        assert len(swarm.edges.roots[stripe]) == 1
        assert all(swarm.edges.rooted(stripe, host) for host in swarm.members)
    assert max(member.load for member in swarm.members.values()) <= swarm.stripes


def test_a_rack_sends_out_no_more_than_a_host() -> None:
    """So an uplink of a rack that is as fast as one host's carries what leaves it."""
    swarm = planned(320, 10)
    sent = dict.fromkeys(swarm.racks, 0)
    for stripe in range(swarm.stripes):
        for child, parent in pairs(swarm.edges, stripe):
            if parent != FROM_ORIGIN and swarm.members[parent].rack != swarm.members[child].rack:
                sent[swarm.members[parent].rack] += 1
    assert max(sent.values()) <= swarm.stripes


def test_racks_form_a_tree_and_not_a_chain() -> None:
    swarm = planned(3200, 100)
    assert max(swarm.edges.depth(stripe, host) for stripe in range(2) for host in swarm.members) <= 20


@pytest.mark.parametrize("batch", [1, 3, 5, 8])
def test_hosts_that_come_in_batches_stand_as_well(batch: int) -> None:
    swarm = planned(24, 3, batch=batch)
    assert max(member.load for member in swarm.members.values()) <= swarm.stripes
    for stripe in range(swarm.stripes):
        assert set(imports(swarm, stripe).values()) == {1}


def test_when_an_importer_dies_another_host_of_its_rack_imports() -> None:
    swarm = planned(24, 3)
    for stripe in range(swarm.stripes):
        for victim in [each for each in swarm.members if swarm.edges.rooted(stripe, each)][:5]:
            swarm.remove(victim)
            Planner().plan(swarm, leases=64)
            assert not swarm.edges.unplanned
            assert set(imports(swarm, stripe).values()) == {1}


def test_each_zone_reads_the_origin_for_itself() -> None:
    swarm = planned(60, 6, zones=2)
    for stripe in range(swarm.stripes):
        assert sorted(swarm.members[root].zone for root in swarm.edges.roots[stripe]) == ["z0", "z1"]
        for child, parent in pairs(swarm.edges, stripe):
            assert parent == FROM_ORIGIN or swarm.members[parent].zone == swarm.members[child].zone


def test_names_with_slashes_keep_racks_apart() -> None:
    swarm = Swarm(BLOB, PieceLayout(64 << 20, 65536))
    for number, (zone, rack) in enumerate([("a", "b/c"), ("a/b", "c")] * 4):
        swarm.add(f"h{number}", [0, 0], slots=2, now=0.0, zone=zone, rack=rack)
    assert len(swarm.racks) == 2
    Planner().plan(swarm, leases=8)
    for stripe in range(2):
        assert sorted(swarm.members[root].zone for root in swarm.edges.roots[stripe]) == ["a", "a/b"]


def test_many_racks_that_lack_slots_are_planned_in_time_that_grows_with_them() -> None:
    """Work is counted, not timed: a thousand racks of one host, none of which may serve."""
    swarm = Swarm(BLOB, PieceLayout(64 << 20, 65536))
    for number in range(1000):
        swarm.add(f"h{number}", [0, 0], slots=0, now=0.0, rack=f"r{number}")
    looks = 0
    rooted = Edges.rooted

    def counted(self: Edges, stripe: int, host: str) -> bool:
        nonlocal looks
        looks += 1
        return rooted(self, stripe, host)

    Edges.rooted = counted  # type: ignore[method-assign]
    try:
        Planner().plan(swarm, leases=8)
    finally:
        Edges.rooted = rooted  # type: ignore[method-assign]
    assert not swarm.edges.unplanned
    assert looks < 50_000


def test_a_zone_without_a_lease_is_fed_from_another() -> None:
    """The cap of the origin holds, and no host waits."""
    swarm = planned(60, 6, zones=2, leases=2)
    assert sum(map(len, swarm.edges.roots)) == 2
    assert not swarm.edges.unplanned


def test_a_rack_that_gets_a_second_importer_keeps_one() -> None:
    """The way up of the first one was broken when the second one was planned."""
    swarm = planned(24, 3)
    root = next(iter(swarm.edges.roots[0]))
    importer = next(
        each
        for each in swarm.members.values()
        if each.parents[0] and swarm.members[each.parents[0]].rack != each.rack and each.children[0]
    )
    waiting = next(each for each in importer.children[0])
    for host in (root, importer.parents[0] or "", waiting):
        swarm.edges.detach(0, host)
    for _ in range(3):
        Planner().plan(swarm, leases=64)
    assert not swarm.edges.unplanned
    assert set(imports(swarm, 0).values()) == {1}


@pytest.mark.parametrize("rack", range(4))
def test_the_rack_of_those_who_receive_by_bittorrent_reads_for_the_others(rack: int) -> None:
    """One importer a rack all the same, and no host is overloaded."""
    swarm = Swarm(BLOB, PieceLayout(64 << 20, 65536))
    for number in range(24):
        swarm.add(f"h{number}", [0] * swarm.stripes, slots=swarm.stripes, now=0.0, rack=f"r{number // 6}")
        swarm.set_transport(f"h{number}", number // 6 == rack and number % 2 == 0)
    Planner().plan(swarm, leases=64)
    assert not swarm.edges.unplanned
    for stripe in range(swarm.stripes):
        assert set(swarm.edges.roots[stripe]) <= set(swarm.swarming) and len(swarm.edges.roots[stripe]) == 1
        assert set(imports(swarm, stripe).values()) == {1}
    assert max(member.load for member in swarm.members.values()) <= swarm.stripes


def test_an_importer_above_the_other_importer_of_its_rack_is_not_taken_away() -> None:
    """It would wait for a parent as long as the other one waits for it."""
    swarm = Swarm(BLOB, PieceLayout(64 << 20, 65536))
    for name, rack, count in (("o", "c", 500), ("x", "a", 100), ("y", "b", 300), ("z", "a", 200)):
        swarm.add(name, [count, 512], slots=2, now=0.0, rack=rack)
    for child, parent in (("o", FROM_ORIGIN), ("y", "x"), ("z", "y")):
        swarm.edges.attach(0, child, parent)
    for _ in range(3):
        Planner().plan(swarm, leases=0)
    assert not swarm.edges.unplanned
