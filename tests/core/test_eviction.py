"""Which blobs leave a store that needs room."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.core.eviction import choose, evictable_bytes
from p2pdist.model.candidate import Candidate
from p2pdist.model.digest import Digest

A, B, C = Digest("a"), Digest("b"), Digest("c")


def test_least_recently_used_goes_first() -> None:
    candidates = [Candidate(A, 10, 3.0), Candidate(B, 10, 1.0), Candidate(C, 10, 2.0)]
    assert choose(candidates, 15) == [B, C]


def test_nothing_goes_when_nothing_is_needed() -> None:
    assert choose([Candidate(A, 10, 1.0)], 0) == []
    assert choose([], 0) == []


def test_pinned_and_used_blobs_never_go() -> None:
    candidates = [Candidate(A, 10, 1.0, pinned=True), Candidate(B, 10, 1.0, in_use=True), Candidate(C, 10, 9.0)]
    assert choose(candidates, 10) == [C]
    assert choose(candidates, 11) is None


def test_the_last_copy_of_a_zone_goes_last() -> None:
    """Even though it was used longest ago: getting it back would cost a read from the origin."""
    candidates = [Candidate(A, 10, 1.0, last_copy_in_zone=True), Candidate(B, 10, 8.0), Candidate(C, 10, 9.0)]
    assert choose(candidates, 20) == [B, C]
    assert choose(candidates, 21) == [B, C, A]


def test_it_is_all_or_nothing() -> None:
    assert choose([Candidate(A, 10, 1.0)], 11) is None
    assert choose([], 1) is None


def test_empty_blobs_stay() -> None:
    assert choose([Candidate(A, 0, 1.0), Candidate(B, 5, 2.0)], 5) == [B]


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.text("abcdef0123456789", min_size=1, max_size=6).map(Digest),
        st.integers(0, 50),
        st.sampled_from([0.0, 1.0, 2.0, 3.0]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda candidate: candidate.digest,
)


@given(CANDIDATES, st.integers(0, 200))
def test_choices_are_allowed_enough_and_in_order(candidates: list[Candidate], needed: int) -> None:
    """Against every subset: impossible is said only when no subset of what may go suffices; the choice suffices, not without its last
    blob; nobody who stays should have gone before one who goes."""
    by_digest = {candidate.digest: candidate for candidate in candidates}
    free = [candidate for candidate in candidates if not candidate.pinned and not candidate.in_use]
    possible = any(
        sum(candidate.size for candidate in subset) >= needed
        for length in range(len(free) + 1)
        for subset in combinations(free, length)
    )
    chosen = choose(candidates, needed)
    assert (chosen is not None) == possible == (evictable_bytes(candidates) >= needed)
    if chosen is None:
        return
    gone = [by_digest[digest] for digest in chosen]
    assert all(candidate in free for candidate in gone) and len(set(chosen)) == len(chosen)
    assert sum(candidate.size for candidate in gone) >= needed
    assert not gone or sum(candidate.size for candidate in gone[:-1]) < needed
    stays = [candidate for candidate in free if candidate.digest not in chosen and candidate.size]
    for going in gone:
        for staying in stays:
            assert (going.last_copy_in_zone, going.last_used) <= (staying.last_copy_in_zone, staying.last_used)


@given(CANDIDATES, st.integers(0, 200), st.randoms())
def test_the_order_of_candidates_does_not_matter(candidates: list[Candidate], needed: int, random: object) -> None:
    shuffled = list(candidates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(shuffled, needed) == choose(candidates, needed)
