"""Assemblies: large contents that are made from chunks, in packs and in older objects.

An assembly writes its parts to a temporary file as they become available, in any order. It hashes
parts that arrive in order while they are in memory, and reads the rest again at the end: no
temporary file gets its name before all of it has verified. Blocks of zeros are left as holes. A
pack may be here as a selection of its pieces (p2pdist/model/selection.py), which is read like the
pack."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import zstandard
from blake3 import blake3

from p2pdist.model.catalog import BLOCK_SIZE, chunk_blocks, one_frame
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, Damaged, NotFound, P2PDistError
from p2pdist.model.selection import Selection
from p2pdist.model.tree import CHUNK_MAX, HOLE_BYTES, ChunkList, content_hash, data_ranges, has_hole
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.disk import pwrite_all
from p2pdist.store.objects.files import Objects, TemporaryFile
from p2pdist.store.trees.damage import blame


@dataclass(frozen=True, slots=True)
class SelectedPack:
    """A selection of the pieces of a pack, read by offsets in the pack."""

    selection: Selection
    blob: Blob
    """Holds the selection, in whole or in part."""

    @property
    def digest(self) -> Digest:
        """Digest of the pack."""
        return self.selection.blob.digest

    @property
    def size(self) -> int:
        """Size of the pack in bytes."""
        return self.selection.blob.size

    @contextmanager
    def held(self) -> Iterator[SelectedPack]:
        """Hold the selection within a `with` block."""
        with self.blob.held():
            yield self

    def holds(self, start: int, length: int) -> bool:
        """Whether bytes of the pack are here."""
        try:
            position = self.selection.position(start, length)
        except NotFound:
            return False
        return self.blob.holds(position, length)

    def read_range(self, start: int, length: int) -> bytes:
        """Bytes of the pack; raises what Blob.read_range raises."""
        return self.blob.read_range(self.selection.position(start, length), length)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of the pack; raises what Blob.read_into raises."""
        self.blob.read_into(self.selection.position(start, len(buffer)), buffer)


PackHere = Blob | SelectedPack
"""A pack, or a selection of its pieces, in whole or in part."""

_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk of a content, `length` bytes at `offset`: `stored` bytes at `at` of `pack`, or at
    `at` of the object `source`."""

    offset: int
    chunk: bytes
    length: int
    pack: Digest | None = None
    source: bytes = b""
    at: int = 0
    stored: int = 0


class DamagedObject(Exception):
    """The object `content` is not what its name says."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content.hex())
        self.content = content


class Decoder:
    """Decodes chunks. Not thread-safe. The context is kept, which costs as much as a small chunk,
    and so is the memory for chunks of several blocks: the kernel clears new memory first, and
    joining blocks is a copy."""

    def __init__(self) -> None:
        self._decompress = zstandard.ZstdDecompressor().decompress
        # A whole frame comes into the memory in one go, whatever its window; a window is taken only
        # for one that is cut short.
        self._reader = zstandard.ZstdDecompressor(max_window_size=BLOCK_SIZE).stream_reader
        self._memory = memoryview(b"")

    def decode(self, pack: Digest, chunk: bytes, stored: memoryview, length: int) -> bytes | memoryview:
        """The chunk, one of more than BLOCK_SIZE good until the next call; raises Corrupt when what
        the pack holds cannot be decoded. Its BLAKE3 is yet to be compared."""
        try:
            if len(stored) == length:
                return stored
            if not one_frame(stored, length):
                joined = self._join(stored, length)
                return joined if length > BLOCK_SIZE else bytes(joined)
            if zstandard.frame_content_size(stored) == length:
                return self._decompress(stored)
        except (Corrupt, zstandard.ZstdError) as error:
            raise wrong_chunk(pack, chunk) from error
        raise wrong_chunk(pack, chunk)

    def _join(self, stored: memoryview, length: int) -> memoryview:
        """The blocks of a chunk in the memory kept; raises Corrupt, ZstdError."""
        if length > CHUNK_MAX:
            raise Corrupt(f"a chunk of {length} bytes is over the limit")
        if not self._memory:
            self._memory = memoryview(bytearray(CHUNK_MAX))
        end = 0
        for block, size in chunk_blocks(stored, length):
            target = self._memory[end : end + size]
            if len(block) == size:
                target[:] = block
            elif zstandard.frame_content_size(block) != size or self._read(block, target) != size:
                raise Corrupt("a stored chunk holds a block of another length than it states")
            end += size
        return self._memory[:length]

    def _read(self, frame: bytes | memoryview, target: memoryview) -> int:
        with self._reader(frame) as reader:
            return reader.readinto(target)


def decode_together(chunks: Sequence[tuple[memoryview, int]]) -> list[bytes | memoryview | None]:
    """Chunks, each of its stored bytes and its length, decoded in one go, for which a thread waits
    for the interpreter once; None for one that cannot be decoded so: `Decoder` says why. The BLAKE3
    of each is yet to be compared. They take memory all at once."""
    cut: list[list[memoryview | int] | None] = []
    frames: list[bytes | bytearray | memoryview] = []
    for stored, length in chunks:
        first, blocks = len(frames), list[memoryview | int]()
        try:
            if length > CHUNK_MAX:
                raise Corrupt(f"a chunk of {length} bytes is over the limit")
            for block, size in chunk_blocks(stored, length):
                if len(block) == size:
                    blocks.append(memoryview(block))
                elif zstandard.frame_content_size(block) == size:
                    blocks.append(len(frames))
                    frames.append(memoryview(block))
                else:
                    raise Corrupt("a stored chunk holds a block of another length than it states")
            cut.append(blocks)
        except (Corrupt, zstandard.ZstdError):
            del frames[first:]
            cut.append(None)
    try:
        views = _decompressed(frames) if frames else []
    except zstandard.ZstdError:  # one of them is wrong
        return [None] * len(chunks)
    joined = ([views[block] if isinstance(block, int) else block for block in blocks or ()] for blocks in cut)
    return [None if not parts else parts[0] if len(parts) == 1 else b"".join(parts) for parts in joined]


def _decompressed(frames: list[bytes | bytearray | memoryview]) -> list[memoryview]:
    """Raises ZstdError."""
    decoded = zstandard.ZstdDecompressor().multi_decompress_to_buffer(frames)
    return [memoryview(decoded[number]) for number in range(len(decoded))]  # type: ignore[arg-type] # it has a buffer


def wrong_chunk(pack: Digest, chunk: bytes) -> Corrupt:
    """The failure of a chunk that is not what the catalog says, in a pack whose pieces verify: the
    package was packed wrongly."""
    return Corrupt(
        f"the pack {pack} does not hold the chunk {chunk.hex()} that its catalog states",
        remedy="Pack and push the package again",
    )


def blame_pack(pack: PackHere, start: int, length: int, failure: P2PDistError) -> P2PDistError:
    """What a use of a range of a pack is to raise that ended with `failure`: Damaged where pieces
    changed on the disk, and were dropped."""
    if isinstance(pack, SelectedPack):
        return blame(pack.blob, pack.selection.position(start, length), length, failure)
    return blame(pack, start, length, failure)


class Assembly:
    """One large content and its temporary file. Not thread-safe."""

    def __init__(self, content: bytes, size: int, chunks: bytes, parts: list[Part]) -> None:
        self.content, self.size = content, size
        self.chunks = chunks
        """The encoded chunk list."""
        self.pending = parts
        """The parts that are not in the temporary file yet."""
        self._temporary: TemporaryFile | None = None
        self._hasher, self._hashed = blake3(), 0

    @property
    def begun(self) -> bool:
        """Whether there is a temporary file."""
        return self._temporary is not None

    def whole(self, available: Callable[[Part], bool]) -> bool:
        """Whether all parts are available."""
        return all(map(available, self.pending))

    def any(self, available: Callable[[Part], bool]) -> bool:
        """Whether one is."""
        return any(map(available, self.pending))

    def advance(self, objects: Objects, packs: Callable[[Digest], PackHere], available: Callable[[Part], bool]) -> bool:
        """Write what is available; True when the content has become an object. Raises Corrupt,
        DamagedObject, OSError, P2PDistError: Damaged where the disk is at fault."""
        if self.content in objects:
            self.close()
            return True
        decoder, left = Decoder(), []
        with _Sources(objects) as sources:
            for part in self.pending:
                if available(part):
                    self._write(part, objects, packs, sources, decoder)
                else:
                    left.append(part)
        self.pending = left
        if left:
            return False
        temporary = self._open(objects)
        temporary.flush()
        self._hash_rest(temporary)
        if self._hasher.digest() != self.content:
            damaged = self._is_damaged(temporary)
            self.close()
            if damaged:
                raise Damaged(f"the content {self.content.hex()} changed on the disk", remedy="Pull again")
            raise Corrupt(
                f"the chunks of the content {self.content.hex()} do not make it up",
                remedy="Pack and push the package again",
            )
        objects.name(temporary, self.content, self.size, self.chunks)
        return True

    def close(self) -> None:
        """Give up. Idempotent."""
        if self._temporary is not None:
            self._temporary.close()
            self._temporary = None

    def _open(self, objects: Objects) -> TemporaryFile:
        if self._temporary is None:
            self._temporary = objects.begin()
            os.ftruncate(self._temporary.fd, self.size)
        return self._temporary

    def _write(
        self, part: Part, objects: Objects, packs: Callable[[Digest], PackHere], sources: _Sources, decoder: Decoder
    ) -> None:
        temporary = self._open(objects)
        data: bytes | memoryview
        if part.pack is None:
            data = old = sources.read(part)
            if content_hash(old) != part.chunk:
                raise DamagedObject(part.source)
            self._write_old(temporary, part, sources.fd(part.source), old)
        else:
            pack = packs(part.pack)
            try:
                stored = memoryview(pack.read_range(part.at, part.stored))
                data = decoder.decode(part.pack, part.chunk, stored, part.length)
                if content_hash(data) != part.chunk:
                    raise wrong_chunk(part.pack, part.chunk)
            except P2PDistError as error:
                raise blame_pack(pack, part.at, part.stored, error) from error
            if has_hole(part.offset, data):
                _write_around_holes(temporary.fd, part.offset, data)
            else:
                objects.write_chunk(temporary, part.offset, stored, data)
        if part.offset == self._hashed:
            self._hasher.update(data)
            self._hashed += part.length

    @staticmethod
    def _write_old(temporary: TemporaryFile, part: Part, source: int, data: bytes) -> None:
        """Write a chunk of an older object; where both have it at the same place in a block, the
        filesystem may share the blocks."""
        first = -part.offset % HOLE_BYTES
        last = part.length - (part.offset + part.length) % HOLE_BYTES
        if (part.at - part.offset) % HOLE_BYTES or last - first < HOLE_BYTES or has_hole(part.offset, data):
            _write_around_holes(temporary.fd, part.offset, data)
            return
        pwrite_all(temporary.fd, data[:first], part.offset)
        while first < last:
            moved = os.copy_file_range(source, temporary.fd, last - first, part.at + first, part.offset + first)
            if moved == 0:
                raise DamagedObject(part.source)
            first += moved
        pwrite_all(temporary.fd, data[last:], part.offset + last)

    def _is_damaged(self, temporary: TemporaryFile) -> bool:
        """Whether the temporary file holds another chunk than was written into it."""
        offset = 0
        for chunk, length in ChunkList.decode(self.chunks).chunks:
            if content_hash(os.pread(temporary.fd, length, offset)) != chunk:
                return True
            offset += length
        return False

    def _hash_rest(self, temporary: TemporaryFile) -> None:
        buffer = memoryview(bytearray(min(_STEP, self.size)))
        while self._hashed < self.size and (count := os.preadv(temporary.fd, [buffer], self._hashed)):
            self._hasher.update(buffer[:count])
            self._hashed += count


class _Sources:
    """The older objects from which an assembly reads, open."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._open: dict[bytes, int] = {}

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def fd(self, content: bytes) -> int:
        if content not in self._open:
            if content not in self._objects:
                raise DamagedObject(content)
            if len(self._open) >= SOURCES_MAX:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                self._open[content] = os.open(self._objects.path(content), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise DamagedObject(content) from error
        return self._open[content]

    def read(self, part: Part) -> bytes:
        try:
            return os.pread(self.fd(part.source), part.length, part.at)
        except OSError as error:  # such as EIO
            raise DamagedObject(part.source) from error


SOURCES_MAX = 64


def _write_around_holes(fd: int, offset: int, data: bytes | memoryview) -> None:
    """Write what is not zero, block by block of the file; the file has holes there."""
    view = memoryview(data)
    for begin, end in data_ranges(offset, view):
        pwrite_all(fd, view[begin:end], offset + begin)
