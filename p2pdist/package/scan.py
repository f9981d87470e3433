"""What looks at a source directory have in common: what cannot go in, what is left out, and what cannot be read."""

from __future__ import annotations

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
