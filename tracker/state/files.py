"""Files of a tracker's state, for its user alone."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from pathlib import Path

from p2pdist.model.errors import Corrupt, Unavailable

OWN = (".sqlite", ".sqlite-wal", ".sqlite-shm")
"""How the names of these files end."""


class StateDamaged(Unavailable):
    """A file of the state is damaged, or is none of SQLite. A tracker that has started goes on
    without what is in it; one that starts ends with this, and the exit code of what is corrupt."""

    slug, title, exit_code = Corrupt.slug, Corrupt.title, Corrupt.exit_code

    def __init__(self, path: str | Path, cause: object) -> None:
        super().__init__(
            f"{path}, of the tracker's state, is damaged: {cause}",
            remedy="Put its backup in its place, or move it away to go on without what it held",
        )


def is_damage(error: object) -> bool:
    """Whether SQLite says by `error` that the file is damaged or no database."""
    code = getattr(error, "sqlite_errorcode", 0)
    return isinstance(error, sqlite3.Error) and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


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
