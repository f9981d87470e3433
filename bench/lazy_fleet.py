"""Many hosts that run one package at the same moment, lazily and eagerly, and one alone: when their
programs end, what the seed sends, and what came twice.

    sudo python -m bench.lazy_fleet --hosts 16 --rate-mbit 40 --source DIRECTORY

Each host is a network namespace at a bridge, with the given rate either way (tbf); the seed, which
holds the package, sends at twice that rate. The program reads the files that `--read` matches, in
DIRECTORY's order, and says so. All stores and the page cache are empty in the beginning. Each round
has a name of its own for the package, so none begins with the trace of another.

Goals: the last of all lazy hosts ends LAST_MAX times as late as the one alone at most, the seed
sends COPIES_MAX copies, and TWICE_MAX % of what hosts receive comes twice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.lazy import MIB, P2PDIST, daemon, end_when_asked, forget_pages, ip, remove_views, within
from bench.table import figure, render

BRIDGE, SPACE = "p2plf-b", "p2plf"
TRACKER = "10.78.0.1"
PROGRAM = (
    "import os, pathlib; "
    "print(sum(len(p.read_bytes()) for p in sorted(pathlib.Path(os.environ['P2PDIST_ROOT']).rglob({pattern!r})) "
    "if p.is_file()), flush=True)"
)
FILL_S_MAX = 3600.0
PROGRAM_S_MAX = 1800.0
LAST_MAX, COPIES_MAX, TWICE_MAX = 1.3, 1.10, 2.0
ALONE, EAGER, LAZY = "lazy, alone", "eager", "lazy"


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds until each host's program ended, in order; copies of the package that the seed sent
    until everything was everywhere; and the share of what was received that came twice, in %."""

    way: str
    ended_s: tuple[float, ...]
    copies: float
    twice: float

    @property
    def last_s(self) -> float:
        """When the last program ended."""
        return self.ended_s[-1]


def missed(row: Round, alone: Round) -> str:
    """Which goals a round of lazy hosts misses; "" for none."""
    goals = (
        ("last", row.last_s / alone.last_s, LAST_MAX),
        ("copies", row.copies, COPIES_MAX),
        ("twice", row.twice, TWICE_MAX),
    )
    found = [f"{name} {value:.2f} > {limit:g}" for name, value, limit in goals if value > limit]
    return f"MISSED: {', '.join(found)}" if found else ""


def address(number: int) -> str:
    """That of a host; 0 is the seed."""
    return f"10.78.1.{number + 1}"


@contextmanager
def network(hosts: int, rate_mbit: float) -> Iterator[None]:
    """A bridge in a namespace of its own, with the tracker's address, and hosts at it."""
    spaces = [BRIDGE, *(f"{SPACE}{number}" for number in range(hosts + 1))]
    try:
        for space in spaces:
            ip(f"netns add {space}")
            ip(f"-n {space} link set lo up")
        ip(f"-n {BRIDGE} link add br0 type bridge")
        ip(f"-n {BRIDGE} addr add {TRACKER}/16 dev br0")
        ip(f"-n {BRIDGE} link set br0 up")
        for number, space in enumerate(spaces[1:]):
            rate = rate_mbit * (2 if number == 0 else 1)
            ip(f"link add eth0 netns {space} type veth peer name port{number} netns {BRIDGE}")
            ip(f"-n {space} addr add {address(number)}/16 dev eth0")
            ip(f"-n {BRIDGE} link set port{number} master br0 up")
            ip(f"-n {space} link set eth0 up")
            for inside, device in ((space, "eth0"), (BRIDGE, f"port{number}")):
                shape = f"tc -n {inside} qdisc add dev {device} root tbf rate {rate}mbit burst 64kb latency 50ms"
                subprocess.run(shape.split(), check=True)
        yield
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)


def sent_by_seed() -> int:
    """Bytes that the seed has sent."""
    words = ["ip", "-n", f"{SPACE}0", "-j", "-s", "link", "show", "dev", "eth0"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def metric(number: int, name: str) -> float:
    """The sum of a metric's samples at a host."""
    words = within(f"{SPACE}{number}", ["curl", "-sS", f"http://{address(number)}:7071/metrics"])
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def agent(place: Path, number: int, name: str) -> tuple[list[str], Path]:
    """The words that start a host's agent, and its socket."""
    socket = place / f"{name}.sock"
    words = ["agent", "--tracker", f"http://{TRACKER}:7070", "--listen", f"{address(number)}:7071"]
    words += ["--store", str(place / name), "--socket", str(socket), "--name", name, "--drain-seconds", "0"]
    return words, socket


def round_of(place: Path, hosts: int, way: str, package: str, size: int) -> Round:
    """Have so many hosts run `package`, of `size` stored bytes, at the same moment."""
    option, tag = "--eager" if way == EAGER else "--lazy", package.partition(":")[0]
    stores = [place / f"{tag}{number}" for number in range(1, hosts + 1)]
    try:
        with ExitStack() as started:
            sockets = []
            for number, store in enumerate(stores, 1):
                words, socket = agent(place, number, store.name)
                started.enter_context(daemon(f"{SPACE}{number}", place / "host.log", *words, socket=socket))
                sockets.append(socket)
            forget_pages()
            before, began = sent_by_seed(), time.monotonic()
            runs = []
            for number, socket in enumerate(sockets, 1):
                run = [*P2PDIST, "run", option, "--socket", str(socket), package]
                runs.append(started.enter_context(program(f"{SPACE}{number}", run)))
            lines = _ended(runs, began, place / "host.log")
            # What is missing comes after the end of the program: every round ends with all of it.
            pulling = [[*P2PDIST, "pull", package, "--socket", str(socket)] for socket in sockets]
            for pull in [started.enter_context(program(SPACE + "0", words)) for words in pulling]:
                pull.communicate(timeout=FILL_S_MAX)
                if pull.returncode:
                    raise SystemExit(f"a pull ended with {pull.returncode}: see {place / 'host.log'}")
            numbers = range(1, hosts + 1)
            received = sum(metric(number, "p2pdist_agent_received_bytes_total") for number in numbers)
            twice = sum(metric(number, "p2pdist_agent_received_twice_bytes_total") for number in numbers)
            sent = sent_by_seed() - before
    finally:
        for store in stores:
            remove_views(store)
            shutil.rmtree(store, ignore_errors=True)
    return Round(way, tuple(lines), sent / size, 100 * twice / received if received else 0.0)


@contextmanager
def program(space: str, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a namespace, which is ended with the block."""
    with subprocess.Popen(within(space, words), stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()


def _ended(runs: Sequence[subprocess.Popen[bytes]], began: float, log: Path) -> list[float]:
    """Seconds from `began` until each of the programs ended, in order."""
    lines: dict[int, float] = {}
    while len(lines) < len(runs):
        for index, run in enumerate(runs):
            if index not in lines and run.poll() is not None:
                lines[index] = time.monotonic() - began
                if run.returncode:
                    raise SystemExit(f"a program ended with {run.returncode}: {log.read_text()[-2000:]}")
        if time.monotonic() - began > PROGRAM_S_MAX:
            raise SystemExit(f"{len(runs) - len(lines)} programs have not ended within {PROGRAM_S_MAX:.0f} s")
        time.sleep(0.02)
    return sorted(lines.values())


def table(rows: Sequence[Round], title: str) -> str:
    """The rounds, and which goals the one of many lazy hosts misses."""
    (alone,) = (row for row in rows if row.way == ALONE)
    head = ("way", "program s", "last host s", "x alone", "copies sent by the seed", "came twice %", "")
    cells = [
        (
            row.way,
            figure(statistics.median(row.ended_s)),
            figure(row.last_s),
            figure(row.last_s / alone.last_s),
            figure(row.copies),
            figure(row.twice, 1),
            missed(row, alone) if row.way == LAZY else "",
        )
        for row in rows
    ]
    return render(title, head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--rate-mbit", type=float, default=40.0)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--read", default="*.py", metavar="PATTERN")
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("namespaces and mounts need root")
    place = Path(tempfile.mkdtemp(prefix="p2plf-"))
    layout, origin = ("--layout", str(place / "layout")), f"file://{place / 'origin'}"
    entrypoint = json.dumps([sys.executable, "-I", "-S", "-c", PROGRAM.format(pattern=args.read)])
    rows: list[Round] = []
    end_when_asked()
    try:
        packing = [*P2PDIST, "pack", str(args.source), "-t", "app:v1", "--format", "tree", "--entrypoint", entrypoint]
        subprocess.run([*packing, *layout], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*P2PDIST, "push", "app:v1", "--origin", origin, *layout], check=True)
        size = sum(path.stat().st_size for path in (place / "origin").rglob("*") if path.is_file())
        tracker = ("tracker", "--listen", f"{TRACKER}:7070", "--origin", origin, "--state", str(place / "state"))
        with network(args.hosts, args.rate_mbit), daemon(BRIDGE, place / "tracker.log", *tracker):
            words, socket = agent(place, 0, "seed")
            with daemon(f"{SPACE}0", place / "seed.log", *words, socket=socket):
                subprocess.run([*P2PDIST, "pull", "app:v1", "--socket", str(socket)], check=True)
                for number, way in enumerate((ALONE, EAGER, LAZY)):
                    package = f"round{number}:v1"
                    subprocess.run([*P2PDIST, "tag", "app:v1", package, "--origin", origin], check=True)
                    rows.append(round_of(place, 1 if way == ALONE else args.hosts, way, package, size))
        print(table(rows, f"{args.hosts} hosts, {args.rate_mbit:g} Mbit/s, {size / MIB:.0f} MiB"))
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
