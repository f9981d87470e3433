"""A look at a source directory before it is packed: how much there is, what cannot go in, and what cannot be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.model.errors import NotFound, P2PDistError, UsageError
from p2pdist.model.printable import printable

DROPPED_SHOWN_MAX = 1000
DEPTH_MAX = 1000

KINDS_DROPPED = {
    stat.S_IFBLK: "block device",
    stat.S_IFCHR: "character device",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
}


Ignore = Callable[[bytes, bool], bool]
"""Whether to leave out the entry with this path below the source, which is a directory or not; a directory with all that is in it."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something that a package does not carry. `path` is relative to the source, with surrogates for bytes that are not UTF-8;
    `what` is `socket`, `FIFO`, `block device`, `character device`, `setuid bit` or `setgid bit`."""

    path: str
    what: str


@dataclass(slots=True)
class Scan:
    """`files` regular files of `bytes_total` bytes; `dropped` holds the first DROPPED_SHOWN_MAX of `dropped_total`. `excluded` are the
    paths that were left out by request, of a directory its own alone."""

    files: int = 0
    bytes_total: int = 0
    dropped: list[Dropped] = field(default_factory=list)
    dropped_total: int = 0
    excluded: list[bytes] = field(default_factory=list)

    def drop(self, path: str, what: str) -> None:
        self.dropped_total += 1
        if len(self.dropped) < DROPPED_SHOWN_MAX:
            self.dropped.append(Dropped(path, what))


def check_directory(source: Path) -> None:
    """Raises NotFound, or UsageError when `source` is something else."""
    if not source.exists():
        raise NotFound(f"there is no directory {source}")
    if not source.is_dir():
        raise UsageError(f"{source} is not a directory", remedy="Name the directory to pack")


def scan(source: Path, *, ignore: Ignore | None = None, only: Collection[bytes] | None = None) -> Scan:
    """Look at everything below `source` but what `ignore` and `only` leave out (see scan_tree).

    Raises NotFound, UsageError when it is no directory, and P2PDistError naming the first entry
    that cannot be read."""
    check_directory(source)
    found = Scan()
    wanted, filtered = None if only is None else with_parents(only), ignore is not None or only is not None
    pending, prefix = [(str(source), 0)], len(os.fsencode(source)) + 1
    while pending:
        directory, depth = pending.pop()
        if depth > DEPTH_MAX:
            raise UsageError(f"{source} is nested deeper than {DEPTH_MAX} directories")
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    path = os.fsencode(entry.path)[prefix:] if filtered else b""
                    if filtered and leaves_out(path, entry.is_dir(follow_symlinks=False), ignore, wanted):
                        found.excluded.append(path)
                        continue
                    mode = _add(found, entry, len(str(source)) + 1)
                    if stat.S_ISDIR(mode):
                        pending.append((entry.path, depth + 1))
        except OSError as error:
            raise unreadable(error.filename or directory, error.strerror or str(error)) from error
    found.excluded.sort()
    found.dropped.sort(key=lambda item: (item.path, item.what))
    return found


def _add(found: Scan, entry: os.DirEntry[str], prefix: int) -> int:
    """Count one entry; returns its mode."""
    status = entry.stat(follow_symlinks=False)
    mode = status.st_mode
    if stat.S_ISREG(mode):
        found.files += 1
        found.bytes_total += status.st_size
        if not os.access(entry.path, os.R_OK, effective_ids=True):
            raise unreadable(entry.path, "permission denied")
    kind = KINDS_DROPPED.get(stat.S_IFMT(mode))
    if kind:
        found.drop(entry.path[prefix:], kind)
    elif not stat.S_ISLNK(mode):
        if mode & stat.S_ISUID:
            found.drop(entry.path[prefix:], "setuid bit")
        if mode & stat.S_ISGID:
            found.drop(entry.path[prefix:], "setgid bit")
    return mode


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
