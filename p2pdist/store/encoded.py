"""Encoded writes: Btrfs takes stored blocks as they are, instead of compressing again what was just
decompressed.

Format: BTRFS_IOC_ENCODED_WRITE with struct btrfs_ioctl_encoded_io_args (Linux,
include/uapi/linux/btrfs.h): one zstd frame for up to 128 KiB, at an offset that is a multiple of
the sector; so is its length unless it ends the file. The kernel does not look into the frame: a
wrong one is found out when it is read. So only frames are given to it that were decompressed and
verified here before, and that its decompressor can take, with a window of at most 128 KiB.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import struct
import threading
from pathlib import Path
from typing import NamedTuple

import zstandard

from p2pdist.model.catalog import BLOCK_SIZE, one_frame

log = logging.getLogger(__name__)

_INLINE_MAX = 2048
"""Stored bytes of a content of at most a sector that Btrfs keeps in its tree, with the mount option
max_inline as it is by default."""

_ENCODED_WRITE = 0x40809440
_ARGUMENTS = struct.Struct("=QQqQQQQII64x")
_ZSTD = 2
_BTRFS_MAGIC = 0x9123683E
_REFUSED = {errno.EINVAL, errno.E2BIG}
_UNSUPPORTED = {errno.EPERM, errno.EACCES, errno.ENOTTY, errno.EOPNOTSUPP, errno.ENOSYS}
_libc = ctypes.CDLL(None, use_errno=True)


def on_btrfs(directory: Path) -> bool:
    """Whether a directory lies on Btrfs; raises OSError."""
    found = ctypes.create_string_buffer(256)  # struct statfs: f_type comes first
    if _libc.statfs(os.fsencode(directory), found) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF == _BTRFS_MAGIC


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

    def write(self, fd: int, extent: Extent, place: int, count: int, first: bytes = b"") -> bool:
        """Write a frame: the bytes `first`, and `count` more at the address `place`. False when it
        was refused. Raises OSError."""
        if not self.works:
            return False
        call = self._call
        words = call.words
        words[0], words[1], parts = place, count, 1
        if first:
            words[0], words[1], words[2], words[3], parts = address(first), len(first), place, count, 2
        offset, length, decoded, skipped = extent
        _ARGUMENTS.pack_into(call.arguments, 0, call.address, parts, offset, 0, length, decoded, skipped, _ZSTD, 0)
        try:
            written = fcntl.ioctl(fd, _ENCODED_WRITE, call.arguments)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                log.warning("contents are written decompressed, since Btrfs refuses encoded writes: %s", error)
                self.works = False
            elif error.errno not in _REFUSED:
                raise
            return False
        if written != len(first) + count:
            return False
        self.encoded_bytes += length
        return True


def decodable(frame: bytes | memoryview) -> bool:
    """Whether the kernel has the memory for what a frame states, and all else that it needs."""
    parameters = zstandard.get_frame_parameters(frame)
    return parameters.window_size <= BLOCK_SIZE and parameters.dict_id == 0


def addressable(stored: bytes | memoryview) -> bytes | memoryview:
    """The same in memory that has an address: a copy where nobody may write to it, unless it is
    bytes."""
    return bytes(stored) if isinstance(stored, memoryview) and stored.readonly else stored


def address(stored: bytes | memoryview) -> int:
    """Of bytes, or of memory that may be written to; good as long as the object is there."""
    if isinstance(stored, bytes):
        return ctypes.cast(ctypes.c_char_p(stored), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(stored))
