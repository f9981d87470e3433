"""Directories in which this user alone decides what lies where.

The environment may be another user's: root keeps it with `su` and `sudo -E`, and TMPDIR, HOME or
XDG_RUNTIME_DIR then lead where that user can rename what root has made, and put something else in
its place.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from p2pdist.model.errors import Refused

_SHARED = ("/tmp", "/var/tmp")  # noqa: S108 - taken only where they are sticky


def is_safe(directory: Path | str) -> bool:
    """Whether no other user but root can rename or replace what this user makes in a directory: it
    and all directories above belong to root or this user, and where other users may write the
    sticky bit is set. False for a directory that does not exist. Inside a user namespace the owner
    of / has the place of root, for what is above and for sticky directories."""
    user, host = os.geteuid(), os.stat("/").st_uid
    try:
        path = Path(os.path.realpath(directory, strict=True))
        for above in (path, *path.parents):
            found = os.lstat(above)
            sticky = bool(found.st_mode & stat.S_ISVTX)
            owned = found.st_uid in (0, user) or (found.st_uid == host and (sticky or above != path))
            if not (stat.S_ISDIR(found.st_mode) and owned and (sticky or not found.st_mode & 0o022)):
                return False
    except OSError:
        return False
    return True


def scratch_parent(*, first: str = "") -> Path:
    """Where this user may make temporary directories that no other user can change: `first`, else
    where temporary files go (TMPDIR), else /tmp or /var/tmp. Raises Refused where none will do."""
    for directory in dict.fromkeys((*filter(None, [first]), tempfile.gettempdir(), *_SHARED)):
        if is_safe(directory) and os.access(directory, os.W_OK | os.X_OK):
            return Path(os.path.realpath(directory))
    raise Refused(
        f"other users can change what this user would put into {tempfile.gettempdir()}",
        remedy="Set TMPDIR to a directory that this user alone can write to",
    )


def scratch_directory(prefix: str, *, first: str = "") -> Path:
    """A new directory of mode 0700 in `scratch_parent`, which says what is raised."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=scratch_parent(first=first)))
