"""Chunks that are decoded together: the same as one by one, also beside broken ones."""

from __future__ import annotations

import random

import pytest

from p2pdist.model.catalog import ChunkEncoder
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt
from p2pdist.model.tree import CHUNK_MAX
from p2pdist.store.trees.assembly import Decoder, decode_together

PACK = Digest("sha256:" + "0" * 64)


def chunk_of(drawn: random.Random) -> bytes:
    """Some of it can be compressed."""
    parts = [drawn.randbytes(drawn.choice((1, 50_000, 140_000))), b"ab" * drawn.choice((1, 2_000, 100_000))]
    return b"".join(drawn.sample(parts, drawn.choice((1, 2))))


@pytest.mark.parametrize("seed", range(5))
def test_chunks_that_are_decoded_together_are_the_same(seed: int) -> None:
    drawn, encode = random.Random(seed), ChunkEncoder().encode
    chunks = [chunk_of(drawn) for _ in range(30)]
    stored = [memoryview(encode(chunk, cut=drawn.random() < 0.5)) for chunk in chunks]
    lengths = list(map(len, chunks))
    assert list(map(bytes, decode_together(list(zip(stored, lengths, strict=True))))) == chunks  # type: ignore[arg-type]
    assert decode_together([]) == []


@pytest.mark.parametrize("seed", range(40))
def test_a_broken_chunk_makes_no_other_one_wrong(seed: int) -> None:
    """Another may be left to be decoded alone."""
    drawn, encode = random.Random(seed), ChunkEncoder().encode
    chunks = [chunk_of(drawn) for _ in range(4)]
    stored, lengths = [bytearray(encode(chunk, cut=bool(seed % 2))) for chunk in chunks], list(map(len, chunks))
    broken = drawn.randrange(4)
    match drawn.choice(("flipped", "cut short", "another length", "too long")):
        case "flipped":
            stored[broken][drawn.randrange(min(len(stored[broken]), 24))] ^= 1 << drawn.randrange(8)
        case "cut short":
            del stored[broken][drawn.randrange(len(stored[broken])) :]
        case "another length":
            lengths[broken] += drawn.choice((-1, 1))
        case _:
            lengths[broken] = CHUNK_MAX + 1
    found = decode_together([(memoryview(data), length) for data, length in zip(stored, lengths, strict=True)])
    for number, (chunk, data) in enumerate(zip(chunks, found, strict=True)):
        assert number == broken or data is None or bytes(data) == chunk
    try:
        alone = Decoder().decode(PACK, b"", memoryview(stored[broken]), lengths[broken])
    except Corrupt:
        assert found[broken] is None
    else:  # such as a byte of one that is stored as it is: its name tells
        got = found[broken]
        assert got is None or bytes(got) == bytes(alone)
