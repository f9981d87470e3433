"""Packages in a real OCI registry, with and without token authentication."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import ClientConnectionError, ClientResponse, web
from origin_rig import free_port, store_file
from registry_rig import PASSWORD, USER, Realm, Registry, needs_registry, running_registry
from yarl import URL

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, NotFound, Refused, Unavailable, UsageError
from p2pdist.model.manifest import Reference, parse_reference
from p2pdist.origin.contract import Origin
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LocalLayout
from p2pdist.origin.registry import upload
from p2pdist.origin.registry.client import RegistryClient
from p2pdist.origin.registry.names import RepositoryNames
from p2pdist.package.repository.push import push

pytestmark = needs_registry


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
async def opened() -> AsyncIterator[Callable[[str], Origin]]:
    """Opens origins, and closes them after the test."""
    origins: list[Origin] = []

    def start(url: str) -> Origin:
        origins.append(open_origin(url))
        return origins[-1]

    yield start
    for origin in origins:
        await origin.close()


async def test_what_was_written_is_read_back(registry: Registry, opened: Any, payload: Path) -> None:
    origin = opened(registry.url("back/packages"))
    digest, manifest = await store_file(origin, payload, "team/app:v1")
    data = payload.read_bytes()
    other = opened(registry.url("back/packages"))
    assert await other.resolve(parse_reference("team/app:v1")) == manifest
    assert await other.resolve(Reference("team/app", digest=manifest.digest)) == manifest
    assert await other.tags() == [("team/app:v1", manifest)]
    assert await other.size(digest) == len(data)
    assert await other.read(digest) == data
    assert digest_of(await other.read(manifest.digest)) == manifest.digest
    assert await other.read_range(digest, 1000, 5000) == data[1000:6000]
    assert await other.read_range(digest, len(data) - 1, 1) == data[-1:]
    assert await other.read_range(digest, 0, 0) == b""
    with pytest.raises(Corrupt):
        await other.read_range(digest, len(data) - 1, 2)
    with pytest.raises(Corrupt):
        await other.read_range(digest, len(data), 1)


async def test_unknown_names_say_where_they_were_sought(registry: Registry, opened: Any, payload: Path) -> None:
    origin = opened(registry.url("unknown/packages"))
    absent = digest_of(b"absent")
    for before in (True, False):
        for attempt in (
            origin.resolve(parse_reference("app:v2")),
            origin.resolve(Reference("app", digest=absent)),
            origin.read(absent),
            origin.read_range(absent, 0, 10),
            origin.untag(parse_reference("app:v2")),
        ):
            with pytest.raises(NotFound) as caught:
                await attempt
            assert origin.url in str(caught.value)
        assert await origin.size(absent) is None
        if before:
            assert await origin.tags() == []
            await store_file(origin, payload, "app:v1")


async def test_a_blob_is_sent_in_chunks_and_once(
    registry: Registry, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pdist.origin.registry.origin.CHUNK_BYTES", 1 << 20)
    path = tmp_path / "large"
    path.write_bytes(b"".join(number.to_bytes(4, "big") for number in range(1 << 20)))
    digest = digest_of(path.read_bytes())
    origin, seen = opened(registry.url("chunks/packages")), []
    assert await origin.write_blob(digest, path, on_bytes=seen.append) == 4 << 20
    assert seen == [1 << 20] * 4
    assert await origin.write_blob(digest, path, on_bytes=seen.append) == 0
    assert len(seen) == 4
    assert await origin.read(digest) == path.read_bytes()


@pytest.mark.parametrize("broken", ["before", "within", "behind", "the end"])
async def test_an_upload_goes_on_from_where_it_was_broken_off(
    registry: Registry, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A push of hours does not fail for one answer that does not come."""
    monkeypatch.setattr("p2pdist.origin.registry.origin.CHUNK_BYTES", 1 << 20)
    path = tmp_path / "large"
    path.write_bytes(b"".join(number.to_bytes(4, "big") for number in range(3 << 18)))
    digest = digest_of(path.read_bytes())
    send, asked = RegistryClient._send, Counter[str]()

    async def lose(self: RegistryClient, method: str, url: URL, headers: dict[str, str], data: Any) -> ClientResponse:
        asked[method] += 1
        if method != ("PUT" if broken == "the end" else "PATCH") or asked[method] not in (1, 3):
            return await send(self, method, url, headers, data)
        if broken == "within":
            half = len(data) // 2
            start = headers["Content-Range"].partition("-")[0]
            headers |= {"Content-Length": str(half), "Content-Range": f"{start}-{int(start) + half - 1}"}
            data = data[:half]
        if broken != "before":
            (await send(self, method, url, headers, data)).release()
        raise ClientConnectionError("broken off")

    monkeypatch.setattr(RegistryClient, "_send", lose)
    origin, seen = opened(registry.url(f"resumed/{broken.replace(' ', '-')}")), list[int]()
    assert await origin.write_blob(digest, path, on_bytes=seen.append) == 3 << 20
    assert sum(seen) == 3 << 20
    assert asked["PUT" if broken == "the end" else "PATCH"] > 1
    assert await origin.read(digest) == path.read_bytes()


@pytest.mark.parametrize("status", [404, 204])
async def test_an_upload_is_not_begun_for_ever(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(upload, "CHUNK_PAUSE_S", 0.01)
    asked = Counter[str]()

    async def handler(request: web.Request) -> web.Response:
        asked[request.method] += 1
        if request.method == "HEAD":
            return web.Response(status=404)
        if request.method == "PATCH":
            return web.Response(status=503, text="down")
        given = {"Location": request.path, "Range": "0-0"} if status == 204 else {}
        return web.Response(status=202 if request.method == "POST" else status, headers={"Location": "/v2/u", **given})

    path = tmp_path / "file"
    path.write_bytes(BLOB)
    with pytest.raises(Unavailable, match="503"):
        await (await odd(handler)).write_blob(DIGEST, path)
    assert asked["PATCH"] == 4
    assert asked["POST"] == (4 if status == 404 else 1)


async def test_an_altered_file_is_never_stored(registry: Registry, opened: Any, tmp_path: Path) -> None:
    path, digest = tmp_path / "altered", digest_of(b"something else")
    path.write_bytes(bytes(1000))
    origin = opened(registry.url("altered/packages"))
    with pytest.raises(Corrupt, match=str(path)):
        await origin.write_blob(digest, path)
    assert await origin.size(digest) is None


async def test_a_blob_of_another_repository_is_taken_there(registry: Registry, opened: Any, payload: Path) -> None:
    base = opened(registry.url("mount/base"))
    digest, _ = await store_file(base, payload, "base:v1")
    seen: list[int] = []
    origin = opened(registry.url("mount/app") + "?mount=mount/none&mount=mount/base")
    assert await origin.write_blob(digest, payload, on_bytes=seen.append) == 0
    assert seen == []
    assert await origin.read(digest) == payload.read_bytes()


async def test_removing_a_tag_leaves_the_others_of_its_manifest(registry: Registry, opened: Any, payload: Path) -> None:
    origin = opened(registry.url("untag/packages"))
    digest, manifest = await store_file(origin, payload, "app:v1")
    await origin.tag(parse_reference("app:v2"), manifest)
    assert await origin.untag(parse_reference("app:v1")) == manifest
    fresh = opened(registry.url("untag/packages"))
    assert await fresh.tags() == [("app:v2", manifest)]
    assert await fresh.resolve(Reference("app", digest=manifest.digest)) == manifest
    assert await fresh.read(digest) == payload.read_bytes()


async def test_tags_are_listed_page_by_page(
    registry: Registry, opened: Any, payload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pdist.origin.registry.origin.TAG_PAGE", 2)
    origin = opened(registry.url("pages/packages"))
    _, manifest = await store_file(origin, payload, "app:v0")
    names = [f"app:v{number}" for number in range(5)]
    for name in names[1:]:
        await origin.tag(parse_reference(name), manifest)
    assert await origin.tags() == [(name, manifest) for name in names]


async def test_a_push_sends_what_is_missing(registry: Registry, opened: Any, tmp_path: Path, payload: Path) -> None:
    """The second version of a package costs what changed."""
    layout = LocalLayout(tmp_path / "layout")
    layout.scratch()
    for number in (1, 2):
        (tmp_path / "more").write_bytes(bytes([number]) * 70_000)
        await store_file(layout, payload if number == 1 else tmp_path / "more", f"team/app:v{number}")
        origin = opened(registry.url("delta/packages"))
        reference = parse_reference(f"team/app:v{number}")
        assert (await push(reference, layout, origin)).bytes_sent > 0
        again = await push(reference, layout, opened(registry.url("delta/packages")))
        assert again.bytes_sent == 0
    await layout.close()


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")
async def test_skopeo_copies_a_package_away_and_back(
    registry: Registry, opened: Any, tmp_path: Path, payload: Path
) -> None:
    origin = opened(registry.url("skopeo/trainer"))
    digest, manifest = await store_file(origin, payload, "trainer:v1")
    here, there = f"docker://{registry.address}/skopeo/trainer:v1", f"oci:{tmp_path}/copy:trainer:v1"
    back = f"docker://{registry.address}/skopeo/back:v7"
    for source, target in ((here, there), (there, back)):
        words = ["skopeo", "copy", "--src-tls-verify=false", "--dest-tls-verify=false", source, target]
        subprocess.run(words, check=True, capture_output=True)
    returned = opened(registry.url("skopeo/back"))
    assert await returned.resolve(parse_reference("back:v7")) == manifest
    assert await returned.read(digest) == payload.read_bytes()
    assert await returned.tags() == [("back:v7", manifest)]


# -- credentials


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("guarded"), Realm()) as running:
        yield running


async def test_a_token_is_fetched_once_for_what_it_is_needed_for(guarded: Registry, opened: Any, payload: Path) -> None:
    assert guarded.realm is not None
    guarded.realm.asked.clear()
    origin = opened(guarded.url("private/packages", f"{USER}:{quote(PASSWORD, safe='')}"))
    digest, _ = await store_file(origin, payload, "app:v1")
    assert await origin.read(digest) == payload.read_bytes()
    scopes = [query["scope"] for query in guarded.realm.asked]
    assert sorted(scopes) == [["repository:private/packages:pull"], ["repository:private/packages:pull,push"]]
    assert PASSWORD not in origin.url and USER not in origin.url


async def test_docker_login_counts(
    guarded: Registry, opened: Any, payload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {guarded.address: {"auth": auth}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    await store_file(opened(guarded.url("login/packages")), payload, "app:v1")


async def test_without_rights_it_is_said_what_to_do(
    guarded: Registry, opened: Any, payload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for user in ("", f"{USER}:wrong"):
        origin = opened(guarded.url("private/packages", user))
        with pytest.raises(Refused, match="docker login") as caught:
            await store_file(origin, payload, "app:v1")
        assert "wrong" not in str(caught.value)


async def test_a_token_that_ends_is_renewed(opened: Any, payload: Path, tmp_path: Path) -> None:
    realm = Realm(lasts_s=1)
    with running_registry(tmp_path / "registry", realm) as registry:
        origin = opened(registry.url("private/packages", f"{USER}:{quote(PASSWORD, safe='')}"))
        digest, _ = await store_file(origin, payload, "app:v1")
        before = len(realm.asked)
        await asyncio.sleep(1.2)
        assert await origin.read(digest) == payload.read_bytes()
        assert len(realm.asked) > before


# -- registries that behave badly


@pytest.fixture
async def odd(opened: Any) -> AsyncIterator[Callable[..., Any]]:
    """Starts a server whose every answer is this handler's; returns an origin at it."""
    runners: list[web.AppRunner] = []

    async def start(handler: Any) -> Origin:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        port = free_port()
        await web.TCPSite(runners[-1], "127.0.0.1", port).start()
        origin: Origin = opened(f"oci://u:secret-word@127.0.0.1:{port}/team/packages")
        return origin

    yield start
    for runner in runners:
        await runner.cleanup()


BLOB = bytes(range(256)) * 64
DIGEST = digest_of(BLOB)


async def test_a_range_that_is_ignored_is_found_all_the_same(odd: Any) -> None:
    origin = await odd(_answer(BLOB))
    assert await origin.read_range(DIGEST, 1000, 5000) == BLOB[1000:6000]


async def test_a_registry_without_ranges_sends_a_blob_once_for_all_ranges(odd: Any) -> None:
    """It sent the blob from its beginning for each piece: half of the square of what was read."""
    asked: list[str] = []

    async def whole(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=BLOB)

    origin, step = await odd(whole), 1024
    starts = range(0, len(BLOB), step)
    assert [await origin.read_range(DIGEST, start, step) for start in starts] == [
        BLOB[start : start + step] for start in starts
    ]
    assert len(asked) == 1
    asked.clear()
    pieces = await asyncio.gather(*(origin.read_range(DIGEST, start, step) for start in starts))
    assert b"".join(pieces) == BLOB
    assert len(asked) <= 1
    with pytest.raises(Corrupt):
        await origin.read_range(DIGEST, len(BLOB) - 1, 2)


async def test_a_document_whose_connection_breaks_off_is_not_damaged(odd: Any) -> None:
    """Pulls wait for a registry that is disturbed; what is damaged they give up."""

    async def broken(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(BLOB))})
        await response.prepare(request)
        await response.write(BLOB[:1000])
        assert request.transport is not None
        request.transport.close()
        return response

    with pytest.raises(Unavailable, match="broke the connection"):
        await (await odd(broken)).read(DIGEST)


async def test_another_range_or_other_bytes_are_corrupt(odd: Any) -> None:
    async def shifted(request: web.Request) -> web.Response:
        return web.Response(status=206, body=BLOB[:100], headers={"Content-Range": f"bytes 0-99/{len(BLOB)}"})

    with pytest.raises(Corrupt):
        await (await odd(shifted)).read_range(DIGEST, 50, 100)
    with pytest.raises(Corrupt):
        await (await odd(_answer(b"x" + BLOB[1:]))).read(DIGEST)


async def test_storage_behind_a_redirect_gets_no_credentials(odd: Any) -> None:
    seen: list[str | None] = []

    async def storage(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(body=BLOB)

    other = await odd(storage)
    target = other.url.replace("oci://127.0.0.1", "http://localhost") + "/there"

    async def redirects(request: web.Request) -> web.Response:
        if "Authorization" not in request.headers:
            return web.Response(status=401, headers={"WWW-Authenticate": "Basic realm=x"})
        return web.Response(status=307, headers={"Location": target})

    assert await (await odd(redirects)).read(DIGEST) == BLOB
    assert seen == [None]


async def test_storage_behind_a_redirect_may_take_signed_gets_alone(odd: Any) -> None:
    """A push looks first whether a blob is there, and was refused."""

    async def storage(request: web.Request) -> web.Response:
        if request.method == "HEAD":
            return web.Response(status=403)
        return web.Response(status=206, body=BLOB[:1], headers={"Content-Range": f"bytes 0-0/{len(BLOB)}"})

    target = (await odd(storage)).url.replace("oci://127.0.0.1", "http://localhost") + "/there"

    async def redirects(request: web.Request) -> web.Response:
        if DIGEST in request.path and "/blobs/" in request.path:
            return web.Response(status=307, headers={"Location": target})
        return web.Response(status=404)

    origin = await odd(redirects)
    assert await origin.size(DIGEST) == len(BLOB)
    assert await origin.size(digest_of(b"absent")) is None


async def test_a_busy_registry_is_asked_again_and_a_broken_one_is_not_for_ever(odd: Any) -> None:
    asked = 0

    async def busy_once(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 1:
            return web.Response(status=429, headers={"Retry-After": "0"})
        return web.Response(body=BLOB)

    assert await (await odd(busy_once)).read(DIGEST) == BLOB

    async def broken(request: web.Request) -> web.Response:
        return web.Response(status=503, headers={"Retry-After": "0"}, text="down")

    with pytest.raises(Unavailable):
        await (await odd(broken)).read(DIGEST)

    async def away_for_long(request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "3600"})

    with pytest.raises(Unavailable, match="3600"):
        await (await odd(away_for_long)).read(DIGEST)


@pytest.mark.parametrize(
    "challenge",
    ["", "Bearer", 'Bearer realm="file:///etc/passwd"', 'Bearer realm="nonsense"', "Negotiate", 'Digest realm="x"'],
)
async def test_a_challenge_that_cannot_be_met_is_a_refusal(odd: Any, challenge: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=401, headers={"WWW-Authenticate": challenge} if challenge else {})

    with pytest.raises(Refused) as caught:
        await (await odd(handler)).read(DIGEST)
    assert "secret-word" not in str(caught.value)


async def test_uploads_are_sent_nowhere_else(odd: Any, tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.method == "POST":
            return web.Response(status=202, headers={"Location": "http://192.0.2.1/upload"})
        return web.Response(status=404)

    path = tmp_path / "file"
    path.write_bytes(BLOB)
    with pytest.raises(Refused, match="192"):
        await (await odd(handler)).write_blob(DIGEST, path)


@pytest.mark.parametrize("knows", ["all", "some", "none"])
async def test_an_upload_that_breaks_off_goes_on_where_the_registry_has_it(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: str
) -> None:
    """What breaks it off may have come before the registry took a chunk or after, and the registry
    may have lost all of it."""
    monkeypatch.setattr("p2pdist.origin.registry.origin.CHUNK_BYTES", 5000)
    monkeypatch.setattr("p2pdist.origin.registry.upload.CHUNK_PAUSE_S", 0.01)
    uploads: list[bytearray] = []
    breaks, told = {5000, 10_000}, 0

    async def handler(request: web.Request) -> web.Response:
        place = {"Location": f"/v2/team/packages/blobs/uploads/{len(uploads)}"}
        match request.method:
            case "POST":
                uploads.append(bytearray())
                return web.Response(status=202, headers={"Location": f"{place['Location'][:-1]}{len(uploads)}"})
            case "GET":
                if knows == "none":
                    return web.Response(status=404)
                return web.Response(status=204, headers={**place, "Range": f"0-{max(0, len(uploads[-1]) - 1)}"})
            case "PATCH":
                start = int(request.headers["Content-Range"].partition("-")[0])
                assert start == len(uploads[-1]), "out of order"
                broken = start in breaks
                breaks.discard(start)
                if knows == "all" or not broken:
                    uploads[-1] += await request.read()
                return web.Response(status=502 if broken else 202, headers=place)
            case "PUT":
                return web.Response(status=201 if uploads[-1] == BLOB else 400)
        return web.Response(status=404)

    def sent(length: int) -> None:
        nonlocal told
        told += length

    path = tmp_path / "file"
    path.write_bytes(BLOB)
    origin = await odd(handler)
    assert await origin.write_blob(DIGEST, path, on_bytes=sent) == told == len(BLOB)
    assert len(uploads) == (3 if knows == "none" else 1)
    breaks.add(5000)
    assert await origin.write_document(BLOB) == DIGEST, "documents as well"
    assert bytes(uploads[-1]) == BLOB


async def test_an_upload_goes_on_once_its_registry_is_back(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It restarts: a chunk fails, and so does the question how much of it came."""
    monkeypatch.setattr("p2pdist.origin.registry.origin.CHUNK_BYTES", 5000)
    monkeypatch.setattr("p2pdist.origin.registry.upload.CHUNK_PAUSE_S", 0.01)
    monkeypatch.setattr("p2pdist.origin.registry.client._pause_s", lambda response, tries: 0.01)
    taken, seen, away = bytearray(), list[int](), 10

    async def handler(request: web.Request) -> web.Response:
        nonlocal away
        place = {"Location": "/v2/team/packages/blobs/uploads/1"}
        if len(taken) == 5000 and request.method in ("GET", "PATCH") and away:
            away -= 1
            return web.Response(status=503)
        match request.method:
            case "POST":
                return web.Response(status=202, headers=place)
            case "GET":
                return web.Response(status=204, headers={**place, "Range": f"0-{len(taken) - 1}"})
            case "PATCH":
                taken.extend(await request.read())
                return web.Response(status=202, headers=place)
            case "PUT":
                return web.Response(status=201 if taken == BLOB else 400)
        return web.Response(status=404)

    path = tmp_path / "file"
    path.write_bytes(BLOB)
    assert await (await odd(handler)).write_blob(DIGEST, path, on_bytes=seen.append) == sum(seen) == len(BLOB)
    assert not away


@pytest.mark.parametrize("came", [True, False])
async def test_an_upload_of_one_byte_goes_on(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, came: bool
) -> None:
    """Its registry says 0-0 where it has the byte, and where it has nothing."""
    monkeypatch.setattr("p2pdist.origin.registry.upload.CHUNK_PAUSE_S", 0.01)
    uploads: list[bytearray] = []

    async def handler(request: web.Request) -> web.Response:
        number = request.path.rpartition("/")[2]
        upload = uploads[int(number)] if number.isdecimal() else bytearray()
        match request.method:
            case "POST":
                uploads.append(bytearray())
                place = f"/v2/team/packages/blobs/uploads/{len(uploads) - 1}"
                return web.Response(status=202, headers={"Location": place})
            case "GET":
                return web.Response(status=204, headers={"Range": "0-0"})
            case "PATCH":
                if upload:
                    return web.Response(status=416)
                broken = upload is uploads[0]
                if came or not broken:
                    upload += await request.read()
                return web.Response(status=504 if broken else 202, headers={"Location": request.path})
            case "PUT":
                return web.Response(status=201 if upload == b"x" else 400)
        return web.Response(status=404)

    path = tmp_path / "file"
    path.write_bytes(b"x")
    assert await (await odd(handler)).write_blob(digest_of(b"x"), path) == 1


async def test_a_registry_that_takes_no_chunk_is_left_after_some_tries(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pdist.origin.registry.upload.CHUNK_PAUSE_S", 0.01)
    chunks = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal chunks
        chunks += request.method == "PATCH"
        statuses = {"POST": 202, "GET": 204, "PATCH": 503}
        place = {"Location": "/v2/team/packages/blobs/uploads/1", "Range": "0-0"}
        return web.Response(status=statuses.get(request.method, 404), headers=place)

    path = tmp_path / "file"
    path.write_bytes(BLOB)
    with pytest.raises(Unavailable, match="503"):
        await (await odd(handler)).write_blob(DIGEST, path)
    assert chunks == 4


async def test_a_registry_that_loses_what_it_took_is_left_after_some_tries(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the first chunk each time, and ends at the second."""
    monkeypatch.setattr("p2pdist.origin.registry.origin.CHUNK_BYTES", 5000)
    monkeypatch.setattr("p2pdist.origin.registry.upload.CHUNK_PAUSE_S", 0.01)
    starts: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        place = {"Location": "/v2/team/packages/blobs/uploads/1"}
        if request.method == "PATCH":
            starts.append(request.headers["Content-Range"].partition("-")[0])
            if len(starts) > 20:
                return web.Response(status=400, text="for ever")
            return web.Response(status=202 if starts[-1] == "0" else 502, headers=place)
        return web.Response(status=202 if request.method == "POST" else 404, headers=place)

    path = tmp_path / "file"
    path.write_bytes(BLOB)
    with pytest.raises(Unavailable, match="502"):
        await (await odd(handler)).write_blob(DIGEST, path)
    assert starts == ["0", "5000"] * 4


async def test_an_upload_goes_on_where_the_registry_was_still_taking_a_chunk(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy gave up, and the registry says at first that it has nothing of the chunk."""
    monkeypatch.setattr("p2pdist.origin.registry.origin.CHUNK_BYTES", 5000)
    monkeypatch.setattr("p2pdist.origin.registry.upload.CHUNK_PAUSE_S", 0.01)
    taken, said, seen = bytearray(), [4999, 9999], list[int]()

    async def handler(request: web.Request) -> web.Response:
        place = {"Location": "/v2/team/packages/blobs/uploads/1"}
        match request.method:
            case "POST":
                return web.Response(status=202, headers=place)
            case "GET":
                return web.Response(status=204, headers={**place, "Range": f"0-{said.pop(0)}"})
            case "PATCH":
                if int(request.headers["Content-Range"].partition("-")[0]) != len(taken):
                    return web.Response(status=416)
                taken.extend(await request.read())
                return web.Response(status=504 if len(taken) == 10_000 else 202, headers=place)
            case "PUT":
                return web.Response(status=201 if taken == BLOB else 400)
        return web.Response(status=404)

    path = tmp_path / "file"
    path.write_bytes(BLOB)
    assert await (await odd(handler)).write_blob(DIGEST, path, on_bytes=seen.append) == sum(seen) == len(BLOB)
    assert not said


async def test_bytes_that_another_repository_gives_in_the_end_count_as_sent(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload breaks off, is not known any more, and the blob is mounted when it begins anew."""
    monkeypatch.setattr("p2pdist.origin.registry.origin.CHUNK_BYTES", 5000)
    monkeypatch.setattr("p2pdist.origin.registry.upload.CHUNK_PAUSE_S", 0.01)
    begun, seen = Counter[str](), list[int]()

    async def handler(request: web.Request) -> web.Response:
        begun[request.method] += 1
        place = {"Location": "/v2/team/packages/blobs/uploads/1"}
        match request.method:
            case "POST":
                return web.Response(status=202 if begun["POST"] == 1 else 201, headers=place)
            case "PATCH":
                return web.Response(status=202 if begun["PATCH"] == 1 else 503, headers=place)
        return web.Response(status=404)

    path = tmp_path / "file"
    path.write_bytes(BLOB)
    assert await (await odd(handler)).write_blob(DIGEST, path, on_bytes=seen.append) == sum(seen) == len(BLOB)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("again", [404, 504])
async def test_an_upload_whose_last_answer_was_lost_has_ended(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: int, there: bool
) -> None:
    """A proxy gave up on a registry that took its time, and the registry knows the upload no more,
    or the proxy gives up each time."""
    monkeypatch.setattr("p2pdist.origin.registry.client._pause_s", lambda response, tries: 0.01)
    ends = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal ends
        place = {"Location": "/v2/team/packages/blobs/uploads/1"}
        match request.method:
            case "POST" | "PATCH":
                return web.Response(status=202, headers=place)
            case "PUT":
                ends += 1
                return web.Response(status=504 if ends == 1 else again)
        return web.Response(status=200 if there and ends else 404, body=BLOB)

    path = tmp_path / "file"
    path.write_bytes(BLOB)
    origin = await odd(handler)
    if there:
        assert await origin.write_blob(DIGEST, path) == len(BLOB)
    else:
        with pytest.raises((NotFound, Unavailable), match=f"{again}"):
            await origin.write_blob(DIGEST, path)
    assert ends == (2 if again == 404 else 4)


async def test_more_than_a_document_may_hold_is_not_read(odd: Any) -> None:
    from p2pdist.model.errors import TooLarge

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(bytes(1 << 16))
        return response

    with pytest.raises(TooLarge):
        await (await odd(endless)).read(DIGEST, limit=1 << 20)


def _answer(body: bytes) -> Any:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body)

    return handler


# -- names


@pytest.mark.parametrize(
    ("reference", "tag"),
    [
        ("trainer:v1", "v1"),
        ("team/trainer:v1", "v1"),
        ("other:v1", "other---v1"),
        ("a/b.c/d_e:v1-x", "a--b.c--d_e---v1-x"),
        ("trainer:a---b", "trainer---a---b"),
        ("blob:sha256-00", "blob---sha256-00"),
    ],
)
def test_a_package_has_one_tag_and_a_tag_one_package(reference: str, tag: str) -> None:
    from yarl import URL

    names = RepositoryNames("team/trainer", URL("http://r"), "oci://r/team/trainer")
    assert names.tag_of(parse_reference(reference)) == tag
    read = names.reference_of(tag)
    assert read is not None
    assert names.tag_of(read) == tag


@pytest.mark.parametrize(
    "url",
    [
        "oci://host",
        "oci://host/",
        "oci:///team/app",
        "oci://host/Team/app",
        "oci://host/../x",
        "oci://host/a#b",
        "oci://host/a?b=c",
        "oci://host/a?mount=../x",
        "oci://host:99999/a",
    ],
)
def test_what_is_no_repository_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_origin(url)


async def test_a_name_that_is_too_long_for_a_tag_is_refused(registry: Registry, opened: Any) -> None:
    with pytest.raises(UsageError, match="too long"):
        await opened(registry.url("long/packages")).resolve(parse_reference("a" * 100 + ":" + "b" * 100))
