"""The planner: exact slots, flat trees, no cycles."""

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceLayout
from tracker.core.edges import pairs
from tracker.core.member import FROM_ORIGIN
from tracker.core.planning.planner import Planner
from tracker.core.swarm import Swarm

BLOB = digest_of(b"blob")


def planned(hosts: int, size: int = 64 << 20) -> Swarm:
    swarm = Swarm(BLOB, PieceLayout(size, 65536))
    for number in range(hosts):
        swarm.add(f"h{number}", [0] * swarm.stripes, slots=swarm.stripes, now=0.0)
    Planner().plan(swarm, leases=swarm.stripes)
    return swarm


def test_every_host_has_a_parent_in_every_stripe_and_one_reads_the_origin() -> None:
    swarm = planned(24)
    assert not swarm.edges.unplanned
    for stripe in range(swarm.stripes):
        edges = dict(pairs(swarm.edges, stripe))
        assert len(edges) == 24
        assert list(edges.values()).count(FROM_ORIGIN) == 1


def test_slots_are_exact_and_no_host_has_more_children_than_stripes() -> None:
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
        assert max(swarm.edges.depth(stripe, host) for host in swarm.members) <= 12


def test_an_orphan_is_not_put_below_its_own_descendants() -> None:
    """Whichever host is removed: the trees of the others stay trees, though the only free slots are
    often below the orphans."""
    for victim in range(40):
        swarm = planned(40)
        swarm.remove(f"h{victim}")
        Planner().plan(swarm, leases=64)
        assert not swarm.edges.unplanned
        for stripe in range(swarm.stripes):
            for host in swarm.members:
                assert swarm.edges.rooted(stripe, host)
                assert swarm.edges.depth(stripe, host) <= 40


def joined_in_batches(hosts: int, batch: int) -> Swarm:
    swarm = Swarm(BLOB, PieceLayout(64 << 20, 65536))
    for number in range(hosts):
        swarm.add(f"h{number}", [0] * swarm.stripes, slots=swarm.stripes, now=0.0)
        if (number + 1) % batch == 0 or number + 1 == hosts:
            Planner().plan(swarm, leases=64)
    return swarm


def test_however_hosts_come_no_host_is_overloaded_and_the_trees_stay_flat() -> None:
    """One by one, in small batches or all at once: exact slots, and about as deep as when all are
    known from the start."""
    for hosts in (5, 24, 100, 300):
        full = planned(hosts)
        deepest = max(full.edges.depth(stripe, host) for stripe in range(2) for host in full.members)
        for batch in (1, 2, 3, 7, 24):
            swarm = joined_in_batches(hosts, batch)
            assert not swarm.edges.unplanned
            assert max(member.load for member in swarm.members.values()) <= swarm.stripes, (hosts, batch)
            assert sum(member.load for member in swarm.members.values()) == swarm.stripes * (hosts - 1)
            assert all(len(roots) == 1 for roots in swarm.edges.roots)
            depth = max(swarm.edges.depth(stripe, host) for stripe in range(2) for host in swarm.members)
            # Since the trees were last drawn at most a fifth has come, in batches that may be
            # below one another.
            batches = -(-hosts // 5 // batch)
            assert depth <= deepest + 2 + batches * batch.bit_length(), (hosts, batch, depth)


def test_who_came_first_is_not_hung_below_who_came_later() -> None:
    """Each host has 12 pieces of each stripe more when the next one comes: it would wait for so
    many."""
    swarm = Swarm(BLOB, PieceLayout(64 << 20, 65536))
    for number in range(24):
        swarm.add(f"h{number}", [0] * swarm.stripes, slots=swarm.stripes, now=0.0)
        Planner().plan(swarm, leases=swarm.stripes)
        for stripe in range(swarm.stripes):
            for child, parent in pairs(swarm.edges, stripe):
                assert parent == FROM_ORIGIN or int(parent[1:]) < int(child[1:])
        for host, member in swarm.members.items():
            swarm.advance(host, [count + 12 for count in member.counts], now=0.3 * number)
    assert max(member.load for member in swarm.members.values()) <= swarm.stripes


def test_trees_are_not_drawn_anew_once_pieces_have_come_far() -> None:
    swarm = joined_in_batches(10, 10)
    for host in list(swarm.members):
        swarm.advance(host, [60] * 2, now=1.0)
    before = {host: list(member.parents) for host, member in swarm.members.items()}
    for number in range(10, 20):
        swarm.add(f"h{number}", [0] * 2, slots=2, now=1.0)
    Planner().plan(swarm, leases=64)
    assert all(swarm.members[host].parents == parents for host, parents in before.items())


@pytest.mark.parametrize("hosts", [2, 4, 5, 24, 100])
def test_where_both_ways_are_gone_those_by_bittorrent_read_for_all(hosts: int) -> None:
    """Whatever their share. Slots stay exact, and a host reads each stripe where there are enough
    of them."""
    for swarming in {1, 2, hosts // 4, hosts // 2, hosts - 1} - {0, hosts}:
        swarm = Swarm(BLOB, PieceLayout(64 << 20, 65536))
        for number in range(hosts):
            swarm.add(f"h{number}", [0] * swarm.stripes, slots=swarm.stripes, now=0.0)
            swarm.set_transport(f"h{number}", number < swarming)
        Planner().plan(swarm, leases=swarm.stripes)
        roots = {root for roots in swarm.edges.roots for root in roots}
        assert not swarm.edges.unplanned and len(roots) == min(swarming, swarm.stripes)
        assert roots <= set(swarm.swarming), (hosts, swarming)
        assert max(member.load for member in swarm.members.values()) <= swarm.stripes
        assert sum(member.load for member in swarm.members.values()) == swarm.stripes * (hosts - 1)


def test_who_came_first_by_trees_reads_on() -> None:
    """A lease does not move because a host comes that receives by BitTorrent: what was read would
    be read again."""
    swarm = planned(4)
    before = [list(roots) for roots in swarm.edges.roots]
    for number in range(4, 12):
        swarm.add(f"h{number}", [0] * swarm.stripes, slots=swarm.stripes, now=0.0)
        swarm.set_transport(f"h{number}", True)
        Planner().plan(swarm, leases=swarm.stripes)
    assert [list(roots) for roots in swarm.edges.roots] == before
