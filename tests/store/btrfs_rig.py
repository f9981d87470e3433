"""A Btrfs in a file, and what lies on it: read from the disk, and how it is stored."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from waits import wait_until

_FIEMAP = 0xC020660B
_REQUEST = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_SYNC = 1
_ENCODED = 8
_EXTENTS_MAX = 2000
_IMAGE_BYTES = 512 << 20


@contextlib.contextmanager
def mounted_btrfs(directory: Path) -> Iterator[Path]:
    """A Btrfs of 512 MiB, mounted below `directory`; skips the test where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("mkfs.btrfs is not installed")
    image, target = directory / "image", directory / "btrfs"
    target.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(target)], check=True, capture_output=True)
        yield target
    finally:
        if target.is_mount():
            # Lazily: a failed test may have files open, and neither mount nor loop device may stay.
            subprocess.run(["umount", "-l", str(target)], check=True)
        image.unlink(missing_ok=True)


def drop_caches(path: Path) -> None:
    """Have what follows come from the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def mount_again(btrfs: Path) -> None:
    """Have nothing of it in memory. No file of it may be open."""
    with _unmounted(btrfs):
        pass


@contextlib.contextmanager
def _unmounted(btrfs: Path) -> Iterator[Path]:
    """The image, which nothing uses meanwhile: a mount namespace that another process has just made
    keeps a copy of the mount, and with it all that is in memory, until it ends."""
    image = btrfs.parent / "image"
    subprocess.run(["umount", str(btrfs)], check=True, capture_output=True)
    wait_until(lambda: not _has_loop_device(image), "the end of a mount in another namespace")
    yield image
    subprocess.run(["mount", "-o", "loop", str(image), str(btrfs)], check=True, capture_output=True)


def _has_loop_device(image: Path) -> bool:
    found = subprocess.run(["losetup", "--associated", str(image)], check=True, capture_output=True)
    return bool(found.stdout.strip())


def lose(btrfs: Path, data: bytes) -> None:
    """Have the disk turn bytes, not all zeros, that lie on it in one piece: the file system cannot
    read the block that they are in any more. No file of it may be open."""
    with _unmounted(btrfs) as image, image.open("r+b") as file:
        found = [at for begin, end in _written(file) for at in _places(file, data, begin, end)]
        assert found
        for at in found:  # also where an earlier copy is left
            os.pwrite(file.fileno(), bytes(len(data)), at)


def _written(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Begin and end of what is no hole: all but a few MiB of a new image are."""
    end, size = 0, os.fstat(file.fileno()).st_size
    while end < size:
        try:
            begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
        except OSError as error:
            assert error.errno == errno.ENXIO
            return
        end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
        yield begin, end


def _places(file: BinaryIO, data: bytes, begin: int, end: int) -> Iterator[int]:
    """Where a stretch of the file has these bytes."""
    read = os.pread(file.fileno(), end - begin, begin)
    at = read.find(data)
    while at >= 0:
        yield begin + at
        at = read.find(data, at + len(data))


def extents(path: Path) -> list[tuple[int, int, bool]]:
    """Offset and length of a file's extents, and whether each is compressed (ioctl FS_IOC_FIEMAP,
    linux/fiemap.h)."""
    asked = bytearray(_REQUEST.size + _EXTENTS_MAX * _EXTENT.size)
    _REQUEST.pack_into(asked, 0, 0, (1 << 64) - 1, _SYNC, 0, _EXTENTS_MAX, 0)
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _FIEMAP, asked)
    finally:
        os.close(fd)
    count = _REQUEST.unpack_from(asked)[3]
    assert count < _EXTENTS_MAX
    found = _EXTENT.iter_unpack(asked[_REQUEST.size : _REQUEST.size + count * _EXTENT.size])
    return [(row[0], row[2], bool(row[5] & _ENCODED)) for row in found]


def compressed_bytes(path: Path) -> int:
    """Of the file, in whole sectors."""
    return sum(length for _, length, compressed in extents(path) if compressed)
