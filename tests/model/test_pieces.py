"""Pieces: how a blob is cut, which pieces are held, and that only the right bytes verify."""

from __future__ import annotations

import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.errors import Corrupt
from p2pdist.model.pieces import (
    PIECE_SIZE_MIN,
    PieceLayout,
    PieceList,
    PieceSet,
    encoded_size,
    piece_size_for,
    stripes_for,
)

CONTENT = os.urandom(3 * PIECE_SIZE_MIN + 1)


def piece_list(content: bytes = CONTENT) -> PieceList:
    return PieceList.of_stream(io.BytesIO(content), len(content))


def test_only_the_right_bytes_verify() -> None:
    """Each piece verifies at its own place only; a changed bit, a missing or an added byte does not."""
    pieces = piece_list()
    layout = pieces.layout
    cut = [CONTENT[layout.offset(i) : layout.offset(i) + layout.length(i)] for i in range(layout.count)]
    assert [[pieces.verify(i, data) for data in cut] for i in range(4)] == [
        [i == j for j in range(4)] for i in range(4)
    ]
    for i, data in enumerate(cut):
        flipped = bytearray(data)
        flipped[-1] ^= 1
        assert not pieces.verify(i, flipped)
        assert not pieces.verify(i, data[:-1])
        assert not pieces.verify(i, data + b"\0")


def test_a_piece_list_survives_its_encoding() -> None:
    """Decoding gives back what was encoded, of the size that a manifest can foretell."""
    pieces = piece_list()
    assert PieceList.decode(pieces.encode()) == pieces
    assert len(pieces.encode()) == encoded_size(pieces.layout)


@pytest.mark.parametrize("bad", [b"", b"x" * 28, piece_list().encode()[:-1], piece_list().encode() + b"\0"])
def test_a_malformed_piece_list_is_refused(bad: bytes) -> None:
    """Empty, of another format, too short, too long."""
    with pytest.raises(Corrupt):
        PieceList.decode(bad)


def test_content_that_ends_early_is_refused() -> None:
    """A file that shrinks while it is hashed yields no piece list."""
    with pytest.raises(Corrupt):
        PieceList.of_stream(io.BytesIO(CONTENT[:-1]), len(CONTENT))


@given(size=st.integers(0, 1 << 45))
def test_a_layout_covers_every_byte_once(size: int) -> None:
    """The lengths of the pieces add up to the blob, the last is not empty, and stripes are no more than pieces."""
    layout = PieceLayout(size, piece_size_for(size))
    full = max(0, layout.count - 1)
    assert full * layout.piece_size + (layout.length(layout.count - 1) if layout.count else 0) == size
    assert not layout.count or 0 < layout.length(layout.count - 1) <= layout.piece_size
    assert 1 <= stripes_for(layout.count) <= max(1, layout.count)


@given(count=st.integers(0, 600), held=st.sets(st.integers(0, 599)), stripes=st.sampled_from([1, 2, 4]))
def test_a_piece_set_is_a_set(count: int, held: set[int], stripes: int) -> None:
    """It agrees with a plain set in everything it answers, through its bytes as well."""
    held = {piece for piece in held if piece < count}
    pieces = PieceSet(count)
    for piece in held:
        assert pieces.add(piece)
        assert not pieces.add(piece)
    again = PieceSet(count, pieces.to_bytes())
    for one in (pieces, again):
        assert set(one) == held
        assert len(one) == len(held)
        assert one.complete == (len(held) == count)
        missing = [one.missing(stripe, stripes) for stripe in range(stripes)]
        assert sorted(piece for stripe in missing for piece in stripe) == sorted(set(range(count)) - held)
        assert one.stripe_counts(stripes) == [len([p for p in held if p % stripes == s]) for s in range(stripes)]
