"""Squashfs images: what the superblock says, and mounting one, through a loop device or without
root.

The format is version 4.0 (Linux kernel, Documentation/filesystems/squashfs.rst and
fs/squashfs/squashfs_fs.h). The bytes of an image are verified against its digest before they get
here; a squashfs that is damaged all the same was packed so. Every `run` loads this module, which
therefore loads little itself.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.errors import Corrupt, NotFound
from p2pdist.mount import kernel

PROGRAMS = ("squashfuse_ll", "squashfuse")
"""Programs that mount a squashfs image without root, best first."""

SUPERBLOCK_BYTES = 96
_MAGIC = 0x73717368
_NOTHING = (1 << 64) - 1
_NOT_SQUASHFS = {errno.EINVAL, errno.EIO, errno.EUCLEAN, errno.EFBIG, errno.ENOSPC}
"""What mount(2) answers when the content, not the caller, is at fault."""


@dataclass(frozen=True, slots=True)
class Image:
    """A layer image whose superblock makes sense."""

    path: Path
    size: int
    """In bytes."""
    inodes: int
    has_xattrs: bool
    """Whether it carries a table of extended attributes."""


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """An image that an agent is fetching: the digest of its blob, and its bytes."""

    digest: str
    size: int


def missing() -> str:
    """Why this user cannot mount without root here, or "" when it is worth trying."""
    directories = os.get_exec_path()
    if not any(os.access(os.path.join(directory, name), os.X_OK) for directory in directories for name in PROGRAMS):
        return "squashfuse is not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing or not open to this user"
    return ""


def inspect(path: Path) -> Image:
    """Read the superblock of `path`; raises Corrupt when it is not a whole squashfs 4.0 image,
    NotFound when it is missing."""
    try:
        with path.open("rb") as file:
            head = file.read(SUPERBLOCK_BYTES)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise NotFound(
            f"the layer image {path} does not exist", remedy="Run p2pdist verify, then pull the package again"
        ) from error
    if len(head) < SUPERBLOCK_BYTES or struct.unpack_from("<I", head)[0] != _MAGIC:
        raise _corrupt(path, "it does not begin like one")
    inodes = struct.unpack_from("<I", head, 4)[0]
    major, minor = struct.unpack_from("<HH", head, 28)
    used, _ids, xattrs = struct.unpack_from("<QQQ", head, 40)
    if (major, minor) != (4, 0):
        raise _corrupt(path, f"it states version {major}.{minor}")
    if used > size:
        raise _corrupt(path, f"it states {used} bytes and has {size}")
    return Image(path, size, inodes, xattrs != _NOTHING)


def mount_image(image: Image, target: Path) -> None:
    """Mount one image read-only, nosuid and nodev, at the empty directory `target`. Raises Corrupt,
    or OSError where mounting is not possible here."""
    with kernel.loop_device(image.path) as device:
        mount_device(device, image.path, target)


def mount_device(device: str, image: Path, target: Path) -> None:
    """Mount what is in a loop device over the file `image` as `mount_image` does; raises the
    same."""
    try:
        kernel.mount(device, target, "squashfs", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    except OSError as error:
        if error.errno in _NOT_SQUASHFS:
            raise _corrupt(image, f"the kernel cannot mount it ({error.strerror})") from error
        if error.errno == errno.ENODEV:
            raise OSError(error.errno, "this kernel has no squashfs", os.fspath(target)) from error
        raise


def _corrupt(path: Path, reason: str) -> Corrupt:
    return Corrupt(
        f"the layer {path.name} is not a squashfs image: {reason}",
        remedy="Run p2pdist verify; if that finds nothing wrong, pack and push the package again",
        image=path.name,
    )
