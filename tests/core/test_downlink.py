"""What a host receives: limits over all streams, of preseeds alone, and preseeds that give way to
pulls that somebody waits for."""

from __future__ import annotations

from heapq import heappop, heappush

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.core.downlink import BURST_S, HELD_MAX_S, LOOK_AGAIN_S, Downlink
from p2pdist.model.messages import Priority

PIECE = 65536
RATE = 100 * PIECE
PRESEED_SHARE = 1 / 16
"""What is promised."""


class Host:
    """Streams that would each receive at their own rate, and pause as they are told."""

    def __init__(self, *streams: tuple[Priority, float], downlink: Downlink) -> None:
        self.streams, self.downlink = streams, downlink
        self.came: list[tuple[float, Priority]] = []
        self._due: list[tuple[float, int, bool]] = []
        for number, (_, rate) in enumerate(streams):
            heappush(self._due, (PIECE / rate, number, True))

    def run(self, *, until: float, start_until: float = float("inf")) -> None:
        while self._due[0][0] <= until:
            now, number, arrives = heappop(self._due)
            priority, rate = self.streams[number]
            if priority == "start" and now > start_until:
                heappush(self._due, (float("inf"), number, True))
                continue
            if arrives:
                self.came.append((now, priority))
                pause_s = self.downlink.received(priority, PIECE, now)
            else:
                pause_s = self.downlink.held_s(priority, now)
            heappush(self._due, (now + (pause_s or PIECE / rate), number, not pause_s))

    def pieces(self, priority: Priority, after: float = 0.0) -> int:
        return sum(1 for at, each in self.came if each == priority and at > after)


def test_without_limits_nobody_pauses_who_is_of_one_priority() -> None:
    for priority in ("start", "preseed"):
        downlink = Downlink()
        assert [downlink.received(priority, PIECE, 0.01 * step) for step in range(50)] == [0.0] * 50


@settings(max_examples=examples(50), deadline=None)
@given(
    limit=st.floats(0.3, 3.0),
    preseed_limit=st.floats(0.05, 2.0),
    streams=st.lists(st.tuples(st.sampled_from(["start", "preseed"]), st.floats(0.1, 2.0)), min_size=1, max_size=6),
)
def test_no_limit_is_passed_in_any_time(
    limit: float, preseed_limit: float, streams: list[tuple[Priority, float]]
) -> None:
    """Between any two pieces no more came than the limit, the burst, and a piece for each stream:
    those were under way."""
    host = Host(
        *((priority, rate * RATE) for priority, rate in streams), downlink=Downlink(limit * RATE, preseed_limit * RATE)
    )
    host.run(until=3.0)
    preseeds = [at for at, priority in host.came if priority == "preseed"]
    for times, rate in (([at for at, _ in host.came], limit * RATE), (preseeds, preseed_limit * RATE)):
        for first, since in enumerate(times):
            for count, at in enumerate(times[first:]):
                assert (count - len(streams)) * PIECE <= rate * (at - since + BURST_S) * (1 + 1e-9)


def test_the_debt_is_everybodys() -> None:
    downlink = Downlink(1000.0)
    assert downlink.received("start", 2000, 0.0) == pytest.approx(2.0 - BURST_S)
    assert downlink.received("start", 3000, 0.0) == pytest.approx(5.0 - BURST_S)


def test_silence_is_not_saved_up() -> None:
    downlink = Downlink(1e6)
    downlink.received("start", 1, 0.0)
    assert downlink.received("start", int(2 * BURST_S * 1e6), 100.0) == pytest.approx(BURST_S)


def test_the_limit_of_preseeds_is_theirs_alone() -> None:
    downlink = Downlink(None, 1000.0)
    assert downlink.received("preseed", 2000, 0.0) == pytest.approx(2.0 - BURST_S)
    assert downlink.received("start", 2000, 0.0) == 0.0


@pytest.mark.parametrize("preseeds", [1, 2, 8])
def test_preseeds_give_way_however_many_there_are(preseeds: int) -> None:
    """Each could take as much as the start does; together they get their share of what comes, and a
    piece each to begin with."""
    host = Host(("start", RATE), *[("preseed", RATE)] * preseeds, downlink=Downlink())
    host.run(until=10.0)
    total = len(host.came)
    assert host.pieces("start") == pytest.approx(1000, abs=2)
    assert 0 < host.pieces("preseed") <= PRESEED_SHARE * total + 2 * preseeds


def test_preseeds_go_on_soon_after_nothing_comes_for_a_start_any_more() -> None:
    """Whether it is complete or stuck: a second and a look later they take what there is."""
    host = Host(("start", RATE), ("preseed", RATE), downlink=Downlink())
    host.run(until=8.0, start_until=4.0)
    assert host.pieces("preseed", after=5.1) >= 288


def test_a_start_never_pauses_for_preseeds() -> None:
    downlink = Downlink()
    downlink.received("start", PIECE, 0.0)
    assert downlink.received("preseed", PIECE, 0.0) == LOOK_AGAIN_S
    assert downlink.held_s("preseed", 0.05) == LOOK_AGAIN_S
    assert downlink.received("start", PIECE, 0.05) == downlink.held_s("start", 0.05) == 0.0
    for _ in range(15):
        downlink.received("start", PIECE, 0.1)
    assert downlink.held_s("preseed", 0.1) == 0.0, "they have got fifteen times as much since"


def test_a_preseed_does_not_pause_until_its_sender_takes_it_for_dead() -> None:
    """Its pieces are large, and the start it gives way to is slow."""
    downlink, now = Downlink(), 0.0
    downlink.received("start", PIECE, now)
    downlink.received("preseed", 1 << 30, now)
    while downlink.held_s("preseed", now) and now < 60:
        now += 0.5
        downlink.received("start", PIECE, now)
    assert now == HELD_MAX_S
