"""A small blob to many hosts at once, real sessions and sockets on loopback: what counts is
latency.

    python bench/small_blob.py --hosts 200 --size-kib 64

A real tracker in a process of its own; the agents, each with its store, its listener and its
session, share a few processes, since two hundred interpreters on one machine would be what is
measured. Prints the time from the first request until the last host has the blob, against the goal
of 0.5 s for 200 hosts on two cores, with the CPU that it took: on so few cores that is the bound.
The two hundred stores share one disk, where TMPDIR points; hosts have one each, so TMPDIR=/dev/shm
is nearer to them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.server import make_apps
from p2pdist.cli.daemon import close, listen, raise_file_limit, stop_listening
from p2pdist.model.messages import PullRequest

P2PDIST = Path(sys.executable).parent / "p2pdist"
GOAL_S = 0.5
READY_S = 120.0
LAST_LINES = 20
PORTS_FROM, PORTS_END = 10_000, 32_768
"""Below the ports that the kernel gives to outgoing connections (ip(7), ip_local_port_range): one
of these could be taken by the session of one agent just before another listens on it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--size-kib", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2 * (os.cpu_count() or 1), help="that the agents share")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    runs = [broadcast(chosen.hosts, chosen.size_kib << 10, chosen.processes) for _ in range(chosen.repeat)]
    figures = {
        "hosts": chosen.hosts,
        "size": chosen.size_kib << 10,
        "last_s": round(statistics.median(run["last_s"] for run in runs), 3),
        "p50_s": round(statistics.median(run["p50_s"] for run in runs), 3),
        "cpu_s": round(statistics.median(run["cpu_s"] for run in runs), 3),
        "tracker_cpu_s": round(statistics.median(run["tracker_cpu_s"] for run in runs), 3),
        "goal_s": GOAL_S,
        "runs": runs,
    }
    figures["met"] = figures["last_s"] <= GOAL_S
    if chosen.json:
        print(json.dumps(figures))
    else:
        bound_s = figures["cpu_s"] / (os.cpu_count() or 1)
        print(
            f"{chosen.size_kib} KiB to {chosen.hosts} hosts: last {figures['last_s']} s, median host {figures['p50_s']} s; "
            f"CPU {figures['cpu_s']} s ({figures['tracker_cpu_s']} s of it the tracker's), on these cores at least "
            f"{bound_s:.3f} s (ratio {figures['last_s'] / bound_s:.2f}); "
            f"goal {GOAL_S} s {'met' if figures['met'] else 'MISSED'}"
        )
    return 0


def broadcast(hosts: int, size: int, processes: int) -> dict[str, float]:
    """One run: seconds from the first request until the median and the last host are done, CPU
    seconds of all processes, and the tracker's."""
    with tempfile.TemporaryDirectory(prefix="p2pdist-small-") as directory:
        work = Path(directory)
        blob = work / "blob"
        blob.write_bytes(os.urandom(size))
        origin = f"file://{work}/layout"
        pushed = subprocess.run(
            [P2PDIST, "blob", "push", blob, "--origin", origin, "--json"], check=True, capture_output=True
        )
        digest = str(json.loads(pushed.stdout)["digest"])
        port = free_port(PORTS_FROM)
        words = [
            P2PDIST,
            "tracker",
            "--listen",
            f"127.0.0.1:{port}",
            "--origin",
            origin,
            "--state",
            work / "state",
            "--log-level",
            "error",
        ]
        tracker = subprocess.Popen(list(map(str, words)))
        try:
            return run_agents(f"http://127.0.0.1:{port}", digest, hosts, processes, work, tracker.pid)
        finally:
            tracker.terminate()
            tracker.wait()


class Worker:
    """A process of agents. What it writes to standard error goes to a file, so that its last words
    can be told if it dies."""

    def __init__(self, url: str, digest: str, names: list[str], work: Path, first_port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.said = work / f"{names[0]}.err"
        self._pipe, theirs = context.Pipe()
        self.said.touch()
        arguments = (url, digest, names, work, first_port, theirs, self.said)
        self._process = context.Process(target=work_off, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def tell(self, word: str) -> None:
        self._pipe.send(word)

    def hear(self) -> Any:
        """What the process says next; raises RuntimeError when it says nothing for READY_S, or
        dies."""
        try:
            if self._pipe.poll(READY_S):
                return self._pipe.recv()
            what = f"does not answer for {READY_S:g} s"
        except (EOFError, ConnectionError):
            self._process.join(10)
            what = f"ended with {self._process.exitcode}"
        last = "\n".join(self.said.read_text(errors="replace").splitlines()[-LAST_LINES:]) or "nothing"
        raise RuntimeError(f"process {self.pid} of the agents {what}; it said last:\n{last}")

    def end(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def run_agents(url: str, digest: str, hosts: int, processes: int, work: Path, tracker: int) -> dict[str, float]:
    """Start the agents, let all of them pull at one moment, and gather when each was done.
    `tracker` is that process."""
    workers: list[Worker] = []
    try:
        for number in range(min(processes, hosts)):
            names = [f"h{host}" for host in range(number, hosts, processes)]
            first_port = PORTS_FROM + (PORTS_END - PORTS_FROM) * (1 + number) // (1 + processes)
            workers.append(Worker(url, digest, names, work, first_port))
        for worker in workers:
            worker.hear()
        before_s = process_cpu_s(tracker)
        for worker in workers:
            worker.tell("go")
        answers = [worker.hear() for worker in workers]
        tracker_cpu_s = process_cpu_s(tracker) - before_s
    finally:
        for worker in workers:
            worker.end()
    for worker in workers:
        sys.stderr.write(worker.said.read_text(errors="replace"))
    first = min(started for started, _, _ in answers)
    done = sorted(time_s - first for _, times, _ in answers for time_s in times)
    return {
        "last_s": done[-1],
        "p50_s": statistics.median(done),
        "cpu_s": tracker_cpu_s + sum(cpu_s for _, _, cpu_s in answers),
        "tracker_cpu_s": tracker_cpu_s,
    }


def process_cpu_s(process: int) -> float:
    """CPU seconds that a process has used (proc(5), stat)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def work_off(
    url: str,
    digest: str,
    names: list[str],
    work: Path,
    first_port: int,
    pipe: multiprocessing.connection.Connection,
    said: Path,
) -> None:
    """One process of agents, on the event loop that agents run on."""
    with said.open("w") as errors:
        os.dup2(errors.fileno(), 2)
    faulthandler.enable()
    raise_file_limit()
    logging.disable(logging.WARNING)  # that the tracker is away in the end is no news
    uvloop.run(_agents(url, digest, names, work, first_port, pipe))


async def _agents(
    url: str, digest: str, names: list[str], work: Path, first_port: int, pipe: multiprocessing.connection.Connection
) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        agents, port = [], first_port
        for name in names:
            port = free_port(port + 1)
            settings = AgentSettings(tuple(url.split(",")), name, f"127.0.0.1:{port}", work / name)
            agent = Agent(settings)
            stack.push_async_callback(agent.stop)
            public, _ = make_apps(agent)
            runner = await listen(public, ("127.0.0.1", port))
            stack.push_async_callback(close, [runner])
            stack.push_async_callback(stop_listening, [runner])
            await agent.start()
            agents.append(agent)
        for agent in agents:
            if not await agent.session.wait_connected(READY_S):
                raise RuntimeError("no tracker")
        pipe.send("ready")
        await loop.run_in_executor(None, pipe.recv)
        cpu_s, started = _cpu_s(), time.monotonic()
        times = await asyncio.gather(*[_pull(agent, digest) for agent in agents])
        pipe.send((started, times, _cpu_s() - cpu_s))
        try:
            await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            return


async def _pull(agent: Agent, digest: str) -> float:
    pull = agent.pulls.start(PullRequest(blob=digest))
    assert pull.task is not None
    await pull.task
    if pull.error is not None:
        raise pull.error
    return time.monotonic()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def free_port(first: int) -> int:
    """The first port from `first` on that is free."""
    for port in range(first, PORTS_END):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no port from {first} to {PORTS_END} is free")


if __name__ == "__main__":
    sys.exit(main())
