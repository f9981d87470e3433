"""Copies of stored files elsewhere, made atomically: the output appears whole or not at all.

place() copies a file that is there. A Copy is written while the file arrives, so that little is
left to do after the last piece: where many hosts share a machine, all of them would copy at the
same moment.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from p2pdist.model.errors import Conflict, NotFound
from p2pdist.store.disk import failures, pwrite_all

Value = TypeVar("Value")

FICLONE = 0x40049409
"""ioctl_ficlone(2): share the extents of another file."""

_STEP = 64 << 20
_NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
"""What file systems and kernels without O_TMPFILE say of it (open(2))."""

_UNSUPPORTED = {errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EPERM, errno.ETXTBSY}


def place(fd: int, size: int, output: Path) -> str:
    """Give `output` the content of the file open as `fd`, of `size` bytes, as a file of its own:
    what is written into it changes no other. An existing file is replaced.

    Returns the method: "reflink" where the filesystem can, else "copy". Raises NotFound when the
    directory is missing, Conflict when `output` is a directory or a device, DiskFull.
    """
    with failures(output, needed=size), _directory(output) as directory:
        return _named(output, directory, lambda temporary: _fill(fd, size, temporary, directory))


class Copy:
    """An output that is written piece by piece. It has no name before publish(), so a process that
    is killed leaves nothing of it behind.

    The process that calls begin() and publish() needs the right to write into the directory;
    write() and close() need none. The directory is the one that begin() saw, wherever its path
    leads when publish() is called.
    """

    def __init__(self, output: Path, fd: int, directory: int) -> None:
        """Takes over both descriptors."""
        self.output = output
        self.failed = False
        """A write failed, as on a full disk: nothing more is written, and the copy cannot be
        published."""
        self._fd = fd
        self._directory = directory
        self._lock = threading.Lock()  # of the two below; never held while a disk is waited for
        self._closed = False
        self._users = 0

    @classmethod
    def begin(cls, source: int, size: int, output: Path) -> Copy | None:
        """A copy of the file open as `source`, which need not be whole yet, of `size` bytes in the
        end. None where place() does better: the file system shares extents, or has no unnamed
        files. Raises as place()."""
        with failures(output, needed=size), _directory(output) as directory:
            try:
                fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666, dir_fd=directory)
            except OSError as error:
                if error.errno not in _NO_UNNAMED_FILES:
                    raise
                return None
            try:
                shares = _reflink(source, fd)
            except BaseException:
                os.close(fd)
                raise
            if shares:
                os.close(fd)
                return None
            return cls(output, fd, os.dup(directory))

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`. A failure is noted in `failed`: place() says what is wrong, if
        it still is by then. Does nothing when closed."""
        with self._open() as is_open:
            if is_open and not self.failed:
                try:
                    pwrite_all(self._fd, data, offset)
                except OSError:
                    self.failed = True

    def publish(self) -> None:
        """Give the copy, of which all was written, its name; an existing file is replaced. Raises
        as place(), and when closed."""
        assert not self.failed, "not all of it was written"
        with self._open() as is_open, failures(self.output):
            if not is_open:
                raise OSError(errno.EBADF, "the copy was given up")
            _check_replaceable(self.output, self._directory)
            # The flag of linkat(2) by which a file without a name gets one through /proc: os.link()
            # sets it with `src_dir_fd` only.
            root = os.open("/", os.O_PATH | os.O_CLOEXEC)
            try:

                def link(temporary: str) -> None:
                    unnamed = f"proc/self/fd/{self._fd}"
                    os.link(unnamed, temporary, src_dir_fd=root, dst_dir_fd=self._directory, follow_symlinks=True)

                _named(self.output, self._directory, link)
            finally:
                os.close(root)

    def close(self) -> None:
        """Close the files; a copy that was not published is gone. While a thread is writing, that
        thread closes them when it is done, and the caller does not wait. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._release()

    @contextmanager
    def _open(self) -> Iterator[bool]:
        """Whether the descriptors are open; if so, they remain it."""
        with self._lock:
            is_open = not self._closed
            self._users += is_open
        try:
            yield is_open
        finally:
            with self._lock:
                self._users -= is_open
                if is_open and self._closed:
                    self._release()

    def _release(self) -> None:
        if self._users == 0:
            os.close(self._fd)
            os.close(self._directory)


@contextmanager
def _directory(output: Path) -> Iterator[int]:
    """The directory of `output`, in which all happens, whatever its path leads to meanwhile. Raises
    NotFound, and Conflict where replacing `output` would lose more than a file."""
    try:
        directory = os.open(output.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"the directory {output.parent} does not exist", remedy="Create it first") from error
    try:
        _check_replaceable(output, directory)
        yield directory
    finally:
        os.close(directory)


def _named(output: Path, directory: int, make: Callable[[str], Value]) -> Value:
    """Have `make` create a file under a temporary name, then give it the output's; returns what
    `make` does."""
    # The name is short and of our own making: the output's may be as long as names can be.
    temporary = f".p2pdist-{secrets.token_hex(8)}"
    try:
        made = make(temporary)
        os.replace(temporary, output.name, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
    return made


def _check_replaceable(output: Path, directory: int) -> None:
    """Raises Conflict where replacing `output` would lose more than a file."""
    try:
        mode = os.stat(output.name or ".", dir_fd=directory).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise Conflict(f"{output} is a directory", remedy="Name a file in it")
    if not stat.S_ISREG(mode):
        raise Conflict(f"{output} is no file but a device, pipe or socket", remedy="Name a file")


def _fill(fd: int, size: int, name: str, directory: int) -> str:
    target = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=directory)
    try:
        if _reflink(fd, target):
            return "reflink"
        _copy(fd, target, size)
        return "copy"
    finally:
        os.close(target)


def _reflink(fd: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, FICLONE, fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def _copy(fd: int, target: int, size: int) -> None:
    """Copy inside the kernel; raises OSError, also when the source is shorter than `size`."""
    offset, whole = 0, False
    while offset < size:
        try:
            if whole:
                moved = os.sendfile(target, fd, offset, min(size - offset, _STEP))
            else:
                moved = os.copy_file_range(fd, target, min(size - offset, _STEP), offset, offset)
        except OSError as error:
            if whole or error.errno not in _UNSUPPORTED:
                raise
            whole = True
            os.lseek(target, offset, os.SEEK_SET)
            continue
        if moved == 0:
            raise OSError(errno.EIO, "the stored file is shorter than it was")
        offset += moved
