"""A tracker on loopback whose hosts are spoken for: they join and report as told, and move no
data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.manifest import parse_reference
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Complaint, Hello, Holding, Report
from p2pdist.model.pieces import PieceLayout
from tracker.content import Content
from tracker.core.events import Received, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.service import Service

BLOB = digest_of(b"blob")
PIECE = 1 << 20
PIECES = 512


class Hosts:
    """Speaks for hosts to a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.sessions: dict[str, int] = {}
        self.now = time.monotonic()
        self._number = 0

    def open(self, *names: str, zone: str = "", rack: str = "") -> None:
        for name in names:
            self._number += 1
            self.sessions[name] = self._number
            hello = Hello(PROTOCOL_VERSION, name, f"{name}:1", zone, rack)
            self.fleet.handle(SessionOpened(self._number, hello), now=self.now)

    def close(self, name: str) -> None:
        self.fleet.handle(SessionClosed(self.sessions.pop(name)), now=self.now)

    def hold(
        self,
        name: str,
        counts: tuple[int, ...] = (0, 0),
        blob: Digest = BLOB,
        pieces: int = PIECES,
        *,
        swarm: bool = False,
    ) -> None:
        self._say(name, Holding(blob, pieces * PIECE, PIECE, counts, swarm=swarm))

    def report(self, name: str, counts: tuple[int, ...], blob: Digest = BLOB) -> None:
        self._say(name, Report((Advance(blob, counts),)))

    def complain(self, name: str, of: str, reason: str = "corrupt", blob: Digest = BLOB) -> None:
        self._say(name, Complaint(blob, 0, of, reason))  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> None:
        """Ticks until then."""
        for _ in range(max(1, round(seconds / 0.5))):
            self.now += seconds / max(1, round(seconds / 0.5))
            self.fleet.handle(Tick(), now=self.now)

    def _say(self, name: str, message: Holding | Report | Complaint) -> None:
        self.fleet.handle(Received(self.sessions[name], message), now=self.now)


def fleet_of(count: int, *, racks_of: int = 40, zones: int = 2, **more: float) -> Hosts:
    """Connected hosts h0, h1, ... in racks and zones."""
    hosts = Hosts(Fleet(time.monotonic() - 100.0, **more))  # type: ignore[arg-type]
    for number in range(count):
        zone = f"z{number * zones // count}"
        hosts.open(f"h{number}", zone=zone, rack=f"r{number // racks_of}")
    return hosts


def join_all(hosts: Hosts, names: Iterable[str] | None = None) -> None:
    """All want the blob, and are planned."""
    for name in list(names if names is not None else hosts.sessions):
        hosts.hold(name)
    hosts.pass_time(1.0)


def stripes() -> int:
    return PieceLayout(PIECES * PIECE, PIECE).stripes


@asynccontextmanager
async def tracker_of(hosts: Hosts) -> AsyncIterator[tuple[Service, str]]:
    """The service around the fleet and its URL. Its own clock is not run: time passes as the test
    says."""
    service = Service(hosts.fleet, Content(None))
    runner = web.AppRunner(make_app(service), shutdown_timeout=5.0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield service, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await asyncio.wait_for(runner.cleanup(), 60)


def spread_packages(hosts: Hosts, count: int, holders: int = 4) -> None:
    """So many packages of one blob each: every second one is complete at a few hosts, the others
    are on their way to them."""
    names = sorted(hosts.sessions)
    for number in range(count):
        blob, manifest = digest_of(f"blob {number}".encode()), digest_of(f"manifest {number}".encode())
        hosts.fleet.policies.note(
            parse_reference(f"team-{number % 7}/model-{number:03}:v{number % 9}"), manifest, [blob]
        )
        for member in range(holders):
            host = names[(number * holders + member) % len(names)]
            done = PIECES // stripes() if member == 0 or number % 2 else PIECES // stripes() * member // holders
            hosts.hold(host, (done,) * stripes(), blob)
    hosts.pass_time(1.0)
