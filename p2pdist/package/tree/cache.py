"""What a packing of a tree leaves behind for the next one of the same directory, so that what has
not changed is neither read nor looked at again, and so that a directory that has not changed at all
costs one look.

A state is a hint that may be deleted. In `.pack` of the layout there is, for each source, layout
and set of options, a file that is replaced at once, and beside it a volume that is never changed:
the file has what came since the volume was written. Of both there are those of the newest
STATES_MAX. The file is the magic, lengths and hashes (`_SIZES`), the head, the index, and the newer
blocks; the head alone is read where nothing has changed. Blocks, in the volume and behind it, are
read when they are asked for. Whatever does not match its hash is not believed. Packings may run
side by side: who saves holds an exclusive flock on `.pack`, who opens a file and its volume a
shared one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from blake3 import blake3

from p2pdist.model.errors import P2PDistError
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
    """A packed tree as the manifest names it. `parts` are the catalogs and packs of its own, those
    of the base not among them; `lists` are the piece lists of root and parts. `dropped` holds the
    first paths, and kinds, of the `dropped_total` things that were dropped."""

    root: Descriptor
    parts: tuple[Descriptor, ...]
    lists: tuple[Descriptor, ...]
    files: int
    bytes_total: int
    dropped: tuple[tuple[bytes, str], ...]
    dropped_total: int


class Head(msgspec.Struct, frozen=True, array_like=True):
    """`fingerprint` of the scan, empty when something in it was too new to be told from a later
    change; digest of the base's manifest."""

    fingerprint: bytes
    base: str
    outcome: Outcome


class Stamp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a file whose content is known looked like. Its size is in the entry."""

    inode: int
    device: int
    mtime_ns: int
    ctime_ns: int


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes of a state: where they are in the volume, or behind it in what is newer, and their
    BLAKE3."""

    offset: int
    length: int
    hash: bytes


class Remembered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A directory: BLAKE3 of its rows, empty when its entries may not be taken over as they are.
    `body` is a Body, `chunks` the BLAKE3 of every chunk of its files, one behind the other. Of its
    entries `count` and, for the regular files, `files` and `bytes_total`; by position the names of
    directories, those behind which a page ends, and the chunk lists of large files; what was
    dropped in it."""

    path: bytes
    fingerprint: bytes
    body: Block
    chunks: Block
    count: int
    files: int
    bytes_total: int
    below: tuple[tuple[int, bytes], ...]
    ends: tuple[int, ...]
    chunk_lists: tuple[tuple[int, bytes], ...]
    dropped: tuple[tuple[bytes, str], ...]


class Body(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The encoded entries of a directory, and the stamps of those of them that are files, None
    where a file has to be read again."""

    entries: bytes
    stamps: bytes


class KnownCatalog(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a catalog has: BLAKE3 and bytes of its pages and of its chunk lists, digest and bytes of
    its packs."""

    pages: tuple[tuple[bytes, int], ...]
    chunk_lists: tuple[tuple[bytes, int], ...]
    packs: tuple[tuple[str, int], ...]


class KnownRecords(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The records of a pack's chunks, and the stored bytes of those that the tree needs and no
    other pack has."""

    records: Block
    live: int


Section = tuple[tuple[int, ...], bytes]
"""What is between two ends of pages: the directories by number, each with the first position and
the one behind the last, as a flat row; and the BLAKE3 of the pages, one behind the other."""


class Index(msgspec.Struct, array_like=True):
    """The volume and its length; the directories by number, in walking order; what the pool had.
    `shared` are the chunks that several packs have: whether the tree needs it, and its stored
    length by pack. `chunk_lists` are those of large files, encoded."""

    volume: str = ""
    length: int = 0
    directories: list[Remembered] = []
    sections: list[Section] = []
    catalogs: dict[str, KnownCatalog] = {}
    packs: dict[str, KnownRecords] = {}
    shared: list[tuple[bytes, bool, dict[str, int]]] = []
    chunk_lists: dict[bytes, Block] = {}


encode_entries = msgspec.msgpack.Encoder().encode
decode_entries = msgspec.msgpack.Decoder(list[Entry]).decode
decode_stamps = msgspec.msgpack.Decoder(list[Stamp | None]).decode
decode_body = msgspec.msgpack.Decoder(Body).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_index = msgspec.msgpack.Decoder(Index).decode


class Damaged(Exception):
    """A state that is not to be believed."""


class Notes:
    """What the last packing remembered. Reading raises Damaged."""

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


class Draft:
    """What is to be remembered: blocks are added, or kept from earlier notes. With `anew` they all
    go into a new volume."""

    def __init__(self, notes: Notes, *, anew: bool) -> None:
        self._notes, self.anew = notes, anew
        self.blocks = [] if self.anew else [notes.newer]
        self._end = 0 if self.anew else notes.index.length + len(notes.newer)

    def add(self, data: bytes) -> Block:
        return self._put(data, blake3(data).digest())

    def keep(self, block: Block) -> Block:
        """Raises Damaged."""
        return self._put(self._notes.unverified(block), block.hash) if self.anew else block

    def _put(self, data: bytes, name: bytes) -> Block:
        block = Block(self._end, len(data), name)
        self.blocks.append(data)
        self._end += len(data)
        return block


class StateFile:
    """The state of packing with the options `key` into the layout at `directory`."""

    def __init__(self, directory: Path, key: tuple[object, ...]) -> None:
        self._folder = directory / ".pack"
        self.path = self._folder / blake3(repr(key).encode()).hexdigest()[:_KEY_LENGTH]

    def head(self) -> Head | None:
        """None when there is no state. Raises Damaged."""
        with self._opened() as stream:
            return _read_head(stream)[0] if stream else None

    def notes(self) -> Notes:
        """What is remembered, to be closed; empty when there is no state. Raises Damaged."""
        with self._locked(fcntl.LOCK_SH), self._opened() as stream:
            if stream is None:
                return Notes()
            index, newer = _read_index(stream)
            volume = self._volume(index.volume).open("rb")
            if os.fstat(volume.fileno()).st_size != index.length:
                volume.close()
                raise Damaged("its volume has another length than it states")
            return Notes(index, newer, volume)

    def draft(self, notes: Notes) -> Draft:
        """What is to be saved, to be begun from earlier notes."""
        newer, volume = len(notes.newer), notes.index.length
        much = newer > max(NEWER_BYTES_MIN, volume // NEWER_DIVISOR)
        return Draft(notes, anew=much or not volume or not self._volume(notes.index.volume).exists())

    def save(self, head: Head, index: Index, draft: Draft) -> None:
        """Replace the state by an index of what was added to `draft`, and delete the oldest ones
        over STATES_MAX. When another packing has done away with the volume of the draft meanwhile,
        its state stays. Raises P2PDistError."""
        try:
            self._folder.mkdir(exist_ok=True)
            with self._locked(fcntl.LOCK_EX):
                if draft.anew or self._volume(index.volume).exists():
                    self._save(head, index, draft)
        except OSError as error:
            raise P2PDistError(
                f"cannot write {self.path}: {error.strerror}", remedy="Make the layout's directory writable"
            ) from error

    def _save(self, head: Head, index: Index, draft: Draft) -> None:
        newer = draft.blocks
        if draft.anew:
            index.volume, index.length, newer = secrets.token_hex(8), sum(map(len, draft.blocks)), []
            self._write(self._volume(index.volume), draft.blocks)
        first, second = encode_entries(head), encode_entries(index)
        sizes = len(first), len(second), sum(map(len, newer)), blake3(first).digest(), blake3(second).digest()
        self._write(self.path, [_MAGIC, _SIZES.pack(*sizes), first, second, *newer])
        self._forget(index.volume)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """With a lock on the folder, where there is one and it can be locked: elsewhere notes of
        packings side by side may be lost."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, handle)
                fcntl.flock(handle, how)
            yield

    def _volume(self, name: str) -> Path:
        if not name.isalnum():
            raise Damaged("it names no volume")
        return self.path.with_name(f"{self.path.name}-{name}")

    def _write(self, path: Path, parts: list[bytes]) -> None:
        draft = self.path.with_name(f"draft-{secrets.token_hex(8)}")
        try:
            with draft.open("xb") as stream:
                stream.writelines(parts)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO | None]:
        """The file behind its magic; None when there is none, or one that another release left."""
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
        """Delete volumes of this state but the one named, and what belongs to the oldest states."""
        newest: dict[str, int] = {}
        found: list[tuple[str, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                key = entry.name[:_KEY_LENGTH] if not entry.name.startswith("draft-") else entry.name
                with contextlib.suppress(FileNotFoundError):
                    newest[key] = max(newest.get(key, 0), entry.stat().st_mtime_ns)
                    found.append((key, entry.path))
        old = set(sorted(newest, key=lambda key: -newest[key])[STATES_MAX:])
        kept = {str(self.path), str(self._volume(volume))}
        for key, path in found:
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
