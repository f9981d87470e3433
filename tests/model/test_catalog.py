"""Catalogs and stored chunks."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest
import zstandard
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.model.catalog import (
    BLOCK_SIZE,
    CATALOG_BYTES_MAX,
    CHUNK_LISTS_MAX,
    CUT_BLOCK_MAX,
    HEAD_BYTES,
    LEVEL,
    Catalog,
    ChunkEncoder,
    Pack,
    Stored,
    check_expansion,
    chunk_blocks,
    decode_catalog,
    decode_chunk,
    encode_catalog,
    record,
)
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, TooLarge
from p2pdist.model.tree import CHUNK_MAX

HASH = bytes(32)
PACK = Pack(digest_of(b"pack"), 30, record(HASH, 10, 10) + record(HASH, 40, 20))
CATALOG = Catalog((b"page", b"other page"), (b"chunk list",), (PACK,))


def test_a_catalog_comes_back_as_it_was():
    assert decode_catalog(encode_catalog(CATALOG)) == CATALOG
    assert list(PACK.chunks()) == [Stored(HASH, 10, 0, 10), Stored(HASH, 40, 10, 20)]
    assert len(PACK) == 2


@pytest.mark.parametrize(
    "pack",
    [
        replace(PACK, size=31),
        replace(PACK, digest="sha256:short"),
        replace(PACK, records=PACK.records[:-1]),
        Pack(PACK.digest, 0, record(HASH, 1, 0)),
        Pack(PACK.digest, 2, record(HASH, 1, 2)),
        Pack(PACK.digest, 1, record(HASH, CHUNK_MAX + 1, 1)),
    ],
)
def test_a_pack_whose_chunks_do_not_add_up_is_refused(pack):
    with pytest.raises(Corrupt):
        decode_catalog(encode_catalog(Catalog(packs=(pack,))))


def test_a_catalog_that_would_fill_the_memory_is_refused():
    bomb = zstandard.ZstdCompressor().compress(b"x")
    huge = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    vast = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    for wrong in (b"", b"noise", bomb, huge, vast, encode_catalog(CATALOG)[:-3]):
        with pytest.raises(Corrupt):
            decode_catalog(wrong)


def test_a_catalog_is_one_frame_of_bounded_lists():
    """What is behind the frame would be decompressed by other readers; a list of nothing takes
    memory for each of its items."""
    many = msgspec.msgpack.encode(["p2pdist-catalog-1", [], [b""] * (CHUNK_LISTS_MAX + 1), []])
    more = encode_catalog(CATALOG) + zstandard.ZstdCompressor().compress(bytes(1 << 20))
    for wrong in (zstandard.ZstdCompressor().compress(many), more):
        with pytest.raises(Corrupt):
            decode_catalog(wrong)


def test_catalogs_of_a_tree_share_one_budget():
    """Each alone may state 16 MiB whatever its length; together they may as well, and no more."""
    small = zstandard.ZstdCompressor().compress(bytes(9 << 20))
    head = len(small), small[:HEAD_BYTES]
    check_expansion([head])
    with pytest.raises(Corrupt, match="over the limit"):
        check_expansion([head] * 2)
    large = zstandard.ZstdCompressor().compress(bytes(CATALOG_BYTES_MAX // 2 + 1))[:HEAD_BYTES]
    check_expansion([(1 << 30, large)])
    with pytest.raises(Corrupt, match="over the limit"):
        check_expansion([(1 << 30, large)] * 2)


def test_what_nobody_could_read_is_not_packed():
    with pytest.raises(TooLarge, match="over the limit"):
        encode_catalog(Catalog((bytes(CATALOG_BYTES_MAX),)))


LENGTHS = [1, 100, CUT_BLOCK_MAX, CUT_BLOCK_MAX + 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 5]


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(LENGTHS), st.integers(0, 2), st.booleans())
def test_a_chunk_comes_back_as_it_was(length, kind, cut):
    data = (os.urandom(length), bytes(length), (os.urandom(BLOCK_SIZE) + bytes(3 * BLOCK_SIZE + 5))[:length])[kind]
    stored = ChunkEncoder().encode(data, cut=cut)
    assert len(stored) <= length
    assert decode_chunk(stored, length) == data
    sizes = [size for _, size in chunk_blocks(stored, length)]
    assert sum(sizes) == length
    assert len(stored) == length or max(sizes) <= (CUT_BLOCK_MAX if cut else BLOCK_SIZE)


def test_a_chunk_of_an_earlier_release_is_read():
    """Blocks of 128 KiB, and only their lengths before them. So whole contents are stored to this
    day."""
    data = (b"some text %d " * 30_000)[: 2 * BLOCK_SIZE + 77]
    blocks = [data[:BLOCK_SIZE], data[BLOCK_SIZE : 2 * BLOCK_SIZE], data[2 * BLOCK_SIZE :]]
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    frames = [compressor.compress(block) for block in blocks]
    stored = struct.pack("<3I", *map(len, frames)) + b"".join(frames)
    assert decode_chunk(stored, len(data)) == data
    assert ChunkEncoder().encode(data) == stored != ChunkEncoder().encode(data, cut=True)


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_a_broken_chunk_is_corrupt_or_of_its_length(drawn):
    length = drawn.draw(st.sampled_from([CUT_BLOCK_MAX + 1, 2 * BLOCK_SIZE + 77]))
    data = (b"some text %d " * 30_000)[:length]
    stored = bytearray(ChunkEncoder().encode(data, cut=drawn.draw(st.booleans())))
    place = st.one_of(st.integers(0, 15), st.integers(0, len(stored) - 1))
    stored[drawn.draw(place)] ^= drawn.draw(st.integers(1, 255))
    with suppress(Corrupt):
        assert len(decode_chunk(bytes(stored), len(data))) == len(data)


@pytest.mark.parametrize(
    "words", [[], [32 << 24 | 9], [33 << 24 | 9, 33 << 24 | 9], [1 << 24 | 9] * 32, [16 << 24 | 9, 9]]
)
def test_words_that_cannot_be_are_corrupt(words):
    """None, one alone, blocks over the limit, too few of them, and not all alike."""
    stored = struct.pack(f"<{len(words)}I", *words) + bytes(9 * len(words))
    for length in (BLOCK_SIZE, 2 * BLOCK_SIZE):
        with pytest.raises(Corrupt):
            decode_chunk(stored, length)


def test_a_block_that_claims_to_be_longer_is_refused_before_it_is_decompressed():
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(Corrupt, match="another length"):
        decode_chunk(bomb, BLOCK_SIZE - 1)
