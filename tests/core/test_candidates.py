"""Whom a host asks for a stripe: the tracker's choice, and while no tracker answers the superpeers
and, at a superpeer, the origin."""

from itertools import pairwise

from p2pdist.core.sources import (
    DOUBLINGS_MAX,
    ORIGIN_PAUSE_S,
    SETTLED_PACES,
    SETTLED_SPREAD,
    SUPERPEER_PACES,
    SUPERPEER_PACES_A_RANK,
    SUPERPEER_PACES_OF_SUPERPEERS,
    VISIT_S,
    WAIT_MAX_S,
    Candidates,
    Sources,
)
from p2pdist.model.digest import digest_of
from p2pdist.model.plan import ORIGIN, Source
from p2pdist.model.rendezvous import ranked

BLOB = digest_of(b"blob")
A, B, C = (Source(name, f"{name}:7071") for name in "ABC")
NAMES = [f"k{number}" for number in range(8)]
ORDER = ranked(f"{BLOB}/0".encode(), NAMES, 8)
SUPERPEERS = [Source(name, f"{name}:7071") for name in ORDER]
"""In the order that every host gives them for stripe 0."""


class Way:
    """The candidates of one host, what it knows of sources, and the time kept."""

    def __init__(self, host: str, *chosen: Source, alone: bool = True) -> None:
        self.candidates = Candidates(host, BLOB, 0)
        self.sources = Sources()
        self.alone, self.now = alone, 0.0
        self.candidates.planned(chosen[0] if chosen else None, chosen[1:])
        self.candidates.superpeers_named(tuple(Source(name, f"{name}:7071") for name in sorted(NAMES)))

    def choose(self) -> Source | None:
        """Whom the host asks next, however long it has to wait for that; None when it waits for a
        tracker."""
        source, again_at = self.candidates.choose(self.sources, alone=self.alone, now=self.now)
        while source is None and again_at > self.now:
            self.now = again_at
            source, again_at = self.candidates.choose(self.sources, alone=self.alone, now=self.now)
        return source

    def tried(self, count: int, *, still: bool = True) -> list[Source]:
        """The next so many that the host asks, when each stands still, or else fails."""
        found = []
        for _ in range(count):
            source = self.choose()
            assert source is not None
            found.append(source)
            self.candidates.failed(source, still=still)
            if not still:
                self.sources.failed(source, "refused", now=self.now)
        return found


def test_the_trackers_choice_comes_first_then_the_superpeers_in_the_order_that_all_have() -> None:
    for host in ("h1", "h2"):
        assert Way(host, A, B, C).tried(11) == [A, B, C, *SUPERPEERS]


def test_while_a_tracker_answers_superpeers_are_left_alone() -> None:
    way = Way(ORDER[0], A, B, alone=False)
    assert way.tried(5) == [A, B, A, B, A]
    assert Way("h1", alone=False).choose() is None


def test_a_superpeer_has_the_origin_in_its_own_place() -> None:
    for rank, host in enumerate(ORDER):
        assert Way(host, A).tried(9) == [A, *SUPERPEERS[:rank], ORIGIN, *SUPERPEERS[rank + 1 :]]


def test_others_never_have_the_origin_unless_the_tracker_said_so() -> None:
    assert ORIGIN not in Way("h1", A, B).tried(100)
    assert ORIGIN in Way("h1", ORIGIN, B).tried(1)


def test_a_tracker_cannot_make_the_origin_a_superpeer() -> None:
    """Then everybody would read it."""
    candidates = Candidates("", BLOB, 0)
    candidates.superpeers_named((ORIGIN, *SUPERPEERS))
    assert candidates.rank is None
    for _ in range(20):
        source, _ = candidates.choose(Sources(), alone=True, now=0.0)
        assert source is not None and not source.is_origin
        candidates.failed(source)


def test_dead_superpeers_are_passed_over_and_tried_again_later() -> None:
    way = Way("h1")
    assert way.tried(8, still=False) == SUPERPEERS
    assert way.tried(8, still=False) == SUPERPEERS
    assert 0 < way.now < 1.0


def test_before_it_reads_the_origin_a_superpeer_pauses_the_longer_the_higher_its_rank() -> None:
    """And each differently: a pause of its own, whichever superpeer failed."""
    pauses = []
    for rank, host in enumerate(ORDER):
        way = Way(host)
        way.tried(rank)
        assert way.now == 0.0
        assert way.choose() == ORIGIN
        pauses.append(way.now / ORIGIN_PAUSE_S - rank)
    assert all(0 < pause <= 1 for pause in pauses)
    assert len(set(pauses)) == len(ORDER)


def test_an_origin_that_is_away_is_tried_ever_less_often() -> None:
    way, times = Way(ORDER[0]), []
    for _ in range(8):
        assert way.choose() == ORIGIN
        times.append(way.now)
        way.candidates.failed(ORIGIN)
        way.sources.failed(ORIGIN, "unavailable", now=way.now)
        for superpeer in SUPERPEERS[1:]:
            way.sources.failed(superpeer, "refused", now=1e9)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[-1] > 15 and all(later >= earlier for earlier, later in pairwise(gaps))


def test_rounds_give_ever_more_time_and_a_piece_ends_the_trouble() -> None:
    way = Way("h1", A, B)
    first = way.candidates.patience_s(B, 0.6, fed=False)
    assert first == 0.6
    way.tried(10)
    assert way.choose() == A
    assert way.candidates.patience_s(B, 0.6, fed=False) == 1.2
    way.candidates.fed(A, now=0.0)
    assert way.candidates.patience_s(B, 0.6, fed=False) == 0.6
    way.tried(10 * (DOUBLINGS_MAX + 5))
    assert way.candidates.patience_s(B, 0.6, fed=False) == WAIT_MAX_S


def test_who_was_fed_waits_and_few_move_early() -> None:
    """The first superpeer first, then the other superpeers; of all others one in ten, at most, in
    the first half of the time."""
    times = {host: Way(host, A).candidates.patience_s(A, 0.1, fed=True) for host in ORDER}
    assert list(times.values()) == sorted(times.values()) and times[ORDER[0]] == 0.1
    crowd = sorted(Way(f"h{number}", A).candidates.patience_s(A, 0.1, fed=True) for number in range(1000))
    first, last = SETTLED_PACES * 0.1, SETTLED_PACES * (1 + SETTLED_SPREAD) * 0.1
    assert first <= crowd[0] and crowd[-1] <= last
    early = sum(1 for each in crowd if each < (first + last) / 2)
    assert 1 <= early <= 100


def test_superpeers_are_waited_for_and_the_origin_longest() -> None:
    """A superpeer waits longest for those before it, whatever they gave it: it would read the
    origin itself."""
    other, superpeer = Way("h1", A).candidates, Way(ORDER[3], A).candidates
    assert other.patience_s(SUPERPEERS[0], 1.0, fed=False) == SUPERPEER_PACES
    assert (
        superpeer.patience_s(SUPERPEERS[0], 1.0, fed=False)
        == SUPERPEER_PACES_OF_SUPERPEERS + 3 * SUPERPEER_PACES_A_RANK
    )
    assert (
        superpeer.patience_s(SUPERPEERS[0], 1.0, fed=True) == SUPERPEER_PACES_OF_SUPERPEERS + 3 * SUPERPEER_PACES_A_RANK
    )
    assert superpeer.patience_s(SUPERPEERS[5], 1.0, fed=False) == 1.0
    assert superpeer.patience_s(ORIGIN, 1.0, fed=False) == WAIT_MAX_S


def test_who_left_a_parent_that_stood_still_visits_it_until_it_gives_again() -> None:
    way = Way("h1", A, B)
    assert way.tried(2) == [A, B]
    assert way.choose() == SUPERPEERS[0]
    way.candidates.fed(SUPERPEERS[0], now=0.0)
    for visit in range(4):
        target, due = (A, B)[visit % 2], way.now + VISIT_S * 2**visit
        assert not way.candidates.wants_back(SUPERPEERS[0], way.sources, now=due - 0.01)
        way.now = due
        assert way.candidates.wants_back(SUPERPEERS[0], way.sources, now=due)
        assert way.choose() == target
        assert way.candidates.patience_s(target, 0.6, fed=False) == 0.6
        way.candidates.failed(target, still=True)
        assert way.choose() == SUPERPEERS[0], "its refuge"
        way.candidates.fed(SUPERPEERS[0], now=due)
    way.now += 100
    assert way.candidates.wants_back(SUPERPEERS[0], way.sources, now=way.now)
    assert way.choose() == A
    way.candidates.fed(A, now=way.now)
    assert not way.candidates.wants_back(A, way.sources, now=1e9)


def test_a_parent_that_is_dead_is_not_visited() -> None:
    way = Way("h1", A)
    way.tried(1, still=False)
    assert way.choose() == SUPERPEERS[0]
    way.candidates.fed(SUPERPEERS[0], now=0.0)
    assert not way.candidates.wants_back(SUPERPEERS[0], way.sources, now=1e9)


def test_who_is_fed_by_an_alternate_visits_its_parent_alone() -> None:
    way = Way("h1", A, B, C)
    assert way.tried(2) == [A, B]
    assert way.choose() == C
    way.candidates.fed(C, now=0.0)
    for now in (10.0, 20.0):
        assert way.candidates.wants_back(C, way.sources, now=now)
        assert way.choose() == A
        way.candidates.failed(A, still=True)
        assert way.choose() == C
        way.candidates.fed(C, now=now)


def test_a_superpeer_returns_to_the_origin_from_a_visit_without_a_pause() -> None:
    way = Way(ORDER[0], A)
    assert way.tried(1) == [A]
    assert way.choose() == ORIGIN
    way.candidates.fed(ORIGIN, now=way.now)
    way.now += VISIT_S
    assert way.candidates.wants_back(ORIGIN, way.sources, now=way.now)
    assert way.choose() == A
    way.candidates.failed(A, still=True)
    assert way.candidates.choose(way.sources, alone=True, now=way.now) == (ORIGIN, way.now)


def test_with_a_tracker_or_as_no_superpeer_any_more_the_refuge_at_the_origin_is_forgotten() -> None:
    way = Way(ORDER[0], A)
    way.tried(1)
    assert way.choose() == ORIGIN
    way.candidates.fed(ORIGIN, now=way.now)
    assert way.candidates.choose(way.sources, alone=False, now=way.now)[0] == A
    way.candidates.superpeers_named(tuple(SUPERPEERS[1:]))
    assert way.candidates.rank is None
    assert ORIGIN not in way.tried(50)


def test_a_plan_makes_what_was_tried_count_no_more() -> None:
    way = Way("h1", A, B)
    way.tried(12)
    way.candidates.planned(B, (C,))
    assert way.tried(3) == [B, C, SUPERPEERS[0]]
