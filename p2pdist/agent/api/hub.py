"""The door for clients of hubs on this agent: its routes, what its clients may read, and the bytes
of files, from the store or while the swarm brings them.

It is on the mirror's port on loopback, so that its clients are processes of this host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from aiohttp import web
from prometheus_client.core import Metric

from p2pdist.agent.agent import Agent
from p2pdist.agent.api.counters import counter_family
from p2pdist.agent.bodies import BYTES_TYPE, BlobBodies, counting
from p2pdist.agent.models.models import Commit
from p2pdist.credentials.tokens import PREFIX as FLEET_PREFIX
from p2pdist.gateway.answers import Sent, answer_by
from p2pdist.gateway.huggingface.counts import HubCounts
from p2pdist.gateway.huggingface.door import HubDoor, RepositoryFile
from p2pdist.gateway.huggingface.failures import HubErrorDocument
from p2pdist.gateway.huggingface.names import PREFIX
from p2pdist.gateway.registry.credentials import parse_credential
from p2pdist.model.hub import HubName, HubRevision, check_token
from p2pdist.transfer.guard import identity_of
from p2pdist.transfer.openapi import Answer, Query, Route
from p2pdist.transfer.stream.ranges import RangeOptions, Unsatisfiable, parse_range

IDLE_S = 60.0
"""A client that takes nothing of what is there for it for so long is left: it goes on with a Range
when it is back."""


class AgentRepositories:
    """The hub's repositories as this agent knows them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def admit(self, request: web.Request, name: HubName) -> str:
        """The token by which a client reads a repository; see gateway.huggingface.door."""
        identity = identity_of(request)
        identity.require_read([str(name)], str(name))
        credential = parse_credential(request.headers.get("Authorization", ""))
        own = identity.kind not in ("open", "anonymous") or credential.secret.startswith(FLEET_PREFIX)
        token = check_token("" if own or credential.kind != "bearer" else credential.secret)
        await self._agent.models.admit(name, token)
        return token

    async def revision(self, name: HubName, revision: str, token: str) -> HubRevision:
        """What a branch, tag or commit names."""
        return await self._agent.models.revision(name, revision, token)

    async def commit_of(self, name: HubName, revision: str, token: str) -> str:
        """The commit that a branch, tag or commit names."""
        return await self._agent.models.commit_of(name, revision, token)

    async def files(self, name: HubName, commit: str, token: str) -> Commit:
        """Everything in a commit."""
        return await self._agent.models.files(name, commit, token)

    async def refs(self, name: HubName, token: str) -> bytes:
        """The branches and tags of a repository."""
        return await self._agent.models.refs(name, token)


class FileBodies:
    """Sends files to clients of this host. On the event loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._counted = agent, agent.doored.bytes
        self._blobs = BlobBodies(agent.store, counting(self._counted), agent.registry.clients)

    async def send(
        self, request: web.Request, read: RepositoryFile, headers: Mapping[str, str], deadline: float
    ) -> Sent:
        """Answer a GET for a file, or for ranges of it; see gateway.huggingface.door.Bodies."""
        models, file = self._agent.models, read.file
        if file.sha256 and file.size:
            options = RangeOptions(headers, begin_by=deadline, idle_s=IDLE_S, etag=file.etag, late_begin=True)
            fetch = partial(models.fetch, read.name, read.commit, file, read.token)
            return await self._blobs.send(request, file.digest, fetch, options)
        data = b""
        if file.size:
            data = await answer_by(deadline, models.content(read.name, read.commit, file, read.token))
        self._counted["tracker"] += len(data)
        return Sent(_small(request, data, headers))


def _small(request: web.Request, data: bytes, headers: Mapping[str, str]) -> web.Response:
    """A small file, or a range of it."""
    try:
        span = parse_range(request.headers.get("Range", ""), len(data))
    except Unsatisfiable:
        sent = {**headers, "Content-Range": f"bytes */{len(data)}"}
        return web.Response(status=416, headers=sent)
    condition = request.headers.get("If-Range", headers["ETag"]).strip()
    if span is None or condition != headers["ETag"]:
        if not data and "Range" in request.headers:  # Hugging Face's client in JavaScript reads the size there
            headers = {**headers, "Content-Range": "bytes */0"}
        return web.Response(body=data, content_type=BYTES_TYPE, headers=headers)
    start, end = span
    sent = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
    return web.Response(status=206, body=data[start:end], content_type=BYTES_TYPE, headers=sent)


# -- routes

_ERRORS = tuple(Answer(HubErrorDocument, status) for status in (400, 401, 403, 404, 416, 429, 502, 503))


def make_door(agent: Agent) -> HubDoor:
    """The door of an agent."""
    return HubDoor(AgentRepositories(agent), FileBodies(agent), agent.doored)


def hub_routes(door: HubDoor) -> tuple[Route, ...]:
    """The routes of a door."""
    path = PREFIX + "/{path:.+}"
    return (
        Route(
            "GET",
            path,
            door.read,
            (Answer(media_type=BYTES_TYPE), Answer(), Answer(status=206, media_type=BYTES_TYPE), *_ERRORS),
            (
                Query("recursive", "true: a tree with what is in its directories"),
                Query("expand", "ignored"),
                Query("limit", "entries of a page"),
                Query("cursor", "where the page begins"),
                Query("blobs", "true: files with their sizes"),
            ),
            right="image",
        ),
        Route("POST", path, door.ask_paths, (Answer(), *_ERRORS), right="image"),
    )


def hub_metrics(counts: HubCounts) -> Iterator[Metric]:
    """What the door has counted; called in a thread."""
    text = "Requests of clients of model hubs"
    yield counter_family("p2pdist_agent_hub_requests", text, ("kind", "result"), counts.requests)
    yield counter_family(
        "p2pdist_agent_hub_bytes", "Bytes of files given to clients of model hubs", ("source",), counts.bytes
    )
