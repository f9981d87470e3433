"""Holds on a view: what a program inherits that runs from it, and its children, so that the agent
sees when the last one is gone, whatever ended them (flock(2))."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


def hold(target: Path) -> int | None:
    """A descriptor that keeps the view at `target` in use while any process has it open. None where
    this user may not read the view: its programs are then known by their environment alone."""
    try:
        directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(
        OSError
    ):  # a file system without locks; the open directory keeps a mount busy all the same
        fcntl.flock(directory, fcntl.LOCK_SH)
    return directory


def is_held(target: Path) -> bool:
    """Whether a process has what `hold` returned."""
    try:
        directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False  # it is not there any more
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(directory)
    return False
