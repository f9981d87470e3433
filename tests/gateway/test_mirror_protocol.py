"""What clients of container registries see of an agent's mirror, over real sockets: documents,
bodies that begin before the blob is here, ranges, and failures as the specification writes them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from mirror_rig import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    PIECE,
    Image,
    Rig,
    make_layer,
    push_blob,
    push_image,
    push_manifest,
    running_mirror,
)
from registry_rig import needs_registry, running_registry
from waits import until

from p2pdist.agent.api import mirror as mirror_module
from p2pdist.gateway.registry import mirror
from p2pdist.gateway.registry.counts import CHECKS_MAX
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, DiskFull, P2PDistError, Refused, Unavailable
from p2pdist.model.image import image_name

pytestmark = needs_registry
PIECES = 6


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running.address


@pytest.fixture(scope="module")
def image(registry: str) -> Image:
    return push_image(registry, "team/app", "v1", [make_layer((PIECES - 1) * PIECE + 1000)])


@pytest.fixture
async def rig(tmp_path: Path, registry: str, image: Image) -> AsyncIterator[Rig]:
    async with running_mirror(tmp_path, registry) as made:
        made.images.data.update(image.blobs)
        yield made


@pytest.fixture
async def http(rig: Rig) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(rig.url, auto_decompress=False) as session:
        yield session


async def failure_of(answer: aiohttp.ClientResponse) -> str:
    """The code of an error document, which must be one."""
    assert answer.content_type == "application/json", await answer.text()
    (error,) = (await answer.json())["errors"]
    assert error["message"] and set(error) == {"code", "message"}
    return str(error["code"])


async def arrived(rig: Rig, digest: Digest) -> None:
    """Wait until a client's request has begun a fetch."""
    await until(lambda: digest in rig.images.arrivals, "a fetch")


# -- documents


async def test_the_base_says_that_this_is_a_registry(http: aiohttp.ClientSession) -> None:
    for method, path in (("GET", "/v2/"), ("HEAD", "/v2/"), ("GET", "/v2"), ("HEAD", "/v2")):
        async with http.request(method, path) as answer:
            assert (answer.status, answer.url.path) == (200, "/v2/")
            assert answer.headers["Docker-Distribution-API-Version"] == "registry/2.0"


async def test_a_manifest_comes_as_it_is_kept_in_both_shapes(
    http: aiohttp.ClientSession, rig: Rig, image: Image
) -> None:
    for path, target in (
        (rig.path("team/app", "manifests/v1"), "v1"),
        (rig.path("team/app", f"manifests/{image.digest}"), image.digest),
        (f"/v2/team/app/manifests/v1?ns={rig.registry}", "v1"),
    ):
        for method in ("GET", "HEAD"):
            async with http.request(method, path, headers={"Accept-Encoding": "zstd,gzip"}) as answer:
                assert answer.status == 200, (path, target)
                assert answer.headers["Content-Type"] == MANIFEST_TYPE
                assert answer.headers["Docker-Content-Digest"] == image.digest
                assert answer.headers["Content-Length"] == str(len(image.manifest))
                assert answer.headers["ETag"] == f'"{image.digest}"'
                assert "Content-Encoding" not in answer.headers
                assert await answer.read() == (image.manifest if method == "GET" else b"")
    async with http.get(path, headers={"If-None-Match": f'"{image.digest}"'}) as answer:
        assert (answer.status, await answer.read()) == (304, b"")


async def test_an_index_keeps_its_type(http: aiohttp.ClientSession, rig: Rig, image: Image) -> None:
    entry = {"mediaType": MANIFEST_TYPE, "digest": image.digest, "size": len(image.manifest)}
    index = json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}).encode()
    push_manifest(rig.registry, "team/app", "index", index, INDEX_TYPE)
    async with http.get(rig.path("team/app", "manifests/index")) as answer:
        assert answer.headers["Content-Type"] == INDEX_TYPE
        assert answer.headers["Docker-Content-Digest"] == digest_of(index)
        assert await answer.read() == index


async def test_tags_come_by_pages_that_lead_back_to_the_mirror(
    http: aiohttp.ClientSession, rig: Rig, image: Image
) -> None:
    for tag in ("a1", "a2", "a3"):
        push_manifest(rig.registry, "team/tags", tag, _of(image, rig, "team/tags"), MANIFEST_TYPE)
    for first in ("/v2/team/tags/tags/list?n=2&ns=" + rig.registry, rig.path("team/tags", "tags/list?n=2")):
        async with http.get(first) as answer:
            assert await answer.json() == {"name": "team/tags", "tags": ["a1", "a2"]}
            following = answer.links["next"]["url"]
        async with http.get(following.relative()) as answer:
            assert (await answer.json())["tags"] == ["a3"] and "Link" not in answer.headers
    for query in ("n=x", "n=-1", "n=" + "9" * 30, "last=../x"):
        async with http.get(rig.path("team/tags", f"tags/list?{query}")) as answer:
            assert answer.status == 400 and await failure_of(answer) == "UNSUPPORTED"


def _of(image: Image, rig: Rig, repository: str) -> bytes:
    """Push the blobs of an image to another repository, for its manifest."""
    for digest, blob in image.blobs.items():
        push_blob(rig.registry, repository, digest, blob)
    return image.manifest


async def test_referrers_are_an_index(http: aiohttp.ClientSession, rig: Rig, image: Image) -> None:
    path = rig.path("team/app", f"referrers/{image.digest}")
    for query, count in (("", 1), ("?artifactType=a/b", 1), ("?artifactType=c/d", 0)):
        async with http.get(path + query) as answer:
            assert answer.headers["Content-Type"] == INDEX_TYPE, await answer.text()
            assert len(json.loads(await answer.read())["manifests"]) == count
            assert answer.headers.get("OCI-Filters-Applied") == ("artifactType" if query else None)


# -- bodies


async def test_a_body_begins_with_the_first_piece_and_ends_when_the_whole_has_matched(
    http: aiohttp.ClientSession, rig: Rig, image: Image
) -> None:
    (layer,) = image.layers
    data = image.blobs[layer]
    request = asyncio.create_task(http.get(rig.path("team/app", f"blobs/{layer}")).__aenter__())
    await arrived(rig, layer)
    arrival = rig.images.arrivals[layer]
    assert not request.done()
    arrival.give(1, 0)
    answer = await asyncio.wait_for(request, 60)
    assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(data)))
    assert answer.headers["Docker-Content-Digest"] == layer and answer.headers["ETag"] == f'"{layer}"'
    assert answer.content_type == "application/octet-stream" and "Content-Encoding" not in answer.headers
    assert await answer.content.readexactly(2 * PIECE) == data[: 2 * PIECE]
    arrival.give(*range(2, PIECES))
    assert await answer.content.readexactly((PIECES - 3) * PIECE) == data[2 * PIECE : (PIECES - 1) * PIECE]
    rest = asyncio.create_task(answer.content.read())
    done, _ = await asyncio.wait([rest], timeout=0.3)
    assert not done, "the end was sent before the whole had matched"
    arrival.match()
    assert await asyncio.wait_for(rest, 60) == data[(PIECES - 1) * PIECE :]
    answer.release()
    counts = rig.agent.mirrored
    assert counts.requests["blob", "ok", "swarm"] == 1 and counts.bytes["swarm"] == len(data)


async def test_a_blob_that_is_here_is_sent_from_the_store(http: aiohttp.ClientSession, rig: Rig, image: Image) -> None:
    (layer,) = image.layers
    await _complete(rig, layer)
    async with http.get(rig.path("team/app", f"blobs/{layer}")) as answer:
        assert await answer.read() == image.blobs[layer]
    async with http.head(rig.path("team/app", f"blobs/{layer}")) as answer:
        assert answer.headers["Content-Length"] == str(len(image.blobs[layer]))
        assert answer.headers["Docker-Content-Digest"] == layer
    for method in ("GET", "HEAD"):
        known = {"If-None-Match": f'"{layer}"'}
        async with http.request(method, rig.path("team/app", f"blobs/{layer}"), headers=known) as answer:
            assert (answer.status, answer.headers["ETag"], await answer.read()) == (304, f'"{layer}"', b"")
        for path in (f"blobs/{layer}", "manifests/v1"):
            other = {"If-Match": f'"{digest_of(b"")}"'}
            async with http.request(method, rig.path("team/app", path), headers=other) as answer:
                assert answer.status == 412, (method, path)
    assert rig.agent.mirrored.requests["blob", "ok", "store"] == 2
    assert rig.agent.mirrored.bytes["store"] == len(image.blobs[layer])


async def _complete(rig: Rig, digest: Digest, repository: str = "team/app") -> None:
    blob, arrival = await rig.images.fetch_blob(image_name(rig.registry, repository), digest)
    assert arrival is not None
    arrival.give(*range(blob.layout.count))
    arrival.match()


async def test_a_pull_that_fails_breaks_the_body_off(http: aiohttp.ClientSession, rig: Rig, image: Image) -> None:
    """And a range takes up from there."""
    (layer,) = image.layers
    path, data = rig.path("team/app", f"blobs/{layer}"), image.blobs[layer]
    request = asyncio.create_task(http.get(path).__aenter__())
    await arrived(rig, layer)
    arrival = rig.images.arrivals[layer]
    arrival.give(0)
    answer = await asyncio.wait_for(request, 60)
    assert await answer.content.readexactly(PIECE) == data[:PIECE]
    arrival.fail(Unavailable("the tracker rejects it"))
    with pytest.raises(aiohttp.ClientPayloadError):
        await answer.content.read()
    assert rig.agent.mirrored.requests["blob", "broken", "swarm"] == 1
    arrival.blob.release()
    del rig.images.arrivals[layer]
    await _complete(rig, layer)
    async with http.get(path, headers={"Range": f"bytes={PIECE}-"}) as answer:
        assert answer.status == 206
        assert answer.headers["Content-Range"] == f"bytes {PIECE}-{len(data) - 1}/{len(data)}"
        assert await answer.read() == data[PIECE:]


@pytest.mark.parametrize(
    ("path", "silent"),
    [("blobs/{layer}", False), ("blobs/{layer}", True), ("manifests/v1", True), ("tags/list", True)],
)
async def test_no_request_is_silent(
    http: aiohttp.ClientSession, rig: Rig, image: Image, monkeypatch: pytest.MonkeyPatch, path: str, silent: bool
) -> None:
    """Where nothing comes, the client hears so before a byte, and in time to ask elsewhere."""
    monkeypatch.setattr(mirror, "BEGIN_S", 0.3)
    (layer,) = image.layers
    rig.images.silent = silent  # else the blob is fetched, and no piece comes
    async with http.get(rig.path("team/app", path.format(layer=layer))) as answer:
        assert answer.status == 503 and await failure_of(answer) == "UNAVAILABLE"
    assert rig.agent.mirrored.fallbacks["unavailable"] == (path != "tags/list")


@pytest.mark.slow
async def test_a_late_range_of_a_blob_that_comes_is_waited_for(
    http: aiohttp.ClientSession, rig: Rig, image: Image
) -> None:
    """Pieces come, only not those of the range: the head goes out, and the body follows."""
    (layer,) = image.layers
    data = image.blobs[layer]
    path = rig.path("team/app", f"blobs/{layer}")
    request = asyncio.create_task(http.get(path, headers={"Range": f"bytes={4 * PIECE}-"}).__aenter__())
    await arrived(rig, layer)
    arrival = rig.images.arrivals[layer]
    for piece in (0, 1, 2):
        await asyncio.sleep(0.3)
        arrival.give(piece)
    answer = await asyncio.wait_for(request, 60)
    assert answer.status == 206
    arrival.give(*range(3, PIECES))
    arrival.match()
    assert await answer.read() == data[4 * PIECE :]


async def test_a_range_of_a_layer_that_has_a_piece_list_comes_first(
    http: aiohttp.ClientSession, rig: Rig, image: Image
) -> None:
    """And is sent once its pieces are here, for a program of this host; whole layers come in their
    order."""
    (layer,) = image.layers
    rig.images.listed = True
    path = rig.path("team/app", f"blobs/{layer}")
    request = asyncio.create_task(http.get(path, headers={"Range": f"bytes={3 * PIECE}-{4 * PIECE + 9}"}).__aenter__())
    await arrived(rig, layer)
    arrival = rig.images.arrivals[layer]
    await until(lambda: len(arrival.demanded) == 2)
    assert set(arrival.demanded) == {((3,), False), ((4,), True)}
    arrival.give(3, 4)
    answer = await asyncio.wait_for(request, 60)
    assert await answer.read() == image.blobs[layer][3 * PIECE : 4 * PIECE + 10]
    assert set(arrival.blob.have) == {3, 4}
    whole = asyncio.create_task(http.get(path).__aenter__())
    async with aiohttp.ClientSession(rig.public) as network:
        other = asyncio.create_task(network.get(path, headers={"Range": "bytes=0-9"}).__aenter__())
        arrival.give(*range(PIECES))
        arrival.match()
        assert await (await whole).read() == image.blobs[layer]
        assert await (await other).read() == image.blobs[layer][:10]
    assert len(arrival.demanded) == 2


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (Unavailable("no tracker answers"), 503, "UNAVAILABLE"),
        (Corrupt("the registry sent something else"), 503, "UNAVAILABLE"),
        (DiskFull("the store", needed=2, free=1), 503, "UNAVAILABLE"),
        (P2PDistError("something failed"), 503, "UNAVAILABLE"),
        (Refused("the registry lets nobody read"), 403, "DENIED"),
    ],
)
async def test_failures_are_error_documents(
    http: aiohttp.ClientSession, rig: Rig, image: Image, failure: P2PDistError, status: int, code: str
) -> None:
    rig.images.failure = failure
    for path in ("manifests/v1", f"blobs/{image.layers[0]}", "tags/list"):
        async with http.get(rig.path("team/app", path)) as answer:
            assert answer.status == status and await failure_of(answer) == code
            assert failure.what in await answer.text()


async def test_what_is_unknown_is_404(http: aiohttp.ClientSession, rig: Rig) -> None:
    nothing = "sha256:" + "0" * 64
    for path, code in (
        (rig.path("team/app", "manifests/v9"), "MANIFEST_UNKNOWN"),
        (rig.path("team/none", "manifests/v1"), "MANIFEST_UNKNOWN"),
        (rig.path("team/app", f"blobs/{nothing}"), "BLOB_UNKNOWN"),
        (rig.path("team/none", "tags/list"), "NAME_UNKNOWN"),
        ("/v2/elsewhere.example/app/tags/list", "NAME_UNKNOWN"),
        ("/v2/_catalog", "UNSUPPORTED"),
    ):
        async with http.get(path) as answer:
            assert answer.status == 404 and await failure_of(answer) == code, path
    assert rig.agent.mirrored.fallbacks["unknown"] == 3


async def test_pushes_are_refused(http: aiohttp.ClientSession, rig: Rig, image: Image) -> None:
    for method, path in (
        ("POST", "blobs/uploads/"),
        ("POST", f"blobs/uploads/?mount={image.layers[0]}&from=other"),
        ("PATCH", "blobs/uploads/1"),
        ("PUT", "manifests/v1"),
        ("DELETE", f"manifests/{image.digest}"),
    ):
        async with http.request(method, rig.path("team/app", path), data=b"x") as answer:
            assert answer.status == 405 and await failure_of(answer) == "UNSUPPORTED"
            assert "GET" in answer.headers["Allow"]


async def test_the_port_for_the_network_serves_images_too(rig: Rig, image: Image) -> None:
    (layer,) = image.layers
    await _complete(rig, layer)
    async with aiohttp.ClientSession(rig.public) as http:
        async with http.get(rig.path("team/app", f"blobs/{layer}")) as answer:
            assert await answer.read() == image.blobs[layer]
        async with http.get("/v1/status") as answer:
            assert answer.status == 404 and answer.content_type == "application/problem+json"


# -- ranges


@pytest.mark.parametrize("wanted", ["0-0", "5-99,200000-200100,70000-70001", "0-9,5-14", "-10,0-9", "0-9, ,99999999-"])
async def test_ranges(http: aiohttp.ClientSession, rig: Rig, image: Image, wanted: str) -> None:
    (layer,) = image.layers
    data = image.blobs[layer]
    await _complete(rig, layer)
    expected = []
    for part in wanted.split(","):
        first, _, last = part.strip().partition("-")
        start = int(first) if first else len(data) - int(last or "0")
        end = int(last) + 1 if first and last else len(data)
        if part.strip() and start < len(data):
            expected.append((start, end))
    async with http.get(rig.path("team/app", f"blobs/{layer}"), headers={"Range": f"bytes={wanted}"}) as answer:
        assert answer.status == 206
        body = await answer.read()
        assert len(body) == int(answer.headers["Content-Length"])
        if len(expected) == 1:
            ((start, end),) = expected
            assert answer.headers["Content-Range"] == f"bytes {start}-{end - 1}/{len(data)}"
            assert body == data[start:end]
            return
        assert "Content-Range" not in answer.headers
        parts = parts_of(answer.headers["Content-Type"], body)
    assert parts == [(f"bytes {start}-{end - 1}/{len(data)}", data[start:end]) for start, end in expected]


def parts_of(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """The Content-Range and the bytes of each part of a multipart body (RFC 9110, 14.6)."""
    assert content_type.startswith("multipart/byteranges; boundary=")
    boundary = b"--" + content_type.rpartition("=")[2].encode()
    first, *parts, last = (b"\r\n" + body).split(b"\r\n" + boundary)
    assert first == b"" and last == b"--\r\n"
    found = []
    for part in parts:
        fields, _, payload = part.partition(b"\r\n\r\n")
        kind, content_range = fields.decode().strip().split("\r\n")
        assert kind == "Content-Type: application/octet-stream"
        found.append((content_range.removeprefix("Content-Range: "), payload))
    return found


@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        ("bytes=99999999-", 416),
        ("bytes=99999999-,88888888-", 416),
        ("bytes=0-,0-,0-", 416),
        ("bytes=0-9,5-14,9-20", 416),
        ("bytes=" + ",".join(f"{start}-{start}" for start in range(0, 600, 2)), 200),
        ("bytes=5-1", 200),
        ("bytes=0-1,5-1", 200),
        ("lines=0-1", 200),
        ("bytes=a-b", 200),
        ("bytes=", 200),
    ],
)
async def test_ranges_that_are_refused_or_ignored(
    http: aiohttp.ClientSession, rig: Rig, image: Image, wanted: str, status: int
) -> None:
    (layer,) = image.layers
    await _complete(rig, layer)
    async with http.get(rig.path("team/app", f"blobs/{layer}"), headers={"Range": wanted}) as answer:
        assert answer.status == status
        if status == 200:
            assert await answer.read() == image.blobs[layer]
        if status == 416:
            assert await failure_of(answer) == "RANGE_INVALID"
            assert answer.headers["Content-Range"] == f"bytes */{len(image.blobs[layer])}"


async def test_a_client_that_takes_nothing_is_left(rig: Rig, registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds one of the requests that a mirror answers at once."""
    monkeypatch.setattr(mirror_module, "IDLE_S", 0.3)
    image = push_image(registry, "team/large", "v1", [make_layer(24 << 20)])
    (layer,) = image.layers
    rig.images.data.update(image.blobs)
    await _complete(rig, layer, "team/large")
    host, _, port = rig.url.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with client:
        client.connect((host, int(port)))
        path = rig.path("team/large", f"blobs/{layer}")
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        async with asyncio.timeout(30):
            while not rig.agent.mirrored.requests["blob", "broken", "store"]:
                await asyncio.sleep(0.05)


async def test_a_check_hears_of_its_own_request_alone(http: aiohttp.ClientSession, rig: Rig, image: Image) -> None:
    counts = rig.agent.mirrored
    for path in (rig.path("team/app", "manifests/v1"), f"/v2/p2pdist-check/ab/manifests/none?ns={rig.registry}"):
        async with http.get(path):
            pass
    assert list(counts.checks) == ["p2pdist-check/ab"]
    for number in range(100):
        async with http.head(rig.path(f"p2pdist-check/{number}", "manifests/none")) as answer:
            assert answer.status == 404
    assert len(counts.checks) == CHECKS_MAX and "p2pdist-check/99" in counts.checks


# -- hostile requests, byte by byte


@pytest.mark.parametrize(
    "path",
    [
        "/v2/../v1/status",
        "/v2/%2e%2e/v1/status",
        "/v2//etc/passwd",
        "/v2/a/../../../etc/passwd/manifests/v1",
        "/v2/a%00/manifests/v1",
        "/v2/" + "a/" * 1500 + "manifests/v1",
        "/v2/x/manifests/v1?ns=127.0.0.1:1&ns=docker.io",
        "/v2/x/manifests/v1?ns=169.254.169.254",
        "/v2/x/manifests/v1?ns=user:password@host",
        "/v2/x/manifests/v1?ns=%0d%0aHost:%20evil",
        "/v2/\xff/manifests/v1",
    ],
)
async def test_hostile_paths_get_error_documents(rig: Rig, path: str) -> None:
    answer = await raw(rig, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode("latin-1"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] in (b"400", b"404"), head
    if b"application/json" in head:
        assert json.loads(body)["errors"][0]["code"]
    assert not rig.images.fetched


async def raw(rig: Rig, request: bytes) -> bytes:
    """All that the mirror sends for a request."""
    host, _, port = rig.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
