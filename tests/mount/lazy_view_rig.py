"""A lazy view of a few files, filled in one of the ways, and what an agent does for it."""

from __future__ import annotations

import _ctypes
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from p2pdist.model.device import DeviceLayout
from p2pdist.model.tree import File, content_hash
from p2pdist.mount.lazy.fill_method import FUSE, FillMethod
from p2pdist.mount.lazy.fuse import binding
from p2pdist.mount.lazy.view import LazyPackage, device_bytes, mount_lazy, view_directory
from p2pdist.mount.supervisor import fanotify
from p2pdist.mount.supervisor.protocol import ANSWER, FAULT, NOTICE, ORDER, WHOLE, Notice, connect
from p2pdist.mount.views import unmount_view

MIB = 1 << 20
LIMIT_S = 60.0


def lacking(way: FillMethod) -> str:
    """Why a way cannot be tried here, "" where it can."""
    if os.geteuid() != 0:
        return "needs root: mounts"
    try:
        if way is FUSE:
            binding()
        else:
            os.close(fanotify.open_group())
    except OSError as error:
        return str(error)
    return ""


def contents() -> dict[str, bytes]:
    """Files by name. No block of them is zeros: those would be what is not filled."""
    drawn = random.Random(3)
    files = {
        "program": Path("/bin/true").read_bytes(),
        "sleep": Path("/bin/sleep").read_bytes(),
        "library.so": Path(_ctypes.__file__).read_bytes(),
        "weights": drawn.randbytes(4 * MIB),
    }
    return files | {f"small{number}": drawn.randbytes(drawn.randrange(1, 30_000)) for number in range(20)}


class View:
    """A view of `contents`, and what an agent does for it: in a thread, which fills the blocks that
    a reader waits for, and no other. While `held`, a range is not filled."""

    def __init__(
        self, way: FillMethod, work: Path, target: Path, limit_s: float = LIMIT_S, *, writable: bool = False
    ) -> None:
        self.files, self.work, self.path = contents(), work, target
        names = sorted(self.files)
        hashes = {name: content_hash(self.files[name]) for name in names}
        entries = self.entries = [File(name.encode(), 0o755, 0, len(self.files[name]), hashes[name]) for name in names]
        layout = self.layout = DeviceLayout({hashes[name]: len(self.files[name]) for name in names}, {})
        cells = way.cells
        device = bytearray(device_bytes(layout, cells))
        self.cell_bytes, self.cells_of = cells.file_bytes, {}
        for name in names:
            at, data = layout.first_blocks()[hashes[name]] * 4096, self.files[name]
            for offset, begin, end in cells.places(at, len(data)):
                device[offset : offset + end - begin] = data[begin:end]
            self.cells_of[name] = cells.holding(at, len(data))
        for cell in cells.holding(0, layout.size):
            offset, head = cells.head(cell)
            device[offset : offset + len(head)] = head
        self.device = bytes(device)
        self.held: Callable[[int], bool] = lambda offset: False
        self.asked: list[tuple[int, int]] = []
        mount_lazy(LazyPackage((entries,), layout, limit_s), target, work=work, method=way, writable=writable)
        directory = view_directory(target, work)
        assert directory is not None
        self.directory = directory
        self._connection: socket.socket | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def serve(self) -> View:
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def leave(self) -> None:
        """The agent is killed."""
        self._stopped.set()
        with suppress(OSError):
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                greeting = connect(self.directory)
            except OSError:
                time.sleep(0.01)
                continue
            self._connection = greeting.connection
            greeting.connection.settimeout(0.05)
            waiting: list[Notice] = []
            with greeting.connection, suppress(OSError):
                while not self._stopped.is_set():
                    with suppress(TimeoutError):
                        notice = Notice.parse(greeting.connection.recv(NOTICE.size))
                        if notice is None:
                            break
                        if notice.kind == FAULT:
                            waiting.append(notice)
                            self.asked.append((notice.offset, notice.count))
                    for notice in [notice for notice in waiting if not self.held(notice.offset)]:
                        waiting.remove(notice)
                        self.fill_range(greeting.filler, notice.offset, notice.offset + notice.count)
                        greeting.connection.send(ORDER.pack(ANSWER, notice.number, 0))
            os.close(greeting.filler)
            os.close(greeting.group)

    def fill_range(self, device: int, begin: int, end: int) -> None:
        """The cells that have bytes in a range of the device, the head of each last."""
        for place in range(begin // self.cell_bytes * self.cell_bytes, end, self.cell_bytes):
            os.pwrite(device, self.device[place + 4096 : place + self.cell_bytes], place + 4096)
            os.pwrite(device, self.device[place : place + 4096], place)

    def fill(self) -> None:
        """All of it, and say so."""
        greeting = connect(self.directory)
        self.fill_range(greeting.filler, 0, len(self.device))
        greeting.connection.send(ORDER.pack(WHOLE, 0, 0))
        with greeting.connection:
            while greeting.connection.recv(NOTICE.size):
                pass
        os.close(greeting.filler)
        os.close(greeting.group)

    def processes(self) -> list[int]:
        """What keeps readers waiting."""
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if os.fsencode(self.directory) in words and b"-m" in words:
                    found.append(int(pid))
        return found

    def answers(self) -> bool:
        """Whether something keeps readers waiting."""
        try:
            greeting = connect(self.directory)
        except OSError:
            return False
        os.close(greeting.filler)
        os.close(greeting.group)
        greeting.connection.close()
        return True

    def pair(self) -> tuple[int, int]:
        """The supervisor and its guard, once it has one and answers."""
        until(self.answers, "nothing answers")
        until(lambda: len(self.processes()) == 2, "there is no guard")
        parents = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in self.processes()}
        (guard,) = [pid for pid, parent in parents.items() if int(parent) in parents]
        (supervisor,) = parents.keys() - {guard}
        return supervisor, guard

    def log(self) -> str:
        """What those who keep readers waiting said."""
        return (self.directory / "supervisor.log").read_text()

    def wrong(self, names: list[str] | None = None) -> list[str]:
        """The files that are not as they should be."""
        return [name for name in names or self.files if (self.path / name).read_bytes() != self.files[name]]

    def forget(self) -> None:
        """Have the kernel read from the device again."""
        for name in self.files:
            with (self.path / name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self.leave()
        for force in (False, True):
            with suppress(Exception):
                unmount_view(self.path, work=self.work, force=force)
        while pids := self.processes():  # a guard that lives a moment longer has another one
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def cat(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


Show = Callable[..., View]
