"""The demo's processes: services that stay, calls that end, and the certainty that neither outlives
the demo.

Every process is started in a session of its own, so that Ctrl-C on the terminal reaches the demo
alone, which then ends them in order: agents before the tracker and the origin, since an agent
unmounts what it showed. Each carries PLACE_VARIABLE in its environment; what still carries it after
the stop, however it detached itself, is ended by its id and reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from p2pdist.model.errors import Unavailable

PLACE_VARIABLE = "P2PDIST_DEMO_PLACE"
STOP_S = 20.0
KILL_S = 5.0
WORDS_MAX = 400
LOG_TAIL = 4096


def _last_words(text: str) -> str:
    """The last non-empty line of a program's output, cut to WORDS_MAX characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:WORDS_MAX] if lines else "it said nothing"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A call that ended: exit code (negative: signal), what it wrote, wall-clock seconds."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    def last_words(self) -> str:
        """The last line on standard error, else on standard output."""
        return _last_words(self.stderr or self.stdout)


@dataclass(slots=True)
class Service:
    """A process that runs until it is stopped; its output is in `log`."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def last_words(self) -> str:
        """The last line of the log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_TAIL))
            return _last_words(file.read().decode(errors="replace"))


@dataclass(slots=True)
class Processes:
    """Starts and ends processes. `place` is the demo's directory: logs go to `place`/logs."""

    place: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    services: list[Service] = field(default_factory=list)
    calls: dict[int, asyncio.subprocess.Process] = field(default_factory=dict)

    def _environment(self) -> dict[str, str]:
        """The caller's environment without settings of its own p2pdist, with this Python first in
        PATH."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("P2PDIST_")}
        kept["PATH"] = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        homes = {f"XDG_{kind}_HOME": str(self.place / "home" / kind.lower()) for kind in ("CONFIG", "DATA")}
        return {**kept, **threads, **homes, **self.environment, PLACE_VARIABLE: str(self.place)}

    async def _spawn(
        self, command: Sequence[str], *, output: int, errors: int, variables: Mapping[str, str] = MappingProxyType({})
    ) -> asyncio.subprocess.Process:
        """Start `command` so that it is told to end when the demo dies without a chance to tidy up
        (setpriv(1))."""
        program = command
        if setpriv := shutil.which("setpriv"):
            program = [setpriv, "--pdeathsig", "TERM", "--", *command]
        return await asyncio.create_subprocess_exec(
            *program,
            cwd=self.place,
            env={**self._environment(), **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )

    async def start(self, name: str, command: Sequence[str]) -> Service:
        """Start a service."""
        logs = self.place / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"{name}.log"
        with log.open("wb") as file:
            process = await self._spawn(command, output=file.fileno(), errors=asyncio.subprocess.STDOUT)
        service = Service(name, process, log)
        self.services.append(service)
        return service

    async def call(
        self,
        name: str,
        command: Sequence[str],
        *,
        timeout_s: float,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Outcome:
        """Run a command, with these variables besides, to its end. Raises Unavailable when it takes
        longer than `timeout_s`; it is ended then, as when cancelled."""
        began, pipe = time.monotonic(), asyncio.subprocess.PIPE
        process = await self._spawn(command, output=pipe, errors=pipe, variables=variables)
        self.calls[process.pid] = process
        try:
            async with asyncio.timeout(timeout_s):
                stdout, stderr = await process.communicate()
        except TimeoutError:
            raise Unavailable(
                f"{name} did not end within {timeout_s:.0f} s", remedy="Run the demo with --keep"
            ) from None
        finally:
            await _end([process])
            del self.calls[process.pid]
        assert process.returncode is not None
        seconds = time.monotonic() - began
        return Outcome(process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"), seconds)

    def check_running(self) -> None:
        """Raises Unavailable when a service has ended on its own."""
        for service in self.services:
            if service.process.returncode is not None:
                raise Unavailable(
                    f"{service.name} ended with exit code {service.process.returncode}: {service.last_words()}",
                    remedy="Run the demo with --keep and read the logs",
                )

    async def stop(self) -> list[str]:
        """End everything, in order, within about STOP_S + 2 KILL_S seconds. Returns what did not go
        as it should."""
        untidy: list[str] = []
        await _end(list(self.calls.values()))
        agents = [service for service in self.services if service.name.startswith("host")]
        others = [service for service in self.services if service not in agents]
        for group in (agents, others):
            early = {service.name for service in group if service.process.returncode is not None}
            late = await _end([service.process for service in group], patience_s=STOP_S)
            for service in group:
                if service.process.pid in late:
                    untidy.append(f"{service.name} did not stop within {STOP_S:.0f} s of SIGTERM")
                elif service.name in early or service.process.returncode not in (0, -signal.SIGTERM):
                    untidy.append(f"{service.name} ended with {service.process.returncode}: {service.last_words()}")
        self.services.clear()
        for pid, name in await _end_strays(str(self.place)):
            untidy.append(f"process {pid} ({name}) was left running")
        return untidy


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def _end(processes: Sequence[asyncio.subprocess.Process], *, patience_s: float = KILL_S) -> set[int]:
    """SIGTERM to each, SIGKILL to the groups of the ones that stay. Returns the ids that had to be
    killed."""
    running = [process for process in processes if process.returncode is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    if running:
        await asyncio.wait([asyncio.ensure_future(process.wait()) for process in running], timeout=patience_s)
    late = {process.pid for process in running if process.returncode is None}
    for process in running:
        _signal_group(process, signal.SIGKILL)
    if running:
        await asyncio.wait([asyncio.ensure_future(process.wait()) for process in running], timeout=KILL_S)
    return late


def strays(place: str) -> dict[int, str]:
    """Processes, except this one, that carry the demo's token: id to command name."""
    entry = f"{PLACE_VARIABLE}={place}".encode()
    commands: dict[int, str] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal() or int(directory.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or of another user
            if entry in (directory / "environ").read_bytes().split(b"\0"):
                commands[int(directory.name)] = (directory / "comm").read_text().strip()
    return commands


async def _until_gone(place: str, seconds: float) -> dict[int, str]:
    """The strays that are still there after `seconds`, or none as soon as there are none."""
    deadline = time.monotonic() + seconds
    while (remaining := strays(place)) and time.monotonic() < deadline:  # noqa: ASYNC110 (nothing announces that a stray ended)
        await asyncio.sleep(0.05)
    return remaining


async def _end_strays(place: str) -> list[tuple[int, str]]:
    """End what still carries the token; a second is given to what is ending by itself. Returns what
    had to be ended."""
    ended = left = await _until_gone(place, 1.0)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        left = await _until_gone(place, KILL_S)
    return sorted(ended.items())
