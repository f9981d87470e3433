"""Files on Btrfs: stored frames are written as they are, and many files at once under their names.

**Encoded writes.** Btrfs takes a zstd frame instead of compressing again what was just
decompressed: BTRFS_IOC_ENCODED_WRITE with struct btrfs_ioctl_encoded_io_args (Linux,
include/uapi/linux/btrfs.h). A frame has up to 128 KiB and lies at a multiple of the sector; so is
its length unless it ends the file. The kernel does not look into the frame, and a wrong one is
found out when it is read. So only frames are given to it that were decompressed and verified here
before, and that its decompressor can take, with a window of at most 128 KiB.

**Extents.** An extent begins at a sector, and ends at one unless the file ends there; chunks of a
content, and so their blocks, begin and end anywhere. What a block has behind its last whole sector
is held until the next block comes, and put before that one's frame. What the frame decodes to
behind the extent's last sector is on the disk but not used. Where the bytes before a block were not
written just before, others stand for them, and the extent begins with the next sector. Every sector
is written once.

**Frames that begin earlier.** A frame is a header, blocks and perhaps a checksum (RFC 8878). Bytes
are put before it as a raw block behind a new header, which states the sum of the lengths; nothing
is decompressed. The other blocks stay as good as they were: what they repeat lies so many bytes
back, and never before the first byte of their frame, or it would not have decompressed. A raw block
changes neither the offsets that are repeated nor any table. The checksum, of the whole content,
goes.

**Names.** Naming a file after it was written costs much on Btrfs, so files are created under their
names and then written: some are created, then all written, then all closed, so that the interpreter
and the filesystem do not push each other out of the processor's caches between two calls. Frames so
small that they become items of the filesystem's trees are written first, then those with extents,
each in the order of their names, which brings files of one directory together. Several threads may
do so at once. A file is empty until it is written, and torn while it is: it counts when the call
that makes it has said so.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zstandard

from p2pdist.model.catalog import BLOCK_SIZE, chunk_blocks, decode_chunk, one_frame
from p2pdist.store.disk import pwrite_all

logger = logging.getLogger(__name__)

TOGETHER = 128
"""So many files a thread has open at a time."""

_INLINE_MAX = 2048
"""Stored bytes of a content of at most a sector that Btrfs keeps in its tree, with the mount option
max_inline as it is by default."""

_ENCODED_WRITE = 0x40809440
_ARGUMENTS = struct.Struct("=QQqQQQQII64x")
_ZSTD = 2
_BTRFS_MAGIC = 0x9123683E
_REFUSED = {errno.EINVAL, errno.E2BIG}
_UNSUPPORTED = {errno.EPERM, errno.EACCES, errno.ENOTTY, errno.EOPNOTSUPP, errno.ENOSYS}
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC

_HEADER = struct.Struct("<IBI")
_SINGLE_SEGMENT = 2 << 6 | 1 << 5
"""Frame_Header_Descriptor: Frame_Content_Size has four bytes, and the window is as long as the
content; no dictionary, no checksum."""
_CHECKSUM_BYTES = 4

_libc = ctypes.CDLL(None, use_errno=True)


def on_btrfs(directory: Path) -> bool:
    """Whether a directory lies on Btrfs; raises OSError."""
    status = ctypes.create_string_buffer(256)  # struct statfs: f_type comes first
    if _libc.statfs(os.fsencode(directory), status) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return ctypes.c_long.from_buffer(status).value & 0xFFFFFFFF == _BTRFS_MAGIC


def blocks_of(frame: bytes | memoryview) -> tuple[int, int]:
    """Where in a frame, which decompresses, its blocks begin and end; nowhere when it needs a
    dictionary. Raises ZstdError."""
    parameters = zstandard.get_frame_parameters(frame)
    if parameters.dict_id:
        return 0, 0
    return zstandard.frame_header_size(frame), len(frame) - (_CHECKSUM_BYTES if parameters.has_checksum else 0)


def beginning(head: bytes, length: int) -> bytes:
    """What comes before the blocks of a frame that decodes to `length` bytes, for one that decodes
    to `head` and these. Both together have at most 128 KiB."""
    raw_block = len(head) << 3  # not the last one, of type 0
    return (
        _HEADER.pack(zstandard.MAGIC_NUMBER, _SINGLE_SEGMENT, len(head) + length)
        + raw_block.to_bytes(3, "little")
        + head
    )


def decodable(frame: bytes | memoryview) -> bool:
    """Whether the kernel has the memory for what a frame states, and all else that it needs."""
    parameters = zstandard.get_frame_parameters(frame)
    return parameters.window_size <= BLOCK_SIZE and parameters.dict_id == 0


def addressable(stored: bytes | memoryview) -> bytes | memoryview:
    """`stored` in memory that has an address: a copy of what is read-only, unless it is bytes."""
    return bytes(stored) if isinstance(stored, memoryview) and stored.readonly else stored


def address(stored: bytes | memoryview) -> int:
    """The address of bytes, or of memory that may be written to; good as long as the object is
    there."""
    if isinstance(stored, bytes):
        return ctypes.cast(ctypes.c_char_p(stored), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(stored))


class _Call(threading.local):
    """The arguments of the call, for each thread: `words` are two struct iovec, which lie at
    `address`."""

    def __init__(self) -> None:
        self.words = (ctypes.c_uint64 * 4)()
        self.address = ctypes.addressof(self.words)
        self.arguments = bytearray(_ARGUMENTS.size)


class Extent(NamedTuple):
    """`length` bytes of a file at `offset`: those behind the first `skipped` of the `decoded` ones
    that a frame decodes to."""

    offset: int
    length: int
    decoded: int
    skipped: int = 0


class EncodedWriter:
    """Hands frames to the filesystem that one directory is on, where it takes them. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self.sector = os.statvfs(directory).f_bsize
        self._call = _Call()
        self.works = on_btrfs(directory)
        self.encoded_bytes = 0

    def takes(self, stored: bytes | memoryview, size: int) -> bool:
        """Whether `stored` is one frame, which the filesystem should take as the whole content, of
        `size` bytes, of a file."""
        count = len(stored)
        if not (self.works and 0 < count < size and one_frame(stored, size)):
            return False
        if not (self.saves(count, size) or self.in_tree(count, size)):
            return False
        return decodable(stored)

    def write_frame(self, fd: int, stored: bytes | memoryview, size: int) -> bool:
        """Write such a frame to an empty file; False when it was refused. A `stored` that may be
        written to is not copied, nor are bytes. Raises OSError."""
        stored = addressable(stored)
        return self.write(fd, Extent(0, size, size), address(stored), len(stored))

    def in_tree(self, count: int, size: int) -> bool:
        """Whether a frame of `count` bytes for a content of `size` becomes an item of the
        filesystem's tree, without extent (with another max_inline than the default it may be
        otherwise)."""
        return count <= _INLINE_MAX and size <= self.sector

    def saves(self, count: int, size: int) -> bool:
        """Whether `count` bytes take fewer sectors than `size`."""
        return -(-count // self.sector) < -(-size // self.sector)

    def write(self, fd: int, extent: Extent, source: int, count: int, first: bytes = b"") -> bool:
        """Write a frame: the bytes `first`, and `count` more at the address `source`. False when it
        was refused. Raises OSError."""
        if not self.works:
            return False
        call = self._call
        words = call.words
        words[0], words[1], parts = source, count, 1
        if first:
            words[0], words[1], words[2], words[3], parts = address(first), len(first), source, count, 2
        offset, length, decoded, skipped = extent
        _ARGUMENTS.pack_into(call.arguments, 0, call.address, parts, offset, 0, length, decoded, skipped, _ZSTD, 0)
        try:
            written = fcntl.ioctl(fd, _ENCODED_WRITE, call.arguments)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                logger.warning("contents are written decompressed, since Btrfs refuses encoded writes: %s", error)
                self.works = False
            elif error.errno not in _REFUSED:
                raise
            return False
        if written != len(first) + count:
            return False
        self.encoded_bytes += length
        return True


def write_content(writer: EncodedWriter, fd: int, stored: bytes | memoryview, data: bytes | memoryview) -> None:
    """Write `data`, which is what `stored` decodes to and was verified, to an empty file; raises
    OSError. A `stored` that may be written to is not copied, nor are bytes."""
    size = len(data)
    if not writer.works or len(stored) == size:
        pwrite_all(fd, data, 0)
    elif not one_frame(stored, size):
        Extents(writer, fd, size).write(0, stored, data)
    elif not (writer.takes(stored, size) and writer.write_frame(fd, stored, size)):
        pwrite_all(fd, data, 0)


class Extents:
    """Writes the chunks of one file of `size` bytes, best in order. What is behind the last whole
    sector is written by the next call, or by `flush`. Not thread-safe. Methods raise OSError, and
    may be called again with the same."""

    def __init__(self, writer: EncodedWriter, fd: int, size: int) -> None:
        self._writer, self._fd, self._size = writer, fd, size
        self._held = b""
        """What is not written of the last chunks."""
        self._end = 0
        """Offset at which that ends and the chunk begins that is being written."""
        self._data = memoryview(b"")
        """The chunk that is being written."""
        self._done = 0
        """Offset up to which `_held` and `_data` are written."""

    def write(self, offset: int, stored: bytes | memoryview, data: bytes | memoryview) -> None:
        """Write `data`, which is what `stored` decodes to and was verified, at `offset`. A `stored`
        that may be written to is not copied, nor are bytes."""
        if offset != self._end or not self._writer.works:
            self.flush()
            self._end = offset
        if not self._writer.works:
            pwrite_all(self._fd, data, offset)
            return
        self._data, self._done = memoryview(data), offset - len(self._held)
        if len(stored) < len(data):
            self._write_frames(addressable(stored))
        self._write_until(self._whole(offset + len(data)))
        left = bytes(self._data[max(0, self._done - offset) :])
        self._held = left if self._done >= offset else self._held + left
        self._end, self._data = offset + len(data), memoryview(b"")

    def flush(self) -> None:
        """Write what is held."""
        if self._held:
            pwrite_all(self._fd, self._held, self._end - len(self._held))
            self._held = b""

    def _whole(self, end: int) -> int:
        """Where an extent ends whose bytes end at `end`."""
        return end if end == self._size else end - end % self._writer.sector

    def _write_frames(self, stored: bytes | memoryview) -> None:
        blocks = list(chunk_blocks(memoryview(stored), len(self._data)))
        source = address(stored) + len(stored) - sum(len(block) for block, _ in blocks)
        offset = self._end
        for block, length in blocks:
            if len(block) < length:
                self._write_frame(block, source, offset, length)
            source += len(block)
            offset += length

    def _write_frame(self, frame: bytes | memoryview, source: int, offset: int, length: int) -> None:
        """Write a frame in memory at the address `source`, which decodes to the `length` bytes at
        `offset` of the file, where that is worth it."""
        writer = self._writer
        before = offset % writer.sector
        begin, stop, skipped = offset - before, self._whole(offset + length), 0
        if begin < self._done:
            begin, skipped = begin + writer.sector, writer.sector
        if before + length > BLOCK_SIZE or begin >= stop:
            return
        first, start, end = b"", 0, len(frame)
        if before:
            start, end = blocks_of(frame)
            first = beginning(bytes(before) if skipped else self._between(offset - before, offset), length)
        elif not decodable(frame):
            return
        extent = Extent(begin, stop - begin, before + length, skipped)
        if (
            start < end
            and writer.saves(len(first) + end - start, stop - begin)
            and writer.write(self._fd, extent, source + start, end - start, first)
        ):
            self._write_until(begin)
            self._done = stop

    def _between(self, begin: int, end: int) -> bytes:
        """Bytes of what is held and the chunk behind it."""
        if begin >= self._end:
            return bytes(self._data[begin - self._end : end - self._end])
        return self._held[begin - self._end :] + bytes(self._data[: end - self._end])

    def _write_until(self, end: int) -> None:
        """Write decompressed what is not written yet up to the offset `end`. What is held ends
        before it, unless there is nothing to write."""
        if self._done >= end:
            return
        if self._done < self._end:
            pwrite_all(self._fd, self._held, self._done)
            self._done = self._end
        pwrite_all(self._fd, self._data[self._done - self._end : end - self._end], self._done)
        self._done = end


class Verified(NamedTuple):
    """A content of `size` bytes that has verified: as `stored` in a pack, or empty, and as it is,
    or None where `stored` is a frame that the filesystem takes."""

    content: bytes
    size: int
    stored: bytes | memoryview
    data: bytes | memoryview | None


class NamedFiles:
    """Makes files `<2 hex>/<62 hex>` in a directory. Thread-safe."""

    def __init__(self, directory: int, encoded: EncodedWriter, mode_masked: bool) -> None:
        """`directory` is its descriptor, `mode_masked` says that a file does not have the mode that
        it was created with."""
        self._directory, self._encoded, self._masked = directory, encoded, mode_masked
        self.torn = False
        """Whether there may be a file that is not what its name says."""
        self.made_directory: Callable[[str], object] = lambda name: None
        """Called with the name of each new directory, before there is a file in it."""

    def write(self, contents: Sequence[Verified], made: Callable[[Verified], object]) -> list[Verified]:
        """Write contents that are not empty and say of each that it is `made`. Returns those that
        have such a file already, another writer's or a stray. Raises OSError."""
        left: list[Verified] = []
        for begin in range(0, len(contents), TOGETHER):
            left += self._write_some(contents[begin : begin + TOGETHER], made)
        return left

    def _write_some(self, contents: Sequence[Verified], made: Callable[[Verified], object]) -> list[Verified]:
        opened: list[int] = []
        items: list[tuple[int, Verified]] = []
        files: list[tuple[int, Verified]] = []
        left: list[Verified] = []
        try:
            for verified in contents:
                try:
                    fd = self._create(verified.content.hex("/", 31))
                except FileExistsError:
                    left.append(verified)
                    continue
                opened.append(fd)
                in_tree = verified.data is None and self._encoded.in_tree(len(verified.stored), verified.size)
                (items if in_tree else files).append((fd, verified))
            self._write_all(items, made)
            self._write_all(files, made)
        except BaseException:
            # By then the name may be that of another writer's file. Empty ones are removed at the
            # next opening, a torn one as well.
            self.torn = True
            for fd, _ in (*items[-1:], *files[-1:]):
                with suppress(OSError):
                    os.ftruncate(fd, 0)
            raise
        finally:
            for first, end in _runs(opened):
                os.closerange(first, end)
        return left

    def _write_all(self, files: list[tuple[int, Verified]], made: Callable[[Verified], object]) -> None:
        """Write files and remove them from the list. On failure the list keeps what is not written;
        its last file may have been begun."""
        files.reverse()
        while files:
            fd, verified = files[-1]
            self._write_one(fd, verified)
            files.pop()
            made(verified)

    def _create(self, name: str) -> int:
        try:
            return os.open(name, _NEW, 0o444, dir_fd=self._directory)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(name[:2], dir_fd=self._directory)
            self.made_directory(name[:2])
            return os.open(name, _NEW, 0o444, dir_fd=self._directory)

    def _write_one(self, fd: int, verified: Verified) -> None:
        _, size, stored, data = verified
        if data is not None:
            write_content(self._encoded, fd, stored or data, data)
        elif not self._encoded.write_frame(fd, stored, size):
            pwrite_all(fd, decode_chunk(stored, size), 0)
        if self._masked:
            os.fchmod(fd, 0o444)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers: the first, and the one behind the last."""
    at = 0
    while at < len(numbers):
        first = end = numbers[at]
        while at < len(numbers) and numbers[at] == end:
            at, end = at + 1, end + 1
        yield first, end
