"""EROFS images that hold a tree's metadata and no file content.

A regular file of the image has size, mode and time, and two extended attributes by which an overlay finds its bytes in a data-only lower
layer (Linux kernel, Documentation/filesystems/overlayfs.rst): trusted.overlay.metacopy, and trusted.overlay.redirect with the path of
the object. The format is that of fs/erofs/erofs_fs.h and Documentation/filesystems/erofs.rst in the kernel.

The image, in blocks of 4096 bytes: the superblock at 1024 and the root behind it, whose number must fit into 16 bits; then everything
that is no directory, in walking order; then the directories. An inode lies at a multiple of 32, which is 32 times its number (nid). A
short symbolic link and the last block of a directory lie behind their inode, within one block; other data lies in whole blocks in front
of the inode. So an entry's number is known as soon as it is met, and directories, which name numbers, come once all are known.

Equal trees give equal bytes. Owners are 0. Whiteouts below an opaque directory hide nothing and are left out.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from binascii import hexlify
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from p2pdist.model.errors import Corrupt
from p2pdist.model.tree import Directory, Entry, File, HardLink, Symlink, Whiteout, Xattrs
from p2pdist.mount import kernel

BLOCK_SIZE = 4096
_SUPERBLOCK = struct.Struct("<IIIBBHQqIIII16s16sIHHHBBIQ24x")
_SUPERBLOCK_AT = 1024
_MAGIC = 0xE0F5E1E2
_COMPAT_MTIME = 2
_INCOMPAT_CHUNKED_FILE = 4

_INODE = struct.Struct("<HHHHQIIIIqII16x")
_PLAIN, _INLINE, _CHUNKED = 1, 1 | 2 << 1, 1 | 4 << 1
"""i_format of an extended inode: its data is in blocks, in blocks but for the last one, which is behind the inode, or in chunks."""

_SLOT = 32
_ROOT_AT = _SUPERBLOCK_AT + _SUPERBLOCK.size
_REST_AT = _ROOT_AT + 128
"""Behind the root and the one attribute that it may have."""

_DIRENT_SIZE = 12
_TYPE_FILE, _TYPE_DIRECTORY, _TYPE_DEVICE, _TYPE_SYMLINK = (number << 16 for number in (1, 2, 3, 7))
"""The type of a directory entry, where it stands in the 32 bits that begin with the offset of the name."""

_USER, _TRUSTED = 1, 4
_CHUNK_BITS = 31
_CHUNK_SIZE = BLOCK_SIZE << _CHUNK_BITS
"""Chunks are as long as they can be, 8 TiB, so nearly every file has one."""

_HOLE = b"\xff\xff\xff\xff"
_SECOND_NS = 10**9
_PARTS_MAX = 1 << 16
_DAMAGED = {errno.EIO, errno.EUCLEAN}
"""What mount(2) answers when the image, not the caller or the kernel, is at fault."""


def _xattr(index: int, name: bytes, value: bytes) -> bytes:
    entry = struct.pack("<BBH", len(name), index, len(value)) + name + value
    return entry + bytes(-len(entry) % 4)


def _xattr_body(attributes: Xattrs, *more: bytes) -> bytes:
    """The extended attributes behind an inode: nothing, or a header without a filter and without shared ones, and the entries."""
    entries = b"".join((*more, *(_xattr(_USER, name[5:], value) for name, value in attributes)))
    return bytes(12) + entries if entries else b""


_METACOPY = _xattr(_TRUSTED, b"overlay.metacopy", b"")
_OPAQUE = _xattr(_TRUSTED, b"overlay.opaque", b"y")
_HOLDS_WHITEOUTS = _xattr(_TRUSTED, b"overlay.origin", b"")
"""Of a directory with whiteouts: where no other layer has the directory, an overlay would list them if it had not this attribute, which
says that the directory was copied from a lower layer (fs/overlayfs/inode.c, ovl_get_inode)."""


def object_name(content: bytes) -> bytes:
    """Where a content lies below the directory of objects: two hexadecimal digits, a slash, the other 62."""
    return hexlify(content, b"/", 31)


def _redirect(content: bytes) -> bytes:
    return _xattr(_TRUSTED, b"overlay.redirect", b"/" + object_name(content))


_COMMON_FILE = struct.Struct(_INODE.format + "53s65s10s")
_BODY = _xattr_body((), _METACOPY, _redirect(bytes(32)))
_BODY_BEGIN, _BODY_END = _BODY[:53], _BODY[118:] + _HOLE + bytes(4)
_BODY_COUNT = (len(_BODY) - 8) // 4
"""A file with content and without attributes of its own, by far the most frequent inode, is made in one go: 192 bytes, of which the
65 that name the object differ."""


class _Directory:
    """What is known of a directory until it is written: the names in it, in order, their numbers and types; its place in its parent."""

    # fmt: off
    __slots__ = (
        "block", "ends", "entry", "index", "inline", "names", "nid", "nids",
        "opaque", "parent", "places", "subdirectories", "types", "used", "whiteouts",
    )
    # fmt: on

    opaque: bool

    def __init__(self, entry: Directory, parent: _Directory | None = None) -> None:
        self.entry = entry
        self.parent = parent or self
        self.index = len(parent.names) if parent else 0
        self.opaque = entry.opaque or (
            parent is not None and parent.opaque
        )  # here or above: nothing below shines through
        self.whiteouts = False
        self.subdirectories = 0
        self.names: list[bytes] = []
        self.nids: list[int] = []
        self.types: list[int] = []
        self.nid = 0
        self.places: list[int] = []
        self.ends: list[int] = []
        self.used = 0
        self.block = 0
        self.inline = False

    def measure(self) -> None:
        """Deal the names, `.` and `..` among them, into blocks. From then on `ends` says how many names there are up to the end of each
        block, `used` how many bytes are in the last one."""
        names = self.names
        for name in (b".", b".."):
            self.places.append(bisect_left(names, name))
            names.insert(self.places[-1], name)
        sizes = list(accumulate(map(len, names), lambda total, size: total + size + _DIRENT_SIZE, initial=0))
        begin = end = 0
        while end < len(names):
            begin, end = end, bisect_right(sizes, sizes[end] + BLOCK_SIZE) - 1
            self.ends.append(end)
        self.used = sizes[end] - sizes[begin]

    def blocks(self) -> list[bytes]:
        """Its data, when the numbers of all that is in it are known. The last block is not filled up."""
        for place, nid in zip(self.places, (self.nid, self.parent.nid), strict=True):
            self.nids.insert(place, nid)
            self.types.insert(place, _TYPE_DIRECTORY)
        found = []
        begin = 0
        for end in self.ends:
            names, count = self.names[begin:end], end - begin
            offsets = accumulate(map(len, names), initial=_DIRENT_SIZE * count)
            heads = map(int.__or__, offsets, self.types[begin:end])
            numbers = chain.from_iterable(zip(self.nids[begin:end], heads, strict=False))
            found.append(struct.pack("<" + "QI" * count, *numbers) + b"".join(names))
            begin = end
        return found

    def place(self, at: int) -> int:
        """Say where it goes when the image is filled up to `at`: number, first block and whether the last block is behind the inode.
        Returns where it ends."""
        size = _INODE.size + len(self.body())
        self.inline = size + self.used <= BLOCK_SIZE
        if blocks := len(self.ends) - self.inline:
            at = _round_up(at, BLOCK_SIZE)
            self.block = at // BLOCK_SIZE
            at += blocks * BLOCK_SIZE
        if self.inline:
            size += self.used
            if at % BLOCK_SIZE + size > BLOCK_SIZE:
                at = _round_up(at, BLOCK_SIZE)
        self.nid = self.parent.nids[self.index] = at // _SLOT
        return _round_up(at + size, _SLOT)

    def body(self) -> bytes:
        """The extended attributes behind its inode."""
        mark = _OPAQUE if self.entry.opaque else _HOLDS_WHITEOUTS if self.whiteouts else b""
        return _xattr_body(self.entry.xattrs, mark)


class _Writer:
    """An image while it is written. `at` is where in the image the next byte goes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = blake3()
        self._parts: list[bytes] = []
        self._at = _REST_AT
        self._inodes = 1
        self._root = _Directory(Directory(b"", 0o755, 0))
        self._directories = {b"": self._root}
        self._links: Counter[bytes] = Counter()
        self._nids: dict[bytes, int] = {}
        file.seek(_REST_AT)

    def write(self, entries: Sequence[Entry]) -> None:
        """All entries of a tree, in walking order, and then the superblock."""
        self._links.update(entry.target for entry in entries if type(entry) is HardLink)
        links, pack, put = self._links, _COMMON_FILE.pack, self._parts.append
        place, here = b"", self._root
        names, nids, types = here.names, here.nids, here.types
        for entry in entries:
            parent, _, name = entry.path.rpartition(b"/")
            if parent != place:
                place, here = parent, self._directories[parent]
                names, nids, types = here.names, here.nids, here.types
            if type(entry) is File and 0 < entry.size <= _CHUNK_SIZE and not entry.xattrs and entry.path not in links:
                self._inodes += 1
                seconds, rest = divmod(entry.mtime_ns, _SECOND_NS)
                # fmt: off
                put(pack(
                    _CHUNKED, _BODY_COUNT, stat.S_IFREG | entry.mode, 0, entry.size, _CHUNK_BITS, self._inodes, 0, 0, seconds, rest, 1,
                    _BODY_BEGIN, hexlify(entry.content, b"/", 31), _BODY_END,
                ))
                # fmt: on
                nid, kind = self._at // _SLOT, _TYPE_FILE
                self._at += _COMMON_FILE.size
            elif (found := self._put_entry(entry, here)) is not None:
                nid, kind = found
            else:
                continue
            names.append(name)
            nids.append(nid)
            types.append(kind)
        self._put_directories()
        self._finish()

    def _put_entry(self, entry: Entry, here: _Directory) -> tuple[int, int] | None:
        """Number and type of an entry; a directory's number comes later. None for a whiteout that hides nothing."""
        if len(self._parts) > _PARTS_MAX:
            self._flush()
        match entry:
            case Directory():
                here.subdirectories += 1
                self._directories[entry.path] = _Directory(entry, here)
                return 0, _TYPE_DIRECTORY
            case File():
                nid = self._nids[entry.path] = self._put_file(entry)
                return nid, _TYPE_FILE
            case HardLink():
                return self._nids[entry.target], _TYPE_FILE
            case Symlink():
                return self._put_symlink(entry), _TYPE_SYMLINK
            case Whiteout():
                if here.opaque:
                    return None
                here.whiteouts = True
                return self._put(self._inode(_PLAIN, stat.S_IFCHR)), _TYPE_DEVICE

    def _put_file(self, entry: File) -> int:
        more = (_METACOPY, _redirect(entry.content)) if entry.size else ()
        body = _xattr_body(entry.xattrs, *more)
        links = 1 + self._links[entry.path]
        layout, data = (_CHUNKED, _CHUNK_BITS) if entry.size else (_PLAIN, 0)
        inode = self._inode(layout, stat.S_IFREG | entry.mode, entry.mtime_ns, entry.size, data, links, body)
        return self._put(inode + _HOLE * -(-entry.size // _CHUNK_SIZE))

    def _put_symlink(self, entry: Symlink) -> int:
        target = entry.target
        layout, block = _INLINE, 0
        if _INODE.size + len(target) > BLOCK_SIZE:
            layout, block, target = _PLAIN, self._put_blocks([target]), b""
        inode = self._inode(layout, stat.S_IFLNK | 0o777, entry.mtime_ns, len(entry.target), block)
        if self._at % BLOCK_SIZE + len(inode) + len(target) > BLOCK_SIZE:
            self._pad(_round_up(self._at, BLOCK_SIZE))
        return self._put(inode + target)

    def _put_directories(self) -> None:
        """Where a directory lies follows from the names in it; what it says, from where all of them lie."""
        root, *others = self._directories.values()
        root.measure()
        root.nid = _ROOT_AT // _SLOT
        at = self._at
        for directory in others:
            directory.measure()
            at = directory.place(at)
        root.block = _round_up(at, BLOCK_SIZE) // BLOCK_SIZE
        for directory in others:
            blocks = directory.blocks()
            tail = blocks.pop() if directory.inline else b""
            self._put_blocks(blocks)
            self._pad(directory.nid * _SLOT)
            self._put(self._directory_inode(directory) + tail)
            if len(self._parts) > _PARTS_MAX:
                self._flush()
        self._put_blocks(root.blocks())

    def _directory_inode(self, directory: _Directory) -> bytes:
        entry = directory.entry
        layout = _INLINE if directory.inline else _PLAIN
        size = (len(directory.ends) - 1) * BLOCK_SIZE + directory.used
        mode, links = stat.S_IFDIR | entry.mode, 2 + directory.subdirectories
        return self._inode(layout, mode, entry.mtime_ns, size, directory.block, links, directory.body())

    def _inode(
        self, layout: int, mode: int, mtime_ns: int = 0, size: int = 0, data: int = 0, links: int = 1, body: bytes = b""
    ) -> bytes:
        self._inodes += 1
        seconds, rest = divmod(mtime_ns, _SECOND_NS)
        count = (len(body) - 8) // 4 if body else 0
        return _INODE.pack(layout, count, mode, 0, size, data, self._inodes, 0, 0, seconds, rest, links) + body

    def _put(self, data: bytes) -> int:
        """Put an inode, with what is behind it, and return its number."""
        nid = self._at // _SLOT
        self._parts += (data, bytes(-len(data) % _SLOT))
        self._at = _round_up(self._at + len(data), _SLOT)
        return nid

    def _put_blocks(self, blocks: Sequence[bytes]) -> int:
        """Put blocks, filled up with zeros, and return the number of the first; no blocks leave everything as it is."""
        if not blocks:
            return 0
        self._pad(_round_up(self._at, BLOCK_SIZE))
        number = self._at // BLOCK_SIZE
        for block in blocks:
            self._parts.append(block.ljust(BLOCK_SIZE, b"\0"))
            self._at += BLOCK_SIZE
        return number

    def _pad(self, end: int) -> None:
        self._parts.append(bytes(end - self._at))
        self._at = end

    def _flush(self) -> None:
        data = b"".join(self._parts)
        self._parts.clear()
        self._hash.update(data)
        self._file.write(data)

    def _finish(self) -> None:
        """Fill the last block up, and write superblock and root."""
        self._pad(_round_up(self._at, BLOCK_SIZE))
        self._flush()
        root = self._directory_inode(self._root)
        # fmt: off
        superblock = _SUPERBLOCK.pack(
            _MAGIC, 0, _COMPAT_MTIME, BLOCK_SIZE.bit_length() - 1, 0, self._root.nid, self._inodes, 0, 0, self._at // BLOCK_SIZE, 0, 0,
            self._hash.digest(16), b"", _INCOMPAT_CHUNKED_FILE, 0, 0, 0, 0, 0, 0, 0,
        )
        # fmt: on
        self._file.seek(0)
        self._file.write((bytes(_SUPERBLOCK_AT) + superblock + root).ljust(_REST_AT, b"\0"))


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def write_image(entries: Sequence[Entry], path: Path) -> None:
    """Write the image of a tree, whose entries `check_entries` has let pass, at `path`, which appears once it is whole and on the disk.
    What a killed process left at the partial name beside it is replaced; two may not write the same image at a time. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            _Writer(file).write(entries)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def is_image(path: Path) -> bool:
    """Whether a whole image lies there: its superblock is one of ours, and the file as long as it says. Raises OSError unless it is
    only missing."""
    try:
        with path.open("rb") as file:
            head = file.read(_ROOT_AT)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    if len(head) < _ROOT_AT:
        return False
    magic, _, _, bits, _, _, _, _, _, blocks, *_ = _SUPERBLOCK.unpack_from(head, _SUPERBLOCK_AT)
    return (magic, 1 << bits, blocks * BLOCK_SIZE) == (_MAGIC, BLOCK_SIZE, size)


def mount_image(image: Path, target: Path) -> None:
    """Mount an image read-only, nosuid and nodev, at the empty directory `target`, straight from its file. Raises Corrupt when the image
    is damaged, or OSError where that is not possible here (ENOTBLK: before Linux 6.12, or the file is on a tmpfs)."""
    try:
        kernel.mount(image, target, "erofs", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    except OSError as error:
        if error.errno == errno.ENOTBLK:
            reason = "this kernel mounts no EROFS image from a file there"
            raise OSError(error.errno, reason, os.fspath(image)) from error
        if error.errno in _DAMAGED:
            reason = f"the image {image} of a tree is damaged: {error.strerror}"
            raise Corrupt(reason, remedy="Remove the file; it is made again from the tree") from error
        raise
