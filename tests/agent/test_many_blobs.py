"""A package of hundreds of small blobs from one agent to another, over real sockets and a real
tracker: what it costs in connections and in messages."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web
from ports import free_pair

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.server import make_apps
from p2pdist.agent.pull.pulls import SMALL_BLOBS_AT_ONCE
from p2pdist.model.digest import digest_of
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
    Reference,
    encode_config,
    encode_manifest,
    parse_reference,
)
from p2pdist.model.messages import FromAgent, Holding, Holdings, Report
from p2pdist.model.pieces import PieceList
from p2pdist.origin.layout import LocalLayout
from tracker.content import Content
from tracker.core.events import Event, Received
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.service import Service

TAGS = [parse_reference("team/many:v1"), parse_reference("team/many:v2")]
BLOBS = 200
ORIGIN_BYTES_S = 1e9
"""In two packages: one has 128 layers at most."""


async def push(origin: LocalLayout, tag: Reference, contents: list[bytes]) -> None:
    """A package with a layer for each of `contents`."""
    layers, lists = [], []
    for content in contents:
        pieces = PieceList.of_stream(io.BytesIO(content), len(content))
        encoded = pieces.encode()
        await origin.write_document(content)
        notes = {PIECES_DIGEST: await origin.write_document(encoded), PIECES_SIZE: str(pieces.layout.piece_size)}
        layers.append(Descriptor(BLOB_TYPE, digest_of(content), len(content), notes))
        lists.append(Descriptor(PIECES_TYPE, pieces.digest, len(encoded)))
    config = encode_config(Config())
    described = Descriptor(CONFIG_TYPE, await origin.write_document(config), len(config))
    manifest = encode_manifest(Manifest(described, tuple(layers), tuple(lists)))
    await origin.tag(tag, Descriptor(MANIFEST_TYPE, await origin.write_document(manifest), len(manifest)))


class Site:
    """A tracker and agents in this process. `said` is what the tracker heard; `callers` are the
    addresses from which agents were asked for streams, one for each connection, and `streams` how
    often they were."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory, self._stack = directory, stack
        self.origin = LocalLayout(directory / "origin")
        self.origin.scratch()
        self.said: list[FromAgent] = []
        self.callers: set[object] = set()
        self.streams = 0
        self._url = ""

    async def start(self) -> None:
        fleet = Fleet(started_at=-100.0, origin=self.origin.url, origin_bytes_s=ORIGIN_BYTES_S)
        service = Service(fleet, Content(self.origin))
        submit = service.submit

        def note(event: Event) -> None:
            if isinstance(event, Received):
                self.said.append(event.message)
            submit(event)

        service.submit = note  # type: ignore[method-assign]
        running = asyncio.create_task(service.run())
        self._stack.callback(running.cancel)
        self._url = f"http://127.0.0.1:{await self._serve(make_app(service), 0)}"

    async def agent(self, name: str) -> Agent:
        port = free_pair()
        agent = Agent(AgentSettings((self._url,), name, f"127.0.0.1:{port}", self.directory / name))
        self._stack.push_async_callback(agent.stop)
        public, _ = make_apps(agent)

        @web.middleware
        async def note(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if request.path == "/v1/streams":
                self.callers.add(request.get_extra_info("peername"))
                self.streams += 1
            return await handler(request)

        public.middlewares.append(note)
        await self._serve(public, port)
        await agent.start()
        assert await agent.session.wait_connected(60)
        return agent

    async def pull(self, agent: Agent) -> None:
        self.said.clear()
        for tag in TAGS:
            await asyncio.wait_for(agent.pulls.package(str(tag)), 60)

    async def _serve(self, app: web.Application, port: int) -> int:
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return int(runner.addresses[0][1])


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        made = Site(tmp_path, stack)
        await made.start()
        yield made
    await made.origin.close()


@pytest.mark.slow
async def test_two_hundred_small_blobs_share_connections_and_messages(site: Site) -> None:
    """From the origin to one agent, and from that to another."""
    contents = [os.urandom(1 + 331 * number) for number in range(BLOBS)]
    await push(site.origin, TAGS[0], contents[0::2])
    await push(site.origin, TAGS[1], contents[1::2])
    first, second = await site.agent("h1"), await site.agent("h2")
    await site.pull(first)
    assert site.streams == 0 and first.resources.received_bytes["origin"] == sum(map(len, contents))
    share = first.resources.origin_share
    assert share.limit_bytes_s == ORIGIN_BYTES_S and share.free_at > 0, "it alone reads, and pays for what it reads"
    await site.pull(second)
    assert second.resources.received_bytes == {"peer": sum(map(len, contents))}
    for content in contents:
        blob = second.store.get(digest_of(content))
        assert blob is not None and blob.complete and blob.path.read_bytes() == content
    assert BLOBS <= site.streams <= 2 * BLOBS, "one stream for each; on a busy machine some are asked for again"
    assert len(site.callers) <= SMALL_BLOBS_AT_ONCE
    joins = [message for message in site.said if isinstance(message, Holding | Holdings)]
    joined = [holding for join in joins for holding in (join.blobs if isinstance(join, Holdings) else (join,))]
    assert {holding.blob for holding in joined} == {digest_of(content) for content in contents}
    assert len(joins) < BLOBS and any(isinstance(join, Holdings) for join in joins), (
        "joins of one moment share a message"
    )
    ends = [message for message in site.said if isinstance(message, Report)]
    assert {advance.blob for report in ends for advance in report.blobs} >= {holding.blob for holding in joined[:-16]}
