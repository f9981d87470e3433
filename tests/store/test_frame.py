"""Frames with bytes before what they decode to: any decoder reads them as one content."""

from __future__ import annotations

import random

import pytest
import zstandard
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from store_tree_rig import noise, text

from p2pdist.model.catalog import BLOCK_SIZE, CUT_BLOCK_MAX, SECTOR
from p2pdist.store.objects.btrfs import beginning, blocks_of


def lengthened(frame: bytes, head: bytes, length: int) -> bytes:
    start, end = blocks_of(frame)
    return beginning(head, length) + frame[start:end]


def decoded(frame: bytes) -> bytes:
    """As the kernel does it: with no more memory than for the longest extent, whatever the frame
    states."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=BLOCK_SIZE).decompressobj()
    found = bytes(decompressor.decompress(frame))
    assert decompressor.eof and decompressor.unused_data == b""
    return found


def content(drawn: random.Random, length: int) -> bytes:
    """Words, noise, runs of one byte and repetitions of what is far behind, in turn."""
    made = bytearray()
    while len(made) < length:
        part = drawn.randrange(1, 40_000)
        kind = drawn.randrange(4)
        if kind == 0:
            made += text(drawn.randrange(9), part)
        elif kind == 1:
            made += noise(drawn.randrange(9), part // 8)
        elif kind == 2:
            made += bytes([drawn.randrange(256)]) * part
        else:
            made += made[: part + 1]
    return bytes(made[:length])


@settings(max_examples=examples(300), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    head=st.one_of(st.integers(0, 20), st.integers(0, SECTOR - 1), st.just(SECTOR - 1)),
    length=st.one_of(st.integers(1, 40), st.integers(1, CUT_BLOCK_MAX), st.just(CUT_BLOCK_MAX)),
    level=st.sampled_from([-20, -1, 1, 3, 6, 12, 19]),
    sized=st.booleans(),
    checked=st.booleans(),
)
def test_what_is_put_before_comes_first(
    seed: int, head: int, length: int, level: int, sized: bool, checked: bool
) -> None:
    """Whoever made the frame: quickly or thoroughly, with its length, a checksum, or neither."""
    drawn = random.Random(seed)
    data = content(drawn, length)
    first = (data * (head // length + 1))[:head] if seed % 2 else drawn.randbytes(head)  # which looks like it, or not
    encoder = zstandard.ZstdCompressor(level=level, write_content_size=sized, write_checksum=checked)
    frame = encoder.compress(data)
    made = lengthened(frame, first, length)
    assert decoded(made) == first + data
    assert zstandard.get_frame_parameters(made).window_size == zstandard.frame_content_size(made) == head + length


def test_a_frame_with_a_window_of_its_own_needs_no_more_than_both_together() -> None:
    data, head = text(1, CUT_BLOCK_MAX), noise(2, SECTOR - 1)
    parameters = zstandard.ZstdCompressionParameters(window_log=24, write_content_size=False)
    streamed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    wide = streamed.compress(data) + streamed.flush()
    with pytest.raises(zstandard.ZstdError):
        decoded(wide)
    assert decoded(lengthened(wide, head, len(data))) == head + data


def test_a_frame_that_needs_a_dictionary_has_no_blocks_of_use() -> None:
    trained = zstandard.train_dictionary(4096, [text(seed, 3000) for seed in range(200)])
    assert trained.dict_id()
    frame = zstandard.ZstdCompressor(dict_data=trained).compress(text(1, 9000))
    assert blocks_of(frame) == (0, 0)
