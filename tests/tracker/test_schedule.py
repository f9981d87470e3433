"""When swarms are planned: not before they are due, not too often, and at little cost while nothing
is."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.pieces import PieceLayout
from tracker.core.planning.schedule import (
    AT_ONCE_MAX,
    CROWD,
    JOIN_BATCH_S,
    JOIN_QUIET_S,
    PAUSE_S_PER_MEMBER,
    PLAN_S_PER_MEMBER,
    Schedule,
)
from tracker.core.swarm import Swarm

PIECE = 64 << 10


def swarms(*numbers: int) -> dict[Digest, Swarm]:
    """A swarm for each number, with so many members."""
    found = {}
    for index, number in enumerate(numbers):
        swarm = Swarm(digest_of(bytes([index])), PieceLayout(PIECE, PIECE))
        for host in range(number):
            swarm.add(f"h{host}", [0], slots=1, now=0.0)
        found[swarm.blob] = swarm
    return found


def test_each_is_planned_once_when_it_is_due() -> None:
    known, schedule = swarms(1, 1), Schedule()
    one, other = known
    schedule.ask(one, "join", 1.0)
    schedule.ask(one, "join", 3.0)
    schedule.ask(other, "join", 2.0)
    assert schedule.next_at == 1.0
    assert schedule.take(known, 0.9) == []
    assert schedule.take(known, 1.0) == [known[one]]
    assert schedule.next_at == 2.0
    assert schedule.take(known, 5.0) == [known[other]]
    assert schedule.take(known, 9.0) == [] and schedule.next_at == inf


def test_a_large_swarm_is_not_planned_at_every_event() -> None:
    known, schedule = swarms(AT_ONCE_MAX + 1000), Schedule()
    ((blob, swarm),) = known.items()
    pause_s = 1000 * PAUSE_S_PER_MEMBER
    for asked, planned in ((0.0, True), (pause_s / 2, False), (pause_s, True)):
        schedule.ask(blob, "join", asked)
        assert (schedule.take(known, asked) == [swarm]) is planned
        assert schedule.next_at == (inf if planned else pause_s)


def test_after_a_pass_that_found_little_to_do_the_next_need_not_wait_long() -> None:
    """And the more it finds the longer, up to what a pass over all members takes."""
    members = 100 * AT_ONCE_MAX
    known, schedule = swarms(members), Schedule()
    ((blob, swarm),) = known.items()
    pauses = []
    for edges in (0, 100, members):
        swarm.edges.unplanned = dict.fromkeys((0, f"h{host}") for host in range(edges))
        schedule.ask(blob, "slow", 10.0 * edges)
        assert schedule.take(known, 10.0 * edges) == [swarm]
        pauses.append(swarm.passes.rested_at - 10.0 * edges)
        swarm.edges.unplanned.clear()
    assert pauses == sorted(pauses) and pauses[0] < pauses[1] / 2 < pauses[2] / 2
    assert pauses[2] == pytest.approx((members - AT_ONCE_MAX) * PAUSE_S_PER_MEMBER)


def test_who_shall_not_wait_for_a_tick_is_told_of() -> None:
    known, schedule = swarms(1, 1), Schedule()
    one, other = known
    schedule.ask(one, "join", 2.0)
    assert schedule.wake_at == inf
    schedule.ask(other, "join", 4.0, wake=True)
    assert schedule.wake_at == 4.0
    schedule.take(known, 2.0)
    assert schedule.wake_at == 4.0
    schedule.take(known, 4.0)
    assert schedule.wake_at == inf


def test_each_that_shall_not_wait_for_a_tick_is_told_of() -> None:
    known, schedule = swarms(1, 1), Schedule()
    one, other = known
    schedule.ask(one, "join", 2.0, wake=True)
    schedule.ask(other, "join", 3.0, wake=True)
    assert schedule.take(known, 2.0) == [known[one]]
    assert schedule.wake_at == 3.0
    schedule.forget(other)
    schedule.take(known, 4.0)
    assert schedule.wake_at == inf


def test_a_retry_is_for_want_of_anything_sooner() -> None:
    known, schedule = swarms(1), Schedule()
    (blob,) = known
    schedule.retry(blob, 5.0)
    schedule.retry(blob, 3.0)
    assert schedule.take(known, 3.0) == []
    schedule.ask(blob, "join", 4.0)
    assert schedule.take(known, 4.0) == [known[blob]]
    schedule.retry(blob, 6.0)
    schedule.forget(blob)
    assert schedule.take(known, 7.0) == []


def test_a_crowd_is_planned_once_no_more_of_it_comes() -> None:
    known, schedule = swarms(CROWD), Schedule()
    ((blob, swarm),) = known.items()
    swarm.stripes = 2
    schedule.join(swarm, 1.0)
    schedule.join(swarm, 1.02)
    assert schedule.wake_at <= 1.0 + JOIN_QUIET_S
    assert schedule.take(known, 1.0 + JOIN_QUIET_S) == []
    assert schedule.wake_at == schedule.next_at == 1.02 + JOIN_QUIET_S
    assert schedule.take(known, 1.02 + JOIN_QUIET_S) == [swarm]
    assert schedule.wake_at == schedule.next_at == inf
    schedule.join(swarm, 2.0)
    schedule.ask(blob, "stuck", 2.01)
    assert schedule.take(known, 2.01) == [swarm], "what cannot wait does not wait for a crowd"
    assert schedule.take(known, 3.0) == []


def test_a_crowd_is_not_waited_for_for_ever() -> None:
    known, schedule = swarms(CROWD), Schedule()
    (swarm,) = known.values()
    swarm.stripes = 2
    joins = [JOIN_QUIET_S / 2 * number for number in range(100)]
    planned = []
    for now in joins:
        planned += [now for _ in schedule.take(known, now)]
        schedule.join(swarm, now)
    assert planned and all(
        JOIN_BATCH_S <= later - sooner < 2 * JOIN_BATCH_S for sooner, later in pairwise([0.0, *planned])
    )


@pytest.mark.parametrize(
    ("members", "wait_s"), [(CROWD, JOIN_BATCH_S), (1000, JOIN_BATCH_S), (10_000, 10_000 * PLAN_S_PER_MEMBER)]
)
def test_a_crowd_that_still_comes_is_waited_for_as_long_as_its_plan_takes(members: int, wait_s: float) -> None:
    """Thousands of hosts that join over a second are given a few large plans, not many smaller ones
    of which each draws the trees anew."""
    known, schedule = swarms(members), Schedule()
    (swarm,) = known.values()
    swarm.stripes = 2
    now = step = JOIN_QUIET_S / 2
    while not schedule.take(known, now):
        schedule.join(swarm, now)
        now += step
    assert wait_s <= now - step <= wait_s + 2 * step


def test_the_first_hosts_are_not_planned_before_a_crowd_can_be_there() -> None:
    known, schedule = swarms(CROWD - 1), Schedule()
    (swarm,) = known.values()
    swarm.stripes = 2
    schedule.join(swarm, 1.0)
    assert schedule.take(known, 1.0 + 2 * JOIN_QUIET_S) == []
    assert schedule.take(known, 1.0 + JOIN_BATCH_S) == [swarm]


def test_joins_to_a_large_swarm_that_rests_cost_one_comparison() -> None:
    """Due long ago and not to be planned yet: the schedule does not look through all that wait
    before it is."""
    known, schedule = swarms(AT_ONCE_MAX + 10_000), Schedule()
    (swarm,) = known.values()
    swarm.stripes = 2
    schedule.join(swarm, 0.0)
    assert schedule.take(known, JOIN_BATCH_S) == [swarm]
    rested_at = JOIN_BATCH_S + 10_000 * PAUSE_S_PER_MEMBER
    for step in range(1, 29):
        schedule.join(swarm, JOIN_BATCH_S + step / 100)
        schedule.take(known, JOIN_BATCH_S + step / 100)
        assert schedule.next_at == schedule.wake_at == rested_at
    assert schedule.take(known, rested_at + JOIN_QUIET_S) == [swarm]
