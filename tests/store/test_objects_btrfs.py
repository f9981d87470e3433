"""Encoded writes on Btrfs: what is read back is what was packed, and it lies compressed on the
disk."""

from __future__ import annotations

import errno
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from btrfs_rig import drop_caches
from store_rig import on_disk
from store_tree_rig import CHUNK, Publisher, check, noise, pull, text

from p2pdist.model.catalog import BLOCK_SIZE, ChunkEncoder
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, DiskFull
from p2pdist.model.tree import HOLE_BYTES, WHOLE_MAX, content_hash
from p2pdist.store.objects.btrfs import TOGETHER, EncodedWriter, on_btrfs, write_content
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.assembly import Decoder
from p2pdist.store.trees.extraction import Bundle

MIB = 1 << 20
PACK = digest_of(b"a pack")


def written(directory: Path, data: bytes, stored: bytes | memoryview) -> tuple[EncodedWriter, bytes]:
    """What a file on the disk has after a content was written to it."""
    writer, path = EncodedWriter(directory), directory / content_hash(data).hex()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_content(writer, fd, stored, data)
    finally:
        os.close(fd)
    drop_caches(path)
    return writer, path.read_bytes()


@pytest.mark.root
@pytest.mark.parametrize("size", [BLOCK_SIZE // 2, BLOCK_SIZE, BLOCK_SIZE + 1, 7 * BLOCK_SIZE + 4096 + 5, WHOLE_MAX])
def test_blocks_are_taken_as_they_are(btrfs: Path, size: int) -> None:
    """Whatever the last block's length."""
    data = text(1, size)
    writer, found = written(btrfs, data, ChunkEncoder().encode(data))
    assert found == data
    assert writer.works and writer.encoded_bytes >= size - size % BLOCK_SIZE
    assert writer.encoded_bytes > 0


@pytest.mark.root
@pytest.mark.parametrize("size", [3000, 6000, 5 * BLOCK_SIZE + 50_000])
def test_stored_bytes_wherever_they_are(btrfs: Path, size: int) -> None:
    """Bytes, a part of others that may not be written to, and a part of memory that may be: the
    frames are found where they are."""
    data = text(1, size)
    stored = ChunkEncoder().encode(data)
    around = b"before" + stored + b"behind"
    for given in (stored, memoryview(around)[6:-6], memoryview(bytearray(around))[6:-6]):
        writer, found = written(btrfs, data, given)
        assert found == data and writer.encoded_bytes == size


@pytest.mark.root
def test_what_saves_no_sector_is_written(btrfs: Path) -> None:
    """But for a small file that fits into the tree of the filesystem when it is compressed."""
    for data, encoded in (
        (text(1, 4000), 4000),
        (text(2, 2000) + noise(2, 2000), 0),
        (text(3, 2500) + noise(3, 2500), 5000),
        (text(4, 1000) + noise(4, 4000), 0),
    ):
        stored = ChunkEncoder().encode(data)
        assert len(stored) < len(data)
        writer, found = written(btrfs, data, stored)
        assert found == data and writer.works and writer.encoded_bytes == encoded


@pytest.mark.root
def test_told_to_write_decompressed(btrfs: Path) -> None:
    """Nothing is handed over as it is stored, and the objects are the same."""
    files = {b"f%d" % number: text(number, 200_000 * (number + 1)) for number in range(4)}
    packed = Publisher().pack({**files, b"big": text(99, 5 * MIB)})
    store = BlobStore(btrfs / "store")
    try:
        store.objects.encoded.works = False
        pull(store, packed)
        check(store, packed)
        assert store.objects.encoded.encoded_bytes == 0
    finally:
        store.close()


@pytest.mark.root
def test_small_files_in_several_runs(btrfs: Path) -> None:
    """Each run comes into the memory of the one before it, long after short, compressed and not;
    every file has its own content."""
    files = {b"f%d" % number: text(number, 9000 + 40 * number) for number in range(700)}
    files |= {b"n%d" % number: noise(number, 300_000 - 25_000 * (number % 11)) for number in range(60)}
    packed = Publisher(pack_bytes=3 << 20).pack(files)
    store = BlobStore(btrfs / "store")
    try:
        pull(store, packed)
        assert store.objects.encoded.encoded_bytes == sum(len(data) for name, data in files.items() if name[:1] == b"f")
        for content in store.objects.contents():
            drop_caches(store.objects.path(content))
        check(store, packed)
    finally:
        store.close()


@pytest.mark.root
def test_frames_that_are_refused_are_decoded(btrfs: Path) -> None:
    """Files that are not compressed, as those of a directory with the attribute C, take no frames:
    the kernel says no to each."""
    datas = [text(number, 9000 + 40 * number) for number in range(100)]
    (btrfs / "store" / "objects").mkdir(parents=True)
    subprocess.run(["chattr", "+C", str(btrfs / "store" / "objects")], check=True)
    store, encoder = BlobStore(btrfs / "store"), ChunkEncoder()
    objects = store.objects
    try:
        with Bundle(objects) as bundle:
            for data in datas:
                stored = encoder.encode(data)
                assert objects.encoded.takes(stored, len(data))
                assert bundle.add(content_hash(data), data, memoryview(bytearray(stored)))
        assert objects.encoded.encoded_bytes == 0 and len(objects) == len(datas)
        for data in datas:
            path = objects.path(content_hash(data))
            drop_caches(path)
            assert path.read_bytes() == data
    finally:
        store.close()


def in_tree(encoder: ChunkEncoder, number: int) -> tuple[bytes, bytes]:
    """A content whose frame Btrfs keeps in its tree, and the frame."""
    data = text(number, 1500 + number)
    stored = encoder.encode(data)
    assert len(stored) <= 2048 and len(stored) < len(data)
    return data, stored


@pytest.mark.root
def test_threads_write_side_by_side_and_close_only_what_is_theirs(btrfs: Path) -> None:
    """While two threads write, others open files, whose descriptors lie between theirs."""
    store, encoder = BlobStore(btrfs / "store"), ChunkEncoder()
    small = [in_tree(encoder, number) for number in range(5 * TOGETHER)]
    large = [(data, encoder.encode(data)) for data in (text(number, 9000 + number) for number in range(5 * TOGETHER))]
    mixed = [each for pair in zip(small, large, strict=True) for each in pair]

    def write(contents: list[tuple[bytes, bytes]]) -> None:
        with Bundle(store.objects) as bundle:
            assert all(bundle.add(content_hash(data), data, stored) for data, stored in contents)

    others: list[int] = []
    try:
        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(write, share) for share in (mixed[: 5 * TOGETHER], mixed[5 * TOGETHER :])]
            while not all(writer.done() for writer in writers):
                others.append(os.memfd_create(str(len(others))))
                while len(others) > 20:
                    fd = others.pop(0)
                    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
                    os.close(fd)
            for writer in writers:
                writer.result()
        for fd in others:
            assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
        assert on_disk(store.root) == {content_hash(data): data for data, _ in mixed}
    finally:
        store.close()
        for fd in others:
            with suppress(OSError):
                os.close(fd)


@pytest.mark.root
@pytest.mark.parametrize("small", [20, 8, 2, 0])
def test_a_write_that_breaks_off_leaves_nothing_torn(btrfs: Path, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """What was written before is counted and right, what was not has no bytes, also when files
    cannot be emptied any more. It breaks off at the sixth of 20 frames, of which `small` stay in
    the tree."""
    store, encoder = BlobStore(btrfs / "store"), ChunkEncoder()
    objects = store.objects
    frames = [in_tree(encoder, number) for number in range(small)]
    frames += [(data, encoder.encode(data)) for data in (text(number, 9000 + number) for number in range(small, 20))]
    taken, emptied = iter(range(20)), 0
    write_frame, ftruncate = EncodedWriter.write_frame, os.ftruncate

    def break_off(writer: EncodedWriter, fd: int, stored: bytes | memoryview, size: int) -> bool:
        if next(taken) < 5:
            return write_frame(writer, fd, stored, size)
        os.write(fd, b"half")
        raise OSError(errno.ENOSPC, "full")

    def empty(fd: int, length: int) -> None:
        nonlocal emptied
        emptied += 1
        if emptied > 1:
            raise OSError(errno.EIO, "gone")
        ftruncate(fd, length)

    monkeypatch.setattr(EncodedWriter, "write_frame", break_off)
    monkeypatch.setattr(os, "ftruncate", empty)
    descriptors = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(DiskFull), Bundle(objects) as bundle:
            assert all(bundle.add(content_hash(data), data, stored) for data, stored in frames)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        made = set(objects.contents())
        assert len(made) == 5
        right = {content_hash(data): data for data, _ in frames if content_hash(data) in made}
        assert {name: data for name, data in on_disk(store.root).items() if data} == right
    finally:
        monkeypatch.undo()
        store.close()
    store = BlobStore(btrfs / "store")
    try:
        assert on_disk(store.root) == right and set(store.objects.contents()) == made
    finally:
        store.close()


@pytest.mark.root
def test_frames_that_are_taken_are_whole_contents(btrfs: Path) -> None:
    """Of one block, shorter than the content, worth it; no others, and none where they are not to
    be taken."""
    writer, encoder = EncodedWriter(btrfs), ChunkEncoder()
    short, long, tiny = text(1, 9000), text(2, BLOCK_SIZE + 1), noise(3, 50)
    assert writer.takes(encoder.encode(short), len(short))
    assert not writer.takes(encoder.encode(long), len(long))
    assert not writer.takes(encoder.encode(tiny), len(tiny)) and not writer.takes(b"", len(tiny))
    writer.works = False
    assert not writer.takes(encoder.encode(short), len(short))


@pytest.mark.root
def test_blocks_that_did_not_become_shorter_are_written(btrfs: Path) -> None:
    """Between, before and behind others, that are taken as they are; and frames that the kernel
    could not decode are not given to it."""
    blocks = [
        noise(1, BLOCK_SIZE),
        text(2, BLOCK_SIZE),
        noise(3, BLOCK_SIZE),
        text(4, BLOCK_SIZE),
        text(5, BLOCK_SIZE),
        noise(6, 100),
    ]
    data = b"".join(blocks)
    writer, found = written(btrfs, data, ChunkEncoder().encode(data))
    assert found == data and writer.encoded_bytes == 3 * BLOCK_SIZE
    parameters = zstandard.ZstdCompressionParameters(window_log=24, write_content_size=False)
    streamed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    wide = streamed.compress(blocks[1]) + streamed.flush()
    assert len(wide) < BLOCK_SIZE
    writer, found = written(btrfs, blocks[1], wide)
    assert found == blocks[1] and writer.encoded_bytes == 0


@pytest.mark.root
def test_a_tree_on_btrfs(btrfs: Path) -> None:
    """Small and large files; less is on the disk than is read, and everything verifies after a
    remount."""
    files = {b"f%d" % number: text(number, 300_000 * (number + 1)) for number in range(12)}
    packed = Publisher().pack({**files, b"noise": noise(1, 500_000), b"big": text(99, 9 * MIB + 5), b"tiny": b"tiny"})
    store = BlobStore(btrfs / "store")
    try:
        pull(store, packed)
        assert store.objects.encoded.encoded_bytes > 30 * MIB
        for content in store.objects.contents():
            drop_caches(store.objects.path(content))
        check(store, packed)
    finally:
        store.close()
    subprocess.run(["sync", "-f", str(btrfs)], check=True)
    used = os.statvfs(btrfs)
    taken = (used.f_blocks - used.f_bfree) * used.f_frsize
    assert taken < store.objects.bytes_total, "with the packs and all else"


@pytest.mark.root
def test_only_what_verified_is_given_to_the_filesystem(btrfs: Path) -> None:
    """Frames that decompress well to other bytes than those of the name make no object, and nothing
    of them is written."""
    data, other = text(1, 4 * BLOCK_SIZE), text(2, 4 * BLOCK_SIZE)
    store = BlobStore(btrfs / "store")
    try:
        assert store.objects.add(content_hash(data), other, ChunkEncoder().encode(other)) is False
        assert store.objects.encoded.encoded_bytes == 0 and content_hash(data) not in store.objects
        assert store.objects.add(content_hash(data), memoryview(data), ChunkEncoder().encode(data))
        assert store.objects.encoded.encoded_bytes == len(data)
    finally:
        store.close()


@pytest.mark.root
def test_holes_stay_holes_and_other_zeros_are_taken_as_they_are(btrfs: Path) -> None:
    """A chunk with a whole block of zeros is written around it; one with as many zeros across two
    blocks is taken as it is."""
    hole = bytearray(text(1, CHUNK))
    hole[8192 : 8192 + HOLE_BYTES] = bytes(HOLE_BYTES)
    across = bytearray(text(2, CHUNK))
    across[8193 : 8193 + HOLE_BYTES] = bytes(HOLE_BYTES)
    filler = [text(seed, CHUNK) for seed in range(3, 3 + WHOLE_MAX // CHUNK)]
    packed = Publisher().pack({b"big": b"".join([bytes(hole), bytes(across), *filler])})
    store = BlobStore(btrfs / "store")
    try:
        pull(store, packed)
        check(store, packed)
        assert store.objects.encoded.encoded_bytes == (1 + len(filler)) * CHUNK
        fd = os.open(store.objects.path(next(iter(packed.contents))), os.O_RDONLY)
        try:
            assert os.lseek(fd, 0, os.SEEK_HOLE) == 8192 and os.lseek(fd, 8192, os.SEEK_DATA) == 8192 + HOLE_BYTES
        finally:
            os.close(fd)
    finally:
        store.close()


def test_chunks_are_decoded_one_after_the_other() -> None:
    """Long after short, compressed, not compressed and mixed: each is what was packed until the
    next is decoded."""
    mixed = text(1, BLOCK_SIZE) + noise(2, BLOCK_SIZE) + text(3, BLOCK_SIZE + 7)
    decoder = Decoder()
    for data in (mixed, text(4, 900), noise(5, 3 * BLOCK_SIZE), text(6, WHOLE_MAX), text(7, BLOCK_SIZE + 1), mixed):
        assert decoder.decode(PACK, content_hash(data), memoryview(ChunkEncoder().encode(data)), len(data)) == data


def test_chunks_that_cannot_be_decoded() -> None:
    """A frame cut short, one of another length than its block, lengths that do not add up, a chunk
    over the limit: all are corrupt, and the decoder goes on."""
    data = text(1, 2 * BLOCK_SIZE)
    stored, decoder = ChunkEncoder().encode(data), Decoder()
    first = int.from_bytes(stored[:4], "little")
    frames = [stored[8 : 8 + first], stored[8 + first :]]
    swollen = ChunkEncoder().encode(text(2, BLOCK_SIZE - 1))
    wide = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=True)
    cut = zstandard.ZstdCompressor(compression_params=wide).compress(data[BLOCK_SIZE:])[:-9]
    for made in ([frames[0], frames[1][:-9]], [frames[0], cut], [swollen, frames[1]]):
        chunk = b"".join(len(frame).to_bytes(4, "little") for frame in made) + b"".join(made)
        with pytest.raises(Corrupt):
            decoder.decode(PACK, content_hash(data), memoryview(chunk), len(data))
    for chunk, length in ((stored[:-1], len(data)), (stored, WHOLE_MAX + BLOCK_SIZE), (frames[0], BLOCK_SIZE - 1)):
        with pytest.raises(Corrupt):
            decoder.decode(PACK, content_hash(data), memoryview(chunk), length)
    assert decoder.decode(PACK, content_hash(data), memoryview(stored), len(data)) == data


def test_elsewhere_chunks_are_written(tmp_path: Path) -> None:
    if on_btrfs(tmp_path):
        pytest.skip("the temporary directory is on Btrfs")
    data = text(8, 3 * BLOCK_SIZE)
    writer, found = written(tmp_path, data, ChunkEncoder().encode(data))
    assert found == data and not writer.works and writer.encoded_bytes == 0
