"""Methods to fill the device of a lazy view while it is read: what keeps readers waiting, and what
EROFS images have as their device.

fanotify: the kernel asks before it reads the device itself (mount/supervisor); Linux 6.14. fuse:
the device is a file of FUSE under a loop device (fuse.py); Linux 5.16, which is the first one that
has EROFS images with a device. Which of them works on a host a trial says (trial.py).
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.device import Cells
from p2pdist.model.errors import Unavailable
from p2pdist.mount import kernel
from p2pdist.mount.lazy.fuse import LOOP, POINT, loop_name
from p2pdist.mount.supervisor.process import LOG, READY_S, WAIT
from p2pdist.mount.supervisor.protocol import DEVICE


@dataclass(frozen=True, slots=True)
class FillMethod:
    """How a view is filled. `module` is the program that keeps readers of a view waiting. `device`
    gives the path that images get as their device, as long as the block lasts and for what was
    mounted in it. `looped`: they are mounted through loop devices, for the kernel has a device and
    its image either both in files or both in block devices. `cells` are those of the device: they
    have heads where the kernel could read what nothing has filled."""

    name: str
    module: str
    cells: Cells
    device: Callable[[Path], AbstractContextManager[Path]]
    looped: bool


@contextmanager
def _file(directory: Path) -> Iterator[Path]:
    opened = os.open(directory / DEVICE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{opened}")
    finally:
        os.close(opened)


@contextmanager
def _loop(directory: Path) -> Iterator[Path]:
    with fuse_loop(directory, DEVICE) as device:
        yield Path(device)


@contextmanager
def fuse_loop(directory: Path, file: str) -> Iterator[str]:
    """A loop device over a file of FUSE of the view with this directory, until the block ends and
    nothing mounted uses it. Raises OSError."""
    with kernel.loop_device(directory / POINT / file, name=loop_name(directory, file), direct=True) as device:
        (directory / f"{file}{LOOP}").symlink_to(device)
        yield device


FANOTIFY = FillMethod("fanotify", "p2pdist.mount.supervisor.process", Cells(headed=True), _file, looped=False)
FUSE = FillMethod("fuse", "p2pdist.mount.lazy.fuse", Cells(headed=False), _loop, looped=True)
METHODS = (FANOTIFY, FUSE)
"""Best first."""

REMEDY = "docs/operations.md, Lazy views, says what they need; mount without --lazy"
METHOD_FILE = "way"
"""The file of a view that names its method; none for fanotify."""


def method_of(directory: Path) -> FillMethod:
    """How the view with this directory is filled. Raises Unavailable for one that this
    version does not know: its device may have other cells."""
    try:
        name = (directory / METHOD_FILE).read_text()
    except FileNotFoundError:
        return FANOTIFY
    for method in METHODS:
        if method.name == name:
            return method
    raise Unavailable(f"it is filled by the method {name[:20]!r} of another version", remedy="Mount the package again")


class StandBy:
    """A program that is to supervise the view with this directory, begun before there is anything
    to supervise: an interpreter takes longer to begin than all else of a view. It ends by itself
    unless it is used. For views that fanotify fills."""

    def __init__(self, directory: Path, limit_s: float) -> None:
        self.directory, self.limit_s = directory, limit_s
        words = [sys.executable, "-P", "-m", FANOTIFY.module, str(directory), str(limit_s), WAIT]
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
        )

    @property
    def waits(self) -> bool:
        """Whether it can begin; not once it was killed, as where memory runs out."""
        return self._process.poll() is None

    def begin(self) -> subprocess.Popen[bytes]:
        """Have it supervise the device, which is there now; it ends with 0 once it does."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and its code says so
            self._process.stdin.write(b"b")
            self._process.stdin.close()
        return self._process

    def close(self) -> None:
        """End it unless it supervises. Idempotent."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _ends(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether a process ends in time. Popen.wait looks for it now and then, for longer than it
    takes."""
    ending, waiting = os.pidfd_open(process.pid), select.poll()
    try:
        waiting.register(ending, select.POLLIN)
        return bool(waiting.poll(1000 * limit_s))
    finally:
        os.close(ending)


def supervise(
    directory: Path,
    limit_s: float,
    held: Sequence[int] = (),
    method: FillMethod | None = None,
    *,
    ready_s: float | None = None,
    stand_by: StandBy | None = None,
) -> None:
    """Start what keeps readers waiting, in one `method` for a new view, in its own for another,
    whose processes were killed; `held` are the descriptors that these gave. It has `ready_s` to
    begin, READY_S unless that is given. `stand_by` is used where it is for this view. Raises
    Unavailable, OSError."""
    ready_s = READY_S if ready_s is None else ready_s
    if method is FUSE:
        (directory / POINT).mkdir()
        (directory / METHOD_FILE).write_text(method.name)
    words = [sys.executable, "-P", "-m", (method or method_of(directory)).module, str(directory), str(limit_s)]
    words += map(str, held)
    with (directory / LOG).open("ab") as log:
        if stand_by is not None and method is FANOTIFY and stand_by.waits:
            process = stand_by.begin()
        else:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=held, start_new_session=True
            )
        if not _ends(process, ready_s):
            process.kill()
            process.wait()
            reason = f"the supervisor has not begun within {ready_s:g} s"
            raise Unavailable(f"this host has no lazy views: {reason}", remedy=REMEDY)
    if process.wait():
        lines = (directory / LOG).read_text(errors="replace").strip().splitlines()
        raise Unavailable(
            f"this host has no lazy views: {lines[-1] if lines else 'the supervisor ended'}",
            remedy=REMEDY,
        )
