"""Images go through the mirrors of several agents: a real registry, a tracker, agents, and skopeo
as the container runtime of each host. The registry sends one copy."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from image_rig import make_image, odd_registry
from image_site import ImageSite, image_site, serve
from mirror_rig import Image, make_layer, push_image
from registry_rig import Registry, needs_registry, running_registry
from test_mirror_skopeo import configuration, skopeo

from p2pdist.agent.agent import Agent
from p2pdist.agent.api.mirror import make_mirror_app
from p2pdist.gateway.registry import mirror
from p2pdist.model.errors import NotFound
from p2pdist.model.image import image_name
from p2pdist.model.upstream import parse_upstream
from tracker.core.views.fleet_view import View

pytestmark = [needs_registry, pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")]
HOSTS = 4


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def image(registry: Registry, tmp_path: Path) -> Image:
    """A new image, of which no test before has read anything."""
    layers = [make_layer(size, str(size)) for size in (5 << 20, 700_000, 10)]
    return push_image(registry.address, "team/app", "v1", layers)


class Mirrors:
    """Agents of a site, each with the URL of its mirror."""

    def __init__(self, site: ImageSite, stack: AsyncExitStack, registry: Registry) -> None:
        self.site, self._stack, self.registry = site, stack, registry

    async def start(self, name: str, *, tracker: bool = True) -> tuple[Agent, str]:
        own = () if tracker else (parse_upstream(self.registry.address),)
        agent = await self.site.agent(name, tracker=tracker, upstreams=own)
        return agent, f"http://127.0.0.1:{await serve(self._stack, make_mirror_app(agent))}"

    async def copy(self, url: str, directory: Path) -> str:
        """Copy the image as the runtime of a host would; returns what went wrong."""
        directory.mkdir()
        options = configuration(directory, self.registry.address, url)
        source = f"docker://{self.registry.address}/team/app:v1"
        _, _, errors = await skopeo(*options, "copy", "--src-tls-verify=false", source, f"dir:{directory / 'copy'}")
        return errors

    def titles(self) -> set[str]:
        """What the page of the tracker calls the swarms."""
        assert self.site.service is not None
        view = View(self.site.service.fleet)
        view.update(now=time.monotonic())
        return {row.title for row in view.since(0, now=time.monotonic()).swarms}

    def sent(self) -> int:
        """Bytes of blobs that the registry has sent."""
        lines = re.findall(r'"GET /v2/\S+/blobs/\S+ HTTP/1.1" 20[06] (\d+)', self.registry.log.read_text())
        return sum(map(int, lines))


@pytest.fixture
async def mirrors(tmp_path: Path, registry: Registry) -> AsyncIterator[Mirrors]:
    async with image_site(tmp_path / "site", parse_upstream(registry.address)) as site, AsyncExitStack() as stack:
        yield Mirrors(site, stack, registry)


def is_copy(directory: Path, image: Image) -> bool:
    """Whether a directory holds the image, byte for byte."""
    copy = directory / "copy"
    return (copy / "manifest.json").read_bytes() == image.manifest and all(
        (copy / digest.removeprefix("sha256:")).read_bytes() == blob for digest, blob in image.blobs.items()
    )


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
async def test_hosts_that_start_at_once_take_one_copy(
    mirrors: Mirrors, image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "BEGIN_S", 60.0)  # a machine may be so busy that a first piece takes 2 s
    before, size = mirrors.sent(), sum(map(len, image.blobs.values()))
    started = [await mirrors.start(f"h{number}") for number in range(HOSTS)]
    places = [tmp_path / f"host{number}" for number in range(HOSTS)]
    failures = await asyncio.gather(
        *(mirrors.copy(url, place) for (_, url), place in zip(started, places, strict=True))
    )
    for (agent, _), place, failure in zip(started, places, failures, strict=True):
        assert not failure and is_copy(place, image), failure
        assert sum(agent.mirrored.bytes.values()) >= size
        assert not any(agent.mirrored.fallbacks.values())
    assert mirrors.sent() - before == size
    assert sum(agent.resources.received_bytes["upstream"] for agent, _ in started) == size
    assert not any(agent.resources.received_bytes["origin"] for agent, _ in started)
    assert mirrors.titles() == {f"{mirrors.registry.address}/team/app:v1"}
    agent, url = await mirrors.start("later")
    await mirrors.copy(url, tmp_path / "later")
    assert is_copy(tmp_path / "later", image) and agent.mirrored.requests["blob", "ok", "swarm"]
    assert mirrors.sent() - before == size


async def test_what_is_here_goes_on_without_a_tracker(mirrors: Mirrors, image: Image, tmp_path: Path) -> None:
    agent, url = await mirrors.start("h0")
    await mirrors.copy(url, tmp_path / "first")
    before = mirrors.sent()
    await mirrors.site.stop_tracker()
    while agent.session.connected:
        await asyncio.sleep(0.05)
    await mirrors.copy(url, tmp_path / "again")
    assert is_copy(tmp_path / "again", image) and mirrors.sent() == before
    async with aiohttp.ClientSession(url) as http:
        for path in ("other/app/manifests/v1", f"other/app/blobs/{'sha256:' + 'ab' * 32}", "team/app/manifests/v2"):
            async with http.get(f"/v2/{path}?ns={mirrors.registry.address}") as answer:
                assert answer.status in (404, 503)
                assert (await answer.json())["errors"]


@pytest.mark.slow
async def test_an_agent_alone_serves_the_registries_that_it_was_given(
    registry: Registry, image: Image, tmp_path: Path
) -> None:
    async with image_site(tmp_path / "site", tracker=False) as site, AsyncExitStack() as stack:
        mirrors = Mirrors(site, stack, registry)
        before = mirrors.sent()
        agent, url = await mirrors.start("h0", tracker=False)
        failure = await mirrors.copy(url, tmp_path / "host")
        assert is_copy(tmp_path / "host", image), failure
        assert mirrors.sent() - before == sum(map(len, image.blobs.values()))
        assert not any(agent.mirrored.fallbacks.values()), agent.mirrored.requests


async def test_registries_that_were_not_named_are_never_asked(mirrors: Mirrors, image: Image, tmp_path: Path) -> None:
    """A mirror is no open proxy: an upstream in a path leads nowhere."""
    asked: list[str] = []

    async def other(request: web.BaseRequest) -> web.Response:
        asked.append(request.path)
        return web.Response()

    server = web.ServerRunner(web.Server(other))  # type: ignore[arg-type]
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    try:
        address = f"127.0.0.1:{server.addresses[0][1]}"
        _, url = await mirrors.start("h0")
        async with aiohttp.ClientSession(url) as http:
            for path in (f"/v2/{address}/app/manifests/v1", f"/v2/app/manifests/v1?ns={address}"):
                async with http.get(path) as answer:
                    assert answer.status == 404
                    assert (await answer.json())["errors"][0]["code"] == "NAME_UNKNOWN"
    finally:
        await server.cleanup()
    assert not asked


async def test_a_blob_is_confirmed_by_its_registry_and_not_by_a_manifest(tmp_path: Path) -> None:
    """A manifest that names the blob of another repository makes it no blob of its own."""
    async with odd_registry() as odd, image_site(tmp_path / "site", parse_upstream(odd.address)) as site:
        mine, other = make_image({"a": b"a" * 1000}), make_image({"b": b"b" * 1000})
        odd.put("open/app", "v1", mine)
        odd.put("secret/app", "v1", other)
        odd.put("open/app", "v2", other)  # a push of the manifest alone, as some registries take it
        secret = next(iter(other.blobs))

        async def absent(request: web.Request) -> web.Response:
            return web.json_response({"errors": []}, status=404)

        odd.answers[f"open/app/blobs/{secret}"] = absent
        agent = await site.agent("h0")
        name, theirs = image_name(odd.address, "open/app"), image_name(odd.address, "secret/app")
        for tag in ("v1", "v2"):
            await agent.images.manifest(name, tag)
        assert await agent.images.blob_size(name, secret) == len(other.blobs[secret])
        with pytest.raises(NotFound):
            await agent.images.confirmed.require(name, secret)
        await agent.images.confirmed.require(theirs, secret)
        for digest in mine.blobs:
            await agent.images.confirmed.require(name, digest)
            asked = odd.count("HEAD", digest)
            await agent.images.confirmed.require(name, digest)
            assert odd.count("HEAD", digest) == asked == 1
            assert str(name) in agent.access.names.of(digest)
        # By these names hosts tell what is public, and what users of the host may read.
        await agent.images.fetch_blob(name, secret)
        assert agent.access.names.of(secret) == (str(theirs),)
        later = await site.agent("h1")
        await later.images.manifest(name, "v2")
        await later.images.manifest(name, "v1")
        for digest in (secret, *mine.blobs):
            later.images.confirmed.ask_later(name, digest)
        while not all(later.access.names.of(digest) for digest in mine.blobs):
            await asyncio.sleep(0.01)
        assert later.access.names.of(secret) == ()
