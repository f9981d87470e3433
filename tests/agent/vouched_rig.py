"""A small registry, a tracker and agents in this process, over real sockets: agents pull a blob of
which nobody has made a piece list."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from ports import free_pair, free_port

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.server import make_apps
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable
from p2pdist.store.blobs.blob import Blob
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.service import Service

Change = Callable[[bytes, int], bytes | Awaitable[bytes]]


@dataclass
class Upstream:
    """Serves one blob by ranges, and counts what it sends. `change` makes other bytes of a range
    that begins at an offset."""

    data: bytes
    sent: Counter[int] = field(default_factory=Counter)
    """How often each range was sent, by its offset."""
    bytes_sent: int = 0
    change: Change = lambda data, start: data
    url: str = ""
    rate_bytes_s: float = 0.0
    """How fast each range is sent; 0 for at once."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        start, end = (int(match[1]), int(match[2]) + 1) if match else (0, len(self.data))
        data = self.change(self.data[start:end], start)
        if not isinstance(data, bytes):
            data = await data
        if self.rate_bytes_s:
            await asyncio.sleep(len(data) / self.rate_bytes_s)
        self.sent[start] += 1
        self.bytes_sent += len(data)
        return web.Response(body=data, status=206 if match else 200)

    @property
    def copies(self) -> float:
        """How often it sent the blob."""
        return self.bytes_sent / len(self.data)


class UpstreamClient:
    """Reads ranges of an upstream, as UpstreamRepository does."""

    def __init__(self, upstream: Upstream, host: str) -> None:
        self._upstream, self._host, self.repository = upstream, host, "upstream/app"
        self._http = aiohttp.ClientSession()
        self.change: Callable[[bytes, int], bytes] = lambda data, start: data
        """What this host alone gets instead."""
        self.bytes_read = 0

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        try:
            async with self._http.get(self._upstream.url, headers=headers) as response:
                if response.status >= 400:
                    raise Unavailable(f"the upstream answers {response.status}")
                data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the upstream does not answer: {error}") from error
        if len(data) != length:
            raise Corrupt(f"{len(data)} bytes came instead of {length}")
        self.bytes_read += length
        return self.change(data, start)

    async def close(self) -> None:
        await self._http.close()


@dataclass
class Host:
    """An agent, and its view of the upstream."""

    agent: Agent
    upstream: UpstreamClient
    stack: AsyncExitStack
    port: int

    async def begin(self, blob: Digest, size: int, **more: Any) -> tuple[Blob, BlobPull | None]:
        return await self.agent.vouched_blobs.fetch_vouched(blob, size, self.upstream, **more)

    async def pull(self, data: bytes, *, within_s: float = 60.0) -> Blob:
        """Pull a blob and wait for it. Raises its failure."""
        blob, pull = await self.begin(digest_of(data), len(data))
        if pull is not None:
            await asyncio.wait_for(asyncio.shield(pull.done), within_s)
        return blob

    @property
    def peers_bytes(self) -> int:
        return self.agent.resources.received_bytes["peer"]

    async def stop(self) -> None:
        await self.stack.aclose()


class Site:
    """The tracker, the upstream and the agents."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory, self._stack = directory, stack
        self.upstream = Upstream(b"")
        self.service: Service | None = None
        self.hosts: dict[str, Host] = {}
        self.url = ""
        self._tracker: AsyncExitStack | None = None
        self._port = free_port()

    async def start(self, data: bytes) -> None:
        self.upstream.data = data
        app = web.Application()
        app.router.add_get("/blob", self.upstream.serve)
        port = await serve(self._stack, app, 0)
        self.upstream.url = f"http://127.0.0.1:{port}/blob"
        await self.start_tracker()

    async def start_tracker(self) -> None:
        """Start a tracker that knows nothing, at the address of the one before."""
        self._tracker = stack = AsyncExitStack()
        self._stack.push_async_callback(stack.aclose)
        loop = asyncio.get_running_loop()
        self.service = service = Service(Fleet(started_at=loop.time()), Content(None))
        running = asyncio.create_task(service.run())
        stack.callback(running.cancel)
        self._port = await serve(stack, make_app(service), self._port)
        self.url = f"http://127.0.0.1:{self._port}"

    @property
    def liars(self) -> list[str]:
        """The hosts that the tracker blames."""
        assert self.service is not None
        return list(self.service.fleet.vouching.liars.until)

    async def stop_tracker(self) -> None:
        """Lose the tracker."""
        assert self._tracker is not None
        await self._tracker.aclose()

    async def agent(self, name: str, *, tracked: bool = True, **more: Any) -> Host:
        """Start an agent, maybe for the second time."""
        stack = AsyncExitStack()
        self._stack.push_async_callback(stack.aclose)
        port = free_pair()
        urls = (self.url,) if tracked else ()
        agent = Agent(AgentSettings(urls, name, f"127.0.0.1:{port}", self.directory / name, **more))
        stack.push_async_callback(agent.stop)
        public, _ = make_apps(agent)
        upstream = UpstreamClient(self.upstream, name)
        stack.push_async_callback(upstream.close)
        await serve(stack, public, port)
        await agent.start()
        if tracked and self._tracker is not None:
            assert await agent.session.wait_connected(60)
        self.hosts[name] = host = Host(agent, upstream, stack, port)
        return host

    async def agents(self, count: int, **more: Any) -> list[Host]:
        return [await self.agent(f"h{number}", **more) for number in range(1, count + 1)]


async def serve(stack: AsyncExitStack, app: web.Application, port: int) -> int:
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    return int(runner.addresses[0][1])


async def pull_all(hosts: list[Host], data: bytes, *, within_s: float = 60.0) -> list[Blob | P2PDistError]:
    """Have all hosts pull a blob at once; what became of each."""

    async def pull(host: Host) -> Blob | P2PDistError:
        try:
            return await host.pull(data, within_s=within_s)
        except P2PDistError as error:
            return error

    return list(await asyncio.gather(*map(pull, hosts)))


def is_whole(blob: object, data: bytes) -> bool:
    """Whether a blob is complete, and is this."""
    return isinstance(blob, Blob) and blob.complete and blob.path.read_bytes() == data
