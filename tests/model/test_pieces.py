"""Pieces: layouts, sets of pieces, piece lists."""

from __future__ import annotations

import io

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.digest import digest_of, is_digest, parse_digest
from p2pdist.model.errors import Corrupt, UsageError
from p2pdist.model.pieces import (
    HASH_SIZE,
    PIECE_SIZE_MAX,
    PIECE_SIZE_MIN,
    PIECES_LIMIT,
    PieceLayout,
    PieceList,
    PieceSet,
    encoded_size,
    piece_size_for,
)

LAYOUTS = st.builds(
    PieceLayout, st.integers(0, 40 * PIECE_SIZE_MIN), st.sampled_from([PIECE_SIZE_MIN, 2 * PIECE_SIZE_MIN])
)


@given(LAYOUTS)
def test_pieces_cover_a_blob_once(layout: PieceLayout) -> None:
    """One after the other, without gaps, none empty, only the last one shorter."""
    position = 0
    for piece in range(layout.count):
        assert layout.offset(piece) == position
        assert 0 < layout.length(piece) <= layout.piece_size
        assert layout.length(piece) == layout.piece_size or piece == layout.count - 1
        position += layout.length(piece)
    assert position == layout.size


@given(LAYOUTS, st.data())
def test_covering_is_every_piece_that_holds_a_byte_of_the_range(layout: PieceLayout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, max(0, layout.size - 1)))
    end = data.draw(st.integers(min(layout.size, start + 1), layout.size))
    obvious = [
        piece
        for piece in range(layout.count)
        if layout.offset(piece) < end and start < layout.offset(piece) + layout.length(piece)
    ]
    assert list(layout.covering(start, end)) == obvious


@given(st.integers(0, 1 << 40))
def test_piece_sizes_are_powers_of_two_within_bounds(size: int) -> None:
    piece_size = piece_size_for(size)
    assert piece_size.bit_count() == 1 and PIECE_SIZE_MIN <= piece_size <= PIECE_SIZE_MAX
    layout = PieceLayout(size, piece_size)
    count = layout.count
    assert count <= 4096 or piece_size == PIECE_SIZE_MAX
    assert count > 2048 or piece_size == PIECE_SIZE_MIN
    assert layout.stripes in {1, 2, 4}


@given(st.integers(0, 70), st.data())
def test_a_piece_set_is_a_set(count: int, data: st.DataObject) -> None:
    """Any sequence of adds and discards gives what a set of numbers gives, and the bitmap carries
    it over."""
    pieces, obvious = PieceSet(count), set[int]()
    numbers = st.integers(0, max(0, count - 1))
    for number, adding in data.draw(st.lists(st.tuples(numbers, st.booleans()), max_size=60 if count else 0)):
        if adding:
            assert pieces.add(number) == (number not in obvious)
            obvious.add(number)
        else:
            pieces.discard(number)
            obvious.discard(number)
    again = PieceSet(count, pieces.to_bytes())
    for found in (pieces, again):
        assert set(found) == obvious and list(found) == sorted(obvious)
        assert len(found) == len(obvious)
        assert found.complete == (len(obvious) == count)
        assert all((number in found) == (number in obvious) for number in range(count))
        for stripes in (1, 2, 4):
            assert found.stripe_counts(stripes) == [
                sum(number % stripes == stripe for number in obvious) for stripe in range(stripes)
            ]
            for stripe in range(stripes):
                missing = [number for number in range(stripe, count, stripes) if number not in obvious]
                assert found.missing(stripe, stripes) == missing
    assert again.to_bytes() == pieces.to_bytes()


@given(st.integers(0, 70))
def test_a_full_set_has_no_piece_beyond_the_last(count: int) -> None:
    """Bits beyond the count are ignored, wherever the bitmap came from."""
    full = PieceSet.full(count)
    assert list(full) == list(range(count)) and full.complete and full.missing() == []
    assert full.stripe_counts(4) == [len(range(stripe, count, 4)) for stripe in range(4)]


@pytest.mark.parametrize(("count", "length"), [(0, 1), (1, 0), (8, 2), (9, 1)])
def test_a_bitmap_of_the_wrong_length_is_corrupt(count: int, length: int) -> None:
    with pytest.raises(Corrupt):
        PieceSet(count, bytes(length))


@given(LAYOUTS, st.randoms(use_true_random=False))
def test_a_piece_list_comes_back_as_it_was(layout: PieceLayout, random: object) -> None:
    pieces = PieceList(layout, random.randbytes(layout.count * HASH_SIZE))  # type: ignore[attr-defined]
    encoded = pieces.encode()
    assert len(encoded) == encoded_size(layout)
    assert PieceList.decode(encoded) == pieces
    assert pieces.digest == digest_of(encoded)


@given(st.binary(max_size=200), st.integers(0, 100), st.integers(0, 255))
def test_what_decodes_encodes_to_the_same_bytes(noise: bytes, position: int, value: int) -> None:
    """Noise, and a good list with one byte changed or its end cut off, is refused as Corrupt or is
    itself a list."""
    good = bytearray(PieceList(PieceLayout(PIECE_SIZE_MIN + 1, PIECE_SIZE_MIN), bytes(64)).encode())
    cut = bytes(good[:position])
    if position < len(good):
        good[position] = value
    for data in (noise, bytes(good), cut):
        try:
            assert PieceList.decode(data).encode() == data
        except Corrupt:
            continue


def encoded(size: int, piece_size: int, hashes: bytes) -> bytes:
    return b"p2pdist-pieces-1" + size.to_bytes(8, "big") + piece_size.to_bytes(4, "big") + hashes


@pytest.mark.parametrize(
    "data",
    [
        b"",
        encoded(1, PIECE_SIZE_MIN, bytes(31)),
        encoded(1, PIECE_SIZE_MIN, bytes(33)),
        encoded(1, PIECE_SIZE_MIN, b""),
        encoded(0, PIECE_SIZE_MIN, bytes(32)),
        encoded(1, 0, bytes(32)),
        encoded(1, PIECE_SIZE_MIN // 2, bytes(32)),
        encoded(1, PIECE_SIZE_MAX * 2, bytes(32)),
        encoded(1, PIECE_SIZE_MIN * 3, bytes(32)),
        encoded((1 << 64) - 1, PIECE_SIZE_MAX, bytes(32)),
        encoded(1, PIECE_SIZE_MIN, bytes(32)).replace(b"pieces-1", b"pieces-2"),
    ],
)
def test_malformed_piece_lists_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        PieceList.decode(data)


def test_the_longest_piece_list_and_one_more() -> None:
    size = PIECES_LIMIT * PIECE_SIZE_MIN
    assert PieceList.decode(encoded(size, PIECE_SIZE_MIN, bytes(PIECES_LIMIT * 32))).layout.count == PIECES_LIMIT
    with pytest.raises(Corrupt):
        PieceList.decode(encoded(size + 1, PIECE_SIZE_MIN, bytes((PIECES_LIMIT + 1) * 32)))


def test_the_format_is_as_documented() -> None:
    """Written out by hand, so that a change of the format cannot pass unnoticed."""
    content = bytes(range(256)) * 256 + b"end"
    pieces = PieceList.of_stream(io.BytesIO(content), len(content))
    hashes = blake3(content[:65536]).digest() + blake3(b"end").digest()
    assert pieces.encode() == encoded(65539, 65536, hashes)


def test_a_piece_verifies_only_as_itself() -> None:
    content = bytes(PIECE_SIZE_MIN) + b"end"
    pieces = PieceList.of_stream(io.BytesIO(content), len(content))
    assert pieces.verify(0, bytes(PIECE_SIZE_MIN)) and pieces.verify(1, b"end")
    assert pieces.verify(1, memoryview(b"end")) and pieces.verify(1, bytearray(b"end"))
    for piece, data in [(0, b"end"), (1, b"enD"), (1, b"en"), (1, b"end\0"), (0, bytes(PIECE_SIZE_MIN - 1))]:
        assert not pieces.verify(piece, data)


def test_content_that_ends_early_is_corrupt() -> None:
    with pytest.raises(Corrupt):
        PieceList.of_stream(io.BytesIO(b"four"), 5)
    assert PieceList.of_stream(io.BytesIO(b"four"), 0).layout.count == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sha256:",
        "sha256:" + "a" * 63,
        "sha256:" + "a" * 65,
        "sha256:" + "A" * 64,
        "sha256:" + "a" * 64 + "\n",
        "SHA256:" + "a" * 64,
        "sha512:" + "a" * 64,
        " sha256:" + "a" * 64,
        "sha256:" + "１" * 64,
    ],
)
def test_what_is_no_digest_is_refused(text: str) -> None:
    assert not is_digest(text)
    with pytest.raises(UsageError):
        parse_digest(text)


def test_a_digest_is_the_sha256() -> None:
    """NIST's example for "abc" (FIPS 180-2)."""
    text = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest_of(b"abc") == text == parse_digest(text)


@given(st.data(), st.integers(1, 70))
def test_what_one_set_has_beyond_another(data: st.DataObject, count: int) -> None:
    pieces = st.sets(st.integers(0, count - 1))
    here, there = data.draw(pieces), data.draw(pieces)
    one, other = PieceSet(count), PieceSet(count)
    for piece in here:
        one.add(piece)
    for piece in there:
        other.add(piece)
    assert one.beyond(other) == here - there


@given(st.integers(1, 70), st.integers(0, 2**70 - 1), st.integers(0, 2**70 - 1), st.sampled_from([1, 2, 3, 4, 8]))
def test_offers_is_what_one_by_one_finds(count: int, held: int, known: int, stripes: int) -> None:
    """Of a stripe, what one set has and the other has not."""
    length = (count + 7) // 8
    mine, other = (PieceSet(count, (bits % 2 ** (8 * length)).to_bytes(length, "little")) for bits in (held, known))
    for stripe in range(stripes):
        slow = any(piece in mine and piece not in other for piece in range(stripe, count, stripes))
        assert mine.offers(other, stripe, stripes) == slow
