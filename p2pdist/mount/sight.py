"""Whether two processes see the same directory at a path. Mount namespaces, chroot(2) and
containers give a process paths of its own: what an agent mounts may be nowhere for the process that
asked for it, or its path may lead elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import chain, starmap
from pathlib import Path

from p2pdist.mount.kernel import unescaped

Identity = tuple[int, int]
"""Device and inode (stat(2)), which are the same in all mount namespaces of a host; (0, 0) for
nothing."""

NOTHING: Identity = (0, 0)

Place = tuple[bytes, bytes]
"""A file system, as mountinfo (proc(5)) numbers it, and a directory in it."""


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
    """A line of mountinfo (proc(5))."""

    number: int
    parent: int
    device: bytes
    """That of the file system, as it stands there."""
    root: bytes
    """The directory of the file system that is mounted."""
    point: bytes

    def place(self, path: bytes) -> Place:
        """Where a path at or below the mount point lies."""
        return self.device, os.path.normpath(os.path.join(self.root, os.path.relpath(path, self.point)))


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where else the view at a path is mounted."""

    bound: tuple[tuple[int, bytes], ...]
    """Of each mount namespace that has it, or a directory in it, at another place: a process, and
    the path there. Containers have been given it so. The process is 0 for this namespace."""
    copied: dict[int, tuple[bytes, ...]]
    """By number of another namespace: the paths there at which it is in the same directory as here,
    as all is that was mounted when the namespace was made."""


def elsewhere(target: Path) -> Elsewhere:
    """Where else what is seen at `target` (a real path) is mounted, be that a mount or a directory.
    Namespaces whose processes this one does not see are not found, nor, without root, those of
    other users. Raises OSError."""
    path, mine = os.fsencode(target), Path("/proc/self/mountinfo").read_bytes()
    here = {mount.number: mount for mount in starmap(_mount, _fields(mine))}
    views = [mount for mount in here.values() if mount.point == path]
    on = [here[view.parent] for view in views if view.parent in here] if views else _above(here.values(), path)
    own = {mount.place(path) for mount in on}
    if not own:
        return Elsewhere((), {})  # in a chroot(2) the mount above is not listed
    shown = (views[-1].device, views[-1].root) if views else own.pop()
    bound, copied = [], {}
    for space, pid, lines in chain([(0, 0, mine)], _others(shown[0])):
        copies, others = _split(lines, shown, own)
        if others:
            bound.append((pid, others[0]))
        elif copies and space:
            copied[space] = copies
    return Elsewhere(tuple(bound), copied)


def _split(lines: bytes, shown: Place, own: Set[Place]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Mount points of `shown`, or of a directory in it, in a namespace: those in the directory
    `own`, and all others."""
    fields = _fields(lines)
    found = [_mount(*each) for each in fields if each[2] == shown[0]]
    found = [mount for mount in found if _is_in(mount.root, shown[1])]
    parents = {b"%d" % mount.parent for mount in found}
    there = {int(each[0]): _mount(*each) for each in fields if each[0] in parents}

    def is_own(mount: _Mount) -> bool:
        on = there.get(mount.parent)  # None where that is above the root of the process
        return mount.point != b"/" if on is None else on.place(mount.point) in own

    return (
        tuple(mount.point for mount in found if is_own(mount)),
        tuple(mount.point for mount in found if not is_own(mount)),
    )


def namespace(pid: int | str) -> int:
    """The number of the mount namespace of a process. Raises OSError."""
    return os.stat(f"/proc/{pid}/ns/mnt").st_ino


def _above(mounts: Iterable[_Mount], path: bytes) -> list[_Mount]:
    """The mount in which a path is, at which nothing is mounted: of several at one point the last
    is the visible one."""
    above = sorted((mount for mount in mounts if _is_in(path, mount.point)), key=lambda mount: len(mount.point))
    return above[-1:]


def _is_in(path: bytes, directory: bytes) -> bool:
    return path == directory or path.startswith(directory.rstrip(b"/") + b"/")


def _others(device: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Number, a process and mountinfo of each other mount namespace in which a file system is
    mounted, one at a time: each may have thousands of mounts."""
    looked = {namespace("self")}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            space = namespace(pid)
            if space in looked:
                continue
            lines = Path(f"/proc/{pid}/mountinfo").read_bytes()
        except OSError:
            continue  # it has ended, or belongs to another user
        looked.add(space)
        if b" " + device + b" " in lines:
            yield space, pid, lines


def _fields(lines: bytes) -> list[list[bytes]]:
    """What `_mount` takes of each line of mountinfo, the oldest mount first."""
    return [line.split(b" ", 5)[:5] for line in lines.split(b"\n")[:-1]]


def _mount(number: bytes, parent: bytes, device: bytes, root: bytes, point: bytes) -> _Mount:
    return _Mount(int(number), int(parent), device, unescaped(root), unescaped(point))
