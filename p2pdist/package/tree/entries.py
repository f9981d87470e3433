"""From a scan to the entries of a tree, in walking order: what the last packing knows is taken
over, the rest is looked at more closely, and files whose content is not known are left to be
read."""

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
from p2pdist.package.source.scan import KINDS_DROPPED, Row, TreeScan, changed, is_opaque, unreadable
from p2pdist.package.tree.builder import Draft, Kept, Known, Looked
from p2pdist.package.tree.cache import Remembered, Stamp
from p2pdist.package.tree.reader import ChangeTimes, Wanted, settled

EMPTY = content_hash(b"")


class Assembler:
    """Makes the draft of a tree. `known` are the directories of the last packing; `available` says
    whether contents of one of them need not be read because packs have them, and of one of its
    files; `mtime` is the latest modification time, in seconds, that an entry may have; `modes` are
    those of entries, by path, in the place of their own; with `timeless` directories have the time
    0; `world_readable` gives all the right to read, and to execute what anybody may execute."""

    def __init__(
        self,
        scan: TreeScan,
        known: Known,
        available: Callable[[Remembered | File], bool],
        *,
        xattrs: bool = False,
        mtime: int | None = None,
        modes: Mapping[bytes, int] | None = None,
        timeless: bool = False,
        world_readable: bool = False,
    ) -> None:
        self._scan, self._known, self._available = scan, known, available
        self._xattrs, self._timeless, self._world_readable = xattrs, timeless, world_readable
        self._modes = modes or {}
        self._latest_ns = (1 << 63) - 1 if mtime is None else mtime * 1_000_000_000
        self._draft = Draft()
        self._times = ChangeTimes()
        self._links: dict[tuple[int, int], bytes] = {}

    def assemble(self) -> Draft:
        """Raises UsageError and P2PDistError naming what cannot be packed; Damaged."""
        runs = self._draft.runs
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
        return self._draft

    def _enter(self, path: bytes) -> tuple[Kept | Looked, Iterator[tuple[int, bytes]]]:
        """A directory, and the positions and paths of the directories in it, which are gone through
        before the next is asked for."""
        fingerprint = self._scan.digests[path]
        number = self._known.numbers.get(path, -1)
        before = self._known.directory(number) if number >= 0 else None
        if before and before.fingerprint == fingerprint and self._available(before):
            kept = Kept(number, before, self._known)
            self._draft.directories.append(kept)
            prefix = path + b"/" if path else b""
            return kept, ((position, prefix + name) for position, name in before.below)
        looked = Looked(path, fingerprint)
        self._draft.directories.append(looked)
        return looked, self._look(looked, self._known.files(number) if number >= 0 else {})

    def _look(self, looked: Looked, files: dict[bytes, tuple[File, Stamp | None]]) -> Iterator[tuple[int, bytes]]:
        prefix = looked.path + b"/" if looked.path else b""
        entries = looked.entries
        for row in self._scan.rows(looked.path):
            path = prefix + row.name
            kind = stat.S_IFMT(row.mode)
            if kind == stat.S_IFREG:
                entries.append(self._file(looked, path, row, files.get(path)))
            elif kind == stat.S_IFDIR:
                self._drop_bits(looked, path, row.mode)
                opaque, xattrs = self._attributes(looked, path, row, opaque=True)
                time_ns = 0 if self._timeless else self._time(path, row)
                entries.append(Directory(path, self._mode(path, row), time_ns, opaque, xattrs))
                looked.below.append((len(entries) - 1, row.name))
                yield len(entries) - 1, path
            elif kind == stat.S_IFLNK:
                entries.append(Symlink(path, self._time(path, row), self._target(path)))
                with self._failures(path):
                    looked.settled &= self._times.count(row, self._scan.path(looked.path))
            elif kind == stat.S_IFCHR and row.size == 0:
                entries.append(Whiteout(path))
            else:
                looked.dropped.append((path, KINDS_DROPPED[kind]))

    def _file(self, looked: Looked, path: bytes, row: Row, before: tuple[File, Stamp | None] | None) -> File | HardLink:
        self._drop_bits(looked, path, row.mode)
        if row.links > 1:
            looked.linked = True
            first = self._links.setdefault((row.device, row.inode), path)
            if first != path:
                return HardLink(path, first)
        if row.size > SIZE_MAX:
            raise UsageError(f"{self._shown(path)} of {row.size} bytes is larger than a file may be")
        stamp = Stamp(row.inode, row.device, row.mtime_ns, row.ctime_ns)
        looked.stamps.append(stamp)
        _, xattrs = self._attributes(looked, path, row)
        head = (path, self._mode(path, row), self._time(path, row), row.size)
        if not row.size:
            return File(*head, EMPTY, b"", xattrs)
        if before and before[1] == stamp and before[0].size == row.size and self._available(before[0]):
            return File(*head, before[0].content, before[0].chunks, xattrs)
        self._draft.places.append((looked, len(looked.entries), len(looked.stamps) - 1))
        self._draft.wanted.append(Wanted(self._scan.path(path), row))
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

    def _attributes(self, looked: Looked, path: bytes, row: Row, *, opaque: bool = False) -> tuple[bool, Xattrs]:
        """Whether a directory is opaque, and the extended attributes `user.*` when they are
        wanted."""
        if not (opaque or self._xattrs):
            return False, ()
        now = time.time_ns()
        where = self._scan.path(path)
        with self._failures(path):
            hides = opaque and is_opaque(where)
            found = _user_attributes(where) if self._xattrs else ()
            counts = self._times.count(row, where)
        if sum(len(name) + len(value) for name, value in found) > XATTR_BYTES_MAX:
            raise UsageError(f"{self._shown(path)} has more than {XATTR_BYTES_MAX} bytes of extended attributes")
        if not counts or not settled(row, now):
            looked.settled = False
        return hides, found

    @contextlib.contextmanager
    def _failures(self, path: bytes) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise changed(self._scan.path(path), "vanished") from error
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, path: bytes, error: OSError) -> P2PDistError:
        return unreadable(os.fsdecode(self._scan.path(path)), error.strerror or str(error))

    def _drop_bits(self, looked: Looked, path: bytes, mode: int) -> None:
        if mode & (stat.S_ISUID | stat.S_ISGID):
            for bit, what in ((stat.S_ISUID, "setuid bit"), (stat.S_ISGID, "setgid bit")):
                if mode & bit:
                    looked.dropped.append((path, what))

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
