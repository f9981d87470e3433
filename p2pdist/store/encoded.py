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

_INLINE_MAX = 2048
"""Stored bytes of a content of at most a sector that Btrfs keeps in its tree, with the mount option max_inline as it is by default."""

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
    """The arguments of the call, for each thread: `words` are a struct iovec, which is at `address`."""

    def __init__(self) -> None:
        self.words = (ctypes.c_uint64 * 2)()
        self.address = ctypes.addressof(self.words)
        self.arguments = bytearray(_ARGUMENTS.size)


class EncodedWriter:
    """Writes chunks to files of one directory, their blocks as they are where the filesystem takes them. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._sector = os.statvfs(directory).f_bsize
        self._call = _Call()
        self.works = on_btrfs(directory)
        self.encoded_bytes = 0

    def write(self, fd: int, offset: int, stored: bytes | memoryview, data: bytes | memoryview) -> None:
        """Write `data`, which is what `stored` decodes to and was verified, at `offset`; raises OSError. The chunk ends the file, or
        has a length of whole sectors, or its last block is written in the plain way. A `stored` that may be written to is not copied,
        nor are bytes."""
        size, count = len(data), len(stored)
        if not self.works or count == size or offset % self._sector:
            pwrite_all(fd, data, offset)
            return
        if isinstance(stored, memoryview) and stored.readonly:
            stored = bytes(stored)
        if size > BLOCK_SIZE:
            self._write_blocks(fd, offset, stored, memoryview(data))
        elif not (
            self._worth(stored, count, size, offset == 0)
            and self._write_frame(fd, offset, _address(stored), count, size)
        ):
            pwrite_all(fd, data, offset)

    def takes(self, stored: bytes | memoryview, size: int) -> bool:
        """Whether `stored` is one frame, which the filesystem should take as the whole content, of `size` bytes, of a file."""
        count = len(stored)
        return self.works and 0 < count < size <= BLOCK_SIZE and self._worth(stored, count, size, True)

    def write_frame(self, fd: int, stored: bytes | memoryview, size: int) -> bool:
        """Write such a frame to an empty file; False when it was refused. Raises OSError."""
        if isinstance(stored, memoryview) and stored.readonly:
            stored = bytes(stored)
        return self._write_frame(fd, 0, _address(stored), len(stored), size)

    def _write_blocks(self, fd: int, offset: int, stored: bytes | memoryview, data: memoryview) -> None:
        start, plain_from = _address(stored), 0
        for at, place, count, length in self._frames(memoryview(stored), len(data)):
            if self._write_frame(fd, offset + at, start + place, count, length):
                if plain_from < at:
                    pwrite_all(fd, data[plain_from:at], offset + plain_from)
                plain_from = at + length
        if plain_from < len(data):
            pwrite_all(fd, data[plain_from:], offset + plain_from)

    def _worth(self, frame: bytes | memoryview, count: int, size: int, whole: bool) -> bool:
        """Whether a frame of `count` bytes takes fewer sectors than the `size` bytes that it decodes to, or none as the `whole` content
        of a file, and the kernel can decode it."""
        sector = self._sector
        if -(-count // sector) >= -(-size // sector) and not (whole and size <= sector and count <= _INLINE_MAX):
            return False
        parameters = zstandard.get_frame_parameters(frame)
        return parameters.window_size <= BLOCK_SIZE and parameters.dict_id == 0

    def _frames(self, stored: memoryview, length: int) -> Iterator[tuple[int, int, int, int]]:
        """The blocks that are worth it: offset in the chunk, place in `stored`, bytes there, and length."""
        blocks = list(chunk_blocks(stored, length))
        at, place = 0, len(stored) - sum(len(block) for block, _ in blocks)
        for block, size in blocks:
            if len(block) < size and self._worth(block, len(block), size, False):
                yield at, place, len(block), size
            at += size
            place += len(block)

    def _write_frame(self, fd: int, offset: int, address: int, count: int, length: int) -> bool:
        if not self.works:
            return False
        call = self._call
        call.words[0], call.words[1] = address, count
        _ARGUMENTS.pack_into(call.arguments, 0, call.address, 1, offset, 0, length, length, 0, _ZSTD, 0)
        try:
            written = fcntl.ioctl(fd, _ENCODED_WRITE, call.arguments)
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


def _address(stored: bytes | memoryview) -> int:
    """Of bytes, or of memory that may be written to; good as long as the object is there."""
    if isinstance(stored, bytes):
        return ctypes.cast(ctypes.c_char_p(stored), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(stored))
