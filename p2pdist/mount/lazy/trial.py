"""Which method to fill lazy views works on this host: each is tried with a small view, best
first."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.device import Cells, DeviceLayout
from p2pdist.model.errors import Conflict, NotFound, P2PDistError
from p2pdist.model.tree import File, content_hash
from p2pdist.mount.lazy.fill_method import METHODS, FillMethod
from p2pdist.mount.lazy.view import LazyPackage, cells_of, mount_lazy, view_directory
from p2pdist.mount.records import process
from p2pdist.mount.supervisor.protocol import ANSWER, FAULT, NOTICE, ORDER, Notice, connect
from p2pdist.mount.views import unmount_view

LIMIT_S = 5.0
_CONTENT = bytes(range(256)) * 64
_NAME = b"content"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The method that works, None for none, and why those before it do not, a line each."""

    method: FillMethod | None
    reasons: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """One line that says which method and why."""
        because = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{self.method.name if self.method else 'none'}{because}"


def choose(work: Path, names: Sequence[str]) -> Choice:
    """Try the ways with these `names`, with the records of mounts in `work`."""
    reasons: list[str] = []
    chosen = None
    for method in METHODS:
        if chosen is None and method.name in names:
            reason = attempt(method, work)
            chosen = None if reason else method
            if reason:
                reasons.append(f"{method.name}: {reason}")
    choice = Choice(chosen, tuple(reasons))
    logger.info("lazy views are filled by %s", choice.line)
    return choice


def attempt(method: FillMethod, work: Path) -> str:
    """Show a file by one method and read it: "" where it has what was filled, else what is
    wrong."""
    if os.geteuid() != 0:
        return "it needs root"
    name = content_hash(_CONTENT)
    entries = (File(_NAME, 0o644, 0, len(_CONTENT), name),)
    package = LazyPackage((entries,), DeviceLayout({name: len(_CONTENT)}, {}), LIMIT_S)
    try:
        scratch = Path(tempfile.mkdtemp(prefix="trial-", dir=work.parent))
    except OSError as error:
        return f"{error.strerror}: {work.parent}"
    target = scratch / "view"
    try:
        mount_lazy(package, target, work=work, method=method, owner=process(os.getpid()))
        try:
            return _read(target, work)
        finally:
            with suppress(Conflict):
                unmount_view(target, work=work)
            with suppress(NotFound):
                unmount_view(target, work=work, force=True)  # another program looks at it
    except P2PDistError as error:
        return error.what
    except OSError as error:
        return error.strerror or str(error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read(target: Path, work: Path) -> str:
    directory = view_directory(target, work)
    assert directory is not None
    greeting = connect(directory)
    filler = threading.Thread(
        target=_fill, args=(greeting.connection, greeting.filler, cells_of(directory)), daemon=True
    )
    filler.start()
    try:
        if (target / os.fsdecode(_NAME)).read_bytes() != _CONTENT:
            return "the kernel does not wait for what is filled"
    finally:
        with suppress(OSError):
            greeting.connection.shutdown(socket.SHUT_RDWR)
        filler.join()
        os.close(greeting.filler)
        os.close(greeting.group)
        greeting.connection.close()
    return ""


def _fill(connection: socket.socket, device: int, cells: Cells) -> None:
    """Be the agent until the connection ends."""
    place, head = cells.head(0)
    with suppress(OSError):
        while (notice := Notice.parse(connection.recv(NOTICE.size))) is not None:
            if notice.kind == FAULT:
                for offset, begin, end in cells.places(0, len(_CONTENT)):
                    os.pwrite(device, _CONTENT[begin:end], offset)
                os.pwrite(device, head, place)
                connection.send(ORDER.pack(ANSWER, notice.number, 0))
