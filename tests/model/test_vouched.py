"""A vouched list: what is listed, what a round confirms, and what is thought of bytes that came."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.errors import Conflict
from p2pdist.model.pieces import HASH_SIZE, PIECE_SIZE_MAX, PieceLayout, PieceList
from p2pdist.model.vouched_list import PIECES_WANTED_MAX, VouchedList, vouched_layout

LAYOUT = PieceLayout(4 * 65536, 65536)
RIGHT, OTHER = b"r" * HASH_SIZE, b"o" * HASH_SIZE


@pytest.mark.parametrize(
    ("size", "piece_size"),
    [
        (0, 1 << 16),
        (1, 1 << 16),
        (128 << 20, 1 << 16),
        ((128 << 20) + 1, 1 << 17),
        (10 << 30, 8 << 20),
        (1 << 40, 16 << 20),
    ],
)
def test_the_size_alone_says_how_a_blob_is_cut(size: int, piece_size: int) -> None:
    layout = vouched_layout(size)
    assert layout == PieceLayout(size, piece_size)
    assert layout.count <= PIECES_WANTED_MAX or piece_size == PIECE_SIZE_MAX


def test_bytes_wait_until_their_hash_is_listed() -> None:
    listed = VouchedList(LAYOUT)
    assert listed.verdict(0, RIGHT) == "unlisted"
    assert not listed.put(0, RIGHT), "nothing was listed before"
    assert listed.verdict(0, RIGHT) == "good"
    assert listed.verdict(0, OTHER) == "wrong"
    assert listed.hash_of(1) is None


def test_a_round_states_one_hash() -> None:
    listed = VouchedList(LAYOUT)
    listed.put(0, RIGHT)
    listed.put(0, RIGHT)
    with pytest.raises(Conflict, match="piece 0"):
        listed.put(0, OTHER)


def test_another_round_confirms_or_replaces() -> None:
    """What is listed stays good meanwhile; other bytes are not judged before the round has spoken,
    and what it replaced was right when it was sent."""
    listed = VouchedList(LAYOUT)
    for piece in range(4):
        listed.put(piece, RIGHT)
    assert listed.complete
    listed.begin(1)
    assert not listed.complete
    assert listed.verdict(0, RIGHT) == "good"
    assert listed.verdict(0, OTHER) == "unlisted"
    assert not listed.put(1, RIGHT), "confirmed"
    assert listed.put(0, OTHER), "what was stored for it is lost"
    assert listed.verdict(0, RIGHT) == "stale"
    assert listed.verdict(0, b"x" * HASH_SIZE) == "wrong"
    assert len(listed.confirmed) == 2


def test_a_suggestion_gives_way_to_what_is_listed() -> None:
    listed = VouchedList(LAYOUT)
    assert listed.suggest(0, RIGHT), "this host has read it itself"
    assert not listed.suggest(0, OTHER)
    assert listed.verdict(0, RIGHT) == "good"
    assert listed.verdict(0, OTHER) == "unlisted", "the tracker may list the other one"
    assert listed.put(0, OTHER)
    assert not listed.suggest(0, RIGHT)
    assert len(listed.confirmed) == 1


def test_a_list_is_whole_once_every_piece_is_listed() -> None:
    listed = VouchedList(LAYOUT)
    with pytest.raises(Conflict, match="4 pieces"):
        listed.piece_list()
    for piece in range(4):
        listed.suggest(piece, RIGHT)
    assert listed.piece_list() == PieceList(LAYOUT, RIGHT * 4)
    assert not listed.complete, "no round has said so"
    assert VouchedList.of(listed.piece_list()).complete


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([RIGHT, OTHER, b"x" * HASH_SIZE]), st.integers(0, 2))))
def test_what_is_put_is_good(steps: list[tuple[int, bytes, int]]) -> None:
    """Whatever came before, the hash that was put last is the listed one, and a hash that was
    replaced is stale."""
    listed = VouchedList(LAYOUT)
    last: dict[int, bytes] = {}
    for piece, stated, later in steps:
        listed.begin(listed.round + later + 1)
        replaced = piece in last and last[piece] != stated
        assert listed.put(piece, stated) == replaced
        if replaced:
            assert listed.verdict(piece, last[piece]) == "stale"
        last[piece] = stated
        assert listed.verdict(piece, stated) == "good"
