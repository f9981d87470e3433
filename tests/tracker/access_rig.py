"""A tracker with access control over real TLS on loopback, a real layout with packages of several
namespaces, and clients of every kind."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from torrent_rig import TorrentSite
from yarl import URL

from p2pdist.credentials.authority import TRACKER_DNS, encode_key, make_key, make_request, pinned
from p2pdist.credentials.join import JoinToken
from p2pdist.credentials.tokens import create_token
from p2pdist.model.digest import Digest
from p2pdist.model.errors import from_problem
from p2pdist.model.manifest import decode_manifest, parse_reference
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    FromAgent,
    FromTracker,
    Hello,
    Joined,
    JoinRequest,
    decode_from_tracker,
    encode,
)
from p2pdist.model.upstream import UpstreamSettings
from p2pdist.origin.drivers import open_origin
from tracker.access.control import AccessControl
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.preseed_service import PreseedService
from tracker.service import Service
from tracker.state.documents import Documents
from tracker.state.preseeds import PreseedDatabase
from tracker.upstreams.hubs import Hubs
from tracker.upstreams.upstreams import Upstreams

ACCESS = """
fleet = "prod"
public = ["public/*"]

[join.default]
read = ["*"]

[join.a]
read = ["team-a/*"]
zones = ["z1", "z2"]

[role.slurm]
may = ["preseed", "rank"]
read = ["team-a/*"]

[role.other]
may = ["preseed", "rank"]
read = ["team-b/*"]

[role.ops]
may = ["preseed", "rank", "cancel-any", "watch", "metrics"]
read = ["*"]

[role.reader]
read = ["team-a/*"]

[role.scraper]
may = ["metrics"]
"""

PACKAGES = ("team-a/x:v1", "team-b/y:v1", "public/z:v1")
SIZE = 200_000
LOOK_S = 0.05
"""How often its tracker looks at the access file, and says what changed to those that watch."""


class AccessSite:
    """The tracker, its access file at `path`, and the packages: `manifests` and `layers` by
    reference."""

    def __init__(self, directory: Path, control: AccessControl, service: Service, preseeds: PreseedService) -> None:
        self.directory, self.control, self.service, self.preseeds = directory, control, service, preseeds
        self.path = control.directory.path
        self.app: web.Application
        """Set once it is made."""
        self.port = 0
        self.manifests: dict[str, Digest] = {}
        self.layers: dict[str, Digest] = {}
        self.documents: dict[str, list[Digest]] = {}
        self._clients: list[aiohttp.ClientSession] = []

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def join_token(self, name: str = "default") -> JoinToken:
        return JoinToken.parse(self.control.directory.join_token(name).read_text())

    def token(self, role: str, *, name: str = "", lasts_s: float = 3600.0, now: float | None = None) -> str:
        """A token of a role, as `p2pdist token create` makes it."""
        state = self.control.state
        text, record = create_token(
            state.signing[0],
            state.rules.fleet,
            state.authorities[0].fingerprint,
            role,
            name=name,
            now=time.time() if now is None else now,
            lasts_s=lasts_s,
        )
        self.control.directory.note_token(record)
        return text

    async def authorities(self) -> bytes:
        """What the tracker states to a client that trusts nothing yet."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/v1/access/authorities", ssl=False) as answer:
            assert answer.status == 200
            return await answer.read()

    def trusting(self, authority: bytes) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=authority.decode())
        return context

    def client(self, context: ssl.SSLContext, token: str = "") -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        http = aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(ssl=context), headers=headers)
        self._clients.append(http)
        return http

    async def stranger(self, token: str = "") -> aiohttp.ClientSession:
        """A client without certificate, perhaps with a token."""
        return self.client(self.trusting(pinned(await self.authorities(), self.join_token().pin)), token)

    async def join(
        self,
        host: str,
        name: str = "default",
        *,
        addresses: Sequence[str] = ("127.0.0.1",),
        token: JoinToken | None = None,
    ) -> Agent:
        """A host joins as an agent does: authorities, pin, then the token over verified TLS."""
        token = token or self.join_token(name)
        authority = pinned(await self.authorities(), token.pin)
        key = make_key()
        http = self.client(self.trusting(authority))
        body = JoinRequest(str(token), host, make_request(key).decode(), tuple(addresses))
        joined = msgspec.json.decode(await ask(http, "POST", "/v1/join", body), type=Joined)
        context = self.trusting(joined.authorities.encode())
        file = self.directory / f"agent-{time.monotonic_ns()}.pem"
        file.write_bytes(encode_key(key) + joined.certificate.encode())
        context.load_cert_chain(file)
        return Agent(self, host, joined, self.client(context), context)

    async def close(self) -> None:
        for http in self._clients:
            await http.close()


class Agent:
    """A host that has joined."""

    def __init__(
        self, site: AccessSite, host: str, joined: Joined, http: aiohttp.ClientSession, context: ssl.SSLContext
    ) -> None:
        self.site, self.host, self.joined, self.http, self.context = site, host, joined, http, context

    async def session(self, *, host: str = "", address: str = "127.0.0.1:7071", zone: str = "z1") -> Session:
        socket = await self.http.ws_connect("/v1/session", server_hostname=TRACKER_DNS)
        await socket.send_str(encode(Hello(PROTOCOL_VERSION, host or self.host, address, zone)).decode())
        return Session(socket)


class Session:
    """An open session, spoken by hand."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def say(self, message: FromAgent) -> None:
        await self.socket.send_str(encode(message).decode())

    async def hear(self, kind: type[Any]) -> Any:
        """The next message of a kind."""
        async with asyncio.timeout(60):
            while True:
                message: FromTracker = decode_from_tracker(await self.socket.receive_str())
                if isinstance(message, kind):
                    return message

    async def ended(self) -> None:
        """Returns when the tracker has ended it."""
        async with asyncio.timeout(60):
            while (await self.socket.receive()).type is aiohttp.WSMsgType.TEXT:
                pass


async def ask(http: aiohttp.ClientSession, method: str, path: str | URL, body: Any = None, **more: Any) -> bytes:
    """The body of an answer. Raises the failure that the tracker reports."""
    data = msgspec.json.encode(body) if body is not None else None
    async with http.request(method, path, data=data, server_hostname=TRACKER_DNS, **more) as answer:
        content = await answer.read()
        if answer.status >= 400:
            raise from_problem(msgspec.json.decode(content))
        return content


@asynccontextmanager
async def access_site(
    directory: Path,
    access: str = ACCESS,
    *,
    state: Path | None = None,
    control: AccessControl | None = None,
    upstreams: Sequence[UpstreamSettings] = (),
    hub: str = "",
) -> AsyncIterator[AccessSite]:
    """A tracker at an access file, over the layout below `directory`."""
    path = directory / "access" / "access.toml"
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(access)
        path.chmod(0o600)
    control = control or AccessControl(path, ["127.0.0.1", "localhost"])
    documents = Documents(state) if state is not None else None
    origin_path = directory / "origin"
    (origin_path / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    registries, hubs = Upstreams(upstreams, documents), Hubs(hub, documents)
    service = Service(
        Fleet(started_at=time.monotonic()),
        Content(open_origin(origin_path.as_uri()), documents),
        access=control,
        upstreams=registries,
        hubs=hubs,
    )
    preseeds = service.listener = PreseedService(service, PreseedDatabase(str(state) if state is not None else ""))
    await preseeds.load()
    site = AccessSite(directory, control, service, preseeds)
    await _publish(site, origin_path)
    site.app = make_app(service, preseeds)
    runner = web.AppRunner(site.app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=control.tls.context).start()
    site.port = runner.addresses[0][1]
    tasks = [asyncio.create_task(each) for each in (service.run(), preseeds.run(), control.watch())]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tracker.access.control.POLL_S", LOOK_S)
            yield site
    finally:
        await site.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()
        await preseeds.stop()
        await registries.close()
        await hubs.close()
        if documents is not None:
            documents.close()


async def _publish(site: AccessSite, directory: Path) -> None:
    """Packages of one layer each, unless they are there."""
    origin = open_origin(directory.as_uri())
    async with aiohttp.ClientSession() as http:
        publisher = TorrentSite(directory, origin, site.service, http)
        for name in PACKAGES:
            reference = parse_reference(name)
            if not (directory / "index.json").exists() or name not in (directory / "index.json").read_text():
                await publisher.publish_package(reference, [os.urandom(SIZE)])
            descriptor = await origin.resolve(reference)
            manifest = decode_manifest(await origin.read(descriptor.digest))
            site.manifests[name], site.layers[name] = descriptor.digest, manifest.blobs[0].digest
            site.documents[name] = [document.digest for document in manifest.documents()]
