"""Temporary files: what is unfinished, and directories of it, beside what they become; and which of
them are abandoned.

The process that makes a temporary file holds an exclusive flock(2) on it, which ends with the
process however that ends. Other processes see the lock for certain only under the same kernel: over
NFS locks may stay on a machine, and a machine that serves a directory does not see its clients'
locks. So a temporary file is named after the boot in which it was made (boot_id, random(4)). A
temporary file of this boot that is not locked is abandoned, and any other one that was not written
to for ABANDONED_AFTER_S. Stages have the same names after each boot, since notes of packings are
kept by path: they hold a mark instead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from p2pdist.model.errors import Conflict
from p2pdist.removal import remove_tree

ABANDONED_AFTER_S = 86_400.0
TEMPORARY, STAGE = "draft-", "stage-"
"""How the names of temporary files and stages begin."""


@functools.cache
def boot_mark() -> str:
    """How the names of this boot's temporary files begin, and the name of what this boot's stages
    hold."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = secrets.token_hex(16)  # of no other process: age alone counts then
    return f"{TEMPORARY}{boot}-"


def new_file(directory: Path) -> tuple[int, Path]:
    """A new temporary file in `directory`, open for writing, locked until it is closed. Raises
    OSError."""
    while True:
        path = directory / (boot_mark() + secrets.token_hex(12))
        # 0o666 less the umask, so that others (a web server, colleagues) may read what the writer's
        # umask lets them.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if lock(handle) and is_at(handle, path):
            return handle, path
        os.close(handle)
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A new temporary file in `directory` that is a directory; gone with what is left in it when
    the block ends. Raises OSError."""
    handle, path = _made(directory)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # what cannot be removed now is found abandoned later
            remove_tree(path)
        os.close(handle)


def _made(directory: Path) -> tuple[int, Path]:
    while True:
        path = directory / (boot_mark() + secrets.token_hex(12))
        path.mkdir()
        with contextlib.suppress(FileNotFoundError):  # removed as abandoned, since it was not locked yet
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if lock(handle) and is_at(handle, path):
                return handle, path
            os.close(handle)
            path.rmdir()


@contextlib.contextmanager
def stage_directory(directory: Path, purpose: str) -> Iterator[Path]:
    """A new directory below `directory` that is gone with all that is in it when the block ends. It
    is called the same each time for one purpose, and what a killed process left of it is removed.
    Where another user has something of that name, as any can make it in /tmp, it is called
    otherwise. Raises Conflict while another process of this user has it."""
    named = directory / f"{STAGE}{hashlib.sha256(os.fsencode(purpose)).hexdigest()[:16]}"
    handle, place = _entered(named, purpose)
    try:
        remove_tree(place, keep=True)
        (place / boot_mark()).touch()
        made = place / "work"
        made.mkdir(mode=0o700)
        yield made
    finally:
        with contextlib.suppress(FileNotFoundError):  # where there are no locks others remove it as well
            remove_tree(place)
        os.close(handle)


def _entered(named: Path, purpose: str) -> tuple[int, Path]:
    """A descriptor of the directory `named`, or of one beside it where that is another user's, and
    where it is: made where needed, locked until it is closed. Raises Conflict."""
    place = named
    while True:
        is_new = _is_made(place)
        with contextlib.suppress(FileNotFoundError):  # another process ended, or is cleaning up
            handle = _of_this_user(place, is_new)
            if handle is None:
                place = named.with_name(f"{named.name}-{secrets.token_hex(8)}")
                continue
            if not lock(handle):
                os.close(handle)
                shown = os.fsencode(purpose).decode("utf-8", "backslashreplace")
                raise Conflict(
                    f"another process has begun the same: {shown}", remedy="Wait until it has ended, then try again"
                )
            if is_at(handle, place):
                return handle, place
            os.close(handle)


def _is_made(place: Path) -> bool:
    """Make a directory; False where there is something of this name."""
    try:
        place.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def _of_this_user(place: Path, is_new: bool) -> int | None:
    """A descriptor of a directory; None for what is none, or another user's, who could exchange
    what is made in it. A new one is this user's, whoever the file system says owns it."""
    try:
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (NotADirectoryError, PermissionError):
        if is_new:
            raise
        return None
    if is_new or os.fstat(handle).st_uid == os.geteuid():
        return handle
    os.close(handle)
    return None


def lock(handle: int) -> bool:
    """Lock what was opened as a temporary file until it is closed; False when another process has
    it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Where there are no locks, no process can find that it is not locked.
        return error.errno != errno.EWOULDBLOCK
    return True


def is_at(handle: int, path: Path) -> bool:
    """Whether what was opened at `path` is still there: before it was locked it could be removed as
    abandoned."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def abandoned(directory: Path, *, remove: bool) -> Iterator[tuple[str, int]]:
    """Names and bytes of the temporary files in `directory` that are abandoned, which are deleted
    if `remove`. Raises OSError."""
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return
    for entry in entries:
        # Another process may be cleaning up as well; and what this user may not delete is left to
        # another.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            size = _end(entry, remove)
            if size is not None:
                yield entry.name, size


def _end(entry: os.DirEntry[str], remove: bool) -> int | None:
    """The bytes of a temporary file that is abandoned, which is deleted if `remove`; None where it
    is not, or that cannot be told."""
    status = entry.stat(follow_symlinks=False)
    is_directory = stat.S_ISDIR(status.st_mode)
    if is_directory and not entry.name.startswith((TEMPORARY, STAGE)):
        return None
    is_ours = entry.name.startswith(boot_mark()) or os.path.lexists(os.path.join(entry.path, boot_mark()))
    is_old = _written(entry) < time.time() - ABANDONED_AFTER_S
    if not is_ours and not is_old:
        return None
    with _looked_for(entry.path) as is_free:
        if not is_free and (is_directory or is_free is False or not is_old):
            return None
        size = _bytes_below(entry.path) if is_directory else status.st_size
        if remove and is_directory:
            try:
                remove_tree(entry.path)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                return None  # NFS keeps a file that is open, under another name
        elif remove:
            os.unlink(entry.path)
        return size


def _written(entry: os.DirEntry[str]) -> float:
    """When a temporary file was last written to; of a directory what is right in it counts, too."""
    times = [entry.stat(follow_symlinks=False).st_mtime]
    if entry.is_dir(follow_symlinks=False):
        with os.scandir(entry.path) as children:
            times += [child.stat(follow_symlinks=False).st_mtime for child in children]
    return max(times)


@contextlib.contextmanager
def _looked_for(path: str) -> Iterator[bool | None]:
    """Whether no process has locked the temporary file, which none does before the block ends; None
    where one cannot tell."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:
        yield None
        return
    try:
        is_free: bool | None = True
        try:
            # Shared, since NFS wants an exclusive one to be on what is open for writing.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            is_free = False if error.errno == errno.EWOULDBLOCK else None
        yield is_free
    finally:
        os.close(handle)


def _bytes_below(path: str) -> int:
    """Of the files below a directory, however deep they lie, as far as this user may see them."""
    size, pending = 0, [path]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    size += entry.stat(follow_symlinks=False).st_size
    return size
