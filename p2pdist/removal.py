"""Removal of directories with all that is in them, whatever it is.

Works with descriptors, so that no name is looked up twice and no link is followed, and neither
depth nor the length of paths has a limit: each directory that is found is first moved into the
topmost one, under a new name, and emptied there. A place where something is mounted cannot be
moved, so nothing of another file system is ever removed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

_OPEN = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path | str | bytes, *, keep: bool = False, dir_fd: int | None = None) -> None:
    """Remove the directory `path`, also where directories in it forbid writing; never follows links
    nor enters another file system. `keep` leaves the directory itself. A relative path is below the
    directory `dir_fd`. A missing directory is fine; raises OSError otherwise, EBUSY where something
    is mounted."""
    try:
        top = _open(os.fsencode(path), dir_fd)
    except FileNotFoundError:
        return
    try:
        _empty(top, os.fsencode(path))
    finally:
        os.close(top)
    if not keep:
        os.rmdir(path, dir_fd=dir_fd)


def _open(name: bytes, dir_fd: int | None, device: int | None = None) -> int:
    """Open a directory for reading, after giving its owner all rights to it."""
    handle = os.open(name, os.O_PATH | _OPEN, dir_fd=dir_fd)
    try:
        entry = os.fstat(handle)
        if device is not None and entry.st_dev != device:
            raise OSError(errno.EBUSY, "something is mounted there", name)
        if entry.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(entry.st_mode) | stat.S_IRWXU)
        return os.open(".", os.O_RDONLY | _OPEN, dir_fd=handle)
    finally:
        os.close(handle)


def _empty(top: int, path: bytes) -> None:
    device = os.fstat(top).st_dev
    token = secrets.token_hex(8)
    count = 0
    pending = [b""]  # the top itself; then names in it
    for name in pending:  # grows while it is walked
        directory = _open(name, top, device) if name else top
        try:
            with os.scandir(directory) as found:
                children = [(os.fsencode(child.name), child.is_dir(follow_symlinks=False)) for child in found]
            for child, is_directory in children:
                if not is_directory:
                    os.unlink(child, dir_fd=directory)
                    continue
                count += 1
                moved = f".{token}-{count}".encode()
                # To move a directory elsewhere takes the right to write to it.
                os.close(_open(child, directory, device))
                os.rename(child, moved, src_dir_fd=directory, dst_dir_fd=top)
                pending.append(moved)
        except OSError as error:
            raise OSError(
                error.errno, error.strerror, os.path.join(path, os.fsencode(error.filename or b""))
            ) from error
        finally:
            if directory != top:
                os.close(directory)
        if name:
            os.rmdir(name, dir_fd=top)
