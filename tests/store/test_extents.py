"""Chunks that begin anywhere, on Btrfs: their blocks are taken as they are, and what is read from
the disk is what was packed."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import zstandard
from btrfs_rig import compressed_bytes, drop_caches, extents, mount_again
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_tree_rig import Packed, Publisher, bring, check, noise, pull, text

from p2pdist.model.catalog import BLOCK_SIZE, CUT_BLOCK_MAX, SECTOR, ChunkEncoder, chunk_blocks
from p2pdist.model.tree import WHOLE_MAX
from p2pdist.store.objects.btrfs import EncodedWriter, Extents
from p2pdist.store.store import BlobStore

MIB = 1 << 20
pytestmark = pytest.mark.root


@dataclass(frozen=True)
class Chunk:
    offset: int
    data: bytes
    stored: bytes


def chunks(datas: Iterable[bytes], cut: Sequence[bool] = (True,)) -> list[Chunk]:
    """One behind the other, encoded as chunks of contents that are cut, or as earlier releases
    did."""
    found, offset = [], 0
    for number, data in enumerate(datas):
        found.append(Chunk(offset, data, ChunkEncoder().encode(data, cut=cut[number % len(cut)])))
        offset += len(data)
    return found


def written(path: Path, todo: Iterable[Chunk], size: int) -> EncodedWriter:
    """Write chunks to a new file, in this order."""
    writer = EncodedWriter(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.ftruncate(fd, size)
        made = Extents(writer, fd, size)
        for chunk in todo:
            made.write(chunk.offset, chunk.stored, chunk.data)
        made.flush()
    finally:
        os.close(fd)
    return writer


def sectors(size: int) -> int:
    return -(-size // SECTOR) * SECTOR


def test_chunks_that_begin_anywhere_are_taken_as_they_are(btrfs: Path) -> None:
    """All of them, from the first byte to the last; each sector once."""
    lengths = (40_001, 33_333, 512 << 10, BLOCK_SIZE, CUT_BLOCK_MAX, CUT_BLOCK_MAX + 1, 9_001, 200_000, 99_999)
    todo = chunks(text(number, length) for number, length in enumerate(lengths))
    data = b"".join(chunk.data for chunk in todo)
    writer = written(btrfs / "file", todo, len(data))
    assert writer.works and writer.encoded_bytes == len(data)
    mount_again(btrfs)
    assert (btrfs / "file").read_bytes() == data
    assert compressed_bytes(btrfs / "file") == sectors(len(data))
    ends = [offset + length for offset, length, _ in extents(btrfs / "file")]
    assert [offset for offset, _, _ in extents(btrfs / "file")] == [0, *ends[:-1]]


def test_other_blocks_between_are_written(btrfs: Path) -> None:
    """Noise, alone and within a chunk, and chunks that end in the sector in which they begin."""
    mixed = noise(1, CUT_BLOCK_MAX) + text(2, CUT_BLOCK_MAX) + noise(3, CUT_BLOCK_MAX)
    datas = [
        text(1, 50_001),
        noise(2, 70_001),
        text(3, 90_003),
        b"a",
        noise(4, 300),
        b"b" * 100,
        text(5, 90_001),
        mixed,
    ]
    todo = chunks([*datas, noise(6, 1), text(7, 60_007)])
    data = b"".join(chunk.data for chunk in todo)
    writer = written(btrfs / "file", todo, len(data))
    mount_again(btrfs)
    assert (btrfs / "file").read_bytes() == data
    words = sum(len(chunk.data) for chunk in todo if len(chunk.data) > 50_000) - len(mixed) + CUT_BLOCK_MAX - 70_001
    assert abs(writer.encoded_bytes - words) < 12 * SECTOR and len(data) > words + 200_000


def test_chunks_of_earlier_releases_are_taken_where_there_is_room(btrfs: Path) -> None:
    """Their blocks have 128 KiB: with the bytes before them they are longer than an extent may be,
    unless they begin at a sector, or end a chunk."""
    todo = chunks([text(1, 5 * BLOCK_SIZE), text(2, 2 * BLOCK_SIZE + 100), text(3, 2 * BLOCK_SIZE + 70_000)], [False])
    data = b"".join(chunk.data for chunk in todo)
    writer = written(btrfs / "file", todo, len(data))
    mount_again(btrfs)
    assert (btrfs / "file").read_bytes() == data
    assert 7 * BLOCK_SIZE + 70_000 <= writer.encoded_bytes < 7 * BLOCK_SIZE + 70_000 + SECTOR


def test_out_of_order_only_first_sectors_are_written(btrfs: Path) -> None:
    todo = chunks(text(number, 100_001) for number in range(40))
    data = b"".join(chunk.data for chunk in todo)
    writer = written(btrfs / "file", reversed(todo), len(data))
    mount_again(btrfs)
    assert (btrfs / "file").read_bytes() == data
    assert len(data) - len(todo) * SECTOR <= writer.encoded_bytes < len(data)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.data())
def test_any_chunks_in_any_order(btrfs: Path, drawn: st.DataObject) -> None:
    """Of any length and kind, new and old, all or some of them: what was written is there, and the
    rest is a hole."""
    length = st.one_of(
        st.integers(1, 3 * SECTOR),
        st.integers(1, 512 << 10),
        st.sampled_from([SECTOR, CUT_BLOCK_MAX, CUT_BLOCK_MAX + 1, BLOCK_SIZE, 3 * CUT_BLOCK_MAX]),
    )
    kinds = drawn.draw(st.lists(st.tuples(length, st.integers(0, 3)), min_size=1, max_size=12))
    datas = [_content(seed, size, kind) for seed, (size, kind) in enumerate(kinds)]
    todo = chunks(datas, drawn.draw(st.lists(st.booleans(), min_size=1, max_size=3)))
    size = sum(map(len, datas))
    if not drawn.draw(st.booleans()):
        todo = drawn.draw(st.permutations(todo))[: drawn.draw(st.integers(1, len(todo)))]
    expected = bytearray(size)
    for chunk in todo:
        expected[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
    written(btrfs / "file", todo, size)
    drop_caches(btrfs / "file")
    assert (btrfs / "file").read_bytes() == expected


def _content(seed: int, size: int, kind: int) -> bytes:
    if kind < 2:
        return text(seed, size)
    return (
        noise(seed, size) if kind == 2 else (text(seed, size // 3) + noise(seed, size // 3) + text(seed, size))[:size]
    )


def test_frames_of_any_maker(btrfs: Path) -> None:
    """With a checksum, and with a wide window: they are taken where they begin within a sector, the
    others where they can be."""
    data = text(1, 90_001)
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    parameters = zstandard.ZstdCompressionParameters(window_log=24, write_content_size=False)
    streamed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    wide = streamed.compress(data) + streamed.flush()
    for stored in (checked, wide):
        todo = [Chunk(number * len(data), data, stored) for number in range(5)]
        writer = written(btrfs / "file", todo, 5 * len(data))
        drop_caches(btrfs / "file")
        assert (btrfs / "file").read_bytes() == 5 * data
        assert writer.encoded_bytes >= 4 * len(data)


@pytest.mark.parametrize("way", ["refused", "given up"])
def test_what_is_not_taken_is_written(btrfs: Path, way: str) -> None:
    """Where files are not compressed the kernel says no to each; where nothing is to be handed over
    any more, what is held is written."""
    place = btrfs / "place"
    place.mkdir()
    if way == "refused":
        subprocess.run(["chattr", "+C", str(place)], check=True)
    todo = chunks(text(number, 70_001) for number in range(9))
    data = b"".join(chunk.data for chunk in todo)
    writer = EncodedWriter(place)
    with (place / "file").open("wb") as file:
        file.truncate(len(data))
        made = Extents(writer, file.fileno(), len(data))
        for number, chunk in enumerate(todo):
            writer.works = way == "refused" or number < 4
            made.write(chunk.offset, chunk.stored, chunk.data)
        made.flush()
    drop_caches(place / "file")
    assert (place / "file").read_bytes() == data
    assert sectors(writer.encoded_bytes) == (0 if way == "refused" else sectors(4 * 70_001) - SECTOR)


def test_a_write_that_failed_is_made_again(btrfs: Path) -> None:
    """What was held before it is not lost, and lands where it belongs."""
    todo = chunks([*(text(number, 70_001) for number in range(5)), noise(5, 70_001), text(6, 70_001)])
    data = b"".join(chunk.data for chunk in todo)
    path = btrfs / "file"
    path.touch()
    for failing in range(len(todo)):
        writer = EncodedWriter(btrfs)
        fd, reading = os.open(path, os.O_RDWR | os.O_TRUNC), os.open(path, os.O_RDONLY)
        aside = os.dup(fd)
        try:
            os.ftruncate(fd, len(data))
            made = Extents(writer, fd, len(data))
            for number, chunk in enumerate(todo):
                if number == failing:
                    os.dup2(reading, fd)
                    with pytest.raises(OSError):
                        made.write(chunk.offset, chunk.stored, chunk.data)
                    os.dup2(aside, fd)
                    writer.works = True
                made.write(chunk.offset, chunk.stored, chunk.data)
            made.flush()
        finally:
            for each in (fd, reading, aside):
                os.close(each)
        drop_caches(path)
        assert path.read_bytes() == data


def filled(btrfs: Path, versions: Sequence[Packed], order: str = "") -> tuple[int, list[Path]]:
    """Pull versions, their packs at once or in this order; returns the bytes that were taken as
    they are, and the files of what the last one has."""
    store = BlobStore(btrfs / "store")
    try:
        for packed in versions:
            if not order:
                pull(store, packed)
                continue
            bring(store, packed, packed.small)
            with store.trees.missing(packed.root, packed.catalogs, packed.packs) as missing:
                needs = [need.pack for need in missing.needs]
                # Of "every other" the last one is not the end of a file, which is written whole.
                odd = len(needs) % 2
                halves = [needs[1 - odd :: 2], needs[odd::2]]
                for some in [[each] for each in reversed(needs)] if order == "last first" else halves:
                    bring(store, packed, some)
                    done = store.trees.fill(missing)
                assert done.missing == 0
                store.trees.finish(missing)
        encoded = store.objects.encoded.encoded_bytes
        paths = [store.objects.path(content) for content in versions[-1].contents]
    finally:
        store.close()
    mount_again(btrfs)
    store = BlobStore(btrfs / "store")
    try:
        for packed in versions:
            check(store, packed)
    finally:
        store.close()
    return encoded, paths


@pytest.mark.parametrize("order", ["", "last first", "every other"])
def test_large_files_of_a_tree(btrfs: Path, order: str) -> None:
    """Also when their packs come in another order: then some of what was written is read again to
    verify it."""
    big = text(1, WHOLE_MAX + 5 * MIB + 77)
    packed = Publisher(chunk=130_001, pack_bytes=300_000).pack({b"big": big})
    assert len(packed.packs) > 5
    encoded, (path,) = filled(btrfs, [packed], order)
    assert len(big) * 0.95 < encoded <= len(big) and (encoded == len(big)) == (order == "")
    assert sectors(encoded) == compressed_bytes(path)


def test_packs_of_earlier_releases(btrfs: Path) -> None:
    """They are shown as they were."""
    big = text(1, WHOLE_MAX + 3 * MIB + 77)
    filled(btrfs, [Publisher(chunk=300_001, cut=False).pack({b"big": big})])


def test_the_next_version_of_a_large_file(btrfs: Path) -> None:
    """Its chunks come from the older object and from packs, in turn."""
    publisher = Publisher(chunk=100_003)
    old = text(1, 8 * MIB)
    new = bytearray(old)
    for number in (3, 4, 5, 17, 30, 31, 60, 83):
        new[number * 100_003 + 7 : number * 100_003 + 16] = b"something"
    encoded, _ = filled(btrfs, [publisher.pack({b"big": old}), publisher.pack({b"big": bytes(new)})])
    assert encoded > len(old) + 6 * 100_003


def test_holes_between_chunks_stay(btrfs: Path) -> None:
    """What is before a hole, and ends within a sector, is written."""
    drawn = random.Random(1)
    parts = [
        text(number, drawn.randrange(60_000, 200_000)) + bytes(drawn.choice([0, 9000, 70_001])) for number in range(60)
    ]
    data = b"".join(parts)
    assert len(data) > WHOLE_MAX
    _, (path,) = filled(btrfs, [Publisher(chunk=50_021).pack({b"big": data})])
    assert os.stat(path).st_blocks * 512 < len(data) * 0.9


def test_blocks_of_a_chunk_that_is_cut_leave_room_for_a_sector() -> None:
    for length in (1, CUT_BLOCK_MAX, CUT_BLOCK_MAX + 1, BLOCK_SIZE, 2 * CUT_BLOCK_MAX + 1, 512 << 10, WHOLE_MAX):
        sizes = [size for _, size in chunk_blocks(ChunkEncoder().encode(text(1, length), cut=True), length)]
        assert sum(sizes) == length and max(sizes) <= CUT_BLOCK_MAX and not any(size % SECTOR for size in sizes[:-1])
        assert len(sizes) == -(-length // CUT_BLOCK_MAX) and max(sizes) - min(sizes) <= len(sizes) * SECTOR
