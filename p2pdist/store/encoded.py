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
from collections.abc import Iterator
from pathlib import Path

import zstandard

from p2pdist.model.catalog import BLOCK_SIZE, chunk_blocks
from p2pdist.store.disk import pwrite_all

log = logging.getLogger(__name__)

ENCODED_MIN = 64 << 10
"""Bytes of the smallest content for which this is faster than writing it."""

_ENCODED_WRITE = 0x40809440
_ARGUMENTS = struct.Struct("=QQqQQQQII64x")
_IOVEC = struct.Struct("=QQ")
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


class EncodedWriter:
    """Writes chunks to files of one directory, their blocks as they are where the filesystem takes them. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._sector = os.statvfs(directory).f_bsize
        self.works = on_btrfs(directory)
        self.encoded_bytes = 0

    def write(self, fd: int, offset: int, stored: bytes | memoryview, data: bytes | memoryview) -> None:
        """Write `data`, which is what `stored` decodes to and was verified, at `offset`; raises OSError. The chunk ends the file, or
        has a length of whole sectors, or its last block is written in the plain way."""
        if not self.works or len(stored) == len(data) or len(data) < ENCODED_MIN or offset % self._sector:
            pwrite_all(fd, data, offset)
            return
        view, plain_from = memoryview(data), 0
        for at, frame, length in self._frames(stored, len(data)):
            if self._write_frame(fd, offset + at, frame, length):
                if plain_from < at:
                    pwrite_all(fd, view[plain_from:at], offset + plain_from)
                plain_from = at + length
        if plain_from < len(data):
            pwrite_all(fd, view[plain_from:], offset + plain_from)

    def _frames(self, stored: bytes | memoryview, length: int) -> Iterator[tuple[int, bytes, int]]:
        """Offset, frame and length of the blocks that may be worth it."""
        at = 0
        for block, size in chunk_blocks(stored, length):
            if len(block) + self._sector <= size:
                frame = bytes(block)
                parameters = zstandard.get_frame_parameters(frame)
                if parameters.window_size <= BLOCK_SIZE and parameters.dict_id == 0:
                    yield at, frame, size
            at += size

    def _write_frame(self, fd: int, offset: int, frame: bytes, length: int) -> bool:
        if not self.works:
            return False
        address = ctypes.cast(ctypes.c_char_p(frame), ctypes.c_void_p).value or 0
        vector = ctypes.create_string_buffer(_IOVEC.pack(address, len(frame)), _IOVEC.size)
        arguments = _ARGUMENTS.pack(ctypes.addressof(vector), 1, offset, 0, length, length, 0, _ZSTD, 0)
        try:
            written = fcntl.ioctl(fd, _ENCODED_WRITE, bytearray(arguments))
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                log.warning("contents are written decompressed, since Btrfs refuses encoded writes: %s", error)
                self.works = False
            elif error.errno not in _REFUSED:
                raise
            return False
        if written != len(frame):
            return False
        self.encoded_bytes += length
        return True
