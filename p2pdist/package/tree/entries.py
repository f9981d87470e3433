"""From a scan to the entries of a tree, in walking order: unchanged directories come from the files
cache, the others are listed entry by entry, and files of unknown content stay unread."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping

from p2pdist.model.errors import P2PDistError, UsageError, printable
from p2pdist.model.tree import (
    MODE_MASK,
    SIZE_MAX,
    XATTR_BYTES_MAX,
    Directory,
    File,
    HardLink,
    Symlink,
    Whiteout,
    Xattrs,
    content_hash,
)
from p2pdist.package.source.scan import (
    CAPABILITIES,
    EXECUTABLE,
    KINDS_DROPPED,
    Row,
    TreeScan,
    changed,
    has_capabilities,
    is_opaque,
    unreadable,
)
from p2pdist.package.tree.builder import CachedTree, Scanned, TreeBuilder, Unchanged
from p2pdist.package.tree.cache import CachedDirectory, Stamp
from p2pdist.package.tree.reader import ChangeTimes, FileToRead, stable

EMPTY = content_hash(b"")


class Assembler:
    """Makes the TreeBuilder of a scan. `cached` is the tree of the last packing; `available` says
    whether packs have all contents of one of its directories or files. `mtime` is the latest
    modification time, in seconds, that an entry may have; `modes` replace the modes of entries, by
    path; with `timeless` directories have the time 0; `world_readable` is chmod a+rX. Without
    `whiteouts` there is nothing below that they could hide, and they are left out."""

    def __init__(
        self,
        scan: TreeScan,
        cached: CachedTree,
        available: Callable[[CachedDirectory | File], bool],
        *,
        xattrs: bool = False,
        mtime: int | None = None,
        modes: Mapping[bytes, int] | None = None,
        timeless: bool = False,
        world_readable: bool = False,
        whiteouts: bool = True,
    ) -> None:
        self._scan, self._cached, self._available = scan, cached, available
        self._xattrs, self._timeless, self._world_readable = xattrs, timeless, world_readable
        self._modes, self._whiteouts = modes or {}, whiteouts
        self._latest_ns = (1 << 63) - 1 if mtime is None else mtime * 1_000_000_000
        self._builder = TreeBuilder()
        self._times = ChangeTimes()
        self._links: dict[tuple[int, int], bytes] = {}

    def assemble(self) -> TreeBuilder:
        """The builder, whose unread files are to be read. Raises UsageError and P2PDistError naming
        what cannot be packed, and Damaged."""
        runs = self._builder.runs
        pending = [self._enter(b"")]
        begins = [0]
        while pending:
            directory, below = pending[-1]
            begin = begins[-1]
            for position, path in below:
                runs.append((directory, begin, position + 1))
                begins[-1] = position + 1
                pending.append(self._enter(path))
                begins.append(0)
                break
            else:
                if begin < directory.count:
                    runs.append((directory, begin, directory.count))
                pending.pop()
                begins.pop()
        return self._builder

    def _enter(self, path: bytes) -> tuple[Unchanged | Scanned, Iterator[tuple[int, bytes]]]:
        """A directory, and the positions and paths of its subdirectories; the caller enters each
        one before it takes the next."""
        fingerprint = self._scan.digests[path]
        number = self._cached.numbers.get(path, -1)
        before = self._cached.directory(number) if number >= 0 else None
        if before and before.fingerprint == fingerprint and self._available(before):
            unchanged = Unchanged(number, self._cached)
            self._builder.directories.append(unchanged)
            prefix = path + b"/" if path else b""
            return unchanged, ((position, prefix + name) for position, name in before.below)
        scanned = Scanned(path, fingerprint)
        self._builder.directories.append(scanned)
        return scanned, self._look(scanned, self._cached.files(number) if number >= 0 else {})

    def _look(self, scanned: Scanned, files: dict[bytes, tuple[File, Stamp | None]]) -> Iterator[tuple[int, bytes]]:
        prefix = scanned.path + b"/" if scanned.path else b""
        entries = scanned.entries
        for row in self._scan.rows(scanned.path):
            path = prefix + row.name
            kind = stat.S_IFMT(row.mode)
            if kind == stat.S_IFREG:
                entries.append(self._file(scanned, path, row, files.get(path)))
            elif kind == stat.S_IFDIR:
                self._drop_bits(scanned, path, row.mode)
                opaque, xattrs = self._attributes(scanned, path, row, opaque=True)
                time_ns = 0 if self._timeless else self._time(path, row)
                entries.append(Directory(path, self._mode(path, row), time_ns, opaque, xattrs))
                scanned.below.append((len(entries) - 1, row.name))
                yield len(entries) - 1, path
            elif kind == stat.S_IFLNK:
                entries.append(Symlink(path, self._time(path, row), self._target(path)))
                with self._failures(path):
                    scanned.stable &= self._times.count(row, self._scan.path(scanned.path))
            elif kind == stat.S_IFCHR and row.size == 0 and self._whiteouts:
                entries.append(Whiteout(path))
            else:
                scanned.dropped.append((path, KINDS_DROPPED[kind]))

    def _file(
        self, scanned: Scanned, path: bytes, row: Row, before: tuple[File, Stamp | None] | None
    ) -> File | HardLink:
        self._drop_bits(scanned, path, row.mode)
        if row.links > 1:
            scanned.linked = True
            first = self._links.setdefault((row.device, row.inode), path)
            if first != path:
                return HardLink(path, first)
        if row.mode & EXECUTABLE:
            with self._failures(path):
                if has_capabilities(self._scan.path(path)):
                    scanned.dropped.append((path, CAPABILITIES))
        if row.size > SIZE_MAX:
            raise UsageError(
                f"{self._shown(path)} of {row.size} bytes is larger than a file may be",
                remedy="Split it, or leave it out with --ignore",
            )
        stamp = Stamp(row.inode, row.device, row.mtime_ns, row.ctime_ns)
        scanned.stamps.append(stamp)
        _, xattrs = self._attributes(scanned, path, row)
        head = (path, self._mode(path, row), self._time(path, row), row.size)
        if not row.size:
            return File(*head, EMPTY, b"", xattrs)
        if before and before[1] == stamp and before[0].size == row.size and self._available(before[0]):
            return File(*head, before[0].content, before[0].chunks, xattrs)
        self._builder.positions.append((scanned, len(scanned.entries), len(scanned.stamps) - 1))
        self._builder.unread.append(FileToRead(self._scan.path(path), row))
        return File(*head, b"", b"", xattrs)

    def _mode(self, path: bytes, row: Row) -> int:
        mode = self._modes.get(path, row.mode) & MODE_MASK
        if self._world_readable:
            mode |= 0o555 if stat.S_ISDIR(row.mode) or mode & 0o111 else 0o444
        return mode

    def _time(self, path: bytes, row: Row) -> int:
        if not -(1 << 63) <= row.mtime_ns < 1 << 63:
            raise UsageError(f"{self._shown(path)} has an impossible modification time", remedy="Set it with touch(1)")
        return min(row.mtime_ns, self._latest_ns)

    def _target(self, path: bytes) -> bytes:
        with self._failures(path):
            return os.readlink(self._scan.path(path))

    def _attributes(self, scanned: Scanned, path: bytes, row: Row, *, opaque: bool = False) -> tuple[bool, Xattrs]:
        """Whether a directory is opaque, and the extended attributes `user.*` if the tree carries
        them."""
        if not (opaque or self._xattrs):
            return False, ()
        now = time.time_ns()
        where = self._scan.path(path)
        with self._failures(path):
            hides = opaque and is_opaque(where)
            attributes = _user_attributes(where) if self._xattrs else ()
            counts = self._times.count(row, where)
        if sum(len(name) + len(value) for name, value in attributes) > XATTR_BYTES_MAX:
            raise UsageError(
                f"{self._shown(path)} has more than {XATTR_BYTES_MAX} bytes of extended attributes",
                remedy="Pack it without --xattrs",
            )
        if not counts or not stable(row, now):
            scanned.stable = False
        return hides, attributes

    @contextlib.contextmanager
    def _failures(self, path: bytes) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise changed(self._scan.path(path), "vanished") from error
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, path: bytes, error: OSError) -> P2PDistError:
        return unreadable(os.fsdecode(self._scan.path(path)), error)

    def _drop_bits(self, scanned: Scanned, path: bytes, mode: int) -> None:
        if mode & (stat.S_ISUID | stat.S_ISGID):
            for bit, what in ((stat.S_ISUID, "setuid bit"), (stat.S_ISGID, "setgid bit")):
                if mode & bit:
                    scanned.dropped.append((path, what))

    def _shown(self, path: bytes) -> str:
        return printable(os.fsdecode(self._scan.path(path)))


def _user_attributes(path: bytes) -> Xattrs:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return ()
        raise
    user = sorted(os.fsencode(name) for name in names if name.startswith("user."))
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in user)
