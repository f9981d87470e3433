"""Placing a copy of a stored file somewhere else, atomically: the output appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from pathlib import Path

from p2pdist.model.errors import Conflict, NotFound
from p2pdist.store.disk import failures

FICLONE = 0x40049409
"""ioctl_ficlone(2): share the extents of another file."""

_STEP = 64 << 20
_UNSUPPORTED = {errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EPERM, errno.ETXTBSY}


def place(source: Path, fd: int, size: int, output: Path, *, hardlink: bool) -> str:
    """Give `output` the content of the read-only file `source`, open as `fd`, of `size` bytes; an existing file is replaced.

    Returns how: "reflink" where the filesystem can, else "hardlink" if asked for and possible, else "copy". Raises NotFound when the
    directory is missing, Conflict when `output` is a directory, DiskFull.
    """
    # The name is short and of our own making: the output's may be as long as names can be.
    temporary = output.parent / f".p2pdist-{secrets.token_hex(8)}"
    with failures(output, needed=size):
        if output.is_dir():
            raise Conflict(f"{output} is a directory", remedy="Name a file in it")
        if not output.parent.is_dir():
            raise NotFound(f"the directory {output.parent} does not exist", remedy="Create it first")
        try:
            how = _fill(source, fd, size, temporary, hardlink=hardlink)
            temporary.replace(output)
        finally:
            # Also after success: rename(2) does nothing when both names are links to one file.
            temporary.unlink(missing_ok=True)
    return how


def _fill(source: Path, fd: int, size: int, temporary: Path, *, hardlink: bool) -> str:
    target = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if _reflink(fd, target):
            return "reflink"
        if hardlink and _hardlink(source, temporary):
            return "hardlink"
        _copy(fd, target, size)
        return "copy"
    finally:
        os.close(target)


def _reflink(fd: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, FICLONE, fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def _hardlink(source: Path, temporary: Path) -> bool:
    link = temporary.with_name(temporary.name + "-link")
    try:
        os.link(source, link)
    except OSError as error:
        if error.errno not in _UNSUPPORTED | {errno.EMLINK}:
            raise
        return False
    link.replace(temporary)
    return True


def _copy(fd: int, target: int, size: int) -> None:
    """Copy inside the kernel; raises OSError, also when the source is shorter than `size`."""
    offset, whole = 0, False
    while offset < size:
        try:
            if whole:
                moved = os.sendfile(target, fd, offset, min(size - offset, _STEP))
            else:
                moved = os.copy_file_range(fd, target, min(size - offset, _STEP), offset, offset)
        except OSError as error:
            if whole or error.errno not in _UNSUPPORTED:
                raise
            whole = True
            os.lseek(target, offset, os.SEEK_SET)
            continue
        if moved == 0:
            raise OSError(errno.EIO, "the stored file is shorter than it was")
        offset += moved
