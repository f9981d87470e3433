"""What looks at a source directory have in common: what cannot go in, what is left out, and what
cannot be read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.model.errors import NotFound, P2PDistError, UsageError, printable

DROPPED_SHOWN_MAX = 1000
DEPTH_MAX = 1000

KINDS_DROPPED = {
    stat.S_IFBLK: "block device",
    stat.S_IFCHR: "character device",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
}


Ignore = Callable[[bytes, bool], bool]
"""Whether to leave out the entry with this path below the source, which is a directory or not; a
directory with all that is in it."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something that a package does not carry. `path` is relative to the source, with surrogates
    for bytes that are not UTF-8; `what` is `socket`, `FIFO`, `block device`, `character device`,
    `setuid bit` or `setgid bit`."""

    path: str
    what: str


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link of a source: its path relative to it, the path it holds, and what of that a
    user should know."""

    path: str
    target: str
    what: str


@dataclass(slots=True)
class Scan:
    """`files` regular files of `bytes_total` bytes; `dropped` holds the first DROPPED_SHOWN_MAX of
    `dropped_total`. `excluded` are the paths that were left out by request, of a directory its own
    alone."""

    files: int = 0
    bytes_total: int = 0
    dropped: list[Dropped] = field(default_factory=list)
    dropped_total: int = 0
    excluded: list[bytes] = field(default_factory=list)

    def drop(self, path: str, what: str) -> None:
        self.dropped_total += 1
        if len(self.dropped) < DROPPED_SHOWN_MAX:
            self.dropped.append(Dropped(path, what))


def source_directory(source: Path) -> Path:
    """The path of the directory `source`, absolute and without symbolic links: mksquashfs packs a
    link as a link, whatever it leads to, and programs that run in other directories are given this
    path. Raises NotFound, and UsageError when there is something else."""
    real = source_path(source)
    if not real.is_dir():
        raise UsageError(f"{source} is not a directory", remedy="Name the directory to pack")
    return real


def source_path(source: Path, kind: str = "directory") -> Path:
    """The path of `source`, absolute and without symbolic links. `kind` is what should be there.
    Raises NotFound, UsageError and P2PDistError saying why there is nothing."""
    try:
        return Path(os.path.realpath(source, strict=True))
    except ValueError as error:  # a NUL
        raise UsageError(f"{str(source)!r} is not a path", remedy="Name the directory to pack") from error
    except OSError as error:
        raise _not_there(source, kind, error) from error


def _not_there(source: Path, kind: str, error: OSError) -> P2PDistError:
    shown = printable(str(source))
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        return unreadable(str(source), error.strerror or str(error))
    if not source.is_absolute() and not _has_working_directory():
        return NotFound(f"cannot look for {shown}: the working directory was removed", remedy="Name an absolute path")
    if error.errno == errno.ELOOP:
        return UsageError(f"{shown} is a link that leads to itself", remedy=f"Name the {kind}")
    if source.is_symlink():
        target = printable(os.readlink(source))
        return NotFound(f"{shown} is a link to {target}, which is not there", remedy=f"Name the {kind}")
    return NotFound(f"there is no {kind} {shown}")


def _has_working_directory() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def with_parents(paths: Collection[bytes]) -> frozenset[bytes]:
    """The paths and the directories above them."""
    found = set(paths)
    for path in paths:
        while (path := path.rpartition(b"/")[0]) and path not in found:
            found.add(path)
    return frozenset(found)


def leaves_out(path: bytes, is_directory: bool, ignore: Ignore | None, wanted: Collection[bytes] | None) -> bool:
    """Whether an entry is left out by request; `wanted` has the directories on the way."""
    return (wanted is not None and path not in wanted) or (ignore is not None and ignore(path, is_directory))


def unreadable(path: str, why: str) -> P2PDistError:
    """The failure of packing what may not be read."""
    return P2PDistError(
        f"cannot read {printable(path)}: {why.lower()}", remedy="Make it readable, or pack as its owner"
    )
