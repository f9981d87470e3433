"""Which peers have the streams that a host serves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.core.stream_slots import ADDRESS_SHARE, STUCK_S, Displace, Peer, StreamSlots

SLOTS = 16
SHARE = int(SLOTS * ADDRESS_SHARE)


def slots_of(*peers: tuple[str, str]) -> StreamSlots:
    slots = StreamSlots(SLOTS)
    for number, (address, host) in enumerate(peers):
        slots.opened(number, Peer(address, host))
    return slots


def test_an_address_has_its_share_and_others_the_rest() -> None:
    slots = slots_of(*[("a", f"h{number}") for number in range(SHARE)])
    assert slots.room(Peer("a", "new"), {}) is False
    assert slots.room(Peer("b"), {}) is True


def test_what_is_read_is_not_displaced() -> None:
    slots = slots_of(*[("a", "h")] * SHARE, *[("b", "h")] * (SLOTS - SHARE))
    reading = dict.fromkeys(range(SLOTS), STUCK_S - 0.1)
    assert slots.room(Peer("c"), reading) is False
    assert slots.room(Peer("a"), reading) is False


def test_the_address_with_most_streams_makes_room() -> None:
    """There the host with most of them, and of these the stream that was stuck longest."""
    slots = slots_of(*[("a", "one")] * 3, *[("a", "many")] * 6, *[("b", "h")] * 7)
    stuck = {0: 90.0, 4: STUCK_S, 5: STUCK_S + 1, 9: 99.0}
    assert slots.room(Peer("c"), stuck) == Displace(5)
    slots.closed(5)
    assert slots.room(Peer("c"), stuck) is True


def test_an_address_over_its_share_gives_up_its_own() -> None:
    slots = slots_of(*[("a", "h")] * SHARE, ("b", "h"))
    assert slots.room(Peer("a"), {2: STUCK_S, SHARE: 50.0}) == Displace(2)


def test_no_address_displaces_one_that_has_no_more_than_it_would() -> None:
    slots = slots_of(*[("a", "h")] * 8, *[("b", "h")] * 8)
    assert slots.room(Peer("a"), dict.fromkeys(range(SLOTS), 60.0)) is False


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("gh"), st.booleans(), st.booleans()), max_size=80))
def test_counts_stay_within_the_limits(steps: list[tuple[str, str, bool, bool]]) -> None:
    """Whatever comes and goes; and an address that has nothing always gets a slot from what is
    stuck."""
    slots, open_streams, number = StreamSlots(SLOTS), dict[int, str](), 0
    for address, host, stuck, closes in steps:
        if closes and open_streams:
            first = next(iter(open_streams))
            slots.closed(first)
            del open_streams[first]
        room = slots.room(Peer(address, host), dict.fromkeys(open_streams, 60.0 if stuck else 0.0))
        if isinstance(room, Displace):
            assert stuck
            slots.closed(room.stream)
            del open_streams[room.stream]
        elif stuck and address not in open_streams.values():
            assert room
        if room:
            number += 1
            slots.opened(number, Peer(address, host))
            open_streams[number] = address
        assert len(slots) == len(open_streams) <= SLOTS
        assert list(open_streams.values()).count(address) <= SHARE
