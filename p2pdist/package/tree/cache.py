"""The files cache: what one packing of a directory leaves for the next, so that unchanged files are
neither read nor scanned again and an unchanged directory costs one scan.

A cache is a hint that may be deleted at any time. For each source, layout and set of options there
are two files in `.pack` of the layout: a volume, which never changes, and a file that each packing
replaces and that holds what is newer than the volume. The newest STATES_MAX of both are kept. The
file consists of the magic, lengths and hashes (`_SIZES`), the head, the index, and the newer
blocks; an unchanged source needs the head alone. Blocks are read on demand, and nothing is used
that does not match its hash. Packings may run at the same time: a packing that saves holds an
exclusive flock on `.pack`, one that opens a file and its volume a shared one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from blake3 import blake3

from p2pdist.model.errors import DiskFull, P2PDistError, remedy_of
from p2pdist.model.manifest import Descriptor
from p2pdist.model.tree import Entry

STATES_MAX = 32
NEWER_BYTES_MIN = 1 << 20
NEWER_DIVISOR = 8
"""What is newer than the volume is written at each packing; a new volume is made of all when that
is more than a part of it."""

_FORMAT = b"p2pdist-pack-state-"
_MAGIC = _FORMAT + b"3\n"
_SIZES = struct.Struct("<QQQ32s32s")
_KEY_LENGTH = 32


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """A packed tree as the manifest names it."""

    root: Descriptor
    parts: tuple[Descriptor, ...]
    """Its catalogs and packs, without the ones of the base."""
    lists: tuple[Descriptor, ...]
    """The piece lists of root and parts."""
    files: int
    bytes_total: int
    dropped: tuple[tuple[bytes, str], ...]
    """Path and kind of the first things that the tree does not carry."""
    dropped_total: int


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What decides whether a source is unchanged, and the tree that it became."""

    fingerprint: bytes
    """Of the scan; empty when an entry was too new to rule out a later change with equal times."""
    base: str
    outcome: Outcome


class Stamp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Fields of stat(2) of a file when it was read; an equal stamp means an equal content. The size
    is in the entry."""

    inode: int
    device: int
    mtime_ns: int
    ctime_ns: int


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes in the volume, or behind its end in the newer blocks of the file, and their BLAKE3."""

    offset: int
    length: int
    hash: bytes


class CachedDirectory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A directory. Positions count its own entries."""

    path: bytes
    fingerprint: bytes
    """BLAKE3 of its rows in the scan; empty when the next packing must scan it in any case."""
    body: Block
    """An encoded Body."""
    chunks: Block
    """The BLAKE3 of every chunk of its files, concatenated."""
    count: int
    """Entries."""
    files: int
    """Regular files among them."""
    bytes_total: int
    """Bytes in these files."""
    below: tuple[tuple[int, bytes], ...]
    """Position and name of each subdirectory."""
    ends: tuple[int, ...]
    """Positions behind which a page ends."""
    chunk_lists: tuple[tuple[int, bytes], ...]
    """Position of each large file, and the BLAKE3 of its chunk list."""
    dropped: tuple[tuple[bytes, str], ...]
    """Path and kind of what the tree does not carry."""


class Body(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The encoded entries of a directory, and the encoded stamps of its regular files: None where
    the next packing must read the file again."""

    entries: bytes
    stamps: bytes


class CachedCatalog(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The contents of a catalog: BLAKE3 and size of each page and chunk list, digest and size of
    each pack; sizes in bytes."""

    pages: tuple[tuple[bytes, int], ...]
    chunk_lists: tuple[tuple[bytes, int], ...]
    packs: tuple[tuple[str, int], ...]


class CachedPack(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The records of a pack's chunks, and `live`: the stored bytes of the chunks that the tree
    needs and no other pack has."""

    records: Block
    live: int


Section = tuple[tuple[int, ...], bytes]
"""The entries between two ends of pages: its runs as a flat row of directory number, first position
and position behind the last; and the BLAKE3 of its pages, concatenated."""


class Index(msgspec.Struct, array_like=True):
    """What a cache holds, and where its blocks are."""

    volume: str = ""
    """Name of the volume, a part of its file name."""
    length: int = 0
    """Bytes of the volume."""
    directories: list[CachedDirectory] = []
    """By number, in walking order."""
    sections: list[Section] = []
    catalogs: dict[str, CachedCatalog] = {}
    """The catalogs of the pack pool, by digest."""
    packs: dict[str, CachedPack] = {}
    """The packs of the pack pool, by digest."""
    shared: list[tuple[bytes, bool, dict[str, int]]] = []
    """Chunks that several packs have: BLAKE3, whether the tree needs it, stored length by pack."""
    chunk_lists: dict[bytes, Block] = {}
    """The encoded chunk lists of large files, by BLAKE3."""


encode_entries = msgspec.msgpack.Encoder().encode
decode_entries = msgspec.msgpack.Decoder(list[Entry]).decode
decode_stamps = msgspec.msgpack.Decoder(list[Stamp | None]).decode
decode_body = msgspec.msgpack.Decoder(Body).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_index = msgspec.msgpack.Decoder(Index).decode


class Damaged(Exception):
    """A files cache that is truncated or does not match its hashes."""


class FilesCache:
    """What the last packing of a directory left. Reads raise Damaged."""

    def __init__(self, index: Index | None = None, newer: bytes = b"", volume: BinaryIO | None = None) -> None:
        self.index = index or Index()
        self.newer = newer
        self._volume = volume

    def read(self, block: Block) -> bytes:
        """The bytes of a block, as they were written."""
        data = self._read(block)
        if len(data) != block.length or blake3(data).digest() != block.hash:
            raise Damaged("a part of it does not match its hash")
        return data

    def unverified(self, block: Block) -> bytes:
        """The bytes of a block that will be verified when they are used."""
        data = self._read(block)
        if len(data) != block.length:
            raise Damaged("its volume is cut short")
        return data

    def close(self) -> None:
        """Close the volume."""
        if self._volume:
            self._volume.close()

    def _read(self, block: Block) -> bytes:
        start = block.offset - self.index.length
        if start >= 0:
            return self.newer[start : start + block.length]
        if self._volume is None:
            raise Damaged("it has no volume")
        try:
            return os.pread(self._volume.fileno(), block.length, block.offset)
        except (OSError, OverflowError, ValueError) as error:
            raise Damaged(str(error)) from error


class CacheBuilder:
    """Collects the blocks of the next cache: `add` appends new ones, `keep` takes them from the
    last cache. With `anew` all of them go into a new volume."""

    def __init__(self, files_cache: FilesCache, *, anew: bool) -> None:
        self._files_cache, self.anew = files_cache, anew
        self.blocks = [] if self.anew else [files_cache.newer]
        self._end = 0 if self.anew else files_cache.index.length + len(files_cache.newer)

    def add(self, data: bytes) -> Block:
        """Append a block with these bytes."""
        return self._put(data, blake3(data).digest())

    def keep(self, block: Block) -> Block:
        """Where a block of the last cache is in the next one. Raises Damaged."""
        return self._put(self._files_cache.unverified(block), block.hash) if self.anew else block

    def _put(self, data: bytes, name: bytes) -> Block:
        block = Block(self._end, len(data), name)
        self.blocks.append(data)
        self._end += len(data)
        return block


class CacheFile:
    """The file of the cache for one source and set of options (`key`) in the layout at
    `directory`."""

    def __init__(self, directory: Path, key: tuple[object, ...]) -> None:
        self._folder = directory / ".pack"
        self.path = self._folder / blake3(repr(key).encode()).hexdigest()[:_KEY_LENGTH]

    def head(self) -> Head | None:
        """The head alone, None when there is no file. Raises Damaged."""
        with self._opened() as stream:
            return _read_head(stream)[0] if stream else None

    def load(self) -> FilesCache:
        """The cache, which the caller closes; an empty one when there is no file. Raises
        Damaged."""
        with self._locked(fcntl.LOCK_SH) as found:
            if not found:
                return FilesCache()
            with self._opened() as stream:
                if stream is None:
                    return FilesCache()
                index, newer = _read_index(stream)
                volume = self._volume(index.volume).open("rb")
                if os.fstat(volume.fileno()).st_size != index.length:
                    volume.close()
                    raise Damaged("its volume has another length than it states")
                return FilesCache(index, newer, volume)

    def builder(self, files_cache: FilesCache) -> CacheBuilder:
        """The builder of the next cache, which continues `files_cache`."""
        newer, volume = len(files_cache.newer), files_cache.index.length
        much = newer > max(NEWER_BYTES_MIN, volume // NEWER_DIVISOR)
        return CacheBuilder(files_cache, anew=much or not volume or not self._volume(files_cache.index.volume).exists())

    def save(self, head: Head, index: Index, builder: CacheBuilder) -> None:
        """Replace the file by `head`, `index` and the blocks of `builder`, and delete the oldest
        files over STATES_MAX. Another packing may have deleted the volume that `builder` continues;
        then the file of that packing stays. Raises DiskFull and P2PDistError."""
        try:
            self._folder.mkdir(exist_ok=True)
            with self._locked(fcntl.LOCK_EX):
                if builder.anew or self._volume(index.volume).exists():
                    self._save(head, index, builder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                needed = sum(map(len, builder.blocks))
                space = os.statvfs(self._folder.parent)
                raise DiskFull.on(str(self._folder), space, needed=needed, code=error.errno, kept=False) from error
            raise P2PDistError(f"cannot write {self.path}: {error.strerror}", remedy=remedy_of(error)) from error

    def _save(self, head: Head, index: Index, builder: CacheBuilder) -> None:
        newer = builder.blocks
        if builder.anew:
            index.volume, index.length, newer = secrets.token_hex(8), sum(map(len, builder.blocks)), []
            self._write(self._volume(index.volume), builder.blocks)
        first, second = encode_entries(head), encode_entries(index)
        sizes = len(first), len(second), sum(map(len, newer)), blake3(first).digest(), blake3(second).digest()
        self._write(self.path, [_MAGIC, _SIZES.pack(*sizes), first, second, *newer])
        self._forget(index.volume)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[bool]:
        """Hold a lock on the folder; whether there was a folder, since one that another packing
        makes a moment later is not locked. Where its file system has no locks, packings at the same
        time may lose one another's caches."""
        found = True
        with contextlib.ExitStack() as stack:
            try:
                handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, handle)
                fcntl.flock(handle, how)
            except FileNotFoundError:
                found = False
            except OSError:
                pass
            yield found

    def _volume(self, name: str) -> Path:
        if not name.isalnum():
            raise Damaged("it names no volume")
        return self.path.with_name(f"{self.path.name}-{name}")

    def _write(self, path: Path, parts: list[bytes]) -> None:
        unfinished = self.path.with_name(f"draft-{secrets.token_hex(8)}")
        try:
            with unfinished.open("xb") as stream:
                stream.writelines(parts)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO | None]:
        """The file behind its magic; None when there is none, or it is of another release."""
        try:
            with contextlib.ExitStack() as stack:
                try:
                    stream = stack.enter_context(self.path.open("rb"))
                except FileNotFoundError:
                    yield None
                    return
                magic = stream.read(len(_MAGIC))
                if magic != _MAGIC and not magic.startswith(_FORMAT):
                    raise Damaged("it is of another format")
                yield stream if magic == _MAGIC else None
        except (OSError, msgspec.DecodeError, ValueError) as error:
            raise Damaged(str(error)) from error

    def _forget(self, volume: str) -> None:
        """Delete the volumes of this cache but `volume`, and all files of the oldest caches."""
        newest: dict[str, int] = {}
        files: list[tuple[str, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                key = entry.name[:_KEY_LENGTH] if not entry.name.startswith("draft-") else entry.name
                with contextlib.suppress(FileNotFoundError):
                    newest[key] = max(newest.get(key, 0), entry.stat().st_mtime_ns)
                    files.append((key, entry.path))
        old = set(sorted(newest, key=lambda key: -newest[key])[STATES_MAX:])
        kept = {str(self.path), str(self._volume(volume))}
        for key, path in files:
            if key in old or (key == self.path.name and path not in kept):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def _read_head(stream: BinaryIO) -> tuple[Head, tuple[int, int, bytes]]:
    """The head, lengths of index and newer blocks, and the hash of the index."""
    sizes = stream.read(_SIZES.size)
    if len(sizes) != _SIZES.size:
        raise Damaged("it is cut short")
    length, second, newer, hash_of_head, hash_of_index = _SIZES.unpack(sizes)
    if length + second + newer != os.fstat(stream.fileno()).st_size - stream.tell():
        raise Damaged("it has another length than it states")
    data = stream.read(length)
    if blake3(data).digest() != hash_of_head:
        raise Damaged("its head does not match its hash")
    return _decode_head(data), (second, newer, hash_of_index)


def _read_index(stream: BinaryIO) -> tuple[Index, bytes]:
    _, (length, newer, hash_of_index) = _read_head(stream)
    data = stream.read(length)
    if blake3(data).digest() != hash_of_index:
        raise Damaged("its index does not match its hash")
    return _decode_index(data), stream.read(newer)
