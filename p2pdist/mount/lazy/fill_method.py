"""Methods to fill the device of a lazy view while it is read: what keeps readers waiting, and what
EROFS images have as their device.

fanotify: the kernel asks before it reads the device itself (mount/supervisor); Linux 6.14. fuse:
the device is a file of FUSE under a loop device (fuse.py); Linux 5.16, which is the first one that
has EROFS images with a device. Which of them works on a host a trial says (trial.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.device import Cells
from p2pdist.model.errors import Unavailable
from p2pdist.mount import kernel
from p2pdist.mount.lazy.fuse import LOOP, POINT, loop_name
from p2pdist.mount.supervisor.process import LOG, READY_S
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


def supervise(
    directory: Path,
    limit_s: float,
    held: Sequence[int] = (),
    method: FillMethod | None = None,
    *,
    ready_s: float | None = None,
) -> None:
    """Start what keeps readers waiting, in one `method` for a new view, in its own for another,
    whose processes were killed; `held` are the descriptors that these gave. It has `ready_s` to
    begin, READY_S unless that is given. Raises Unavailable, OSError."""
    ready_s = READY_S if ready_s is None else ready_s
    if method is FUSE:
        (directory / POINT).mkdir()
        (directory / METHOD_FILE).write_text(method.name)
    words = [sys.executable, "-P", "-m", (method or method_of(directory)).module, str(directory), str(limit_s)]
    words += map(str, held)
    with (directory / LOG).open("ab") as log:
        try:
            ended = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=held,
                start_new_session=True,
                timeout=ready_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            reason = f"the supervisor has not begun within {ready_s:g} s"
            raise Unavailable(f"this host has no lazy views: {reason}", remedy=REMEDY) from error
    if ended.returncode:
        lines = (directory / LOG).read_text(errors="replace").strip().splitlines()
        raise Unavailable(
            f"this host has no lazy views: {lines[-1] if lines else 'the supervisor ended'}",
            remedy=REMEDY,
        )
