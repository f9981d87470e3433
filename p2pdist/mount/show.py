"""Showing a package: picks the way, and undoes it.

Ways, best first, for packages of squashfs layers alone: "squashfs" (one layer that is not written to) and "overlay", which need the
right to mount; "userns" (see `p2pdist.mount.userns`), which shows a package to one program only; "unpack", which needs no right at all.
For packages with trees: "erofs", an overlay of EROFS images and squashfs layers over the objects of the store, which needs root and
Linux 6.12; then plain files, those of trees by "reflink", "hardlink" or "copy" (see `p2pdist.mount.tree_files`). Without root a user
namespace mounts no EROFS, so such a package is shown as plain files to everybody. Every mount is nosuid and nodev. A record is on disk
before anything is mounted, so nothing is lost sight of when the process is killed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from p2pdist.model.errors import Conflict, NotFound, P2PDistError, Refused, UsageError
from p2pdist.model.messages import WAYS_TO_SHOW
from p2pdist.model.package import LAYERS_MAX
from p2pdist.mount import kernel, materialize
from p2pdist.mount.holders import holders
from p2pdist.mount.layers import Layer, SquashfsLayer, TreeLayer, prepare
from p2pdist.mount.overlay import mount_layers
from p2pdist.mount.record import Record, new_id, records, save, take_down
from p2pdist.mount.removal import remove_tree
from p2pdist.mount.squashfs import Image, inspect

_MOUNTED = ("overlay", "erofs")
_OF_TREES = ("erofs", *materialize.WAYS)
_NO_RIGHT = {errno.EPERM, errno.EACCES, errno.ENODEV, errno.ENOENT, errno.ENXIO, errno.ENOSYS}
"""Errors of mount(2) and the loop devices that mean: not on this host, not by this process."""

_NO_TREES = _NO_RIGHT | {errno.ENOTBLK, errno.EINVAL, errno.EOPNOTSUPP}
"""Further ones, of kernels that mount no EROFS image from a file (before 6.12) or know no data-only layers (before 6.5), and of file
systems that these cannot be on."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A package is visible at `path`. `how` is squashfs or one of WAYS_TO_SHOW; `why` is one line saying which way and why."""

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
    layers: Sequence[Layer | Path],
    target: Path,
    *,
    work: Path,
    writable: bool = False,
    how: str | None = None,
    label: str = "",
    checked: bool = False,
    at: int | None = None,
) -> Shown:
    """Show `layers`, bottom to top, at `target`, an empty directory or a name for a new one; a path is a squashfs image.

    `work` is an existing directory for records, layer mount points and what is written; one process at a time may use it. `how` forces
    a way. `checked`: the caller knows that the objects of all trees are there. `at` is a descriptor of the directory `target` where
    another user may move it: it is mounted on, whatever the path leads to meanwhile, and never written into. Raises Corrupt for a layer
    that is no squashfs, or an object that is not as its tree states, Conflict for a target in use, UsageError, NotFound, Refused where
    nothing can be mounted `at` a place, DiskFull or P2PDistError; then nothing is left behind.
    """
    if how not in (None, *WAYS_TO_SHOW):
        raise UsageError(f"{how!r} is no way to show a package here", remedy=f"Use one of {', '.join(WAYS_TO_SHOW)}")
    if not 1 <= len(layers) <= LAYERS_MAX:
        raise UsageError(f"a package of {len(layers)} layers cannot be shown", remedy=f"It must have 1 to {LAYERS_MAX}")
    trees = any(isinstance(layer, TreeLayer) for layer in layers)
    if how in _OF_TREES and not trees:
        raise UsageError(f"{how} is for packages with trees, and this has none", remedy="Use overlay or unpack")
    package = _Package(
        [_known(layer) for layer in layers], _check_target(target, at), work.resolve(), writable, label, checked, at
    )
    blocked = "" if how in (None, *_MOUNTED) else "as asked for"
    if how is None and os.geteuid() != 0:
        blocked = "not root"
    try:
        if not blocked:
            for layer in package.layers:
                if isinstance(layer, TreeLayer):
                    prepare(layer, checked=checked)
            try:
                return _mount(package)
            except OSError as error:
                if how or error.errno not in (_NO_TREES if trees else _NO_RIGHT):
                    raise
                blocked = f"mounting is not possible here ({error.strerror})"
        if at is not None:
            raise Refused(
                f"the package could be shown at {target} as plain files alone ({blocked}), which are not made for another user",
                remedy="Leave out the directory: the agent then makes one of its own",
            )
        return _materialize(package, None if how == "unpack" else how, blocked)
    except OSError as error:
        raise _failed(package.target, error) from error


@dataclass(frozen=True, slots=True)
class _Package:
    """What is to be shown, where and how."""

    layers: Sequence[Image | TreeLayer]
    target: Path
    work: Path
    writable: bool
    label: str
    checked: bool
    at: int | None

    @property
    def place(self) -> Path:
        """Where to mount."""
        return self.target if self.at is None else Path(f"/proc/self/fd/{self.at}")

    def record(self, how: str) -> Record:
        images = (layer.image if isinstance(layer, TreeLayer) else layer.path for layer in self.layers)
        return Record(new_id(), str(self.target), how, tuple(map(str, images)), label=self.label)


def _known(layer: Layer | Path) -> Image | TreeLayer:
    if isinstance(layer, TreeLayer):
        return replace(layer, image=Path(os.path.abspath(layer.image)))
    path = layer.path if isinstance(layer, SquashfsLayer) else layer
    return inspect(path.resolve())


def _check_target(target: Path, at: int | None) -> Path:
    target = Path(os.path.realpath(target)) if at is None else target
    try:
        if any(os.scandir(target if at is None else f"/proc/self/fd/{at}")) or kernel.mounted_at(target):
            raise Conflict(f"{target} is not an empty directory", remedy="Name an empty directory, or a new one")
    except FileNotFoundError as error:
        if not target.parent.is_dir():
            raise NotFound(
                f"{target.parent} does not exist", remedy="Create it first", directory=str(target.parent)
            ) from error
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


def _mount(package: _Package) -> Shown:
    layers, trees = package.layers, sum(isinstance(layer, TreeLayer) for layer in package.layers)
    straight = len(layers) == 1 and not trees and not package.writable
    how = "erofs" if trees else "squashfs" if straight else "overlay"
    record = package.record(how)
    try:
        record = _begin(record, package.work)
        directory = record.directory(package.work)
        mount_layers(layers, directory, package.place, source=record.source, writable=package.writable)
    except BaseException:
        take_down(record, package.work, lazily=True)
        raise
    if straight:
        return Shown(package.target, how, "squashfs: root, one layer that is not written to")
    count = f"{len(layers)} layers" if len(layers) > 1 else "1 layer"
    kinds = f" ({trees} of them trees)" if 0 < trees < len(layers) else ""
    return Shown(package.target, how, f"{how}: root, {count}{kinds}, {'writable' if package.writable else 'read-only'}")


def _materialize(package: _Package, how: str | None, blocked: str) -> Shown:
    record = package.record("unpack")
    # Beside the target, so that the tree appears there by one rename.
    staging = package.target.parent / f".p2pdist-{record.id}"
    record = replace(record, staging=str(staging))
    try:
        record = _begin(record, package.work)
        staging.mkdir(mode=0o700)
        made = materialize.materialize(
            package.layers, staging, writable=package.writable, how=how, checked=package.checked
        )
        record = replace(record, how=made.how, inode=made.path.lstat().st_ino)
        save(record, package.work)
        made.path.rename(package.target)
    except BaseException:
        take_down(record, package.work)
        raise
    remove_tree(staging)
    return Shown(package.target, made.how, f"{made.how}: {blocked}; {made.note}")


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
    if record.staging and not force and (users := holders(target)):
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
