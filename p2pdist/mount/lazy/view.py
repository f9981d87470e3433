"""Lazy views: EROFS images of a package's trees over one sparse device, merged by an overlay.

The images say all but the contents of files, which are in the device, a file with holes. What is
read of it waits until an agent has filled it; ways.py says what keeps readers waiting. Files of a
view lie in the directory of its record: the device, the images, the supervisor's socket and log,
and a mark once the device lacks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.device import DeviceLayout
from p2pdist.model.tree import Entry
from p2pdist.mount.erofs.writer import Device, mount_image, write_image
from p2pdist.mount.lazy.ways import FANOTIFY, Way, supervise
from p2pdist.mount.overlay import merge
from p2pdist.mount.records import LAZY, Process, Record, new_id, records, take_down
from p2pdist.mount.supervisor.protocol import DEVICE, MARK, dismiss
from p2pdist.mount.views import MountedView, begin, check_target, failed

_EMPTY = 0
"""The bottom layer of every view: an overlay that is not written to needs two."""


@dataclass(frozen=True, slots=True)
class LazyPackage:
    """The trees of a package, bottom to top, each by its entries in walking order, and where their
    contents lie in the device. A reader waits for `limit_s` at most."""

    trees: Sequence[Sequence[Entry]]
    layout: DeviceLayout
    limit_s: float


def mount_lazy(
    package: LazyPackage,
    target: Path,
    *,
    work: Path,
    way: Way = FANOTIFY,
    writable: bool = False,
    label: str = "",
    at: int | None = None,
    owner: Process | None = None,
) -> MountedView:
    """Mount trees at `target` while none of their contents need be here, which come in one `way`;
    other arguments are those of `mount_view`. From then on an agent must be connected to the supervisor (`view_directory`).
    Raises Unavailable where this host has no such views, Conflict for a target in use, and
    P2PDistError; then nothing is left behind."""
    target, work = check_target(target, at), work.resolve()
    record = Record(new_id(), str(target), LAZY, (), label=label, writable=writable, owner=str(owner or ""))
    try:
        try:
            record = begin(record, work)
            directory = record.directory(work)
            _supervise(package, directory, way)
            place = target if at is None else Path(f"/proc/self/fd/{at}")
            _mount(package, directory, place, way, source=record.source, writable=writable)
        except BaseException:
            dismiss(record.directory(work))
            take_down(record, work, lazily=True)
            raise
    except OSError as error:
        raise failed(target, error) from error
    count = f"{len(package.trees)} layers" if len(package.trees) > 1 else "1 layer"
    state = "writable" if writable else "read-only"
    return MountedView(target, LAZY, f"lazy: {way.name}, {count}, {state}; contents come when they are read")


def view_directory(target: Path | str, work: Path) -> Path | None:
    """Where the files of the lazy view at `target` are; None where there is no such view."""
    work = work.resolve()
    found = [record for record in records(work) if record.target == str(target) and record.method == LAZY]
    return found[-1].directory(work) if found else None


def is_filled(directory: Path) -> bool:
    """Whether the device of the view with this directory lacks nothing."""
    return (directory / MARK).exists()


def mark_filled(directory: Path) -> None:
    """Note that the device lacks nothing. Raises OSError."""
    (directory / MARK).touch()


def _supervise(package: LazyPackage, directory: Path, way: Way) -> None:
    """Make the device and have it supervised. Raises Unavailable, OSError."""
    with (directory / DEVICE).open("xb") as device:
        device.truncate(package.layout.size)
    supervise(directory, package.limit_s, way=way)


def _mount(package: LazyPackage, directory: Path, place: Path, way: Way, *, source: str, writable: bool) -> None:
    device = Device(package.layout.blocks, package.layout.first_blocks())
    (directory / str(_EMPTY)).mkdir()
    with way.device(directory) as path:
        for number, entries in enumerate(package.trees, _EMPTY + 1):
            image = directory / f"{number}.erofs"
            write_image(entries, image, device)
            (directory / str(number)).mkdir()
            mount_image(image, directory / str(number), path, looped=way.looped)
    merge(directory, len(package.trees) + 1, place, source=source, uppers=directory if writable else None)
