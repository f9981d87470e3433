"""Records of mounted views, and the processes that use a view.

A record is a JSON file in the work directory, written before anything is mounted: a process that
starts later finds there what is mounted, and what a crash left. The file `<id>.json` belongs to the
directory `<id>` beside it, which holds layer mount points and what programs wrote. The record goes
last, so that a cleaning that failed half-way is taken up again.

A view that was made for one process (`run`) is used as long as that process lives, as long as a
program that was started from it does (its environment names the view), and as long as a process has
something of it open. A program that will only import a module later has nothing open, so open files
alone do not decide. Processes of other users may be hidden from an agent without root (hidepid in
proc(5)), so a program also inherits a lock on the view (flock(2)), which every agent that may open
the view can see. The message of an unmount that fails names the processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from p2pdist.model.manifest import ROOT_VARIABLE
from p2pdist.mount import kernel
from p2pdist.mount.overlay import unmount_layers
from p2pdist.mount.sight import namespace
from p2pdist.mount.supervisor.protocol import dismiss
from p2pdist.removal import remove_tree

HOLDERS_MAX = 5
SEARCH_S_MAX = 1.0
CHANGE_S_MAX = 10.0
"""Nothing that changes mounts of a record waits longer until another thread or process has done
so. None does what can take long meanwhile."""

CHANGE_POLL_S = 0.02
IMAGES = "images"
"""The `method` of images that are handed out: nothing is mounted."""

LAZY = "lazy"
"""The `method` of a view whose contents come while they are read."""

_BORN = "born"
"""File in the directory of a record that says when the directory of its plain files was made."""

_ENDED = (b"Z", b"X")
_ID = re.compile(r"[0-9a-f]{16}\Z")
_OWNER = re.compile(r"([0-9]{1,9}:[0-9]{1,18})?\Z")
_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Process:
    """A process."""

    pid: int
    started: int = 0
    """When it began, in clock ticks since the machine's start, because numbers are used again; 0
    where this user may not see it."""

    @property
    def alive(self) -> bool:
        """Whether it runs. One that is hidden from this user counts as running while its number is
        in use."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it belongs to another user
        status = _stat(self.pid)
        if status is None:
            return True
        state, started = status
        return state not in _ENDED and self.started in (0, started)

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"


def process(pid: int) -> Process:
    """The process that has the number `pid` now."""
    status = _stat(pid)
    return Process(pid, status[1] if status else 0)


def parse_process(text: str) -> Process | None:
    """The Process of which str() gave `text`; None for the empty string. Raises ValueError."""
    pid, _, started = text.partition(":")
    return Process(int(pid), int(started)) if text else None


def _stat(pid: int) -> tuple[bytes, int] | None:
    """State and start of a process; None when there is none, or none that this user may see."""
    try:
        # The name of the program, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return fields[0], int(fields[19])


def user(target: Path) -> Process | None:
    """A process that uses the view at `target` (a real path), or None when this user sees none."""
    path = os.fsencode(target)
    return run_from(target) or next((process(pid) for pid in _pids() if _uses(pid, path)), None)


def run_from(target: Path) -> Process | None:
    """A process that runs a program of the view at `target`, or None when this user sees
    none."""
    return next((process(pid) for pid in _pids() if _started_from(pid, target)), None)


def _started_from(pid: int, target: Path) -> bool:
    """Whether the environment of a process, as it was when its program began, names the view at
    `target`."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # it ended, or belongs to another user
    return os.fsencode(f"{ROOT_VARIABLE}={target}") in environment.split(b"\0")


def holders(target: Path, *, of_run: bool = False) -> list[str]:
    """Up to HOLDERS_MAX processes, as "name (pid 12)", with a file, directory or program open at or
    below `target` (a real path), and with `of_run` those that were started from it; found on a best
    effort basis within SEARCH_S_MAX seconds. Processes of other users show only to root."""
    path = os.fsencode(target)
    return _found(lambda pid: (of_run and _started_from(pid, target)) or _uses(pid, path))


def holders_of_copies(copied: Mapping[int, Sequence[bytes]]) -> list[str]:
    """As `holders`, of a view in other mount namespaces (`Elsewhere.copied`)."""

    def uses(pid: int) -> bool:
        try:
            paths = copied.get(namespace(pid), ())
        except OSError:
            return False  # it ended, or belongs to another user
        return any(_uses(pid, path) for path in paths)

    return _found(uses) if copied else []


def _found(uses: Callable[[int], bool]) -> list[str]:
    names: list[str] = []
    deadline = time.monotonic() + SEARCH_S_MAX
    for pid in _pids():
        if len(names) >= HOLDERS_MAX or time.monotonic() > deadline:
            break
        if uses(pid):
            names.append(named(pid))
    return names


def named(pid: int) -> str:
    """A process for a message, as "name (pid 12)"."""
    return f"{_name(pid)} (pid {pid})"


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdecimal())


def _uses(pid: int, view: bytes) -> bool:
    process = Path(f"/proc/{pid}")
    try:
        links = [process / name for name in ("cwd", "root", "exe")] + list((process / "fd").iterdir())
    except OSError:
        return False  # it ended, or belongs to another user
    for link in links:
        try:
            path = os.readlink(os.fsencode(link))
        except OSError:
            continue
        if path == view or path.startswith(view + b"/"):
            return True
    try:
        return b" " + view + b"/" in (process / "maps").read_bytes()
    except OSError:
        return False


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "a process"


@dataclass(frozen=True, slots=True)
class Record:
    """One mounted view, or images that were handed out."""

    id: str
    target: str
    """A real path, or with `method` IMAGES the name under which images are handed out."""
    method: str
    images: tuple[str, ...]
    created: bool = False
    """Whether this mount made the directory."""
    staging: str = ""
    """The directory of unpacking, before it is renamed to `target`."""
    inode: int = 0
    """The number of that directory, by which it is known afterwards."""
    label: str = ""
    """Free for the caller."""
    writable: bool = False
    owner: str = ""
    """The process for which it was made (`Process`), empty for a mount that stays until it is
    unmounted."""

    @property
    def source(self) -> str:
        """The name of this mount's overlay in mountinfo: it tells ours from others'."""
        return f"p2pdist:{self.id}"

    def directory(self, work: Path) -> Path:
        """Where layers are mounted."""
        return work / self.id


def new_id() -> str:
    return secrets.token_hex(8)


def save(record: Record, work: Path) -> None:
    """Write or replace the record, atomically and durably."""
    partial = work / f"{record.id}.partial"
    fields = asdict(record)
    fields["how"] = fields.pop("method")  # as earlier releases have it
    with partial.open("w") as file:
        json.dump(fields, file)  # ASCII escapes carry names that are not UTF-8
        file.flush()
        os.fsync(file.fileno())
    partial.replace(work / f"{record.id}.json")


def _parse(path: Path) -> Record | None:
    try:
        with path.open() as file:
            fields = {**json.loads(file.read(_BYTES_MAX))}  # raises TypeError where it is no object
        method, images = fields.pop("how"), tuple(fields.pop("images"))
        record = Record(**fields, method=method, images=images)
        msgspec.convert(asdict(record), Record)  # raises where a field has another type
    except (OSError, ValueError, TypeError, KeyError, msgspec.ValidationError):
        return None
    named = record.id == path.stem and _ID.match(record.id)
    return record if named and _OWNER.match(record.owner) else None


def records(work: Path) -> list[Record]:
    """All records of a work directory; files that are not records are left alone."""
    return [record for path in sorted(work.glob("*.json")) if (record := _parse(path)) is not None]


def is_ours(record: Record, entry: kernel.Mounted) -> bool:
    """Whether `entry`, found at the record's target, is this record's mount: our overlay, or a loop
    device over its image."""
    if entry.kind == "overlay":
        return entry.source == record.source
    return entry.kind == "squashfs" and kernel.backing_file(entry.source) in record.images


def views_at(record: Record) -> list[kernel.Mounted]:
    """What is mounted of a record at its target, the oldest first: the view, and what covers it
    (mount/lazy/plain.py). Each may be there several times, where a directory above it is mounted at
    itself."""
    target = Path(record.target)
    return [entry for entry in kernel.mounted() if entry.point == target and is_ours(record, entry)]


def are_covered(views: Sequence[kernel.Mounted]) -> bool:
    """Whether one of the mounts of a record covers another one: they differ in file system."""
    return len({view.device for view in views}) > 1


@contextlib.contextmanager
def changing(directory: Path) -> Iterator[None]:
    """One thread or process at a time changes what is mounted of the record with this directory.
    Raises OSError, TimeoutError when another one has not done so within CHANGE_S_MAX."""
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + CHANGE_S_MAX
    try:
        while True:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    reason = f"what is mounted of it has been changed for {CHANGE_S_MAX:g} s"
                    raise TimeoutError(errno.ETIMEDOUT, reason, os.fspath(directory)) from error
                time.sleep(CHANGE_POLL_S)
        yield
    finally:
        os.close(place)


def is_whole(record: Record, work: Path) -> bool:
    """Whether what the record says is there: False when its process was killed before it was done,
    or the machine has started anew."""
    if record.method == IMAGES:
        return bool(record.owner)
    if record.inode:
        return _has_files(record, work)
    return bool(views_at(record))


def note_files(record: Record, files: Path, work: Path) -> Record:
    """The record of a view whose plain files are in the directory `files`, by which it is known
    from then on, also under another name. Writes when that was made, since file systems use the
    numbers of what was removed again. Raises OSError."""
    (record.directory(work) / _BORN).write_text(str(kernel.born_ns(files)))
    return replace(record, inode=files.lstat().st_ino)


def _has_files(record: Record, work: Path) -> bool:
    """Whether the plain files of a record are at its target, and not a directory of others that was
    made there since."""
    target = Path(record.target)
    try:
        if target.lstat().st_ino != record.inode:
            return False
    except OSError:
        return False
    try:
        born = (record.directory(work) / _BORN).read_bytes()
    except FileNotFoundError:
        born = b""
    now = kernel.born_ns(target)
    # An earlier release did not write it, nor does a machine that is lost at once; and a file
    # system may say it under one kernel and not under another one.
    return not now or not born.isdigit() or born in (b"0", b"%d" % now)


def take_down(record: Record, work: Path, *, lazily: bool = False) -> None:
    """Undo everything of a record, and forget it. Repeating it is harmless. Raises OSError, EBUSY
    when the mount is in use, or lies below one of others."""
    with contextlib.ExitStack() as changes:
        try:
            changes.enter_context(changing(record.directory(work)))
        except TimeoutError:
            raise
        except OSError:
            pass  # the directory is gone
        _take_down(record, work, lazily=lazily)


def _take_down(record: Record, work: Path, *, lazily: bool) -> None:
    target = Path(record.target)
    while (entry := kernel.mounted_at(target)) is not None and is_ours(record, entry):
        kernel.unmount_here(target, lazily=lazily)
    if entry is not None and views_at(record):
        raise OSError(errno.EBUSY, f"{entry.source} is mounted over it", record.target)
    if record.method == LAZY and not lazily:  # else programs may still read it
        dismiss(record.directory(work))  # first: the kernel waits for reads that programs left behind
    unmount_layers(record.directory(work))
    if record.staging:
        remove_tree(Path(record.staging))
    if entry is None and record.inode and _has_files(record, work):
        remove_tree(target, keep=not record.created)
    elif entry is None and record.created:
        with contextlib.suppress(OSError):  # it is gone, or holds something that is not ours
            target.rmdir()
    remove_tree(record.directory(work))
    (work / f"{record.id}.partial").unlink(missing_ok=True)
    (work / f"{record.id}.json").unlink(missing_ok=True)
