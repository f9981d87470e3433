"""From `p2pdist run` to the program's first line over a link, on a cold host: from the local disk,
eager, lazy, and lazy with the trace of a start on another host.

    sudo python -m bench.lazy --package /srv/lazy --files 100000 --size-mib 5120 --modules torch

The package is what lazy_package.py makes of a directory of installed wheels, this project's
environment unless `--source` names another; with `--package DIR` it stays in DIR and is made once,
and so does what the seed holds. The program imports `--modules`. Origin, tracker and the seed are
in one network namespace, the host that runs the program in another, behind a link of the given rate
(tbf). Every run has an agent with an empty store and begins with an empty page cache, that of the
local disk as well, but for the blobs of the seed, which is another host. Traces are kept by the
package's name, so each lazy start has a name of its own, and those with a trace share one. Other
files lie below TMPDIR and are removed afterwards, and so are views and namespaces, also after
SIGINT and SIGTERM.

The origin is a directory that the host reads by itself. It alone has the bootstrap, which a seed
that pulled the package does not need, so the metadata of a lazy start comes beside the link; its
bytes count as if it came over it, its time does not (3.2 MB: 0.06 s at 400 Mbit/s).

Columns: seconds from the command to the first line, and the bytes that came over the link by then;
seconds until everything is here, the program running meanwhile, and until the view lacks nothing;
milliseconds from the moment when the metadata is here until the view is seen, and the bytes of the
package that had come by that moment; reads that waited, and the 99th percentile of their waits; the
largest memory of the agent. A second table says when each step of a lazy start had ended, and what
came over the link all along.

Below stand the goals.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from operator import sub
from pathlib import Path
from typing import Any

from bench import lazy_package
from bench.lazy_package import MIB, P2PDIST, PROGRAM, Made
from bench.table import figure, median, render
from p2pdist.agent.api.client import LocalClient
from p2pdist.model.messages import PullRequest
from p2pdist.mount import records
from p2pdist.mount.supervisor import protocol

NEAR, FAR = f"p2plazy-a{os.getpid()}", f"p2plazy-b{os.getpid()}"
NEAR_ADDRESS, FAR_ADDRESS = "10.77.0.1", "10.77.0.2"
READY_S = 300.0
HERE_S_MAX = 3600.0
"""No run waits longer until everything is here."""
POLL_S = 0.2
STEP_S = 0.1
"""How long the link's bytes are summed up for one figure."""

LOCAL, EAGER, LAZY, TRACED = "local disk", "eager", "lazy", "lazy, second host with trace"
WAYS = (LOCAL, EAGER, LAZY, TRACED)


STEPS = ("found", "listed", "arranged", "foreseen", "mounted", "located", "prefetched")
"""The package is known; its lists of files are here; where its contents lie in the device is
computed, and with a trace of most where they come from; the view is mounted; what is missing is
computed; what the trace names is in the device."""


@dataclass(frozen=True, slots=True)
class Row:
    """One start. Seconds are from the command on; None is what a way has not."""

    way: str
    first_line_s: float
    first_line_bytes: int = 0
    here_s: float | None = None
    whole_s: float | None = None
    shown_ms: float | None = None
    metadata_bytes: int | None = None
    stalls: int = 0
    stall_p99_s: float = 0.0
    prefetched_bytes: int = 0
    """Of contents, ahead of the program."""
    agent_mib: float | None = None
    asked_s: float | None = None
    """When the agent was asked for the view."""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds after that until each step of the start had ended."""
    stall_p50_s: float = 0.0
    trace_bytes: int = 0
    """What its trace names, as packs have it."""
    link_bytes: tuple[int, ...] = ()
    """Bytes that came over the link in each STEP_S until the first line."""


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


@contextmanager
def link(rate_mbit: float) -> Iterator[None]:
    """Two namespaces with a link between them."""
    try:
        for space in (NEAR, FAR):
            ip(f"netns add {space}")
            ip(f"-n {space} link set lo up")
        ip(f"link add near netns {NEAR} type veth peer name far netns {FAR}")
        for space, name, address in ((NEAR, "near", NEAR_ADDRESS), (FAR, "far", FAR_ADDRESS)):
            ip(f"-n {space} addr add {address}/24 dev {name}")
            ip(f"-n {space} link set {name} up")
            shape = f"tc -n {space} qdisc add dev {name} root tbf rate {rate_mbit}mbit burst 256kb latency 50ms"
            subprocess.run(shape.split(), check=True)
        yield
    finally:
        for space in (NEAR, FAR):
            subprocess.run(["ip", "netns", "del", space], check=False)


def within(space: str, words: Sequence[str]) -> list[str]:
    """A command in a namespace; `ip netns exec` would give it mounts of its own as well."""
    return ["nsenter", f"--net=/run/netns/{space}", *words]


def received_bytes() -> int:
    """Bytes that came over the link."""
    shown = subprocess.run(
        ["ip", "-n", FAR, "-j", "-s", "link", "show", "dev", "far"], capture_output=True, text=True, check=True
    )
    return int(json.loads(shown.stdout)[0]["stats64"]["rx"]["bytes"])


@contextmanager
def daemon(space: str, log: Path, *words: str, socket: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A tracker or an agent; with `socket` it is awaited there."""
    with log.open("ab") as output:
        process = subprocess.Popen(within(space, [*P2PDIST, *words]), stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + READY_S
        while socket is not None and not socket.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        yield process
    finally:
        process.terminate()
        process.wait()


def end_when_asked() -> None:
    """Have SIGTERM end this program as SIGINT does, so that it cleans up."""

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # cleaning up is not to be cut short
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def remove_views(store: Path) -> None:
    """Unmount what an agent with this store, which has ended, left mounted: lazy views outlive
    their agents."""
    work = store / "mounts" / "records"
    for record in records.records(work) if work.is_dir() else ():
        protocol.dismiss(record.directory(work))
        records.take_down(record, work, lazily=True)


def memory_mib(process: subprocess.Popen[bytes]) -> float:
    """The most memory that a process has had so far."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


@contextmanager
def sampled(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """How many bytes have come over the link to a process's namespace, each STEP_S anew."""
    path, counts, over = Path(f"/proc/{process.pid}/net/dev"), [], threading.Event()

    def sample() -> None:
        began = time.monotonic()
        while not over.wait(max(0.0, began + len(counts) * STEP_S - time.monotonic())):
            lines = (line.partition(":") for line in path.read_text().splitlines())
            counts.append(next(int(rest.split()[0]) for name, _, rest in lines if name.strip() == "far"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield counts
    finally:
        over.set()
        sampler.join()


def forget_pages(seed: Path | None = None) -> None:
    """Empty the page cache, but for the blobs of a seed's store: the seed is another host."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    for blob in seed.glob("blobs/*/*") if seed is not None else ():
        with blob.open("rb", buffering=0) as file:
            while file.read(MIB):
                pass


def local_start(made: Made, modules: str) -> Row:
    """The program from the directory that was packed."""
    forget_pages()
    words = [os.path.realpath(sys.executable), "-I", "-S", "-c", PROGRAM, modules]
    began = time.monotonic()
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"P2PDIST_ROOT": str(made.source)},
    ) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        took_s = time.monotonic() - began
    if line != "ready\n":
        raise SystemExit(f"the program ended with {program.returncode} on the local disk")
    return Row(LOCAL, took_s)


class ColdHost:
    """A host with an empty store, in `place`, that starts the program once; `seed` is the store of
    the host from which it receives."""

    def __init__(self, place: Path, seed: Path, number: int) -> None:
        self._seed = seed
        self._log, self._store = place / "cold.log", place / f"cold{number}"
        self._socket = place / f"cold{number}.sock"
        self._words = ("agent", "--tracker", f"http://{NEAR_ADDRESS}:7070", "--listen", f"{FAR_ADDRESS}:7071")
        self._words += ("--store", str(self._store), "--socket", str(self._socket))
        self._words += ("--name", f"cold{number}", "--drain-seconds", "0")

    def start(self, way: str, package: str, modules: str, *, brief: bool = False) -> Row:
        """Start the program, wait until everything is here, unless that is to be `brief`, and end
        both."""
        try:
            row = self._start(way, package, modules, brief)
        finally:
            remove_views(self._store)
        shutil.rmtree(self._store)
        return row

    def _start(self, way: str, package: str, modules: str, brief: bool) -> Row:
        option = "--eager" if way == EAGER else "--lazy"
        with daemon(FAR, self._log, *self._words, socket=self._socket) as agent:
            client = LocalClient(self._socket)
            forget_pages(self._seed)
            before, began = received_bytes(), time.monotonic()
            run = [*P2PDIST, "run", option, "--socket", str(self._socket), package, "--", modules]
            with subprocess.Popen(
                within(FAR, run), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as program:
                assert program.stdin is not None and program.stdout is not None
                with sampled(agent) as counts:
                    line = program.stdout.readline()
                    row = Row(way, time.monotonic() - began, received_bytes() - before)
                if line == "ready\n":
                    row = replace(_seen(row, client, began), link_bytes=tuple(map(sub, counts[1:], counts)))
                    row = row if brief else self._watch(row, client, began)
                program.stdin.close()
            if line != "ready\n" or program.returncode:
                told = self._log.read_text()[-2000:]
                raise SystemExit(f"the program ended with {program.returncode}: {told}")
            row = replace(row, agent_mib=memory_mib(agent))
            time.sleep(3.0)  # a lazy view goes before its agent, which tells what was read
        return row

    @staticmethod
    def _watch(row: Row, client: LocalClient, began: float) -> Row:
        """Wait until everything is here, and then until the view lacks nothing."""
        here_s: float | None = None
        while time.monotonic() - began < HERE_S_MAX:
            pulls: list[dict[str, Any]] = client.status()["pulls"]
            if any(pull["state"] == "failed" for pull in pulls):
                raise SystemExit(f"a pull failed: {pulls}")
            (mount,) = client.mounts()
            if here_s is None and pulls and all(pull["state"] == "done" for pull in pulls):
                now = time.monotonic()
                here_s = max(now - pull["age_s"] + pull["seconds"] for pull in pulls) - began
                if row.way == EAGER:
                    return replace(row, here_s=here_s)
            if mount.lazy is not None and mount.lazy.whole and here_s is not None:
                return replace(_seen(row, client, began), here_s=here_s, whole_s=time.monotonic() - began)
            time.sleep(POLL_S)
        raise SystemExit(f"not everything came within {HERE_S_MAX:.0f} s")


def _seen(row: Row, client: LocalClient, began: float) -> Row:
    """With what the agent says of the view now."""
    (mount,), now = client.mounts(), time.monotonic()
    lazy = mount.lazy
    if lazy is None:
        if row.way != EAGER:
            raise SystemExit(f"the start was not lazy: {mount.why}")
        return row
    return replace(
        row,
        shown_ms=1000 * lazy.shown_s,
        metadata_bytes=lazy.metadata_bytes,
        stalls=lazy.stalls,
        stall_p50_s=lazy.stall_p50_s,
        stall_p99_s=lazy.stall_p99_s,
        prefetched_bytes=lazy.prefetched_bytes,
        trace_bytes=lazy.trace_bytes,
        asked_s=now - lazy.age_s - began,
        steps=dict(lazy.steps),
    )


def measured(
    place: Path,
    made: Made,
    modules: str,
    rate_mbit: float,
    repeat: int,
    *,
    brief: bool = False,
    trace: Path | None = None,
) -> tuple[list[Row], float]:
    """All starts, by turns: a machine that changes its speed is fair to all. And the largest memory
    of the tracker, in MiB. `brief`: no eager ones, and none is followed behind its first line. The
    trace is written to the file `trace`."""
    seed = ("agent", "--tracker", f"http://{NEAR_ADDRESS}:7070", "--listen", f"{NEAR_ADDRESS}:7071")
    seed += ("--store", str(made.directory / "seed"), "--socket", str(place / "seed.sock"), "--name", "seed")
    words = ("tracker", "--listen", f"{NEAR_ADDRESS}:7070", "--origin", made.origin, "--state", str(place / "state"))
    rows: list[Row] = []
    with (
        link(rate_mbit),
        daemon(NEAR, place / "tracker.log", *words) as tracker,
        daemon(NEAR, place / "seed.log", *seed, socket=place / "seed.sock"),
    ):
        LocalClient(place / "seed.sock").pull(PullRequest(package=lazy_package.NAME))
        traced = made.name("traced")
        ColdHost(place, made.directory / "seed", 0).start(LAZY, traced, modules, brief=brief)
        if trace is not None:
            export = (*P2PDIST, "trace", "export", traced, "-o", str(trace), "--tracker", f"http://{NEAR_ADDRESS}:7070")
            subprocess.run(within(NEAR, export), check=True, stdout=subprocess.DEVNULL)
        for number in range(repeat):
            rows.append(local_start(made, modules))
            starts = ((EAGER, lazy_package.NAME), (LAZY, made.name(f"lazy{number}")), (TRACED, traced))
            for index, (way, package) in enumerate(starts[brief:]):
                rows.append(
                    ColdHost(place, made.directory / "seed", 3 * number + index + 1).start(
                        way, package, modules, brief=brief
                    )
                )
                print(rows[-1], file=sys.stderr, flush=True)
        tracker_mib = memory_mib(tracker)
    return rows, tracker_mib


def _mib(count: int | None) -> float | None:
    return None if count is None else count / MIB


@dataclass(frozen=True, slots=True)
class Goal:
    """What the medians are to be: `value` at most `limit`."""

    name: str
    value: float
    limit: float
    unit: str = "s"

    @property
    def met(self) -> bool:
        """Whether it is so."""
        return self.value <= self.limit


def goals(rows: Sequence[Row], made: Made, rate_mbit: float) -> list[Goal]:
    """The goals, each with what the starts reached. The bound of a start is what is larger: the
    local disk, or the bytes at the link's rate that it cannot do without, which are the metadata
    and what the program reads."""

    def of(way: str, value: Callable[[Row], float | None]) -> float | None:
        return median(value(row) for row in rows if row.way == way)

    found: list[Goal] = []

    def goal(name: str, value: float | None, limit: float | None, unit: str = "s") -> None:
        if value is not None and limit is not None:
            found.append(Goal(name, value, limit, unit))

    local_s, eager_s, eager_here_s = of(LOCAL, _first_s), of(EAGER, _first_s), of(EAGER, lambda row: row.here_s)
    trace_bytes = of(TRACED, lambda row: row.trace_bytes)
    assert local_s is not None and trace_bytes is not None
    trace_s = trace_bytes * 8 / (rate_mbit * 1e6)
    metadata_s = (of(LAZY, lambda row: row.metadata_bytes) or 0) * 8 / (rate_mbit * 1e6)
    bound_s = max(local_s, metadata_s + trace_s)
    goal("first host: 1.6 x local disk", of(LAZY, _first_s), 1.6 * local_s)
    goal(f"first host: 1.6 x its bound ({bound_s:.2f} s)", of(LAZY, _first_s), 1.6 * bound_s)
    traced = f"second host: 1.15 x the larger of local disk, trace at the link's rate ({trace_s:.2f} s)"
    goal(traced, of(TRACED, _first_s), 1.15 * max(local_s, trace_s))
    for way in (LAZY, TRACED):
        came, metadata = of(way, lambda row: row.first_line_bytes), of(way, lambda row: row.metadata_bytes)
        assert came is not None and metadata is not None, f"no start was {way}"
        goal(f"{way}: ready no later than eager", of(way, _first_s), eager_s)
        goal(f"{way}: of the package before the first line", 100 * (came + metadata) / made.bytes_stored, 15.0, "%")
        here_s = None if eager_here_s is None else 1.03 * eager_here_s
        goal(f"{way}: everything here, 1.03 x eager", of(way, lambda row: row.here_s), here_s)
        goal(f"{way}: metadata that came", metadata / 1e6, 4.0, "MB")
        goal(f"{way}: seen after the metadata", of(way, lambda row: row.shown_ms), 50.0, "ms")
    return found


def _first_s(row: Row) -> float:
    return row.first_line_s


def table(rows: Sequence[Row], made: Made, rate_mbit: float, tracker_mib: float) -> str:
    """The medians, what they are beside the local disk, and which goals they reach."""
    heads = ("way", "first line s", "best s", "x local", "MiB by then", "here s", "whole s", "shown ms")
    heads += ("metadata MiB", "stalls", "p99 s", "agent MiB")
    lines = []
    local_s = median(row.first_line_s for row in rows if row.way == LOCAL)
    for way in WAYS:
        runs = [row for row in rows if row.way == way]
        first_s = median(row.first_line_s for row in runs)
        if first_s is None or local_s is None:
            continue
        lines.append(
            (
                way,
                figure(first_s),
                figure(min(row.first_line_s for row in runs)),
                figure(first_s / local_s),
                figure(statistics.median(row.first_line_bytes for row in runs) / MIB, 1),
                figure(median(row.here_s for row in runs)),
                figure(median(row.whole_s for row in runs)),
                figure(median(row.shown_ms for row in runs), 0),
                figure(median(_mib(row.metadata_bytes) for row in runs)),
                figure(median(row.stalls for row in runs), 0),
                figure(median(row.stall_p99_s for row in runs), 3),
                figure(median(row.agent_mib for row in runs), 0),
            )
        )
    title = f"{made.files:,} files, {made.bytes_source / MIB:,.0f} MiB, at {rate_mbit:g} Mbit/s"
    note = f"stored {made.bytes_stored / MIB:,.1f} MiB; the tracker had {tracker_mib:.0f} MiB of memory"
    reached = [
        (goal.name, figure(goal.value), figure(goal.limit), goal.unit, "" if goal.met else "MISSED")
        for goal in goals(rows, made, rate_mbit)
    ]
    tables = [render(title, heads, lines, [note]), _steps(rows), render("Goals", _GOAL_HEADS, reached)]
    return "\n".join(tables)


_GOAL_HEADS = ("goal", "is", "at most", "", "")


def _steps(rows: Sequence[Row]) -> str:
    """Where the time of lazy starts goes: seconds from the command until each step has ended, and
    how fast the link was all along."""
    lines, notes = [], []
    for way in (LAZY, TRACED):
        runs = [row for row in rows if row.way == way]
        steps = {"asked": median(row.asked_s for row in runs)}
        for step in STEPS:
            ends = ((row.steps.get(step), row.asked_s or 0.0) for row in runs)
            steps[step] = median(None if after_s is None else asked_s + after_s for after_s, asked_s in ends)
        steps["first line"] = median(row.first_line_s for row in runs)
        cells = [figure(median(row.stalls for row in runs), 0)]
        cells += [figure(1000 * (median(row.stall_p50_s for row in runs) or 0.0), 1)]
        lines.append((way, *(figure(value) for value in steps.values()), *cells))
        rates = " ".join(f"{count / MIB:.1f}" for row in runs[:1] for count in row.link_bytes)
        notes.append(f"{way}: MiB over the link each {STEP_S:g} s: {rates}")
    heads = ("way", "asked", *STEPS, "first line", "waits", "p50 ms")
    return render("Steps, seconds from the command", heads, lines, notes)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lazy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", type=Path, metavar="DIR", help="where the package stays [a new one below TMPDIR]")
    lazy_package.add_options(parser)
    parser.add_argument("--modules", default="numpy,aiohttp,zstandard", help="what is imported [%(default)s]")
    parser.add_argument("--rate-mbit", type=float, default=400.0, help="of the link [%(default)s]")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median is told [%(default)s]")
    parser.add_argument("--brief", action="store_true", help="lazy starts alone, and only until their first lines")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the trace of the start there")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    chosen = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("namespaces and mounts need root")
    end_when_asked()
    # Not below a deep TMPDIR: a Unix socket's path may have 107 bytes.
    place = Path(tempfile.mkdtemp(prefix="p2plazy-"))
    try:
        directory = chosen.package.absolute() if chosen.package else place / "package"
        made = lazy_package.prepared(directory, chosen.source, files=chosen.files, size=chosen.size_mib * MIB)
        rows, tracker_mib = measured(
            place, made, chosen.modules, chosen.rate_mbit, chosen.repeat, brief=chosen.brief, trace=chosen.trace
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if chosen.json:
        package = asdict(made) | {"directory": os.fspath(made.directory)}
        document = {"package": package, "tracker_mib": tracker_mib, "rows": [asdict(row) for row in rows]}
        print(json.dumps(document))
    else:
        print(table(rows, made, chosen.rate_mbit, tracker_mib))
    return 0


if __name__ == "__main__":
    sys.exit(main())
