"""Whether two processes see the same directory at a path. Mount namespaces, chroot(2) and
containers give a process paths of its own: what an agent mounts may be nowhere for the process that
asked for it, or its path may lead elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class _Mount:
    """A line of mountinfo (proc(5)), whose paths are as they stand there."""

    number: int
    parent: int
    device: bytes
    root: bytes
    """The directory of the file system that is mounted."""
    point: bytes

    def place(self, point: bytes) -> tuple[bytes, bytes]:
        """Where a path below the mount point lies: file system, and directory in it."""
        return self.device, os.path.normpath(self.root + b"/" + os.path.relpath(point, self.point))


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where else the view at a path is mounted."""

    bound: tuple[int, ...]
    """A process of each mount namespace that has it, or a directory in it, at another place: of
    containers to which it was given, and of this namespace."""
    copied: bool
    """Whether another namespace has it at the same place, as each one that was copied meanwhile
    does."""


def elsewhere(target: Path) -> Elsewhere:
    """Where else what is seen at `target` (a real path) is mounted, be that a mount or a directory.
    Namespaces without processes are not found, and those of other users only by root."""
    spaces = list(_spaces())
    here = spaces[0][1] if spaces else []
    path = b"".join(b"\\%03o" % byte if byte in b" \t\n\\" else bytes([byte]) for byte in os.fsencode(target))
    view = next((mount for mount in reversed(here) if mount.point == path), None)
    above = _above(here, path)
    if above is None:
        return Elsewhere((), False)
    own = above.place(path)
    shown = own if view is None else (view.device, view.root)
    bound, copied = [], False
    for pid, mounts in spaces:
        numbered = {mount.number: mount for mount in mounts}
        for mount in mounts:
            if mount is view or not _is_of(mount, *shown):
                continue
            on = numbered.get(mount.parent)
            if view is None or on is None or on.place(mount.point) != own:
                bound.append(pid)
                break
            copied = True
    return Elsewhere(tuple(bound), copied)


def _above(mounts: Sequence[_Mount], path: bytes) -> _Mount | None:
    """The mount in which the directory above a path is."""
    parents = (mount for mount in mounts if path.startswith(mount.point.rstrip(b"/") + b"/"))
    return max(parents, key=lambda mount: (len(mount.point), mount.number), default=None)


def _is_of(mount: _Mount, device: bytes, root: bytes) -> bool:
    """Whether what is mounted is a directory of a file system, or one below it."""
    return mount.device == device and (mount.root == root or mount.root.startswith(root.rstrip(b"/") + b"/"))


def _spaces() -> Iterator[tuple[int, list[_Mount]]]:
    """What is mounted in each mount namespace, that of this process first, and a process of it."""
    looked = set()
    for pid in (os.getpid(), *(int(name) for name in os.listdir("/proc") if name.isdecimal())):
        try:
            space = os.stat(f"/proc/{pid}/ns/mnt").st_ino
            if space not in looked:
                lines = Path(f"/proc/{pid}/mountinfo").read_bytes().split(b"\n")[:-1]
                looked.add(space)
                yield pid, [_mount(*line.split(b" ", 5)[:5]) for line in lines]
        except OSError:
            continue  # it has ended, or belongs to another user


def _mount(number: bytes, parent: bytes, device: bytes, root: bytes, point: bytes) -> _Mount:
    return _Mount(int(number), int(parent), device, root, point)
