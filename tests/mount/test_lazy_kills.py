"""A lazy view whose processes are killed at random while programs read it: whatever is killed at
once, a reader gets what the file has, or an error, and never anything else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from lazy_marks import needs_events

from p2pdist.model.device import Cells, DeviceLayout
from p2pdist.model.errors import P2PDistError
from p2pdist.model.tree import File, content_hash
from p2pdist.mount.lazy.view import LazyPackage, mount_lazy, stand_by_for, supervise, view_directory
from p2pdist.mount.supervisor.protocol import ANSWER, FAULT, NOTICE, ORDER, Notice, connect
from p2pdist.mount.views import unmount_view

ROUNDS = int(os.environ.get("P2PDIST_KILLS", "200"))
VIEW_ROUNDS = 40
READERS = 3
LIMIT_S = 20.0
CELLS = Cells(headed=True)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    needs_events,
]


class View:
    """Many files, shown lazily, and a process that brings what is read."""

    def __init__(self, directory: Path, seed: int) -> None:
        drawn = random.Random(seed)
        self.contents = [drawn.randbytes(drawn.randrange(1, 250_000)) for _ in range(READERS * VIEW_ROUNDS)]
        names = [content_hash(data) for data in self.contents]
        self.layout = DeviceLayout({name: len(data) for name, data in zip(names, self.contents, strict=True)}, {})
        self._by_name = dict(zip(names, self.contents, strict=True))
        entries = [
            File(b"%d" % number, 0o644, 0, len(data), name)
            for number, (name, data) in enumerate(zip(names, self.contents, strict=True))
        ]
        entries.sort(key=lambda entry: entry.path)
        self.path, self.work = directory / f"view{seed}", directory / "work"
        self.work.mkdir(exist_ok=True)
        mount_lazy(LazyPackage((entries,), self.layout, LIMIT_S), self.path, work=self.work)
        found = view_directory(self.path, self.work)
        assert found is not None
        self.directory = found
        self.agent = 0

    def start_agent(self) -> None:
        """Begin to bring what is read, in another process."""
        self.agent = os.fork()
        if not self.agent:
            try:
                self._bring()
            finally:
                os._exit(1)

    def _bring(self) -> None:
        held: tuple[int, ...] = ()
        missed = 0
        while True:
            try:
                greeting = connect(self.directory)
            except OSError:
                missed += 1
                if missed > 5:
                    with suppress(P2PDistError, OSError, subprocess.TimeoutExpired):
                        supervise(self.directory, LIMIT_S, held)
                    missed = 0
                time.sleep(0.02)
                continue
            missed, held = 0, (greeting.filler, greeting.group)
            with suppress(OSError):
                greeting.connection.settimeout(None)
                while (notice := Notice.parse(greeting.connection.recv(NOTICE.size))) is not None:
                    if notice.kind == FAULT:
                        time.sleep(0.002)
                        for cell in CELLS.covering(notice.offset, notice.count):
                            self._fill(greeting.filler, cell)
                        greeting.connection.send(ORDER.pack(ANSWER, notice.number, 0))

    def _fill(self, device: int, cell: int) -> None:
        for chunk in self.layout.cell_chunks(cell):
            data = self._by_name[chunk.content][chunk.offset : chunk.offset + chunk.length]
            for offset, begin, end in CELLS.places(chunk.at, chunk.length):
                os.pwrite(device, data[begin:end], offset)
        offset, head = CELLS.head(cell)
        os.pwrite(device, head, offset)

    def supervisors(self) -> list[int]:
        """The supervisor and its guard."""
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                if os.fsencode(self.directory) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(int(pid))
        return found

    def kill(self, pids: list[int]) -> None:
        """End these at the same moment."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.agent in pids:
            os.waitpid(self.agent, 0)
            self.agent = 0

    def close(self) -> None:
        if self.agent:
            self.kill([self.agent])
        unmount_view(self.path, work=self.work, force=True)
        while pids := self.supervisors():  # a guard that lives a moment longer has another one
            self.kill(pids)


@pytest.fixture
def views(tmp_path: Path) -> Iterator[list[View]]:
    made: list[View] = []
    yield made
    for view in made:
        view.close()


def test_random_kills_of_all_processes_leave_no_wrong_byte(tmp_path: Path, views: list[View]) -> None:
    drawn, right, refused = random.Random(17), 0, 0
    for first in range(0, ROUNDS, VIEW_ROUNDS):
        view = View(tmp_path, first)
        views.append(view)
        view.start_agent()
        files = list(range(len(view.contents)))
        drawn.shuffle(files)
        for _ in range(min(VIEW_ROUNDS, ROUNDS - first)):
            numbers = [files.pop() for _ in range(READERS)]
            readers = [
                subprocess.Popen(["cat", str(view.path / str(number))], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                for number in numbers
            ]
            time.sleep(drawn.random() / 40)
            alive = [*view.supervisors(), view.agent]
            view.kill(alive if drawn.random() < 0.4 else drawn.sample(alive, k=drawn.randint(1, len(alive))))
            if not view.agent:
                view.start_agent()
            for number, process in zip(numbers, readers, strict=True):
                got, errors = process.communicate(timeout=4 * LIMIT_S)
                assert view.contents[number].startswith(got), f"wrong bytes of file {number} of view {first}"
                assert got == view.contents[number] or errors, f"file {number} of view {first} is cut short"
                right, refused = right + (not errors), refused + bool(errors)
        for number, data in enumerate(view.contents):  # what was refused comes when it is read again
            deadline, got = time.monotonic() + 4 * LIMIT_S, b""
            while got != data:  # after the last kill it takes a moment until a supervisor is there
                assert time.monotonic() < deadline, f"file {number} of view {first} does not come"
                read = subprocess.run(["cat", str(view.path / str(number))], capture_output=True, timeout=4 * LIMIT_S)
                got = read.stdout
                assert data.startswith(got), f"wrong bytes of file {number} of view {first} in the end"
        view.close()
        views.remove(view)
    assert right and refused, "the kills came too early or too late"


def test_a_program_that_stood_by_and_was_killed_is_replaced(tmp_path: Path) -> None:
    """Nothing keeps it from being killed before it has anything to do, and the view is none the
    worse for it."""
    data = b"content" * 999
    layout = DeviceLayout({content_hash(data): len(data)}, {})
    entries = (File(b"file", 0o644, 0, len(data), content_hash(data)),)
    stand_by = stand_by_for(tmp_path, LIMIT_S)
    try:
        os.kill(stand_by._process.pid, signal.SIGKILL)
        while stand_by.waits:
            time.sleep(0.01)
        mount_lazy(LazyPackage((entries,), layout, LIMIT_S), tmp_path / "view", work=tmp_path, stand_by=stand_by)
        assert (tmp_path / "view/file").stat().st_size == len(data)
        unmount_view(tmp_path / "view", work=tmp_path)
    finally:
        stand_by.close()
