"""Staged copies of a source: a directory with a part of its entries, or with other files in the
place of some, while the source stays as it is.

Copies share their blocks with the source where the file system can (ioctl_ficlone(2)). Hard links
would cost less, but making one changes the ctime of the user's file: a packing at that time would
find the file changed, and the next packing would read it again. A directory that lacks entries of
its source gets the time of its newest entry, so that the missing entries leave no mark.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.model.errors import DiskFull, P2PDistError, UsageError, printable, remedy_of
from p2pdist.model.tree import DEPTH_MAX
from p2pdist.package.source.ignore import Ignore
from p2pdist.package.source.links import Followed
from p2pdist.package.source.scan import KINDS_DROPPED, Dropped, changed, unreadable

_FICLONE = 0x40049409
_NO_CLONE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.EPERM, errno.ENOSYS, errno.ETXTBSY}
COPY_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """An entry of a source: its path relative to it, and what lstat(2) says."""

    path: bytes
    status: os.stat_result

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.status.st_mode)


def walk(source: Path, *, ignore: Ignore | None = None, only: Collection[bytes] | None = None) -> Iterator[SourceEntry]:
    """Everything below `source` that is taken, parents before children, in the order of names.
    `ignore` leaves out; of `only` a directory stands for itself alone. Raises UsageError, Corrupt
    where something vanishes meanwhile, and P2PDistError naming what cannot be read."""
    top = os.fsencode(source)
    pending = [(b"", 0)]
    while pending:
        directory, depth = pending.pop()
        if depth > DEPTH_MAX:
            raise UsageError(
                f"{source} is nested deeper than {DEPTH_MAX} directories", remedy="Leave that part out with --ignore"
            )
        children = []
        try:
            with os.scandir(os.path.join(top, directory)) as entries:
                for entry in entries:
                    path = os.path.join(directory, entry.name)
                    status = entry.stat(follow_symlinks=False)
                    if ignore is not None and ignore(path, stat.S_ISDIR(status.st_mode)):
                        continue
                    if only is None or path in only:
                        children.append(SourceEntry(path, status))
        except FileNotFoundError as error:
            raise changed(os.path.join(top, directory), "or what is in it vanished") from error
        except OSError as error:
            where = os.fsencode(error.filename) if error.filename else os.path.join(top, directory)
            raise unreadable(os.fsdecode(where), error) from error
        children.sort(key=lambda item: item.path)
        yield from children
        pending += [(item.path, depth + 1) for item in reversed(children) if item.is_directory]


def stage(
    source: Path,
    target: Path,
    *,
    ignore: Ignore | None = None,
    only: Collection[bytes] | None = None,
    replaced: Mapping[bytes, Path | None] | None = None,
    plain_modes: bool = False,
    timeless: bool = False,
    followed: Mapping[bytes, Followed] | None = None,
    holes: bool = False,
) -> list[Dropped]:
    """Make the new directory `target` a copy of `source`, for the entries that `ignore` and `only`
    keep. `replaced` names a file to copy instead of an entry, None to leave it out; `followed`
    names the file to copy instead of a link. With `plain_modes` permissions say only whether the
    owner may execute a file, as in Git (git-fast-import(1)). With `timeless` all directories have
    the time 0. With `holes` those of files stay holes, which take no room. Returns the entries that
    cannot be copied. Raises DiskFull, and what walk raises."""
    try:
        return _Stage(source, target, replaced or {}, plain_modes, timeless, followed or {}, holes).make(ignore, only)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = sum(entry.status.st_size for entry in walk(source, ignore=ignore, only=only))
            raise DiskFull.on(
                str(target.parent), os.statvfs(target.parent), needed=needed, code=error.errno, kept=False
            ) from error
        where = printable(os.fsdecode(error.filename or b""))
        raise P2PDistError(
            f"cannot stage {source}: {where}: {error.strerror}",
            remedy=remedy_of(error),
        ) from error


@dataclass(slots=True)
class _Stage:
    source: Path
    target: Path
    replaced: Mapping[bytes, Path | None]
    plain_modes: bool
    timeless: bool
    followed: Mapping[bytes, Followed]
    holes: bool
    dropped: list[Dropped] = field(default_factory=list)
    copies: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Where a file with several names was copied to, by device and inode."""
    kept: dict[bytes, int] = field(default_factory=dict)
    """How many entries of each directory stay."""
    newest_ns: dict[bytes, int] = field(default_factory=dict)

    def make(self, ignore: Ignore | None, only: Collection[bytes] | None) -> list[Dropped]:
        self.target.mkdir(parents=True)
        top = os.stat(self.source)
        directories = [SourceEntry(b"", top)]
        for entry in walk(self.source, ignore=ignore, only=only):
            if self.replaced.get(entry.path, self.source) is None:
                continue
            followed = self.followed.get(entry.path)
            entry = SourceEntry(entry.path, followed.status) if followed else entry  # noqa: PLW2901
            self._keep(entry)
            if entry.is_directory:
                os.mkdir(self._to(entry.path))
                directories.append(entry)
            else:
                self._place(entry)
        for directory in reversed(directories):
            self._finish(directory)
        return self.dropped

    def _to(self, path: bytes) -> bytes:
        return os.path.join(os.fsencode(self.target), path)

    def _keep(self, entry: SourceEntry) -> None:
        parent = os.path.dirname(entry.path)
        self.kept[parent] = self.kept.get(parent, 0) + 1
        if not entry.is_directory:  # their times are known last
            self.newest_ns[parent] = max(self.newest_ns.get(parent, 0), entry.status.st_mtime_ns)

    def _place(self, entry: SourceEntry) -> None:
        here, there = os.path.join(os.fsencode(self.source), entry.path), self._to(entry.path)
        if entry.path in self.followed:
            here = self.followed[entry.path].path
        other = self.replaced.get(entry.path)
        if other is not None:
            shutil.copyfile(other, there)
            os.chmod(there, self._permissions(entry.status.st_mode))
            return
        mode = entry.status.st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            self._remake(entry, there)
            return
        name = (entry.status.st_dev, entry.status.st_ino)
        if entry.status.st_nlink > 1 and name in self.copies:
            os.link(self.copies[name], there, follow_symlinks=False)
            return
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(here), there)
        else:
            _copy(here, there, entry.status, holes=self.holes)
        shutil.copystat(here, there, follow_symlinks=False)
        if not stat.S_ISLNK(mode):
            os.chmod(there, self._permissions(mode))
        self.copies[name] = there

    def _permissions(self, mode: int) -> int:
        """Of a file or directory with this mode. Bits that are not packed stay, so that packing
        says so."""
        if not self.plain_modes:
            return stat.S_IMODE(mode)
        return (mode & 0o7000) | (0o755 if stat.S_ISDIR(mode) or mode & stat.S_IXUSR else 0o644)

    def _remake(self, entry: SourceEntry, there: bytes) -> None:
        """Of special files only whiteouts (character devices 0/0) mean something in a package."""
        mode = entry.status.st_mode
        if stat.S_ISCHR(mode) and entry.status.st_rdev == 0:
            os.mknod(there, stat.S_IFCHR | 0o600, 0)
        else:
            self.dropped.append(Dropped(os.fsdecode(entry.path), KINDS_DROPPED.get(stat.S_IFMT(mode), "special file")))

    def _finish(self, entry: SourceEntry) -> None:
        """Mode, attributes and time of a directory, once everything in it is there."""
        here, there = os.path.join(os.fsencode(self.source), entry.path), self._to(entry.path)
        shutil.copystat(here, there)
        os.chmod(there, self._permissions(entry.status.st_mode))
        mtime_ns = entry.status.st_mtime_ns
        if len(os.listdir(here)) != self.kept.get(entry.path, 0):
            mtime_ns = self.newest_ns.get(entry.path, 0)
        if self.timeless:
            mtime_ns = 0
        os.utime(there, ns=(mtime_ns, mtime_ns))
        if entry.path:
            parent = os.path.dirname(entry.path)
            self.newest_ns[parent] = max(self.newest_ns.get(parent, 0), mtime_ns)


def _copy(here: bytes, there: bytes, before: os.stat_result, *, holes: bool) -> None:
    """Copy the content of a regular file. Raises Corrupt when it is no longer what it was `before`,
    or OSError."""
    source = os.open(here, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        target = os.open(there, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _copy_bytes(source, target, holes=holes)
        finally:
            os.close(target)
        if _identity(os.fstat(source)) != _identity(before):
            raise changed(here)
    finally:
        os.close(source)


def _copy_bytes(source: int, target: int, *, holes: bool) -> None:
    """Copy what a file holds, to its end, which may be elsewhere than its size says (proc(5))."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
        return
    except OSError as error:
        if error.errno not in _NO_CLONE:
            raise
    status = os.fstat(source)
    if not holes or status.st_blocks * 512 >= status.st_size:
        while os.sendfile(target, source, None, COPY_BYTES):
            pass
        return
    end = 0
    while end < status.st_size and (begin := _next_data(source, end)) is not None:
        end = os.lseek(source, begin, os.SEEK_HOLE)
        os.lseek(target, begin, os.SEEK_SET)
        while begin < end:
            count = os.sendfile(target, source, begin, min(COPY_BYTES, end - begin))
            if not count:
                return
            begin += count
    os.ftruncate(target, status.st_size)


def _next_data(handle: int, start: int) -> int | None:
    """Where what is no hole begins from `start` on; None where nothing does."""
    try:
        return os.lseek(handle, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns
