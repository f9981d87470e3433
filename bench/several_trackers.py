"""A blob to many hosts at once with several trackers that share the blobs, beside one tracker; with
--kill-after the owner of the blob is killed meanwhile.

    python -m bench.several_trackers --state postgresql://tracker@/postgres?host=/run/postgresql \\
                                     [--hosts 50] [--size-mib 64] [--trackers 3] [--kill-after 1.0]

Real trackers in processes of their own; the agents share a few processes, as in small_blob.py.
Prints the time from the first request until the median and the last host have the blob, with one
tracker, with several, and with several of which one dies. The database must be empty, or that of
this benchmark alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from bench.small_blob import P2PDIST, PORTS_FROM, free_port, run_agents
from p2pdist.model.ownership import Ownership, Tracker

READY_S = 60.0
SETTLE_S = 10.0
"""After the last tracker came: for a while leases on blobs that changed their owner are not granted
at once."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", required=True, help="the database of the trackers, postgresql://...")
    parser.add_argument("--hosts", type=int, default=50)
    parser.add_argument("--size-mib", type=int, default=64)
    parser.add_argument("--trackers", type=int, default=3)
    parser.add_argument("--kill-after", type=float, default=0.0, help="seconds after all hosts have begun")
    parser.add_argument("--processes", type=int, default=2 * (os.cpu_count() or 1), help="that the agents share")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    figures = {"one": broadcast(chosen, 1, 0.0), "several": broadcast(chosen, chosen.trackers, 0.0)}
    if chosen.kill_after:
        figures["killed"] = broadcast(chosen, chosen.trackers, chosen.kill_after)
    if chosen.json:
        print(json.dumps(figures))
    else:
        for name, found in figures.items():
            print(
                f"{name:8} last {found['last_s']:.3f} s, median host {found['p50_s']:.3f} s, CPU {found['cpu_s']:.1f} s"
            )
    return 0


def broadcast(chosen: argparse.Namespace, count: int, kill_after_s: float) -> dict[str, float]:
    """One run with so many trackers."""
    with tempfile.TemporaryDirectory(prefix="p2pdist-several-") as directory:
        work = Path(directory)
        blob, origin = work / "blob", f"file://{work}/layout"
        blob.write_bytes(os.urandom(chosen.size_mib << 20))
        words = [str(P2PDIST), "blob", "push", str(blob), "--origin", origin, "--json"]
        digest = str(json.loads(subprocess.run(words, check=True, capture_output=True).stdout)["digest"])
        with trackers(origin, chosen.state, count) as running:
            killer = threading.Thread(target=kill_owner, args=(running, digest, kill_after_s), daemon=True)
            if kill_after_s:
                killer.start()
            urls = ",".join(running)
            first = next(iter(running.values())).pid
            return run_agents(urls, digest, chosen.hosts, chosen.processes, work, first)


@contextlib.contextmanager
def trackers(origin: str | None, state: str, count: int) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Trackers by URL, each of which owns blobs."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    port = PORTS_FROM
    try:
        for _ in range(count):
            port = free_port(port + 1)
            words = [P2PDIST, "tracker", "--listen", f"127.0.0.1:{port}", "--state", state]
            words += ["--origin", origin] if origin is not None else []
            running[f"http://127.0.0.1:{port}"] = subprocess.Popen([*map(str, words), "--log-level", "error"])
        deadline = time.monotonic() + READY_S
        while not all(owners(url) == count for url in running):
            if time.monotonic() > deadline:
                raise RuntimeError("the trackers do not find each other")
            time.sleep(0.1)
        time.sleep(SETTLE_S if count > 1 else 0.0)
        yield running
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def share_evenly(state: str, ids: set[str]) -> Ownership:
    """Return when these trackers own blobs, each its full share at once rather than a little at a
    time."""
    while True:
        with psycopg.connect(state) as connection, contextlib.suppress(psycopg.errors.UndefinedTable):
            row = connection.execute("SELECT body FROM cluster_ownership").fetchone()
            now = msgspec.json.decode(row[0], type=Ownership) if row is not None else None
            if now is not None and {tracker.id for tracker in now.trackers} == ids:
                if all(tracker.share == 1 for tracker in now.trackers):
                    return now
                even = tuple(Tracker(tracker.id, tracker.urls) for tracker in now.trackers)
                body = msgspec.json.encode(Ownership(now.epoch + 1, even, now.pins)).decode()
                connection.execute(
                    "UPDATE cluster_ownership SET epoch = epoch + 1, body = %s WHERE epoch = %s", (body, now.epoch)
                )
        time.sleep(0.2)


def ask(url: str) -> Any:
    """The JSON at a URL, None where no tracker answers."""
    with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)
    return None


def owners(url: str) -> int:
    found = ask(url + "/v1/trackers")
    return sum(row["share"] > 0 for row in found["trackers"]) if found is not None else 0


def kill_owner(running: dict[str, subprocess.Popen[bytes]], digest: str, after_s: float) -> None:
    """Kill the tracker that plans the blob, so long after its first host has joined."""
    while True:
        for url, process in running.items():
            if any(row["digest"] == digest for row in ask(url + "/v1/swarms?local=1") or ()):
                time.sleep(after_s)
                process.kill()
                return
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
