"""Images while something is late: a tracker that hangs, as a stopped process does, whose host keeps
its connections; an upstream that does not answer; and clients that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from image_rig import Made, Odd, make_image
from image_site import ImageSite, image_site, pulled, serve
from waits import until

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.mirror import make_mirror_app
from p2pdist.agent.images import images as images_module
from p2pdist.agent.pull import registry as registry_module
from p2pdist.agent.tracker import connection
from p2pdist.agent.tracker import session as session_module
from p2pdist.gateway.registry.mirror import BEGIN_S
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, NotFound
from p2pdist.model.image import image_name
from p2pdist.model.messages import PullRequest
from p2pdist.model.pieces import PieceSet
from p2pdist.model.upstream import parse_upstream

LAYERS = ({"bin/hello": b"#!/bin/sh\necho hello\n"}, {"data": bytes(range(256)) * 2000})
WAIT_S = 30.0


class Relay:
    """Passes connections on to a port, until it is frozen: then it takes connections, as the host
    of a stopped process does, and nothing comes of them."""

    def __init__(self) -> None:
        self.port, self.target, self.frozen = 0, 0, asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.frozen.is_set():
            await asyncio.Event().wait()
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.target)
        try:
            await asyncio.gather(self._pass(reader, other_writer), self._pass(other_reader, writer))
        finally:
            writer.close()
            other_writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.frozen.is_set():
                await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    async with Relay().running() as running:
        yield running


@pytest.fixture
async def site(odd: Odd, relay: Relay, tmp_path: Path) -> AsyncIterator[ImageSite]:
    """Agents reach the tracker through the relay."""
    async with image_site(tmp_path, parse_upstream(odd.address)) as running:
        relay.target, running.port = running.port, relay.port
        yield running


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as running:
        yield running


def publish(odd: Odd) -> Made:
    image = make_image(*LAYERS)
    odd.put("team/app", "v1", image)
    return image


async def mirror_of(agent: Agent, stack: AsyncExitStack) -> aiohttp.ClientSession:
    port = await serve(stack, make_mirror_app(agent))
    return await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))


async def gets_everything(http: aiohttp.ClientSession, odd: Odd, image: Made) -> None:
    """A client pulls an image as containerd does."""
    for target in ("v1", image.digest):
        async with http.get(f"/v2/team/app/manifests/{target}?ns={odd.address}") as answer:
            assert (answer.status, await answer.read()) == (200, image.data)
    for digest, data in image.blobs.items():
        async with http.get(f"/v2/team/app/blobs/{digest}?ns={odd.address}") as answer:
            assert (answer.status, await answer.read()) == (200, data), digest


# -- a tracker that hangs


async def test_what_this_host_has_is_given_while_the_tracker_hangs(
    odd: Odd, site: ImageSite, relay: Relay, stack: AsyncExitStack
) -> None:
    image = publish(odd)
    agent = await site.agent("h1")
    await pulled(agent, f"docker://{odd.address}/team/app:v1")
    await site.stop_agent("h1")
    again = await site.agent("h1")
    relay.frozen.set()
    await gets_everything(await mirror_of(again, stack), odd, image)
    assert again.session.connected, "it has not been told that the tracker is gone"


async def test_an_agent_that_no_tracker_has_welcomed_gives_what_its_store_has(
    odd: Odd, site: ImageSite, relay: Relay, stack: AsyncExitStack
) -> None:
    image = publish(odd)
    agent = await site.agent("h1")
    await pulled(agent, f"docker://{odd.address}/team/app:v1")
    await site.stop_agent("h1")
    relay.frozen.set()
    settings = AgentSettings(
        (f"http://127.0.0.1:{relay.port}",), "h1", "127.0.0.1:9", site.directory / "store-h1", tracker_wait_s=1.0
    )
    again = Agent(settings)
    stack.push_async_callback(again.stop)
    await again.start()
    await gets_everything(await mirror_of(again, stack), odd, image)
    assert not again.session.connected


async def test_what_is_known_and_not_here_is_fetched_while_the_tracker_hangs(
    odd: Odd, site: ImageSite, relay: Relay, stack: AsyncExitStack
) -> None:
    """From peers where they are known, here from the registry itself: the client would turn to it
    otherwise, and no other host would get what it reads."""
    image = publish(odd)
    agent = await site.agent("h1")
    name = image_name(odd.address, "team/app")
    await agent.images.manifest(name, "v1")
    await agent.images.manifest(name, image.digest)
    relay.frozen.set()
    await gets_everything(await mirror_of(agent, stack), odd, image)
    assert odd.count("GET", "/blobs/") >= len(image.blobs)


async def test_an_agent_asks_its_own_upstream_while_the_tracker_hangs(
    odd: Odd, site: ImageSite, relay: Relay, stack: AsyncExitStack
) -> None:
    image = publish(odd)
    agent = await site.agent("h1", upstreams=(parse_upstream(odd.address),))
    await until(lambda: bool(agent.images._registries._learned))
    relay.frozen.set()
    name = image_name(odd.address, "team/app")
    async with asyncio.timeout(BEGIN_S * 4):
        assert (await agent.images.manifest(name, "v1")).digest == image.digest
    await gets_everything(await mirror_of(agent, stack), odd, image)


@pytest.mark.slow
async def test_lists_are_given_as_they_were_without_a_tracker(
    odd: Odd, site: ImageSite, relay: Relay, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEARTBEAT_S", 2.0)
    monkeypatch.setattr(connection, "PATIENCE_S", 1.0)
    image = publish(odd)

    async def tags(request: web.Request) -> web.StreamResponse:
        return web.json_response({"tags": ["v1", "v2"]})

    odd.answers["tags/list"] = tags
    agent = await site.agent("h1")
    paths = [
        f"/v2/team/app/tags/list?ns={odd.address}",
        f"/v2/team/app/referrers/{image.digest}?ns={odd.address}",
    ]
    http = await mirror_of(agent, stack)

    async def answers(http: aiohttp.ClientSession) -> list[tuple[int, bytes]]:
        found = []
        for path in paths:
            async with http.get(path) as answer:
                found.append((answer.status, await answer.read()))
        return found

    first = await answers(http)
    assert [status for status, _ in first] == [200, 200] and b"v2" in first[0][1]
    relay.frozen.set()
    assert await answers(http) == first
    await until(lambda: not agent.session.connected)
    assert await answers(http) == first
    async with http.get(f"/v2/team/other/tags/list?ns={odd.address}") as answer:
        assert answer.status == 503


async def test_images_are_listed_and_removed_by_name(odd: Odd, site: ImageSite) -> None:
    image, agent = publish(odd), await site.agent("h1")
    other = make_image(LAYERS[0], {"more": b"m" * 1000})
    odd.put("team/app", "v2", other)
    references = [f"docker://{odd.address}/team/app:{tag}" for tag in ("v1", "v2")]
    for reference in references:
        await pulled(agent, reference)
    packages = await agent.inventory.packages()
    assert [(package.reference, package.size, package.complete) for package in packages] == [
        (references[0], image.size, True),
        (references[1], other.size, True),
    ]
    await agent.maintenance.collect()
    assert len(await agent.inventory.packages()) == 2, "what has a name stays"
    with pytest.raises(NotFound):
        await agent.maintenance.remove(f"docker://{odd.address}/team/app:v3")
    with pytest.raises(Conflict, match=r"team/app:v1"):
        await agent.maintenance.remove(str(blob_of(image)))
    removed = await agent.maintenance.remove(references[0])
    assert removed.reference == references[0] and removed.bytes_freed > 0
    assert [package.reference for package in await agent.inventory.packages()] == references[1:]
    here = {blob.digest for blob in agent.store.blobs()}
    assert here == set(other.blobs), "what both have stays"
    again = await pulled(agent, references[0])
    assert again.status().bytes_total == image.size


@pytest.mark.slow
async def test_a_tracker_that_is_late_and_alive_is_waited_for(
    odd: Odd, site: ImageSite, relay: Relay, stack: AsyncExitStack
) -> None:
    """Else every agent would ask an upstream that is slow."""
    image = publish(odd)
    agent = await site.agent("h1", upstreams=(parse_upstream(odd.address),))
    await until(lambda: bool(agent.images._registries._learned))
    answered = asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        await answered.wait()
        return web.Response(body=image.data, headers={"Content-Type": image.media_type})

    odd.answers["manifests/v1"] = late
    asked = asyncio.create_task(agent.images.manifest(image_name(odd.address, "team/app"), "v1"))
    await asyncio.sleep(BEGIN_S)
    assert odd.count("GET", "manifests/v1") == 1
    answered.set()
    assert (await asked).digest == image.digest
    assert agent.session.attention.answers


async def test_a_tracker_that_answers_again_is_asked_again(odd: Odd, site: ImageSite, relay: Relay) -> None:
    publish(odd)
    agent = await site.agent("h1")
    relay.frozen.set()
    assert not await agent.session.attention.responds()
    assert agent.session.attention.silent and not agent.session.attention.answers
    relay.frozen.clear()
    assert await agent.session.attention.responds()
    assert agent.session.attention.answers


async def test_a_tracker_that_welcomes_nobody_gives_way_to_another(
    site: ImageSite, relay: Relay, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "WELCOME_TIMEOUT_S", 0.3)
    hung = await stack.enter_async_context(Relay().running())
    hung.frozen.set()
    trackers = (f"http://127.0.0.1:{hung.port}", f"http://127.0.0.1:{relay.port}")
    agent = Agent(AgentSettings(trackers, "h1", "127.0.0.1:9", site.directory / "store", tracker_wait_s=1.0))
    stack.push_async_callback(agent.stop)
    await agent.start()
    assert await agent.session.wait_connected(WAIT_S)


# -- clients that are gone


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nothing ends the wait")


def blob_of(image: Made) -> Digest:
    return max(image.blobs, key=lambda digest: len(image.blobs[digest]))


@pytest.mark.slow
async def test_a_pull_ends_that_no_client_wants_any_more(
    odd: Odd, site: ImageSite, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "UNWANTED_S", 1.0)
    image = publish(odd)
    digest, agent = blob_of(image), await site.agent("h1")
    odd.answers[str(digest)] = hangs
    http = await mirror_of(agent, stack)
    async with http.get(f"/v2/team/app/manifests/v1?ns={odd.address}") as answer:
        assert answer.status == 200
    async with http.get(f"/v2/team/app/blobs/{digest}?ns={odd.address}") as answer:
        assert answer.status == 503
    assert [(str(name), pull.blob.digest) for name, pull in agent.images.arriving.values()] == [
        (f"{odd.address}/team/app", digest)
    ]
    await until(lambda: agent.registry.fetching(digest) is None)
    assert not agent.images.arriving
    del odd.answers[str(digest)]
    async with http.get(f"/v2/team/app/blobs/{digest}?ns={odd.address}") as answer:
        assert (answer.status, await answer.read()) == (200, image.blobs[digest])


@pytest.mark.slow
async def test_a_pull_that_something_else_wants_goes_on(
    odd: Odd, site: ImageSite, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "UNWANTED_S", 0.2)
    image = publish(odd)
    digest, agent = blob_of(image), await site.agent("h1")
    odd.answers[str(digest)] = hangs
    http = await mirror_of(agent, stack)
    agent.pulls.start(PullRequest(package=f"docker://{odd.address}/team/app:v1"))
    await until(lambda: agent.registry.fetching(digest) is not None)
    running = agent.registry.fetching(digest)
    async with http.get(f"/v2/team/app/blobs/{digest}?ns={odd.address}") as answer:
        assert answer.status == 503
    await asyncio.sleep(1.0)
    assert agent.registry.fetching(digest) is running


@pytest.mark.slow
async def test_a_pull_from_which_another_host_receives_goes_on(
    odd: Odd, site: ImageSite, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is gone, and the other host would have to begin anew elsewhere. Once that one has
    gone, too, the pull ends."""
    monkeypatch.setattr(registry_module, "UNWANTED_S", 0.2)
    image = publish(odd)
    digest, agent = blob_of(image), await site.agent("h1")
    odd.answers[str(digest)] = hangs
    http = await mirror_of(agent, stack)
    async with http.get(f"/v2/team/app/manifests/v1?ns={odd.address}") as answer:
        assert answer.status == 200

    asked = asyncio.ensure_future(http.get(f"/v2/team/app/blobs/{digest}?ns={odd.address}"))
    await until(lambda: agent.registry.fetching(digest) is not None)
    running = agent.registry.fetching(digest)
    assert running is not None
    flow = agent.uplink.open(digest, 0, PieceSet(running.blob.layout.count))
    assert (await asked).status == 503
    await asyncio.sleep(1.0)
    assert agent.registry.fetching(digest) is running
    flow.close()
    await until(lambda: agent.registry.fetching(digest) is None)


def test_a_client_gets_an_answer_however_long_a_tracker_takes() -> None:
    """What is waited for before a blob is given leaves time for the blob."""
    assert images_module.ANNOUNCE_WAIT_S <= BEGIN_S / 2
    assert images_module.KNOWN_WAIT_S < BEGIN_S
