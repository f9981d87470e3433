"""The control host of a yardstick run with several trackers: starts them, each at an address of its
own, and brings the fault that was asked for once the hosts have received a share of the blob.

A fault is WHAT@SHARE, several are separated by commas:

    kill@0.3        SIGKILL for the tracker that owns the blob at that moment
    freeze@0.3      SIGSTOP for it, and SIGCONT after FREEZE_S
    cut@0.3         for CUT_S no packet passes between the trackers, nor between the owner and every
                    second host
    database@0.3    PostgreSQL's processes get SIGSTOP for DATABASE_S

Usage: trackers.py P2PDIST IP DIR WORK STATE ORIGIN COUNT FAULTS NAMESPACE HOSTS SIZE

COUNT trackers answer at port 7070 of IP and addresses behind it. STATE is the URL of an empty
PostgreSQL database, NAMESPACE that with the bridge of the hosts. The run has begun when the file GO
is in the directory of the first host below WORK; the digest of the blob is in pushed.json below the
origin's. Each line on standard output is a JSON document: what was done when, in seconds after that
moment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
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
        self._state = state
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
        share_evenly(self._state, set(self._processes))

    def owner(self, blob: Digest) -> str:
        with psycopg.connect(self._state) as connection:
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


def postgresql() -> list[int]:
    """The processes of the servers on this machine."""
    found = subprocess.run(["pgrep", "-x", "postgres"], check=False, capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def bring(fault: str, trackers: Trackers, blob: Digest, hosts: int, since: float) -> None:
    """One fault, and its end."""
    name = trackers.owner(blob)
    process = trackers.process(name)
    log(fault=fault, owner=name, at_s=round(time.monotonic() - since, 2))
    match fault:
        case "kill":
            process.kill()
        case "freeze":
            process.send_signal(signal.SIGSTOP)
            time.sleep(FREEZE_S)
            process.send_signal(signal.SIGCONT)
        case "cut":
            some = [host_ip(number) for number in range(0, hosts, 2)]
            trackers.cut(some, name, True)
            time.sleep(CUT_S)
            trackers.cut(some, name, False)
        case "database":
            pids = postgresql()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(DATABASE_S)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        case _:
            raise SystemExit(f"{fault!r} is no fault: kill, freeze, cut or database")
    log(fault=fault, ended_s=round(time.monotonic() - since, 2), owner=trackers.owner(blob))


def main(words: list[str]) -> None:
    p2pdist, ip, directory, work, state, origin, count, faults, namespace, hosts, size = words
    trackers = Trackers(p2pdist, ip, Path(directory), state, origin, int(count))
    trackers.share_evenly()
    log(trackers=int(count), ready=True)
    go = Path(work) / "h000" / "GO"
    while not go.exists():
        time.sleep(LOOK_S)
    since = time.monotonic()
    blob = Digest(json.loads((Path(work) / "o" / "pushed.json").read_text())["digest"])
    before = received(namespace, int(hosts))
    for fault, share in (pair.split("@") for pair in faults.split(",") if pair):
        while received(namespace, int(hosts)) - before < float(share) * int(size):
            time.sleep(4 * LOOK_S)
        bring(fault, trackers, blob, int(hosts), since)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
