"""The disk below a store: free space, reservation, whole writes, and what its failures mean to a
user."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

from p2pdist.model.errors import DiskFull, P2PDistError, foreseen

RESERVE_BYTES = 64 << 20
"""A store leaves this much of the disk free, or a hundredth of a disk smaller than 6.4 GB: logs,
the index and others need some."""

RESERVE_FILES = 1024
"""A store leaves so many inodes free, or a hundredth of those of a file system with fewer than
102,400."""

INDEX_BYTES = 1 << 20
"""What the files of an index need to grow; where a disk is smaller than 100 MB, a hundredth of
it."""

TRIED_AGAIN_S = 1.0
"""So long after a trial that showed room within the quota there is no other one: it writes to the
journal of the file system."""

HANGS_S = 1.0
"""A disk that has not taken a byte for so long hangs."""

logger = logging.getLogger(__name__)

UNREADABLE = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}
"""What disks and file systems say of what they have lost or find damaged. It is dropped and comes
again, as what reads otherwise than it was written."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
_TMPFS, _STATFS_BYTES = 0x01021994, 256  # linux/magic.h; more than a struct statfs
_libc = ctypes.CDLL(None, use_errno=True)


def boot_id() -> UUID:
    """Identifies the running kernel since its start (random(4)). What was written under another
    boot id and not synchronised may be lost."""
    return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the filesystem of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def disk_bytes(path: Path) -> int:
    """Size of the filesystem of `path`."""
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize


def largest_bytes(path: Path) -> int:
    """What usable_bytes would be if nothing were on the filesystem."""
    status = os.statvfs(path)
    size = status.f_blocks * status.f_frsize
    return size - min(RESERVE_BYTES, size // 100)


def usable_bytes(path: Path) -> int:
    """Free bytes less the reserve; never negative."""
    status = os.statvfs(path)
    reserve = min(RESERVE_BYTES, status.f_blocks * status.f_frsize // 100)
    return max(0, status.f_bavail * status.f_frsize - reserve)


def usable_files(path: Path, temporary: Path) -> int | None:
    """How many files may yet be made on the filesystem of `path`, less the reserve, never negative;
    None where their number is not fixed, or the filesystem says none and still makes one in the
    directory `temporary`, as some in user space do."""
    status = os.statvfs(path)
    if not status.f_files or (not status.f_favail and _makes_files(temporary)):
        return None
    return max(0, status.f_favail - min(RESERVE_FILES, status.f_files // 100))


def _makes_files(path: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def allocate(fd: int, size: int) -> None:
    """Make the file `size` bytes long with its space reserved, or sparse where the filesystem
    cannot reserve, or only by writing zeros: in memory that takes longest just when a pull waits
    for its first piece. Raises OSError."""
    if in_memory(fd):
        os.ftruncate(fd, size)
    else:
        reserve(fd, size)


def in_memory(fd: int) -> bool:
    """Whether a file is on tmpfs (fstatfs(2), whose first word is the type of the filesystem):
    there no call waits for a disk, and none for a snapshot either, since tmpfs cannot be frozen.
    Raises OSError."""
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, status) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return ctypes.c_long.from_buffer(status).value == _TMPFS


def reserve(fd: int, size: int) -> None:
    """Make the file `size` bytes long with its space reserved, or sparse where the filesystem
    cannot reserve. Raises OSError.

    fallocate(2) is called itself, since posix_fallocate(3) writes every block where the call is not
    supported.
    """
    if size == 0:
        return
    while _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in {errno.EOPNOTSUPP, errno.ENOSYS}:
            os.ftruncate(fd, size)
            return
        raise OSError(code, os.strerror(code))


def pwrite_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; raises OSError."""
    written = os.pwrite(fd, data, offset)
    if written == len(data):
        return
    rest = memoryview(data)[written:]
    while rest:
        written = os.pwrite(fd, rest, offset + len(data) - len(rest))
        rest = rest[written:]


class Pulse:
    """Whether the disk of a file answers: each question writes one byte of the file, in a thread.
    `fd` is open for writing, and its byte at `offset` may have any value; `path` is where it was
    opened. Thread-safe."""

    def __init__(self, fd: int, offset: int, path: Path) -> None:
        self._fd, self._offset, self._path = fd, offset, path
        self._lock = threading.Lock()
        self.lost = False
        """Whether the file was no longer at its path when the disk answered last: somebody has
        removed its directory, or mounted something over it."""
        self._began: float | None = None

    def hangs_s(self) -> float:
        """For how many seconds the disk has not answered, 0 while it does; begins to find out for
        the next time. Returns at once."""
        with self._lock:
            if self._began is None:
                self._began = time.monotonic()
                threading.Thread(target=self._beat, name="disk-pulse", daemon=True).start()
                return 0.0
            waited_s = time.monotonic() - self._began
        return waited_s if waited_s >= HANGS_S else 0.0

    @property
    def waiting(self) -> bool:
        """Whether a byte is being written."""
        return self._began is not None

    def _beat(self) -> None:
        try:
            with suppress(OSError):  # each write reports it; here the disk only has to answer
                os.pwrite(self._fd, b"\n", self._offset)
            self.lost = not _is_at(self._path, self._fd)
        except OSError as error:
            logger.debug("the store's directory cannot be looked at: %s", error)
        finally:
            with self._lock:
                self._began = None


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def refusal(directory: Path, size: int) -> int:
    """Why `size` more bytes do not fit into a directory, as errno says it; 0 where they do. The
    quota of a user is seen by trying alone."""
    if free_bytes(directory) < size:
        return errno.ENOSPC
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            reserve(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        return error.errno if error.errno in _FULL else 0
    return 0


class Reserve:
    """A file that keeps room for the index in the same directory. Where others have filled the
    disk, or the quota is used up, it goes, so that what is to be removed can be written down, and
    it comes again once there is room."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "reserve"
        self._had_room: float | None = None
        """When a trial showed room, by the monotonic clock; None where a write failed since."""

    def use(self) -> None:
        """Give the room to the index, where the disk, or the quota, has no other."""
        directory = self._path.parent
        with suppress(OSError):
            if self._path.exists() and self._lacks_room():
                self._path.unlink()
                sync_filesystem(directory)  # some give space back late

    def doubt(self) -> int:
        """A write failed. Returns why the index gets no room, as errno says it; 0 where it does.
        Raises OSError."""
        self._had_room = None
        return refusal(self._path.parent, INDEX_BYTES)

    def _lacks_room(self) -> bool:
        directory, size, now = self._path.parent, self._size(), time.monotonic()
        if self._had_room is not None and now - self._had_room < TRIED_AGAIN_S:
            return free_bytes(directory) < size
        refused = refusal(directory, size)
        self._had_room = None if refused else now
        return bool(refused)

    def keep(self) -> None:
        """Take the room, where it is not taken and there is enough; but no memory."""
        with suppress(OSError):
            size = self._size()
            # Of what a store leaves free, or it would have none beside a full store.
            if free_bytes(self._path.parent) < 4 * size:
                return
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                # Less where it was copied sparsely, or the process that made it was killed.
                if os.fstat(fd).st_blocks * 512 < size and not in_memory(fd):
                    reserve(fd, size)
            finally:
                if not os.fstat(fd).st_size:
                    self._path.unlink()
                os.close(fd)

    def _size(self) -> int:
        return min(INDEX_BYTES, disk_bytes(self._path.parent) // 100)


def sync_path(path: Path) -> None:
    """Flush a file or a directory to the disk; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_filesystem(path: Path) -> None:
    """Flush the filesystem of `path` (syncfs(2)), which also makes the space of removed files free
    again where that is put off. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_filesystem_of(fd)
    finally:
        os.close(fd)


def sync_filesystem_of(fd: int) -> None:
    """Flush the filesystem of what is open. Raises OSError, once for each descriptor, also where
    the disk has failed to take something since the file was opened."""
    if _libc.syncfs(fd) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def forget(path: Path) -> None:
    """Have what is read of a file next come from the disk, but for what is yet to be written there.
    Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def failure(error: OSError, path: Path, *, needed: int = 0) -> P2PDistError:
    """What an OSError at `path` means to a user: DiskFull (with `needed` bytes), else what
    `foreseen` says."""
    if error.errno in _FULL:
        directory = path if path.is_dir() else path.parent
        try:
            return DiskFull.on(str(directory), os.statvfs(directory), needed=needed, code=error.errno)
        except OSError:
            return DiskFull(str(directory), needed=needed, free=0)
    return foreseen(error, str(path)) or P2PDistError(
        f"{path} cannot be used: {error.strerror or error}",
        remedy="Check the disk and the permissions of the directory",
    )


@contextmanager
def failures(path: Path, *, needed: int = 0) -> Iterator[None]:
    """Turn each OSError within into what it means to a user."""
    try:
        yield
    except OSError as error:
        raise failure(error, path, needed=needed) from error
