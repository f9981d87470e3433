"""Whole processes: packages that are shown before their contents are here."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lazy_marks import needs_events
from site_rig import P2PDIST, Agent, Site

from p2pdist.model.device import BLOCK_BYTES, Cells, DeviceLayout
from p2pdist.model.tree import content_hash, walking_order
from p2pdist.mount import kernel
from p2pdist.mount.lazy.plain import sees_all_processes
from p2pdist.mount.lazy.view import is_filled
from p2pdist.mount.supervisor.protocol import connect

MIB = 1 << 20
SLOW_BYTES_S = 2 * MIB
FLIPS = 10_000
PATIENCE_S = 600.0
"""For what never happens: no test is of how soon something does."""

KILLED = (
    ("supervisor",),
    ("guard",),
    ("agent",),
    ("supervisor", "agent"),
    ("guard", "agent"),
    ("supervisor", "guard"),
    ("supervisor", "guard", "agent"),
)
"""What is killed at the same moment."""


pytestmark = [
    pytest.mark.slow,
    needs_events,
]


@pytest.fixture
def source(site: Site) -> Path:
    """A tree with many small files, some large ones and a program; its package is app:v1."""
    top, drawn = site.directory / "source", random.Random(7)
    for number in range(300):
        path = top / f"lib/package{number % 9}/module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x = %d\n" % number * drawn.randrange(1, 900))
    (top / "weights.bin").write_bytes(drawn.randbytes(8 * MIB))
    (top / "zeros.bin").write_bytes(drawn.randbytes(4096) + bytes(3 * MIB) + drawn.randbytes(5))
    (top / "empty").write_bytes(b"")
    os.link(top / "weights.bin", top / "same.bin")
    os.symlink("weights.bin", top / "link.bin")
    (top / "hello").write_bytes(Path("/bin/true").read_bytes())
    (top / "hello").chmod(0o755)
    (top / "greet.sh").write_bytes(b"#!/bin/sh\necho first line\n" + b"# padding\n" * 2000)
    (top / "greet.sh").chmod(0o755)
    layout = ("--layout", str(site.directory / "layout"))
    words = ("pack", str(top), "-t", "app:v1", "--format", "tree", "--entrypoint", '["${P2PDIST_ROOT}/greet.sh"]')
    code, _, errors = site.command(*words, *layout)
    assert code == 0, errors
    code, _, errors = site.command("push", "app:v1", "--origin", f"file://{site.layout}", *layout)
    assert code == 0, errors
    return top


class View:
    """app:v1, shown lazily by an agent."""

    def __init__(self, agent: Agent, *options: str) -> None:
        self.agent, self.path = agent, agent.site.directory / f"view-{agent.name}"
        words = ("mount", "--lazy", "app:v1", str(self.path), "--socket", str(agent.socket), *options)
        code, status, self.said = agent.site.command(*words)
        assert code == 0, self.said
        self.how = str(status["how"])

    @property
    def directory(self) -> Path:
        """Where the files of the view are."""
        (device,) = (self.agent.store / "mounts/records").glob("*/device")
        return device.parent

    def status(self) -> dict[str, Any]:
        code, told, errors = self.agent.site.command("status", "--socket", str(self.agent.socket))
        assert code == 0, errors
        (mount,) = told["mounts"]
        return dict(mount["lazy"])

    def supervisors(self) -> list[int]:
        """The supervisor and its guard."""
        return supervisors(self.directory)

    def umount(self) -> None:
        code, _, errors = self.agent.site.command("umount", str(self.path), "--socket", str(self.agent.socket))
        assert code == 0, errors


def supervisors(directory: Path) -> list[int]:
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"p2pdist.mount.supervisor.process" in words and os.fsencode(directory) in words:
                found.append(int(pid))
    return found


@pytest.fixture(autouse=True)
def nothing_stays(site: Site) -> Iterator[None]:
    """Whatever a test leaves mounted or running ends with it."""
    yield
    for mounted in reversed(kernel.mounted()):
        if site.directory in mounted.point.parents:
            kernel.unmount(mounted.point, lazily=True)
    site.close()  # an agent would start another supervisor
    for records in site.directory.glob("store-*/mounts/records/*"):
        while pids := supervisors(records):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def reader(path: Path) -> subprocess.Popen[bytes]:
    """A process that reads a file."""
    return subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def refused(errors: bytes) -> bool:
    """Whether a reader got EIO, or EUCLEAN: nothing was there to be asked."""
    return b"Input/output error" in errors or b"Structure needs cleaning" in errors


def wrong_files(view: Path, source: Path) -> list[str]:
    """What differs, as other processes see it."""
    words = ["diff", "-r", "--no-dereference", str(source), str(view)]
    found = subprocess.run(words, capture_output=True, text=True)
    return (found.stdout + found.stderr).splitlines()


def test_a_view_is_there_before_its_contents_and_ends_up_whole(site: Site, source: Path) -> None:
    site.origin.rate_bytes_s = SLOW_BYTES_S / 8  # it comes meanwhile
    (agent,) = site.agents(1)
    view = View(agent)
    assert view.how == "lazy" and "eager" not in view.said
    assert sum(site.origin.sent.values()) < 4 * MIB
    site.origin.rate_bytes_s = SLOW_BYTES_S
    assert sorted(path.name for path in view.path.iterdir()) == sorted(path.name for path in source.iterdir())
    assert reader(view.path / "greet.sh").communicate()[0] == (source / "greet.sh").read_bytes()
    assert not view.status()["whole"]
    assert view.status()["stalls"] >= 1
    assert wrong_files(view.path, source) == []
    until(lambda: view.status()["whole"], "the view lacks something")
    until(lambda: not view.supervisors(), "the supervisors stay")
    assert wrong_files(view.path, source) == []
    view.umount()
    assert View(agent).how == "erofs"
    view.umount()


@pytest.mark.skipif(not sees_all_processes(), reason="covers need to see all processes of the host")
def test_what_is_whole_is_covered_and_the_next_agent_finds_it_so(site: Site, source: Path) -> None:
    (agent,) = site.agents(1)
    view = View(agent, "--wait")
    before = view.path.stat().st_dev
    until(lambda: "covered" in view.status()["steps"], "the view is not covered")
    (mount,) = agent.site.command("status", "--socket", str(agent.socket))[1]["mounts"]
    assert mount["device"] == view.path.stat().st_dev != before
    assert wrong_files(view.path, source) == []
    agent.kill()
    assert wrong_files(view.path, source) == []
    agent.start()
    until(lambda: "covered" in view.status()["steps"], "the next agent does not find the cover")
    assert len([mounted for mounted in kernel.mounted() if mounted.point == view.path]) == 2
    assert wrong_files(view.path, source) == []
    view.umount()
    assert not os.path.ismount(view.path)


def test_what_others_mount_over_a_view_is_not_taken_for_it(site: Site, source: Path) -> None:
    (agent,) = site.agents(1)
    view = View(agent, "--wait")
    before = view.path.stat()
    kernel.mount("others", view.path, "tmpfs")
    socket = ("--socket", str(agent.socket))
    (mount,) = agent.site.command("status", *socket)[1]["mounts"]
    assert (mount["device"], mount["inode"]) == (before.st_dev, before.st_ino)
    agent.kill()
    agent.start()
    code, _, errors = agent.site.command("umount", str(view.path), *socket)
    assert code and "others (tmpfs) is mounted over" in errors
    kernel.unmount(view.path)
    assert wrong_files(view.path, source) == []
    view.umount()
    assert not os.path.ismount(view.path)


def test_a_view_whose_caller_goes_away_while_it_is_mounted_is_filled(site: Site, source: Path) -> None:
    site.origin.rate_bytes_s = SLOW_BYTES_S
    (agent,) = site.agents(1)
    path, body = site.directory / f"view-{agent.name}", {"package": "app:v1", "lazy": True}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(agent.socket))
        data = json.dumps(body | {"path": str(path)}).encode()
        head = f"POST /v1/mounts HTTP/1.1\r\nHost: agent\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        until(lambda: "lazy views are filled by" in agent.log.read_text(), "no way is tried")
        until(lambda: list((agent.store / "mounts/records").glob("*/device")), "nothing is mounted")
    view = View.__new__(View)
    view.agent, view.path = agent, path
    until(lambda: agent.site.command("status", "--socket", str(agent.socket))[1]["mounts"], "it is not mounted")
    assert view.status()["bytes_total"]
    assert wrong_files(path, source) == []
    until(lambda: view.status()["whole"], "the view lacks something")
    view.umount()


def test_run_begins_before_the_package_is_here(site: Site, source: Path) -> None:
    site.origin.rate_bytes_s = SLOW_BYTES_S
    (agent,) = site.agents(1)
    words = [*P2PDIST, "run", "--lazy", "--socket", str(agent.socket), "app:v1"]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "first line\n"), ran.stderr
    assert "lazy: fanotify" in ran.stderr and "eager" not in ran.stderr
    assert sum(site.origin.sent.values()) < 6 * MIB


@pytest.mark.parametrize("victims", KILLED, ids=lambda victims: "-".join(map(str, victims)))
def test_kills_of_agent_and_supervisor_leave_no_wrong_byte(site: Site, source: Path, victims: tuple[str, ...]) -> None:
    """Readers wait meanwhile: whatever is killed, each gets what the file has, or an error."""
    site.origin.rate_bytes_s = SLOW_BYTES_S
    (agent,) = site.agents(1)
    view = View(agent)
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file() and not path.is_symlink()]
    random.Random(5).shuffle(files)
    readers = [(name, reader(view.path / name)) for name in files[:40]]
    for round_ in range(3):
        until(lambda: view.status()["readers"] or view.status()["whole"], "the agent hears of no reader")
        pids = dict(zip(("supervisor", "guard"), sorted(view.supervisors()), strict=False))
        for pid in (pids[victim] for victim in victims if victim in pids):
            os.kill(pid, signal.SIGKILL)
        readers += [(name, reader(view.path / name)) for name in files[40 + round_ * 3 : 43 + round_ * 3]]
        if "agent" in victims:
            agent.kill()
            agent.start()
        gone = {pids[victim] for victim in victims if victim in pids}
        until(lambda: len(set(view.supervisors()) - gone) in (0, 2), "nobody guards")  # noqa: B023
    site.origin.rate_bytes_s = 0
    for name, process in readers:
        got, errors = process.communicate(timeout=PATIENCE_S)
        assert got == (source / name).read_bytes() or refused(errors), name
        assert (source / name).read_bytes().startswith(got), name
    until(lambda: view.status()["whole"], "the view lacks something")
    assert wrong_files(view.path, source) == []
    view.umount()


def test_a_reader_gets_an_error_when_nothing_comes(site: Site, source: Path) -> None:
    """The package's pull has begun, then storage is gone: the limit passes, and no zeros come."""
    site.origin.rate_bytes_s = SLOW_BYTES_S / 8
    agent = Agent(site, "h0", lazy_wait="3").start()
    view = View(agent)
    site.origin.stop()
    site.kill_tracker()
    got, errors = reader(view.path / "weights.bin").communicate(timeout=PATIENCE_S)
    assert b"Input/output error" in errors
    assert (source / "weights.bin").read_bytes().startswith(got)
    assert view.status()["refused"] >= 1
    assert "gets EIO" in agent.log.read_text()
    agent.kill()
    got, errors = reader(view.path / "weights.bin").communicate(timeout=PATIENCE_S)
    assert b"Input/output error" in errors
    assert (source / "weights.bin").read_bytes().startswith(got)
    agent.start(ready=False)
    view.umount()


def test_each_kind_of_read_gets_what_the_file_has(site: Site, source: Path) -> None:
    site.origin.rate_bytes_s = 4 * SLOW_BYTES_S
    (agent,) = site.agents(1)
    view = View(agent, "--writable")
    # execve(2), by a shell: a child of this process that waits in it holds up the origin here.
    assert subprocess.run(["sh", "-c", f"exec {view.path}/hello"], check=False).returncode == 0
    weights = (source / "weights.bin").read_bytes()
    code = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); "
    code += "sys.stdout.buffer.write(m[3_000_000:3_100_000] + m[7_000_000:7_000_009])"
    mapped = subprocess.run([sys.executable, "-c", code, view.path / "weights.bin"], capture_output=True, check=True)
    assert mapped.stdout == weights[3_000_000:3_100_000] + weights[7_000_000:7_000_009]
    words = ["dd", f"if={view.path}/same.bin", "bs=1M", "skip=5", "count=1", "iflag=direct", "status=none"]
    direct = subprocess.run(words, capture_output=True, check=False)
    assert direct.stdout == weights[5 * MIB : 6 * MIB] or direct.returncode  # O_DIRECT, where there is one
    many = [reader(view.path / "zeros.bin") for _ in range(20)]
    assert {process.communicate()[0] for process in many} == {(source / "zeros.bin").read_bytes()}
    (view.path / "lib/package1/module1.py").write_text("changed")  # copied up first
    with (view.path / "weights.bin").open("r+b") as written:
        written.write(b"changed")
    assert (view.path / "weights.bin").read_bytes() == b"changed" + weights[7:]
    view.umount()


def test_what_was_flipped_on_the_disk_is_not_filled(site: Site, source: Path) -> None:
    """In a pack that is coming, and in objects."""
    site.origin.rate_bytes_s = SLOW_BYTES_S
    (agent,) = site.agents(1)
    view = View(agent)
    until(lambda: agent.received() > 4 * MIB, "nothing comes")
    flipped = 0
    for path in agent.store.rglob("*"):
        if path.is_file() and path.stat().st_size > 4 * MIB and "mounts" not in path.parts:
            with path.open("r+b") as file:
                for at in range(0, 4 * MIB, 4096):
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0xFF]) if byte else b"")
                flipped += 1
    assert flipped
    for name in ("weights.bin", "greet.sh", "lib/package3/module3.py"):
        got, errors = reader(view.path / name).communicate(timeout=PATIENCE_S)
        assert (source / name).read_bytes().startswith(got), name
        assert got == (source / name).read_bytes() or refused(errors), name
    view.umount()


class Flips:
    """Flips bits of what an agent has on its disk for a view: of packs, whole or not, of objects,
    and of cells of the device that nothing has filled."""

    def __init__(self, view: View, seed: int) -> None:
        self._view, self._drawn = view, random.Random(seed)
        self.flipped: Counter[str] = Counter()
        """How many bits, by where they were."""

    def flip(self, count: int) -> None:
        """Flip bits, as many in the device as in everything else. The agent stands still meanwhile:
        what it fills at that moment is verified already."""
        process = self._view.agent.process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            if not is_filled(self._view.directory):
                self._flip_device(count // 2)
            self._flip_stored(count // 2)
        finally:
            process.send_signal(signal.SIGCONT)

    def _flip_stored(self, count: int) -> None:
        store = self._view.agent.store
        paths = [path for kind in ("partial", "blobs", "objects") for path in (store / kind).rglob("*")]
        files = [path for path in paths if path.is_file() and path.stat().st_size and path.suffix != ".have"]
        files = [path for path in files if "objects" in path.parts or path.stat().st_size > MIB]  # no catalogs
        sizes = [path.stat().st_size for path in files]
        for path in self._drawn.choices(files, sizes, k=count) if files else ():
            with path.open("r+b") as file:
                self._flip_bit(file.fileno(), self._drawn.randrange(path.stat().st_size))
            self.flipped[path.relative_to(store).parts[0]] += 1

    def _flip_device(self, count: int) -> None:
        """Through the descriptor that the supervisor gives: it asks nobody about that."""
        cells, greeting = Cells(headed=True), connect(self._view.directory)
        device = greeting.filler
        size = os.fstat(device).st_size
        for cell in self._drawn.choices(range(size // cells.file_bytes), k=count):
            begin = cell * cells.file_bytes
            with suppress(OSError):  # ENXIO: the rest is one hole
                if os.lseek(device, begin, os.SEEK_DATA) < begin + cells.file_bytes:
                    continue  # something of it is here
            self._flip_bit(device, begin + self._drawn.randrange(cells.file_bytes))
            self.flipped["device"] += 1
        os.close(device)
        os.close(greeting.group)
        greeting.connection.close()

    def _flip_bit(self, file: int, at: int) -> None:
        (byte,) = os.pread(file, 1, at) or b"\0"
        os.pwrite(file, bytes([byte ^ 1 << self._drawn.randrange(8)]), at)


def cells_filled(view: View, source: Path) -> tuple[set[int], set[int]]:
    """The cells of the device that the kernel would read, and those of them with wrong bytes."""
    paths = [path for path in source.rglob("*") if path.is_file() and not path.is_symlink()]
    paths.sort(key=lambda path: walking_order(os.fsencode(path.relative_to(source))))
    contents = {content_hash(data): data for data in (path.read_bytes() for path in paths) if data}
    # Chunk lists say only where large contents are cut.
    layout = DeviceLayout({name: len(data) for name, data in contents.items()}, {})
    cells, firsts, greeting = Cells(headed=True), layout.first_blocks(), connect(view.directory)
    heads = {cell: cells.head(cell) for cell in cells.holding(0, layout.size)}
    filled = {cell for cell, (at, head) in heads.items() if os.pread(greeting.filler, len(head), at) == head}
    wrong = set()
    for name, data in contents.items():
        for offset, begin, end in cells.places(firsts[name] * BLOCK_BYTES, len(data)):
            (cell,) = cells.covering(offset, end - begin)
            if cell in filled and os.pread(greeting.filler, end - begin, offset) != data[begin:end]:
                wrong.add(cell)
    os.close(greeting.filler)
    os.close(greeting.group)
    greeting.connection.close()
    return filled, wrong


@pytest.mark.long
def test_ten_thousand_flipped_bits_are_never_read(site: Site, source: Path) -> None:
    """While the package comes, and programs read it: each of them gets what the file has, or an
    error, and no cell of the device that the kernel would read has anything else."""
    site.origin.rate_bytes_s = SLOW_BYTES_S
    (agent,) = site.agents(1)
    view = View(agent)
    flips = Flips(view, seed=3)
    names = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file() and not path.is_symlink())
    random.Random(4).shuffle(names)
    readers: list[tuple[Path, subprocess.Popen[bytes]]] = []
    while flips.flipped.total() < FLIPS:
        before = agent.received()
        flips.flip(FLIPS // 8)
        readers += [(name, reader(view.path / name)) for name in names[:10]]
        names = names[10:]
        until(lambda: agent.received() > before or is_filled(view.directory), "nothing comes")  # noqa: B023
    assert flips.flipped["device"] and flips.flipped["device"] < FLIPS
    for name, process in readers:
        got, errors = process.communicate(timeout=PATIENCE_S)
        assert (source / name).read_bytes().startswith(got), name
        assert got == (source / name).read_bytes() or refused(errors), name
    filled, wrong = cells_filled(view, source)
    assert filled and not wrong
    view.umount()


def test_where_it_cannot_be_lazy_it_is_eager_and_says_why(site: Site, source: Path) -> None:
    (agent,) = site.agents(1)
    view = View(agent, "--how", "erofs")
    assert view.how == "erofs" and "eager: it is to be shown as erofs" in view.said
    view.umount()
    view = View(agent)
    assert view.how == "erofs" and "all of the package is here" in view.said
    view.umount()


def test_policies_say_what_is_lazy_and_users_may_wait_for_everything(site: Site, source: Path) -> None:
    policies, target = site.directory / "policies.toml", site.directory / "target"

    def start(lazy: str) -> None:
        policies.write_text(f'[[policy]]\nmatch = "app:*"\nlazy = {lazy}\n')
        site.kill_tracker()
        site.start_tracker("--policies", str(policies))

    def mount(agent: Agent, *options: str) -> tuple[dict[str, Any], str]:
        socket = ("--socket", str(agent.socket))
        code, shown, said = site.command("mount", "app:v1", str(target), *socket, *options)
        assert code == 0, said
        (view,) = site.command("status", *socket)[1]["views"]
        assert (view["path"], view["lazy"]) == (str(target), shown["lazy"] is not None)
        assert site.command("umount", str(target), *socket)[0] == 0
        return shown, said

    site.origin.rate_bytes_s = 4 * SLOW_BYTES_S
    start("true")
    first, second = site.agents(2)
    shown, _ = mount(first)
    assert shown["how"] == "lazy" and not shown["lazy"]["whole"]
    shown, _ = mount(second, "--lazy", "--wait")
    assert shown["how"] == "lazy" and shown["lazy"]["whole"]
    shown, said = mount(first, "--eager")
    assert shown["how"] == "erofs" and "eager" not in said
    start("false")
    third = Agent(site, "h9").start()
    shown, said = mount(third, "--lazy")
    assert shown["how"] == "erofs" and "eager: its policy says so" in said
