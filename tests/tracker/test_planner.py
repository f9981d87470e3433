"""The planner: exact seats, flat trees, no cycles."""

from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceLayout
from tracker.core.planner import Planner
from tracker.core.swarm import FROM_ORIGIN, Swarm

BLOB = digest_of(b"blob")


def planned(hosts: int, size: int = 64 << 20) -> Swarm:
    swarm = Swarm(BLOB, PieceLayout(size, 65536))
    for number in range(hosts):
        swarm.add(f"h{number}", [0] * swarm.stripes, budget=swarm.stripes, now=0.0)
    Planner().plan(swarm, leases=swarm.stripes)
    return swarm


def test_every_host_has_a_parent_in_every_stripe_and_one_reads_the_origin() -> None:
    swarm = planned(24)
    assert not swarm.unplanned
    for stripe in range(swarm.stripes):
        edges = dict(swarm.edges(stripe))
        assert len(edges) == 24
        assert list(edges.values()).count(FROM_ORIGIN) == 1


def test_seats_are_exact_and_nobody_has_more_children_than_stripes() -> None:
    for hosts in (1, 2, 3, 5, 24, 100, 2600):
        swarm = planned(hosts)
        assert max(member.load for member in swarm.members.values()) <= swarm.stripes
        assert sum(member.load for member in swarm.members.values()) == swarm.stripes * (hosts - 1)


def test_a_host_forwards_in_two_stripes_at_most() -> None:
    swarm = planned(1000)
    assert max(sum(1 for kids in member.children if kids) for member in swarm.members.values()) <= 2


def test_trees_are_flat() -> None:
    swarm = planned(2600)
    for stripe in range(swarm.stripes):
        assert max(swarm.depth(stripe, host) for host in swarm.members) <= 8


def test_an_orphan_is_not_put_below_its_own_descendants() -> None:
    """Whoever is removed: the trees of the others stay trees, though the only free seats are often below the orphans."""
    for victim in range(40):
        swarm = planned(40)
        swarm.remove(f"h{victim}")
        Planner().plan(swarm, leases=64)
        assert not swarm.unplanned
        for stripe in range(swarm.stripes):
            for host in swarm.members:
                assert swarm.rooted(stripe, host)
                assert swarm.depth(stripe, host) <= 40
