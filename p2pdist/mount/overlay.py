"""Layers under an OverlayFS (Linux kernel, Documentation/filesystems/overlayfs.rst).

Inside one private directory the layers are mounted at 0, 1, 2, ... (0 is the bottom); `upper` and
`scratch` take what a program writes. Overlay options name them through a descriptor of that
directory, /proc/self/fd/N/0, so that the option string has no character that needs quoting,
whatever the directory is called, and 128 layers fit into the one page that the kernel reads.

The layer of a tree is an EROFS image without file contents. These are in directories of objects,
which come last in the list of lower layers, behind "::": their names are not seen, but files of the
layers above are redirected to them (Linux 6.5 and newer). Every layer may redirect so, by
attributes `trusted.overlay.*`; that of a squashfs image could lead to any object of the store, of
whatever package. So an image that has attributes at all, which those that are packed here never
have, is not mounted beside a tree.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from p2pdist.mount import kernel, squashfs
from p2pdist.mount.erofs import writer
from p2pdist.mount.layers import TreeLayer
from p2pdist.mount.squashfs import Image

_NO_UPPER = {errno.EINVAL, errno.EOPNOTSUPP, errno.EROFS}
"""What mount(2) answers for a directory that cannot be an upper layer."""


class NoUpper(OSError):
    """The file system of the directory `filename` takes no upper layer of an overlay: it is an
    overlay itself, a network or FUSE one, or keeps no attributes."""


def merge(
    directory: Path,
    count: int,
    target: Path,
    *,
    source: str,
    uppers: Path | None,
    objects: Sequence[Path] = (),
    more: str = "",
) -> None:
    """Mount an overlay of `directory`/0 .. `directory`/count-1 at `target`, writable when `uppers`
    names a directory for `upper` and `scratch`. Files may be redirected to `objects`. `source` is
    the name that mountinfo shows, `more` further options. Raises OSError, NoUpper where `uppers` is
    the reason."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | (0 if uppers else kernel.MS_RDONLY)
    with ExitStack() as opened:

        def through(path: Path) -> str:
            descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)
            opened.callback(os.close, descriptor)
            return f"/proc/self/fd/{descriptor}"

        lower = through(directory)
        options = "lowerdir=" + ":".join(f"{lower}/{number}" for number in reversed(range(count)))
        if objects:
            options = "metacopy=on,redirect_dir=on," + options + "".join(f"::{through(path)}" for path in objects)
        if uppers:
            (uppers / "upper").mkdir(exist_ok=True)
            (uppers / "scratch").mkdir(exist_ok=True)
            (uppers / "upper").chmod(0o755)  # that of the view's root, whatever the umask here
            upper = through(uppers)
            options += f",upperdir={upper}/upper,workdir={upper}/scratch"
        try:
            kernel.mount(source, target, "overlay", flags, options + more)
        except OSError as error:
            if uppers and not objects and error.errno in _NO_UPPER:
                reason = f"an overlay cannot keep there what is written: {error.strerror}"
                raise NoUpper(error.errno, reason, os.fspath(uppers)) from error
            raise


def mount_layers(
    layers: Sequence[Image | TreeLayer], directory: Path, target: Path, *, source: str, writable: bool
) -> None:
    """Mount every layer below `directory` and the merged view at `target`. One squashfs image that
    is not to be written to needs no overlay and is mounted straight. Trees must be prepared. Raises
    Corrupt or OSError (EOPNOTSUPP: show it as plain files), and may then leave some layers mounted:
    which `unmount_layers` undoes."""
    if len(layers) == 1 and isinstance(layers[0], Image) and not writable:
        squashfs.mount_image(layers[0], target)
        return
    trees = [layer for layer in layers if isinstance(layer, TreeLayer)]
    for layer in layers:
        if trees and isinstance(layer, Image) and layer.has_xattrs:
            raise OSError(
                errno.EOPNOTSUPP, "a squashfs layer beside a tree has extended attributes", os.fspath(layer.path)
            )
    for number, layer in enumerate(layers):
        point = directory / str(number)
        point.mkdir()
        if isinstance(layer, TreeLayer):
            writer.mount_image(layer.image, point)
        else:
            squashfs.mount_image(layer, point)
    objects = dict.fromkeys(layer.objects.resolve() for layer in trees)
    uppers = directory if writable else None
    merge(directory, len(layers), target, source=source, uppers=uppers, objects=list(objects))


def unmount_layers(directory: Path) -> list[str]:
    """Unmount whatever is mounted below `directory`, the newest first. An overlay keeps its own
    references to its layers, so nothing that still uses one is hurt. Returns what could not be
    unmounted."""
    failed = []
    for entry in reversed(kernel.mounted()):
        if directory in entry.point.parents:
            try:
                kernel.unmount(entry.point, lazily=True)
            except OSError as error:
                failed.append(f"{entry.point}: {error.strerror}")
    return failed
