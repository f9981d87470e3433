"""EROFS images that hold a tree's metadata and no file content.

A regular file of the image has size, mode and time, and two extended attributes by which an overlay
finds its bytes in a data-only lower layer (Linux kernel, Documentation/filesystems/overlayfs.rst):
trusted.overlay.metacopy, and trusted.overlay.redirect with the path of the object. format.py says
what superblock and inodes look like.

The image, in blocks of 4096 bytes: the superblock at 1024 and the root behind it, whose number must
fit into 16 bits; then everything that is no directory, in walking order; then the directories. An
inode lies at a multiple of 32, which is 32 times its number (nid). A short symbolic link and the
last block of a directory lie behind their inode, within one block; other data lies in whole blocks
in front of the inode. So an entry's number is known as soon as it is met, and directories, which
name numbers, come once all are known.

Equal trees give equal bytes. Owners are 0. Whiteouts below an opaque directory hide nothing and are
left out.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import struct
from binascii import hexlify
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import IO, BinaryIO

from blake3 import blake3

from p2pdist.model.device import OWN_CELLS_BYTES, Cells, DeviceLayout, has_own_cells
from p2pdist.model.errors import Corrupt
from p2pdist.model.tree import Directory, Entry, File, HardLink, Symlink, Whiteout
from p2pdist.mount import kernel
from p2pdist.mount.erofs.format import (
    BLOCK_SIZE,
    CHUNK_BITS,
    CHUNK_SIZE,
    CHUNKED,
    DEFLATE_SETTINGS,
    DEVICE_BLOCK,
    DEVICE_SLOT,
    DIRENT_SIZE,
    HOLDS_WHITEOUTS,
    HOLE,
    INLINE,
    INODE,
    MAGIC,
    METACOPY,
    OPAQUE,
    PART_SIZE,
    PLAIN,
    REST_AT,
    ROOT_AT,
    SLOT,
    SUPERBLOCK,
    SUPERBLOCK_AT,
    TYPE_DEVICE,
    TYPE_DIRECTORY,
    TYPE_FILE,
    TYPE_SYMLINK,
    Superblock,
    common_device_inodes,
    device_file_inode,
    file_inode,
    identity,
    inode,
    object_path,
    own_cells_inode,
    packed_file_inode,
    packed_inode,
    plain_file_inode,
    redirect,
    xattr_body,
    xattr_count,
)

_PARTS_MAX = 1 << 16
_RUN_MAX = 1 << 10
_BYTES_MAX = 8 << 20
"""Parts, common files and bytes that are kept before they are written, or put."""

_SECOND_NS = 10**9
ContentName = Callable[[bytes], bytes]
"""Says where a content lies below the directory of contents."""

_DAMAGED = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}
"""What mount(2) and read(2) answer when the image, not the caller or the kernel, is at fault."""


def object_name(content: bytes) -> bytes:
    """Where a content lies below the directory of objects: two hexadecimal digits, a slash, the
    other 62."""
    return object_path(content)


_COMMON_FILE = struct.Struct(INODE.format + "53s65s10s")
_BODY = xattr_body((), METACOPY, redirect(object_name(bytes(32))))
_BODY_BEGIN, _BODY_END = _BODY[:53], _BODY[118:] + HOLE + bytes(4)
_BODY_COUNT = xattr_count(_BODY)
"""A file with content and without attributes of its own, by far the most frequent inode, is made in
one go: 192 bytes, of which the 65 that name the object differ."""


def _common_files(files: Sequence[File], first: int) -> bytes:
    """The inodes of common files, whose numbers begin with `first`."""
    pack = _COMMON_FILE.pack
    # fmt: off
    return b"".join([
        pack(
            CHUNKED, _BODY_COUNT, stat.S_IFREG | file.mode, 0, file.size, CHUNK_BITS, number, 0, 0,
            file.mtime_ns // _SECOND_NS, file.mtime_ns % _SECOND_NS, 1,
            _BODY_BEGIN, hexlify(file.content, b"/", 31), _BODY_END,
        )
        for number, file in enumerate(files, first)
    ])
    # fmt: on


class _Directory:
    """What is known of a directory until it is written: the names in it, in order, their numbers
    and types; its place in its parent."""

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
        """Deal the names, `.` and `..` among them, into blocks. From then on `ends` says how many
        names there are up to the end of each block, `used` how many bytes are in the last one."""
        names = self.names
        for name in (b".", b".."):
            self.places.append(bisect_left(names, name))
            names.insert(self.places[-1], name)
        sizes = list(accumulate(map(len, names), lambda total, size: total + size + DIRENT_SIZE, initial=0))
        begin = end = 0
        while end < len(names):
            begin, end = end, bisect_right(sizes, sizes[end] + BLOCK_SIZE) - 1
            self.ends.append(end)
        self.used = sizes[end] - sizes[begin]

    def blocks(self) -> list[bytes]:
        """Its data, when the numbers of all that is in it are known. The last block is not filled
        up."""
        for place, nid in zip(self.places, (self.nid, self.parent.nid), strict=True):
            self.nids.insert(place, nid)
            self.types.insert(place, TYPE_DIRECTORY)
        found = []
        begin = 0
        for end in self.ends:
            names, count = self.names[begin:end], end - begin
            offsets = accumulate(map(len, names), initial=DIRENT_SIZE * count)
            heads = map(int.__or__, offsets, self.types[begin:end])
            numbers = chain.from_iterable(zip(self.nids[begin:end], heads, strict=False))
            found.append(struct.pack("<" + "QI" * count, *numbers) + b"".join(names))
            begin = end
        return found

    def place(self, at: int) -> int:
        """Say where it goes when the image is filled up to `at`: number, first block and whether
        the last block is behind the inode. Returns where it ends."""
        size = INODE.size + len(self.body())
        self.inline = size + self.used <= BLOCK_SIZE
        if blocks := len(self.ends) - self.inline:
            at = _round_up(at, BLOCK_SIZE)
            self.block = at // BLOCK_SIZE
            at += blocks * BLOCK_SIZE
        if self.inline:
            size += self.used
            if at % BLOCK_SIZE + size > BLOCK_SIZE:
                at = _round_up(at, BLOCK_SIZE)
        self.nid = self.parent.nids[self.index] = at // SLOT
        return _round_up(at + size, SLOT)

    def body(self) -> bytes:
        """The extended attributes behind its inode."""
        mark = OPAQUE if self.entry.opaque else HOLDS_WHITEOUTS if self.whiteouts else b""
        return xattr_body(self.entry.xattrs, mark)


@dataclass(frozen=True, slots=True)
class Device:
    """A file with `size` bytes of contents in `cells`, beside an image: `firsts` says at which
    block of the contents each begins. `whole`: it lacks nothing, so the image names the blocks of
    contents, not the cells, and the kernel reads no more than it is asked for."""

    size: int
    firsts: Mapping[bytes, int]
    cells: Cells
    whole: bool = False


class _Writer:
    """An image while it is written. `at` is where in the image the next byte goes. With `device`
    files have their contents there, without it in objects, which `name` names."""

    def __init__(self, file: IO[bytes], device: Device | None = None, name: ContentName = object_name) -> None:
        self._file, self._device, self._name = file, device, name
        self._part = blake3()
        self._part_left = PART_SIZE - REST_AT
        self._hashes = bytearray()
        self._parts: list[bytes] = []
        self._at = self._written = REST_AT
        self._inodes = 1
        self._root = _Directory(Directory(b"", 0o755, 0))
        self._directories = {b"": self._root}
        self._links: Counter[bytes] = Counter()
        self._nids: dict[bytes, int] = {}
        file.seek(REST_AT)
        self._packed = 0
        """The number of the packed inode."""
        if device is not None:
            self._put_device(device)

    def write(self, entries: Sequence[Entry]) -> None:
        """All entries of a tree, in walking order, and then the superblock."""
        self._links.update(entry.target for entry in entries if type(entry) is HardLink)
        links, common_max = self._links, self._common_max()
        place, here = b"", self._root
        run: list[File] = []
        for entry in entries:
            path = entry.path
            parent, _, name = path.rpartition(b"/")
            if parent != place:
                self._put_run(run, here)
                run, place, here = [], parent, self._directories[parent]
            if type(entry) is File and 0 < entry.size <= common_max and not entry.xattrs and path not in links:
                run.append(entry)
                here.names.append(name)
                if len(run) == _RUN_MAX:
                    self._put_run(run, here)
                    run = []
                continue
            self._put_run(run, here)
            run = []
            if (found := self._put_entry(entry, here)) is not None:
                here.names.append(name)
                here.nids.append(found[0])
                here.types.append(found[1])
        self._put_run(run, here)
        self._put_directories()
        self._finish()

    def _common_max(self) -> int:
        """How large a file without attributes and further links is at most to be a common one."""
        if self._device is not None:
            if self._device.cells.headed and self._device.whole:
                return 0
            return OWN_CELLS_BYTES - 1 if self._packed else CHUNK_SIZE
        return CHUNK_SIZE if self._name is object_name else 0

    def _put_run(self, run: Sequence[File], here: _Directory) -> None:
        """Put common files that follow each other in a directory."""
        if not run:
            return
        first, count = self._inodes + 1, len(run)
        if self._device is None:
            data = _common_files(run, first)
        else:
            firsts = self._device.firsts
            data = common_device_inodes(run, first, [firsts[file.content] for file in run], packed=bool(self._packed))
        self._parts.append(data)
        self._inodes += count
        step = len(data) // count
        here.nids.extend(range(self._at // SLOT, (self._at + len(data)) // SLOT, step // SLOT))
        here.types.extend(repeat(TYPE_FILE, count))
        self._at += len(data)
        if self._at - self._written > _BYTES_MAX:
            self._flush()

    def _put_device(self, device: Device) -> None:
        """Put what says where the device is, and the packed inode of one with headed cells."""
        blocks = device.cells.file_size(device.size) // BLOCK_SIZE
        self._put(DEFLATE_SETTINGS.ljust(DEVICE_SLOT.size, b"\0"))
        self._put(DEVICE_SLOT.pack(blocks, DEVICE_BLOCK))
        if device.cells.headed and not device.whole:
            self._packed = self._at // SLOT
            self._put_parts(packed_inode(len(device.cells.holding(0, device.size)), self._number()))

    def _put_entry(self, entry: Entry, here: _Directory) -> tuple[int, int] | None:
        """Number and type of an entry; a directory's number comes later. None for a whiteout that
        hides nothing."""
        if len(self._parts) > _PARTS_MAX or self._at - self._written > _BYTES_MAX:
            self._flush()
        match entry:
            case Directory():
                here.subdirectories += 1
                self._directories[entry.path] = _Directory(entry, here)
                return 0, TYPE_DIRECTORY
            case File():
                links = 1 + self._links[entry.path]
                if self._device is None or not entry.size:
                    nid = self._put(file_inode(entry, self._number(), links, self._name(entry.content)))
                else:
                    nid = self._put_parts(self._on_device(entry, links, self._device))
                self._nids[entry.path] = nid
                return nid, TYPE_FILE
            case HardLink():
                return self._nids[entry.target], TYPE_FILE
            case Symlink():
                return self._put_symlink(entry), TYPE_SYMLINK
            case Whiteout():
                if here.opaque:
                    return None
                here.whiteouts = True
                return self._put(inode(PLAIN, stat.S_IFCHR, self._number())), TYPE_DEVICE

    def _on_device(self, entry: File, links: int, device: Device) -> Iterable[bytes]:
        """The inode of a file with content, in parts."""
        place = (entry, self._number(), links, device.firsts[entry.content])
        if not device.cells.headed:
            return (device_file_inode(*place),)
        if device.whole:
            return plain_file_inode(*place)
        return own_cells_inode(*place) if has_own_cells(entry.size) else (packed_file_inode(*place),)

    def _put_symlink(self, entry: Symlink) -> int:
        target = entry.target
        layout, block = INLINE, 0
        if INODE.size + len(target) > BLOCK_SIZE:
            layout, block, target = PLAIN, self._put_blocks([target]), b""
        head = inode(layout, stat.S_IFLNK | 0o777, self._number(), entry.mtime_ns, len(entry.target), block)
        if self._at % BLOCK_SIZE + len(head) + len(target) > BLOCK_SIZE:
            self._pad(_round_up(self._at, BLOCK_SIZE))
        return self._put(head + target)

    def _put_directories(self) -> None:
        """Where a directory lies follows from the names in it; what it says, from where all of them
        lie."""
        root, *others = self._directories.values()
        root.measure()
        root.nid = ROOT_AT // SLOT
        at = self._at
        for directory in others:
            directory.measure()
            at = directory.place(at)
        root.block = _round_up(at, BLOCK_SIZE) // BLOCK_SIZE
        for directory in others:
            blocks = directory.blocks()
            tail = blocks.pop() if directory.inline else b""
            self._put_blocks(blocks)
            self._pad(directory.nid * SLOT)
            self._put(self._directory_inode(directory) + tail)
            if len(self._parts) > _PARTS_MAX:
                self._flush()
        self._put_blocks(root.blocks())

    def _directory_inode(self, directory: _Directory) -> bytes:
        entry = directory.entry
        layout = INLINE if directory.inline else PLAIN
        size = (len(directory.ends) - 1) * BLOCK_SIZE + directory.used
        mode, links = stat.S_IFDIR | entry.mode, 2 + directory.subdirectories
        return inode(layout, mode, self._number(), entry.mtime_ns, size, directory.block, links, directory.body())

    def _number(self) -> int:
        """That of the next inode."""
        self._inodes += 1
        return self._inodes

    def _put(self, data: bytes) -> int:
        """Put an inode, with what is behind it, and return its number."""
        nid = self._at // SLOT
        self._parts += (data, bytes(-len(data) % SLOT))
        self._at = _round_up(self._at + len(data), SLOT)
        return nid

    def _put_parts(self, parts: Iterable[bytes]) -> int:
        """Put an inode that may be large, and return its number."""
        nid = self._at // SLOT
        for part in parts:
            self._parts.append(part)
            self._at += len(part)
            if self._at - self._written > _BYTES_MAX:
                self._flush()
        self._pad(_round_up(self._at, SLOT))
        return nid

    def _put_blocks(self, blocks: Sequence[bytes]) -> int:
        """Put blocks, filled up with zeros, and return the number of the first; no blocks leave
        everything as it is."""
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
        self._file.write(data)
        self._written += len(data)
        rest = memoryview(data)
        while rest:
            piece, rest = rest[: self._part_left], rest[self._part_left :]
            self._part.update(piece)
            self._part_left -= len(piece)
            if not self._part_left:
                self._end_part()

    def _end_part(self) -> None:
        self._hashes += self._part.digest()
        self._part, self._part_left = blake3(), PART_SIZE

    def _finish(self) -> None:
        """Fill the last block up, and write superblock and root."""
        self._pad(_round_up(self._at, BLOCK_SIZE))
        self._flush()
        root = self._directory_inode(self._root)
        if self._at % PART_SIZE:
            self._end_part()
        name = identity(bytes(self._hashes), root)
        blocks, device = self._at // BLOCK_SIZE, self._device is not None
        head = Superblock(self._inodes, blocks, name, device, self._packed).encode()
        self._file.seek(0)
        self._file.write((bytes(SUPERBLOCK_AT) + head + root).ljust(REST_AT, b"\0"))


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def write_image(
    entries: Sequence[Entry], path: Path, device: Device | None = None, *, name: ContentName = object_name
) -> None:
    """Write the image of a tree, whose entries `check_entries` has let pass, at `path`, which
    appears once it is whole. With `device` the contents are there, without it in objects, where
    `name` says. What a
    killed process left at the partial name beside it is replaced; two may not write the same image
    at a time. Raises OSError."""
    with partial_file(path) as file:
        _Writer(file, device, name).write(entries)


def write_image_to(file: BinaryIO, entries: Sequence[Entry], device: Device) -> None:
    """Write the image of a tree, as `write_image` does, into a new file that the caller makes
    visible. Raises OSError."""
    _Writer(file, device).write(entries)


def device_image(entries: Sequence[Entry], layout: DeviceLayout) -> bytes:
    """The image of a tree over a device with headed cells, nothing of which need be here."""
    file = io.BytesIO()
    _Writer(file, Device(layout.size, layout.first_blocks(), Cells(headed=True))).write(entries)
    return file.getvalue()


@contextmanager
def partial_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that appears at `path` once the block has ended without an exception. Raises
    OSError.

    It is not brought to the disk, which takes longer than writing it: an image is made from the
    tree at any time, and a store that is opened after the loss of the machine removes all images it
    finds.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def is_image(path: Path) -> bool:
    """Whether a whole image lies there: its superblock is one of ours, and the file as long as it
    says. Raises OSError unless it is only missing, or the disk cannot read it any more: then it is
    made anew."""
    try:
        with path.open("rb") as file:
            head = file.read(ROOT_AT)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        if error.errno != errno.ENOENT and error.errno not in _DAMAGED:
            raise
        return False
    if len(head) < ROOT_AT:
        return False
    magic, _, _, bits, _, _, _, _, _, blocks, *_ = SUPERBLOCK.unpack_from(head, SUPERBLOCK_AT)
    return (magic, 1 << bits, blocks * BLOCK_SIZE) == (MAGIC, BLOCK_SIZE, size)


def mount_image(image: Path, target: Path, device: Path | None = None, *, looped: bool = False) -> None:
    """Mount an image read-only, nosuid and nodev, at the empty directory `target`, straight from
    its file, or `looped`, through a loop device; `device` is a path without commas of its device.
    Raises Corrupt when the image is damaged, or OSError where that is not possible here (ENOTBLK:
    before Linux 6.12, or the file is on a tmpfs)."""
    # What the kernel had read of a cell nothing had filled it would keep, and never look again.
    options = "" if device is None else f"device={device},cache_strategy=disabled"
    flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    try:
        with kernel.loop_device(image) if looped else nullcontext(image) as source:
            kernel.mount(source, target, "erofs", flags, options)
    except OSError as error:
        if error.errno == errno.ENOTBLK:
            reason = "this kernel mounts no EROFS image from a file there"
            raise OSError(error.errno, reason, os.fspath(image)) from error
        if error.errno in _DAMAGED:
            reason = f"the image {image} of a tree is damaged: {error.strerror}"
            raise Corrupt(reason, remedy="Remove the file; it is made again from the tree") from error
        raise
