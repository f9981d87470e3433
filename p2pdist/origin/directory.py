"""Objects in a local directory.

New values are written below `.incoming` (temporary_files.py) and renamed into place after fsync, so
a reader sees all of one or nothing, also after a power cut. Updates hold an exclusive flock on
`.lock`. A process that packs into the directory holds a shared flock on `.packing`, one that
removes from it an exclusive one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote_from_bytes

from p2pdist.files import open_regular
from p2pdist.model.errors import DiskFull, NotFound, P2PDistError, Refused, TooLarge, Unavailable, foreseen
from p2pdist.origin.objects import Stored
from p2pdist.origin.temporary_files import abandoned, new_directory, new_file

LOCK_WAIT_S = 30.0


class Directory:
    """Objects below the directory `root`. Reading needs it to exist; the first write makes it in an
    existing parent, not deeper, so that a file system which is not mounted is noticed. With
    `serving`, as for a tracker or an agent, a root that is not there, or is empty after something
    was read from it, is storage that is away (Unavailable) and not a wrong name (NotFound)."""

    def __init__(self, root: Path, *, serving: bool = False) -> None:
        self.root = root
        self._serving = serving
        self._was_read = False
        self.url = "file://" + quote_from_bytes(os.fsencode(root))

    def path(self, key: str) -> Path:
        """Where the value of `key` lies."""
        return self.root / key

    @property
    def writable(self) -> bool:
        return True

    def read(self, key: str, limit: int) -> bytes | None:
        with self._failures(key):
            try:
                stream = open_regular(self.path(key))  # opened first: it may be deleted or replaced at any moment
            except FileNotFoundError:
                self._check_root()
                return None
            self._was_read = True
            with stream:
                size = os.fstat(stream.fileno()).st_size
                if size > limit:
                    raise TooLarge(f"{key} at {self.url} has {size} bytes, over the limit of {limit}")
                return stream.read(size + 1)

    def read_range(self, key: str, start: int, length: int) -> bytes | None:
        with self._failures(key):
            try:
                handle = os.open(self.path(key), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                self._check_root()
                return None
            self._was_read = True
            try:
                data = os.pread(handle, length, start)
                while 0 < len(data) < length:
                    more = os.pread(handle, length - len(data), start + len(data))
                    if not more:
                        break
                    data += more
                return data
            finally:
                os.close(handle)

    def size(self, key: str) -> int | None:
        with self._failures(key):
            try:
                return self.path(key).stat().st_size
            except FileNotFoundError:
                if self._serving:
                    self._check_root()
                return None

    def write(self, key: str, chunks: Iterator[bytes], size: int) -> None:
        with self._failures(key, size), self._incoming(size, tidy=key.startswith("blobs/")) as (handle, name):
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[os.write(handle, view) :]
            os.fsync(handle)
            self.import_file(key, name)

    def update(self, key: str, limit: int, edit: Callable[[bytes | None], bytes]) -> None:
        with self._failures(key):
            self._make(self.root)
            with self._locked():
                value = edit(self.read(key, limit))
                self.write(key, iter((value,)), len(value))

    def import_file(self, key: str, path: Path) -> None:
        """Move a finished, synced file of the same file system into place."""
        with self._failures(key):
            target = self.path(key)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
            parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(parent)
            finally:
                os.close(parent)

    def incoming(self, *, tidy: bool = True) -> Path:
        """The directory for unfinished files; abandoned ones are deleted if `tidy`."""
        with self._failures(".incoming"):
            self._make(self.root)
            where = self.root / ".incoming"
            where.mkdir(exist_ok=True)
            for _ in abandoned(where, remove=True) if tidy else ():
                pass
            return where

    @contextlib.contextmanager
    def temporary_directory(self) -> Iterator[Path]:
        """A new directory for unfinished files, gone with what is left in it when the block
        ends."""
        with contextlib.ExitStack() as stack:
            with self._failures(".incoming"):
                made = stack.enter_context(new_directory(self.incoming(tidy=False)))
            yield made

    def abandoned(self, *, remove: bool) -> Iterator[tuple[str, int]]:
        with self._failures(".incoming"):
            yield from abandoned(self.root / ".incoming", remove=remove)

    def list(self, folder: str) -> Iterator[Stored]:
        with self._failures(folder):
            self._check_root()
            try:
                entries = os.scandir(self.root / folder)
            except FileNotFoundError:
                return
            with entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield Stored(f"{folder}/{entry.name}", status.st_size, status.st_mtime)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._failures(key):
                self.path(key).unlink(missing_ok=True)

    def lock(self, *, alone: bool) -> Callable[[], None] | None:
        with self._failures(".packing"):
            self._make(self.root)
            handle = os.open(self.root / ".packing", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                return None
            return functools.partial(os.close, handle)

    @contextlib.contextmanager
    def _incoming(self, size: int, *, tidy: bool) -> Iterator[tuple[int, Path]]:
        """An open new file with room for `size` bytes; deleted at the end if it is still there."""
        where = self.incoming(tidy=tidy)
        free = os.statvfs(where)
        if size > free.f_bavail * free.f_frsize:
            raise DiskFull(self.url, needed=size, free=free.f_bavail * free.f_frsize)
        handle, name = new_file(where)
        try:
            yield handle, name
        finally:
            name.unlink(missing_ok=True)
            os.close(handle)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            end = time.monotonic() + LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise Unavailable(
                            f"the index of {self.url} has been locked by another writer for {LOCK_WAIT_S:.0f} s",
                            remedy="Try again; if it persists, find the process that holds .lock there",
                        ) from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(handle)

    def _make(self, directory: Path) -> None:
        try:
            directory.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise self._absent() from None

    def _check_root(self) -> None:
        if not self.root.is_dir():
            raise self._absent()
        if self._serving and self._was_read and not any(self.root.iterdir()):
            raise Unavailable(
                f"{self.url} is empty, and was not before",
                remedy="Mount the file system that belongs there, or bring its content back",
            )

    def _absent(self) -> P2PDistError:
        kind = Unavailable if self._serving else NotFound
        return kind(f"there is no directory {self.url}", remedy="Check the path, mount or create the directory")

    @contextlib.contextmanager
    def _failures(self, key: str, needed: int = 0) -> Iterator[None]:
        """Name what failed: an OSError becomes one of the project's errors; `needed` bytes were to
        be written."""
        try:
            yield
        except P2PDistError:
            raise
        except OSError as error:
            raise self._failure(key, error, needed) from error

    def _failure(self, key: str, error: OSError, needed: int) -> P2PDistError:
        message = f"{key} at {self.url}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull.on(self.url, os.statvfs(self.root), needed=needed, code=error.errno)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "Check the owner and the mode of the directory"
            if error.errno == errno.EROFS:
                remedy = "Mount the file system writable; where the kernel made it read-only, dmesg says why"
            return Refused(f"no access to {message}", remedy=remedy)
        cause = foreseen(error)
        return Unavailable(
            f"cannot use {message}", remedy=cause.remedy if cause else "Check the disk under the directory"
        )
