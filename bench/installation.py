"""A tracker, agents and an origin of a benchmark's own on this machine, each a process of its
own."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.packers import call
from bench.processes import ProgramFailed, cpu_s

READY_S = 60.0
ENDED_WITHIN_S = 30.0
LOG_SHOWN = 2000
STARTED = "started"
"""What the program of a package prints first."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Installation:
    """A tracker and agents; ends what it started."""

    def __init__(self, place: Path, program: str, agents: int) -> None:
        self.place, self.program = place, program
        self.origin = f"file://{place / 'origin'}"
        self._short = tempfile.TemporaryDirectory(prefix="p2pdist-", dir="/tmp")
        self.sockets = [Path(self._short.name, f"{number}.sock") for number in range(agents)]
        """Not below `place`, whose path may be longer than that of a socket can be (unix(7))."""
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Installation:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        url = f"127.0.0.1:{free_port()}"
        self._spawn("tracker", "--listen", url, "--origin", self.origin, "--state", str(self.place / "state"))
        for number, path in enumerate(self.sockets):
            address = ("--listen", f"127.0.0.1:{free_port()}", "--name", f"h{number}")
            store = str(self.place / f"store{number}")
            self._spawn("agent", "--tracker", f"http://{url}", *address, "--store", store, "--socket", str(path))
        for path, process in zip(self.sockets, self._processes[1:], strict=True):
            self._wait(path, process)

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + ENDED_WITHIN_S
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._short.cleanup()

    def _spawn(self, *words: str) -> None:
        with (self.place / f"{words[0]}.log").open("ab") as log:
            words = (self.program, *words, "--log-level", "warning")
            self._processes.append(subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True))

    def _wait(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_S
        words = ["curl", "-sf", "-o", "/dev/null", "--unix-socket", str(path), "http://agent/readyz"]
        while subprocess.run(words, check=False).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                told = (self.place / "agent.log").read_text(errors="replace")[-LOG_SHOWN:]
                raise ProgramFailed(f"no agent answers on {path}: {told}")
            time.sleep(0.1)

    def ask(self, *words: str) -> Any:
        return json.loads(call(self.program, *words, "--json"))

    def start(self, reference: str) -> list[float]:
        """Run a package on every agent at the same time; when the first line of each program came,
        on the monotonic clock."""
        with ThreadPoolExecutor(len(self.sockets)) as pool:
            return list(pool.map(lambda path: self._first_line(path, reference), self.sockets))

    def _first_line(self, path: Path, reference: str) -> float:
        words = (self.program, "run", "--socket", str(path), reference)
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line, came = process.stdout.readline(), time.monotonic()
            _, told = process.communicate()
        if line.strip() != STARTED or process.returncode:
            raise RuntimeError(f"a program did not start: {line}{told}")
        return came

    def cpu_s(self) -> tuple[float, float]:
        """Seconds that all commands that have ended took of the processors; and tracker and
        agents."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime, sum(cpu_s(process.pid) for process in self._processes)

    def everywhere(self, *words: str) -> list[str]:
        """Run a verb with the socket of every agent, at the same time; what each wrote."""
        with ThreadPoolExecutor(len(self.sockets)) as pool:
            return list(
                pool.map(lambda path: call(self.program, words[0], "--socket", str(path), *words[1:]), self.sockets)
            )
