"""Lazy views: EROFS images of a package's trees over one sparse device, and its SquashFS images,
merged by an overlay.

EROFS images say all but the contents of files, which are in the device, a file with holes. What is
read of it waits until an agent has filled it; fill_method.py says what keeps readers waiting. Where
nothing keeps them any more, the kernel reads what there is: holes are no cells (model/device.py),
and give EIO. With FUSE SquashFS images are read so as well. Files of a view lie in the directory of
its record: the device, the number of its arrangement, the images, the supervisor's socket and log,
and a mark once nothing is missing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.bootstrap import Bootstrap, PackedImage
from p2pdist.model.device import ARRANGEMENT, BLOCK_BYTES, Cells, DeviceLayout
from p2pdist.model.errors import Corrupt, Unavailable
from p2pdist.model.tree import Entry
from p2pdist.mount.erofs.writer import Device, mount_image, write_image
from p2pdist.mount.lazy.fill_method import FANOTIFY, FUSE, REMEDY, FillMethod, StandBy, fuse_loop, method_of, supervise
from p2pdist.mount.lazy.fuse import IMAGE
from p2pdist.mount.overlay import merge
from p2pdist.mount.records import LAZY, Process, Record, new_id, records, take_down
from p2pdist.mount.squashfs import mount_device
from p2pdist.mount.supervisor.protocol import DEVICE, MARK, dismiss
from p2pdist.mount.views import MountedView, begin, check_target, failed

_REMOUNT = "Unmount it and mount the package again, or run the newer version"

ARRANGED = "arrangement"
"""File with the number of the rule by which contents lie in the device."""

TREE_IMAGE = ".erofs"
"""How the name of a tree's image ends, after its number."""

_EMPTY = 0
"""The bottom layer of every view: an overlay that is not written to needs two."""


@dataclass(frozen=True, slots=True)
class LazyPackage:
    """The layers of a package, bottom to top: a tree by its entries in walking order, or by the
    image for headed cells that its bootstrap has, a SquashFS image by a path that leads to its
    file, complete or not, on the file system of the records; and where contents of trees lie in the
    device, or what the bootstrap says of this. A reader waits for `limit_s` at most."""

    layers: Sequence[Sequence[Entry] | PackedImage | Path]
    layout: DeviceLayout | Bootstrap
    limit_s: float


def mount_lazy(
    package: LazyPackage,
    target: Path,
    *,
    work: Path,
    method: FillMethod = FANOTIFY,
    writable: bool = False,
    label: str = "",
    at: int | None = None,
    owner: Process | None = None,
    served: Callable[[Path], object] = lambda directory: None,
    stand_by: StandBy | None = None,
) -> MountedView:
    """Mount layers at `target` while none of their contents need be here, which come in one
    `method`; other arguments are those of `mount_view`. From the moment when `served` is called
    with the directory of the view an agent must be connected to the supervisor: mounting a SquashFS
    image reads it already. `stand_by` is a supervisor that `stand_by_for` has begun for the view;
    the caller closes it. Raises Unavailable where this host has no such views, Conflict for a
    target in use, and P2PDistError; then nothing is left behind."""
    target, work = check_target(target, at), work.resolve()
    name = stand_by.directory.name if stand_by is not None else new_id()
    record = Record(name, str(target), LAZY, (), label=label, writable=writable, owner=str(owner or ""))
    try:
        try:
            record = begin(record, work)
            directory = record.directory(work)
            with ThreadPoolExecutor(1) as beside:  # while the program that supervises begins
                images = beside.submit(_write_images, package, directory, method)
                _supervise(package, directory, method, stand_by)
                images.result()
            served(directory)
            place = target if at is None else Path(f"/proc/self/fd/{at}")
            _mount(package, directory, place, method, source=record.source, writable=writable)
        except BaseException:
            dismiss(record.directory(work))
            take_down(record, work, lazily=True)
            raise
    except OSError as error:
        raise failed(target, error, work) from error
    count = f"{len(package.layers)} layers" if len(package.layers) > 1 else "1 layer"
    state = "writable" if writable else "read-only"
    return MountedView(target, LAZY, f"lazy: {method.name}, {count}, {state}; contents come when they are read")


def view_directory(target: Path | str, work: Path) -> Path | None:
    """Where the files of the lazy view at `target` are; None where there is no such view."""
    work = work.resolve()
    found = [record for record in records(work) if record.target == str(target) and record.method == LAZY]
    return found[-1].directory(work) if found else None


def cells_of(directory: Path) -> Cells:
    """The cells of the device of the view with this directory."""
    return method_of(directory).cells


def arrangement_of(directory: Path) -> int:
    """The number of the rule by which contents lie in the device of the view with this directory.
    Raises Unavailable for one that this version does not know: what it would write is wrong."""
    try:
        text = (directory / ARRANGED).read_text()
    except FileNotFoundError:
        return 1  # it was mounted before there were two
    if text not in map(str, range(1, ARRANGEMENT + 1)):
        raise Unavailable(f"its device is arranged by the rule {text[:20]!r} of another version", remedy=_REMOUNT)
    return int(text)


def is_filled(directory: Path) -> bool:
    """Whether the device of the view with this directory lacks nothing."""
    return (directory / MARK).exists()


def mark_filled(directory: Path) -> None:
    """Note that the device lacks nothing. Raises OSError."""
    (directory / MARK).touch()


def stand_by_for(work: Path, limit_s: float) -> StandBy:
    """Begin what will supervise a new view with its record below `work`. Raises OSError."""
    return StandBy(work.resolve() / new_id(), limit_s)


def _supervise(package: LazyPackage, directory: Path, method: FillMethod, stand_by: StandBy | None) -> None:
    """Make the files that are read and have them supervised. Raises Unavailable, OSError."""
    (directory / ARRANGED).write_text(str(package.layout.arrangement))
    with (directory / DEVICE).open("xb") as device:
        device.truncate(device_bytes(package.layout, method.cells))
    images = [layer for layer in package.layers if isinstance(layer, Path)]
    assert not images or method is FUSE
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number, image in enumerate(images, 1):
            os.link(image, f"{IMAGE}{number}", dst_dir_fd=place)  # with a descriptor it follows links
    finally:
        os.close(place)
    supervise(directory, package.limit_s, method=method, stand_by=stand_by)


def device_bytes(layout: DeviceLayout | Bootstrap, cells: Cells) -> int:
    """How long the device of a view is: no loop device has less than a block."""
    return max(cells.file_size(layout.size), BLOCK_BYTES)


def _write_images(package: LazyPackage, directory: Path, method: FillMethod) -> None:
    layout = package.layout
    firsts = layout.first_blocks() if isinstance(layout, DeviceLayout) else {}
    device = Device(layout.size, firsts, method.cells)
    for number, layer in enumerate(package.layers, _EMPTY + 1):
        if isinstance(layer, PackedImage):
            assert method.cells.headed, "images in bootstraps are for headed cells"
            with _image(directory, number).open("xb") as file:
                for part in layer.parts():
                    file.write(part)
        elif not isinstance(layer, Path):
            write_image(layer, _image(directory, number), device)


def _image(directory: Path, number: int) -> Path:
    return directory / f"{number}{TREE_IMAGE}"


def _mount(
    package: LazyPackage, directory: Path, place: Path, method: FillMethod, *, source: str, writable: bool
) -> None:
    images = itertools.count(1)
    (directory / str(_EMPTY)).mkdir()
    with method.device(directory) as path:
        for number, layer in enumerate(package.layers, _EMPTY + 1):
            point = directory / str(number)
            point.mkdir()
            if isinstance(layer, Path):
                name = f"{IMAGE}{next(images)}"
                with fuse_loop(directory, name) as loop:
                    mount_device(loop, directory / name, point)
            else:
                try:
                    mount_image(_image(directory, number), point, path, looped=method.looped)
                except (OSError, Corrupt) as error:  # the image is new, so the kernel is what lacks something
                    reason = error.what if isinstance(error, Corrupt) else error.strerror
                    raise Unavailable(f"this host has no lazy views: {reason}", remedy=REMEDY) from error
    merge(directory, len(package.layers) + 1, place, source=source, uppers=directory if writable else None)
