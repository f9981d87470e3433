"""The lock of a store directory: one process uses it at a time."""

from __future__ import annotations

import fcntl
import os

from p2pdist.model.errors import Conflict
from p2pdist.store.paths import Paths


def lock_directory(paths: Paths) -> int:
    """Lock the store for this process; returns the descriptor that holds the lock, which the kernel
    drops when the process ends.

    Raises Conflict naming the process that has it, OSError.
    """
    fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise Conflict(
            f"the store {paths.root} is in use by process {holder}",
            remedy="Stop that agent, or give this one another store directory",
            pid=holder,
        ) from error
    except OSError:
        os.close(fd)
        raise
    return fd
