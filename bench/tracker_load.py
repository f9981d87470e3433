"""A tracker under the load of many hosts: real sessions over loopback, one blob that they all want at the same moment.

    python bench/tracker_load.py [--hosts 10000] [--pieces 4096] [--join at-once|connecting|both] [--seconds 30] [--json]
                                  [--profile DIRECTORY]

A `p2pdist tracker` runs as its own process. Another process holds one WebSocket per host and speaks for it: Hello, Holding, and
Reports whose counts advance. With `at-once` all sessions are open before the first host joins; with `connecting` each joins as it
comes. The hosts move no data. Both processes share the machine's cores, so what the clients took is printed beside what the tracker
took; they speak just enough of RFC 6455 (frames masked with zeros) to cost a fraction of it.

Figures: `accept_s` until every session was welcomed; `planned_s` from the first join until every host knew a parent for every stripe, and
`settled_s` until the last Assign (`moved_after` of them came later than the whole plan); `silent_s` the longest that the tracker left
a /healthz unanswered meanwhile; plan latency from the tracker's own histogram; resident bytes per session and per (host, blob); the
tracker's share of one core and its microseconds per report under steady reports. With --profile py-spy notes where the tracker's time
goes, one file of folded stacks per phase.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Assign,
    Hello,
    Holding,
    Reject,
    Report,
    decode_from_tracker,
    encode,
)
from p2pdist.model.pieces import stripes_for

BLOB = digest_of(b"the blob that everybody wants")
PIECE_BYTES = 64 << 10
CONNECTING_MAX = 256
RACK_HOSTS = 40
WELCOME_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 300.0
QUIET_S, QUIET_WITHIN_S = 2.0, 10.0
"""QUIET_S without an Assign, and the plan has settled; a tracker that still moves hosts QUIET_WITHIN_S after the plan was whole is not
waited for."""

REPORT_SLOT_S = 0.01
UPLOAD_BYTES_S = 40e6
TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
PAGE = resource.getpagesize()


# -- one host


def frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """A client's frame, masked with zeros, which leaves the payload as it is."""
    length = len(payload)
    size = struct.pack(">B", 0x80 | length) if length < 126 else struct.pack(">BH", 0xFE, length)
    return bytes((0x80 | opcode,)) + size + b"\0\0\0\0" + payload


class Host(asyncio.Protocol):
    """One session. `load` is told what happens."""

    def __init__(self, load: Load, number: int) -> None:
        self.load, self.number = load, number
        self.transport: asyncio.Transport | None = None
        self.buffer = b""
        self.upgraded = False
        self.lacking = set(range(load.stripes))
        self.welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        key = base64.b64encode(self.number.to_bytes(16, "big")).decode()
        self.transport.write(  # type: ignore[union-attr]
            f"GET /v1/session HTTP/1.1\r\nHost: tracker\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def send(self, message: msgspec.Struct) -> None:
        assert self.transport is not None
        self.transport.write(frame(encode(message)))

    def join(self) -> None:
        load = self.load
        self.send(Holding(BLOB, load.pieces * PIECE_BYTES, PIECE_BYTES, (0,) * load.stripes))

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data
        if not self.upgraded:
            head, separator, data = data.partition(b"\r\n\r\n")
            if not separator:
                self.buffer = head
                return
            if b" 101 " not in head.split(b"\r\n", 1)[0]:
                self.load.fail(f"the tracker answered {head[:100]!r}")
                return
            self.upgraded = True
            number = self.number
            address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:7071"
            self.send(Hello(PROTOCOL_VERSION, f"host-{number}", address, "z1", f"r{number // RACK_HOSTS}"))
        self.buffer = self._frames(data)

    def _frames(self, data: bytes) -> bytes:
        """Take all whole frames; returns the rest."""
        at = 0
        while len(data) - at >= 2:
            opcode, length, body = data[at] & 0x0F, data[at + 1] & 0x7F, at + 2
            if length == 126:
                length, body = int.from_bytes(data[at + 2 : at + 4], "big"), at + 4
            elif length == 127:
                length, body = int.from_bytes(data[at + 2 : at + 10], "big"), at + 10
            if len(data) < body + length:
                break
            at = body + length
            self._frame(opcode, data[body:at])
        return data[at:]

    def _frame(self, opcode: int, payload: bytes) -> None:
        if opcode == PING:
            assert self.transport is not None
            self.transport.write(frame(payload, PONG))
        elif opcode == CLOSE:
            self.load.fail("the tracker closed a session")
        elif opcode == TEXT:
            message = decode_from_tracker(payload)
            if isinstance(message, Assign):
                self.lacking.difference_update(each.stripe for each in message.plan.stripes if each.parent is not None)
                self.load.assigned(self)
            elif isinstance(message, Reject):
                self.load.fail(str(message.problem))
            elif not self.welcomed.done():
                self.welcomed.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.load.fail(f"the session of host-{self.number} was lost: {error}")
        if not self.welcomed.done():
            self.welcomed.set_exception(ConnectionError("it was closed before the welcome"))


# -- all hosts, in a process of their own


class Load:
    """The hosts and what was measured of them."""

    def __init__(self, port: int, chosen: argparse.Namespace) -> None:
        self.port, self.count = port, chosen.hosts
        self.pieces, self.stripes = chosen.pieces, stripes_for(chosen.pieces)
        self.hosts: list[Host] = []
        self.waiting: set[int] = set()
        self.planned = asyncio.Event()
        self.assigns = 0
        self.assigned_at = 0.0
        self.planned_at = 0.0
        self.failure = ""

    def fail(self, why: str) -> None:
        self.failure = self.failure or why
        self.planned.set()

    def assigned(self, host: Host) -> None:
        self.assigns += 1
        self.assigned_at = time.monotonic()
        if not host.lacking and host.number in self.waiting:
            self.waiting.remove(host.number)
            if not self.waiting:
                self.planned_at = self.assigned_at
                self.planned.set()

    async def connect(self, *, join: bool) -> dict[str, float]:
        """Open all sessions; with `join` each host joins as soon as it is welcomed."""
        started = time.monotonic()
        slots = asyncio.Semaphore(CONNECTING_MAX)
        loop = asyncio.get_running_loop()
        self.waiting = set(range(self.count))

        async def open_one(number: int) -> None:
            async with slots:
                if self.failure:
                    return
                host = Host(self, number)
                try:
                    async with asyncio.timeout(WELCOME_TIMEOUT_S):
                        await loop.create_connection(lambda: host, "127.0.0.1", self.port)
                        await host.welcomed
                except (OSError, TimeoutError) as error:
                    self.fail(f"host-{number} got no session: {error!r}")
                    return
            self.hosts.append(host)
            if join:
                host.join()

        async with asyncio.TaskGroup() as group:
            for number in range(self.count):
                group.create_task(open_one(number))
        accepted = time.monotonic()
        return {"accept_s": accepted - started} | (await self._planned(started) if join else {})

    async def join(self) -> dict[str, float]:
        """All hosts join at once."""
        started = time.monotonic()
        for host in self.hosts:
            host.join()
        return await self._planned(started)

    async def _planned(self, started: float) -> dict[str, float]:
        try:
            await asyncio.wait_for(self.planned.wait(), JOIN_TIMEOUT_S)
        except TimeoutError:
            self.fail(f"{len(self.waiting)} hosts have no parent in some stripe after {JOIN_TIMEOUT_S:.0f} s")
        planned_assigns = self.assigns
        while not self.failure and (now := time.monotonic()) - self.assigned_at < QUIET_S:
            if now - self.planned_at > QUIET_WITHIN_S:
                break
            await asyncio.sleep(0.1)
        return {
            "planned_s": self.planned_at - started,
            "moved_after": float(self.assigns - planned_assigns),
            "settled_s": self.assigned_at - started,
            "assigns": float(self.assigns),
        }

    async def report(self, seconds: float, interval_s: float) -> dict[str, float]:
        """Every host reports once in each interval, evenly spread."""
        order = list(self.hosts)
        random.Random(1).shuffle(order)
        end = [len(range(stripe, self.pieces, self.stripes)) for stripe in range(self.stripes)]
        step = max(1, int(min(end) * 0.9 * interval_s / max(seconds, interval_s)))
        started = time.monotonic()
        sent = 0
        while (passed := time.monotonic() - started) < seconds and not self.failure:
            due = int(passed / interval_s * len(order))
            for number in range(sent, due):
                turn, at = divmod(number, len(order))
                counts = tuple(min(total - 1, (turn + 1) * step) for total in end)
                busy_s = min(interval_s, 1.0)
                sent_bytes = int(busy_s * UPLOAD_BYTES_S * random.uniform(0.9, 1.1))
                order[at].send(Report((Advance(BLOB, counts),), sent_bytes, busy_s))
            sent = due
            await asyncio.sleep(REPORT_SLOT_S)
        return {"reports": float(sent), "seconds": time.monotonic() - started, "assigns": float(self.assigns)}


def clients(commands: Connection, port: int, chosen: argparse.Namespace) -> None:
    """The client process: does what it is told, one command after the other, and answers with figures."""
    raise_file_limit()

    async def work() -> None:
        load = Load(port, chosen)
        while True:
            name, *words = await asyncio.to_thread(commands.recv)
            if name == "stop":
                os._exit(0)
            before = time.process_time()
            match name:
                case "connect":
                    answer = await load.connect(join=words[0])
                case "join":
                    answer = await load.join()
                case _:
                    answer = await load.report(*words)
            commands.send((load.failure, answer | {"clients_cpu_s": time.process_time() - before}))

    asyncio.run(work())


# -- the tracker process


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def fetch(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as answer:
        return str(answer.read().decode())


def quantile(metrics: str, share: float) -> float:
    """Upper bound in seconds of the bucket of the planning histogram in which a quantile lies; infinite above the last, NaN without any."""
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
            for _ in range(200):
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
    """A tracker and its clients; `run` sends the clients a command and measures the tracker meanwhile."""

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
    parser.add_argument("--pieces", type=int, default=4096, help="their number decides the number of stripes")
    parser.add_argument("--join", choices=["at-once", "connecting", "both"], default="both")
    parser.add_argument("--seconds", type=float, default=30.0, help="of steady reports; 0 for none")
    parser.add_argument("--report-interval", type=float, default=5.0)
    parser.add_argument("--profile", default="", metavar="DIRECTORY")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    raise_file_limit()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the tracker ends with this process
    found = {
        name: measure(chosen, at_once=name == "at-once")
        for name in ("at-once", "connecting")
        if chosen.join in (name, "both")
    }
    head = {"hosts": chosen.hosts, "pieces": chosen.pieces, "stripes": stripes_for(chosen.pieces)}
    if chosen.json:
        print(json.dumps(head | found))
        return 0
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    for name, figures in found.items():
        show(name, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
