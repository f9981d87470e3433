"""Encoded writes: Btrfs takes stored blocks as they are, instead of compressing again what was just decompressed.

Format: BTRFS_IOC_ENCODED_WRITE with struct btrfs_ioctl_encoded_io_args (Linux, include/uapi/linux/btrfs.h): one zstd frame for up to
128 KiB, at an offset that is a multiple of the sector; so is its length unless it ends the file. The kernel does not look into the frame: a
wrong one is found out when it is read. So only frames are given to it that were decompressed and verified here before, and that its
decompressor can take, with a window of at most 128 KiB.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import zstandard

from p2pdist.model.catalog import BLOCK_SIZE, chunk_blocks
from p2pdist.store.disk import pwrite_all

log = logging.getLogger(__name__)

ENCODED_MIN = 8 << 10
"""Bytes of the smallest content for which this takes no more CPU than to write it, what the kernel does later included."""

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


class _Vector(threading.local):
    """A struct iovec for each thread: `words` are address and length."""

    def __init__(self) -> None:
        self.words = (ctypes.c_uint64 * 2)()
        self.address = ctypes.addressof(self.words)


class EncodedWriter:
    """Writes chunks to files of one directory, their blocks as they are where the filesystem takes them. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._sector = os.statvfs(directory).f_bsize
        self._vector = _Vector()
        self.works = on_btrfs(directory)
        self.encoded_bytes = 0

    def write(self, fd: int, offset: int, stored: bytes | memoryview, data: bytes | memoryview) -> None:
        """Write `data`, which is what `stored` decodes to and was verified, at `offset`; raises OSError. The chunk ends the file, or
        has a length of whole sectors, or its last block is written in the plain way. A `stored` that may be written to is not copied,
        nor are bytes."""
        if not self.works or len(stored) == len(data) or len(data) < ENCODED_MIN or offset % self._sector:
            pwrite_all(fd, data, offset)
            return
        if isinstance(stored, memoryview) and stored.readonly:
            stored = bytes(stored)
        view, plain_from = memoryview(data), 0
        # Kept to the end: it holds the memory at the address.
        memory = ctypes.c_char_p(stored) if isinstance(stored, bytes) else ctypes.c_char.from_buffer(stored)
        start = _address(memory)
        for at, place, count, length in self._frames(memoryview(stored), len(data)):
            if self._write_frame(fd, offset + at, start + place, count, length):
                if plain_from < at:
                    pwrite_all(fd, view[plain_from:at], offset + plain_from)
                plain_from = at + length
        if plain_from < len(data):
            pwrite_all(fd, view[plain_from:], offset + plain_from)

    def _frames(self, stored: memoryview, length: int) -> Iterator[tuple[int, int, int, int]]:
        """The blocks that may be worth it: offset in the chunk, place in `stored`, bytes there, and length."""
        blocks = list(chunk_blocks(stored, length))
        at, place = 0, len(stored) - sum(len(block) for block, _ in blocks)
        for block, size in blocks:
            if len(block) + self._sector <= size:
                parameters = zstandard.get_frame_parameters(block)
                if parameters.window_size <= BLOCK_SIZE and parameters.dict_id == 0:
                    yield at, place, len(block), size
            at += size
            place += len(block)

    def _write_frame(self, fd: int, offset: int, address: int, count: int, length: int) -> bool:
        if not self.works:
            return False
        vector = self._vector
        vector.words[0], vector.words[1] = address, count
        arguments = _ARGUMENTS.pack(vector.address, 1, offset, 0, length, length, 0, _ZSTD, 0)
        try:
            written = fcntl.ioctl(fd, _ENCODED_WRITE, bytearray(arguments))
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                log.warning("contents are written decompressed, since Btrfs refuses encoded writes: %s", error)
                self.works = False
            elif error.errno not in _REFUSED:
                raise
            return False
        if written != count:
            return False
        self.encoded_bytes += length
        return True


def _address(memory: ctypes.c_char_p | ctypes.c_char) -> int:
    """Of what a pointer points to, or of what was taken from a buffer."""
    if isinstance(memory, ctypes.c_char_p):
        return ctypes.cast(memory, ctypes.c_void_p).value or 0
    return ctypes.addressof(memory)
