"""Upstream registries at the tracker: read once for the whole fleet, kept over restarts, and left
alone when they ask for it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from access_rig import access_site, ask
from aiohttp import web
from image_rig import Made, Odd, docker_config, make_image, make_index, push_image, reads
from registry_rig import PASSWORD, Realm, Registry, free_port, needs_registry, running_registry
from waits import until

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import NotFound, Refused, Unavailable, UsageError
from p2pdist.model.image import ImageName, image_name, parse_image
from p2pdist.model.image_manifest import INDEX_TYPE
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.platform import parse_platform
from p2pdist.model.upstream import UpstreamSettings, parse_upstream, upstream_of
from p2pdist.model.vouched_list import vouched_layout
from tracker import joined_reads as reading
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.service import Service
from tracker.state.documents import Documents
from tracker.upstreams import upstreams as module
from tracker.upstreams.settings import UpstreamsFile, all_upstreams, read_upstreams
from tracker.upstreams.upstreams import Upstreams

LAYER = {"bin/hello": b"#!/bin/sh\necho hello\n", "data": bytes(range(256)) * 400}


Opens = Callable[..., Upstreams]


@pytest.fixture
async def opened() -> AsyncIterator[Opens]:
    """Opens the upstreams of a tracker, with settings for one registry."""
    running: list[Upstreams] = []

    def start(address: str, documents: Documents | None = None, **more: Any) -> Upstreams:
        settings = msgspec.structs.replace(parse_upstream(address), **more)
        running.append(Upstreams([settings], documents))
        return running[-1]

    yield start
    for upstreams in running:
        await upstreams.close()


def name_at(odd: Odd, repository: str = "team/app") -> ImageName:
    return image_name(odd.address, repository)


# -- one reading for all


async def test_a_fleet_that_asks_at_once_reads_each_thing_once(odd: Odd, opened: Opens) -> None:
    images = {name: make_image(LAYER, architecture=name) for name in ("amd64", "arm64")}
    index = make_index(images)
    for image in (*images.values(), index):
        odd.put("team/app", "v1", image)
    upstreams, name, learned = opened(odd.address), name_at(odd), []
    upstreams.learned = learned.append

    async def host() -> None:
        found = await upstreams.manifest(name, "v1")
        assert (found.data, found.media_type) == (index.data, index.media_type)
        image = images["amd64"]
        found = await upstreams.manifest(name, image.digest)
        assert (found.data, found.media_type) == (image.data, image.media_type)
        for blob, data in image.blobs.items():
            assert await upstreams.blob_size(name, blob) == len(data)

    await asyncio.gather(*(host() for _ in range(200)))
    assert odd.count("GET", f"manifests/{images['amd64'].digest}") == 1 and odd.count("HEAD", "") == 0
    layouts: dict[Digest, PieceLayout] = dict(itertools.chain(*learned))
    assert layouts == {blob: vouched_layout(len(data)) for blob, data in images["amd64"].blobs.items()}


async def test_a_tag_is_known_for_a_while_and_then_asked_for_with_head(
    odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_image(LAYER), make_image({"x": b"y"})
    odd.put("team/app", "v1", first)
    upstreams, name = opened(odd.address), name_at(odd)
    for _ in range(3):
        assert (await upstreams.manifest(name, "v1")).digest == first.digest
    assert odd.count("HEAD", "v1") == 0
    upstreams._tags.clear()
    kept = opened(odd.address, tags_ttl_s=0.0)
    for _ in range(3):
        assert (await kept.manifest(name, "v1")).digest == first.digest
    assert (odd.count("GET", "manifests/v1"), odd.count("HEAD", "manifests/v1")) == (2, 2)
    odd.put("team/app", "v1", second)
    assert (await kept.manifest(name, "v1")).digest == second.digest
    assert (await kept.manifest(name, first.digest)).data == first.data
    for key in ("team/app/manifests/v1",):
        del odd.documents[key]
    with pytest.raises(NotFound):
        await kept.manifest(name, "v1")


@pytest.mark.parametrize("status", [404, 405, 403])
async def test_a_registry_that_takes_no_head_is_asked_otherwise(odd: Odd, opened: Opens, status: int) -> None:
    first, second = make_image(LAYER), make_image({"x": b"y"})
    odd.put("team/app", "v1", first)

    async def no_head(request: web.Request) -> web.StreamResponse:
        if request.method == "HEAD":
            return web.Response(status=status)
        answers, odd.answers = odd.answers, {}
        try:
            return await odd.handle(request)
        finally:
            odd.answers = answers

    odd.answers["manifests/v1"] = no_head
    upstreams, name = opened(odd.address, tags_ttl_s=0.0), name_at(odd)
    for image in (first, second):
        odd.put("team/app", "v1", image)
        for _ in range(2):
            assert (await upstreams.manifest(name, "v1")).digest == image.digest


async def test_what_was_read_outlives_the_tracker_and_the_registry(odd: Odd, opened: Opens, tmp_path: Path) -> None:
    image = make_image(LAYER, docker=True)
    odd.put("team/app", "v1", image)
    documents = Documents(tmp_path / "state")
    name = name_at(odd)
    await opened(odd.address, documents).manifest(name, "v1")
    documents.close()

    async def broken(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    odd.answers = {"": broken}
    documents = Documents(tmp_path / "state")
    later = opened(odd.address, documents)
    found = await later.manifest(name, "v1")
    assert (found.data, found.media_type) == (image.data, image.media_type)
    assert (await later.manifest(name, image.digest)).media_type == image.media_type
    assert await later.blob_size(name, next(iter(image.blobs))) > 0
    strict = opened(odd.address, documents, serve_stale=False)
    with pytest.raises(Unavailable):
        await strict.manifest(name, "v1")
    assert (await strict.manifest(name, image.digest)).data == image.data
    documents.close()


async def test_a_registry_that_hangs_keeps_nobody_waiting_for_a_tag_that_is_known(
    odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    odd.put("team/app", "v1", image := make_image(LAYER))
    upstreams, name = opened(odd.address, tags_ttl_s=0.0), name_at(odd)
    await upstreams.manifest(name, "v1")
    gate = asyncio.Event()

    async def hangs(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return web.Response(status=503)

    odd.answers["v1"] = hangs
    for _ in range(20):
        assert (await upstreams.manifest(name, "v1")).digest == image.digest
    assert odd.count("HEAD", "v1") == 1
    gate.set()


async def test_an_answer_that_comes_too_late_for_its_client_counts_for_the_next(
    odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a registry that always takes longer than clients wait nothing would ever change here."""
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    monkeypatch.setattr(module, "AWAY_S", 0.0)
    former, image = make_image(LAYER), make_image({"new": b"content"})
    meant, listed, gate = former, ["v1"], asyncio.Event()
    gate.set()

    async def manifest(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        headers = {"Docker-Content-Digest": meant.digest, "Content-Type": meant.media_type}
        return web.Response(body=meant.data, headers=headers)

    async def tags(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return web.json_response({"tags": listed})

    odd.answers = {"manifests/v1": manifest, "tags/list": tags}
    upstreams, name = opened(odd.address, tags_ttl_s=0.0), name_at(odd)

    async def said() -> tuple[Digest, list[str]]:
        found = await upstreams.manifest(name, "v1")
        return found.digest, list((await upstreams.tags(name, 10)).names)

    assert await said() == (former.digest, ["v1"])
    meant, listed = image, ["v1", "v2"]
    gate.clear()
    assert await said() == (former.digest, ["v1"])
    gate.set()
    await until(lambda: upstreams.asked[odd.address, "ok"] == 4)
    gate.clear()
    assert await said() == (image.digest, ["v1", "v2"])
    gate.set()


async def test_a_late_answer_does_not_have_clients_wait_for_other_tags(
    odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a registry that is slow each tag would take them WAIT_S, as long as they wait at most."""
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    monkeypatch.setattr(module, "AWAY_S", 3600.0)
    former, image, gate = make_image(LAYER), make_image({"new": b"content"}), asyncio.Event()
    for tag in ("v1", "v2"):
        odd.put("team/app", tag, former)
    upstreams, name = opened(odd.address, tags_ttl_s=0.0), name_at(odd)
    for tag in ("v1", "v2"):
        await upstreams.manifest(name, tag)

    async def slow(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        headers = {"Docker-Content-Digest": image.digest, "Content-Type": image.media_type}
        return web.Response(body=image.data, headers=headers)

    odd.answers = {"manifests/v1": slow, "manifests/v2": slow}
    assert (await upstreams.manifest(name, "v1")).digest == former.digest
    gate.set()
    await until(lambda: upstreams.asked[odd.address, "ok"] == 3)
    asked = odd.count("HEAD", "v2")
    assert (await upstreams.manifest(name, "v1")).digest == image.digest
    assert (await upstreams.manifest(name, "v2")).digest == former.digest
    assert odd.count("HEAD", "v2") == asked


async def test_lists_are_given_as_they_were_while_a_registry_is_away(
    odd: Odd, opened: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the next tracker, and by one whose registry hangs."""
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    image, name = make_image(LAYER), name_at(odd)
    entries = [{"mediaType": image.media_type, "digest": image.digest, "size": 5, "artifactType": "a/b"}]
    index = json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}).encode()

    async def tags(request: web.Request) -> web.StreamResponse:
        return web.json_response({"tags": ["v1", "v2"]})

    async def referrers(request: web.Request) -> web.StreamResponse:
        return web.Response(body=index, headers={"Content-Type": INDEX_TYPE})

    async def hangs(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("nothing ends the wait")

    odd.answers = {"tags/list": tags, f"referrers/{image.digest}": referrers}
    documents = Documents(tmp_path / "state")
    first = opened(odd.address, documents, tags_ttl_s=0.0)
    expected = await first.tags(name, 10), await first.referrers(name, image.digest)
    assert expected[0].names == ("v1", "v2")
    odd.answers = {"": hangs}
    for upstreams in (first, opened(odd.address, documents, tags_ttl_s=0.0)):
        assert (await upstreams.tags(name, 10), await upstreams.referrers(name, image.digest)) == expected
    fresh = opened(odd.address, Documents(tmp_path / "other"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fresh.tags(name, 10), 0.5)
    documents.close()


async def test_other_settings_hold_from_one_moment_to_the_next(odd: Odd, opened: Opens, tmp_path: Path) -> None:
    odd.put("team/app", "v1", make_image(LAYER))
    upstreams, name = opened(odd.address), name_at(odd)
    await upstreams.manifest(name, "v1")
    kept = upstreams._registries[odd.address]
    path = tmp_path / "upstreams.toml"
    path.write_text("")
    file = UpstreamsFile((odd.address,), path, upstreams.replace)
    watching = asyncio.create_task(file.watch())
    try:

        async def until(names: list[str]) -> None:
            async with asyncio.timeout(60):
                while [upstream.name for upstream in upstreams.listed] != names:
                    await asyncio.sleep(0.02)

        path.write_text("[[upstream]]\nhost = 'quay.io'\n")
        file.reload()
        await until([odd.address, "quay.io"])
        assert upstreams._registries[odd.address] is kept
        path.write_text("[[upstream]]\nhost = 5\n")
        file.reload()
        await asyncio.sleep(0.2)
        await until([odd.address, "quay.io"])
        path.write_text("[[upstream]]\nhost = 'quay.io'\nnamespaces = ['a/*']\n")
        file.reload()
        async with asyncio.timeout(60):
            while upstreams._registries["quay.io"].registry.settings.namespaces != ("a/*",):
                await asyncio.sleep(0.02)
        path.write_text("")
        file.reload()
        await until([odd.address])
        with pytest.raises(NotFound):
            await upstreams.manifest(image_name("quay.io", "a/b"), "v1")
    finally:
        watching.cancel()


async def test_what_is_asked_while_settings_change_fails_in_words(odd: Odd, opened: Opens) -> None:
    """A question may take several requests: for a token, and when a busy registry is asked
    again."""
    began, gate = asyncio.Event(), asyncio.Event()

    async def token(request: web.Request) -> web.StreamResponse:
        began.set()
        await gate.wait()
        return web.json_response({"token": "t"})

    async def manifest(request: web.Request) -> web.StreamResponse:
        challenge = {"WWW-Authenticate": f'Bearer realm="http://{odd.address}/token"'}
        return web.Response(status=401, headers=challenge)

    odd.answers = {"token": token, "manifests/v1": manifest}
    upstreams = opened(odd.address)
    asking = asyncio.create_task(upstreams.manifest(name_at(odd), "v1"))
    await began.wait()
    await upstreams.replace([msgspec.structs.replace(parse_upstream(odd.address), tags_ttl_s=1.0)])
    gate.set()
    with pytest.raises(Unavailable, match="Try again"):
        await asking
    assert upstreams.asked[odd.address, "unavailable"] == 1


async def test_a_registry_that_asks_to_be_left_alone_is_left_alone_by_all(odd: Odd, opened: Opens) -> None:
    odd.put("team/app", "v1", make_image(LAYER))

    async def busy(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "900"})

    odd.answers["v2"] = busy
    upstreams = opened(odd.address)
    await upstreams.manifest(name_at(odd), "v1")
    before = len(odd.requests)
    for repository, tag in (("team/app", "v2"), ("team/app", "v3"), ("team/other", "v1")):
        with pytest.raises(Unavailable) as caught:
            await upstreams.manifest(name_at(odd, repository), tag)
        assert 0 < caught.value.details["retry_after"] <= 900
    assert len(odd.requests) - before == 1
    await upstreams.manifest(name_at(odd), "v1")


@pytest.mark.parametrize("status, most_s", [(429, 300), (503, 60), (500, 60)])
async def test_one_answer_closes_a_registry_for_minutes_at_most(
    odd: Odd, opened: Opens, status: int, most_s: float
) -> None:
    """A proxy on the way may say it, and hours of it would stop every job."""
    odd.put("team/app", "v1", make_image(LAYER))

    async def busy(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"Retry-After": "86400"})

    odd.answers["v2"] = busy
    upstreams = opened(odd.address)
    for tag in ("v2", "v1"):
        with pytest.raises(Unavailable) as caught:
            await upstreams.manifest(name_at(odd), tag)
        assert 0 < caught.value.details["retry_after"] <= most_s


@pytest.mark.parametrize("asks_again", [False, True])
async def test_after_a_pause_one_question_goes_before_those_of_the_fleet(
    odd: Odd, opened: Opens, asks_again: bool
) -> None:
    for number in range(20):
        odd.put("team/app", f"v{number}", make_image(LAYER))

    async def busy(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "900"})

    odd.answers[""] = busy
    upstreams, name = opened(odd.address), name_at(odd)
    with pytest.raises(Unavailable):
        await upstreams.manifest(name, "v0")
    if not asks_again:
        odd.answers = {}
    upstreams._registries[odd.address].pause.until = 0.0
    before = len(odd.requests)
    found = await asyncio.gather(
        *(upstreams.manifest(name, f"v{number}") for number in range(20)), return_exceptions=True
    )
    if asks_again:
        assert all(isinstance(answer, Unavailable) for answer in found) and len(odd.requests) - before == 1
    else:
        assert not any(isinstance(answer, BaseException) for answer in found) and len(odd.requests) - before == 20


async def test_what_is_absent_or_refused_is_not_asked_for_again_and_again(
    odd: Odd, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(request: web.Request) -> web.StreamResponse:
        return web.Response(status=403)

    odd.answers["secret"] = refuses
    upstreams, name = opened(odd.address), name_at(odd)
    for _ in range(10):
        with pytest.raises(NotFound):
            await upstreams.manifest(name, "absent")
        with pytest.raises(NotFound):
            await upstreams.blob_size(name, digest_of(b"absent"))
        with pytest.raises(Refused):
            await upstreams.manifest(name, "secret")
    assert len(odd.requests) == 3
    assert upstreams.asked == {(odd.address, "not-found"): 2, (odd.address, "refused"): 1}
    monkeypatch.setattr(reading, "MISSES_BURST", 5)
    monkeypatch.setattr(reading, "MISSES_PER_S", 0.001)
    reading.ASKER.set("10.0.0.1")
    with pytest.raises(Unavailable, match=r"10\.0\.0\.1"):
        for number in range(10):
            with pytest.raises(NotFound):
                await upstreams.manifest(name, f"absent-{number}")


async def test_only_what_the_settings_name_is_ever_asked(odd: Odd, opened: Opens) -> None:
    odd.put("team/app", "v1", make_image(LAYER))
    upstreams = opened(odd.address, namespaces=("public/*", "team/a"))
    for name in (
        name_at(odd),
        name_at(odd, "public"),
        name_at(odd, "team/a/b"),
        image_name("docker.io", "library/debian"),
        image_name("127.0.0.1", "team/a"),
        image_name(f"localhost:{odd.address.rpartition(':')[2]}", "team/a"),
    ):
        for attempt in (
            upstreams.manifest(name, "v1"),
            upstreams.tags(name, 10),
            upstreams.blob_size(name, digest_of(b"x")),
            upstreams.referrers(name, digest_of(b"x")),
            upstreams.token(name),
        ):
            with pytest.raises(NotFound):
                await attempt
    assert odd.requests == []


async def test_a_digest_is_known_by_name_alone(odd: Odd, opened: Opens) -> None:
    """Otherwise what is in a private repository could be read under the name of a public one."""
    odd.put("private/app", "v1", image := make_image(LAYER))
    upstreams = opened(odd.address)
    await upstreams.manifest(name_at(odd, "private/app"), "v1")
    with pytest.raises(NotFound):
        await upstreams.manifest(name_at(odd, "public/app"), image.digest)


async def test_an_image_is_that_of_the_platform(odd: Odd, opened: Opens) -> None:
    images = {name: make_image({name: b"x"}, architecture=name) for name in ("amd64", "arm64")}
    index = make_index(images, docker=True)
    for image in (*images.values(), index):
        odd.put("team/app", "v1", image)
    upstreams = opened(odd.address)
    reference = parse_image(f"docker://{odd.address}/team/app:v1")
    for platform in ("amd64", "arm64"):
        found = await upstreams.image(reference, parse_platform(f"linux/{platform}")[0])
        assert found.digest == index.digest and found.documents == (index.digest, images[platform].digest)
        assert found.parts == {blob: len(data) for blob, data in images[platform].blobs.items()}
    with pytest.raises(NotFound, match="linux/arm64"):
        await upstreams.image(reference, parse_platform("linux/s390x")[0])


async def test_a_registry_that_asks_for_no_token_is_not_asked_for_one_by_each_host(odd: Odd, opened: Opens) -> None:
    async def tags(request: web.Request) -> web.StreamResponse:
        return web.json_response({"tags": ["v1"]})

    odd.answers["tags/list"] = tags
    upstreams = opened(odd.address)
    for _ in range(20):
        assert (await upstreams.token(name_at(odd))).token == ""
    assert len(odd.requests) == 1


async def test_blobs_that_a_repository_has_are_asked_for_once(odd: Odd, opened: Opens, tmp_path: Path) -> None:
    """Also by the next tracker."""
    image, absent = make_image(LAYER), digest_of(b"absent")
    odd.put("team/app", "v1", image)
    blobs = list(image.blobs)
    for _ in range(2):
        documents = Documents(tmp_path / "state")
        upstreams = opened(odd.address, documents)
        assert await upstreams.confirmed(name_at(odd), blobs, image.digest) == set(blobs)
        assert await upstreams.confirmed(name_at(odd), blobs, image.digest) == set(blobs)
        assert await upstreams.confirmed(name_at(odd), [*blobs, absent], absent) == set(blobs)
        documents.close()
    assert odd.count("HEAD", image.digest) == 0
    assert odd.count("HEAD", blobs[0]) == 2, "for the document that names what is absent, too"


async def test_a_manifest_that_is_a_blob_too_does_not_vouch_for_what_it_names(
    odd: Odd, opened: Opens, tmp_path: Path
) -> None:
    """Its author may push the bytes of a manifest as a blob, and name blobs of others in it."""
    image = make_image(LAYER)
    odd.put("team/app", "v1", image)
    odd.blobs = {image.digest: image.data}
    documents = Documents(tmp_path / "state")
    upstreams = opened(odd.address, documents)
    for _ in range(2):
        assert await upstreams.has_blob(name_at(odd), image.digest)
        assert await upstreams.confirmed(name_at(odd), list(image.blobs), image.digest) == set()
    documents.close()


# -- settings


def test_upstreams_are_named_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "upstreams.toml"
    file.write_text(
        """
        [[upstream]]
        host = "docker.io"
        credentials = "hub.json"
        tags_ttl = "5m"
        [[upstream]]
        name = "Registry.example.org:5000"
        url = "http://10.0.0.1:80/"
        tag_ttl_s = 0
        serve_stale = false
        allow = ["team/*"]
        redirects = ["10.0.0.0/8", "storage.internal"]
        """
    )
    hub, other, named = all_upstreams(["127.0.0.1:5000"], file)[1:] + all_upstreams(["127.0.0.1:5000"], file)[:1]
    assert hub == UpstreamSettings(
        "docker.io", "https://registry-1.docker.io", credentials=str(tmp_path / "hub.json"), tags_ttl_s=300.0
    )
    assert other == UpstreamSettings(
        "registry.example.org:5000",
        "http://10.0.0.1:80",
        tags_ttl_s=0.0,
        serve_stale=False,
        namespaces=("team/*",),
        redirects=("10.0.0.0/8", "storage.internal"),
    )
    assert named.url == "http://127.0.0.1:5000"
    assert upstream_of("quay.io").url == "https://quay.io"
    assert upstream_of("quay.io", insecure=True).url == "http://quay.io"


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[upstream]\nhost='a.b'",
        "[[other]]\nhost='a.b'",
        "[[upstream]]\nurl='https://a.b'",
        "[[upstream]]\nhost=5",
        "[[upstream]]\nhost='a/b'",
        "[[upstream]]\nhost='../b'",
        "[[upstream]]\nhost='a.b'\nurl='ftp://a.b'",
        "[[upstream]]\nhost='a.b'\nurl='https://u:secret@a.b'",
        "[[upstream]]\nhost='a.b'\nurl='https://a.b/path'",
        "[[upstream]]\nhost='a.b'\nurl='https://a.b:99999'",
        "[[upstream]]\nhost='a.b'\nkind='s3'",
        "[[upstream]]\nhost='a.b'\ntags_ttl=-1",
        "[[upstream]]\nhost='a.b'\ntags_ttl='soon'",
        "[[upstream]]\nhost='a.b'\ntags_ttl=inf",
        "[[upstream]]\nhost='a.b'\nnamespaces=[]",
        "[[upstream]]\nhost='a.b'\nnamespaces=['A b']",
        "[[upstream]]\nhost='a.b'\nspelled=1",
        "[[upstream]]\nhost='a.b'\nredirects=['a b']",
        "[[upstream]]\nhost='a.b'\nredirects=['https://a.b']",
        "[[upstream]]\nhost='a.b'\n[[upstream]]\nhost='a.b'",
    ],
)
def test_a_file_with_a_mistake_is_refused_without_its_secrets(tmp_path: Path, text: str) -> None:
    file = tmp_path / "upstreams.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_upstreams(file)
    assert "secret" not in str(caught.value)


# -- over HTTP


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("guarded"), Realm()) as running:
        yield running


def push_private(registry: Registry, repository: str) -> tuple[Made, Made]:
    image = make_image(LAYER, {"more": repository.encode()}, compressions=("gzip", "zstd"))
    index = make_index({"amd64": image})
    push_image(registry, repository, "v1", image, index)
    return image, index


@needs_registry
async def test_agents_get_images_and_tokens_and_never_the_account(guarded: Registry, tmp_path: Path) -> None:
    image, index = push_private(guarded, "private/http")
    (tmp_path / "account.json").write_text(docker_config(guarded))
    settings = msgspec.structs.replace(parse_upstream(guarded.address), credentials=str(tmp_path / "account.json"))
    async with AsyncExitStack() as stack:
        upstreams = Upstreams([settings])
        stack.push_async_callback(upstreams.close)
        fleet = Fleet(started_at=asyncio.get_running_loop().time())
        http = await serving(make_app(Service(fleet, Content(None), upstreams=upstreams)), stack)
        base = f"/v1/images/{guarded.address}/private/http"
        texts = [await text_of(http, "/v1/upstreams")]
        assert json.loads(texts[0]) == [{"name": guarded.address, "url": f"http://{guarded.address}"}]
        async with http.get(f"{base}/manifests/v1") as answer:
            assert (answer.status, answer.content_type) == (200, index.media_type)
            assert answer.headers["ETag"] == f'"{index.digest}"' and await answer.read() == index.data
        async with http.get(f"{base}/manifests/v1", headers={"If-None-Match": f'"{index.digest}"'}) as answer:
            assert (answer.status, await answer.read()) == (304, b"")
        async with http.get(f"{base.replace('private/http', 'private%2Fhttp')}/manifests/{image.digest}") as answer:
            assert await answer.read() == image.data
        for blob, data in image.blobs.items():
            texts.append(await text_of(http, f"{base}/blobs/{blob}"))
            assert json.loads(texts[-1]) == {"digest": blob, "size": len(data)}
            async with http.head(f"{base}/blobs/{blob}") as answer:
                assert answer.headers["Content-Length"] == str(len(data))
            assert fleet.membership.described(blob)
        texts += [await text_of(http, f"{base}/tags"), await text_of(http, f"{base}/referrers/{image.digest}")]
        assert json.loads(texts[-2]) == {"tags": ["v1"], "more": False} and json.loads(texts[-1])["manifests"] == []
        texts.append(await text_of(http, f"{base}/token"))
        token = json.loads(texts[-1])["token"]
        assert PASSWORD not in "".join(texts)
        url = f"http://{guarded.address}/v2/private/http/blobs/{next(iter(image.blobs))}"
        async with http.get(url, headers={"Authorization": f"Bearer {token}"}) as answer:
            assert answer.status == 200
        async with http.get(
            url.replace("private/http", "private/other"), headers={"Authorization": f"Bearer {token}"}
        ) as answer:
            assert answer.status == 401
        for path, expected in {
            f"{base}/manifests/absent": 404,
            f"{base}/manifests/..%2F..%2Fx": 400,
            f"{base}/manifests/sha256:x": 400,
            f"{base}/blobs/{digest_of(b'absent')}": 404,
            f"{base}/blobs/x": 400,
            f"{base}/tags?n=x": 400,
            f"{base}/tags?last=a/b": 400,
            "/v1/images/docker.io/library/debian/manifests/latest": 404,
            f"/v1/images/{guarded.address}/UPPER/manifests/v1": 400,
            f"/v1/images/{guarded.address}/private%2F..%2Fhttp/manifests/v1": 400,
            "/v1/images/a%2Fb/c/manifests/v1": 400,
        }.items():
            async with http.get(http_url(http, path)) as answer:
                assert answer.status == expected, path
    assert reads(guarded, "GET", "/v2/private/http/manifests/v1 ") == 2, "one of them before it had a token"


def http_url(http: aiohttp.ClientSession, path: str) -> Any:
    from yarl import URL

    return URL(str(http._base_url).rstrip("/") + path, encoded=True)


async def serving(app: web.Application, stack: AsyncExitStack) -> aiohttp.ClientSession:
    """A client of an application that is served until the stack ends."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))


async def text_of(http: aiohttp.ClientSession, path: str) -> str:
    async with http.get(path) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.text()


# -- rights

RULES = """
fleet = "prod"
[join.default]
read = ["*"]
[join.a]
read = ["{upstream}/team-a/*"]
[role.slurm]
may = ["preseed", "rank"]
read = ["{upstream}/team-a/*"]
"""


async def test_an_image_is_a_package_of_its_name_for_rights(odd: Odd, tmp_path: Path) -> None:
    """The author of a manifest may name blobs of others in it; the registry does not have them
    there."""
    image, other = make_image(LAYER), make_image({"b": b"secret of b"})
    odd.put("team-a/x", "v1", image)
    odd.put("team-b/y", "v1", other)
    stolen = json.loads(image.data)
    stolen["layers"] = json.loads(other.data)["layers"]
    forged = Made(json.dumps(stolen).encode(), image.media_type, image.blobs)
    odd.put("team-a/forged", "v1", forged)

    async def by_repository(request: web.Request) -> web.StreamResponse:
        repository, _, digest = request.path.removeprefix("/v2/").partition("/blobs/")
        has = other.blobs if repository == "team-b/y" else image.blobs
        if Digest(digest) not in has:
            return web.Response(status=404)
        return await odd._blob(request, has[Digest(digest)])

    odd.answers |= dict.fromkeys((*image.blobs, *other.blobs), by_repository)
    async with access_site(
        tmp_path, RULES.format(upstream=odd.address), upstreams=[parse_upstream(odd.address)]
    ) as site:
        agent, every = await site.join("host-a", "a"), await site.join("host-b")
        slurm = await site.stranger(site.token("slurm"))
        base = f"/v1/images/{odd.address}"
        book = site.service.fleet.policies
        assert await ask(agent.http, "GET", f"{base}/team-a/x/manifests/v1") == image.data
        for blob in image.blobs:
            assert f"{odd.address}/team-a/x" in book.readers_of(blob)
        before = len(odd.requests)
        for path in ("manifests/v1", f"manifests/{other.digest}", "tags", "token", f"blobs/{next(iter(other.blobs))}"):
            with pytest.raises(NotFound):
                await ask(agent.http, "GET", f"{base}/team-b/y/{path}")
        assert len(odd.requests) == before, "what may not be read is not asked for either"
        assert await ask(every.http, "GET", f"{base}/team-b/y/manifests/v1") == other.data
        assert await ask(agent.http, "GET", f"{base}/team-a/forged/manifests/v1") == forged.data
        for blob in other.blobs:
            assert f"{odd.address}/team-a/forged" not in book.readers_of(blob)
        order = {"package": f"docker://{odd.address}/team-b/y:v1", "count": 1}
        for method, path, body in (
            ("POST", "/v1/preseeds", order),
            ("POST", "/v1/rank", {"packages": [order["package"]]}),
        ):
            with pytest.raises(NotFound):
                await ask(slurm, method, path, body)
        order["package"] = f"docker://{odd.address}/team-a/x:v1"
        made = msgspec.json.decode(await ask(slurm, "POST", "/v1/preseeds", order))
        assert made["package"] == f"{order['package']}@{image.digest}"
        assert (await ask(slurm, "GET", f"/v1/preseeds/{made['id']}")) != b""
