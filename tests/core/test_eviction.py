"""Which blobs and trees leave a store that needs room."""

from __future__ import annotations

from itertools import combinations, permutations

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.core.eviction import choose
from p2pdist.model.candidate import Candidate, Share
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


def test_it_is_all_or_nothing() -> None:
    assert choose([Candidate(A, 10, 1.0)], 11) is None
    assert choose([], 1) is None


def test_empty_blobs_stay() -> None:
    assert choose([Candidate(A, 0, 1.0), Candidate(B, 5, 2.0)], 5) == [B]


def test_what_only_serves_others_goes_first() -> None:
    """Though used last."""
    candidates = [Candidate(A, 10, 1.0), Candidate(B, 10, 9.0, redundant=True), Candidate(C, 10, 9.5, redundant=True)]
    assert choose(candidates, 20) == [B, C]


def test_what_trees_share_is_free_when_the_last_goes() -> None:
    trees = [Candidate(A, 1, 1.0), Candidate(B, 1, 2.0), Candidate(C, 1, 3.0)]
    shares = [Share(frozenset([A, B]), 50), Share(frozenset([A, B, C]), 100)]
    assert choose(trees, 2, shares) == [A, B]
    assert choose(trees, 52, shares) == [A, B]
    assert choose(trees, 53, shares) == [A, B, C]
    assert choose(trees, 153, shares) and choose(trees, 154, shares) is None
    kept = [Candidate(A, 1, 1.0), Candidate(B, 1, 2.0, pinned=True), Candidate(C, 1, 3.0)]
    assert choose(kept, 2, shares) and choose(kept, 3, shares) is None


def test_a_tree_of_shared_bytes_alone_may_go() -> None:
    trees = [Candidate(A, 0, 1.0), Candidate(B, 0, 2.0)]
    assert choose(trees, 5, [Share(frozenset([A, B]), 5)]) == [A, B]


def test_what_a_tree_needs_goes_after_it() -> None:
    """The catalog was used longest ago; it stays when its tree does."""
    catalog = Candidate(A, 10, 0.0, needed_by=frozenset([B]))
    assert choose([catalog, Candidate(B, 5, 1.0), Candidate(C, 5, 2.0)], 20) == [B, C, A]
    assert choose([catalog, Candidate(B, 5, 1.0, in_use=True)], 1) is None
    assert choose([catalog, Candidate(C, 5, 1.0)], 6) is None, "a tree that is no candidate stays"


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.text("abcdef0123456789", min_size=1, max_size=6).map(Digest),
        st.integers(0, 50),
        st.sampled_from([0.0, 1.0, 2.0, 3.0]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda candidate: candidate.digest,
)


@given(CANDIDATES, st.integers(0, 200))
def test_choices_are_allowed_enough_and_in_order(candidates: list[Candidate], needed: int) -> None:
    """Against every subset: impossible is said only when no subset of what may go suffices; the
    choice suffices, not without its last blob; nobody who stays should have gone before one who
    goes."""
    by_digest = {candidate.digest: candidate for candidate in candidates}
    free = [candidate for candidate in candidates if not candidate.pinned and not candidate.in_use]
    possible = any(
        sum(candidate.size for candidate in subset) >= needed
        for length in range(len(free) + 1)
        for subset in combinations(free, length)
    )
    chosen = choose(candidates, needed)
    assert (chosen is not None) == possible
    if chosen is None:
        return
    gone = [by_digest[digest] for digest in chosen]
    assert all(candidate in free for candidate in gone) and len(set(chosen)) == len(chosen)
    assert sum(candidate.size for candidate in gone) >= needed
    assert not gone or sum(candidate.size for candidate in gone[:-1]) < needed
    stays = [candidate for candidate in free if candidate.digest not in chosen and candidate.size]
    for going in gone:
        for staying in stays:
            assert going.last_used <= staying.last_used


@given(CANDIDATES, st.integers(0, 200), st.randoms())
def test_the_order_of_candidates_does_not_matter(candidates: list[Candidate], needed: int, random: object) -> None:
    shuffled = list(candidates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(shuffled, needed) == choose(candidates, needed)


SHARES = st.lists(
    st.builds(Share, st.frozensets(st.sampled_from([A, B, C]), min_size=2), st.integers(0, 50)), max_size=3
)
TREES = st.tuples(
    *(
        st.builds(
            Candidate,
            st.just(name),
            st.integers(0, 50),
            st.sampled_from([0.0, 1.0, 2.0]),
            st.booleans(),
            st.booleans(),
            st.booleans(),
            st.frozensets(st.sampled_from([A, B, C]), max_size=1).map(lambda trees, name=name: trees - {name}),
        )
        for name in (A, B, C)
    )
)


@given(TREES, SHARES, st.integers(0, 250))
def test_with_shares_choices_are_allowed_and_enough(
    trees: tuple[Candidate, ...], shares: list[Share], needed: int
) -> None:
    """Against every order of every subset, where what is needed goes after those that need it."""
    by_digest = {tree.digest: tree for tree in trees}

    def freed(gone: set[Digest]) -> int:
        return sum(by_digest[name].size for name in gone) + sum(share.size for share in shares if share.owners <= gone)

    def allowed(order: list[Digest]) -> bool:
        before: set[Digest] = set()
        for name in order:
            if by_digest[name].pinned or by_digest[name].in_use or not by_digest[name].needed_by <= before:
                return False
            before.add(name)
        return True

    orders = [list(order) for length in range(4) for order in permutations(by_digest, length)]
    chosen = choose(trees, needed, shares)
    # What frees nothing stays, and with it what it needs.
    worth = [order for order in orders if allowed(order) and all(_frees(by_digest[name], shares) for name in order)]
    assert (chosen is not None) == (max(freed(set(order)) for order in worth) >= needed)
    if chosen is not None:
        assert allowed(chosen) and freed(set(chosen)) >= needed
        assert not chosen or freed(set(chosen[:-1])) < needed


def _frees(tree: Candidate, shares: list[Share]) -> bool:
    return tree.size > 0 or any(share.size and tree.digest in share.owners for share in shares)
