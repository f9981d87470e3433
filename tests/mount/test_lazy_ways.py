"""Each way to fill a lazy view: whatever reads it, and whatever is killed meanwhile, no byte is
wrong."""

from __future__ import annotations

import _ctypes
import itertools
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.device import DeviceLayout
from p2pdist.model.tree import File, content_hash
from p2pdist.mount import kernel
from p2pdist.mount.lazy.fuse import Filled, binding
from p2pdist.mount.lazy.trial import attempt, choose
from p2pdist.mount.lazy.view import LazyPackage, device_bytes, mount_lazy, view_directory
from p2pdist.mount.lazy.ways import FANOTIFY, FUSE, WAYS, Way, supervise
from p2pdist.mount.supervisor import fanotify
from p2pdist.mount.supervisor.protocol import ANSWER, FAULT, NOTICE, ORDER, WHOLE, Notice, connect
from p2pdist.mount.views import unmount_view

MIB = 1 << 20
LIMIT_S = 60.0
KILLS = 12 if os.environ.get("P2PDIST_EXAMPLES") != "many" else 200


def _missing(way: Way) -> str:
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


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Way:
    if reason := _missing(request.param):
        pytest.skip(reason)
    chosen: Way = request.param
    return chosen


def contents() -> dict[str, bytes]:
    """Files by name. No block of them is zeros: those would be what is not filled."""
    drawn = random.Random(3)
    files = {
        "program": Path("/bin/true").read_bytes(),
        "library.so": Path(_ctypes.__file__).read_bytes(),
        "weights": drawn.randbytes(4 * MIB),
    }
    return files | {f"small{number}": drawn.randbytes(drawn.randrange(1, 30_000)) for number in range(20)}


class View:
    """A view of `contents`, and what an agent does for it: in a thread, which fills the blocks that
    a reader waits for, and no other. While `held`, a range is not filled."""

    def __init__(self, way: Way, work: Path, target: Path, limit_s: float = LIMIT_S) -> None:
        self.files, self.work, self.path = contents(), work, target
        names = sorted(self.files)
        hashes = {name: content_hash(self.files[name]) for name in names}
        entries = [File(name.encode(), 0o755, 0, len(self.files[name]), hashes[name]) for name in names]
        layout = DeviceLayout({hashes[name]: len(self.files[name]) for name in names}, {})
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
        mount_lazy(LazyPackage((entries,), layout, limit_s), target, work=work, way=way)
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
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


Show = Callable[..., View]


@pytest.fixture
def show(way: Way, work: Path, tmp_path: Path) -> Iterator[Show]:
    views = []

    def make(**options: float) -> View:
        views.append(View(way, work, tmp_path / f"view{len(views)}", **options))
        return views[-1]

    yield make
    for view in views:
        view.close()


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def cat(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def output(*words: object) -> bytes:
    return subprocess.run(list(map(str, words)), capture_output=True, check=True).stdout


def python(code: str, path: Path) -> bytes:
    return output(sys.executable, "-c", code, path)


def test_each_kind_of_read_gets_what_the_file_has(show: Show, tmp_path: Path) -> None:
    view = show().serve()
    weights = view.files["weights"]
    path = view.path / "weights"
    code = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); "
    code += "sys.stdout.buffer.write(m[3_000_000:3_100_000] + m[1_000_000:1_000_009])"
    assert python(code, path) == weights[3_000_000:3_100_000] + weights[1_000_000:1_000_009]
    code = "import os, sys; f = os.open(sys.argv[1], os.O_RDONLY)\n"
    code += "for at in (2_345_678, 17, 2_000_000): sys.stdout.buffer.write(os.pread(f, 5000, at))"
    assert python(code, path) == b"".join(weights[at : at + 5000] for at in (2_345_678, 17, 2_000_000))
    direct = ["dd", f"if={path}", "bs=1M", "skip=2", "count=1", "iflag=direct", "status=none"]
    read = subprocess.run(direct, capture_output=True, check=False)
    assert read.stdout == weights[2 * MIB : 3 * MIB] or read.returncode  # an overlay may have none
    with (tmp_path / "sent").open("wb") as sent, path.open("rb") as file:
        assert os.sendfile(sent.fileno(), file.fileno(), 3_500_000, 100_000) == 100_000
    assert (tmp_path / "sent").read_bytes() == weights[3_500_000:3_600_000]
    # By a shell: a child of this process holds up the thread that fills.
    assert output("sh", "-c", f"exec {view.path}/program") == b""  # execve(2)
    python("import ctypes, sys; ctypes.CDLL(sys.argv[1])", view.path / "library.so")  # dlopen(3)
    assert output("unshare", "-m", "cat", view.path / "small1") == view.files["small1"]
    readers = [cat(path) for _ in range(50)]
    assert {reader.communicate()[0] for reader in readers} == {weights}
    assert view.wrong() == []


def test_a_read_waits_and_holds_up_no_other(show: Show) -> None:
    view = show()
    shared = {cell for name in view.files if name != "weights" for cell in view.cells_of[name]}
    held = set(view.cells_of["weights"]) - shared
    view.held = lambda offset: offset // view.cell_bytes in held
    view.serve()
    first = cat(view.path / "weights")
    until(lambda: any(view.held(offset) for offset, _ in view.asked), "the agent does not hear of the reader")
    others = [name for name in view.files if name != "weights"]
    assert view.wrong(others) == []
    assert first.poll() is None
    view.held = lambda offset: False
    assert first.communicate()[0] == view.files["weights"]


def test_once_all_is_filled_nothing_stands_between(show: Show) -> None:
    view = show()
    reader = cat(view.path / "weights")
    view.fill()
    assert reader.communicate()[0] == view.files["weights"]
    until(lambda: not view.processes(), "what supervised it goes on")
    assert view.wrong() == []
    view.forget()
    assert view.wrong() == []
    unmount_view(view.path, work=view.work)


def test_readers_wait_while_no_agent_runs_and_the_next_one_serves_them(show: Show) -> None:
    view = show()
    view.held = lambda offset: True
    view.serve()
    reader = cat(view.path / "weights")
    until(lambda: view.asked, "the agent does not hear of the reader")
    view.leave()
    late = cat(view.path / "small3")
    assert reader.poll() is None
    view.held = lambda offset: False
    view.serve()
    assert reader.communicate()[0] == view.files["weights"]
    assert late.communicate()[0] == view.files["small3"]


def test_an_agent_is_let_in_while_readers_have_all_descriptors(way: Way, show: Show) -> None:
    """Else nothing would answer them. A reader of FUSE has none."""
    if way is FUSE:
        pytest.skip("its readers have no descriptors")
    view = show()
    before = view.processes()
    for pid in before:
        used = set(map(int, os.listdir(f"/proc/{pid}/fd")))
        free = next(number for number in itertools.count() if number not in used)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, free))
    assert view.answers()
    assert view.processes() == before


def test_a_reader_for_whom_nothing_comes_gets_an_error_and_a_later_one_what_came(show: Show) -> None:
    view = show(limit_s=0.3)
    got, errors = cat(view.path / "weights").communicate()
    assert got == b"" and b"Input/output error" in errors
    greeting = connect(view.directory)
    assert greeting.refused >= 1
    greeting.connection.close()
    os.close(greeting.filler)
    os.close(greeting.group)
    assert "gets EIO" in (view.directory / "supervisor.log").read_text()
    view.serve()
    assert view.wrong() == []


def test_readers_are_let_go_when_the_view_is_unmounted(show: Show) -> None:
    view = show()
    view.held = lambda offset: True
    view.serve()
    reader = cat(view.path / "weights")
    until(lambda: view.asked, "the agent does not hear of the reader")
    unmount_view(view.path, work=view.work, force=True)
    assert list(view.path.parent.glob("view*")) == []
    view.held = lambda offset: False
    assert reader.communicate()[0] == view.files["weights"]


def test_what_waits_can_be_killed(show: Show) -> None:
    view = show()
    view.held = lambda offset: True
    view.serve()
    readers = [cat(view.path / name) for name in view.files]
    until(lambda: len(view.asked) >= 3, "the agent does not hear of the readers")
    for reader in readers:  # all of them: one may wait for what another is reading
        reader.kill()
    for reader in readers:
        reader.communicate()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_kills_leave_no_wrong_byte(way: Way, show: Show) -> None:
    """Of one process, or for FUSE of both; each time with readers that wait."""
    view, drawn = show(), random.Random(11)
    view.serve()
    names = list(view.files)
    readers: list[tuple[str, subprocess.Popen[bytes]]] = []
    for _ in range(KILLS):
        view.forget()
        readers += [(name, cat(view.path / name)) for name in drawn.choices(names, k=6)]
        time.sleep(drawn.random() / 50)
        before = set(view.processes())
        victims = before if way is FUSE and drawn.random() < 0.3 else set(drawn.sample(sorted(before), k=1))
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        if way is FANOTIFY:
            until(lambda: len(set(view.processes()) - victims) >= 2, "nothing guards")  # noqa: B023
        else:
            until(lambda: not victims & set(view.processes()), "it is not dead")  # noqa: B023
            if not view.processes():
                supervise(view.directory, LIMIT_S)
            until(view.answers, "nothing serves")
    for name, reader in readers:
        got, errors = reader.communicate()
        assert view.files[name].startswith(got), name
        assert got == view.files[name] or b"Input/output error" in errors, name
    assert view.wrong() == []


def test_the_trial_says_what_works_and_why_not(way: Way, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempt(way, work) == ""
    assert choose(work, [way.name]).way is way
    assert list(work.iterdir()) == []
    if way is FUSE:
        monkeypatch.setenv("FUSE_LIBRARY_NAME", "nothing-of-this-name")
        choice = choose(work, [way.name])
        assert choice.way is None and "libfuse 3 is not installed" in choice.line


@given(
    st.integers(1, 40_000), st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 20_000)), max_size=6), st.data()
)
def test_filled_is_what_was_marked_in_whole_blocks(
    size: int, marks: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Compared with a set of bytes. Of a block that is marked in part nothing is filled."""
    filled, marked = Filled(size), set()
    for offset, count in marks:
        if offset < size:
            count = min(count, size - offset)
            filled.mark(offset, count)
            marked.add((offset, offset + count))
    blocks = {
        block
        for block in range(-(-size // 4096))
        for begin, end in marked
        if begin <= block * 4096 and min(size, block * 4096 + 4096) <= end
    }
    offset = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, size - offset))
    wanted = range(offset // 4096, -(-(offset + count) // 4096))
    assert filled.has(offset, count) == all(block in blocks for block in wanted)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: loop devices")
def test_a_loop_device_of_another_name_is_left_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 8192)
    with kernel.loop_device(tmp_path / "a", name=b"mine") as device:
        with pytest.raises(OSError, match="another"):
            kernel.change_backing(device, b"yours", tmp_path / "b")
        assert Path(device).read_bytes() == b"a" * 8192
        kernel.change_backing(device, b"mine", tmp_path / "b")
        assert Path(device).read_bytes() == b"b" * 8192
