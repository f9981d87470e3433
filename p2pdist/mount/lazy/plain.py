"""Plain images of a lazy view that lacks nothing any more: a reader gets what it asks for, and not
whole cells.

Theory. To the kernel the cells of a device are compressed data: it reads and unpacks all of a cell
for each page of it that is not in the page cache. Once no cell is missing, images that name the
blocks of contents, in the same device, read as any EROFS image does. An overlay of them covers the
view, at the same path: each path leads to the one or to the other, both show the same contents, and
what is open stays what it is. The view below stays as well. It is what remains where the cover ends
first, and a program that uses it keeps both in use.

Files of view and cover differ in device and number, by which the dynamic linker knows libraries: a
program that found one under two paths, before and after, would load it twice. So a view is covered
while no program runs from it or has a library of it, and by an agent that sees all processes alone.
A writable view is never covered, since two overlays cannot write to one directory.

Images are written before the mark that nothing is missing, so a view with the mark has them, unless
an earlier release filled it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from p2pdist.model.device import DeviceLayout
from p2pdist.model.tree import Entry
from p2pdist.mount import kernel
from p2pdist.mount.erofs.writer import Device, is_image, mount_image, write_image
from p2pdist.mount.lazy.view import TREE_IMAGE, is_filled
from p2pdist.mount.lazy.ways import FANOTIFY
from p2pdist.mount.overlay import merge, unmount_layers
from p2pdist.mount.records import Record, changing, records, views_at
from p2pdist.mount.supervisor.protocol import DEVICE

PLAIN = "plain"
"""Directory of the cover: images, and where they are mounted."""

Outcome = Literal["covered", "used", "left"]
"""A view is covered; programs run from it, or have libraries of it; or it never will be covered."""

_ALL_PROCESSES = 0xEFFFFFFC
"""The number of the first process namespace, which has all others in it (linux/proc_ns.h)."""


def write_plain(directory: Path, layers: Sequence[Sequence[Entry]], layout: DeviceLayout) -> None:
    """Write what will cover the view with this directory, whose trees these are, bottom to top, and
    whose device has cells with heads and may still lack something. Repeating it is harmless. Raises
    OSError."""
    with changing(directory):
        record = _record(directory)
        if record is None or record.writable:
            return
        (directory / PLAIN).mkdir(exist_ok=True)
        device = Device(layout.size, layout.first_blocks(), FANOTIFY.cells, whole=True)
        for number, entries in enumerate(layers, 1):
            image = directory / PLAIN / f"{number}{TREE_IMAGE}"
            if not is_image(image):
                write_image(entries, image, device)


def cover(directory: Path) -> Outcome:
    """Cover the view with this directory. What a process left half-done that was killed at this is
    taken away first. Raises OSError, Corrupt; then the view is as it was."""
    with changing(directory):
        unmount_layers(directory / PLAIN)
        record = _record(directory)
        if record is None or record.writable or not is_filled(directory) or not sees_all_processes():
            return "left"
        images = [directory / PLAIN / image.name for image in sorted(directory.glob(f"*{TREE_IMAGE}"), key=_number)]
        views = views_at(record)
        if len(views) != 1 or not images or not all(map(is_image, images)):
            return "covered" if len(views) > 1 else "left"
        try:
            return _cover(record, views[0], images)
        finally:
            unmount_layers(directory / PLAIN)  # an overlay has its own references


def _cover(record: Record, view: kernel.Mounted, images: Sequence[Path]) -> Outcome:
    plain = images[0].parent
    if is_used(view):
        return "used"
    with _root(view) as root, (plain.parent / DEVICE).open("rb") as device:
        (plain / "0").mkdir(exist_ok=True)
        for image in images:
            point = image.with_suffix("")
            point.mkdir(exist_ok=True)
            mount_image(image, point, Path(f"/proc/self/fd/{device.fileno()}"))
        if is_used(view):  # a program began meanwhile
            return "used"
        merge(plain, len(images) + 1, root, source=record.source, uppers=None)
    return "covered"


def _record(directory: Path) -> Record | None:
    return next((record for record in records(directory.parent) if record.id == directory.name), None)


def _number(image: Path) -> int:
    return int(image.stem)


def is_used(view: kernel.Mounted) -> bool:
    """Whether a process runs a program of a mounted overlay, or has a library of it, wherever that
    process sees it. Raises OSError."""
    major, minor = view.device
    pattern = re.compile(rb"^\S+ ..x. \S+ %02x:%02x " % (major, minor), re.MULTILINE)
    return any(map(pattern.search, _maps()))


def _maps() -> Iterator[bytes]:
    """What each process has mapped. Raises OSError where this one may not see it."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            yield Path(f"/proc/{pid}/maps").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except PermissionError:
            if pid != "1":  # init began before any view, and may hide what it has
                raise


def sees_all_processes() -> bool:
    """Whether no process of this host is hidden from this one by a namespace."""
    return os.stat("/proc/self/ns/pid").st_ino == _ALL_PROCESSES


@contextmanager
def _root(view: kernel.Mounted) -> Iterator[Path]:
    """A path to the root of a mounted view, whatever becomes of the directories above it. Raises
    OSError, ESTALE where the path of the view leads elsewhere by now."""
    root = os.open(view.point, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if kernel.mount_number(root) != view.number:
            raise OSError(errno.ESTALE, "the path leads elsewhere by now", os.fspath(view.point))
        yield Path(f"/proc/self/fd/{root}")
    finally:
        os.close(root)
