"""A look at a source directory that is to become a tree: every directory's entries with what stat(2) says of them.

A look at 200,000 files that have not changed must take well under a second, so it makes no object for an entry: the rows of a directory
are encoded at once, and the hash over all of them (`fingerprint`) tells whether anything has changed since an earlier look. Rows keep the
order of readdir(3), which stays while nothing changes; whoever uses them sorts by name. A change of content, mode, owner, links or
extended attributes changes an inode's ctime, and with it the fingerprint. The source directory itself counts for nothing but its names.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from p2pdist.model.errors import Corrupt, UsageError
from p2pdist.model.tree import DEPTH_MAX, ENTRIES_MAX
from p2pdist.package.scan import Ignore, check_directory, leaves_out, printable, unreadable, with_parents

_S_IFMT = 0o170000


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An entry of a directory and its lstat(2); times in nanoseconds. `size` is the device number where the entry is a device."""

    name: bytes
    mode: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    links: int
    device: int


class _Named(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The beginning of a Row."""

    name: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Row]).decode
_decode_names = msgspec.msgpack.Decoder(list[_Named]).decode
_FILE_SYSTEM = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()


@dataclass(frozen=True, slots=True)
class TreeScan:
    """What is below `source`. `directories` are encoded rows by path, b"" being the source itself."""

    source: bytes
    directories: dict[bytes, bytes]
    fingerprint: bytes

    def rows(self, directory: bytes) -> list[Row]:
        """The entries of a directory, sorted by name."""
        return sorted(_decode(self.directories[directory]), key=_name)

    def path(self, entry: bytes) -> bytes:
        """Where the entry with this path below the source is."""
        return self.source + b"/" + entry if entry else self.source


def scan_tree(source: Path, *, ignore: Ignore | None = None, only: Collection[bytes] | None = None) -> TreeScan:
    """Look at everything below `source` but what `ignore` leaves out and, with `only`, what is neither one of these paths nor a directory
    above one. Raises NotFound, UsageError when it is no directory or over a limit, and P2PDistError naming what cannot be read."""
    check_directory(source)
    wanted = None if only is None else with_parents(only)
    root = os.fsencode(source.absolute())
    found: dict[bytes, bytes] = {}
    hasher = blake3()
    entries = 0
    pending = [(b"", 0)]
    while pending:
        directory, depth = pending.pop()
        if depth > DEPTH_MAX:
            raise UsageError(f"{source} is nested deeper than {DEPTH_MAX} directories")
        rows, below = _list(root, directory, ignore, wanted)
        entries += len(rows)
        if entries > ENTRIES_MAX:
            raise UsageError(f"{source} has more than {ENTRIES_MAX} entries", remedy="Pack parts of it as layers")
        pending += ((path, depth + 1) for path in below)
        try:
            data = _encode(rows)
        except OverflowError as error:
            raise UsageError(f"a file in {printable(os.fsdecode(directory))!r} has an impossible time") from error
        found[directory] = data
        hasher.update(_encode((directory, len(data))))
        hasher.update(data)
    return TreeScan(root, found, hasher.digest())


def check_names(scan: TreeScan, *, ignore: Ignore | None = None, only: Collection[bytes] | None = None) -> None:
    """Raises Corrupt naming a file that appeared or vanished since the scan, which was made with the same `ignore` and `only`."""
    wanted = None if only is None else with_parents(only)
    for directory, data in scan.directories.items():
        now = _names(scan.source, directory, ignore, wanted)
        if now != (then := {row.name for row in _decode_names(data)}):
            name = min(now ^ then)
            raise changed(scan.path(directory) + b"/" + name, "appeared" if name in now else "vanished")


def changed(path: bytes, how: str = "changed") -> Corrupt:
    """The failure of packing what somebody writes to meanwhile."""
    return Corrupt(
        f"{printable(os.fsdecode(path))} {how} while it was packed", remedy="Try again when nothing writes there"
    )


_Row = tuple[bytes, int, int, int, int, int, int, int]


def _list(
    root: bytes, directory: bytes, ignore: Ignore | None, wanted: Collection[bytes] | None
) -> tuple[list[_Row], list[bytes]]:
    """The rows of a directory, and the paths of the directories in it."""
    prefix = directory + b"/" if directory else b""
    rows: list[_Row] = []
    below: list[bytes] = []
    encoding, errors = _FILE_SYSTEM
    filtered = ignore is not None or wanted is not None
    with _opened(root, directory) as handle, os.scandir(handle) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            name, mode = entry.name.encode(encoding, errors), status.st_mode
            kind = mode & _S_IFMT
            if filtered and leaves_out(prefix + name, kind == stat.S_IFDIR, ignore, wanted):
                continue
            size = status.st_size
            if kind == stat.S_IFDIR:
                below.append(prefix + name)
            elif kind in (stat.S_IFCHR, stat.S_IFBLK):
                size = status.st_rdev
            rows.append(
                (
                    name,
                    mode,
                    status.st_ino,
                    size,
                    status.st_mtime_ns,
                    status.st_ctime_ns,
                    status.st_nlink,
                    status.st_dev,
                )
            )
    return rows, below


def _names(root: bytes, directory: bytes, ignore: Ignore | None, wanted: Collection[bytes] | None) -> set[bytes]:
    """The names of a directory's rows; nothing is asked of the entries themselves."""
    prefix = directory + b"/" if directory else b""
    encoding, errors = _FILE_SYSTEM
    with _opened(root, directory) as handle:
        if ignore is None and wanted is None:
            return {name.encode(encoding, errors) for name in os.listdir(handle)}
        with os.scandir(handle) as entries:
            found = {entry.name.encode(encoding, errors): entry.is_dir(follow_symlinks=False) for entry in entries}
    return {name for name, below in found.items() if not leaves_out(prefix + name, below, ignore, wanted)}


@contextmanager
def _opened(root: bytes, directory: bytes) -> Iterator[int]:
    """A descriptor of a directory. An OSError in the block is told as one of reading it."""
    path = root + b"/" + directory if directory else root
    try:
        # Relative to a descriptor the kernel walks no path for each entry.
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if directory else 0))
        try:
            yield handle
        finally:
            os.close(handle)
    except FileNotFoundError as error:
        raise changed(path, "or what is in it vanished") from error
    except OSError as error:
        where = error.filename if isinstance(error.filename, str | bytes) else path
        raise unreadable(os.fsdecode(where), error.strerror or str(error)) from error


def _name(row: Row) -> bytes:
    return row.name
