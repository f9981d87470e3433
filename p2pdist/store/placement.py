"""Placing a copy of a stored file somewhere else, atomically: the output appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from p2pdist.model.errors import Conflict, NotFound
from p2pdist.store.disk import failures

FICLONE = 0x40049409
"""ioctl_ficlone(2): share the extents of another file."""

_STEP = 64 << 20
_UNSUPPORTED = {errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EPERM, errno.ETXTBSY}


def place(fd: int, size: int, output: Path) -> str:
    """Give `output` the content of the file open as `fd`, of `size` bytes, as a file of its own: what is written into it changes no other.
    An existing file is replaced.

    Returns how: "reflink" where the filesystem can, else "copy". Raises NotFound when the directory is missing, Conflict when `output` is a
    directory or a device, DiskFull.
    """
    # The name is short and of our own making: the output's may be as long as names can be.
    temporary = f".p2pdist-{secrets.token_hex(8)}"
    with failures(output, needed=size):
        try:
            # All happens in this directory, whatever its path leads to meanwhile.
            directory = os.open(output.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"the directory {output.parent} does not exist", remedy="Create it first") from error
        try:
            _check_replaceable(output, directory)
            try:
                how = _fill(fd, size, temporary, directory)
                os.replace(temporary, output.name, src_dir_fd=directory, dst_dir_fd=directory)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=directory)
        finally:
            os.close(directory)
    return how


def _check_replaceable(output: Path, directory: int) -> None:
    """Raises Conflict where replacing `output` would lose more than a file."""
    try:
        mode = os.stat(output.name or ".", dir_fd=directory).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise Conflict(f"{output} is a directory", remedy="Name a file in it")
    if not stat.S_ISREG(mode):
        raise Conflict(f"{output} is no file but a device, pipe or socket", remedy="Name a file")


def _fill(fd: int, size: int, name: str, directory: int) -> str:
    target = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=directory)
    try:
        if _reflink(fd, target):
            return "reflink"
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
