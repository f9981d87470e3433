"""Tries one way of mounting, in a process and a mount namespace of its own: python -m p2pdist.cli.probe WAY DIRECTORY

Prints nothing when it works, else why not. What is mounted ends with the process. DIRECTORY is empty, on the file system that matters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from p2pdist.mount import kernel


def overlay(directory: Path) -> None:
    """A writable overlay of two layers. Raises OSError."""
    lower, upper, work, merged = (directory / name for name in ("lower", "upper", "work", "merged"))
    for each in (lower, upper, work, merged):
        each.mkdir()
    (lower / "file").write_text("seen")
    kernel.mount("overlay", merged, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}")
    if (merged / "file").read_text() != "seen":
        raise OSError("an overlay does not show its lower layer")


def erofs(directory: Path) -> None:
    """An EROFS image straight from its file. Raises OSError."""
    from p2pdist.mount.erofs import mount_image, write_image

    image, target = directory / "image", directory / "target"
    target.mkdir()
    write_image([], image)
    mount_image(image, target)


def userns(directory: Path) -> None:
    """A user namespace, which `main` has made by now."""


WAYS: dict[str, Callable[[Path], None]] = {"overlay": overlay, "erofs": erofs, "userns": userns}


def main(way: str, directory: Path) -> str:
    """Why a way does not work here; empty when it does."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS | (kernel.CLONE_NEWUSER if way == "userns" else 0))
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        WAYS[way](directory)
    except OSError as error:
        return error.strerror or str(error)
    return ""


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2])), end="")
