"""From a scan to the entries of a tree, in walking order: what the last packing knows is taken over, the rest is looked at more closely,
and files whose content is not known are left to be read."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.tree import (
    MODE_MASK,
    SIZE_MAX,
    XATTR_BYTES_MAX,
    Directory,
    Entry,
    File,
    HardLink,
    Symlink,
    Whiteout,
    Xattrs,
    check_entries,
    content_hash,
    ends_page,
)
from p2pdist.package.scan import KINDS_DROPPED, printable, unreadable
from p2pdist.package.tree_read import Read, Wanted, settled
from p2pdist.package.tree_scan import Row, TreeScan, changed
from p2pdist.package.tree_state import Remembered, Stamp, decode_entries, decode_stamps, encode_entries

EMPTY = content_hash(b"")
_OPAQUE = "trusted.overlay.opaque"
_NONE = (errno.ENODATA, errno.ENOTSUP, errno.EPERM, errno.EACCES)


@dataclass(slots=True)
class _Looked:
    """A directory whose entries were looked at: where in the tree its own entries are, and what the next packing may be told of them."""

    path: bytes
    fingerprint: bytes
    numbers: list[int] = field(default_factory=list)
    stamps: list[Stamp | None] = field(default_factory=list)
    dropped: list[tuple[bytes, str]] = field(default_factory=list)
    settled: bool = True
    linked: bool = False
    ends: tuple[int, ...] = ()


@dataclass(slots=True)
class Draft:
    """A tree that lacks the contents of `wanted`; their entries stand at `places`. `ends` are the paths behind which pages end."""

    entries: list[Entry]
    wanted: list[Wanted]
    places: list[int]
    kept: list[Remembered]
    looked: list[_Looked]
    ends: set[bytes] = field(default_factory=set)

    @property
    def dropped(self) -> list[tuple[bytes, str]]:
        """Path and kind of what the tree does not carry, sorted."""
        found = [item for directory in self.kept for item in directory.dropped]
        return sorted(found + [item for directory in self.looked for item in directory.dropped])

    def fill(self, results: list[Read]) -> None:
        """Enter what was read; then the tree is complete and checked. Raises Corrupt."""
        for place, read in zip(self.places, results, strict=True):
            draft = self.entries[place]
            assert isinstance(draft, File)
            self.entries[place] = File(
                draft.path, draft.mode, draft.mtime_ns, draft.size, read.content, read.chunks, draft.xattrs
            )
        unsettled = {place for place, read in zip(self.places, results, strict=True) if not read.settled}
        for directory in self.looked:
            files = (place for place in directory.numbers if type(self.entries[place]) is File)
            for position, place in enumerate(files):
                if place in unsettled:
                    directory.stamps[position] = None
                    directory.settled = False
            directory.ends = tuple(
                position for position, place in enumerate(directory.numbers) if ends_page(self.entries[place].path)
            )
            self.ends.update(self.entries[directory.numbers[position]].path for position in directory.ends)
        check_entries(self._unchecked())

    def _unchecked(self) -> list[Entry]:
        """What the last packing has not checked, and all directories. Names of hard links are never taken over, so this is a tree, too,
        and when it is one the whole is."""
        places = {place for directory in self.looked for place in directory.numbers}
        return [entry for place, entry in enumerate(self.entries) if place in places or type(entry) is Directory]

    @property
    def settled(self) -> bool:
        """Whether an equal scan will mean an equal tree."""
        return all(directory.settled for directory in self.looked)

    def remember(self) -> list[Remembered]:
        """What the next packing may know, once `fill` was called."""
        fresh = (
            Remembered(
                directory.path,
                # Which name of a file is the first depends on other directories.
                directory.fingerprint if directory.settled and not directory.linked else b"",
                encode_entries([self.entries[place] for place in directory.numbers]),
                encode_entries(directory.stamps),
                tuple(directory.dropped),
                directory.ends,
            )
            for directory in self.looked
        )
        return [*self.kept, *fresh]


class Assembler:
    """Makes the draft of a tree. `available` says whether contents of files need not be read because packs have them; `mtime` is the
    latest modification time, in seconds, that an entry may have."""

    def __init__(
        self,
        scan: TreeScan,
        remembered: dict[bytes, Remembered],
        available: Callable[[Sequence[Entry]], bool],
        *,
        xattrs: bool = False,
        mtime: int | None = None,
    ) -> None:
        self._scan, self._remembered, self._available = scan, remembered, available
        self._xattrs = xattrs
        self._latest_ns = (1 << 63) - 1 if mtime is None else mtime * 1_000_000_000
        self._draft = Draft([], [], [], [], [])
        self._links: dict[tuple[int, int], bytes] = {}

    def assemble(self) -> Draft:
        """Raises UsageError and P2PDistError naming what cannot be packed."""
        entries = self._draft.entries
        pending = [self._directory(b"")]
        while pending:
            for entry in pending[-1]:
                entries.append(entry)
                if type(entry) is Directory:
                    pending.append(self._directory(entry.path))
                    break
            else:
                pending.pop()
        return self._draft

    def _directory(self, path: bytes) -> Iterator[Entry]:
        """The entries of one directory, sorted; each is put into the tree before the next is asked for."""
        fingerprint = blake3(self._scan.directories[path]).digest()
        before = self._remembered.get(path)
        known = decode_entries(before.entries) if before else []
        if before and before.fingerprint == fingerprint and before.ends is not None and self._available(known):
            self._draft.kept.append(before)
            self._draft.ends.update(known[position].path for position in before.ends)
            return iter(known)
        stamps = iter(decode_stamps(before.stamps)) if before else iter(())
        files = {entry.path: (entry, next(stamps)) for entry in known if type(entry) is File}
        looked = _Looked(path, fingerprint)
        self._draft.looked.append(looked)
        return self._look(looked, files)

    def _look(self, looked: _Looked, files: dict[bytes, tuple[File, Stamp | None]]) -> Iterator[Entry]:
        prefix = looked.path + b"/" if looked.path else b""
        for row in self._scan.rows(looked.path):
            path = prefix + row.name
            kind = stat.S_IFMT(row.mode)
            entry: Entry
            if kind == stat.S_IFREG:
                entry = self._file(looked, path, row, files.get(path))
            elif kind == stat.S_IFDIR:
                self._drop_bits(looked, path, row.mode)
                opaque, xattrs = self._attributes(looked, path, row, opaque=True)
                entry = Directory(path, row.mode & MODE_MASK, self._time(path, row), opaque, xattrs)
            elif kind == stat.S_IFLNK:
                entry = Symlink(path, self._time(path, row), self._target(path))
            elif kind == stat.S_IFCHR and row.size == 0:
                entry = Whiteout(path)
            else:
                looked.dropped.append((path, KINDS_DROPPED[kind]))
                continue
            looked.numbers.append(len(self._draft.entries))
            yield entry

    def _file(
        self, looked: _Looked, path: bytes, row: Row, before: tuple[File, Stamp | None] | None
    ) -> File | HardLink:
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
        head = (path, row.mode & MODE_MASK, self._time(path, row), row.size)
        if not row.size:
            return File(*head, EMPTY, b"", xattrs)
        if before and before[1] == stamp and before[0].size == row.size and self._available([before[0]]):
            return File(*head, before[0].content, before[0].chunks, xattrs)
        self._draft.places.append(len(self._draft.entries))
        self._draft.wanted.append(Wanted(self._scan.path(path), row))
        return File(*head, b"", b"", xattrs)

    def _time(self, path: bytes, row: Row) -> int:
        if not -(1 << 63) <= row.mtime_ns < 1 << 63:
            raise UsageError(f"{self._shown(path)} has an impossible modification time", remedy="Set it with touch(1)")
        return min(row.mtime_ns, self._latest_ns)

    def _target(self, path: bytes) -> bytes:
        with self._failures(path):
            return os.readlink(self._scan.path(path))

    def _attributes(self, looked: _Looked, path: bytes, row: Row, *, opaque: bool = False) -> tuple[bool, Xattrs]:
        """Whether a directory is opaque, and the extended attributes `user.*` when they are wanted."""
        if not (opaque or self._xattrs):
            return False, ()
        now = time.time_ns()
        where = self._scan.path(path)
        with self._failures(path):
            hides = opaque and _attribute(where, _OPAQUE) == b"y"
            found = _user_attributes(where) if self._xattrs else ()
        if sum(len(name) + len(value) for name, value in found) > XATTR_BYTES_MAX:
            raise UsageError(f"{self._shown(path)} has more than {XATTR_BYTES_MAX} bytes of extended attributes")
        if not settled(row, now):
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

    def _drop_bits(self, looked: _Looked, path: bytes, mode: int) -> None:
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


def _attribute(path: bytes, name: str) -> bytes:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NONE:
            return b""
        raise
