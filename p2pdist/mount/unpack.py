"""Layers as plain files: unsquashfs, then the layers merged as an overlay would show them.

Needs no privilege. Every layer is unpacked into a directory of its own below a private staging directory, and moved into the merged
tree by this module, which never follows a symbolic link; so no layer can reach outside, nor write through a link of another layer.
unsquashfs itself refuses names with "/", "." and "..", and the same name twice in a directory, from 4.5.1 on (earlier: CVE-2021-40153,
CVE-2021-41072); older ones are refused here.

Whiteouts (character devices 0/0) are read from the listing, since only root could create them. Opaque directories are marked by the
attribute trusted.overlay.opaque, which only root can read: without root a layer with extended attributes is refused unless it is the
lowest one, rather than shown wrongly. Set-uid and set-gid bits, file capabilities and device nodes are dropped.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.model.errors import Corrupt, DiskFull, P2PDistError
from p2pdist.mount.squashfs import Image

VERSION_MIN = (4, 5, 1)
_INSTALL = "Install squashfs-tools 4.5.1 or newer"
_VERSION = re.compile(r"unsquashfs version (\d+)\.(\d+)(?:\.(\d+))?")
_OPAQUE = "trusted.overlay.opaque"
_ONLY_ROOT = "because you're not superuser"


@dataclass(slots=True)
class _Layer:
    """What a listing says: bytes of file content, and the whiteouts, as paths relative to the layer's root."""

    size: int = 0
    whiteouts: list[bytes] = field(default_factory=list)


def check_tool() -> None:
    """Raises P2PDistError when unsquashfs is missing or older than VERSION_MIN."""
    try:
        done = subprocess.run(["unsquashfs", "-version"], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise P2PDistError("unpacking needs unsquashfs, which is not installed", remedy=_INSTALL) from error
    found = _VERSION.search(done.stdout)
    version = tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    if version < VERSION_MIN:
        raise P2PDistError(
            f"unsquashfs {'.'.join(map(str, version))} is too old to unpack with safely", remedy=_INSTALL
        )


def unpack(images: Sequence[Image], staging: Path) -> Path:
    """Unpack and merge `images`, bottom to top, below the empty directory `staging`. Returns the merged tree, a directory inside it.
    Raises Corrupt, DiskFull or P2PDistError."""
    check_tool()
    for image in images[1:]:
        if image.has_xattrs and os.geteuid() != 0:
            raise P2PDistError(
                f"the layer {image.path.name} has extended attributes, which may hide files below it and which only root can read",
                remedy="Let the agent run as root, or pack the layer again with p2pdist pack",
            )
    layers = [_list(image) for image in images]
    needed, free = sum(layer.size for layer in layers), shutil.disk_usage(staging).free
    if needed > free:
        raise DiskFull(str(staging), needed=needed, free=free)
    merged = staging / "0"
    modes: dict[Path, os.stat_result] = {}
    for number, (image, layer) in enumerate(zip(images, layers, strict=True)):
        tree = staging / str(number)
        _extract(image, tree)
        directories, opaque = _tame(tree, image.has_xattrs)
        if number:
            _merge(tree, merged, opaque)
            # Only now: above each whiteout there are real directories, of this layer, and no link of a lower one.
            for name in layer.whiteouts:
                _remove(merged / os.fsdecode(name))
        modes.update((merged / path.relative_to(tree), entry) for path, entry in directories.items())
    for directory in reversed(list(_directories(merged))):
        entry = modes[directory]
        # The top one stays writable, or it could not be renamed.
        extra = stat.S_IRWXU if directory == merged else 0
        os.chmod(directory, stat.S_IMODE(entry.st_mode) & 0o1777 | extra)
        os.utime(directory, ns=(entry.st_atime_ns, entry.st_mtime_ns))
    return merged


def _list(image: Image) -> _Layer:
    """The listing of an image. Its lines name paths below a prefix that no packer can foresee, so that a file name with line breaks in
    it cannot pass for a line."""
    prefix = secrets.token_hex(16).encode()
    line = re.compile(
        rb"^([-dlbcps])[-rwxsStT]{9} \S+ +(?:(\d+), *(\d+)|(\d+)) \d{4,}-\d\d-\d\d \d\d:\d\d " + prefix, re.MULTILINE
    )
    output = _run(image, "-lln", "-dest", prefix.decode())
    layer = _Layer()
    found = list(line.finditer(output))
    for entry, following in zip(found, [*found[1:], None], strict=True):
        if entry[1] == b"-":
            layer.size += int(entry[4])
        if entry[1] == b"c" and int(entry[2]) == int(entry[3]) == 0:
            path = output[entry.end() + 1 : following.start() - 1 if following else len(output) - 1]
            layer.whiteouts.append(path)
    return layer


def _run(image: Image, *options: str) -> bytes:
    """Run unsquashfs on an image; raises Corrupt, or DiskFull, when it fails. What only root could create is no failure."""
    done = subprocess.run(
        ["unsquashfs", "-no-progress", *options, image.path],
        capture_output=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
    )
    complaints = [line for line in done.stderr.decode(errors="replace").splitlines() if _ONLY_ROOT not in line]
    if done.returncode and (done.returncode != 2 or any(complaints)):
        if any("No space left" in line for line in complaints):
            place = Path(options[-1]).parent
            raise DiskFull(str(place), needed=image.size, free=shutil.disk_usage(place).free)
        reason = next(iter(complaints), f"unsquashfs ended with {done.returncode}")
        raise Corrupt(
            f"the layer {image.path.name} cannot be unpacked: {reason}",
            remedy="Pack and push the package again",
            image=image.path.name,
        )
    return done.stdout


def _extract(image: Image, tree: Path) -> None:
    keep = "-xattrs" if image.has_xattrs and os.geteuid() == 0 else "-no-xattrs"
    _run(image, keep, "-dest", str(tree))


def _directories(top: Path) -> Iterator[Path]:
    """`top` and all directories below it, parents first; never through a link."""
    pending = [top]
    while pending:
        directory = pending.pop()
        yield directory
        with os.scandir(directory) as children:
            pending += [directory / child.name for child in children if child.is_dir(follow_symlinks=False)]


def _tame(tree: Path, has_xattrs: bool) -> tuple[dict[Path, os.stat_result], set[Path]]:
    """Drop what may not survive and open every directory to ourselves. Returns the directories as they were, and the opaque ones."""
    directories: dict[Path, os.stat_result] = {}
    opaque: set[Path] = set()
    pending = [tree]
    while pending:
        directory = pending.pop()
        directories[directory] = entry = directory.lstat()
        os.chmod(directory, stat.S_IMODE(entry.st_mode) & 0o1777 | stat.S_IRWXU)
        if has_xattrs and _strip_attributes(directory):
            opaque.add(directory)
        with os.scandir(directory) as children:
            for child in children:
                if child.is_dir(follow_symlinks=False):
                    pending.append(directory / child.name)
                else:
                    _tame_file(directory / child.name, child.stat(follow_symlinks=False).st_mode, has_xattrs)
    return directories, opaque


def _tame_file(path: Path, mode: int, has_xattrs: bool) -> None:
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        path.unlink()
        return
    if not stat.S_ISLNK(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
        os.chmod(path, stat.S_IMODE(mode) & 0o1777)
    if has_xattrs:
        _strip_attributes(path)


def _strip_attributes(path: Path) -> bool:
    """Remove attributes that grant rights or steer an overlay; says whether the directory was marked opaque."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
        opaque = _OPAQUE in names and os.getxattr(path, _OPAQUE, follow_symlinks=False) == b"y"
        for name in names:
            if not name.startswith("user."):
                os.removexattr(path, name, follow_symlinks=False)
    except OSError:
        return False  # the file system keeps no attributes, so none were written either
    return opaque


def _merge(upper: Path, lower: Path, opaque: set[Path]) -> None:
    """Move everything of the directory `upper` into the directory `lower`; where both have a directory its content is merged."""
    pending = [(upper, lower)]
    while pending:
        above, below = pending.pop()
        if above in opaque:
            remove_tree(below, keep=True)
        with os.scandir(above) as found:
            children = [(child.name, child.is_dir(follow_symlinks=False)) for child in found]
        for name, is_directory in children:
            if is_directory and (below / name).is_dir() and not (below / name).is_symlink():
                pending.append((above / name, below / name))
            else:
                _remove(below / name)
                (above / name).rename(below / name)


def _remove(path: Path) -> None:
    try:
        entry = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(entry.st_mode):
        remove_tree(path)
    else:
        path.unlink()


def remove_tree(path: Path, *, keep: bool = False) -> None:
    """Remove a directory with all that is in it, also where directories forbid writing; never follows links nor enters another file
    system. `keep` leaves the directory itself. A missing directory is fine; raises OSError otherwise."""
    try:
        device = path.lstat().st_dev
    except FileNotFoundError:
        return
    found = [path]
    for directory in found:  # grows while it is walked: parents come before children
        mode = directory.lstat().st_mode
        if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(directory, stat.S_IMODE(mode) | stat.S_IRWXU)
        with os.scandir(directory) as children:
            for child in children:
                if not child.is_dir(follow_symlinks=False):
                    os.unlink(child.path)
                elif child.stat(follow_symlinks=False).st_dev == device:
                    found.append(directory / child.name)
                else:
                    raise OSError(errno.EBUSY, "something is mounted there", child.path)
    for directory in reversed(found[1:] if keep else found):
        directory.rmdir()
