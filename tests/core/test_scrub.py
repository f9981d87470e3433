"""The scrub's decisions, in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.core.scrub import BEGIN_S_MAX, LATEST_S, RATE_MAX_BYTES_S, RATE_MIN_BYTES_S, Part, Read, Rest, Round, Scrub

DAY = 86400.0
WEEK = 7 * DAY
PARTS = [Part("b"), Part("c", pinned=True), Part("a"), Part("d", pinned=True)]


def finish(scrub: Scrub, parts: list[Part], now: float) -> list[str]:
    """Read until the scrub rests; the names of what was read."""
    names = []
    while isinstance(found := scrub.next(parts, now=now), Read):
        names.append(found.part.name)
        scrub.read(found.part, checked=1, bytes_checked=10, wrong=found.part.name == "b")
    return names


def test_a_round_reads_what_is_pinned_first_then_the_rest_once_a_period() -> None:
    scrub = Scrub(WEEK, None, now=1000.0)
    assert scrub.next(PARTS, now=1000.0) == Rest(BEGIN_S_MAX)
    begun = 1000.0 + BEGIN_S_MAX
    assert finish(scrub, PARTS, begun) == ["c", "d", "a", "b"]
    assert scrub.round == Round(begun, begun, "1 b", 4, 40, 1)
    assert not scrub.running
    assert finish(scrub, PARTS, begun + WEEK - 1) == []
    assert finish(scrub, PARTS, begun + WEEK) == ["c", "d", "a", "b"]


def test_a_round_goes_on_after_a_restart_where_it_was() -> None:
    scrub = Scrub(WEEK, None, now=0.0)
    for name in ("c", "d"):
        found = scrub.next(PARTS, now=BEGIN_S_MAX)
        assert isinstance(found, Read) and found.part.name == name
        scrub.read(found.part, checked=1, bytes_checked=10, wrong=0)
    again = Scrub(WEEK, scrub.round, now=5 * DAY)
    assert again.running
    assert finish(again, PARTS, 5 * DAY) == ["a", "b"]
    assert again.round.checked == 4


def test_a_part_that_went_meanwhile_or_came_behind_is_passed_over() -> None:
    last = Round(0.0, after="1 b")
    assert finish(Scrub(WEEK, last, now=1.0), [Part("a"), Part("c")], 1.0) == ["c"]


def test_nothing_is_read_when_it_is_switched_off() -> None:
    scrub = Scrub(0.0, Round(0.0), now=1.0)
    assert scrub.next(PARTS, now=10 * WEEK) == Rest(LATEST_S) and not scrub.running


def test_a_clock_that_was_ahead_delays_no_round_for_years() -> None:
    """The round was written down under a clock that has been set back since."""
    scrub = Scrub(WEEK, Round(10 * 365 * DAY, ended=10 * 365 * DAY), now=DAY)
    assert finish(scrub, PARTS, DAY + BEGIN_S_MAX) != []
    scrub.next(PARTS, now=20 * 365 * DAY)
    assert isinstance(scrub.next(PARTS, now=DAY), Read), "the clock is set back while it runs"


def test_a_short_period_begins_soon() -> None:
    assert Scrub(10.0, None, now=0.0).next(PARTS, now=0.0) == Rest(1.0)


@given(st.integers(0, 1 << 50), st.floats(1.0, 3650 * DAY))
def test_the_rate_has_limits_and_a_round_ends_in_half_its_period(total: int, period_s: float) -> None:
    pause_s = Scrub(period_s, None, now=0.0).pause_s(total, total)
    assert total / RATE_MAX_BYTES_S <= pause_s * 1.000001
    assert pause_s <= total / RATE_MIN_BYTES_S * 1.000001
    if total / RATE_MAX_BYTES_S < period_s / 2:
        assert pause_s <= period_s / 2 * 1.000001
