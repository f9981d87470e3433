"""The door for clients of hubs on this agent: its routes, what its clients may read, and the bytes
of files, from the store or while the swarm brings them.

It is on the mirror's port on loopback, so that its clients are processes of this host.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, Metric

from p2pdist.agent.agent import Agent
from p2pdist.agent.models.models import Commit
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.credentials.tokens import PREFIX as FLEET_PREFIX
from p2pdist.gateway.huggingface.counts import HubCounts
from p2pdist.gateway.huggingface.door import BEGIN_S, HubDoor, Late, Sent
from p2pdist.gateway.huggingface.failures import HubErrorDocument
from p2pdist.gateway.huggingface.names import PREFIX
from p2pdist.gateway.registry.credentials import parse_credential
from p2pdist.model.hub import HubFile, HubName, HubRevision, check_token
from p2pdist.store.blobs.blob import Blob
from p2pdist.transfer.connections import in_use
from p2pdist.transfer.guard import identity_of
from p2pdist.transfer.openapi import Answer, Query, Route
from p2pdist.transfer.stream.ranges import RangeOptions, Unsatisfiable, parse_range, serve_range

IDLE_S = 60.0
"""A client that takes nothing of what is there for it for so long is left: it goes on with a Range
when it is back."""

BYTES_TYPE = "application/octet-stream"


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
        self._agent = agent
        self._beginning: set[asyncio.Task[tuple[Blob, BlobPull | None]]] = set()
        """Fetches that have not begun yet."""

    async def send(
        self,
        request: web.Request,
        name: HubName,
        commit: str,
        file: HubFile,
        token: str,
        headers: Mapping[str, str],
        deadline: float,
    ) -> Sent:
        """Answer a GET for a file, or for ranges of it; see gateway.huggingface.door.Bodies."""
        agent = self._agent
        if not file.sha256 or not file.size:
            try:
                async with asyncio.timeout_at(deadline):
                    data = await agent.models.content(name, commit, file, token) if file.size else b""
            except TimeoutError:
                raise Late(f"{file.path} does not come within {BEGIN_S:.0f} s", remedy="Ask again") from None
            agent.doored.bytes["tracker"] += len(data)
            return Sent(_small(request, data, headers))
        with contextlib.ExitStack() as stack:
            stack.enter_context(in_use(request))
            stack.enter_context(agent.registry.clients.asking(file.digest))
            begun = asyncio.create_task(self._begin(name, commit, file, token))
            self._beginning.add(begun)
            begun.add_done_callback(self._begun)
            try:
                async with asyncio.timeout_at(deadline):
                    blob, pull = await asyncio.shield(begun)  # which goes on for the next request
            except TimeoutError:
                raise Late(f"{file.path} does not begin within {BEGIN_S:.0f} s", remedy="Ask again") from None
            stack.enter_context(blob.held())
            return await self._send(request, blob, pull, file, headers, deadline)

    async def _begin(self, name: HubName, commit: str, file: HubFile, token: str) -> tuple[Blob, BlobPull | None]:
        """The blob, and its pull unless it is complete."""
        agent = self._agent
        stored = agent.store.get(file.digest)
        if stored is not None and stored.complete:  # clients compare nothing before they read
            await asyncio.to_thread(agent.store.integrity.look, [file.digest])
        return await agent.models.fetch(name, commit, file, token)

    def _begun(self, task: asyncio.Task[tuple[Blob, BlobPull | None]]) -> None:
        self._beginning.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: there may be no request that waits

    async def _send(
        self,
        request: web.Request,
        blob: Blob,
        pull: BlobPull | None,
        file: HubFile,
        headers: Mapping[str, str],
        deadline: float,
    ) -> Sent:
        source, counted, sent = "store" if pull is None else "swarm", self._agent.doored.bytes, 0

        def count(length: int) -> None:
            nonlocal sent
            sent += length
            counted[source] += length

        body, opened = pull.body() if pull is not None else None, blob.files.opened or blob.in_memory
        response = await serve_range(
            request,
            blob.digest,
            blob.fileno() if opened else await asyncio.to_thread(blob.fileno),
            blob.layout,
            have=blob.have if body is not None else None,
            wait_for=body.piece if body is not None else None,
            proven=body.proven if body is not None else None,
            disk=not blob.in_memory,
            options=RangeOptions(
                headers, begin_by=deadline, sent=count, idle_s=IDLE_S, etag=file.etag, late_begin=True
            ),
        )
        expected = response.content_length if response.status in (200, 206) else 0
        return Sent(response, sent >= (expected or 0))


def _small(request: web.Request, data: bytes, headers: Mapping[str, str]) -> web.Response:
    """A small file, or a range of it."""
    try:
        span = parse_range(request.headers.get("Range", ""), len(data))
    except Unsatisfiable:
        sent = {**headers, "Content-Range": f"bytes */{len(data)}"}
        return web.Response(status=416, headers=sent)
    condition = request.headers.get("If-Range", headers["ETag"]).strip()
    if span is None or condition != headers["ETag"]:
        return web.Response(body=data, content_type=BYTES_TYPE, headers=headers)
    start, end = span
    sent = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
    return web.Response(status=206, body=data[start:end], content_type=BYTES_TYPE, headers=sent)


# -- routes

_ERRORS = tuple(Answer(HubErrorDocument, status) for status in (400, 401, 403, 404, 416, 429, 502, 503))


def hub_routes(agent: Agent) -> tuple[Route, ...]:
    """The routes of the door."""
    door = HubDoor(AgentRepositories(agent), FileBodies(agent), agent.doored)
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
    name, text = "p2pdist_agent_hub_requests", "Requests of clients of model hubs"
    requests = CounterMetricFamily(name, text, labels=["kind", "result"])
    for labels, number in sorted(dict(counts.requests).items()):
        requests.add_metric(labels, number)
    yield requests
    name, text = "p2pdist_agent_hub_bytes", "Bytes of files given to clients of model hubs"
    moved = CounterMetricFamily(name, text, labels=["source"])
    for source, length in sorted(dict(counts.bytes).items()):
        moved.add_metric([source], length)
    yield moved
