"""A look at a source directory before it is packed: how much there is, what cannot go in, and what cannot be read."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.model.errors import NotFound, P2PDistError, UsageError

DROPPED_SHOWN_MAX = 1000
DEPTH_MAX = 1000

_KINDS = {
    stat.S_IFBLK: "block device",
    stat.S_IFCHR: "character device",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
}


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something that a package does not carry. `path` is relative to the source, with surrogates for bytes that are not UTF-8;
    `what` is `socket`, `FIFO`, `block device`, `character device`, `setuid bit` or `setgid bit`."""

    path: str
    what: str


@dataclass(slots=True)
class Scan:
    """`files` regular files of `bytes_total` bytes; `dropped` holds the first DROPPED_SHOWN_MAX of `dropped_total`."""

    files: int = 0
    bytes_total: int = 0
    dropped: list[Dropped] = field(default_factory=list)
    dropped_total: int = 0

    def drop(self, path: str, what: str) -> None:
        self.dropped_total += 1
        if len(self.dropped) < DROPPED_SHOWN_MAX:
            self.dropped.append(Dropped(path, what))


def scan(source: Path) -> Scan:
    """Look at everything below `source`. Raises NotFound, UsageError when it is no directory, and P2PDistError naming the first entry
    that cannot be read."""
    if not source.exists():
        raise NotFound(f"there is no directory {source}")
    if not source.is_dir():
        raise UsageError(f"{source} is not a directory", remedy="Name the directory to pack")
    found = Scan()
    pending = [(str(source), 0)]
    while pending:
        directory, depth = pending.pop()
        if depth > DEPTH_MAX:
            raise UsageError(f"{source} is nested deeper than {DEPTH_MAX} directories")
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    mode = _add(found, entry, len(str(source)) + 1)
                    if stat.S_ISDIR(mode):
                        pending.append((entry.path, depth + 1))
        except OSError as error:
            raise _unreadable(error.filename or directory, error.strerror or str(error)) from error
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
            raise _unreadable(entry.path, "permission denied")
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind:
        found.drop(entry.path[prefix:], kind)
    elif not stat.S_ISLNK(mode):
        if mode & stat.S_ISUID:
            found.drop(entry.path[prefix:], "setuid bit")
        if mode & stat.S_ISGID:
            found.drop(entry.path[prefix:], "setgid bit")
    return mode


def printable(path: str) -> str:
    """`path` fit for a message: bytes that are not UTF-8 and control characters are shown as escapes."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _unreadable(path: str, why: str) -> P2PDistError:
    return P2PDistError(
        f"cannot read {printable(path)}: {why.lower()}", remedy="Make it readable, or pack as its owner"
    )
