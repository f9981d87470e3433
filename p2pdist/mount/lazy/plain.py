"""Plain images of a lazy view that lacks nothing any more: a reader gets what it asks for, and not
whole cells.

Theory. To the kernel the cells of a device are compressed data: it reads and unpacks all of a cell
for each page of it that is not in the page cache. Once no cell is missing, images that name the
blocks of contents, in the same device, read as any EROFS image does. An overlay of them covers the
view, at the same path: each path leads to the one or to the other, both show the same contents, and
what is open stays what it is. The view below stays as well. It is what remains where the cover ends
first, and a program that uses it keeps both in use.

Files of view and cover differ in device and number, by which the dynamic linker knows libraries: a
program that found one under two paths, before and after, would load it twice. They differ in the
page cache as well: weights that one program has mapped of the view and another one of the cover are
in memory twice. So a view is covered while no process has mapped anything of it, code or data, and
by an agent that sees all processes alone. What was only read the kernel can drop.
A writable view is never covered, since two overlays cannot write to one directory.

What can take long is done before the record's mounts are locked: writing images, and looking at
what processes have mapped, where the kernel waits for a process whose memory map is being changed.
A process that maps something in the moment between look and cover keeps the view.

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
from p2pdist.mount.erofs.writer import Device, is_image, mount_image, write_image_to
from p2pdist.mount.lazy.fill_method import FANOTIFY
from p2pdist.mount.lazy.view import TREE_IMAGE, is_filled
from p2pdist.mount.overlay import merge, unmount_layers
from p2pdist.mount.records import Record, are_covered, changing, records, views_at
from p2pdist.mount.sight import NOTHING, Identity, seen
from p2pdist.mount.supervisor.protocol import DEVICE

PLAIN = "plain"
"""Directory of the cover: images, and where they are mounted."""

Outcome = Literal["covered", "used", "left"]
"""A view is covered; processes have mapped something of it; or it never will be covered."""

_IMAGE = re.compile(rf"[1-9][0-9]{{0,3}}{re.escape(TREE_IMAGE)}\Z")

_ALL_PROCESSES = 0xEFFFFFFC
"""The number of the first process namespace, which has all others in it (linux/proc_ns.h)."""


def write_plain(directory: Path, layers: Sequence[Sequence[Entry]], layout: DeviceLayout) -> None:
    """Write what will cover the view with this directory, whose trees these are, bottom to top, and
    whose device has cells with heads and may still lack something. Repeating it is harmless, also
    at the same time. Raises OSError, FileNotFoundError when the view is unmounted meanwhile."""
    record = _record(directory)
    if record is None or record.writable:
        return
    device = Device(layout.size, layout.first_blocks(), FANOTIFY.cells, whole=True)
    for number, entries in enumerate(layers, 1):
        image = directory / PLAIN / f"{number}{TREE_IMAGE}"
        if is_image(image):
            continue
        # A file without a name is no concern of a thread that removes the directory.
        with open(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), "wb") as file:
            write_image_to(file, entries, device)
            file.flush()
            with changing(directory):
                image.parent.mkdir(exist_ok=True)
                image.unlink(missing_ok=True)
                place = os.open(image.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                try:  # with a descriptor it follows links
                    os.link(f"/proc/self/fd/{file.fileno()}", image.name, dst_dir_fd=place)
                finally:
                    os.close(place)


def cover(directory: Path) -> Outcome:
    """Cover the view with this directory. What a process left half-done that was killed at this is
    taken away first. Raises OSError, Corrupt; then the view is as it was."""
    record = _record(directory)
    views = views_at(record) if record is not None else []
    used = bool(views) and not are_covered(views) and sees_all_processes() and is_used(views[0])
    with changing(directory):
        unmount_layers(directory / PLAIN)
        record = _record(directory)
        if record is None or record.writable or not is_filled(directory) or not sees_all_processes():
            return "left"
        views, images = views_at(record), _images(directory)
        if are_covered(views):
            return "covered"
        if not views or not images:
            return "left"
        if used:
            return "used"
        try:
            _cover(record, views, images)
        finally:
            unmount_layers(directory / PLAIN)  # an overlay has its own references
    return "covered"


def _images(directory: Path) -> list[Path]:
    """The plain images of all layers of a view, bottom to top; none where one is missing. Raises
    OSError."""
    numbers = sorted(int(name.removesuffix(TREE_IMAGE)) for name in os.listdir(directory) if _IMAGE.match(name))
    images = [directory / PLAIN / f"{number}{TREE_IMAGE}" for number in numbers]
    whole = numbers == list(range(1, len(numbers) + 1)) and all(map(is_image, images))
    return images if whole else []


def _cover(record: Record, views: Sequence[kernel.Mounted], images: Sequence[Path]) -> None:
    plain = images[0].parent
    with _root(record, views) as root, (plain.parent / DEVICE).open("rb") as device:
        (plain / "0").mkdir(exist_ok=True)
        for image in images:
            point = image.with_suffix("")
            point.mkdir(exist_ok=True)
            mount_image(image, point, Path(f"/proc/self/fd/{device.fileno()}"))
        merge(plain, len(images) + 1, root, source=record.source, uppers=None)


def identity(directory: Path) -> Identity:
    """The root of the view with this directory, or of its cover: NOTHING where it is not mounted.
    Raises OSError, ESTALE where something else is visible at its path."""
    record = _record(directory)
    views = views_at(record) if record is not None else []
    if record is None or not views:
        return NOTHING
    with _root(record, views) as root:
        return seen(root) or NOTHING


def _record(directory: Path) -> Record | None:
    return next((record for record in records(directory.parent) if record.id == directory.name), None)


def is_used(view: kernel.Mounted) -> bool:
    """Whether a process has mapped something of a mounted overlay, wherever that process sees it.
    Raises OSError."""
    major, minor = view.device
    pattern = re.compile(rb"^\S+ \S+ \S+ %02x:%02x " % (major, minor), re.MULTILINE)
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
def _root(record: Record, views: Sequence[kernel.Mounted]) -> Iterator[Path]:
    """A path to the root of what is visible of the mounts of a record, whatever becomes of the
    directories above it. Raises OSError, ESTALE where the path leads elsewhere by now, or to a
    mount of others."""
    root = os.open(record.target, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if kernel.mount_number(root) not in {view.number for view in views}:
            raise OSError(errno.ESTALE, "something else is there by now", record.target)
        yield Path(f"/proc/self/fd/{root}")
    finally:
        os.close(root)
