"""Opening a file by its name where anything may be in its place: a FIFO would be waited for, for
ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegular(OSError):
    """What has the name is a FIFO, a socket, a device or a directory."""


def open_regular(path: Path | bytes, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading; `follow` says whether a symbolic link to one will do. Never
    waits. Raises NotRegular, and OSError as open(2) does."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device without a driver
            raise _not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_regular(path)
    return os.fdopen(handle, "rb")


def _not_regular(path: Path | bytes) -> NotRegular:
    return NotRegular(errno.EINVAL, "it is not a regular file", os.fspath(path))
