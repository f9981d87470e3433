"""A small blob to many hosts at once, real sessions and sockets on loopback: what counts is latency.

    python bench/small_blob.py --hosts 200 --size-kib 64

A real tracker in a process of its own; the agents, each with its store, its listener and its session, share a few processes, since two
hundred interpreters on one machine would be what is measured. Prints the time from the first request until the last host has the blob,
against the goal of 0.5 s for 200 hosts on two cores, with the CPU that it took: on so few cores that is the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.http import make_apps
from p2pdist.cli.daemon import close, listen, raise_file_limit, stop_listening
from p2pdist.model.messages import PullRequest

P2PDIST = Path(sys.executable).parent / "p2pdist"
GOAL_S = 0.5
READY_S = 120.0


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
            f"CPU {figures['cpu_s']} s, on these cores at least {bound_s:.3f} s (ratio {figures['last_s'] / bound_s:.2f}); "
            f"goal {GOAL_S} s {'met' if figures['met'] else 'MISSED'}"
        )
    return 0


def broadcast(hosts: int, size: int, processes: int) -> dict[str, float]:
    """One run: seconds from the first request until the median and the last host are done, and CPU seconds of all agents."""
    with tempfile.TemporaryDirectory(prefix="p2pdist-small-") as directory:
        work = Path(directory)
        blob = work / "blob"
        blob.write_bytes(os.urandom(size))
        origin = f"file://{work}/layout"
        pushed = subprocess.run(
            [P2PDIST, "blob", "push", blob, "--origin", origin, "--json"], check=True, capture_output=True
        )
        digest = str(json.loads(pushed.stdout)["digest"])
        port = free_port()
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
            return run_agents(f"http://127.0.0.1:{port}", digest, hosts, processes, work)
        finally:
            tracker.terminate()
            tracker.wait()


def run_agents(url: str, digest: str, hosts: int, processes: int, work: Path) -> dict[str, float]:
    """Start the agents, let all of them pull at one moment, and gather when each was done."""
    context = multiprocessing.get_context("spawn")
    pipes: list[multiprocessing.connection.Connection] = []
    workers = []
    try:
        for number in range(processes):
            ours, theirs = context.Pipe()
            names = [f"h{host}" for host in range(number, hosts, processes)]
            worker = context.Process(target=work_off, args=(url, digest, names, work, theirs), daemon=True)
            worker.start()
            pipes.append(ours)
            workers.append(worker)
        for pipe in pipes:
            if not pipe.poll(READY_S) or pipe.recv() != "ready":
                raise RuntimeError("the agents did not come up")
        for pipe in pipes:
            pipe.send("go")
        answers = [pipe.recv() for pipe in pipes if pipe.poll(READY_S)]
    finally:
        for pipe in pipes:
            pipe.close()
        for worker in workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()
    first = min(started for started, _, _ in answers)
    done = sorted(time_s - first for _, times, _ in answers for time_s in times)
    if len(done) != hosts:
        raise RuntimeError(f"{len(done)} of {hosts} hosts got the blob")
    return {"last_s": done[-1], "p50_s": statistics.median(done), "cpu_s": sum(cpu_s for _, _, cpu_s in answers)}


def work_off(url: str, digest: str, names: list[str], work: Path, pipe: multiprocessing.connection.Connection) -> None:
    """One process of agents."""
    raise_file_limit()
    logging.disable(logging.WARNING)  # that the tracker is away in the end is no news
    asyncio.run(_agents(url, digest, names, work, pipe))


async def _agents(
    url: str, digest: str, names: list[str], work: Path, pipe: multiprocessing.connection.Connection
) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        agents = []
        for name in names:
            port = free_port()
            settings = AgentSettings((url,), name, f"127.0.0.1:{port}", work / name)
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


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
