"""Lazy views: EROFS images of a package's trees over one sparse device, merged by an overlay.

The images say all but the contents of files, which are in the device, a file with holes. Before the
kernel reads it, the supervisor is asked (fanotify.py), and answers once an agent has filled what is
read. Where nothing is there to be asked any more, the kernel reads what there is: holes are no
cells (model/device.py), and give EIO. Files of a view lie in the directory of its record: the
device, the images, the supervisor's socket and log, and a mark once the device lacks nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.device import Cells, DeviceLayout
from p2pdist.model.errors import Corrupt, Unavailable
from p2pdist.model.tree import Entry
from p2pdist.mount.erofs.writer import Device, mount_image, write_image
from p2pdist.mount.overlay import merge
from p2pdist.mount.records import LAZY, Process, Record, new_id, records, take_down
from p2pdist.mount.supervisor.process import LOG, READY_S
from p2pdist.mount.supervisor.protocol import DEVICE, MARK, dismiss
from p2pdist.mount.views import MountedView, begin, check_target, failed

_REMEDY = "They need root, Linux 6.14 with DEFLATE in EROFS, and a store on ext4, Btrfs or XFS; mount without --lazy"
_EMPTY = 0
"""The bottom layer of every view: an overlay that is not written to needs two."""


@dataclass(frozen=True, slots=True)
class LazyPackage:
    """The trees of a package, bottom to top, each by its entries in walking order, and where their
    contents lie in the device. A reader waits for `limit_s` at most."""

    trees: Sequence[Sequence[Entry]]
    layout: DeviceLayout
    limit_s: float
    cells: Cells


def mount_lazy(
    package: LazyPackage,
    target: Path,
    *,
    work: Path,
    writable: bool = False,
    label: str = "",
    at: int | None = None,
    owner: Process | None = None,
) -> MountedView:
    """Mount trees at `target` while none of their contents need be here; arguments are those of
    `mount_view`. From then on an agent must be connected to the supervisor (`view_directory`).
    Raises Unavailable where this host has no such views, Conflict for a target in use, and
    P2PDistError; then nothing is left behind."""
    target, work = check_target(target, at), work.resolve()
    record = Record(new_id(), str(target), LAZY, (), label=label, writable=writable, owner=str(owner or ""))
    try:
        try:
            record = begin(record, work)
            directory = record.directory(work)
            _supervise(package, directory)
            place = target if at is None else Path(f"/proc/self/fd/{at}")
            _mount(package, directory, place, source=record.source, writable=writable)
        except BaseException:
            dismiss(record.directory(work))
            take_down(record, work, lazily=True)
            raise
    except OSError as error:
        raise failed(target, error) from error
    count = f"{len(package.trees)} layers" if len(package.trees) > 1 else "1 layer"
    state = "writable" if writable else "read-only"
    return MountedView(target, LAZY, f"lazy: fanotify, {count}, {state}; contents come when they are read")


def view_directory(target: Path | str, work: Path) -> Path | None:
    """Where the files of the lazy view at `target` are; None where there is no such view."""
    work = work.resolve()
    found = [record for record in records(work) if record.target == str(target) and record.method == LAZY]
    return found[-1].directory(work) if found else None


def cells_of(directory: Path) -> Cells:
    """The cells of the device of the view with this directory."""
    return Cells(headed=True)


def is_filled(directory: Path) -> bool:
    """Whether the device of the view with this directory lacks nothing."""
    return (directory / MARK).exists()


def mark_filled(directory: Path) -> None:
    """Note that the device lacks nothing. Raises OSError."""
    (directory / MARK).touch()


def _supervise(package: LazyPackage, directory: Path) -> None:
    """Make the device and have it supervised. Raises Unavailable, OSError."""
    with (directory / DEVICE).open("xb") as device:
        device.truncate(package.cells.file_size(package.layout.size))
    supervise(directory, package.limit_s)


def supervise(directory: Path, limit_s: float, held: Sequence[int] = ()) -> None:
    """Start a supervisor; `held` are the descriptors, filler and group, of one that was killed, if
    there are any left. Raises Unavailable, OSError."""
    words = [sys.executable, "-P", "-m", "p2pdist.mount.supervisor.process", str(directory), str(limit_s)]
    words += map(str, held)
    with (directory / LOG).open("ab") as log:
        ended = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=held,
            start_new_session=True,
            timeout=READY_S,
            check=False,
        )
    if ended.returncode:
        reason = (directory / LOG).read_text(errors="replace").strip().splitlines()
        raise Unavailable(
            f"this host has no lazy views: {reason[-1] if reason else 'the supervisor ended'}",
            remedy=_REMEDY,
        )


def _mount(package: LazyPackage, directory: Path, place: Path, *, source: str, writable: bool) -> None:
    device = Device(package.layout.size, package.layout.first_blocks(), package.cells)
    (directory / str(_EMPTY)).mkdir()
    opened = os.open(directory / DEVICE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for number, entries in enumerate(package.trees, _EMPTY + 1):
            image = directory / f"{number}.erofs"
            write_image(entries, image, device)
            (directory / str(number)).mkdir()
            try:
                mount_image(image, directory / str(number), Path(f"/proc/self/fd/{opened}"))
            except (OSError, Corrupt) as error:  # the image is new, so the kernel is what lacks something
                reason = error.what if isinstance(error, Corrupt) else error.strerror
                raise Unavailable(f"this host has no lazy views: {reason}", remedy=_REMEDY) from error
    finally:
        os.close(opened)
    merge(directory, len(package.trees) + 1, place, source=source, uppers=directory if writable else None)
