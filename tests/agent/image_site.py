"""A tracker with upstreams, and agents, in this process and over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from aiohttp import web
from ports import free_pair, free_port

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.server import make_apps
from p2pdist.agent.pull.pulls import Pull
from p2pdist.model.messages import PullRequest
from p2pdist.model.upstream import UpstreamSettings
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.preseed_service import PreseedService
from tracker.service import Service
from tracker.state.documents import Documents
from tracker.state.preseeds import PreseedDatabase
from tracker.upstreams.hubs import Hubs
from tracker.upstreams.upstreams import Upstreams


async def serve(stack: AsyncExitStack, app: web.Application, port: int = 0) -> int:
    """Serve an application on loopback until the stack ends; returns the port."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    return int(runner.addresses[0][1])


class ImageSite:
    """The tracker, whose state is below `directory`, and the agents by name."""

    def __init__(
        self, directory: Path, stack: AsyncExitStack, upstreams: Sequence[UpstreamSettings], hub: str = ""
    ) -> None:
        self.directory, self._stack, self._upstreams, self._hub = directory, stack, upstreams, hub
        self.port = free_port()
        self.service: Service | None = None
        self.preseeds: PreseedService | None = None
        self.agents: dict[str, Agent] = {}
        self._tracker: AsyncExitStack | None = None
        self._running: dict[str, AsyncExitStack] = {}

    async def start_tracker(self) -> None:
        stack = self._tracker = AsyncExitStack()
        documents = Documents(self.directory / "state")
        stack.callback(documents.close)
        upstreams = Upstreams(self._upstreams, documents)
        stack.push_async_callback(upstreams.close)
        hubs = Hubs(self._hub, documents)
        stack.push_async_callback(hubs.close)
        fleet = Fleet(started_at=time.monotonic())
        service = self.service = Service(fleet, Content(None), upstreams=upstreams, hubs=hubs)
        preseeds = self.preseeds = service.listener = PreseedService(service, PreseedDatabase(""), grace_s=0.0)
        await preseeds.load()
        self.port = await serve(stack, make_app(service, preseeds), self.port)
        for work in (service.run(), preseeds.run()):
            stack.push_async_callback(_cancel, asyncio.create_task(work))

    async def stop_tracker(self) -> None:
        if self._tracker is not None:
            await self._tracker.aclose()
            self._tracker = None

    async def agent(self, name: str, *, upstreams: tuple[UpstreamSettings, ...] = (), tracker: bool = True) -> Agent:
        """Start an agent, and wait until the tracker answers it, if it has one."""
        stack = self._running[name] = AsyncExitStack()
        port = free_pair()
        settings = AgentSettings(
            (f"http://127.0.0.1:{self.port}",) if tracker else (),
            name,
            f"127.0.0.1:{port}",
            self.directory / f"store-{name}",
            tracker_wait_s=1.0,
            upstreams=upstreams,
        )
        agent = self.agents[name] = Agent(settings)
        stack.push_async_callback(agent.stop)
        public, _ = make_apps(agent)
        await serve(stack, public, port)
        await agent.start()
        if tracker and self._tracker is not None:
            assert await agent.session.wait_connected(60)
        return agent

    async def stop_agent(self, name: str) -> None:
        await self._running.pop(name).aclose()
        del self.agents[name]

    async def close(self) -> None:
        for name in list(self.agents):
            await self.stop_agent(name)
        await self.stop_tracker()


@asynccontextmanager
async def image_site(
    directory: Path, *upstreams: UpstreamSettings, tracker: bool = True, hub: str = ""
) -> AsyncIterator[ImageSite]:
    """A site whose tracker reads these upstreams, and this hub."""
    async with AsyncExitStack() as stack:
        site = ImageSite(directory, stack, upstreams, hub)
        try:
            if tracker:
                await site.start_tracker()
            yield site
        finally:
            await site.close()


async def pulled(agent: Agent, reference: str, within_s: float = 60.0) -> Pull:
    """Pull a package or image and wait. Raises its failure."""
    pull = agent.pulls.start(PullRequest(package=reference))
    assert pull.task is not None
    await asyncio.wait_for(asyncio.shield(pull.task), within_s)
    if pull.error is not None:
        raise pull.error
    return pull


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
