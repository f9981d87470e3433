"""An origin, a tracker and agents on this machine, each a process of its own, and the commands that
are run against them."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from p2pdist.cli.verbs.demo.figures import Pull, Run
from p2pdist.cli.verbs.demo.origin import SERVED_PATH
from p2pdist.cli.verbs.demo.processes import Outcome, Processes
from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable

READY_S = 60.0
CALL_S = 300.0
WAYS = ("overlay", "userns", "unpack")
"""What `p2pdist run` begins the line with that says how it shows the package."""
RECEIVED_METRIC = "p2pdist_agent_received_bytes_total"


@dataclass(frozen=True, slots=True)
class Host:
    """One agent: where it listens for peers and for clients of a hub (host:port), its Unix socket
    and its store."""

    name: str
    address: str
    socket: Path
    store: Path
    mirror: str = "off"


@dataclass(frozen=True, slots=True)
class Received:
    """Bytes that an agent's metric says it has received since it started."""

    origin: int = 0
    peers: int = 0


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface on which no process listens now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def program() -> list[str]:
    """The p2pdist command that belongs to this Python."""
    beside = Path(sys.executable).with_name("p2pdist")
    path = str(beside) if beside.exists() else shutil.which("p2pdist")
    if not path:
        raise Unavailable("the p2pdist command was not found", remedy="Install the project with make setup")
    return [path]


@dataclass(slots=True)
class Cluster:
    """The processes of the demo and where they are. `place` holds all files, `sockets` the Unix
    sockets (a short path)."""

    processes: Processes
    place: Path
    sockets: Path
    agents: int
    origin_url: str = ""
    tracker_url: str = ""
    hosts: list[Host] = field(default_factory=list)
    untidy: list[str] = field(default_factory=list)
    """What did not go by itself when the cluster was taken down."""

    @property
    def storage(self) -> str:
        """The origin as one writes to it."""
        return f"file://{self.place / 'origin'}"

    async def start(self, client: aiohttp.ClientSession) -> None:
        """Start an origin, a tracker and agents, and wait until they are ready. Raises
        Unavailable."""
        (self.place / "origin").mkdir()
        await self._start_origin(client, "origin", "--directory", str(self.place / "origin"))
        await self._start_fleet(client, "--origin", self.origin_url, mirrors=False)

    async def start_with_hub(self, client: aiohttp.ClientSession, model: Path, repository: str) -> None:
        """Start a hub with one model, a tracker and agents that clients of hubs may ask, and wait
        until they are ready. Raises Unavailable."""
        options = ("--directory", str(model), "--repository", repository)
        await self._start_origin(client, "model.hub", *options)
        await self._start_fleet(client, "--hub", self.origin_url, mirrors=True)

    async def _start_origin(self, client: aiohttp.ClientSession, module: str, *options: str) -> None:
        (port,) = free_ports(1)
        self.origin_url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", f"p2pdist.cli.verbs.demo.{module}", *options]
        await self.processes.start("origin", [*command, "--listen", f"127.0.0.1:{port}"])
        await self._wait(client, self.origin_url + SERVED_PATH)

    async def _start_fleet(self, client: aiohttp.ClientSession, *options: str, mirrors: bool) -> None:
        tracker_port, *ports = free_ports(1 + 2 * self.agents)
        self.tracker_url = f"http://127.0.0.1:{tracker_port}"
        tracker = ["tracker", "--listen", f"127.0.0.1:{tracker_port}", *options]
        await self.processes.start("tracker", [*program(), *tracker, "--state", str(self.place / "tracker")])
        await self._wait(client, self.tracker_url + "/readyz")
        for number in range(self.agents):
            name, address = f"host{number + 1}", f"127.0.0.1:{ports[2 * number]}"
            mirror = f"127.0.0.1:{ports[2 * number + 1]}" if mirrors else "off"
            host = Host(name, address, self.sockets / f"{name}.sock", self.place / "stores" / name, mirror)
            host.store.mkdir(parents=True)
            agent = ["agent", "--tracker", self.tracker_url, "--listen", host.address, "--store", str(host.store)]
            agent += ["--socket", str(host.socket), "--name", name, "--mirror", host.mirror]
            await self.processes.start(name, [*program(), *agent])
            self.hosts.append(host)
        await asyncio.gather(*(self._wait(client, f"http://{host.address}/readyz") for host in self.hosts))

    async def _wait(self, client: aiohttp.ClientSession, url: str) -> None:
        """Until `url` answers 200; raises Unavailable when a process ends or READY_S seconds
        pass."""
        deadline = time.monotonic() + READY_S
        answer = "nothing"
        while time.monotonic() < deadline:
            self.processes.check_running()
            try:
                async with client.get(url) as response:
                    if response.status == 200:
                        return
                    answer = f"status {response.status}"
            except aiohttp.ClientError as error:
                answer = str(error)
            await asyncio.sleep(0.1)
        raise Unavailable(
            f"{url} was not ready within {READY_S:.0f} s: {answer}", remedy="Run the demo with --keep and read the logs"
        )

    async def _call(self, what: str, *arguments: str) -> Outcome:
        """Run `p2pdist ARGUMENTS`; raises P2PDistError when it fails."""
        done = await self.processes.call(what, [*program(), *arguments], timeout_s=CALL_S)
        if done.code != 0:
            raise P2PDistError(
                f"{what} ended with exit code {done.code}: {done.last_words()}",
                remedy="Run the demo with --keep and read the logs",
            )
        return done

    async def _document(self, what: str, *arguments: str) -> dict[str, Any]:
        """Run `p2pdist ARGUMENTS --json`; returns what it printed. Raises P2PDistError, Corrupt
        when that is no JSON object."""
        done = await self._call(what, *arguments, "--json")
        try:
            document = json.loads(done.stdout)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Corrupt(
                f"{what} printed no JSON document: {done.stdout[:200]!r}",
                remedy="Run the demo again with --keep: its directory has the logs",
            )
        return document

    async def pack(self, source: Path, reference: str, *more: str) -> dict[str, Any]:
        """`p2pdist pack` into the demo's layout."""
        layout = ["--layout", str(self.place / "layout")]
        return await self._document(f"pack {reference}", "pack", str(source), "-t", reference, *layout, *more)

    async def push(self, reference: str) -> dict[str, Any]:
        """`p2pdist push` from the demo's layout to the origin."""
        layout = ["--layout", str(self.place / "layout")]
        return await self._document(f"push {reference}", "push", reference, *layout, "--origin", self.storage)

    async def pull(self, client: aiohttp.ClientSession, host: Host, reference: str) -> Pull:
        """`p2pdist pull` through one agent."""
        before = await self.received(client, host)
        answer = await self._document(
            f"pull {reference} on {host.name}", "pull", reference, "--socket", str(host.socket)
        )
        after = await self.received(client, host)
        return Pull(
            host=host.name,
            digest=str(answer["digest"]),
            seconds=float(answer["seconds"]),
            bytes_origin=int(answer["bytes_origin"]),
            bytes_peers=int(answer["bytes_peers"]),
            bytes_cached=int(answer["bytes_cached"]),
            received=after.origin + after.peers - before.origin - before.peers,
        )

    async def run(self, host: Host, reference: str) -> Run:
        """`p2pdist run` through one agent; the program's last line is its report."""
        what = f"run {reference} on {host.name}"
        done = await self._call(what, "run", "--socket", str(host.socket), reference)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise Corrupt(
                f"{what} printed no report: {done.last_words()}",
                remedy="Run the demo again with --keep: its directory has the logs",
            )
        answer = json.loads(lines[-1])
        return Run(
            host=host.name,
            seconds=done.seconds,
            version=int(answer["version"]),
            loss_first=float(answer["loss_first"]),
            loss_last=float(answer["loss_last"]),
            program=str(answer["program"]),
            numpy=str(answer["numpy"]),
            shown_as=next((line for line in done.stderr.splitlines() if line.partition(":")[0] in WAYS), ""),
        )

    async def mount(self, host: Host, reference: str) -> str:
        """`p2pdist mount` and `p2pdist umount`; returns what the first says about how and why."""
        point = self.place / "shown"
        point.mkdir()
        answer = await self._document("mount", "mount", reference, str(point), "--socket", str(host.socket))
        await self._call("umount", "umount", str(answer["path"]), "--socket", str(host.socket))
        return str(answer.get("why") or answer["how"])

    async def served(self, client: aiohttp.ClientSession) -> int:
        """Bytes of files that the origin has sent, by its own count."""
        return int((await self.counted(client))["bytes"])

    async def counted(self, client: aiohttp.ClientSession) -> dict[str, Any]:
        """What the origin, or the hub, has counted."""
        async with client.get(self.origin_url + SERVED_PATH) as response:
            counted: dict[str, Any] = await response.json()
            return counted

    async def received(self, client: aiohttp.ClientSession, host: Host) -> Received:
        """What an agent's metric says; raises Unavailable when it cannot be read."""
        try:
            async with client.get(f"http://{host.address}/metrics") as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            raise Unavailable(
                f"the metrics of {host.name} cannot be read: {error}",
                remedy="Run the demo again with --keep: its directory has the logs",
            ) from error
        origin = peers = 0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == RECEIVED_METRIC and sample.labels.get("source") in ("origin", "upstream"):
                    origin += int(sample.value)
                elif sample.name == RECEIVED_METRIC:
                    peers += int(sample.value)
        return Received(origin, peers)
