"""Showing a package: picks the way, and undoes it.

Ways, best first: "squashfs" (one layer that is not written to) and "overlay", which need the right to mount; "userns" (see
`p2pdist.mount.userns`), which shows a package to one program only; "unpack", which needs no right at all. Every mount is nosuid and
nodev. A record is on disk before anything is mounted, so nothing is lost sight of when the process is killed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from p2pdist.model.errors import Conflict, NotFound, P2PDistError, UsageError
from p2pdist.model.package import LAYERS_MAX
from p2pdist.mount import kernel
from p2pdist.mount.holders import holders
from p2pdist.mount.overlay import mount_layers
from p2pdist.mount.record import Record, new_id, records, save, take_down
from p2pdist.mount.squashfs import Image, inspect
from p2pdist.mount.unpack import remove_tree, unpack

WAYS = ("overlay", "unpack")
_NO_RIGHT = {errno.EPERM, errno.EACCES, errno.ENODEV, errno.ENOENT, errno.ENXIO, errno.ENOSYS}
"""Errors of mount(2) and the loop devices that mean: not on this host, not by this process."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A package is visible at `path`. `how` is squashfs, overlay or unpack; `why` is one line saying which way and why."""

    path: Path
    how: str
    why: str


@dataclass(frozen=True, slots=True)
class Leftover:
    """What an earlier process left behind. `removed` is false when it is still in use, or could not be removed; `note` says why."""

    path: Path
    removed: bool
    label: str = ""
    how: str = ""
    note: str = ""


def show(
    layers: Sequence[Path], target: Path, *, work: Path, writable: bool = False, how: str | None = None, label: str = ""
) -> Shown:
    """Show `layers` (squashfs images, bottom to top) at `target`, an empty directory or a name for a new one.

    `work` is an existing directory for records, layer mount points and what is written; one process at a time may use it. `how` forces
    a way. Raises Corrupt for a layer that is no squashfs, Conflict for a target in use, UsageError, NotFound, DiskFull or P2PDistError;
    then nothing is left behind.
    """
    if how not in (None, *WAYS):
        raise UsageError(f"{how!r} is no way to show a package here", remedy=f"Use one of {', '.join(WAYS)}")
    if not 1 <= len(layers) <= LAYERS_MAX:
        raise UsageError(f"a package of {len(layers)} layers cannot be shown", remedy=f"It must have 1 to {LAYERS_MAX}")
    images = [inspect(path.resolve()) for path in layers]
    work = work.resolve()
    target = _check_target(target)
    blocked = "" if how != "unpack" else "as asked for"
    if how is None and os.geteuid() != 0:
        blocked = "not root"
    if not blocked:
        try:
            return _mount(images, target, work, writable, label)
        except OSError as error:
            if how == "overlay" or error.errno not in _NO_RIGHT:
                raise _failed(target, error) from error
            blocked = f"mounting is not possible here ({error.strerror})"
    try:
        _unpack(images, target, work, label)
    except OSError as error:
        raise _failed(target, error) from error
    return Shown(target, "unpack", f"unpack: {blocked}; a private copy of the files")


def _check_target(target: Path) -> Path:
    target = Path(os.path.realpath(target))
    try:
        if any(os.scandir(target)) or kernel.mounted_at(target):
            raise Conflict(f"{target} is not an empty directory", remedy="Name an empty directory, or a new one")
    except FileNotFoundError as error:
        if not target.parent.is_dir():
            raise NotFound(f"{target.parent} does not exist", remedy="Create it first") from error
    except NotADirectoryError as error:
        raise Conflict(f"{target} is not a directory", remedy="Name an empty directory, or a new one") from error
    except PermissionError as error:
        raise _failed(target, error) from error
    return target


def _failed(target: Path, error: OSError) -> P2PDistError:
    place = os.fsdecode(error.filename) if error.filename else str(target)
    return P2PDistError(
        f"the package cannot be shown at {target}: {place}: {error.strerror or error}",
        remedy="Name another directory, or see that the agent may write there and mount",
    )


def _begin(record: Record, work: Path) -> Record:
    """Write the record, then make the target if it is missing."""
    record = replace(record, created=not os.path.lexists(record.target))
    save(record, work)
    record.directory(work).mkdir(mode=0o700)
    if record.created and not record.staging:
        os.mkdir(record.target, 0o755)
    return record


def _mount(images: list[Image], target: Path, work: Path, writable: bool, label: str) -> Shown:
    straight = len(images) == 1 and not writable
    how = "squashfs" if straight else "overlay"
    record = Record(new_id(), str(target), how, tuple(str(image.path) for image in images), label=label)
    try:
        record = _begin(record, work)
        mount_layers(images, record.directory(work), target, source=record.source, writable=writable)
    except BaseException:
        take_down(record, work, lazily=True)
        raise
    if straight:
        return Shown(target, how, "squashfs: root, one layer that is not written to")
    return Shown(target, how, f"overlay: root, {len(images)} layers, {'writable' if writable else 'read-only'}")


def _unpack(images: list[Image], target: Path, work: Path, label: str) -> None:
    record = Record(new_id(), str(target), "unpack", tuple(str(image.path) for image in images), label=label)
    # Beside the target, so that the tree appears there by one rename.
    staging = target.parent / f".p2pdist-{record.id}"
    record = replace(record, staging=str(staging))
    try:
        record = _begin(record, work)
        staging.mkdir(mode=0o700)
        tree = unpack(images, staging)
        record = replace(record, inode=tree.lstat().st_ino)
        save(record, work)
        tree.rename(target)
    except BaseException:
        take_down(record, work)
        raise
    remove_tree(staging)


def unshow(target: Path, *, work: Path, force: bool = False) -> None:
    """Undo `show` at `target`. Raises NotFound when nothing of `work` is shown there, Conflict when it is in use; `force` takes it out
    of sight at once and lets the processes that use it keep what they have open."""
    work, target = work.resolve(), Path(os.path.realpath(target))
    record = next((record for record in records(work) if record.target == str(target)), None)
    if record is None:
        raise NotFound(f"no package is shown at {target}", remedy="p2pdist status lists what is shown")
    _undo(record, work, force=force)


def _undo(record: Record, work: Path, *, force: bool) -> None:
    target = Path(record.target)
    if record.how == "unpack" and not force and (users := holders(target)):
        raise _in_use(target, users)
    try:
        take_down(record, work, lazily=force)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _in_use(target, holders(target)) from error
        raise P2PDistError(f"{target} cannot be unmounted: {error.filename}: {error.strerror}") from error


def _in_use(target: Path, users: list[str]) -> Conflict:
    who = f"Used by {', '.join(users)}. " if users else ""
    return Conflict(f"{target} is in use", remedy=f"{who}End what uses it, or use --force", users=users)


def shown(work: Path) -> list[Leftover]:
    """What is recorded in `work`, whoever showed it."""
    return [Leftover(Path(found.target), False, found.label, found.how) for found in records(work.resolve())]


def clean_leftovers(work: Path) -> list[Leftover]:
    """Remove what a killed process left shown. What is in use stays, so that a program which outlived its agent goes on; `unshow`
    knows it. Mounts that are not ours are never touched."""
    work = work.resolve()
    found = []
    for record in records(work):
        try:
            _undo(record, work, force=False)
        except P2PDistError as error:
            found.append(Leftover(Path(record.target), False, record.label, record.how, str(error)))
        else:
            found.append(Leftover(Path(record.target), True, record.label, record.how))
    return found
