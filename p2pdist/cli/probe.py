"""Tries one way of mounting, in a process and a mount namespace of its own: python -m
p2pdist.cli.probe WAY DIRECTORY

Prints nothing when it works, else why not. The mounts end with the process. DIRECTORY is empty, on
the file system of the store.
"""

from __future__ import annotations

import errno
import fcntl
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from p2pdist.mount import kernel


def overlay(directory: Path, *, writable: bool = False) -> None:
    """An overlay of two layers, with `writable` one that can be written to. Raises OSError."""
    lower, other, upper, work, merged = (directory / name for name in ("lower", "other", "upper", "work", "merged"))
    for path in (lower, other, upper, work, merged):
        path.mkdir()
    (lower / "file").write_text("seen")
    uppers = f",upperdir={upper},workdir={work}" if writable else ""
    kernel.mount("overlay", merged, "overlay", 0, f"lowerdir={lower}:{other}{uppers}")
    if (merged / "file").read_text() != "seen":
        raise OSError("an overlay does not show its lower layer")


def loop(directory: Path) -> None:
    """A loop device. Raises OSError."""
    image = directory / "image"
    image.write_bytes(bytes(4096))
    with kernel.loop_device(image):
        pass


def reflink(directory: Path) -> None:
    """Two files that share their blocks. Raises OSError."""
    (directory / "one").write_bytes(bytes(4096))
    with (directory / "one").open("rb") as shared, (directory / "two").open("wb") as file:
        fcntl.ioctl(file, kernel.FICLONE, shared.fileno())


def erofs(directory: Path) -> None:
    """An EROFS image straight from its file. Raises OSError."""
    from p2pdist.mount.erofs.writer import mount_image, write_image

    image, target = directory / "image", directory / "target"
    target.mkdir()
    write_image([], image)
    mount_image(image, target)


def lazy(directory: Path) -> None:
    """A lazy view, in the first way to fill it that works: a file that a thread reads before its
    content is there. Raises OSError."""
    from p2pdist.mount.lazy.fill_method import METHODS as FILLED
    from p2pdist.mount.lazy.trial import choose

    records = directory / "records"
    records.mkdir()
    choice = choose(records, [way.name for way in FILLED])
    if choice.method is None:
        raise OSError(errno.EOPNOTSUPP, "; ".join(choice.reasons))


def userns(directory: Path) -> None:
    """A user namespace, which `main` has made by now."""


WAYS: dict[str, Callable[[Path], None]] = {
    "overlay": overlay,
    "writable": partial(overlay, writable=True),
    "loop": loop,
    "erofs": erofs,
    "lazy": lazy,
    "reflink": reflink,
    "userns": userns,
}


def main(way: str, directory: Path) -> str:
    """Why a way does not work here; empty when it does."""
    try:
        if way != "reflink":  # which takes no right
            kernel.unshare(kernel.CLONE_NEWNS | (kernel.CLONE_NEWUSER if way == "userns" else 0))
            kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        WAYS[way](directory)
    except OSError as error:
        return error.strerror or str(error)
    return ""


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2])), end="")
