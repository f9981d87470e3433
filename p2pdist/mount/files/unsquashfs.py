"""Squashfs layers as plain files: unsquashfs, then merged into what lower layers left as an overlay
would show them.

Needs no privilege. Every layer is unpacked into a directory of its own below a private staging
directory, and moved into the merged tree by this module, which never follows a symbolic link; so no
layer can reach outside, nor write through a link of another layer. unsquashfs itself refuses names
with "/", "." and "..", and the same name twice in a directory, from 4.5.1 on (earlier:
CVE-2021-40153, CVE-2021-41072); older ones are refused here.

Whiteouts (character devices 0/0) are read from the listing, since only root could create them.
Opaque directories are marked by the attribute trusted.overlay.opaque, which only root can read:
without root a layer with extended attributes is refused unless it is the lowest one, rather than
shown wrongly. Set-uid and set-gid bits, file capabilities and device nodes are dropped.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.model.errors import Corrupt, DiskFull, P2PDistError
from p2pdist.model.tree import MODE_MASK, Directory, Xattrs
from p2pdist.mount.squashfs import Image
from p2pdist.removal import remove_tree

VERSION_MIN = (4, 5, 1)
_INSTALL = "Install squashfs-tools 4.5.1 or newer"
_VERSION = re.compile(r"unsquashfs version (\d+)\.(\d+)(?:\.(\d+))?")
_OPAQUE = "trusted.overlay.opaque"
_ONLY_ROOT = "because you're not superuser"
_FROM_OUTSIDE: dict[int, str] = {
    signal.SIGKILL: "The kernel sends it when memory runs out: give the host, or the control group, more memory",
    signal.SIGXFSZ: "A file is larger than this process may write (ulimit -f)",
    signal.SIGTERM: "Try again",
    signal.SIGINT: "Try again",
}
"""Signals that say nothing of the image, and what to do about them."""


@dataclass(slots=True)
class Listing:
    """What the listing of an image says: bytes of file content, and the whiteouts, as paths
    relative to the layer's root."""

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


def list_layers(images: Sequence[Image], *, lowest: Image | None) -> list[Listing]:
    """What the images hold; `lowest` is the one that has no layer below. Raises Corrupt, or
    P2PDistError where unpacking is not possible here."""
    check_tool()
    for image in images:
        if image is not lowest and image.has_xattrs and os.geteuid() != 0:
            raise P2PDistError(
                f"the layer {image.path.name} has extended attributes, which may hide files below it and which only root can read",
                remedy="Let the agent run as root, or pack the layer again with p2pdist pack",
            )
    return [_list(image) for image in images]


def unpack(image: Image, listing: Listing, tree: Path, merged: Path) -> list[Directory]:
    """Unpack an image at `tree`, which does not exist, and move all of it into `merged`, over what
    is there. Returns its directories, the root with an empty path, as they are to be in the end; so
    far all of them are open to this user. Raises Corrupt, DiskFull or OSError."""
    _extract(image, tree)
    directories = _tame(tree, image.has_xattrs)
    _merge(tree, merged, {tree / os.fsdecode(entry.path) for entry in directories if entry.opaque})
    # Only now: above each whiteout there are real directories, of this layer, and no link of a
    # lower one.
    for name in listing.whiteouts:
        _remove(merged / os.fsdecode(name))
    remove_tree(tree)
    return directories


def _list(image: Image) -> Listing:
    """The listing of an image. Its lines name paths below a prefix that no packer can foresee, so
    that a file name with line breaks in it cannot pass for a line."""
    prefix = secrets.token_hex(16).encode()
    line = re.compile(
        rb"^([-dlbcps])[-rwxsStT]{9} \S+ +(?:(\d+), *(\d+)|(\d+)) \d{4,}-\d\d-\d\d \d\d:\d\d " + prefix, re.MULTILINE
    )
    output = _run(image, "-lln", "-dest", prefix.decode())
    layer = Listing()
    found = list(line.finditer(output))
    for entry, following in zip(found, [*found[1:], None], strict=True):
        if entry[1] == b"-":
            layer.size += int(entry[4])
        if entry[1] == b"c" and int(entry[2]) == int(entry[3]) == 0:
            path = output[entry.end() + 1 : following.start() - 1 if following else len(output) - 1]
            layer.whiteouts.append(path)
    return layer


def _run(image: Image, *options: str) -> bytes:
    """Run unsquashfs on an image; raises Corrupt, or DiskFull, when it fails. What only root could
    create is no failure."""
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
            raise DiskFull.on(str(place), os.statvfs(place), needed=image.size)
        if -done.returncode in _FROM_OUTSIDE:
            raise _killed(image, -done.returncode)
        reason = next(iter(complaints), f"unsquashfs ended with {done.returncode}")
        raise Corrupt(
            f"the layer {image.path.name} cannot be unpacked: {reason}",
            remedy="Pack and push the package again",
            image=image.path.name,
        )
    return done.stdout


def _killed(image: Image, number: int) -> P2PDistError:
    """The failure of unsquashfs that a signal from outside ended: the image may be whole."""
    return P2PDistError(
        f"the layer {image.path.name} cannot be unpacked: "
        f"signal {number} ({signal.strsignal(number)}) ended unsquashfs",
        remedy=_FROM_OUTSIDE[number],
    )


def _extract(image: Image, tree: Path) -> None:
    keep = "-xattrs" if image.has_xattrs and os.geteuid() == 0 else "-no-xattrs"
    _run(image, keep, "-dest", str(tree))


def _tame(tree: Path, has_xattrs: bool) -> list[Directory]:
    """Drop what may not survive and open every directory to ourselves. Returns the directories as
    they were."""
    directories = []
    pending = [tree]
    while pending:
        directory = pending.pop()
        entry = directory.lstat()
        mode = stat.S_IMODE(entry.st_mode) & MODE_MASK
        os.chmod(directory, mode | stat.S_IRWXU)
        opaque, xattrs = _strip_attributes(directory) if has_xattrs else (False, ())
        path = b"" if directory == tree else os.fsencode(directory.relative_to(tree))
        directories.append(Directory(path, mode, entry.st_mtime_ns, opaque, xattrs))
        with os.scandir(directory) as children:
            for child in children:
                if child.is_dir(follow_symlinks=False):
                    pending.append(directory / child.name)
                else:
                    _tame_file(directory / child.name, child.stat(follow_symlinks=False).st_mode, has_xattrs)
    return directories


def _tame_file(path: Path, mode: int, has_xattrs: bool) -> None:
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        path.unlink()
        return
    if not stat.S_ISLNK(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
        os.chmod(path, stat.S_IMODE(mode) & MODE_MASK)
    if has_xattrs:
        _strip_attributes(path)


def _strip_attributes(path: Path) -> tuple[bool, Xattrs]:
    """Remove attributes that grant rights or steer an overlay; returns whether the directory was
    marked opaque, and what is left."""
    opaque, kept = False, []
    try:
        for name in os.listxattr(path, follow_symlinks=False):
            value = os.getxattr(path, name, follow_symlinks=False)
            if name.startswith("user."):
                kept.append((os.fsencode(name), value))
            else:
                opaque = opaque or (name == _OPAQUE and value == b"y")
                os.removexattr(path, name, follow_symlinks=False)
    except OSError:
        return False, ()  # the file system keeps no attributes, so none were written either
    return opaque, tuple(sorted(kept))


def _merge(upper: Path, lower: Path, opaque: set[Path]) -> None:
    """Move everything of the directory `upper` into the directory `lower`; where both have a
    directory its content is merged."""
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
