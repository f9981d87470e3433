"""The mirror on this agent: its routes, what its clients may read, and the bytes of blobs, from the
store or while the swarm brings them.

A client on the mirror's own port on loopback is a process of this host: what it asks for is fetched
as for the host's own pulls. A client at the agent's TCP port is one of the network: it shares the
uplink with streams, and what is fetched for it evicts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client.core import Metric

from p2pdist.agent.agent import Agent
from p2pdist.agent.api.counters import counter_family
from p2pdist.agent.api.guard import serving
from p2pdist.agent.api.hub import hub_routes, make_door
from p2pdist.agent.bodies import BYTES_TYPE, BlobBodies, Brought, counting, demanded
from p2pdist.agent.images.credentials import upstream_lets
from p2pdist.agent.pull.blob import BlobPull, Body
from p2pdist.core.stream_slots import Peer
from p2pdist.credentials.tokens import PREFIX
from p2pdist.gateway.answers import Sent
from p2pdist.gateway.registry.admission import Admission
from p2pdist.gateway.registry.counts import MirrorCounts
from p2pdist.gateway.registry.credentials import Credential, parse_credential
from p2pdist.gateway.registry.failures import ErrorDocument
from p2pdist.gateway.registry.mirror import VERSION, Mirror
from p2pdist.gateway.registry.names import RegistryRequest
from p2pdist.model.access import OPEN, Identity
from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound, Unauthenticated
from p2pdist.model.image import ImageName
from p2pdist.model.image_manifest import ImageDocument, TagPage
from p2pdist.store.blobs.blob import Blob
from p2pdist.transfer.audit import Window
from p2pdist.transfer.connections import address_key
from p2pdist.transfer.documents import large_answers
from p2pdist.transfer.guard import Identify, OwnNames, guard, identity_of, peer_of
from p2pdist.transfer.openapi import Answer, Query, Route, route_of, serve
from p2pdist.transfer.problems import name_request, problems
from p2pdist.transfer.stream.ranges import RangeOptions

RANGES_MAX = 256
"""Ranges of one request; one with more gets the whole blob."""

IDLE_S = 60.0
"""A client that takes nothing of what is there for it for so long is left: requests are limited,
and it goes on with a Range when it is back."""

BODY_BYTES_MAX = 1 << 20
WRONG_CREDENTIALS_MAX = 20
"""Credentials of one address of the network that upstreams did not take, in WINDOW_S (audit.py). A
process of this host can ask them itself, from the same address."""


class WrongByAddress:
    """Counts wrong credentials by the address of clients; see gateway.registry.admission."""

    def __init__(self) -> None:
        self._window = Window(WRONG_CREDENTIALS_MAX)

    def full(self, request: web.Request) -> bool:
        """Whether the address has shown as many as it may for now."""
        return self._window.full(address_key(request.remote or ""))

    def add(self, request: web.Request) -> None:
        """The address has shown one."""
        self._window.add(address_key(request.remote or ""))


class AgentImages:
    """What this agent knows of images, as the mirror asks for it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def known_upstreams(self) -> Collection[str]:
        """The names of upstreams that are configured, as far as is known here."""
        return frozenset(upstream.name for upstream in self._agent.images.upstreams)

    def keeps(self, name: ImageName, target: str) -> bool:
        """Whether a manifest is in this host's store."""
        return self._agent.store.images.get(str(name), target) is not None

    async def manifest(self, name: ImageName, target: str) -> ImageDocument:
        """A manifest or index by tag or digest."""
        return await self._agent.images.manifest(name, target)

    async def tags(self, name: ImageName, count: int, last: str) -> TagPage:
        """Up to `count` tags after the tag `last`."""
        return await self._agent.images.tags(name, count, last)

    async def referrers(self, name: ImageName, digest: Digest, artifact_type: str) -> ImageDocument:
        """The index of what refers to a manifest."""
        return await self._agent.images.referrers(name, digest, artifact_type)

    async def blob_size(self, name: ImageName, digest: Digest) -> int:
        """The size of a blob of an image."""
        return await self._agent.images.blob_size(name, digest)

    async def confirm(self, name: ImageName, digest: Digest) -> None:
        """Raises NotFound unless the registry has a blob in this repository."""
        await self._agent.images.confirmed.require(name, digest)

    async def fetch_blob(self, name: ImageName, digest: Digest) -> tuple[Blob, BlobPull | None]:
        """A blob of an image, and its pull, started or joined; None when the blob is complete."""
        return await self._agent.images.fetch_blob(name, digest)

    async def lets(self, asked: RegistryRequest, credential: Credential) -> bool:
        """Whether the upstream itself gives `asked` to the bearer of `credential`."""
        upstreams = self._agent.images.upstreams
        upstream = next((known for known in upstreams if known.name == asked.name.upstream), None)
        if upstream is None:
            raise NotFound(f"{asked.name.upstream} is no upstream here")
        path = {"blob": f"blobs/{asked.target}", "tags": "tags/list?n=1"}.get(asked.kind, f"manifests/{asked.target}")
        return await upstream_lets(upstream, asked.name, path, user=credential.user, secret=credential.secret)


class ImageBodies:
    """Sends blobs of images to clients of one port. On the event loop."""

    def __init__(self, agent: Agent, images: AgentImages, *, loopback: bool) -> None:
        self._agent, self._images, self._loopback = agent, images, loopback
        self._blobs = BlobBodies(agent.store, counting(agent.mirrored.bytes), agent.registry.clients)

    async def send(self, request: web.Request, name: ImageName, digest: Digest, deadline: float) -> Sent:
        """Answer a GET for a blob, or for ranges of it; see gateway.registry.mirror.Bodies."""
        headers = {"Docker-Content-Digest": str(digest), **VERSION}
        options = RangeOptions(headers, RANGES_MAX, deadline, idle_s=IDLE_S)
        if self._loopback:
            fetch, read = partial(self._images.fetch_blob, name, digest), partial(_reading, request)
            return await self._blobs.send(request, digest, fetch, options, read=read)
        agent, peer = self._agent, Peer(address_key(request.remote or ""))
        with contextlib.ExitStack() as stack:
            flow = agent.uplink.open_range(peer=peer, cut=partial(_cut, request))
            stack.callback(flow.close)
            stack.enter_context(agent.readers.reading(digest))
            stack.enter_context(serving(agent, request, flow))
            bring = partial(self._bring, request, name, digest)
            return await self._blobs.send(request, digest, bring, options, flow=flow)

    async def _bring(self, request: web.Request, name: ImageName, digest: Digest) -> Brought:
        """The blob for a client of the network."""
        agent, images = self._agent, self._images
        stored = agent.store.get(digest)
        if stored is not None and stored.complete:
            return await images.fetch_blob(name, digest)
        found: list[Brought] = []

        async def fetch() -> BlobPull | None:
            found[:] = [await images.fetch_blob(name, digest)]
            return found[0][1]

        await agent.readers.bring(
            digest, address_key(request.remote or ""), partial(images.blob_size, name, digest), fetch
        )
        return found[0]


def _reading(request: web.Request, pull: BlobPull) -> Body:
    """Ranges that a program of this host asks for, such as a lazy snapshotter, come before all else
    where a piece list lets them be given early."""
    if request.headers.get("Range", "") and pull.vouched is None:
        return demanded(request, pull, ranges_max=RANGES_MAX)
    return pull.body()


def _cut(request: web.Request) -> None:
    """Break the connection of a request."""
    if request.transport is not None:
        request.transport.abort()


# -- what clients may read


def image_identities(agent: Agent, *, loopback: bool) -> Identify:
    """The identities of requests for images: a host of the fleet, the bearer of a token, or a
    client of which nothing is known. All may read public packages; on loopback also what the rule
    for mirrors lists."""

    async def identify(request: web.Request) -> Identity:
        peers = agent.access.peers
        if not peers.on:
            return OPEN
        peers.require_here()
        free = peers.public.joined(peers.local.mirror) if loopback else peers.public
        certificate = peer_of(request)
        if host := peers.host_in(certificate):
            join = peers.join_in(certificate)
            peers.require(host, join)
            return Identity("agent", host, frozenset({"open", "agent"}), free, credential=f"join:{join}")
        bearer = _bearer(peers.bearer, parse_credential(request.headers.get("Authorization", "")).secret)
        if bearer is None:
            return Identity("anonymous", read=free)
        return Identity(bearer.kind, bearer.name, bearer.rights, bearer.read.joined(free), credential=bearer.credential)

    return identify


def _bearer(find: Callable[[str], Identity], secret: str) -> Identity | None:
    """The identity of the bearer of a token of this fleet; None for what may be an upstream's.
    Raises Unauthenticated."""
    if secret.startswith(PREFIX):
        return find(secret)
    if secret.count(".") != 2:
        return None
    try:
        return find(secret)
    except Unauthenticated:
        return None


# -- routes


_ERRORS = tuple(Answer(ErrorDocument, status) for status in (400, 401, 403, 404, 416, 503))
_NS = Query("ns", "the upstream, by the host that references name it by")


def mirror_routes(mirror: Mirror) -> tuple[Route, ...]:
    """The routes of a mirror, at whichever port."""
    return (
        Route("GET", "/v2/", mirror.base, (Answer(dict[str, Any]), *_ERRORS), right="image"),
        Route(
            "GET",
            "/v2/token",
            mirror.token,
            (Answer(dict[str, Any]), *_ERRORS),
            (Query("service", "ignored"), Query("scope", "ignored")),
            right="image",
        ),
        Route(
            "GET",
            "/v2/{path:.+}",
            mirror.image,
            (Answer(media_type=BYTES_TYPE), Answer(status=206, media_type=BYTES_TYPE), *_ERRORS),
            (
                _NS,
                Query("n", "tags of a page"),
                Query("last", "the tag before the page"),
                Query("artifactType", "the type of referrers"),
            ),
            right="image",
        ),
    )


def make_mirror(agent: Agent, *, loopback: bool) -> Mirror:
    """The mirror of an agent, for one of its ports."""
    images = AgentImages(agent)
    wrong = None if loopback else WrongByAddress()
    admission = Admission(identity_of, images, lambda: asyncio.get_running_loop().time(), wrong)
    return Mirror(images, ImageBodies(agent, images, loopback=loopback), admission, agent.mirrored)


def make_mirror_app(agent: Agent) -> web.Application:
    """The application for the mirror's own port on loopback, in plain."""
    mirror, door = make_mirror(agent, loopback=True), make_door(agent)
    identify = image_identities(agent, loopback=True)
    app = web.Application(
        middlewares=[problems, mirror.failures, door.failures, guard(identify, names=OwnNames()), large_answers()],
        client_max_size=BODY_BYTES_MAX,
    )
    app.on_response_prepare.append(name_request)
    title = "p2pdist agent, as a mirror of container registries and a door to a hub of models"
    serve(app, (*mirror_routes(mirror), *hub_routes(door)), title=title)
    return app


def with_images(identify: Identify, images: Identify) -> Identify:
    """Identities of requests at a port that serves other routes besides a mirror's."""

    async def either(request: web.Request) -> Identity:
        route = route_of(request)
        return await (images if route is not None and route.right == "image" else identify)(request)

    return either


def mirror_metrics(counts: MirrorCounts) -> Iterator[Metric]:
    """What the mirror has counted; called in a thread."""
    text = "Requests of clients of container registries"
    yield counter_family("p2pdist_agent_mirror_requests", text, ("kind", "result", "source"), counts.requests)
    text = "Bytes of images given to clients of registries"
    yield counter_family("p2pdist_agent_mirror_bytes", text, ("source",), counts.bytes)
    text = "Requests for manifests and blobs that were left to the registry itself"
    yield counter_family("p2pdist_agent_mirror_fallbacks", text, ("reason",), counts.fallbacks)
