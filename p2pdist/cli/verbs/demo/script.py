"""The demo's script: what happens, in order, and the tidying up that follows whatever happened."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from rich.console import Console

from p2pdist.cli.verbs.demo.cluster import Cluster
from p2pdist.cli.verbs.demo.figures import Figures, Round, megabytes
from p2pdist.cli.verbs.demo.ingredients import (
    BASE_BYTES_MIN,
    ENTRYPOINT,
    ENVIRONMENT,
    WHEELS,
    WHEELS_SMALL,
    build_base,
    check_space,
    write_app,
)
from p2pdist.cli.verbs.demo.processes import Processes
from p2pdist.cli.verbs.demo.progress import pull_everywhere
from p2pdist.model.errors import Corrupt, Unavailable
from p2pdist.model.manifest import PIECES_TYPE
from p2pdist.mount.scratch import scratch_directory

BASE = "demo/base:v1"
APP = "demo/trainer"
SOCKET_PATH_MAX = 107
"""Bytes in the path of a Unix socket (unix(7)), without the closing NUL."""
NOT_ROOT = (
    "Not root: nothing is mounted for the whole machine. Each program is shown its layers in a user namespace of its own where the"
    " kernel permits it (squashfuse), else from files unpacked in each agent's store, which takes more disk and time."
)


Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller asked for; `size` is the least number of bytes in the base layer, unpacked,
    or in the model."""

    agents: int = 8
    small: bool = False
    size: int = 0
    keep: bool = False


class Interrupted(BaseException):
    """The demo was ended by signal `number`; not an Exception, so nothing on the way takes it
    for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def mounts_below(place: Path) -> list[Path]:
    """Mount points below `place`, deepest last (proc(5), mountinfo)."""
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_bytes().splitlines())
    mounts = (Path(os.fsdecode(point.decode("unicode_escape").encode("latin-1"))) for point in points)
    return sorted(point for point in mounts if point.is_relative_to(place))


def unmount_below(place: Path) -> list[str]:
    """Unmount what is still mounted below `place`; returns a line for each."""
    left = mounts_below(place)
    for point in reversed(left):
        command = ["umount", "--lazy", str(point)] if os.geteuid() == 0 else ["fusermount3", "-u", "-z", str(point)]
        subprocess.run(command, check=False, capture_output=True)
    return [f"{point} was left mounted" for point in left]


def remove(place: Path) -> list[str]:
    """Delete `place`, also where a package holds directories that cannot be written; returns a line
    when something stays."""
    for folder, _folders, _files in os.walk(place):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
    shutil.rmtree(place, ignore_errors=True)
    return [f"{place} could not be deleted"] if place.exists() else []


def socket_directory(place: Path) -> Path:
    """Where sockets go: `place`, or a directory with a shorter path when theirs would be too
    long."""
    if len(os.fsencode(place / "host000.sock")) <= SOCKET_PATH_MAX:
        return place
    return scratch_directory("p2pd-", first="/tmp")  # noqa: S108 - the shortest path there is


def content_layers(packed: dict[str, Any]) -> list[int]:
    """Sizes of a package's content layers, bottom to top, from what pack printed."""
    return [int(layer["size"]) for layer in packed["layers"] if layer["mediaType"] != PIECES_TYPE]


@dataclass(slots=True)
class Script:
    """One demo: its options, and where it reports."""

    options: Options
    console: Console
    tidying: bool = False
    """Set once the demo only ends what it started; from then on it is not to be interrupted."""

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[Cluster]:
        """A cluster that is not started yet, in a directory of its own. Afterwards its processes
        are ended, its mounts and files removed; what did not go by itself is in its `untidy` list,
        and said."""
        place = scratch_directory("p2pdist-demo-")
        sockets = socket_directory(place)
        processes = Processes(place)
        cluster = Cluster(processes, place, sockets, self.options.agents)
        try:
            yield cluster
        finally:
            self.tidying = True
            self.say("Stopping and tidying up")
            cluster.untidy += await processes.stop()
            cluster.untidy += unmount_below(place)
            if self.options.keep:
                self.say(f"Kept, as asked: {place} (logs in {place / 'logs'})")
            else:
                cluster.untidy += remove(place)
            if sockets != place:
                cluster.untidy += remove(sockets)
            for line in cluster.untidy:
                self.say(f"  {line}")

    async def play(self) -> Figures:
        """Everything, in order. Raises P2PDistError for the first failure, after tidying up."""
        if not shutil.which("mksquashfs"):
            raise Unavailable(
                "mksquashfs was not found", remedy="apt-get install squashfs-tools, or make setup as root"
            )
        if os.geteuid() != 0:
            self.console.print(NOT_ROOT)
        async with self.place() as cluster:
            timeout = aiohttp.ClientTimeout(total=30)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
                figures = await self._prepare(cluster, client)
                for version in (1, 2):
                    figures.rounds.append(await self._round(cluster, client, figures, version))
        figures.untidy = cluster.untidy
        return figures

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False)

    async def _prepare(self, cluster: Cluster, client: aiohttp.ClientSession) -> Figures:
        """The base layer, the processes, and the base package at the origin."""
        options = self.options
        wheels = WHEELS_SMALL if options.small else WHEELS
        size = max(options.size, 0 if options.small else BASE_BYTES_MIN)
        check_space(cluster.place, agents=options.agents, base_bytes=max(size, 250 << 20), unpacks=os.geteuid() != 0)
        self.say(f"Base layer: installing {', '.join(wheels)} with pip")
        base = await build_base(cluster.place / "base", cluster.processes, wheels, size)
        self.say(f"  {base.files} files, {megabytes(base.bytes)}, {base.seconds:.1f} s")
        figures = Figures(options.agents, base)
        self.say(f"Starting an origin, a tracker and {options.agents} agents")
        began = time.monotonic()
        await cluster.start(client)
        self.say(f"  ready after {time.monotonic() - began:.1f} s")
        await self._publish(cluster, figures, cluster.place / "base", BASE)
        return figures

    async def _publish(
        self, cluster: Cluster, figures: Figures, source: Path, reference: str, *more: str
    ) -> dict[str, Any]:
        """Pack and push; returns what pack printed."""
        began = time.monotonic()
        packed = await cluster.pack(source, reference, *more)
        figures.pack_s += time.monotonic() - began
        began = time.monotonic()
        pushed = await cluster.push(reference)
        figures.push_s += time.monotonic() - began
        if pushed["digest"] != packed["digest"]:
            raise Corrupt(
                f"{reference} was packed as {packed['digest']} and pushed as {pushed['digest']}",
                remedy="Run the demo again with --keep: its directory has the logs",
            )
        self.say(
            f"Packed and pushed {reference}: layers {', '.join(megabytes(size) for size in content_layers(packed))};"
            f" sent {megabytes(pushed['bytes_sent'])}, already there {megabytes(pushed['bytes_skipped'])}"
        )
        return packed

    async def _round(self, cluster: Cluster, client: aiohttp.ClientSession, figures: Figures, version: int) -> Round:
        """Change the app, publish it, pull it everywhere at once and run it everywhere."""
        reference = f"{APP}:v{version}"
        changed = write_app(cluster.place / "trainer", version=version)
        if version > 1:
            self.say(f"Changed one file of the app: {changed.name}")
        more = ["--base", BASE, "--entrypoint", json.dumps(ENTRYPOINT)]
        more += [word for entry in ENVIRONMENT for word in ("--env", entry)]
        packed = await self._publish(cluster, figures, cluster.place / "trainer", reference, *more)
        layers = content_layers(packed)
        self.say(f"Pulling {reference} on {len(cluster.hosts)} agents at once")
        served = await cluster.served(client)
        missing = sum(layers) if version == 1 else layers[-1]
        pulls, makespan = await pull_everywhere(self.console, cluster, client, reference, missing)
        served = await cluster.served(client) - served
        self.say(f"Running {reference} on {len(cluster.hosts)} agents at once")
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(cluster.run(host, reference)) for host in cluster.hosts]
        if version == 1:
            figures.mounted_as = await cluster.mount(cluster.hosts[0], reference)
        return Round(
            version=version,
            reference=reference,
            digest=str(packed["digest"]),
            package_bytes=sum(layers),
            app_bytes=layers[-1],
            origin_bytes=served,
            makespan_s=makespan,
            pulls=pulls,
            runs=tuple(task.result() for task in runs),
        )


async def play(script: Script, act: Callable[[], Awaitable[Measured]]) -> Measured:
    """Play an act of the script; SIGINT, SIGTERM and SIGHUP end it early, tidied up, as
    Interrupted. Later signals do not hurry it."""
    received: list[int] = []
    task = asyncio.ensure_future(act())

    def interrupt(number: int) -> None:
        if script.tidying:
            script.console.print("Still tidying up")
        elif not received:
            received.append(number)
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None
