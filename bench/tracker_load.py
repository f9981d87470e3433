"""A tracker under the load of many hosts: real sessions over loopback, one blob that they all want
at the same moment.

    python -m bench.tracker_load [--hosts 10000] [--pieces N] [--seconds 30] [--json] [--vouched]
                                 [--join at-once|connecting|both] [--profile DIRECTORY]

A `p2pdist tracker` runs as its own process. Another process holds one WebSocket per host and speaks
for it: Hello, Holding, and Reports whose counts advance. With `at-once` all sessions are open
before the first host joins; with `connecting` each joins as it comes. The hosts move no data. Both
processes share the machine's cores, so what the clients took is printed beside what the tracker
took; they speak just enough of RFC 6455 (frames masked with zeros) to cost a fraction of it.

Figures: `accept_s` until every session was welcomed; `planned_s` from the first join until every
host knew a parent for every stripe, and `settled_s` until the last Assign (`moved_after` of them
came later than the whole plan); `silent_s` the longest that the tracker left a /healthz unanswered
meanwhile; with --vouched what the tracker takes for a message with news of the list, to all hosts
together and for each; plan latency from the tracker's own histogram; resident bytes per session and
per (host, blob); the tracker's share of one core and its microseconds per report under steady
reports. With --profile py-spy notes where the tracker's time goes, one file of folded stacks per
phase.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.load_hosts import clients, layout_of, raise_file_limit
from bench.processes import cpu_s
from p2pdist.model.vouched_list import vouched_layout

PAGE = resource.getpagesize()


# -- the tracker process


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def fetch(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as answer:
        return str(answer.read().decode())


def quantile(metrics: str, share: float) -> float:
    """Upper bound in seconds of the bucket of the planning histogram in which a quantile lies;
    infinite above the last, NaN without any."""
    buckets: list[tuple[float, float]] = []
    for line in metrics.splitlines():
        if line.startswith("p2pdist_tracker_plan_seconds_bucket"):
            buckets.append((float(line.split('le="')[1].split('"')[0]), float(line.rpartition(" ")[2])))
    if not buckets or not buckets[-1][1]:
        return float("nan")
    return next(bound for bound, count in buckets if count >= share * buckets[-1][1])


def metric(metrics: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(name))


@contextlib.contextmanager
def tracker() -> Iterator[tuple[int, int]]:
    """A tracker process: its port and pid."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = [sys.executable, "-m", "p2pdist.cli.main", "tracker", "--listen", f"127.0.0.1:{port}"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*words, "--log-level", "warning"], stderr=log)
        try:
            for _ in range(1200):
                with contextlib.suppress(OSError):
                    fetch(port, "/readyz")
                    break
                time.sleep(0.05)
            yield port, process.pid
        finally:
            process.kill()
            process.wait()
            log.seek(0)
            sys.stderr.write(log.read().decode()[:4000])


class Rig:
    """A tracker and its clients; `run` sends the clients a command and measures the tracker
    meanwhile."""

    def __init__(self, port: int, pid: int, chosen: argparse.Namespace) -> None:
        self.port, self.pid = port, pid
        self._commands, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._clients = context.Process(target=clients, args=(theirs, port, chosen), daemon=True)
        self._clients.start()
        self._profile: str = chosen.profile

    @contextlib.contextmanager
    def _profiled(self, phase: str) -> Iterator[None]:
        if not self._profile:
            yield
            return
        file = Path(self._profile) / f"{phase}.folded"
        words = ["py-spy", "record", "-p", str(self.pid), "-r", "250", "-f", "raw", "-F", "-d", "900", "-o", str(file)]
        sampler = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(1.0)
        try:
            yield
        finally:
            sampler.send_signal(signal.SIGINT)
            sampler.wait()

    def run(self, *command: Any) -> dict[str, float]:
        """Have the clients do something; their figures and the tracker's."""
        with self._profiled(command[0]):
            return self._run(*command)

    def _run(self, *command: Any) -> dict[str, float]:
        before, started = cpu_s(self.pid), time.monotonic()
        silent_s = 0.0
        self._commands.send(command)
        while not self._commands.poll(0.2):
            asked = time.monotonic()
            fetch(self.port, "/healthz")
            silent_s = max(silent_s, time.monotonic() - asked)
        failure, answer = self._commands.recv()
        if failure:
            raise SystemExit(f"{command[0]}: {failure}")
        took = time.monotonic() - started
        figures: dict[str, float] = answer
        return figures | {"tracker_cpu_s": cpu_s(self.pid) - before, "silent_s": silent_s, "wall_s": took}

    def stop(self) -> None:
        self._commands.send(("stop",))
        self._clients.join(10)
        self._clients.kill()


def measure(chosen: argparse.Namespace, *, at_once: bool) -> dict[str, Any]:
    """One tracker, from empty to steady reports."""
    with tracker() as (port, pid):
        rig = Rig(port, pid, chosen)
        try:
            empty = resident(pid)
            found: dict[str, Any] = {"connect": rig.run("connect", not at_once)}
            connected = resident(pid)
            if at_once:
                found["join"] = rig.run("join")
            joined = resident(pid)
            metrics = fetch(port, "/metrics")
            found["plans"] = metric(metrics, "p2pdist_tracker_plan_seconds_count")
            found["plan_p50_s"], found["plan_p99_s"] = quantile(metrics, 0.5), quantile(metrics, 0.99)
            found["plan_total_s"] = metric(metrics, "p2pdist_tracker_plan_seconds_sum")
            if chosen.vouched:
                vouch = found["vouch"] = rig.run("vouch", chosen.seconds or 10.0)
                vouch["milliseconds_per_listed"] = 1e3 * vouch["tracker_cpu_s"] / max(1.0, vouch["messages_per_host"])
                vouch["microseconds_per_host"] = 1e6 * vouch["tracker_cpu_s"] / max(1.0, vouch["listed"])
            if chosen.seconds:
                steady = found["steady"] = rig.run("report", chosen.seconds, chosen.report_interval)
                steady["tracker_share"] = steady["tracker_cpu_s"] / steady["wall_s"]
                steady["clients_share"] = steady["clients_cpu_s"] / steady["wall_s"]
                steady["microseconds_per_report"] = 1e6 * steady["tracker_cpu_s"] / max(1.0, steady["reports"])
            found["resident_bytes"] = resident(pid)
            if at_once:
                found["bytes_per_session"] = (connected - empty) / chosen.hosts
                found["bytes_per_host_and_blob"] = (joined - connected) / chosen.hosts
            else:
                found["bytes_per_host"] = (joined - empty) / chosen.hosts
            return found
        finally:
            rig.stop()


def show(name: str, found: dict[str, Any]) -> None:
    """For people."""
    print(f"-- joins {name}")
    for key, value in found.items():
        for part, figure in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{key + ' ' + part:32} {figure:14,.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=10_000)
    parser.add_argument("--pieces", type=int, help="their number decides the stripes [4096, with --vouched 2048]")
    parser.add_argument("--join", choices=["at-once", "connecting", "both"], default="both")
    parser.add_argument("--seconds", type=float, default=30.0, help="of steady reports; 0 for none")
    parser.add_argument("--report-interval", type=float, default=5.0)
    parser.add_argument("--vouched", action="store_true", help="the roots vouch for a piece list, which goes to all")
    parser.add_argument("--profile", default="", metavar="DIRECTORY")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if chosen.pieces is None:
        chosen.pieces = 2048 if chosen.vouched else 4096
    if chosen.vouched and vouched_layout(layout_of(chosen.pieces).size) != layout_of(chosen.pieces):
        parser.error("a vouched list has the pieces that the blob's size asks for: 1025 to 2048 here")
    raise_file_limit()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the tracker ends with this process
    found = {
        name: measure(chosen, at_once=name == "at-once")
        for name in ("at-once", "connecting")
        if chosen.join in (name, "both")
    }
    head = {"hosts": chosen.hosts, "pieces": chosen.pieces, "stripes": layout_of(chosen.pieces).stripes}
    if chosen.json:
        print(json.dumps(head | found))
        return 0
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    for name, figures in found.items():
        show(name, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
