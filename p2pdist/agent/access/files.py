"""Files that only the agent's user may read, replaced whole."""

from __future__ import annotations

import os
from pathlib import Path

FILE_BYTES_MAX = 8 << 20


def make_private(directory: Path) -> None:
    """Make a directory that only its owner may enter; one that is there is tightened, and what a
    link leads to stays as it is: the link may be another's. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.is_symlink():
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 in place of the one that has the name, whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def read(path: Path) -> bytes:
    """What a file holds, up to FILE_BYTES_MAX; nothing where it does not exist. Raises OSError."""
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX)
    except FileNotFoundError:
        return b""
