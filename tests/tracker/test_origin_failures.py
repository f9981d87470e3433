"""Hosts that say that a blob is missing or wrong at the origin: the tracker looks before it ends
the blob for all. The core as a script, then a real origin over HTTP and sessions over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from waits import until

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.manifest import Descriptor, blob_reference, decode_manifest
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Complaint,
    FromAgent,
    Hello,
    Holding,
    Left,
    Reject,
    Report,
    decode_from_tracker,
    encode,
)
from p2pdist.model.pieces import PieceLayout
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.repository.push import push_blob
from tracker.content import Content
from tracker.core.events import Command, Event, LookAtOrigin, OriginSeen, Received, Send, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.core.planning.planner import Planner
from tracker.core.planning.schedule import JOIN_BATCH_S
from tracker.core.repair.origin_failures import LOOK_AGAIN_S, LOOK_LOST_S, LOOK_PIECES_MAX
from tracker.core.repair.remedies import AVOID_S
from tracker.core.swarm import Swarm
from tracker.http.app import make_app
from tracker.service import Service

PIECE, ALL = 65536, 8
BLOB = digest_of(b"blob")
LAYOUT = PieceLayout(ALL * PIECE, PIECE)


class Control:
    """A fleet of hosts, each at its own address unless named otherwise, that want a blob."""

    def __init__(
        self,
        *hosts: str,
        source: Callable[[str], str] = lambda host: f"10.0.{ord(host[0])}.{host[1:]}",
        origin_sites: frozenset[str] = frozenset(),
    ) -> None:
        self.fleet, self.now = Fleet(-100.0, planner=Planner(origin_sites=origin_sites)), 0.0
        self.numbers = {host: number for number, host in enumerate(hosts)}
        for host, number in self.numbers.items():
            hello = Hello(PROTOCOL_VERSION, host, f"{host}:1", site=host[0] if origin_sites else "")
            self.do(SessionOpened(number, hello, source(host)))
            self.do(Received(number, Holding(BLOB, LAYOUT.size, PIECE, (0,))))
        self.run()

    def do(self, event: Event) -> list[Command]:
        return self.fleet.handle(event, now=self.now)

    def run(self) -> None:
        for _ in range(10):
            self.now += JOIN_BATCH_S / 5
            self.do(Tick())

    def complain(self, host: str, reason: str = "missing", piece: int | None = None) -> list[Command]:
        """The host has the lease, and says that it cannot read."""
        edges = self.fleet.swarms[BLOB].edges
        for other in self.numbers:
            edges.detach(0, other)
        edges.attach(0, host, "")
        return self.do(Received(self.numbers[host], Complaint(BLOB, 0, "", reason, piece)))  # type: ignore[arg-type]

    def reader(self) -> str | None:
        self.run()
        return next(iter(self.fleet.swarms[BLOB].edges.roots[0]), None)


def looks(commands: list[Command]) -> list[LookAtOrigin]:
    return [command for command in commands if isinstance(command, LookAtOrigin)]


def rejected(commands: list[Command]) -> set[int]:
    """The sessions that hear that the blob cannot be had."""
    return {each.session for each in commands if isinstance(each, Send) and isinstance(each.message, Reject)}


@pytest.mark.parametrize(("source", "looked"), [("10.0.0.9", False), ("", True)])
@pytest.mark.parametrize("reason", ["corrupt", "missing"])
def test_hosts_at_one_address_are_one_witness(reason: str, source: str, looked: bool) -> None:
    """Two strangers on one machine do not even make the tracker look."""
    control = Control(
        "s1", "s2", "g3", source=lambda host: source if host[0] == "s" and source else f"10.1.1.{host[1]}"
    )
    assert not looks(control.complain("s1", reason))
    commands = control.complain("s2", reason)
    assert bool(looks(commands)) == looked and not rejected(commands)


@pytest.mark.parametrize("state", ["missing", "corrupt", "unknown"])
def test_what_the_tracker_sees_ends_the_blob_for_all(state: str) -> None:
    """Where it can see nothing, two witnesses are believed."""
    control = Control("a1", "a2", "a3", "a4")
    control.complain("a1")
    assert looks(control.complain("a2")) == [LookAtOrigin(BLOB, BLOB, LAYOUT)]
    commands = control.do(OriginSeen(BLOB, state, "why"))  # type: ignore[arg-type]
    assert rejected(commands) == {0, 1, 2, 3}
    (problem,) = {each.message.problem["title"] for each in commands if isinstance(each, Send) if rejected([each])}  # type: ignore[union-attr]
    assert ("corrupt" in problem.lower()) == (state == "corrupt")


def test_hosts_that_lie_end_nothing_and_read_the_origin_no_more() -> None:
    control = Control("s1", "s2", "g3")
    control.complain("s1")
    control.complain("s2")
    assert not rejected(control.do(OriginSeen(BLOB, "right")))
    assert control.reader() == "g3"
    assert "the tracker finds the blob" in "".join(text for _, text in control.fleet.swarms[BLOB].story)


def test_a_host_that_waits_for_one_that_lied_waits_no_longer() -> None:
    """Else it would have to find out that nothing comes."""
    control = Control("s1", "s2", "g3")
    edges = control.fleet.swarms[BLOB].edges
    control.complain("s1")
    control.complain("s2")
    for host in ("s1", "s2", "g3"):
        edges.detach(0, host)
    edges.attach(0, "s1", "s2")
    edges.attach(0, "g3", "s1")
    control.do(OriginSeen(BLOB, "right"))
    assert control.reader() == "g3"


def test_liars_have_the_tracker_look_now_and_then_and_not_beside_itself() -> None:
    control = Control("s1", "s2", "s3", "s4", "s5", "g6")
    control.complain("s1")
    assert looks(control.complain("s2"))
    assert not looks(control.complain("s3")), "it looks already"
    control.do(OriginSeen(BLOB, "right"))
    assert not looks(control.complain("s4")), "it has just looked"
    control.now += LOOK_AGAIN_S
    assert looks(control.complain("s5"))
    control.now += LOOK_AGAIN_S
    assert not looks(control.complain("s5")), "what it saw may still come"
    control.now += LOOK_LOST_S
    assert looks(control.complain("s5")), "it was lost"


def test_all_hosts_together_are_believed_whatever_the_tracker_sees() -> None:
    """No host is there to be harmed, and their way to the origin may be another."""
    control = Control("a1", "a2", "a3")
    control.complain("a1")
    control.complain("a2")
    control.do(OriginSeen(BLOB, "right"))
    assert rejected(control.complain("a3")) == {0, 1, 2}
    alone = Control("a1")
    commands = alone.complain("a1")
    assert rejected(commands) == {0} and not looks(commands)


def test_the_tracker_looks_at_the_pieces_that_hosts_found_wrong() -> None:
    """At the last few, also where a host names none: readers go from the first piece on."""
    control = Control("a1", "a2", "a3", "a4", "a5", "a6", "a7")
    control.complain("a1", "corrupt", 5)
    (look,) = looks(control.complain("a2", "corrupt"))
    assert look.pieces == (0, 5)
    for number in range(3, 7):
        control.complain(f"a{number}", "corrupt", number)
    control.do(OriginSeen(BLOB, "right"))
    control.now += LOOK_AGAIN_S
    (look,) = looks(control.complain("a6", "corrupt", ALL + 7))
    assert look.pieces == (5, 4, 3, 0)[:LOOK_PIECES_MAX], "the piece beyond the end is none"


@pytest.mark.parametrize("reason", ["missing", "corrupt"])
def test_the_tracker_looks_for_the_only_host_that_may_read(reason: str) -> None:
    """There is no second witness, and the hosts of other sites would wait until they give up."""
    control = Control("g1", "a1", "b1", "b2", origin_sites=frozenset("g"))
    assert looks(control.complain("g1", reason))
    control.do(Received(0, Left(BLOB)))  # it gives up
    assert rejected(control.do(OriginSeen(BLOB, reason))) == {1, 2, 3}  # type: ignore[arg-type]


@pytest.mark.parametrize(("state", "reason"), [("right", "missing"), ("right", "corrupt"), ("unknown", "corrupt")])
def test_the_only_host_that_may_read_tries_again(state: str, reason: str) -> None:
    """What it met may pass; barred from the origin it would keep the others waiting."""
    control = Control("g1", "a1", "b1", origin_sites=frozenset("g"))
    control.complain("g1", reason)
    assert not rejected(control.do(OriginSeen(BLOB, state)))  # type: ignore[arg-type]
    for _ in range(int(AVOID_S) + 1):
        control.now += 1.0
        control.run()
    assert control.reader() == "g1"


def test_of_two_hosts_that_may_read_one_is_not_enough() -> None:
    control = Control("g1", "g2", "a1", origin_sites=frozenset("g"))
    assert not looks(control.complain("g1"))
    assert looks(control.complain("g2"))


# -- a real origin


class Web:
    """An origin over HTTP: a directory, of which single files can be kept back."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.requests: list[str] = []
        self.down = False

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{path:.*}", self.serve)
        return app

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.headers.get('Range', '')}")
        path = self.directory / request.path.lstrip("/")
        if self.down:
            return web.Response(status=503)
        return web.FileResponse(path) if path.is_file() else web.Response(status=404)

    def blob(self, digest: Digest) -> Path:
        return self.directory / "blobs" / "sha256" / digest[7:]


class Site:
    """A tracker's service over a web origin that holds one package of one layer."""

    def __init__(self, service: Service, origin: Web, layer: Descriptor, url: str, http: aiohttp.ClientSession) -> None:
        self.service, self.origin, self.layer, self.url, self.http = service, origin, layer, url, http
        self.sockets: dict[str, aiohttp.ClientWebSocketResponse] = {}

    async def join(self, host: str) -> None:
        socket = self.sockets[host] = await self.http.ws_connect(f"{self.url}/v1/session")
        await socket.send_str(encode(Hello(PROTOCOL_VERSION, host, f"127.0.0.1:{7000 + len(self.sockets)}")).decode())
        layout = self.layer.layout
        await self.tell(host, Holding(self.layer.digest, layout.size, layout.piece_size, (0,) * layout.stripes))
        swarms = self.service.fleet.swarms
        await until(lambda: self.layer.digest in swarms and host in self.swarm.members)

    async def tell(self, host: str, message: FromAgent) -> None:
        await self.sockets[host].send_str(encode(message).decode())

    async def reader(self, *hosts: str) -> str:
        """The one of these hosts that has the lease, once one has."""
        await until(lambda: any(host in self.swarm.edges.roots[0] for host in hosts))
        return next(host for host in hosts if host in self.swarm.edges.roots[0])

    @property
    def swarm(self) -> Swarm:
        return self.service.fleet.swarms[self.layer.digest]

    async def refusal(self, host: str) -> Reject:
        """Why the host cannot have the blob."""
        async with asyncio.timeout(60):
            while not isinstance(message := decode_from_tracker(await self.sockets[host].receive_str()), Reject):
                pass
        return message


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    layout = LocalLayout(tmp_path / "origin")
    layout.scratch()
    (tmp_path / "content").write_bytes(bytes(range(256)) * 1200)
    pushed = await push_blob(tmp_path / "content", layout)
    origin = Web(tmp_path / "origin")
    async with AsyncExitStack() as stack:
        kept = await stack.enter_async_context(served(origin.app()))
        content = Content(open_origin(kept))
        described = await content.resolve(blob_reference(pushed.digest))
        (layer,) = decode_manifest(await content.manifest(described.digest)).layers
        service = Service(Fleet(-100.0), content)
        running = asyncio.create_task(service.run())
        stack.callback(running.cancel)
        url = await stack.enter_async_context(served(make_app(service)))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Site(service, origin, layer, url, http)


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """The URL of an application."""
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site.name
    await runner.cleanup()


async def two_complain(site: Site, reason: str, piece: int | None = None) -> None:
    """Of three hosts two say that they cannot read, one after the other."""
    liars = ["s1", "s2"]
    for host in liars:
        await site.join(host)
    while liars:
        liars.remove(host := await site.reader(*liars))
        if not liars:
            await site.join("good")
        await site.tell(host, Complaint(site.layer.digest, 0, "", reason, piece))  # type: ignore[arg-type]


@pytest.mark.parametrize(("reason", "piece"), [("missing", None), ("corrupt", 1), ("corrupt", None)])
async def test_strangers_cannot_end_a_blob_that_the_origin_has(site: Site, reason: str, piece: int | None) -> None:
    site.origin.requests.clear()
    await two_complain(site, reason, piece)
    await site.reader("good")
    swarm = site.swarm
    await until(lambda: not swarm.origin.looks)
    assert site.origin.requests, "the tracker looked"
    site.origin.requests.clear()
    await site.tell("good", Report((Advance(site.layer.digest, (1,)),)))
    await until(lambda: swarm.members["good"].counts[0] == 1)
    assert set(swarm.members) == {"s1", "s2", "good"} and "good" in swarm.edges.roots[0]
    assert not site.origin.requests, "once"


async def test_what_the_origin_lacks_ends_for_all(site: Site) -> None:
    site.origin.blob(site.layer.digest).unlink()
    await two_complain(site, "missing")
    for host in ("s1", "s2", "good"):
        assert "does not have" in (await site.refusal(host)).problem["detail"]


@pytest.mark.parametrize("damage", ["a wrong byte", "too short"])
async def test_what_is_wrong_at_the_origin_ends_for_all(site: Site, damage: str) -> None:
    path = site.origin.blob(site.layer.digest)
    data = bytearray(path.read_bytes())
    data[site.layer.layout.offset(2)] ^= 1
    path.chmod(0o644)
    path.write_bytes(data if damage == "a wrong byte" else data[:-1])
    await two_complain(site, "corrupt", 2)
    expected = "piece 2 does not match its hash" if damage == "a wrong byte" else f"it has {len(data) - 1} bytes"
    for host in ("s1", "s2", "good"):
        assert expected in (await site.refusal(host)).problem["detail"]


async def test_two_are_believed_where_the_tracker_cannot_look(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.origin.down = True
    await two_complain(site, "missing")
    assert "does not have" in (await site.refusal("good")).problem["detail"]
    assert "are believed, for the tracker cannot see" in caplog.text
