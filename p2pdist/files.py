"""Small files that users and operators name, such as settings and tokens, read whole.

A name may lead to anything. A regular file takes no more memory than it has bytes, and never more
than its reader's limit. Opening waits for no writer of a FIFO, and what is no regular file is
refused: a device may give bytes for ever. A secret may come from a command, as from `<(command)`
in a shell: then a pipe is read until its writer closes it.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

PIPE_S = 10.0
"""The writer of a secret has so long."""


class NotRegular(OSError):
    """The name belongs to a FIFO, a socket, a device or a directory."""


def own_descriptor(path: Path) -> int | None:
    """The descriptor of this process that a path is a name of, such as /dev/stdout and /dev/fd/3;
    None for other paths. Where it leads to a file, the file itself must stay: what the process
    writes next goes on there."""
    own = f"/proc/{os.getpid()}/fd"
    for name in (path, Path(path.parent, os.readlink(path)) if path.is_symlink() else path):
        if name.name.isdecimal() and os.path.realpath(name.parent) == own:
            return int(name.name)
    return None


class FileContent(NamedTuple):
    """What a file holds, and its mode (stat(2))."""

    data: bytes
    mode: int


def open_regular(path: Path | bytes, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading; `follow` says whether a symbolic link to one will do. Never
    waits. Raises NotRegular, and OSError as open(2) does."""
    handle = _open(path, 0 if follow else os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_regular(path)
    return os.fdopen(handle, "rb")


def read_content(path: Path | bytes, bytes_max: int, *, pipe_s: float = 0.0) -> FileContent:
    """Read a file: at most a byte more than `bytes_max`, which tells a caller that it is larger. A
    pipe is read for `pipe_s`; 0: it is refused. Raises NotRegular, TimeoutError for a pipe whose
    writer does not end, and OSError as open(2) and read(2) do."""
    handle = _open(path, 0)
    try:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode):
            with os.fdopen(handle, "rb", closefd=False) as file:
                return FileContent(file.read(min(status.st_size, bytes_max) + 1), status.st_mode)
        if not (pipe_s and stat.S_ISFIFO(status.st_mode)):
            raise _not_regular(path)
        return FileContent(_read_pipe(handle, bytes_max, pipe_s, path), status.st_mode)
    finally:
        os.close(handle)


def decoded(data: bytes) -> str:
    """The text of a file in UTF-8, without the byte order mark that editors on Windows put first.
    Raises UnicodeDecodeError."""
    return data.decode("utf-8-sig")


def _open(path: Path | bytes, flags: int) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device without a driver
            raise _not_regular(path) from error
        raise


def _read_pipe(handle: int, bytes_max: int, pipe_s: float, path: Path | bytes) -> bytes:
    """What is written into a pipe until its writers close it."""
    data, until = b"", time.monotonic() + pipe_s
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while len(data) <= bytes_max:
        left_s = until - time.monotonic()
        if left_s <= 0 or not poll.poll(1000 * left_s):
            raise TimeoutError(errno.ETIMEDOUT, "it is a pipe that no process closes", os.fspath(path))
        try:
            more = os.read(handle, bytes_max + 1 - len(data))
        except BlockingIOError:
            continue
        if not more:
            break
        data += more
    return data


def _not_regular(path: Path | bytes) -> NotRegular:
    return NotRegular(errno.EINVAL, "it is not a regular file", os.fspath(path))
