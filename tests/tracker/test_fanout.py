"""Fanout: the number of children with which a small blob is soonest everywhere."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Holding
from p2pdist.model.pieces import PieceLayout
from tracker.core.capacity import FANOUT_MAX, HOP_S, RATE_BYTES_S, SEND_S, arrival_s, fanout, levels
from tracker.core.edges import pairs
from tracker.core.events import Received, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.member import FROM_ORIGIN
from tracker.core.planning.schedule import SMALL_BATCH_S

PIECE = 64 << 10
BLOB = digest_of(b"blob")

host_numbers = st.integers(1, 20_000)
pieces = st.integers(1, 15)
rates = st.floats(1e5, 1e11)


def cut(count: int) -> PieceLayout:
    return PieceLayout(count * PIECE, PIECE)


@given(host_numbers, pieces, rates)
def test_no_other_number_of_children_is_sooner(hosts: int, count: int, rate: float) -> None:
    chosen = fanout(hosts, cut(count), rate)
    assert 1 <= chosen <= max(1, min(FANOUT_MAX, hosts - 1))
    others = range(1, max(1, min(FANOUT_MAX, hosts - 1)) + 1)
    assert arrival_s(chosen, hosts, cut(count), rate) == min(arrival_s(k, hosts, cut(count), rate) for k in others)


@given(st.integers(1, 12), st.integers(1, 4), pieces, rates)
def test_the_model_is_what_a_walk_through_a_full_tree_gives(children: int, depth: int, count: int, rate: float) -> None:
    """Host by host: a host that has a piece sends it to one child after the other, and then the
    next piece."""
    piece_s = PIECE / rate + SEND_S
    hosts, level, latest = 1, 1, 0.0
    # The last child of the last child, and so on, is the last to get everything; all that are
    # beside it are served before.
    arrivals = [0.0] * count
    for _ in range(depth):
        level *= children
        hosts += level
        free_at, passed = 0.0, []
        for arrival in arrivals:
            free_at = max(arrival, free_at) + children * piece_s
            passed.append(free_at + HOP_S)
        arrivals = passed
    latest = arrivals[-1]
    assert levels(children, hosts) == pytest.approx(depth)
    assert arrival_s(children, hosts, cut(count), rate) == pytest.approx(latest)


@given(st.lists(host_numbers, min_size=2, max_size=6), pieces, rates)
def test_more_hosts_never_ask_for_fewer_children(numbers: list[int], count: int, rate: float) -> None:
    chosen = [fanout(hosts, cut(count), rate) for hosts in sorted(numbers)]
    assert all(one <= other for one, other in pairwise(chosen))


@given(host_numbers, st.lists(pieces, min_size=2, max_size=6), rates)
def test_more_pieces_never_ask_for_more_children(hosts: int, counts: list[int], rate: float) -> None:
    chosen = [fanout(hosts, cut(count), rate) for count in sorted(counts)]
    assert all(one >= other for one, other in pairwise(chosen))


@given(host_numbers, pieces, st.lists(rates, min_size=2, max_size=6))
def test_faster_uplinks_never_ask_for_fewer_children(hosts: int, count: int, some_rates: list[float]) -> None:
    chosen = [fanout(hosts, cut(count), rate) for rate in sorted(some_rates)]
    assert all(one <= other for one, other in pairwise(chosen))


def test_while_no_rate_is_known_a_moderate_one_is_taken() -> None:
    assert fanout(200, cut(1), 0.0) == fanout(200, cut(1), RATE_BYTES_S) > 2
    assert fanout(2, cut(1), 0.0) == fanout(1, cut(1), 0.0) == 1


def site(hosts: int, *, size: int = PIECE, rate_bytes_s: float = 0.0, slow: int = 0) -> Fleet:
    """A fleet in which so many hosts have joined and been planned, the first `slow` of them with a
    tenth of the uplink."""
    fleet = Fleet(-100.0)
    for number in range(hosts):
        fleet.handle(SessionOpened(number, Hello(PROTOCOL_VERSION, f"h{number}", f"h{number}:1")), now=0.0)
        if rate_bytes_s:
            fleet.capacities.sample(f"h{number}", int(rate_bytes_s), 1.0)
        if number < slow:
            fleet.capacities.mark_slow(f"h{number}", 0.1, downlink=False, now=0.0)
    for number in range(hosts):
        fleet.handle(Received(number, Holding(BLOB, size, PIECE, (0,))), now=0.0)
    fleet.handle(Tick(), now=SMALL_BATCH_S)
    return fleet


def test_a_swarm_is_as_flat_as_its_size_and_its_uplinks_ask_for() -> None:
    for rate, slots in ((2e9, fanout(300, cut(1), 2e9)), (5e6, fanout(300, cut(1), 5e6))):
        swarm = site(300, rate_bytes_s=rate).swarms[BLOB]
        assert not swarm.edges.unplanned
        assert max(member.load for member in swarm.members.values()) == slots
        flat = next(depth for depth in range(300) if sum(slots**level for level in range(depth + 1)) >= 300)
        assert max(swarm.edges.depth(0, host) for host in swarm.members) == flat + 1
    assert fanout(300, cut(1), 2e9) > fanout(300, cut(1), 5e6)


def test_slow_hosts_get_fewer_children_or_none() -> None:
    swarm = site(100, rate_bytes_s=2e9, slow=20).swarms[BLOB]
    assert not swarm.edges.unplanned
    slow = [swarm.members[f"h{number}"] for number in range(20)]
    assert all(member.slots < swarm.fanout and member.load <= member.slots for member in slow)


def test_a_swarm_that_grows_gets_wider_and_no_host_is_moved() -> None:
    fleet = site(4, rate_bytes_s=1e9)
    swarm = fleet.swarms[BLOB]
    narrow, before = swarm.fanout, dict(pairs(swarm.edges, 0))
    for number in range(4, 400):
        fleet.handle(SessionOpened(number, Hello(PROTOCOL_VERSION, f"h{number}", f"h{number}:1")), now=1.0)
        fleet.handle(Received(number, Holding(BLOB, PIECE, PIECE, (0,))), now=1.0)
    fleet.handle(Tick(), now=1.0 + SMALL_BATCH_S)
    assert swarm.fanout > narrow
    assert dict(pairs(swarm.edges, 0)).items() >= before.items()
    assert list(before.values()).count(FROM_ORIGIN) == 1
    assert all(member.load <= member.slots == swarm.fanout for member in swarm.members.values())


def test_hosts_that_come_one_by_one_do_not_form_a_chain() -> None:
    """Each is planned before the next joins, as when a burst takes longer than a batch."""
    fleet = Fleet(-100.0)
    for number in range(200):
        now = number * 2 * SMALL_BATCH_S
        fleet.handle(SessionOpened(number, Hello(PROTOCOL_VERSION, f"h{number}", f"h{number}:1")), now=now)
        fleet.handle(Received(number, Holding(BLOB, PIECE, PIECE, (0,))), now=now)
        fleet.handle(Tick(), now=now + SMALL_BATCH_S)
    swarm = fleet.swarms[BLOB]
    assert max(swarm.edges.depth(0, host) for host in swarm.members) <= 6
    assert max(member.load for member in swarm.members.values()) <= swarm.fanout


def test_a_lower_rate_takes_slots_but_no_children() -> None:
    fleet = site(50, rate_bytes_s=2e9)
    swarm = fleet.swarms[BLOB]
    before, wide = dict(pairs(swarm.edges, 0)), swarm.fanout
    for _ in range(20):
        for number in range(50):
            fleet.capacities.sample(f"h{number}", int(3e6), 1.0)
            fleet.capacities.typical()
    fleet.handle(SessionOpened(50, Hello(PROTOCOL_VERSION, "h50", "h50:1")), now=1.0)
    fleet.handle(Received(50, Holding(BLOB, PIECE, PIECE, (0,))), now=1.0)
    fleet.handle(Tick(), now=1.0 + SMALL_BATCH_S)
    assert swarm.fanout < wide
    assert dict(pairs(swarm.edges, 0)).items() >= before.items()
    assert all(member.load <= max(member.slots, 0) for member in swarm.members.values())
    assert all(sum(member.allotted) <= member.slots for member in swarm.members.values())
