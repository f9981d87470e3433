"""Readings of one blob take turns from the lowest piece on; none waits for what stands still."""

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.core.demand.reading_queue import GAP_S, STILL_S, WAIT_S, Reading, ReadingQueue


def long() -> Reading:
    return Reading(short=False)


def test_the_lowest_has_a_turn_and_the_next_one_when_it_is_over() -> None:
    turns, first, second = ReadingQueue(), long(), long()
    turns.reads(second, 50, now=0.0)
    assert turns.has(second, now=0.0)
    turns.reads(first, 0, now=0.1)
    assert turns.has(first, now=0.1) and not turns.has(second, now=0.1)
    first.over = True
    assert turns.has(second, now=0.1)


def test_a_reading_whose_client_takes_nothing_has_no_turn_and_takes_none() -> None:
    turns, first, second = ReadingQueue(), long(), long()
    turns.reads(first, 0, now=0.0)
    turns.reads(second, 50, now=GAP_S * 1.5)
    assert not turns.has(first, now=GAP_S * 1.5)
    assert turns.has(second, now=GAP_S * 1.5)
    assert not turns.has(long(), now=0.0)


def test_a_reading_that_stands_still_holds_up_no_other_one() -> None:
    turns, first, second = ReadingQueue(), long(), long()
    now = 0.0
    while now < STILL_S:
        turns.reads(first, 0, now=now)
        turns.reads(second, 50, now=now)
        assert not turns.has(second, now=now)
        now += GAP_S / 2
    turns.reads(first, 0, now=now)
    turns.reads(second, 50, now=now)
    assert turns.has(first, now=now) and turns.has(second, now=now)
    turns.reads(first, 1, now=now)
    assert not turns.has(second, now=now), "it goes on"


def test_no_reading_waits_for_its_turn_for_long() -> None:
    turns, first, short = ReadingQueue(), long(), Reading(short=True)
    behind = long()
    now, piece = 0.0, 0
    while now < WAIT_S:
        turns.reads(first, piece, now=now)
        turns.reads(short, 50, now=now)
        turns.reads(behind, 60, now=now)
        assert turns.has(first, now=now) and not turns.has(short, now=now) and not turns.has(behind, now=now)
        assert not turns.late(short, now=now) and not turns.late(behind, now=now)
        now, piece = now + GAP_S / 2, piece + 1
    turns.reads(behind, 60, now=now)
    turns.reads(short, 50, now=now)
    assert turns.late(short, now=now) and turns.late(behind, now=now) and not turns.has(behind, now=now)
    turns.reads(behind, 61, now=now)
    assert not turns.late(behind, now=now), "it goes on"
    assert not turns.late(long(), now=now)


def test_short_readings_hold_up_nothing() -> None:
    turns, short, other, behind = ReadingQueue(), Reading(short=True), Reading(short=True), long()
    for number, reading in enumerate((short, other, behind)):
        turns.reads(reading, number, now=0.0)
    assert all(turns.has(reading, now=0.0) for reading in (short, other, behind))


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 6), st.integers(0, 20)), min_size=1, max_size=6
    )
)
def test_every_reading_ends_in_a_bounded_time(ranges: list[tuple[bool, int, int, int]]) -> None:
    """Pieces come only to a reading that has a turn, one in each step of over GAP_S. Some clients
    stop after some steps, without a word. Of those that read, one has a turn in each step."""
    turns = ReadingQueue()
    left = {Reading(short): [piece, count, stops] for short, piece, count, stops in ranges}
    for step in range(sum(count for _, _, count, _ in ranges) + 2 * len(ranges)):
        now = step * 1.5 * GAP_S
        left = {reading: place for reading, place in left.items() if not place[2] or step < place[2]}
        for reading, (piece, _, _) in left.items():
            turns.reads(reading, piece, now=now)
        having = [reading for reading in left if turns.has(reading, now=now)]
        assert having or not left
        for reading in having:
            left[reading][0] += 1
            left[reading][1] -= 1
            if not left[reading][1]:
                reading.over = True
                del left[reading]
    assert not [place for place in left.values() if not place[2]], "what is left has stopped"
