"""Images on hosts: manifests from store, tracker and registry; blobs through the swarm; preseeds
and rankings of images."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from image_rig import Made, Odd, docker_config, make_image, make_index, push_image
from image_site import ImageSite, image_site, pulled, serve
from registry_rig import Realm, Registry, needs_registry, running_registry

from p2pdist.agent.agent import Agent
from p2pdist.agent.images import lists
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, NotFound, Refused, Unavailable, UsageError
from p2pdist.model.image import image_name, parse_image
from p2pdist.model.messages import PROTOCOL_VERSION, Welcome, encode
from p2pdist.model.preseed import PreseedRequest, RankRequest
from p2pdist.model.upstream import parse_upstream
from p2pdist.package.archive.import_ import this_platform
from p2pdist.store import pins
from tracker.core.policy.table import read_table

HERE = this_platform().architecture
LAYERS = ({"bin/hello": b"#!/bin/sh\necho hello\n"}, {"data": bytes(range(256)) * 8000}, {"more": b"m" * 300_000})


@pytest.fixture
async def site(odd: Odd, tmp_path: Path) -> AsyncIterator[ImageSite]:
    """Agents and a tracker that reads the registry."""
    async with image_site(tmp_path, parse_upstream(odd.address)) as running:
        yield running


def publish(odd: Odd, repository: str = "team/app", tag: str = "v1") -> Made:
    """An index of images for this machine and another one; returns that for this machine."""
    other = "arm64" if HERE != "arm64" else "amd64"
    images = {
        name: make_image(*LAYERS, compressions=("gzip", "plain", "zstd"), architecture=name) for name in (HERE, other)
    }
    for image in (*images.values(), make_index(images)):
        odd.put(repository, tag, image)
    return images[HERE]


def held(agent: Agent, image: Made) -> dict[Digest, bytes]:
    """The image's blobs as the agent's store has them whole."""
    found = {digest: agent.store.get(digest) for digest in image.blobs}
    return {digest: blob.path.read_bytes() for digest, blob in found.items() if blob is not None and blob.complete}


async def test_lists_that_clients_ask_for_make_no_host_forget_its_images(
    odd: Odd, site: ImageSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Referrers of any type, and tags behind any tag, are a list each: whoever reaches the mirror
    could have a host lose what tags and digests of its images name."""
    monkeypatch.setattr(pins, "IMAGE_RECORDS_MAX", 40)
    monkeypatch.setattr(lists, "LISTS_MAX", 10)
    image = publish(odd)
    agent, name = await site.agent("h1"), image_name(odd.address, "team/app")
    assert (await pulled(agent, f"docker://{odd.address}/team/app:v1")).error is None
    before = {(record.name, record.target) for record in agent.store.images.list()}
    for number in range(60):
        await agent.images.referrers(name, image.digest, f"application/kind-{number}")
    kept = {(record.name, record.target) for record in agent.store.images.list()}
    assert before <= kept and len(kept - before) == 10
    assert image.digest in {target for _, target in kept}


@pytest.mark.usefixtures("unhurried")
async def test_hosts_that_pull_an_image_at_once_take_one_copy_from_its_registry(odd: Odd, site: ImageSite) -> None:
    image = publish(odd)
    agents = [await site.agent(f"h{number}") for number in range(4)]
    reference = f"docker://{odd.address}/team/app:v1"
    pulls = await asyncio.gather(*(pulled(agent, reference) for agent in agents))
    for agent in agents:
        assert held(agent, image) == image.blobs
    statuses = [pull.status() for pull in pulls]
    assert all(status.bytes_total == status.bytes_done == image.size for status in statuses)
    assert all(status.bytes_origin == 0 for status in statuses)
    assert sum(status.bytes_upstream for status in statuses) == image.size == odd.bytes_sent
    assert sum(status.bytes_peers for status in statuses) == 3 * image.size
    assert odd.count("GET", f"manifests/{image.digest}") == 1
    again = (await pulled(agents[0], reference)).status()
    assert (again.bytes_cached, again.bytes_upstream) == (image.size, 0)
    later = await site.agent("later")
    assert (await pulled(later, reference)).status().bytes_upstream == 0
    assert odd.bytes_sent == image.size


async def test_what_is_here_is_answered_without_a_tracker(odd: Odd, site: ImageSite) -> None:
    image = publish(odd)
    name, agent = image_name(odd.address, "team/app"), await site.agent("h1")
    index = await agent.images.manifest(name, "v1")
    await agent.images.manifest(name, image.digest)
    await site.stop_tracker()
    requests = len(odd.requests)
    await asyncio.wait_for(_away(agent), 30)
    agent.images._fresh.clear()
    assert await agent.images.manifest(name, "v1") == index
    assert (await agent.images.manifest(name, image.digest)).data == image.data
    for blob, data in image.blobs.items():
        assert await agent.images.blob_size(name, blob) == len(data)
    for attempt in (
        agent.images.manifest(name, "v2"),
        agent.images.tags(name),
        agent.images.manifest(name, digest_of(b"x")),
    ):
        with pytest.raises(Unavailable, match="tracker"):
            await attempt
    await site.stop_agent("h1")
    again = await site.agent("h1")
    assert (await again.images.manifest(name, "v1")).data == index.data
    assert await again.images.blob_size(name, next(iter(image.blobs))) > 0
    assert len(odd.requests) == requests


async def _away(agent: Agent) -> None:
    while agent.session.connected:
        await asyncio.sleep(0.01)


async def test_an_agent_that_was_given_the_registry_needs_no_tracker(odd: Odd, tmp_path: Path) -> None:
    image = publish(odd)
    own = (parse_upstream(odd.address),)
    async with image_site(tmp_path, tracker=False) as site:
        agent, other = await site.agent("h1", upstreams=own, tracker=False), await site.agent("h2", tracker=False)
        status = (await pulled(agent, f"docker://{odd.address}/team/app:v1")).status()
        assert status.bytes_upstream == image.size and held(agent, image) == image.blobs
        name = image_name(odd.address, "team/app")
        assert (await agent.images.referrers(name, image.digest)).media_type
        with pytest.raises(NotFound, match="--upstream"):
            await other.images.manifest(name, "v1")
        with pytest.raises(NotFound, match="--upstream"):
            await pulled(other, f"docker://{odd.address}/team/app:v1")


async def test_a_registry_that_nobody_named_is_not_asked(odd: Odd, site: ImageSite, tmp_path: Path) -> None:
    publish(odd)
    agent = await site.agent("h1")
    other = f"localhost:{odd.address.rpartition(':')[2]}"
    for attempt in (
        agent.images.manifest(image_name(other, "team/app"), "v1"),
        agent.images.tags(image_name(other, "team/app")),
        agent.images.blob_size(image_name("docker.io", "library/debian"), digest_of(b"x")),
    ):
        with pytest.raises(NotFound):
            await attempt
    assert odd.requests == []


async def test_a_tracker_that_was_restarted_lets_hosts_go_on_with_images_that_they_know(
    odd: Odd, site: ImageSite
) -> None:
    image = publish(odd)
    agent = await site.agent("h1")
    name = image_name(odd.address, "team/app")
    await agent.images.find(parse_image(f"docker://{odd.address}/team/app:v1"))
    await site.stop_tracker()
    await _away(agent)
    await site.start_tracker()
    assert await agent.session.wait_connected(30)
    assert site.service is not None
    blob = max(image.blobs, key=lambda digest: len(image.blobs[digest]))
    before = len(odd.requests)
    await agent.images._announce(name, blob)
    assert site.service.fleet.membership.described(blob), "the tracker was told of the manifest"
    assert len(odd.requests) == before, "and had kept it"
    assert (await pulled(agent, f"docker://{odd.address}/team/app:v1")).status().bytes_upstream == image.size


@pytest.mark.usefixtures("unhurried")
async def test_a_preseed_of_an_image_pins_it_and_ranks_hosts(odd: Odd, site: ImageSite) -> None:
    image = publish(odd)
    agents = {name: await site.agent(name) for name in ("h1", "h2", "h3")}
    preseeds, package = site.preseeds, f"docker://{odd.address}/team/app:v1"
    assert preseeds is not None
    ranked = await preseeds.rank(RankRequest(packages=(package,)))
    assert isinstance(ranked, list) and {(host.bytes_missing, host.bytes_total) for host in ranked} == {
        (image.size, image.size)
    }
    progress, _ = await preseeds.create(PreseedRequest(package, hosts=("h1", "h2")))
    async with asyncio.timeout(60):
        while (progress := preseeds.progress(progress.id)).state != "done":
            assert progress.state == "running"
            await asyncio.sleep(0.05)
    assert (progress.hosts_done, progress.bytes_total) == (2, 2 * image.size)
    for name in ("h1", "h2"):
        store = agents[name].store
        assert held(agents[name], image) == image.blobs
        assert all(f"preseed:{progress.id}" in store.pins.owners(blob) for blob in image.blobs)
    assert not held(agents["h3"], image)
    ranked = await preseeds.rank(RankRequest(packages=(package,)))
    assert isinstance(ranked, list)
    assert {host.host: host.bytes_missing for host in ranked} == {"h1": 0, "h2": 0, "h3": image.size}
    assert odd.bytes_sent == image.size
    assert progress.package.startswith(package + "@sha256:")
    await site.stop_tracker()
    await _away(agents["h1"])
    tag = await agents["h1"].images.manifest(image_name(odd.address, "team/app"), "v1")
    assert tag.digest == progress.package.rpartition("@")[2]


async def test_a_preseed_names_a_platform_or_takes_that_of_the_hosts(odd: Odd, site: ImageSite) -> None:
    image = publish(odd)
    await site.agent("h1")
    preseeds, package = site.preseeds, f"docker://{odd.address}/team/app:v1"
    assert preseeds is not None
    own, _ = await preseeds.create(PreseedRequest(package, count=1, platform=f"linux/{HERE}"))
    assert own.package == f"{package}@{image.digest}"
    for wrong, error in (("linux/s390x", NotFound), ("nonsense", UsageError)):
        with pytest.raises(error):
            await preseeds.create(PreseedRequest(package, count=1, platform=wrong))
    with pytest.raises(UsageError):
        await preseeds.create(PreseedRequest("team/app:v1", count=1, platform="linux/amd64"))


@pytest.mark.parametrize("lie", [0, 10, 1 << 20])
async def test_a_manifest_that_lies_about_sizes_harms_no_other_image(odd: Odd, site: ImageSite, lie: int) -> None:
    """Anyone who may push somewhere may name the blobs of others."""
    image = make_image(LAYERS[2], architecture=HERE)
    document = json.loads(image.data)
    layer = Digest(document["layers"][0]["digest"])
    document["layers"][0]["size"] = lie
    odd.put("evil/app", "v1", Made(json.dumps(document).encode(), image.media_type, image.blobs))
    odd.put("team/app", "v1", image)
    agent = await site.agent("h0")
    evil, name = image_name(odd.address, "evil/app"), image_name(odd.address, "team/app")
    with suppress(Corrupt):
        await agent.images.manifest(evil, "v1")
    await agent.images.manifest(name, "v1")
    if lie:
        await agent.images.fetch_blob(evil, layer)  # is under way
    await pulled(agent, f"docker://{odd.address}/team/app:v1")
    here = agent.store.get(layer)
    if lie:
        with pytest.raises(Corrupt):
            await agent.images.fetch_blob(evil, layer)
    assert here is not None and agent.store.get(layer) is here
    assert here.complete and here.size == len(image.blobs[layer])


async def test_a_manifest_that_names_what_its_repository_lacks_harms_no_other_image(odd: Odd, site: ImageSite) -> None:
    """The pull that it began on this host is that of the other image, too."""
    image = make_image(LAYERS[2], architecture=HERE)
    layer = Digest(json.loads(image.data)["layers"][0]["digest"])
    agent, asked, answer = await site.agent("h0"), asyncio.Event(), asyncio.Event()

    async def absent(request: web.Request) -> web.StreamResponse:
        asked.set()
        await answer.wait()
        return web.Response(status=404)

    for repository in ("evil/app", "team/app"):
        odd.put(repository, "v1", image)
    odd.answers[f"evil/app/blobs/{layer}"] = absent
    evil, name = image_name(odd.address, "evil/app"), image_name(odd.address, "team/app")
    for each in (evil, name):
        await agent.images.manifest(each, "v1")
    _, begun = await agent.images.fetch_blob(evil, layer)
    await asked.wait()
    _, joined = await agent.images.fetch_blob(name, layer)
    assert begun is not None and joined is begun
    answer.set()
    await asyncio.wait_for(asyncio.shield(joined.done), 30)
    assert held(agent, image)[layer] == image.blobs[layer]


async def test_a_repository_that_lies_about_a_layer_harms_no_other_image(odd: Odd, site: ImageSite) -> None:
    """Whoever may push somewhere may have something else come for a layer of others."""
    image = make_image(LAYERS[2], architecture=HERE)
    layer = Digest(json.loads(image.data)["layers"][0]["digest"])
    size, lies = len(image.blobs[layer]), 0

    async def lie(request: web.Request) -> web.StreamResponse:
        nonlocal lies
        lies += 1
        start, _, end = request.headers.get("Range", f"bytes=0-{size - 1}").removeprefix("bytes=").partition("-")
        headers = {"Content-Range": f"bytes {start}-{end}/{size}"}
        return web.Response(body=bytes(int(end) + 1 - int(start)), status=206, headers=headers)

    for repository in ("evil/app", "team/app"):
        odd.put(repository, "v1", image)
    odd.answers[f"evil/app/blobs/{layer}"] = lie
    agent = await site.agent("h0")
    with pytest.raises(Corrupt):
        await pulled(agent, f"docker://{odd.address}/evil/app:v1")
    read = lies
    with pytest.raises(Corrupt, match="evil/app gave something else"):
        await pulled(agent, f"docker://{odd.address}/evil/app:v1")
    assert lies == read, "it is not read again at once"
    await pulled(agent, f"docker://{odd.address}/team/app:v1")
    assert held(agent, image)[layer] == image.blobs[layer]


async def test_a_registry_that_sends_other_bytes_is_named(odd: Odd, site: ImageSite) -> None:
    image = publish(odd)
    victim = max(image.blobs, key=lambda digest: len(image.blobs[digest]))
    odd.blobs[victim] = bytes(byte ^ 1 for byte in image.blobs[victim])
    agent = await site.agent("h1")
    with pytest.raises(Corrupt):
        await pulled(agent, f"docker://{odd.address}/team/app:v1")
    assert victim not in held(agent, image)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("guarded"), Realm()) as running:
        yield running


@needs_registry
@pytest.mark.usefixtures("unhurried")
async def test_hosts_read_a_private_registry_without_an_account(
    guarded: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    image = make_image(*LAYERS, docker=True, architecture=HERE)
    push_image(guarded, "private/app", "v1", image)
    (tmp_path / "account.json").write_text(docker_config(guarded))
    upstream = msgspec.structs.replace(parse_upstream(guarded.address), credentials=str(tmp_path / "account.json"))
    async with image_site(tmp_path, upstream) as site:
        agents = [await site.agent(f"h{number}") for number in range(3)]
        reference = f"docker://{guarded.address}/private/app:v1"
        pulls = await asyncio.gather(*(pulled(agent, reference) for agent in agents))
        assert all(held(agent, image) == image.blobs for agent in agents)
        assert sum(pull.status().bytes_upstream for pull in pulls) == image.size
    granted = {scope for query in guarded.realm.asked for scope in query["scope"]} if guarded.realm else set()
    assert granted == {"repository:private/app:pull"}


async def test_policies_of_an_image_hold_for_its_blobs(odd: Odd, site: ImageSite) -> None:
    image = publish(odd)
    assert site.service is not None
    rules = {"match": f"{odd.address}/team/*", "priority": "preseed", "cache": "pin"}
    table, mistakes = read_table({"policy": [rules, {"match": f"{odd.address}/far/*", "zones": ["other"]}]})
    assert not mistakes
    site.service.fleet.policies.replace(table)
    agent = await site.agent("h1")
    pull = await pulled(agent, f"docker://{odd.address}/team/app:v1")
    owner = f"policy:docker://{odd.address}/team/app@{image.digest}"
    for blob in image.blobs:
        assert agent.policies.of(blob).priority == "preseed"
        assert owner in agent.store.pins.owners(blob)
    assert pull.state == "done"
    publish(odd, "far/app")
    with pytest.raises(Refused):
        await pulled(agent, f"docker://{odd.address}/far/app:v1")
    await site.stop_agent("h1")
    again = await site.agent("h1")
    assert all(again.policies.of(blob).priority == "preseed" for blob in image.blobs)


async def test_a_tracker_that_lies_is_not_believed(odd: Odd, tmp_path: Path) -> None:
    image, other = make_image(*LAYERS), make_image({"x": b"y"})
    answers: dict[str, tuple[str, bytes]] = {}

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_bytes(encode(Welcome(PROTOCOL_VERSION, 0.1)))
        async for _ in socket:
            pass
        return socket

    async def answer(request: web.Request) -> web.StreamResponse:
        for end, (kind, body) in answers.items():
            if request.path.endswith(end):
                return web.Response(body=body, headers={"Content-Type": kind})
        return web.Response(status=404)

    app = web.Application()
    app.router.add_get("/v1/session", session)
    app.router.add_get("/{path:.*}", answer)
    async with image_site(tmp_path, tracker=False) as site, AsyncExitStack() as stack:
        site.port = await serve(stack, app)
        json_type, name = "application/json", image_name(odd.address, "team/app")
        answers["/v1/upstreams"] = (json_type, b'[{"name": "../../x", "url": "file:///etc"}]')
        agent = await site.agent("h1")
        assert await agent.session.wait_connected(60)
        with pytest.raises(NotFound):
            await agent.images.manifest(name, "v1")
        assert agent.images.upstreams == ()
        listed = [{"name": odd.address, "url": f"http://{odd.address}"}]
        answers["/v1/upstreams"] = (json_type, msgspec.json.encode(listed))
        agent.images.tracker_changed(True)
        for end, (kind, body) in {
            f"manifests/{image.digest}": (image.media_type, other.data),
            "manifests/v1": (image.media_type, b"<html>"),
            "manifests/v2": (image.media_type, b'{"schemaVersion": 2, "config": {"digest": "x"}}'),
        }.items():
            answers[end] = (kind, body)
            with pytest.raises(Corrupt):
                await agent.images.manifest(name, end.removeprefix("manifests/"))
        for end, body, attempt in (
            ("/tags", b"[]", lambda: agent.images.tags(name)),
            ("/tags", b'{"tags": [5], "more": 1}', lambda: agent.images.tags(name)),
            (f"referrers/{image.digest}", b"{", lambda: agent.images.referrers(name, image.digest)),
            (f"blobs/{image.digest}", b'{"size": "many"}', lambda: agent.images.blob_size(name, image.digest)),
        ):
            answers[end] = (json_type, body)
            with pytest.raises(Corrupt):
                await attempt()
        assert agent.store.images.list() == []
        # A token that is none is no reason not to ask with the account of this host.
        answers["/token"] = (json_type, b'{"token": 5}')
        blob = next(iter(image.blobs))

        async def guarded(request: web.Request) -> web.StreamResponse:
            if request.headers.get("Authorization") == "Bearer own":
                return await odd._blob(request, image.blobs[blob])
            return web.Response(status=401, headers={"WWW-Authenticate": f'Bearer realm="http://{odd.address}/realm"'})

        async def realm(request: web.Request) -> web.StreamResponse:
            return web.json_response({"token": "own"})

        odd.answers |= {blob: guarded, "realm": realm}
        reader = agent.images._registries.reader(name)
        assert await reader.read_range(blob, 0, 5) == image.blobs[blob][:5]


async def test_a_registry_without_ranges_sends_a_blob_once_to_each_host_that_reads_it(
    odd: Odd, site: ImageSite
) -> None:
    image = publish(odd)
    odd.ranges = False
    agents = [await site.agent(f"h{number}") for number in range(3)]
    await asyncio.gather(*(pulled(agent, f"docker://{odd.address}/team/app:v1") for agent in agents))
    for agent in agents:
        assert held(agent, image) == image.blobs
    for blob in image.blobs:
        assert 1 <= odd.count("GET", blob) <= len(agents)
