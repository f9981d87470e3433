"""Mounted views of packages: the choice of the mount method, mounting, and undoing it.

Methods for packages of squashfs layers alone, best first: "squashfs" (one layer that is not written
to) and "overlay", which need the right to mount; "userns" (`p2pdist.mount.userns`), a view that one
program alone sees; "unpack", which needs no right at all. For packages with trees: "erofs", an
overlay of EROFS images and squashfs layers over the objects of the store, which needs root and
Linux 6.12; then plain files, those of trees by "reflink", "hardlink" or "copy"
(`p2pdist.mount.files.tree`). Without root a user namespace mounts no EROFS, so such a package
becomes plain files that every user sees.

Every mount is nosuid and nodev. A record is on disk before anything is mounted, so a later process
finds what a killed one left.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from p2pdist.model.errors import Conflict, DiskFull, NotFound, P2PDistError, Refused, UsageError, foreseen, remedy_of
from p2pdist.model.manifest import LAYERS_MAX
from p2pdist.model.messages import MOUNT_METHODS
from p2pdist.mount import kernel
from p2pdist.mount.files import materialization
from p2pdist.mount.layers import Layer, SquashfsLayer, TreeLayer, prepare
from p2pdist.mount.overlay import NoUpper, mount_layers
from p2pdist.mount.program import is_held
from p2pdist.mount.records import (
    HOLDERS_MAX,
    IMAGES,
    LAZY,
    Process,
    Record,
    are_covered,
    holders,
    holders_of_copies,
    is_ours,
    is_whole,
    named,
    new_id,
    note_files,
    parse_process,
    records,
    run_from,
    save,
    take_down,
    views_at,
)
from p2pdist.mount.sight import elsewhere
from p2pdist.mount.squashfs import Image, inspect
from p2pdist.removal import remove_tree

_MOUNTED = ("overlay", "erofs")
_OF_TREES = ("erofs", *materialization.METHODS)
_NO_RIGHT = {errno.EPERM, errno.EACCES, errno.ENODEV, errno.ENOENT, errno.ENXIO, errno.ENOSYS}
"""Errors of mount(2) and the loop devices which mean that this process cannot mount on this
host."""

_NO_TREES = _NO_RIGHT | {errno.ENOTBLK, errno.EINVAL, errno.EOPNOTSUPP}
"""Further ones, of kernels that mount no EROFS image from a file (before 6.12) or know no data-only
layers (before 6.5), and of file systems that these cannot be on."""

HANGS_S, HANGS_AGAIN_S = 5.0, 0.1
"""The file systems of views that an earlier process left have so long to answer: the first one that
does not, and each one after it."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
_OF_MACHINES = {errno.EIO, errno.EUCLEAN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that another directory does not help against."""

_FILES_BYTES = 1 << 20
"""More than the record, mount points and, but of the largest trees, the image of a view take."""


@dataclass(frozen=True, slots=True)
class MountedView:
    """A package that is visible."""

    path: Path
    method: str
    """squashfs or one of MOUNT_METHODS."""
    why: str
    """One line that says which method and why."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A view that an earlier process mounted."""

    path: Path
    removed: bool
    """False when it is still mounted, or could not be removed; `note` says why then."""
    label: str = ""
    method: str = ""
    note: str = ""
    writable: bool = False
    owner: Process | None = None
    """The process for which it was made, None when it stays until it is unmounted."""
    images: tuple[str, ...] = ()
    later: Future[Leftover] | None = None
    """Gets what became of it where its file system did not answer."""


def mount_view(
    layers: Sequence[Layer | Path],
    target: Path,
    *,
    work: Path,
    writable: bool = False,
    method: str | None = None,
    label: str = "",
    checked: bool = False,
    at: int | None = None,
    owner: Process | None = None,
) -> MountedView:
    """Make `layers`, bottom to top, visible at `target`, an empty directory or a name for a new
    one; a path is a squashfs image.

    `work` is an existing directory for records, layer mount points and what is written; one process
    at a time may use it. `method` is the only one to try. `checked`: the caller has looked at the
    objects of all trees. `at` is a descriptor of the directory `target` where another user may move
    it: it is mounted on, whatever the path leads to meanwhile, and never written into. `owner` is
    the process for which it is made: what was started from the view counts as using it. Raises
    Corrupt for a layer that is no squashfs, or an object that is not as its tree states, Conflict
    for a target in use, UsageError, NotFound, Refused where nothing can be mounted `at` a place,
    DiskFull or P2PDistError; then nothing is left behind.
    """
    if method not in (None, *MOUNT_METHODS):
        raise UsageError(
            f"{method!r} is no way to show a package here", remedy=f"Use one of {', '.join(MOUNT_METHODS)}"
        )
    if not 1 <= len(layers) <= LAYERS_MAX:
        raise UsageError(f"a package of {len(layers)} layers cannot be shown", remedy=f"It must have 1 to {LAYERS_MAX}")
    trees = any(isinstance(layer, TreeLayer) for layer in layers)
    if method in _OF_TREES and not trees:
        raise UsageError(f"{method} is for packages with trees, and this has none", remedy="Use overlay or unpack")
    known = [_inspected(layer) for layer in layers]
    package = _Package(known, check_target(target, at), work.resolve(), writable, label, checked, at, owner)
    blocked = "" if method in (None, *_MOUNTED) else "as asked for"
    if method is None and os.geteuid() != 0:
        blocked = "not root"
    try:
        if not blocked:
            for layer in package.layers:
                if isinstance(layer, TreeLayer):
                    prepare(layer, checked=checked)
            try:
                return _mount(package)
            except OSError as error:
                possible = error.errno not in (_NO_TREES if trees else _NO_RIGHT)
                if method or (possible and not isinstance(error, NoUpper)):
                    raise
                blocked = f"mounting is not possible here ({error.strerror})"
        if at is not None:
            raise Refused(
                f"the package could be shown at {target} as plain files alone ({blocked}), which are not made for another user",
                remedy="Leave out the directory: the agent then makes one of its own",
            )
        return _materialize(package, None if method == "unpack" else method, blocked)
    except OSError as error:
        raise failed(package.target, error, package.work) from error


@dataclass(frozen=True, slots=True)
class _Package:
    """What is to be mounted, and where."""

    layers: Sequence[Image | TreeLayer]
    target: Path
    work: Path
    writable: bool
    label: str
    checked: bool
    at: int | None
    owner: Process | None

    @property
    def place(self) -> Path:
        """Where to mount."""
        return self.target if self.at is None else Path(f"/proc/self/fd/{self.at}")

    def record(self, method: str) -> Record:
        images = (layer.image if isinstance(layer, TreeLayer) else layer.path for layer in self.layers)
        owner = str(self.owner or "")
        return Record(
            new_id(),
            str(self.target),
            method,
            tuple(map(str, images)),
            label=self.label,
            writable=self.writable,
            owner=owner,
        )


def _inspected(layer: Layer | Path) -> Image | TreeLayer:
    if isinstance(layer, TreeLayer):
        return replace(layer, image=Path(os.path.abspath(layer.image)))
    path = layer.path if isinstance(layer, SquashfsLayer) else layer
    return inspect(path.resolve())


def check_target(target: Path, at: int | None) -> Path:
    """The real path of a target, which is an empty directory or does not exist; `at` as in
    `mount_view`. Raises Conflict, NotFound, P2PDistError."""
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
    except OSError as error:
        known = None if isinstance(error, PermissionError) else foreseen(error, str(target))
        raise known or failed(target, error) from error
    return target


def failed(target: Path, error: OSError, work: Path | None = None) -> P2PDistError:
    """The failure to show a package at `target`. An error that names no file is of a write to one
    in `work`, if that is given."""
    place = os.fsdecode(error.filename or work or target)
    if error.errno in _FULL and (full := _disk_full(Path(place), error)):
        return full
    remedy = "Name another directory, or see that the agent may write there and mount"
    of_store = work is not None and Path(place).is_relative_to(work)
    if error.errno in _OF_MACHINES or (error.errno == errno.EROFS and of_store):
        remedy = remedy_of(error)
    if isinstance(error, NoUpper):
        remedy = "Leave out --how, or give the agent a --store on another file system"
    kind = Conflict if error.filename and place == str(target) else P2PDistError  # which the user named
    return kind(f"the package cannot be shown at {target}: {place}: {error.strerror or error}", remedy=remedy)


def _disk_full(place: Path, error: OSError) -> DiskFull | None:
    """The failure of a write at a place where no room is left; None where there is some: mount(2)
    says the same of too many mounts."""
    directory = place if place.is_dir() else place.parent
    try:
        space = os.statvfs(directory)
    except OSError:
        return None
    full = DiskFull.on(str(directory), space, needed=_FILES_BYTES, code=error.errno, kept=False)
    return full if "short_of" in full.details or full.details["free"] < _FILES_BYTES else None


def begin(record: Record, work: Path) -> Record:
    """Write the record, then make its directory, and the target if that is missing. Raises
    OSError."""
    record = replace(record, created=not os.path.lexists(record.target))
    save(record, work)
    record.directory(work).mkdir(mode=0o700)
    if record.created and not record.staging:
        os.mkdir(record.target, 0o755)
    return record


def _mount(package: _Package) -> MountedView:
    layers, trees = package.layers, sum(isinstance(layer, TreeLayer) for layer in package.layers)
    straight = len(layers) == 1 and not trees and not package.writable
    method = "erofs" if trees else "squashfs" if straight else "overlay"
    record = package.record(method)
    try:
        record = begin(record, package.work)
        directory = record.directory(package.work)
        mount_layers(layers, directory, package.place, source=record.source, writable=package.writable)
    except BaseException:
        take_down(record, package.work, lazily=True)
        raise
    if straight:
        return MountedView(package.target, method, "squashfs: root, one layer that is not written to")
    count = f"{len(layers)} layers" if len(layers) > 1 else "1 layer"
    kinds = f" ({trees} of them trees)" if 0 < trees < len(layers) else ""
    return MountedView(
        package.target, method, f"{method}: root, {count}{kinds}, {'writable' if package.writable else 'read-only'}"
    )


def _materialize(package: _Package, method: str | None, blocked: str) -> MountedView:
    record = package.record("unpack")
    # Beside the target, so that the tree appears there by one rename.
    staging = package.target.parent / f".p2pdist-{record.id}"
    record = replace(record, staging=str(staging))
    try:
        record = begin(record, package.work)
        staging.mkdir(mode=0o700)
        made = materialization.materialize(
            package.layers, staging, writable=package.writable, method=method, checked=package.checked
        )
        record = note_files(replace(record, method=made.method), made.path, package.work)
        save(record, package.work)
        made.path.rename(package.target)
    except BaseException:
        take_down(record, package.work)
        raise
    remove_tree(staging)
    return MountedView(package.target, made.method, f"{made.method}: {blocked}; {made.note}")


def hand_out(
    name: str, images: Sequence[str], *, work: Path, label: str, writable: bool, owner: Process | None
) -> None:
    """Write down that a process has `images` under `name`, for a later agent; `unmount_view`
    forgets it."""
    record = Record(new_id(), name, IMAGES, tuple(images), label=label, writable=writable, owner=str(owner or ""))
    save(record, work.resolve())


def unmount_view(target: Path | str, *, work: Path, force: bool = False) -> None:
    """Undo `mount_view` at `target`, or `hand_out`. Raises NotFound when nothing of `work` is shown
    there, Conflict when it is in use; `force` takes it out of sight at once and lets the processes
    that use it keep what they have open."""
    work = work.resolve()
    recorded = {record.target: record for record in records(work)}
    record = recorded.get(str(target)) or recorded.get(os.path.realpath(target))
    if record is None:
        raise NotFound(f"no package is shown at {target}", remedy="p2pdist status lists what is shown")
    _undo(record, work, force=force)


def _undo(record: Record, work: Path, *, force: bool) -> None:
    target = Path(record.target)
    _require_in_place(record, work)
    if record.staging or not force:  # else it goes out of sight with what is mounted below it
        _require_nothing_below(record, work)
    if record.method != IMAGES and not force:
        _require_unused(record, target, work)
    try:
        take_down(record, work, lazily=force)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _in_use(target, holders(target)) from error
        raise P2PDistError(f"{target} cannot be unmounted: {error.filename}: {error.strerror}") from error


def _require_in_place(record: Record, work: Path) -> None:
    """Raises Conflict for a mount that is elsewhere by now, because a directory above it got
    another name, or below a mount of others."""
    if record.method == IMAGES or record.staging:
        return
    if is_whole(record, work):
        visible = kernel.mounted_at(Path(record.target))
        if visible is not None and not is_ours(record, visible):
            raise Conflict(
                f"{visible.source} ({visible.kind}) is mounted over what is shown at {record.target}",
                remedy=f"Unmount that first: umount {record.target}",
            )
        return
    targets = {other.target for other in records(work)}
    for entry in kernel.mounted():
        alike = is_ours(record, entry) and entry.kind == ("squashfs" if record.method == "squashfs" else "overlay")
        if alike and str(entry.point) not in targets and work not in entry.point.parents:
            raise Conflict(
                f"what was shown at {record.target} is now at {entry.point}",
                remedy=f"Give the directory its name back, or first unmount it there: umount {entry.point}",
            )


def _require_nothing_below(record: Record, work: Path) -> None:
    """Raises Conflict where something is mounted below a view: of plain files those would be
    removed that can be, and the others stay."""
    if record.method == IMAGES or not is_whole(record, work):
        return
    target = Path(record.target)
    below = next((entry.point for entry in kernel.mounted() if target in entry.point.parents), None)
    if below is not None:
        ours = any(other.target == str(below) for other in records(work))
        raise Conflict(
            f"{below} is mounted below what is shown at {target}",
            remedy=f"Unmount that first: {'p2pdist umount' if ours else 'umount'} {below}",
        )


def _require_unused(record: Record, target: Path, work: Path) -> None:
    """Raises Conflict for what the kernel would let go although it is in use: plain files, the
    cover of a lazy view, a view whose programs have nothing open, and one that another mount shows
    as well, which would lack what the store lets go."""
    of_run = bool(record.owner)
    covered = record.method == LAZY and are_covered(views_at(record))
    hidden = record.staging or covered
    if (of_run and (is_held(target) or run_from(target))) or (hidden and holders(target)):
        raise _in_use(target, holders(target, of_run=of_run))
    lost = record.staging or record.method == "erofs" or (record.method == LAZY and not covered)
    if lost and is_whole(record, work):  # else what is there by now is none of ours
        other = elsewhere(target)
        users = [*map(_binder, other.bound), *holders_of_copies(other.copied)]
        if users:
            raise _in_use(target, users[:HOLDERS_MAX])


def _binder(bound: tuple[int, bytes]) -> str:
    """What has bound a view, for a message (`Elsewhere.bound`)."""
    pid, point = bound
    where = point.decode(errors="replace")
    return f"{named(pid)} at {where}" if pid else f"the mount at {where}"


def _in_use(target: Path, users: list[str]) -> Conflict:
    by = f"Used by {', '.join(users)}. " if users else ""
    return Conflict(f"{target} is in use", remedy=f"{by}End what uses it, or use --force", users=users)


def clean_leftovers(work: Path) -> list[Leftover]:
    """Remove what an earlier process had not finished, what is no longer there, as after a restart
    of the machine, and views whose process and programs have ended. All else stays as it is: a
    program that sees it may have nothing open. Mounts of others are never touched. A file system
    that hangs, as one whose server is away, holds up the one record alone. Returns everything that
    was recorded."""
    work = work.resolve()
    leftovers, patience_s = [], HANGS_S
    for record in records(work):
        cleaning: Future[Leftover] = Future()
        threading.Thread(target=_clean, args=(record, work, cleaning), daemon=True).start()
        try:
            leftovers.append(cleaning.result(patience_s))
        except TimeoutError:
            patience_s = HANGS_AGAIN_S
            hangs = _leftover(record, note="its file system does not answer")
            leftovers.append(replace(hangs, later=cleaning))
    return leftovers


def _clean(record: Record, work: Path, outcome: Future[Leftover]) -> None:
    outcome.set_running_or_notify_cancel()  # nobody cancels it from now on
    owner = parse_process(record.owner)
    try:
        if is_whole(record, work) and (owner is None or owner.alive):
            if record.staging:
                remove_tree(Path(record.staging))
            leftover = _leftover(record)
        else:
            _undo(record, work, force=False)
            leftover = replace(_leftover(record), removed=True)
    except (P2PDistError, OSError) as error:
        leftover = _leftover(record, note=str(error))
    except BaseException as error:
        outcome.set_exception(error)
        return
    outcome.set_result(leftover)


def _leftover(record: Record, note: str = "") -> Leftover:
    return Leftover(
        Path(record.target),
        False,
        record.label,
        record.method,
        note,
        record.writable,
        parse_process(record.owner),
        record.images,
    )
