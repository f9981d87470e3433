"""Sources: backoff after failures, long avoidance after wrong bytes."""

from p2pdist.core.sources import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    CORRUPT_S,
    FIRST_PIECE_MIN_S,
    RESPONSE_MIN_S,
    SILENCE_MAX_S,
    SILENT_FIRST_S,
    SILENT_ROW,
    SOURCES_MAX,
    STARVED_BYTES_S,
    STARVED_MIN_S,
    STARVED_NEAR_S,
    STARVED_UNKNOWN_S,
    ResponseTimes,
    Sources,
)
from p2pdist.model.plan import ORIGIN, Source

H1 = Source("h1", "h1:1")
H2 = Source("h2", "h2:1")


def test_an_unknown_source_is_usable() -> None:
    sources = Sources()
    assert sources.usable(H1, now=0.0)
    assert sources.usable_at(H1) == 0.0
    assert sources.complaint(H1, now=0.0) is None


def test_a_failed_source_is_left_alone_twice_as_long_each_time() -> None:
    """Up to a limit, so that who was away for long is tried again soon after coming back."""
    sources, now, pause = Sources(), 100.0, BACKOFF_FIRST_S
    for _ in range(12):
        sources.failed(H1, "refused", now=now)
        assert not sources.usable(H1, now=now + pause - 0.01)
        assert sources.usable(H1, now=now + pause)
        now, pause = now + pause, min(BACKOFF_MAX_S, 2 * pause)
    assert sources.usable_at(H1) == now
    assert sources.usable(H2, now=now)


def test_a_good_piece_forgives_failures() -> None:
    sources = Sources()
    for _ in range(5):
        sources.failed(H1, "reset", now=10.0)
    sources.delivered(H1)
    assert sources.usable(H1, now=10.0)
    sources.failed(H1, "reset", now=10.0)
    assert sources.usable_at(H1) == 10.0 + BACKOFF_FIRST_S


def test_wrong_bytes_are_not_forgiven() -> None:
    """Neither by a good piece in another stripe, nor by failing in another way afterwards."""
    sources = Sources()
    sources.failed(H1, "corrupt", now=0.0)
    sources.delivered(H1)
    assert not sources.usable(H1, now=CORRUPT_S - 1)
    sources.failed(H1, "reset", now=1.0)
    sources.delivered(H1)
    assert not sources.usable(H1, now=CORRUPT_S - 1)
    assert sources.complaint(H1, now=2.0) == "corrupt"
    assert sources.usable(H1, now=CORRUPT_S)


def test_the_origin_is_not_avoided_for_wrong_bytes() -> None:
    """There is only one; who reads it counts how often it was wrong."""
    sources = Sources()
    sources.failed(ORIGIN, "corrupt", now=0.0)
    assert sources.usable(ORIGIN, now=BACKOFF_FIRST_S)
    sources.delivered(ORIGIN)
    assert sources.usable(ORIGIN, now=0.0)


def test_a_complaint_says_why_while_the_source_is_avoided() -> None:
    sources = Sources()
    sources.failed(H1, "stalled", now=0.0)
    assert sources.complaint(H1, now=0.0) == "stalled"
    assert sources.complaint(H1, now=BACKOFF_FIRST_S) is None


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    sources = Sources()
    for number in range(SOURCES_MAX + 1):
        sources.failed(Source(f"h{number}", "a:1"), "refused", now=0.0)
    assert sources.usable(Source("h0", "a:1"), now=0.0)
    assert not sources.usable(Source("h1", "a:1"), now=0.0)


def test_an_address_that_was_silent_is_left_alone_for_ever_longer() -> None:
    sources = Sources()
    other, now = Source("other", H1.address), 0.0
    waits = []
    for _ in range(4):
        sources.silent(H1, now=now)
        assert not sources.usable(other, now=now)
        assert sources.complaint(other, now=now) == "stalled"
        assert sources.usable(H2, now=now)
        waits.append(sources.usable_at(other) - now)
        now = sources.usable_at(other)
        assert sources.usable(other, now=now)
    assert waits == [SILENT_FIRST_S * 2**number for number in range(4)]
    assert sources.silence_s(other, responded=False) > sources.silence_s(H2, responded=False)
    sources.delivered(other)
    assert sources.silence_s(other, responded=False) == sources.silence_s(H2, responded=False)


def test_silent_addresses_are_forgotten_the_oldest_first() -> None:
    sources = Sources()
    for number in range(SOURCES_MAX + 1):
        sources.silent(Source("h", f"a{number}:1"), now=0.0)
    assert sources.usable(Source("h", "a0:1"), now=0.0)
    assert not sources.usable(Source("h", "a1:1"), now=0.0)


def test_limits_of_silence_follow_what_is_usual() -> None:
    """Between a floor and a ceiling; and one silent source after another gets more time."""
    times = ResponseTimes()
    for _ in range(50):
        times.responded(0.001)
        times.gave(0.01)
    assert times.limit_s(responded=False) == RESPONSE_MIN_S
    assert times.limit_s(responded=True) == FIRST_PIECE_MIN_S
    for _ in range(4 * SILENT_ROW):
        times.silent()
    assert times.limit_s(responded=False) == 5 * RESPONSE_MIN_S
    for _ in range(50):
        times.gave(3.0)
    assert 3.0 <= times.limit_s(responded=True) < 6.0
    for _ in range(50):
        times.responded(300.0)
    assert times.limit_s(responded=False) == SILENCE_MAX_S


def test_a_first_piece_is_late_by_what_responses_and_the_piece_take() -> None:
    times, piece = ResponseTimes(), 1 << 20
    unknown_s = times.starved_s(piece)
    assert unknown_s == STARVED_UNKNOWN_S + piece / STARVED_BYTES_S
    times.unanswered(0.001)
    assert times.starved_s(piece) == unknown_s, "it was connected at once: the path is short"
    for connected_s in (None, 0.5):
        times.unanswered(connected_s)
        assert times.starved_s(piece) == 2 * STARVED_UNKNOWN_S + piece / STARVED_BYTES_S, "once, however often"
    for _ in range(50):
        times.responded(0.001)
    assert times.starved_s(piece) == STARVED_MIN_S + piece / STARVED_BYTES_S
    times.responded(5.0)
    assert unknown_s < times.starved_s(piece) < SILENCE_MAX_S


def test_a_host_says_later_that_it_starves_where_streams_begin_with_handshakes() -> None:
    """Those of many hosts on one machine come one after the other."""
    times, piece = ResponseTimes(certified=True), 1 << 20
    assert times.starved_s(piece) == 2 * STARVED_UNKNOWN_S + piece / STARVED_BYTES_S
    assert times.starved_s(piece, 0.001) == 2 * STARVED_NEAR_S + piece / STARVED_BYTES_S
