"""The image of the next version of a tree, made from that of the last one.

What an edit changes of a tree is, nearly always, size, mode, time and content of a few files. Then
everything in the new image lies where it lies in the old one (writer.py: places follow from names,
kinds and lengths alone), so the old image is copied, by reflink where the file system can, and the
inodes of these files are written over. They are found as the kernel finds them, by searching the
directories.

The result is byte for byte what `write_image` makes. For that the old image must be whole: all of
it is read once, for the hash that is its identity and for that of the new one. An old image that is
not what it should be is not used.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from p2pdist.model.tree import Directory, Entries, Entry, File, Symlink
from p2pdist.mount import kernel
from p2pdist.mount.erofs.format import (
    BLOCK_SIZE,
    CHUNKED,
    DIRENT_SIZE,
    HOLDS_WHITEOUTS,
    INLINE,
    INODE,
    OPAQUE,
    PART_SIZE,
    PLAIN,
    REST_AT,
    ROOT_AT,
    SLOT,
    SUPERBLOCK,
    SUPERBLOCK_AT,
    XATTR_HEADER_SIZE,
    Superblock,
    file_chunks,
    file_inode,
    identity,
    inode,
    object_path,
    xattr_body,
    xattr_count,
)
from p2pdist.mount.erofs.writer import partial_file, write_image

CHANGED_DIVISOR = 32
"""When more than one entry in so many has changed, writing the whole image is faster than searching
for them."""

_COMPARED = 512
"""Entries that are compared at a time."""

_DIRENT = struct.Struct("<QHBx")
assert _DIRENT.size == DIRENT_SIZE


class _Unusable(Exception):
    """The old image is not what it should be, or the new one cannot be made from it."""


def draw(image: Path, entries: Sequence[Entry], previous: tuple[Path, Sequence[Entry]] | None = None) -> None:
    """Write the image of a tree at `image`, as `write_image` does; from the image of a tree that
    hardly differs if `previous`, that image and the entries of its tree, lets it. Raises
    OSError."""
    if previous is not None:
        changed = changed_entries(previous[1], entries, most=len(entries) // CHANGED_DIVISOR)
        if changed is not None and patch_image(previous[0], image, changed):
            return
    write_image(entries, image)


def changed_entries(old: Sequence[Entry], new: Sequence[Entry], *, most: int) -> list[Entry] | None:
    """Those of `new` that differ from the ones at their places in `old`; None when they are more
    than `most`, or when the trees differ in paths, kinds, hard links or whiteouts."""
    if len(old) != len(new):
        return None
    found: list[Entry] = []
    for before, after in _side_by_side(old, new):
        if before == after:  # fast for entries that both trees share
            continue
        for one, other in zip(before, after, strict=True):
            if one == other:
                continue
            if (
                one.path != other.path
                or type(one) is not type(other)
                or not isinstance(other, File | Directory | Symlink)
            ):
                return None
            found.append(other)
        if len(found) > most:
            return None
    return found


def _side_by_side(old: Sequence[Entry], new: Sequence[Entry]) -> Iterable[tuple[Sequence[Entry], Sequence[Entry]]]:
    """Runs of entries at the same places of both, but for pages that both share."""
    if isinstance(old, Entries) and isinstance(new, Entries) and [*map(len, old.pages)] == [*map(len, new.pages)]:
        return ((one, other) for one, other in zip(old.pages, new.pages, strict=True) if one is not other)
    before, after = list(old), list(new)
    steps = range(0, len(before), _COMPARED)
    return ((before[begin : begin + _COMPARED], after[begin : begin + _COMPARED]) for begin in steps)


def is_intact(image: Path) -> bool:
    """Whether an image is, byte for byte, what was written."""
    try:
        with _Image(image) as found:
            return found.matches()
    except _Unusable:
        return False


def patch_image(old: Path, new: Path, changed: Iterable[Entry]) -> bool:
    """Write the image of a tree at `new`, which appears once it is whole. `old` is the image of a
    tree with the same paths, kinds and hard links; `changed` are the entries of the new tree that
    differ from those of the old one.

    Returns False, and leaves nothing behind, when something has another length (what a file's being
    empty, attributes, and the target of a symbolic link make), when a directory became opaque or
    ceased to be so, and when the old image is missing, damaged or of another tree. Raises OSError
    when the new one cannot be written.
    """
    try:
        with _Image(old) as image:
            edits = [edit for entry in changed for edit in image.edits(entry)]
            with partial_file(new) as file:
                image.copy(file, edits)
    except _Unusable:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Listing:
    """The data of a directory: so many whole blocks from `begin` on, and the last one, of `size`
    bytes, at `tail`."""

    begin: int
    blocks: int
    tail: int
    size: int

    def find(self, take: Callable[[int, int], bytes], name: bytes) -> int:
        """Where the inode is that has this name. `take` reads so many bytes at an offset. Names are
        sorted, within a block and from block to block."""
        low, high = 0, self.blocks
        while low < high:
            middle = (low + high + 1) // 2
            if _Names(self._block(take, middle)).name(0) <= name:
                low = middle
            else:
                high = middle - 1
        names = _Names(self._block(take, low))
        found = bisect_left(range(names.count), name, key=names.name)
        if found == names.count or names.name(found) != name:
            raise _Unusable
        return names.number(found) * SLOT

    def _block(self, take: Callable[[int, int], bytes], number: int) -> bytes:
        if number == self.blocks:
            return take(self.tail, self.size)
        return take(self.begin + number * BLOCK_SIZE, BLOCK_SIZE)


class _Names:
    """The names in one block of a directory: entries, each with the offset of its name, then the
    names."""

    def __init__(self, block: bytes) -> None:
        begin = _DIRENT.unpack_from(block)[1] if len(block) >= DIRENT_SIZE else 0
        if not begin or begin % DIRENT_SIZE or begin > len(block):
            raise _Unusable
        self._block = block
        self.count = begin // DIRENT_SIZE

    def name(self, index: int) -> bytes:
        """The last one ends with the block, or at a zero."""
        begin = _DIRENT.unpack_from(self._block, index * DIRENT_SIZE)[1]
        if index + 1 == self.count:
            return self._block[begin:].partition(b"\0")[0]
        return self._block[begin : _DIRENT.unpack_from(self._block, (index + 1) * DIRENT_SIZE)[1]]

    def number(self, index: int) -> int:
        """The number of the inode."""
        number: int = _DIRENT.unpack_from(self._block, index * DIRENT_SIZE)[0]
        return number


class _Image:
    """An image that is open for reading. Nothing that it says is believed before it is compared
    with the image's bounds."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise _Unusable from error
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self._check_head()
            self._directories = {b"": self._directory(ROOT_AT)}
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> _Image:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _check_head(self) -> None:
        """The superblock has the identity, and cannot be part of it; it is compared with what it
        would be made to be."""
        found = self._take(0, REST_AT)
        fields = SUPERBLOCK.unpack_from(found, SUPERBLOCK_AT)
        self._blocks, self._identity = fields[9], fields[12]
        _, count, _, _, size, block, self._inodes, _, _, _, _, links = INODE.unpack_from(found, ROOT_AT)
        body = xattr_body((), HOLDS_WHITEOUTS if count else b"")
        self._root = inode(PLAIN, stat.S_IFDIR | 0o755, self._inodes, 0, size, block, links, body)
        head = bytes(SUPERBLOCK_AT) + Superblock(self._inodes, self._blocks, self._identity).encode() + self._root
        end = (block + -(-size // BLOCK_SIZE)) * BLOCK_SIZE
        if found != head.ljust(REST_AT, b"\0") or not end == self._blocks * BLOCK_SIZE == self._size:
            raise _Unusable

    def matches(self) -> bool:
        """Whether the image has its identity."""
        parts = bytearray()
        for at in range(0, self._size, PART_SIZE):
            part = self._take(at, min(PART_SIZE, self._size - at))
            parts += blake3(memoryview(part)[max(0, REST_AT - at) :]).digest()
        return bool(identity(bytes(parts), self._root) == self._identity)

    def edits(self, entry: Entry) -> list[tuple[int, bytes]]:
        """What to write where for a changed entry."""
        at = self._find(entry.path)
        layout, count, mode, _, size, data, number, _, _, _, _, links = INODE.unpack(self._take(at, INODE.size))
        kind = stat.S_IFMT(mode)
        match entry:
            case File() if kind == stat.S_IFREG and layout == (CHUNKED if entry.size else PLAIN):
                made = file_inode(entry, number, links, object_path(entry.content))
                if (count, file_chunks(size)) == (INODE.unpack_from(made)[1], file_chunks(entry.size)):
                    return [(at, made)]
            case Directory() if kind == stat.S_IFDIR:
                body = xattr_body(entry.xattrs, self._mark(at, count, opaque=entry.opaque))
                made = inode(layout, kind | entry.mode, number, entry.mtime_ns, size, data, links, body)
                if count == xattr_count(body):
                    return [(at, made)]
            case Symlink() if kind == stat.S_IFLNK and size == len(entry.target):
                made = inode(layout, mode, number, entry.mtime_ns, size, data, links)
                inline = layout == INLINE
                return [(at, made), (at + INODE.size if inline else data * BLOCK_SIZE, entry.target)]
        raise _Unusable

    def _mark(self, at: int, count: int, *, opaque: bool) -> bytes:
        """The attribute that a directory has for the overlay's sake."""
        first = self._take(at + INODE.size + XATTR_HEADER_SIZE, len(OPAQUE)) if count else b""
        if (first == OPAQUE) != opaque:
            raise _Unusable
        return first if first in (OPAQUE, HOLDS_WHITEOUTS) else b""

    def copy(self, file: BinaryIO, edits: Iterable[tuple[int, bytes]]) -> None:
        """Write the image with the edits into an empty file. Raises _Unusable unless the image
        matches its identity."""
        parts = _by_part(edits, self._size)
        shared = _clone(self._file, file)
        buffer = memoryview(bytearray(PART_SIZE))
        old, new = bytearray(), bytearray()
        self._file.seek(0)
        for at in range(0, self._size, PART_SIZE):
            part = buffer[: min(PART_SIZE, self._size - at)]
            hashed = part[max(0, REST_AT - at) :]
            self._fill(part)
            here = parts.get(at, ())
            found = blake3(hashed).digest()
            old += found
            for begin, data in here:
                part[begin : begin + len(data)] = data
            new += blake3(hashed).digest() if here else found
            if here or not shared:
                file.seek(at)
                file.write(part)
        if identity(bytes(old), self._root) != self._identity:
            raise _Unusable
        file.seek(SUPERBLOCK_AT)
        file.write(Superblock(self._inodes, self._blocks, identity(bytes(new), self._root)).encode())

    def _fill(self, part: memoryview) -> None:
        done = 0
        while done < len(part):
            try:
                count = self._file.readinto(part[done:])
            except OSError as error:
                raise _Unusable from error
            if not count:
                raise _Unusable
            done += count

    # -- finding an inode

    def _find(self, path: bytes) -> int:
        """Where the inode of a path is."""
        known = self._directories
        parent, _, name = path.rpartition(b"/")
        unknown = []
        while parent not in known:
            unknown.append(parent)
            parent = parent.rpartition(b"/")[0]
        for directory in reversed(unknown):
            above, _, last = directory.rpartition(b"/")
            known[directory] = self._directory(known[above].find(self._take, last))
            parent = directory
        return known[parent].find(self._take, name)

    def _directory(self, at: int) -> _Listing:
        layout, count, mode, _, size, block, _, _, _, _, _, _ = INODE.unpack(self._take(at, INODE.size))
        if stat.S_IFMT(mode) != stat.S_IFDIR or layout not in (PLAIN, INLINE) or not 0 < size <= self._size:
            raise _Unusable
        behind = at + INODE.size + (XATTR_HEADER_SIZE + 4 * (count - 1) if count else 0)
        blocks, last = divmod(size - 1, BLOCK_SIZE)
        begin = block * BLOCK_SIZE
        return _Listing(begin, blocks, behind if layout == INLINE else begin + blocks * BLOCK_SIZE, last + 1)

    def _take(self, at: int, size: int) -> bytes:
        if not 0 <= at <= at + size <= self._size:
            raise _Unusable
        try:
            data = os.pread(self._file.fileno(), size, at)
        except OSError as error:
            raise _Unusable from error
        if len(data) != size:
            raise _Unusable
        return data


def _by_part(edits: Iterable[tuple[int, bytes]], size: int) -> dict[int, list[tuple[int, bytes]]]:
    """Edits by the offset of the part of the image that they are in, with offsets within it. Raises
    _Unusable for one that is beyond the image's end."""
    parts: dict[int, list[tuple[int, bytes]]] = {}
    for offset, data in edits:
        if offset + len(data) > size:
            raise _Unusable
        at, rest = offset, data
        while rest:
            begin = at % PART_SIZE
            piece = rest[: PART_SIZE - begin]
            parts.setdefault(at - begin, []).append((begin, piece))
            at, rest = at + len(piece), rest[len(piece) :]
    return parts


def _clone(source: BinaryIO, file: BinaryIO) -> bool:
    """Let a file share the blocks of another one (ioctl_ficlone(2)); False where the file system
    cannot."""
    try:
        fcntl.ioctl(file.fileno(), kernel.FICLONE, source.fileno())
    except OSError:
        return False
    return True
