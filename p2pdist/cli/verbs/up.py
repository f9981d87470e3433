"""`p2pdist up`: origin, tracker and agent on one machine, for a trial."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shlex
import signal
import socket as sockets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from p2pdist.cli import output
from p2pdist.cli.services import filled
from p2pdist.model.address import address_text
from p2pdist.model.errors import Conflict, P2PDistError, Unavailable, UsageError

if TYPE_CHECKING:
    from aiohttp import web

    from p2pdist.cli.verbs.demo.processes import Processes, Service

READY_S_MAX = 120.0
POLL_S = 0.1
ANSWER_S = 5.0
AGENT = "host"
"""The name of the agent's process: those of hosts are ended before the others (processes.py)."""

STOP_S = 10.0
"""What is still served when the trial ends may take this long."""


@click.command("up")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("p2pdist-trial"),
    show_default=True,
    help="Where origin, store, logs and socket are; a later trial goes on with them.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65530),
    default=7070,
    show_default=True,
    help="The tracker's; the agent has the next one, and the origin the fourth after it.",
)
@click.option(
    "--address",
    metavar="HOST",
    callback=filled,
    help="Where other hosts reach this one  [default: its address on the network].",
)
@click.option("--local-only", is_flag=True, help="Let no other host in.")
def command(directory: Path, port: int, address: str | None, local_only: bool) -> None:
    """Run a tracker, an agent and an origin on this machine until Ctrl-C, and print what to type
    next, here and on a second host.

    This is for a trial on a network of your own: there is no access control, so all who reach this
    host can read what is pushed. docs/operations.md says how to run a fleet.

    \b
    Example:
      p2pdist up
      p2pdist up --directory /tmp/trial --local-only
    """
    if local_only and address:
        raise UsageError(
            "--address is for other hosts, of which --local-only lets none in", remedy="Leave one of them away"
        )
    host = "127.0.0.1" if local_only else _checked(address) if address else _own_address()
    listens = "127.0.0.1" if local_only else "::" if ":" in host else "0.0.0.0"
    trial = _Trial(directory.absolute(), host, port, listens)
    asyncio.run(trial.run())


def _checked(address: str) -> str:
    """A host's name or address, an IPv6 one without brackets. Raises UsageError."""
    from p2pdist.model.url import tracker_urls

    host = address.removeprefix("[").removesuffix("]")
    try:
        tracker_urls([f"http://{address_text(host, 1)}"])
    except UsageError as error:
        raise UsageError(
            f"{address[:80]!r} is no address of a host", remedy="Write its name or IP address, such as 192.0.2.7"
        ) from error
    return host


def _own_address() -> str:
    """The address of this host on the network that leads outside; no packet is sent. Loopback where
    there is none."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


@dataclass(frozen=True, slots=True)
class _Trial:
    """The parts of one trial: where they are, and where they listen."""

    directory: Path
    host: str
    """Where others reach this one."""
    port: int
    listens: str

    @property
    def tracker(self) -> str:
        return f"http://{address_text(self.host, self.port)}"

    @property
    def agent(self) -> str:
        return address_text(self.host, self.port + 1)

    @property
    def origin(self) -> Path:
        return self.directory / "origin"

    @property
    def served(self) -> int:
        """The port of the origin: the agent's next one is for BitTorrent, and by default the third
        is where any agent of this host is a mirror."""
        return self.port + 4

    @property
    def socket(self) -> Path:
        return self.directory / "agent.sock"

    async def run(self) -> None:
        """Run until Ctrl-C. Raises P2PDistError where a part does not start, or ends, and Conflict
        where another trial runs in the directory: its processes would be taken for strays."""
        try:
            self.origin.mkdir(parents=True, exist_ok=True)
            lock = (self.directory / ".trial").open("ab")
        except OSError as error:
            raise P2PDistError(
                f"cannot write in {self.directory}: {error.strerror}", remedy="Name another --directory"
            ) from error
        with lock:
            _require_alone(lock, self.directory)
            self._require_room()
            await self._run()

    def _require_room(self) -> None:
        """Raises Conflict where another program has a port of the trial, as a tracker that would be
        taken for its own, UsageError where the path of the socket is too long."""
        from p2pdist.agent.api.client import SOCKET_PATH_BYTES_MAX
        from p2pdist.cli.diagnosis import why_taken

        if len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES_MAX:
            raise UsageError(
                f"the path of the socket {self.socket} is longer than {SOCKET_PATH_BYTES_MAX} bytes",
                remedy="Name a shorter --directory",
            )
        for name, number in (("tracker", self.port), ("agent", self.port + 1), ("origin", self.served)):
            if why := why_taken(self.listens, number):
                raise _taken(number, name, why)

    async def _run(self) -> None:
        from aiohttp import web

        from p2pdist.cli.verbs.demo.origin import StaticOrigin
        from p2pdist.cli.verbs.demo.processes import Processes

        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        runner = web.AppRunner(StaticOrigin(self.origin).application(), access_log=None, shutdown_timeout=STOP_S)
        await runner.setup()
        processes = Processes(self.directory)
        try:
            await self._serve_origin(web.TCPSite(runner, self.listens, self.served))
            services = [await self._start(processes, stopped, name) for name in ("tracker", AGENT)]
            if not stopped.is_set():
                self._show()
                await _until_stopped(services, stopped)
        finally:
            output.line("stopping agent, tracker and origin")
            await processes.stop()
            await runner.cleanup()

    async def _serve_origin(self, site: web.TCPSite) -> None:
        try:
            await site.start()
        except OSError as error:
            raise _taken(self.served, "origin", str(error.strerror or error)) from error

    async def _start(self, processes: Processes, stopped: asyncio.Event, name: str) -> Service:
        """Start the tracker or the agent, and wait until it is ready."""
        tracker = ["--listen", address_text(self.listens, self.port)]
        tracker += ["--origin", f"http://{address_text(self.host, self.served)}"]
        tracker += ["--state", str(self.directory / "state")]
        agent = ["--listen", address_text(self.listens, self.port + 1), "--advertise", self.agent]
        agent += ["--tracker", self.tracker]
        agent += ["--store", str(self.directory / "store"), "--socket", str(self.socket), "--drain-seconds", "1"]
        agent += ["--name", f"{sockets.gethostname()}-trial"]  # another agent here has the name of the host
        words = ["agent", *agent] if name == AGENT else ["tracker", *tracker]
        service = await processes.start(name, [sys.executable, "-m", "p2pdist", *words])
        url = f"{f'http://{self.agent}' if name == AGENT else self.tracker}/readyz"
        deadline = asyncio.get_running_loop().time() + READY_S_MAX
        while not stopped.is_set() and not await _answers(url):
            if service.process.returncode is not None:
                raise P2PDistError(f"the {words[0]} ended: {service.last_words()}", remedy=f"See {service.log}")
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(f"the {words[0]} is not ready after {READY_S_MAX:.0f} s", remedy=f"See {service.log}")
            await asyncio.sleep(POLL_S)
        return service

    def _show(self) -> None:
        origin, socket = self.origin.as_uri(), shlex.quote(str(self.socket))
        further, where = "~/p2pdist.sock", "On a second host:"
        agent = f"p2pdist agent --tracker {self.tracker} --store ~/p2pdist-store --socket {further}"
        if self.host == "127.0.0.1":  # which no other host reaches
            where = "A second agent here, each command in a terminal of its own:"
            agent += f" --listen {address_text(self.host, self.served + 1)} --mirror off"
        rows = [
            f"A tracker at {self.tracker}/ (its page shows who receives what), an agent and an origin are running.",
            "",
            "Here, in another terminal:",
            '  p2pdist pack ./app -t app:v1 --entrypoint \'["python3", "main.py"]\' --push --origin ' + origin,
            f"  p2pdist run --socket {socket} app:v1",
            "",
            where,
            f"  {agent}",
            f"  p2pdist run --socket {further} app:v1",
            "",
            "Ctrl-C ends it." + ("" if self.host == "127.0.0.1" else " Until then others can read what is pushed."),
        ]
        for row in rows:
            output.say(row)
        sys.stdout.flush()


def _taken(number: int, name: str, why: str) -> Conflict:
    return Conflict(
        f"cannot listen on port {number} for the {name}: {why}",
        remedy="Choose other ports with --port, or end what listens there",
    )


def _require_alone(lock: BinaryIO, directory: Path) -> None:
    """Lock a directory for this trial, until it ends in whatever way. Raises Conflict."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Conflict(
            f"another trial runs in {directory}", remedy="Use it, end it with Ctrl-C, or name another --directory"
        ) from None


async def _until_stopped(services: list[Service], stopped: asyncio.Event) -> None:
    """Wait for Ctrl-C. Raises P2PDistError when a service ends by itself."""
    ends = {asyncio.create_task(service.process.wait()): service for service in services}
    stop = asyncio.create_task(stopped.wait())
    done, _ = await asyncio.wait([*ends, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    for end in ends.keys() - done:
        end.cancel()
    if not stopped.is_set():
        service = next(ends[end] for end in ends if end in done)
        kind = "agent" if service.name == AGENT else service.name
        raise P2PDistError(f"the {kind} ended: {service.last_words()}", remedy=f"See {service.log}")


async def _answers(url: str) -> bool:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as http,
            http.get(url) as answer,
        ):
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
