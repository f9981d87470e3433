"""Removal of directories with all that is in them, whatever it is.

Works with descriptors, so that no name is looked up twice and no link is followed, and neither
depth nor the length of paths has a limit. It goes down and up again and moves nothing: an entry at
another place may take a block, and a full disk, which makes what is removed, has none. Each
directory that is not empty is first tried to be removed: of a place where something is mounted
that says so, and nothing that is mounted there is ever removed.
"""

from __future__ import annotations

import errno
import os
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
    """Empty the directory that is open as `top`: down to what is in it and up again, by one
    descriptor at a time."""
    device = os.fstat(top).st_dev
    directory = os.dup(top)
    above: list[tuple[bytes, os.stat_result, list[bytes]]] = []
    """Of each directory from the top to this one: the name of the next, what stat(2) says, and
    which directories in it are left."""
    try:
        left = _clear(directory)
        while left or above:
            if left:
                name = left.pop()
                if not _is_gone(name, directory):
                    child = _open(name, directory, device)
                    above.append((name, os.fstat(directory), left))
                    os.close(directory)
                    directory = child
                    left = _clear(directory)
                continue
            name, status, left = above.pop()
            parent = os.open("..", os.O_RDONLY | _OPEN, dir_fd=directory)
            os.close(directory)
            directory = parent
            if not os.path.samestat(os.fstat(directory), status):
                raise OSError(errno.ENOENT, "it was moved while it was removed", name)
            os.rmdir(name, dir_fd=directory)
    except OSError as error:
        where = os.path.join(path, *(name for name, _, _ in above), os.fsencode(error.filename or b""))
        raise OSError(error.errno, error.strerror, where) from error
    finally:
        os.close(directory)


def _clear(directory: int) -> list[bytes]:
    """Remove what is no directory; returns the names of the directories that are left."""
    with os.scandir(directory) as found:
        children = [(os.fsencode(child.name), child.is_dir(follow_symlinks=False)) for child in found]
    for name, is_directory in children:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
    return [name for name, is_directory in children if is_directory]


def _is_gone(name: bytes, directory: int) -> bool:
    """Remove a directory that is empty. Raises OSError with EBUSY for a place where something is
    mounted, which rmdir(2) looks for first, also of the same file system."""
    try:
        os.rmdir(name, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
