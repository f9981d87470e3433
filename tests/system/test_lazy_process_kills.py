"""A lazy view while the processes around it are killed at random, several at the same moment: its
agent, what keeps its readers waiting, the tracker, and the peer that serves. No reader gets a wrong
byte, none waits for ever, and the view is right in the end.

A turn kills KILLS processes; with P2PDIST_KILLS=100 all turns together kill a thousand. With -s a
turn says how far it is, and each wait of more than SLOW_S."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from lazy_marks import needs_events
from site_rig import Agent, Site
from test_lazy_views import View, refused, until, wrong_files

from p2pdist.mount import kernel

TURNS, KILLS = 10, int(os.environ.get("P2PDIST_KILLS", "20"))
MIB = 1 << 20
FILES, FILE_BYTES_MAX = 240, 150_000
RATE_BYTES_S = MIB // 2
READERS = 3
LIMIT_S = 20.0
"""How long a read waits for its bytes; the supervisor waits a little longer."""

STUCK_S = 240.0
"""A reader that has not ended by then hangs: each of a file's few cells is waited for once."""

SLOW_S = 5.0
"""A wait of so long is told, with what was killed."""

PROGRAMS = (b"p2pdist.mount.supervisor.process", b"p2pdist.mount.lazy.fuse")

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), needs_events]


class Turn:
    """A package that comes slowly, from storage and a peer that is not quicker, and an agent that
    shows it lazily."""

    def __init__(self, site: Site, seed: int) -> None:
        self._site, self._drawn = site, random.Random(seed)
        self.killed: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.longest_s = 0.0
        """The longest wait of a reader."""
        self.usable_s = 0.0
        """The longest time from kills until all that was read then could be read."""
        self._read: list[Path] = []
        """Files that readers had right."""
        bootstrap = ("--bootstrap",) if seed % 4 == 0 else ()  # a view that fanotify fills is shown by it
        self.source = self._publish(bootstrap)
        site.origin.rate_bytes_s = RATE_BYTES_S
        way = ("fanotify", "fuse")[seed % 2]
        self.peer = Agent(site, "peer").start()
        self._agent = Agent(site, "h0", lazy_wait=f"{LIMIT_S:g}", lazy_way=way).start()
        self._mount()

    def _publish(self, more: tuple[str, ...]) -> Path:
        top = self._site.directory / "source"
        for number in range(FILES):
            path = top / f"part{number % 7}" / f"file{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._drawn.randbytes(self._drawn.randrange(1, FILE_BYTES_MAX)))
        layout = ("--layout", str(self._site.directory / "layout"))
        origin = ("--origin", f"file://{self._site.layout}")
        for words in (("pack", str(top), "-t", "app:v1", "--format", "tree", *more), ("push", "app:v1", *origin)):
            code, _, errors = self._site.command(*words, *layout)
            assert code == 0, errors
        return top

    def _mount(self) -> None:
        self.peer.start_pull(package="app:v1")
        began = time.monotonic()
        self.view = View(self._agent)
        assert self.view.how == "lazy", self.view.said
        self._note("the view is mounted", time.monotonic() - began)
        self._read = []
        self._names = sorted(path.relative_to(self.source) for path in self.source.rglob("*") if path.is_file())
        self._drawn.shuffle(self._names)

    def run(self) -> None:
        """Kill until enough are killed; a view that lacks nothing, or of which all was read, gives
        way to a new one of empty stores."""
        while self.killed.total() < KILLS:
            if len(self._names) < READERS or self.view.status()["whole"]:
                self._anew()
            self._round()
            if self.killed.total() % 20 < 2:
                print(f"{time.strftime('%T')} {dict(self.killed)}; readers: {dict(self.outcomes)}", flush=True)
        self._finish()

    def _anew(self) -> None:
        self._finish()
        for agent in (self._agent, self.peer):
            agent.kill()
            subprocess.run(["rm", "-rf", str(agent.store)], check=True)
            agent.start()
        self._site.origin.rate_bytes_s = RATE_BYTES_S
        self._mount()

    def _round(self) -> None:
        """Read some files, kill some processes meanwhile, and start again what does not come back
        by itself."""
        names = [self._names.pop() for _ in range(READERS)]
        readers = [cat(self.view.path / name) for name in names]
        began = time.monotonic()
        time.sleep(self._drawn.random() / 4)  # somewhere in what happens
        chosen = self._kill()
        back_s, busy_s = time.monotonic() - began, self._site.origin.busy_s
        if self._read:  # what was right before stays so, also where the kernel forgot it
            names.append(self._drawn.choice(self._read))
            forget(self.view.path / names[-1])
            readers.append(cat(self.view.path / names[-1]))
        for name, process in zip(names, readers, strict=True):
            got, errors = process.communicate(timeout=STUCK_S)
            right = (self.source / name).read_bytes()
            assert right.startswith(got), f"wrong bytes of {name}"
            assert got == right or refused(errors), f"{name} is cut short: {errors!r}"
            self.outcomes["refused" if errors else "right"] += 1
        waited_s = time.monotonic() - began
        self.longest_s = max(self.longest_s, waited_s)
        what = f"after {'+'.join(chosen)} killed, all back after {back_s:.1f} s, the origin busy for {busy_s:.1f} s,"
        self._note(f"{what} readers ended", waited_s)
        for name in names:  # what was refused comes when it is read again
            until(lambda: self._is_right(name), f"{name} does not come")  # noqa: B023
        self._read += names[:READERS]
        usable_s = time.monotonic() - began
        self.usable_s = max(self.usable_s, usable_s)
        self._note(f"{what} the view is usable", usable_s)

    def _is_right(self, name: Path) -> bool:
        got, errors = cat(self.view.path / name).communicate(timeout=STUCK_S)
        right = (self.source / name).read_bytes()
        assert right.startswith(got), f"wrong bytes of {name}"
        assert got == right or refused(errors), f"{name} is cut short: {errors!r}"
        return got == right

    def _note(self, what: str, took_s: float) -> None:
        if took_s > SLOW_S:
            print(f"{time.strftime('%T')} {self.killed.total()} killed: {what} after {took_s:.1f} s", flush=True)

    def _kill(self) -> list[str]:
        keepers = dict(zip(("supervisor", "guard"), self._keepers(), strict=False))
        kinds = ["agent", "tracker", "peer", *keepers]
        chosen = self._drawn.sample(kinds, k=self._drawn.choice((1, 1, 1, 2, 2, 3, len(kinds))))
        for kind in chosen:
            with suppress(ProcessLookupError):
                if kind in keepers:
                    os.kill(keepers[kind], signal.SIGKILL)
                elif kind == "tracker":
                    self._site.kill_tracker()
                else:
                    (self._agent if kind == "agent" else self.peer).kill()
                self.killed[kind] += 1
        if "tracker" in chosen:
            self._site.start_tracker()
        for kind, agent in (("peer", self.peer), ("agent", self._agent)):
            if kind in chosen:
                agent.start()
        if "peer" in chosen:
            self.peer.start_pull(package="app:v1")
        return chosen

    def _keepers(self) -> list[int]:
        """The processes that keep readers waiting."""
        directory, found = os.fsencode(self.view.directory), []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if directory in words and any(program in words for program in PROGRAMS):
                    found.append(int(pid))
        return sorted(found)

    def _finish(self) -> None:
        """All of it is right in the end, and the view goes."""
        self._site.origin.rate_bytes_s, began = 0, time.monotonic()
        until(lambda: self.view.status()["whole"], "the view lacks something")
        self._note("the view lacks nothing", time.monotonic() - began)
        while found := wrong_files(self.view.path, self.source):
            assert all(refused(os.fsencode(line)) for line in found), found
            assert time.monotonic() - began < STUCK_S, found
            time.sleep(0.05)
        self.view.umount()
        assert not [entry for entry in kernel.mounted() if self._site.directory in entry.point.parents]


def cat(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def forget(path: Path) -> None:
    """Have the kernel read a file anew."""
    with suppress(OSError), path.open("rb") as file:  # nothing may serve the view just now
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture(autouse=True)
def nothing_stays(site: Site) -> Iterator[None]:
    yield
    for mounted in reversed(kernel.mounted()):
        if site.directory in mounted.point.parents:
            kernel.unmount(mounted.point, lazily=True)
    site.close()  # an agent would start others
    records = {os.fsencode(path) for path in site.directory.glob("store-*/mounts/records/*")}
    while pids := _processes_of(records):  # a guard that lives a moment longer has another one
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes_of(records: set[bytes]) -> list[int]:
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if records.intersection(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")):
                found.append(int(pid))
    return found


@pytest.mark.parametrize("seed", range(TURNS))
def test_no_kill_gives_a_wrong_byte_or_a_reader_that_hangs(site: Site, seed: int) -> None:
    turn = Turn(site, seed)
    turn.run()
    print(
        f"killed: {dict(turn.killed)}; readers: {dict(turn.outcomes)}, longest wait {turn.longest_s:.1f} s, "
        f"usable after {turn.usable_s:.1f} s at most"
    )
    assert min(turn.killed[kind] for kind in ("agent", "tracker", "peer", "supervisor", "guard")) > 0
    assert turn.outcomes["right"]
