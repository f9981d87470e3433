"""What EROFS images of ours are made of: superblock, inodes, extended attributes.

Source: fs/erofs/erofs_fs.h and Documentation/filesystems/erofs.rst in the Linux kernel. All numbers
are little-endian; inodes are the extended ones of 64 bytes, and lie at multiples of SLOT. writer.py
says what the image as a whole looks like.
"""

from __future__ import annotations

import stat
import struct
import sys
from array import array
from binascii import hexlify
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from blake3 import blake3

from p2pdist.model.device import CELL_BLOCKS, CELL_BYTES, Cells
from p2pdist.model.tree import File, Xattrs

BLOCK_SIZE = 4096
SUPERBLOCK = struct.Struct("<IIIBBHQqIIII16s16sIHHHBBIQ24x")
SUPERBLOCK_AT = 1024
MAGIC = 0xE0F5E1E2
_COMPAT_MTIME = 2
_INCOMPAT_CHUNKED_FILE = 4
_INCOMPAT_DEVICE_TABLE = 8
_INCOMPAT_CELLS = 1 | 2 | 32
"""Zeros before compressed data, several blocks of it at a time, and files that lie in the packed
inode."""

INODE = struct.Struct("<HHHHQIIIIqII16x")
PLAIN, COMPRESSED, INLINE, CHUNKED = 1, 1 | 1 << 1, 1 | 2 << 1, 1 | 4 << 1
"""i_format of an extended inode: its data is in blocks, compressed, in blocks but for the last one,
which is behind the inode, or in chunks."""

PART_SIZE = 1 << 20

SLOT = 32
ROOT_AT = SUPERBLOCK_AT + SUPERBLOCK.size
REST_AT = ROOT_AT + 128
"""Behind the root and the one attribute that it may have."""

DIRENT_SIZE = 12
TYPE_FILE, TYPE_DIRECTORY, TYPE_DEVICE, TYPE_SYMLINK = (number << 16 for number in (1, 2, 3, 7))
"""The type of a directory entry, where it stands in the 32 bits that begin with the offset of the
name."""

_USER, _TRUSTED = 1, 4
CHUNK_BITS = 31
CHUNK_SIZE = BLOCK_SIZE << CHUNK_BITS
"""Chunks are as long as they can be, 8 TiB, so nearly every file has one."""

HOLE = b"\xff\xff\xff\xff"

DEVICE_SLOT = struct.Struct("<64xII56x")
"""A device of the image: how many blocks it has, and the number that its first block has for inodes
which name no device."""

DEVICE_BLOCK = 1 << 24
"""The number of the first block of a device; those of the image itself are smaller."""

DEVICE_AT = REST_AT + DEVICE_SLOT.size
"""Where the slot of a device is. Before it, where the superblock says that it ends itself, is which
compression there is."""

_EXTENSION_SIZE = 16
_DEFLATE = 2
DEFLATE_SETTINGS = struct.pack("<HB5x", 6, 15)
"""What an image with DEFLATE says of it: the length of the rest, and the window's bits."""

_IN_PACKED = 1 << 63
_COMMON_ON_DEVICE = struct.Struct(f"{INODE.format}Q24x")
_SEVERAL_BLOCKS = 2
_CELLS_HEADER = struct.pack("<IHBB8x", 0, _SEVERAL_BLOCKS, _DEFLATE << 4 | _DEFLATE, 0)
"""Of an inode whose blocks are described one by one: what follows describes cells."""

_HEAD_INDEX = struct.Struct("<HHI")
_HEAD, _REST = 1, 2
_PARTLY = 1 << 15
"""Of a head: the file ends before its cell does."""
_BLOCK_COUNT = 1 << 11
_CELL_REST = b"".join(
    struct.pack("<HHHH", _REST, 0, number if number > 1 else _BLOCK_COUNT | 1 + CELL_BLOCKS, CELL_BLOCKS - number)
    for number in range(1, CELL_BLOCKS)
)
"""How the blocks of a cell behind the first one are described: which one it is, the first time how
many blocks of the device the cell has, and how many blocks are left of it."""

_CHUNK_INDEXES = 0x20
"""Of the format of a chunked inode: a chunk is said by device and block, in 8 bytes."""

_CHUNK_INDEX = struct.Struct("<HHI")
_DEVICE = 1
"""The number of the first device beside the image."""

_INDEXES_AT_ONCE = 1 << 16
_SECOND_NS = 10**9


def _xattr(index: int, name: bytes, value: bytes) -> bytes:
    entry = struct.pack("<BBH", len(name), index, len(value)) + name + value
    return entry + bytes(-len(entry) % 4)


def xattr_body(attributes: Xattrs, *more: bytes) -> bytes:
    """The extended attributes behind an inode: nothing, or a header without a filter and without
    shared ones, and the entries."""
    entries = b"".join((*more, *(_xattr(_USER, name[5:], value) for name, value in attributes)))
    return bytes(XATTR_HEADER_SIZE) + entries if entries else b""


def xattr_count(body: bytes) -> int:
    """How an inode states the length of its extended attributes."""
    return (len(body) - 8) // 4 if body else 0


XATTR_HEADER_SIZE = 12
METACOPY = _xattr(_TRUSTED, b"overlay.metacopy", b"")
OPAQUE = _xattr(_TRUSTED, b"overlay.opaque", b"y")
HOLDS_WHITEOUTS = _xattr(_TRUSTED, b"overlay.origin", b"")
"""Of a directory with whiteouts: where no other layer has the directory, an overlay would list them
if it had not this attribute, which says that the directory was copied from a lower layer
(fs/overlayfs/inode.c, ovl_get_inode)."""


def object_path(content: bytes) -> bytes:
    """Where a content lies below the directory of objects: two hexadecimal digits, a slash, the
    other 62."""
    return hexlify(content, b"/", 31)


def redirect(path: bytes) -> bytes:
    """The attribute that sends an overlay to the file at `path` below the directory of contents."""
    return _xattr(_TRUSTED, b"overlay.redirect", b"/" + path)


def inode(
    layout: int,
    mode: int,
    number: int,
    mtime_ns: int = 0,
    size: int = 0,
    data: int = 0,
    links: int = 1,
    body: bytes = b"",
) -> bytes:
    """An inode with its extended attributes. `data` is the first block, or what the layout makes of
    it."""
    seconds, rest = divmod(mtime_ns, _SECOND_NS)
    return INODE.pack(layout, xattr_count(body), mode, 0, size, data, number, 0, 0, seconds, rest, links) + body


def file_inode(entry: File, number: int, links: int, path: bytes) -> bytes:
    """The inode of a regular file, with the one chunk, or several, that its content is said to be,
    which lies at `path`."""
    more = (METACOPY, redirect(path)) if entry.size else ()
    layout, data = (CHUNKED, CHUNK_BITS) if entry.size else (PLAIN, 0)
    body = xattr_body(entry.xattrs, *more)
    head = inode(layout, stat.S_IFREG | entry.mode, number, entry.mtime_ns, entry.size, data, links, body)
    return head + HOLE * file_chunks(entry.size)


def device_file_inode(entry: File, number: int, links: int, block: int) -> bytes:
    """The inode of a regular file with content, which lies in the image's device from `block`
    on."""
    body = xattr_body(entry.xattrs)
    form = CHUNK_BITS | _CHUNK_INDEXES
    head = inode(CHUNKED, stat.S_IFREG | entry.mode, number, entry.mtime_ns, entry.size, form, links, body)
    steps = range(0, file_chunks(entry.size) << CHUNK_BITS, 1 << CHUNK_BITS)
    indexes = (_CHUNK_INDEX.pack(0, _DEVICE, block + step) for step in steps)
    return head + bytes(-len(head) % _CHUNK_INDEX.size) + b"".join(indexes)


def packed_file_inode(entry: File, number: int, links: int, block: int) -> bytes:
    """The inode of a regular file with content, which lies in the packed inode from `block` on."""
    body, blocks = xattr_body(entry.xattrs), min(-(-entry.size // BLOCK_SIZE), 0xFFFFFFFF)
    head = inode(COMPRESSED, stat.S_IFREG | entry.mode, number, entry.mtime_ns, entry.size, blocks, links, body)
    return head + bytes(-len(head) % 8) + struct.pack("<Q", _IN_PACKED | block * BLOCK_SIZE)


def common_device_inodes(files: Sequence[File], first: int, blocks: Sequence[int], *, packed: bool) -> bytes:
    """`packed_file_inode`, or `device_file_inode`, of files without attributes and further links,
    each filled up to a slot, whose numbers begin with `first`: by far the most frequent ones, made
    in one go."""
    pack, regular, second = _COMMON_ON_DEVICE.pack, stat.S_IFREG, _SECOND_NS
    numbered = zip(count(first), files, blocks, strict=False)
    # fmt: off
    if packed:
        return b"".join([
            pack(
                COMPRESSED, 0, regular | file.mode, 0, file.size, -(-file.size // BLOCK_SIZE), number, 0, 0,
                file.mtime_ns // second, file.mtime_ns % second, 1, _IN_PACKED | block * BLOCK_SIZE,
            )
            for number, file, block in numbered
        ])
    form = CHUNK_BITS | _CHUNK_INDEXES
    return b"".join([
        pack(
            CHUNKED, 0, regular | file.mode, 0, file.size, form, number, 0, 0,
            file.mtime_ns // second, file.mtime_ns % second, 1, block << 32 | _DEVICE << 16,
        )
        for number, file, block in numbered
    ])
    # fmt: on


def plain_file_inode(entry: File, number: int, links: int, block: int) -> Iterator[bytes]:
    """The inode of a regular file with content, which lies from `block` of the contents on in a
    device whose cells have heads, and lacks nothing; in parts. Cells are no chunks of EROFS, whose
    blocks are a power of two, so each block is a chunk, unless the content is in one cell."""
    cells, blocks = Cells(headed=True), -(-entry.size // BLOCK_SIZE)
    if block % CELL_BLOCKS + blocks <= CELL_BLOCKS:
        yield device_file_inode(entry, number, links, cells.file_block(block))
        return
    body = xattr_body(entry.xattrs)
    form, mode = _CHUNK_INDEXES, stat.S_IFREG | entry.mode
    head = inode(CHUNKED, mode, number, entry.mtime_ns, entry.size, form, links, body)
    yield head + bytes(-len(head) % _CHUNK_INDEX.size)
    end = block + blocks
    while block < end:
        indexes = array("Q")
        while block < end and len(indexes) < _INDEXES_AT_ONCE:
            count = min(end - block, CELL_BLOCKS - block % CELL_BLOCKS)
            first = cells.file_block(block) << 32 | _DEVICE << 16
            indexes.extend(range(first, first + (count << 32), 1 << 32))
            block += count
        if sys.byteorder == "big":
            indexes.byteswap()
        yield indexes.tobytes()


def own_cells_inode(entry: File, number: int, links: int, block: int) -> Iterator[bytes]:
    """The inode of a regular file with content, which has the cells from `block` of the contents on
    for itself; in parts. Of the last cell it may need a part."""
    body, cells = xattr_body(entry.xattrs), -(-entry.size // CELL_BYTES)
    blocks = Cells(headed=True).file_bytes // BLOCK_SIZE
    mode, used = stat.S_IFREG | entry.mode, min(cells * blocks, 0xFFFFFFFF)
    head = inode(COMPRESSED, mode, number, entry.mtime_ns, entry.size, used, links, body)
    last = -(-entry.size // BLOCK_SIZE) - (cells - 1) * CELL_BLOCKS
    partly = _PARTLY if entry.size % CELL_BYTES else 0
    end = _HEAD_INDEX.pack(_HEAD | partly, 0, DEVICE_BLOCK + (block // CELL_BLOCKS + cells - 1) * blocks)
    rest = _CELL_REST[: (last - 1) * _HEAD_INDEX.size]
    yield head + bytes(-len(head) % 8) + _CELLS_HEADER
    yield from _cell_indexes(range(block // CELL_BLOCKS, block // CELL_BLOCKS + cells - 1))
    yield end + rest


def _cell_indexes(cells: range) -> Iterator[bytes]:
    """What says where cells of the device are, for so many blocks of a file each; in parts."""
    blocks, plain = Cells(headed=True).file_bytes // BLOCK_SIZE, _HEAD_INDEX.pack(_HEAD, 0, 0) + _CELL_REST
    step = _INDEXES_AT_ONCE // CELL_BLOCKS
    for first in range(cells.start, cells.stop, step):
        part = range(first, min(cells.stop, first + step))
        heads = array("I", (DEVICE_BLOCK + cell * blocks for cell in part))
        if sys.byteorder == "big":
            heads.byteswap()
        data = bytearray(plain * len(part))
        memoryview(data).cast("I")[1 :: len(plain) // heads.itemsize] = memoryview(heads)
        yield bytes(data)


def packed_inode(cells: int, number: int) -> Iterator[bytes]:
    """The inode that has the contents of all files, as so many compressed cells of the device; in
    parts."""
    blocks = Cells(headed=True).file_bytes // BLOCK_SIZE
    yield inode(COMPRESSED, stat.S_IFREG, number, 0, cells * CELL_BYTES, min(cells * blocks, 0xFFFFFFFF))
    yield _CELLS_HEADER
    yield from _cell_indexes(range(cells))


def file_chunks(size: int) -> int:
    """How many chunks a file of `size` bytes has."""
    return -(-size // CHUNK_SIZE)


def identity(parts: bytes, root: bytes) -> bytes:
    """The identity of an image: the BLAKE3, cut to 16 bytes, of the BLAKE3 of each of its `parts`,
    one behind the other, and of its root. A part ends at each multiple of PART_SIZE; the first one
    begins at REST_AT. So that of a patched image takes only the parts that differ.
    """
    return blake3(parts + root).digest(16)


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the superblock of an image says. `device`: there is a slot of one at DEVICE_AT.
    `packed`: the number of the packed inode, 0 for none."""

    inodes: int
    blocks: int
    identity: bytes
    device: bool = False
    packed: int = 0

    def encode(self) -> bytes:
        """Its bytes."""
        features, extensions, compressions = _INCOMPAT_CHUNKED_FILE, 0, 0
        devices, slot = (1, DEVICE_AT // DEVICE_SLOT.size) if self.device else (0, 0)
        if self.device:
            features |= _INCOMPAT_DEVICE_TABLE
        if self.packed:
            features |= _INCOMPAT_CELLS
            extensions, compressions = (REST_AT - ROOT_AT) // _EXTENSION_SIZE, 1 << _DEFLATE
        # fmt: off
        return SUPERBLOCK.pack(
            MAGIC, 0, _COMPAT_MTIME, BLOCK_SIZE.bit_length() - 1, extensions, ROOT_AT // SLOT, self.inodes, 0, 0,
            self.blocks, 0, 0, self.identity, b"", features, compressions, devices, slot, 0, 0, 0, self.packed,
        )
        # fmt: on
