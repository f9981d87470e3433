"""The control host of a yardstick run with several trackers: starts them, each at an address of its
own, and brings the fault that was asked for once the hosts have received a share of the blob.

A fault is WHAT@SHARE, several are separated by commas:

    kill@0.3        SIGKILL for the tracker that owns the blob at that moment; once more at 0.6 for
                    its successor: kill@0.3,kill@0.6
    freeze@0.3      SIGSTOP for it, and SIGCONT after FREEZE_S
    cut@0.3         for CUT_S no packet passes between the trackers, nor between the owner and every
                    second host
    database@0.3    the processes of the PostgreSQL behind STATE get SIGSTOP for DATABASE_S

Usage: trackers.py P2PDIST IP DIR WORK STATE ORIGIN COUNT FAULTS NAMESPACE HOSTS SIZE

COUNT trackers answer at port 7070 of IP and addresses behind it. STATE is the URL of an empty
PostgreSQL database on this machine, NAMESPACE that of this program, which has a prefix and `c` for
a name; the bridge of the hosts is in the one of that prefix and `sw`. The run has begun when the
file GO is in the directory of the first host below WORK; the digest of the blob is in pushed.json
below the origin's. Each line on standard output is a JSON document: what was done when, in seconds
after that moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import msgspec
import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.several_trackers import share_evenly
from p2pdist.model.digest import Digest
from p2pdist.model.ownership import Ownership, owner

PORT = 7070
FREEZE_S = 6.0
CUT_S = 5.0
DATABASE_S = 60.0
LOOK_S = 0.05


def log(**words: Any) -> None:
    print(json.dumps(words), flush=True)


class Trackers:
    """The trackers of this run, by identity."""

    def __init__(self, p2pdist: str, ip: str, directory: Path, state: str, origin: str, count: int) -> None:
        self.state = state
        self._ips = [str(IPv4Address(ip) + 10 * number) for number in range(count)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for number, address in enumerate(self._ips):
            if number:
                subprocess.run(["ip", "addr", "add", f"{address}/16", "dev", "eth0"], check=True)
            words = [p2pdist, "tracker", "--listen", f"{address}:{PORT}", "--origin", origin, "--state", state]
            with (directory / f"tracker-{number}.log").open("ab") as file:
                process = subprocess.Popen([*words, "--no-discovery"], stdout=file, stderr=file)
            self._processes[f"{address}-{PORT}"] = process

    def share_evenly(self) -> None:
        """Return when all own blobs."""
        share_evenly(self.state, set(self._processes))

    def owner(self, blob: Digest) -> str:
        with psycopg.connect(self.state) as connection:
            row = connection.execute("SELECT body FROM cluster_ownership").fetchone()
        assert row is not None
        return owner(msgspec.json.decode(row[0], type=Ownership), blob).id

    def process(self, tracker: str) -> subprocess.Popen[bytes]:
        return self._processes[tracker]

    def cut(self, hosts: list[str], tracker: str, on: bool) -> None:
        """Begin or end the loss of packets among the trackers, and between one and some hosts."""
        what = "-I" if on else "-D"
        for address in self._ips:
            for other in self._ips:
                # A local connection has the address that it leads to as its source.
                rule = ["-i", "lo", "-d", other, "-s", address, "-j", "DROP"]
                subprocess.run(["iptables", what, "INPUT", *rule], check=True)
        ip = tracker.rsplit("-", 1)[0]
        for host in hosts:
            subprocess.run(["iptables", what, "INPUT", "-s", host, "-d", ip, "-j", "DROP"], check=True)


def received(namespace: str, hosts: int) -> float:
    """Bytes that a host has received on average, headers included."""
    words = ["ip", "-n", namespace, "-s", "-j", "link", "show"]
    links = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    sent = {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in links if "stats64" in link}
    return float(sum(sent.get(f"ph{number}", 0) for number in range(hosts)) / hosts)


def host_ip(number: int) -> str:
    """As the yardstick numbers them."""
    return f"10.77.{1 + number // 200}.{1 + number % 200}"


def parent(pid: int) -> int:
    """The process that started another one (proc_pid_stat(5)); 0 when there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def database_processes(state: str) -> list[int]:
    """The processes of the server that has a database, the first one first, and of no other server
    of this machine."""
    with psycopg.connect(state) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        server = parent(int(row[0]))
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [server, *(pid for pid in pids if parent(pid) == server)]


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Processes stand still for a while; whatever ends it, they go on."""
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def bring(fault: str, trackers: Trackers, blob: Digest, hosts: int, since: float) -> None:
    """One fault, and its end. An owner that was killed has a successor first."""
    while (process := trackers.process(name := trackers.owner(blob))).poll() is not None:
        time.sleep(LOOK_S)
    log(fault=fault, owner=name, at_s=round(time.monotonic() - since, 2))
    match fault:
        case "kill":
            process.kill()
        case "freeze":
            with stopped([process.pid]):
                time.sleep(FREEZE_S)
        case "cut":
            some = [host_ip(number) for number in range(0, hosts, 2)]
            trackers.cut(some, name, True)
            time.sleep(CUT_S)
            trackers.cut(some, name, False)
        case "database":
            with stopped(database_processes(trackers.state)):
                time.sleep(DATABASE_S)
        case _:
            raise SystemExit(f"{fault!r} is no fault: kill, freeze, cut or database")
    log(fault=fault, ended_s=round(time.monotonic() - since, 2), owner=trackers.owner(blob))


def main(words: list[str]) -> None:
    p2pdist, ip, directory, work, state, origin, count, faults, namespace, hosts, size = words
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what stands still goes on
    bridges = namespace.removesuffix("c") + "sw"
    trackers = Trackers(p2pdist, ip, Path(directory), state, origin, int(count))
    trackers.share_evenly()
    log(trackers=int(count), ready=True)
    go = Path(work) / "h000" / "GO"
    while not go.exists():
        time.sleep(LOOK_S)
    since = time.monotonic()
    blob = Digest(json.loads((Path(work) / "o" / "pushed.json").read_text())["digest"])
    before = received(bridges, int(hosts))
    for fault, share in (pair.split("@") for pair in faults.split(",") if pair):
        while received(bridges, int(hosts)) - before < float(share) * int(size):
            time.sleep(4 * LOOK_S)
        bring(fault, trackers, blob, int(hosts), since)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
