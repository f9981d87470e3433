"""Who brings what from the origin into a swarm: somebody for every piece, nobody twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from p2pdist.core.origin_seeding import GROUPS, Readers
from p2pdist.model.digest import digest_of

BLOB = digest_of(b"a blob")
NAMES = tuple(f"h{number}" for number in range(8))
PIECES = range(4 * GROUPS)


def shared(host: str, names: tuple[str, ...] = NAMES) -> Readers:
    return Readers(BLOB, host, 2, superpeers=names, shared=True)


def test_the_holder_of_a_lease_reads_its_stripe_where_nothing_is_shared() -> None:
    readers = Readers(BLOB, "h0", 2, frozenset({1}), NAMES)
    assert [readers.rank(piece) for piece in range(4)] == [None, 0, None, 0]
    assert readers.any
    assert not replace(readers, leased=frozenset()).any
    assert readers.first(1) == ""


@given(st.lists(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=20, unique=True), st.randoms())
def test_every_piece_has_one_first_reader_and_all_agree(names: list[str], random: object) -> None:
    """In whatever order they know the superpeers."""
    shuffled = sorted(names)
    for piece in (0, 1, GROUPS, GROUPS + 1, 1000):
        ranks = [shared(host, tuple(names)).rank(piece) for host in names]
        assert sorted(rank for rank in ranks if rank is not None) == list(range(len(names)))
        assert ranks == [shared(host, tuple(shuffled)).rank(piece) for host in names]
        assert names[ranks.index(0)] == shared("nobody", tuple(names)).first(piece)


def test_superpeers_get_parts_of_much_the_same_size() -> None:
    sizes = [sum(shared(host).rank(piece) == 0 for piece in PIECES) for host in NAMES]
    assert sum(sizes) == len(PIECES)
    assert min(sizes) > 0
    assert max(sizes) < 3 * len(PIECES) / len(NAMES)


def test_who_is_no_superpeer_reads_nothing_whatever_lease_it_holds() -> None:
    readers = replace(shared("h9"), leased=frozenset({0, 1}))
    assert not readers.any
    assert all(readers.rank(piece) is None for piece in PIECES)


def test_without_a_tracker_it_is_shared_in_any_case() -> None:
    readers = Readers(BLOB, "h1", 2, frozenset(), NAMES, alone=True)
    assert [readers.rank(piece) for piece in PIECES] == [shared("h1").rank(piece) for piece in PIECES]


def test_a_holder_of_a_lease_that_knows_no_superpeers_goes_on_without_a_tracker() -> None:
    assert Readers(BLOB, "h1", 2, frozenset({0}), (), alone=True).rank(2) == 0


def test_one_superpeer_more_moves_its_own_part_only() -> None:
    """The property of rendezvous hashing: what is under way elsewhere does not change hands."""
    more = (*NAMES, "h8")
    moved = [piece for piece in range(GROUPS) if shared("h0").first(piece) != shared("h0", more).first(piece)]
    assert moved
    assert all(shared("h0", more).first(piece) == "h8" for piece in moved)
