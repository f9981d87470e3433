"""Selections: some pieces of a blob as a blob of their own."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import NotFound
from p2pdist.model.manifest import PACK_TYPE, PIECES_DIGEST, PIECES_SIZE, Descriptor
from p2pdist.model.pieces import PieceList, PieceSet
from p2pdist.model.selection import Selection, pieces_covering

KIB = 1024
DATA = bytes(index * 7 % 251 for index in range(64 * KIB * 5 + 1000))
WHOLE = PieceList.of_stream(io.BytesIO(DATA), len(DATA))
BLOB = Descriptor(PACK_TYPE, digest_of(DATA), len(DATA), {PIECES_DIGEST: WHOLE.digest, PIECES_SIZE: str(64 * KIB)})


def select(*chosen: int) -> Selection:
    pieces = PieceSet(WHOLE.layout.count)
    for piece in chosen:
        pieces.add(piece)
    return Selection.of(BLOB, WHOLE, pieces)


def bytes_of(selection: Selection) -> bytes:
    layout = WHOLE.layout
    return b"".join(DATA[layout.offset(p) : layout.offset(p) + layout.length(p)] for p in selection.chosen)


def test_its_piece_list_verifies_the_pieces_of_the_blob():
    selection = select(1, 3, 5)
    data, layout = bytes_of(selection), selection.pieces.layout
    assert (selection.descriptor.size, layout.count) == (len(data), 3)
    assert selection.descriptor.layout == layout
    assert all(selection.pieces.verify(p, data[layout.offset(p) :][: layout.length(p)]) for p in range(3))


def test_the_same_pieces_of_the_same_blob_have_the_same_name():
    assert select(1, 3).digest == select(3, 1).digest
    assert len({select(1, 3).digest, select(1, 4).digest, select(1).digest, BLOB.digest}) == 4
    other = PieceList(WHOLE.layout, bytes(len(WHOLE.hashes)))
    assert Selection(BLOB, other, (1, 3)).digest != select(1, 3).digest


def test_a_piece_of_it_is_one_span_of_the_blob():
    selection = select(0, 2, 5)
    layout = selection.pieces.layout
    spans = [selection.spans(layout.offset(piece), layout.length(piece)) for piece in range(3)]
    assert spans == [[(0, 64 * KIB)], [(128 * KIB, 64 * KIB)], [(320 * KIB, 1000)]]


@given(st.sets(st.integers(0, WHOLE.layout.count - 1), min_size=1), st.data())
def test_positions_lead_to_the_same_bytes(chosen, drawn):
    selection = select(*chosen)
    data = bytes_of(selection)
    start = drawn.draw(st.integers(0, len(DATA) - 1))
    length = drawn.draw(st.integers(1, len(DATA) - start))
    held = set(WHOLE.layout.covering(start, start + length)) <= chosen
    if held:
        at = selection.position(start, length)
        assert data[at : at + length] == DATA[start : start + length]
        assert selection.spans(at, length) == [(start, length)]
    else:
        with pytest.raises(NotFound):
            selection.position(start, length)


@given(st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(1, 70 * KIB)), max_size=5))
def test_the_pieces_that_cover_ranges_hold_all_of_them(ranges):
    ranges = [(start, min(len(DATA), start + length)) for start, length in ranges]
    covered = pieces_covering(WHOLE.layout, ranges)
    assert set(covered) == {at // (64 * KIB) for start, end in ranges for at in range(start, end)}
    assert all(a < b for a, b in pairwise(covered))
