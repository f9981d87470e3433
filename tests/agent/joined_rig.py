"""A small tracker with access on, over real TLS, and agents that join it: for tests of the agent's
side, which say what the tracker sends."""

from __future__ import annotations

import asyncio
import io
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from ports import free_port
from waits import until

from p2pdist.agent.agent import Agent, AgentSettings, enter
from p2pdist.agent.api.server import make_apps
from p2pdist.cli.daemon import listen, listen_unix
from p2pdist.credentials.authority import TRACKER_DNS, Authority, encode_key, make_key, make_request, name_in
from p2pdist.credentials.join import JoinToken
from p2pdist.credentials.signing import SigningKey
from p2pdist.model.access import TICKET_S, Ticket, encode_ticket
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Unauthenticated, Unavailable
from p2pdist.model.manifest import (
    BLOB_TYPE,
    CONFIG_TYPE,
    MANIFEST_TYPE,
    PIECES_DIGEST,
    PIECES_SIZE,
    PIECES_TYPE,
    Config,
    Descriptor,
    Manifest,
    encode_config,
    encode_manifest,
    parse_reference,
)
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Access,
    Assign,
    Hello,
    Holding,
    Holdings,
    Joined,
    JoinRequest,
    Priority,
    PullRequest,
    PullStatus,
    RenewRequest,
    Report,
    Welcome,
    decode_from_agent,
    encode,
)
from p2pdist.model.pieces import PieceList
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.repository.push import push_blob
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.problems import problems
from p2pdist.transfer.tls import Tls, TlsFiles

FLEET = "test"


class AccessTracker:
    """Gives certificates for its join token, tickets with plans, and what `access` says. `ticket`
    makes the ticket of an Assign; a test may replace it. A host receives from the first that has
    the whole blob, else from the origin."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.authorities = [Authority.create(FLEET, now=time.time())]
        self.signing = [SigningKey.create()]
        self.token = JoinToken.create(self.authorities[0].fingerprint, "default")
        self.lasts_s = 86400.0
        self.clock: Callable[[], float] = time.time
        self.joins: list[JoinRequest] = []
        self.renewals: list[str] = []
        self.hellos: list[tuple[Hello, str]] = []
        """Each hello, and the host in the certificate of its connection."""
        self.holdings: list[tuple[str, Holding]] = []
        self.said: list[Any] = []
        """All other messages of agents."""
        self.public: tuple[str, ...] = ()
        self.revoked: tuple[str, ...] = ()
        self.local: dict[str, tuple[str, ...]] = {}
        self.mount_roots: tuple[str, ...] = ()
        self.roles: dict[str, tuple[str, ...]] = {}
        self.reads: dict[str, tuple[str, ...]] = {}
        self.others = ""
        """Further authorities of agents' certificates, PEM."""
        self.ticket: Callable[[Digest, str, Priority], str] = self.sign
        self.planning = True
        self._sockets: dict[str, web.WebSocketResponse] = {}
        self._addresses: dict[str, str] = {}
        self._whole: dict[Digest, list[str]] = {}
        self._counts: dict[Digest, int] = {}
        self._runner: web.AppRunner | None = None
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"

    # -- what it sends

    def access(self) -> Access:
        keys = {key.name: key.public for key in self.signing}
        pems = "".join(authority.pem.decode() for authority in self.authorities) + self.others
        return Access(
            keys,
            pems,
            self.revoked,
            self.public,
            self.local,
            self.mount_roots,
            fleet=FLEET,
            roles=self.roles,
            reads=self.reads,
        )

    async def push_access(self) -> None:
        for peer in self._sockets.values():
            await peer.send_bytes(encode(self.access()))

    def sign(self, blob: Digest, host: str, priority: Priority, *, until: float | None = None) -> str:
        """A ticket for one host."""
        key = self.signing[-1]
        return encode_ticket(
            Ticket(key.name, blob, host, priority, time.time() + TICKET_S if until is None else until), key.sign
        )

    async def assign(self, host: str, plan: Plan, ticket: str) -> None:
        await self._sockets[host].send_bytes(encode(Assign(plan, ticket)))

    # -- serving

    def context(self) -> ssl.SSLContext:
        authority, key = self.authorities[-1], make_key()
        certificate = authority.issue(make_request(key), "tracker", "t", ["127.0.0.1"], now=self.clock())
        file = self.directory / "tracker.pem"
        file.write_bytes(encode_key(key) + certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_cert_chain(file)
        for trusted in self.authorities:
            context.load_verify_locations(cadata=trusted.pem.decode())
        if self.others:
            context.load_verify_locations(cadata=self.others)
        return context

    async def start(self) -> AccessTracker:
        app = web.Application(middlewares=[problems])
        app.router.add_get("/v1/access/authorities", self._authorities)
        app.router.add_post("/v1/join", self._join)
        app.router.add_post("/v1/renew", self._renew)
        app.router.add_get("/v1/session", self._session)
        app.router.add_get("/{path:.*}", self._elsewhere)
        self._runner = await listen(app, ("127.0.0.1", self.port), tls=self.context())
        self._runner._shutdown_timeout = 0.1
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            for peer in list(self._sockets.values()):
                await peer.close()
            await self._runner.cleanup()
            self._runner = None

    async def _elsewhere(self, request: web.Request) -> web.Response:
        raise Unavailable("documents come from the agents' own origin here")

    async def _authorities(self, request: web.Request) -> web.Response:
        return web.Response(body=b"".join(authority.pem for authority in self.authorities))

    async def _join(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=JoinRequest)
        self.joins.append(body)
        if body.token != str(self.token):
            raise Unauthenticated("the join token is not one of this fleet")
        return self._issued(body.request, body.host, body.addresses)

    async def _renew(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=RenewRequest)
        host = name_in(request.transport.get_extra_info("peercert"), FLEET, "agent")  # type: ignore[union-attr]
        if not host:
            raise Unauthenticated("no certificate")
        self.renewals.append(host)
        return self._issued(body.request, host, body.addresses)

    def _issued(self, request: str, host: str, addresses: tuple[str, ...]) -> web.Response:
        authority = self.authorities[-1]
        certificate = authority.issue(
            request.encode(), "agent", host, addresses, now=self.clock(), lasts_s=self.lasts_s, join=self.token.id
        ).decode()
        pems = "".join(authority.pem.decode() for authority in self.authorities)
        return web.Response(body=msgspec.json.encode(Joined(FLEET, certificate, pems)))

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        peer = web.WebSocketResponse()
        await peer.prepare(request)
        hello = decode_from_agent((await peer.receive()).data)
        assert isinstance(hello, Hello)
        self.hellos.append((hello, name_in(request.transport.get_extra_info("peercert"), FLEET, "agent")))  # type: ignore[union-attr]
        await peer.send_bytes(encode(Welcome(PROTOCOL_VERSION, 0.1, time=time.time())))
        await peer.send_bytes(encode(self.access()))
        self._sockets[hello.host], self._addresses[hello.host] = peer, hello.address
        async for frame in peer:
            message = decode_from_agent(frame.data)
            for holding in message.blobs if isinstance(message, Holdings) else (message,):
                if isinstance(holding, Holding):
                    await self._holding(hello.host, holding)
                else:
                    self.said.append(holding)
                if isinstance(holding, Report):
                    for advance in holding.blobs:
                        if sum(advance.counts) == self._counts.get(advance.blob):
                            self._whole.setdefault(advance.blob, []).append(hello.host)
        if self._sockets.get(hello.host) is peer:
            del self._sockets[hello.host]
        return peer

    async def _holding(self, host: str, holding: Holding) -> None:
        self.holdings.append((host, holding))
        count = self._counts[holding.blob] = -(-holding.size // holding.piece_size)
        if sum(holding.counts) == count:
            self._whole.setdefault(holding.blob, []).append(host)
            return
        if not self.planning:
            return
        parents = [other for other in self._whole.get(holding.blob, []) if other != host]
        parent = Source(parents[0], self._addresses[parents[0]]) if parents else ORIGIN
        stripes = tuple(StripePlan(number, parent) for number in range(len(holding.counts)))
        await self.assign(host, Plan(holding.blob, stripes), self.ticket(holding.blob, host, holding.priority))


class AccessSite:
    """A tracker, agents that join it, and an origin. `access_site` makes one."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory, self.stack = directory, stack
        self.tracker = AccessTracker(directory / "tracker")
        self.origin = LocalLayout(directory / "origin")
        self.origin.scratch()
        self.join_file = directory / "join.token"
        self.join_file.write_text(str(self.tracker.token))
        self.join_file.chmod(0o600)

    async def publish(self, data: bytes) -> Digest:
        file = self.directory / "content"
        file.write_bytes(data)
        return (await push_blob(file, self.origin)).digest

    def settings(self, name: str, *, port: int = 0, **more: Any) -> AgentSettings:
        more.setdefault("origin", self.origin.url)
        more.setdefault("join_file", self.join_file)
        address = f"127.0.0.1:{port or free_port()}"
        return AgentSettings((self.tracker.url,), name, address, self.directory / name, tracker_wait_s=5, **more)

    async def agent(self, name: str, **more: Any) -> Running:
        running = Running(self.settings(name, **more))
        await running.start()
        self.stack.push_async_callback(running.stop)
        return running

    async def pull(self, running: Running, digest: Digest) -> PullStatus:
        """Pull a blob, and wait."""
        pull = running.agent.pulls.start(PullRequest(blob=digest))
        assert pull.task is not None
        await asyncio.wait_for(asyncio.wait([pull.task]), 30)
        return pull.status()

    async def seeded(self, data: bytes) -> tuple[Running, Digest]:
        """An agent h0 that has a blob, and the tracker knows it."""
        digest, seed = await self.publish(data), await self.agent("h0")
        status = await self.pull(seed, digest)
        assert status.state == "done", status.error
        await until(lambda: "h0" in self.tracker._whole.get(digest, []))
        return seed, digest


@asynccontextmanager
async def access_site(directory: Path) -> AsyncIterator[AccessSite]:
    """A site whose tracker answers; at the end all of it stops."""
    async with AsyncExitStack() as stack:
        site = AccessSite(directory, stack)
        stack.push_async_callback(site.origin.close)
        await site.tracker.start()
        stack.push_async_callback(site.tracker.stop)
        yield site


class Running:
    """An agent that listens."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.socket = Path(os.path.join("/tmp", f"p2pdist-{os.getpid()}-{settings.host}-{free_port()}.sock"))
        self._runners: list[web.AppRunner] = []

    async def start(self) -> None:
        identity = await enter(self.settings)
        self.agent = agent = Agent(self.settings, identity)
        public, local = make_apps(agent)
        host, _, port = self.settings.address.rpartition(":")
        self._runners = [
            await listen(public, (host, int(port)), tls=ServerContext(agent.tls) if agent.tls else None),
            await listen_unix(local, self.socket),
        ]
        await agent.start()

    async def stop(self) -> None:
        await self.agent.stop()
        for runner in self._runners:
            runner._shutdown_timeout = 0.1
            await runner.cleanup()
        self._runners = []
        self.socket.unlink(missing_ok=True)

    @property
    def source(self) -> Source:
        return Source(self.settings.host, self.settings.address)


def certificate_of(
    tracker: AccessTracker, directory: Path, host: str, authority: Authority | None = None, *, join: str = ""
) -> Tls:
    """The contexts of a host with a certificate of the fleet, or of another authority, that names a
    join token."""
    directory.mkdir(parents=True, exist_ok=True)
    issuer, key = authority or tracker.authorities[-1], make_key()
    file, trusted = directory / f"{host}.pem", directory / f"{host}-authorities.pem"
    file.write_bytes(encode_key(key) + issuer.issue(make_request(key), "agent", host, now=time.time(), join=join))
    trusted.write_bytes(b"".join(each.pem for each in tracker.authorities))
    return Tls(TlsFiles(file, file, trusted))


__all__ = ["TRACKER_DNS", "AccessSite", "AccessTracker", "Running", "certificate_of", "free_port", "until"]


async def push_package(origin: LocalLayout, tag: str, content: bytes) -> Digest:
    """A package of one layer; returns the manifest's digest."""
    pieces = PieceList.of_stream(io.BytesIO(content), len(content))
    encoded = pieces.encode()
    await origin.write_document(content)
    notes = {PIECES_DIGEST: await origin.write_document(encoded), PIECES_SIZE: str(pieces.layout.piece_size)}
    layer = Descriptor(BLOB_TYPE, digest_of(content), len(content), notes)
    config = encode_config(Config())
    described = Descriptor(CONFIG_TYPE, await origin.write_document(config), len(config))
    lists = (Descriptor(PIECES_TYPE, pieces.digest, len(encoded)),)
    manifest = encode_manifest(Manifest(described, (layer,), lists))
    digest = await origin.write_document(manifest)
    await origin.tag(parse_reference(tag), Descriptor(MANIFEST_TYPE, digest, len(manifest)))
    return digest
