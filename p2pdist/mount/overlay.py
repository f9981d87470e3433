"""Layers under an OverlayFS (Linux kernel, Documentation/filesystems/overlayfs.rst).

Inside one private directory the layers are mounted at 0, 1, 2, ... (0 is the bottom); `upper` and `scratch` take what a program
writes. Overlay options name them through a descriptor of that directory, /proc/self/fd/N/0, so that the option string has no
character that needs quoting, whatever the directory is called, and 128 layers fit into the one page that the kernel reads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from p2pdist.mount import kernel
from p2pdist.mount.squashfs import Image, mount_image


def merge(directory: Path, count: int, target: Path, *, source: str, uppers: Path | None, more: str = "") -> None:
    """Mount an overlay of `directory`/0 .. `directory`/count-1 at `target`, writable when `uppers` names a directory for `upper` and
    `scratch`. `source` is the name that mountinfo shows, `more` further options. Raises OSError."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | (0 if uppers else kernel.MS_RDONLY)
    lower = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    upper = os.open(uppers, os.O_PATH | os.O_DIRECTORY) if uppers else -1
    try:
        options = "lowerdir=" + ":".join(f"/proc/self/fd/{lower}/{number}" for number in reversed(range(count)))
        if uppers:
            (uppers / "upper").mkdir(exist_ok=True)
            (uppers / "scratch").mkdir(exist_ok=True)
            options += f",upperdir=/proc/self/fd/{upper}/upper,workdir=/proc/self/fd/{upper}/scratch"
        kernel.mount(source, target, "overlay", flags, options + more)
    finally:
        os.close(lower)
        if upper >= 0:
            os.close(upper)


def mount_layers(images: Sequence[Image], directory: Path, target: Path, *, source: str, writable: bool) -> None:
    """Mount every image below `directory` and the merged view at `target`. One layer that is not to be written to needs no overlay
    and is mounted straight. Raises Corrupt or OSError, and may then leave some layers mounted: see `unmount_layers`."""
    if len(images) == 1 and not writable:
        mount_image(images[0], target)
        return
    for number, image in enumerate(images):
        point = directory / str(number)
        point.mkdir()
        mount_image(image, point)
    merge(directory, len(images), target, source=source, uppers=directory if writable else None)


def unmount_layers(directory: Path) -> list[str]:
    """Unmount whatever is mounted below `directory`, the newest first. An overlay keeps its own references to its layers, so nothing
    that still uses one is hurt. Returns what could not be unmounted."""
    failed = []
    for entry in reversed(kernel.mounted()):
        if directory in entry.point.parents:
            try:
                kernel.unmount(entry.point, lazily=True)
            except OSError as error:
                failed.append(f"{entry.point}: {error.strerror}")
    return failed
