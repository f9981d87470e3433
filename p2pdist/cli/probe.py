"""Tries one way of mounting, in a process and a mount namespace of its own: python -m
p2pdist.cli.probe WAY DIRECTORY

Prints nothing when it works, else why not. The mounts end with the process. DIRECTORY is empty, on
the file system of the store.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from p2pdist.mount import kernel

POLL_S = 0.05


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
    """A lazy view: a file that a thread reads before its content is there. Raises OSError."""
    from p2pdist.model.device import BLOCK_BYTES, Cells, DeviceLayout
    from p2pdist.model.tree import File, content_hash
    from p2pdist.mount.erofs.writer import Device, mount_image, write_image
    from p2pdist.mount.supervisor import fanotify

    content, cells = bytes(range(256)) * (BLOCK_BYTES // 64), Cells(headed=True)
    name = content_hash(content)
    layout = DeviceLayout({name: len(content)}, {})
    image, device, target = directory / "image", directory / "device", directory / "target"
    target.mkdir()
    with device.open("wb") as file:
        file.truncate(cells.file_size(layout.size))
    write_image([File(b"file", 0o644, 0, len(content), name)], image, Device(layout.size, layout.first_blocks(), cells))
    filler, group, read = fanotify.open_silently(device), fanotify.open_group(), list[bytes]()
    fanotify.mark(group, device)  # before the kernel opens it: files opened without marks make no events
    mount_image(image, target, device)
    reader = threading.Thread(target=lambda: read.append((target / "file").read_bytes()), daemon=True)
    reader.start()
    while reader.is_alive():
        for fault in fanotify.read_faults(group) if select.select([group], [], [], POLL_S)[0] else ():
            for offset, begin, end in cells.places(0, len(content)):
                os.pwrite(filler, content[begin:end], offset)
            offset, head = cells.head(0)
            os.pwrite(filler, head, offset)
            fanotify.answer(group, fault.key)
            os.close(fault.key)
    if read != [content]:
        raise OSError("the kernel does not wait for what is filled")


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
