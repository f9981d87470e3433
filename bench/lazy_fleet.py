"""Many hosts that run one package at the same moment, lazily and eagerly: when their programs
end, what the seed sends, and what came twice.

    sudo python -m bench.lazy_fleet --hosts 16 --rate-mbit 40 --source DIRECTORY

Each host is a network namespace at a bridge, with the given rate either way (tbf); the seed, which
holds the package, sends at twice that rate. The program reads the files that `--read` matches, in
DIRECTORY's order, and says so. All stores and the page cache are empty in the beginning.
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
from pathlib import Path

from bench.lazy import MIB, P2PDIST, daemon, ip, within
from bench.table import render

BRIDGE, SPACE = "p2plf-b", "p2plf"
TRACKER = "10.78.0.1"
PROGRAM = (
    "import os, pathlib; "
    "print(sum(len(p.read_bytes()) for p in sorted(pathlib.Path(os.environ['P2PDIST_ROOT']).rglob({pattern!r})) "
    "if p.is_file()), flush=True)"
)
FILL_S_MAX = 3600.0


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


def round_of(place: Path, hosts: int, *options: str) -> tuple[list[float], int, float]:
    """Seconds until each host's program ended, bytes that the seed sent until everything was
    everywhere, and the share of what was received that came twice."""
    tag = "-".join(("host", *options)).replace("--", "")
    numbers = range(1, hosts + 1)
    with ExitStack() as agents:
        sockets = []
        for number in numbers:
            words, socket = agent(place, number, f"{tag}{number}")
            agents.enter_context(daemon(f"{SPACE}{number}", place / "host.log", *words, socket=socket))
            sockets.append(socket)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        before, began = sent_by_seed(), time.monotonic()
        runs = [
            subprocess.Popen(
                within(f"{SPACE}{number}", [*P2PDIST, "run", *options, "--socket", str(socket), "app:v1"]),
                stdout=subprocess.PIPE,
            )
            for number, socket in zip(numbers, sockets, strict=True)
        ]
        lines: dict[int, float] = {}
        while len(lines) < hosts:
            for index, run in enumerate(runs):
                if index not in lines and run.poll() is not None:
                    lines[index] = time.monotonic() - began
                    if run.returncode:
                        raise SystemExit(f"a program ended with {run.returncode}: see {place / 'host.log'}")
            time.sleep(0.02)
        # What is missing comes after the program's end: both ways end with everything everywhere.
        pulls = [subprocess.Popen([*P2PDIST, "pull", "app:v1", "--socket", str(socket)]) for socket in sockets]
        for pull in pulls:
            pull.wait(FILL_S_MAX)
        received = sum(metric(number, "p2pdist_agent_received_bytes_total") for number in numbers)
        twice = sum(metric(number, "p2pdist_agent_received_twice_bytes_total") for number in numbers)
        sent = sent_by_seed() - before
    for number in numbers:
        shutil.rmtree(place / f"{tag}{number}", ignore_errors=True)
    return sorted(lines.values()), sent, twice / received if received else 0.0


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
    rows: list[Sequence[str]] = []
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
                for name in ("eager", "lazy"):
                    lines, sent, twice = round_of(place, args.hosts, f"--{name}")
                    times = (f"{statistics.median(lines):.2f}", f"{lines[-1]:.2f}")
                    rows.append((name, *times, f"{sent / size:.2f}", f"{100 * twice:.1f}"))
        head = ("way", "program s", "last host s", "copies sent by the seed", "came twice %")
        print(render(f"{args.hosts} hosts, {args.rate_mbit:g} Mbit/s, {size / MIB:.0f} MiB", head, rows))
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
