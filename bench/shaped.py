"""Trackers, agents and other programs on the nodes of shaped links (links.py): what benchmarks of
broadcasts start, wait for and end alike."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.links import Node
from bench.processes import cpu_s

P2PDIST = [sys.executable, "-m", "p2pdist.cli.main"]
READY_S, PULL_S = 300.0, 1800.0
PAYLOAD = 1448 / 1514
"""Of what a link carries, the share that is no header."""

TAIL_BYTES = 1500


def until(what: str, ready: Callable[[], bool], limit_s: float = READY_S) -> None:
    """Return once it is so. Raises RuntimeError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not so after {limit_s:.0f} s")
        time.sleep(0.05)


def answers(node: Node, url: str) -> bool:
    """Whether a URL answers within the namespace of a node."""
    return subprocess.run(node.words("curl", "-sf", "-o", "/dev/null", "-m", "2", url), check=False).returncode == 0


def seconds_on_wire(size: int, mbit: float) -> float:
    """What a link needs for so many bytes of payload, at least."""
    return 8 * size / 1e6 / PAYLOAD / mbit


class Programs:
    """The programs of one run. Their logs are below `work`, by namespace."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._running: list[tuple[Node, subprocess.Popen[bytes]]] = []

    def spawn(self, node: Node, *words: str) -> subprocess.Popen[bytes]:
        """Start a program on a node."""
        return self._start(node, node.words(*words))

    def _start(self, node: Node, words: Any) -> subprocess.Popen[bytes]:
        with (self.work / f"{node.namespace}.log").open("ab") as log:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._running.append((node, process))
        return process

    def answered(self, node: Node, url: str) -> None:
        """Return once a URL answers. Raises RuntimeError with the end of the node's log."""
        try:
            until(f"{url} answers", lambda: answers(node, url))
        except RuntimeError as error:
            log = (self.work / f"{node.namespace}.log").read_text(errors="replace")[-TAIL_BYTES:]
            raise RuntimeError(f"{error}: {log}") from None

    def tracker(self, node: Node, *words: str) -> str:
        """Start a tracker; returns its URL once it answers."""
        url = f"http://{node.address}:7070"
        self.spawn(node, *P2PDIST, "tracker", "--listen", f"{node.address}:7070", *_QUIET, *words)
        self.answered(node, f"{url}/healthz")
        return url

    def agent(self, node: Node, tracker: str, *words: str) -> Path:
        """Start an agent; returns its directory at once. It has the name of its namespace."""
        place = self.work / node.namespace
        place.mkdir()
        options = ["--tracker", tracker, "--listen", f"{node.address}:7071", "--name", node.namespace]
        options += ["--store", str(place / "store"), "--socket", str(place / "sock")]
        self.spawn(node, *P2PDIST, "agent", *options, *_QUIET, *words)
        return place

    def ready(self, nodes: Sequence[Node]) -> None:
        """Return once the agents of these nodes are ready."""
        for node in nodes:
            self.answered(node, f"http://{node.address}:7071/readyz")

    def cpu_s(self, nodes: Sequence[Node]) -> float:
        """Processor seconds so far of the programs on these nodes."""
        names = {node.namespace for node in nodes}
        return sum(cpu_s(process.pid) for node, process in self._running if node.namespace in names)

    def restart(self, node: Node, after_s: float) -> None:
        """Kill the programs on a node, as a loss of power would, and start them again after so many
        seconds. What they took of the processor is forgotten."""
        killed = [process for other, process in self._running if other is node]
        self._running = [entry for entry in self._running if entry[0] is not node]
        for process in killed:
            process.kill()
            process.wait()
        time.sleep(after_s)
        for process in killed:
            self._start(node, process.args)

    def stop(self) -> None:
        """End what was started, the last one first."""
        for _, process in reversed(self._running):
            process.terminate()
        for _, process in self._running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_QUIET = ["--log-level", "warning", "--no-discovery"]


def together(
    commands: Mapping[str, Sequence[str]],
    *,
    ended: Callable[[str], None] = lambda name: None,
    env: Mapping[str, Mapping[str, str]] | None = None,
    waits: bool = False,
    limit_s: float = PULL_S,
) -> dict[str, float]:
    """Run these commands, by name, all at once; returns the seconds that each took. `ended` hears
    of the end of each at once; `env` has variables besides ours. With `waits` a command prints a
    line when it is ready, reads one, and begins: the time begins with that. Raises RuntimeError
    when one fails or takes longer than `limit_s`; none of them runs afterwards."""
    running = {
        name: subprocess.Popen(
            words,
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
            stdout=subprocess.PIPE if waits else None,
            env={**os.environ, **(env or {}).get(name, {})},
        )
        for name, words in commands.items()
    }
    seconds: dict[str, float] = {}
    try:
        for process in running.values() if waits else ():
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
        began = time.monotonic()
        for process in running.values() if waits else ():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has failed, which is found below
                process.stdin.write(b"go\n")
                process.stdin.close()
        while len(seconds) < len(running):
            for name, process in running.items():
                if name not in seconds and process.poll() is not None:
                    if process.returncode != 0:
                        raise RuntimeError(f"what ran at {name} ended with {process.returncode}; see what it printed")
                    seconds[name] = time.monotonic() - began
                    ended(name)
            if time.monotonic() - began > limit_s:
                raise RuntimeError(f"{len(running) - len(seconds)} hosts were not done in {limit_s:.0f} s")
            time.sleep(0.02)
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
            process.wait()
    return seconds


@contextlib.contextmanager
def programs(prefix: str, directory: str | None) -> Iterator[Programs]:
    """Programs below a directory of their own; nothing of them is left afterwards."""
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
    made = Programs(work)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(work, ignore_errors=True)
