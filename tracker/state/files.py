"""Files of a tracker's state, for its user alone."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

OWN = (".sqlite", ".sqlite-wal", ".sqlite-shm")
"""How the names of these files end."""


def make_private(database: Path) -> None:
    """Make the file of an SQLite database, and its directory, for their owner alone; files that
    are there are tightened, and the directory where it holds nothing else. What is another user's,
    or a link, stays as it is. Raises OSError."""
    database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _tighten_directory(database.parent)
    for ending in ("", "-wal", "-shm"):
        path = database.with_name(database.name + ending)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if not ending else 0)
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOENT):
                continue
            raise
        try:
            _tighten(descriptor, 0o600)
        finally:
            os.close(descriptor)


def _tighten_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if all(name.endswith(OWN) for name in os.listdir(descriptor)):
            _tighten(descriptor, 0o700)
    finally:
        os.close(descriptor)


def _tighten(descriptor: int, mode: int) -> None:
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & ~mode:
        os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & mode)
