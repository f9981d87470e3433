"""Whether two processes see the same directory at a path. Mount namespaces, chroot(2) and
containers give a process paths of its own: what an agent mounts may be nowhere for the process that
asked for it, or its path may lead elsewhere."""

from __future__ import annotations

import os

Identity = tuple[int, int]
"""Device and inode (stat(2)), which are the same in all mount namespaces of a host; (0, 0) for
nothing."""

NOTHING: Identity = (0, 0)


def seen(path: str | os.PathLike[str]) -> Identity | None:
    """What this process sees at `path`; None when it may not look there."""
    try:
        found = os.stat(path)
    except PermissionError:
        return None
    except OSError:
        return NOTHING
    return found.st_dev, found.st_ino


def differs(path: str | os.PathLike[str], other: Identity) -> bool:
    """Whether this process sees at `path` something else than the one that sees `other` there;
    False where one of the two does not say."""
    here = seen(path)
    return here is not None and other not in (NOTHING, here)
