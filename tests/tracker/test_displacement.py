"""Where hosts that feed others go when they have lost their parent."""

from random import Random

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceLayout
from tracker.core.edges import changes, pairs
from tracker.core.planning.displacement import LEVELS_MIN, Displacement
from tracker.core.planning.planner import Planner
from tracker.core.planning.slot_index import SlotIndex
from tracker.core.swarm import Swarm

BLOB = digest_of(b"a tree with gaps")
STRIPES = range(2)


def flowing(hosts: int, *, racks: int = 1) -> Swarm:
    """A broadcast under way: each host has a piece less of a stripe than its parent."""
    swarm = Swarm(BLOB, PieceLayout(512 << 24, 1 << 24))
    for number in range(hosts):
        swarm.add(f"h{number}", [0, 0], slots=2, now=0.0, rack=f"r{number % racks}")
    Planner().plan(swarm, leases=2)
    for name in swarm.members:
        swarm.advance(name, [200 - swarm.edges.depth(stripe, name) for stripe in STRIPES], now=1.0)
    return swarm


def deepest(swarm: Swarm) -> int:
    return max(swarm.edges.depth(stripe, name) for stripe in STRIPES for name in swarm.members)


def inner(swarm: Swarm, stripe: int, depth: int) -> str:
    """A host at a depth that feeds two others that feed others."""
    names = (name for name in swarm.members if swarm.edges.depth(stripe, name) == depth)
    return next(name for name in names if len(swarm.members[name].children[stripe]) == 2)


def lose(swarm: Swarm, host: str) -> int:
    """A host dies and its children get parents; return how many streams change."""
    swarm.edges.changed.clear()
    swarm.remove(host)
    Planner().plan(swarm, leases=2)
    assert not swarm.edges.unplanned
    assert all(swarm.edges.rooted(stripe, name) for stripe in STRIPES for name in swarm.members)
    return len(list(changes(swarm.edges)))


@pytest.mark.parametrize("depth", range(1, 7))
def test_a_lost_host_makes_a_tree_one_level_deeper_at_most(depth: int) -> None:
    """Whatever depends on it. Once all of it went to the bottom of the tree: the loss of a host
    near the root made that twice as deep."""
    swarm = flowing(1000)
    before, victim = deepest(swarm), inner(swarm, 0, depth)
    streams = lose(swarm, victim)
    assert deepest(swarm) <= before + LEVELS_MIN
    assert streams <= before + 3  # one for each level


def test_trees_stay_flat_though_one_host_after_the_other_is_lost() -> None:
    """A twentieth of a thousand hosts."""
    swarm = flowing(1000)
    before = deepest(swarm)
    for number in range(3, 1000, 20):
        lose(swarm, f"h{number}")
    assert deepest(swarm) <= before + 4
    assert max(member.load for member in swarm.members.values()) <= 2


def test_many_hosts_that_are_lost_at_once_make_no_tree_much_deeper() -> None:
    """Each position that is taken changes the levels below all hosts above it. Where these were not
    counted anew, hosts that feed most by now went further down: trees became four levels deeper."""
    for seed in (1, 2, 6):
        swarm = flowing(1000)
        before = deepest(swarm)
        roots = {name for names in swarm.edges.roots for name in names}
        for name in Random(seed).sample([name for name in swarm.members if name not in roots], 150):
            swarm.remove(name)
        Planner().plan(swarm, leases=2)
        assert deepest(swarm) <= before + 4


def test_the_depth_of_the_shallowest_free_slot_is_found_behind_taken_ones() -> None:
    """The first of a heap may have been taken by way of another entry of it."""
    swarm = flowing(300)
    leaves = [name for name, each in swarm.members.items() if each.parents[0] and not each.children[0]]
    for name in Random(1).sample(leaves, 60):
        swarm.edges.detach(0, name)
    index, child = SlotIndex(swarm, 0, []), swarm.members["h0"]
    assert index.depth_for(child) is not None
    reached = (name for name, each in swarm.members.items() if each.free(0) > 0 and swarm.edges.rooted(0, name))
    free = sorted((swarm.edges.depth(0, name), name) for name in reached)
    for number in range(len(free) - 1):
        depth, name = free[number]
        assert index.depth_for(child) == depth + 1
        swarm.members[name].allot(0, -swarm.members[name].free(0))


def test_a_host_waits_for_few_pieces_at_its_new_parent() -> None:
    swarm = flowing(1000)
    lose(swarm, inner(swarm, 0, 2))
    for name, stripe in changes(swarm.edges):
        member = swarm.members[name]
        parent = swarm.members[member.parents[stripe] or ""]
        if member.children[stripe]:
            assert parent.counts[stripe] >= member.counts[stripe] - LEVELS_MIN


def test_what_is_below_a_late_host_is_no_position() -> None:
    """Its depth says nothing then."""
    swarm = flowing(300)
    victim = inner(swarm, 0, 3)
    orphans = swarm.members[victim].children[0]
    late = [name for name in swarm.members if swarm.edges.depth(0, name) <= 3 and name != victim]
    for name in late:
        swarm.members[name].counts = (20, 20)
    swarm.remove(victim)
    displacement = Displacement(swarm, 0)
    for orphan in orphans:
        found = displacement.find(swarm.members[orphan], 12)
        assert found is None or found[1] not in late


def test_displacement_stays_within_the_rack() -> None:
    swarm = flowing(400, racks=4)
    lose(swarm, inner(swarm, 0, 3))
    for stripe in STRIPES:
        imports = [
            name
            for name, parent in pairs(swarm.edges, stripe)
            if not parent or _rack(swarm, name) != _rack(swarm, parent)
        ]
        assert len({_rack(swarm, name) for name in imports}) == 4
        assert len(imports) <= 5


def _rack(swarm: Swarm, name: str) -> str:
    return swarm.members[name].rack
