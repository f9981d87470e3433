"""What a host brings from the origin into a swarm: what nobody has, in its turn, and no more at
once than can be taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.core.origin_seeding import (
    CONNECT_S,
    GIVEN_MAX,
    LATE_S,
    READ_TIMES,
    READS_AT_ONCE,
    RETRY_FIRST_S,
    SUPERPEER_PAUSE_S,
    TAKEN_S,
    OriginSeeding,
    Readers,
)
from p2pdist.model.digest import digest_of
from p2pdist.model.pieces import PieceSet

BLOB = digest_of(b"blob")
COUNT = 200
SUPERPEERS = ("h1", "h2", "h3")
LEASED = Readers(BLOB, "h1", 1, frozenset({0}))
NOBODY = Readers(BLOB, "h1", 1)
ALONE = Readers(BLOB, "h1", 1, superpeers=SUPERPEERS, alone=True)
RANKS = [ALONE.rank(piece) for piece in range(COUNT)]
FIRST, SECOND, THIRD = (RANKS.index(rank) for rank in range(3))


def feed(have: PieceSet | None = None) -> OriginSeeding:
    return OriginSeeding(BLOB, "h1", have if have is not None else PieceSet(COUNT), 0.0)


def counts(*pieces: int) -> list[int]:
    return [int(piece in pieces) for piece in range(COUNT)]


def read(made: OriginSeeding, readers: Readers, now: float, *held: int) -> list[int]:
    """The pieces that are read at once when peers hold some."""
    made.look(readers, counts(*held), now=now)
    found = []
    while (piece := made.next(readers, now=now)) is not None:
        found.append(piece)
    return found


def test_the_holder_of_a_lease_reads_what_nobody_has_one_piece_at_first_then_a_few_at_once() -> None:
    made = feed()
    assert read(made, LEASED, 0.0, 0, 2) == [1]
    assert read(made, LEASED, 0.1) == []
    made.brought(1, now=0.2)
    assert read(made, LEASED, 0.2) == [0, 2], "peers had them, and are gone"
    made.brought(0, now=0.3)
    assert read(made, LEASED, 0.3) == [3, 4]
    made.brought(2, now=0.4)
    assert read(made, LEASED, 0.4) == [5, 6]
    made.brought(3, now=0.5)
    assert read(made, LEASED, 0.5) == [7]
    assert len(made.under_way) == READS_AT_ONCE


def test_a_first_read_that_hangs_does_not_keep_others_from_beginning() -> None:
    made = feed()
    assert read(made, LEASED, 0.0) == [0]
    assert read(made, LEASED, LATE_S) == []
    assert read(made, LEASED, LATE_S + 0.1) == [1]
    made.brought(1, now=LATE_S + 0.2)
    assert read(made, LEASED, LATE_S + 0.2) == [2, 3]


def test_without_leave_nothing_is_read() -> None:
    assert read(feed(), NOBODY, 100.0) == []


def test_what_is_given_and_not_held_yet_is_limited_and_read_again_after_long() -> None:
    made = feed()
    for number in range(GIVEN_MAX):
        made.look(LEASED, counts(), now=0.0)
        assert made.next(LEASED, now=0.0) == number
        made.brought(number, now=0.0)
    assert read(made, LEASED, 1.0) == []
    assert made.held(7) and not made.held(7)
    made.have.add(7)
    assert read(made, LEASED, 1.0) == [GIVEN_MAX]
    made.dropped(GIVEN_MAX)
    assert read(made, LEASED, TAKEN_S + 0.1) == [0, 1, 2, 3]


def test_who_held_pieces_before_waits_for_connections() -> None:
    have = PieceSet(COUNT)
    have.add(0)
    made = feed(have)
    assert read(made, LEASED, CONNECT_S - 0.1) == []
    assert read(made, LEASED, CONNECT_S) == [1]


def test_superpeers_wait_the_longer_the_later_their_turn() -> None:
    """Of pieces that nobody brings: those for which this host is the first are read soonest."""
    have = PieceSet(COUNT)
    for piece in range(COUNT):
        if piece not in (FIRST, SECOND, THIRD):
            have.add(piece)
    made, found = feed(have), {}
    for step in range(1000):
        for piece in read(made, ALONE, step / 50):
            found[piece] = step / 50
            made.brought(piece, now=step / 50)
            have.add(piece)
    assert list(found) == [FIRST, SECOND, THIRD]
    waits = [found[piece] - CONNECT_S for piece in (FIRST, SECOND, THIRD)]
    assert all(rank * SUPERPEER_PAUSE_S <= wait <= (rank + 1.1) * SUPERPEER_PAUSE_S for rank, wait in enumerate(waits))


def test_a_superpeer_waits_again_when_the_one_before_it_brings_something() -> None:
    other = next(piece for piece in range(COUNT) if piece != SECOND and ALONE.first(piece) == ALONE.first(SECOND))
    have = PieceSet(COUNT)
    for piece in range(COUNT):
        if piece not in (SECOND, other):
            have.add(piece)
    made = feed(have)
    assert read(made, ALONE, 1.0) == []
    assert read(made, ALONE, 2.4, other) == []
    assert read(made, ALONE, 2.4 + SUPERPEER_PAUSE_S - 0.1, other) == []
    assert read(made, ALONE, 2.4 + 2 * SUPERPEER_PAUSE_S, other) == [SECOND]


def test_a_slow_origin_is_no_reason_to_read_what_is_for_others() -> None:
    """What this host waits for itself, those before it wait for as well."""
    slow_s = 10.0
    made = feed()
    now = SUPERPEER_PAUSE_S + slow_s
    for piece in read(made, ALONE, SUPERPEER_PAUSE_S):
        made.brought(piece, now=now)
    for piece, rank in enumerate(RANKS):
        if not rank:
            made.have.add(piece)
    assert read(made, ALONE, now) == []
    pause_s = SUPERPEER_PAUSE_S + READ_TIMES * slow_s
    assert read(made, ALONE, pause_s - 0.1) == []
    assert {RANKS[piece] for piece in read(made, ALONE, 2 * pause_s)} == {1}


def test_after_a_failure_there_is_a_pause_that_grows() -> None:
    made, now = feed(), 0.0
    for doubling in range(3):
        (piece, *others) = read(made, LEASED, now)
        for each in others:
            made.dropped(each)
        made.failed(piece, now=now)
        pause_s = RETRY_FIRST_S * 2**doubling
        assert read(made, LEASED, now + pause_s - 0.01) == []
        now += pause_s
    made.brought(read(made, LEASED, now)[0], now=now)


def test_what_was_to_be_read_is_not_when_a_tracker_has_come_back() -> None:
    """Nobody looks again at a host that may read nothing any more."""
    made = feed()
    made.look(ALONE, counts(), now=SUPERPEER_PAUSE_S)
    assert made.next(ALONE, now=SUPERPEER_PAUSE_S) is not None
    assert made.next(NOBODY, now=SUPERPEER_PAUSE_S) is None


EVENTS = st.tuples(
    st.sampled_from(["look", "next", "brought", "failed", "held", "come"]), st.integers(0, COUNT - 1), st.floats(0, 3)
)


@given(st.lists(EVENTS, max_size=120))
def test_whatever_happens_no_piece_is_read_that_is_held_or_on_its_way(events: list[tuple[str, int, float]]) -> None:
    made, now, given_at = feed(), 0.0, dict[int, float]()
    for event, number, later in events:
        now += later
        match event:
            case "look":
                made.look(ALONE, counts(number), now=now)
            case "next":
                before = set(made.under_way)
                piece = made.next(ALONE, now=now)
                assert piece is None or (piece not in before and piece not in made.have)
                assert piece is None or now - given_at.get(piece, -TAKEN_S) >= TAKEN_S or piece not in given_at
                assert len(made.under_way) <= READS_AT_ONCE
            case "brought" | "failed" if made.under_way:
                piece = next(iter(made.under_way))
                if event == "brought":
                    made.brought(piece, now=now)
                    given_at[piece] = now
                else:
                    made.failed(piece, now=now)
            case "held" if given_at:
                piece = next(iter(given_at))
                del given_at[piece]
                made.have.add(piece)
                made.held(piece)
            case "come":
                made.have.add(number)
                made.held(number)
                given_at.pop(number, None)
