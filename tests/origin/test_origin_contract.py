"""What holds for every origin that can be written to: a directory and an S3 bucket."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from origin_rig import Place, store_file

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, TooLarge
from p2pdist.model.manifest import MANIFEST_TYPE, Descriptor, Reference, parse_reference
from p2pdist.origin.drivers import open_origin


async def test_what_was_written_is_read_back(place: Place, payload: Path) -> None:
    digest, manifest = await store_file(place.origin, payload, "app:v1")
    data = payload.read_bytes()
    assert await place.origin.resolve(parse_reference("app:v1")) == manifest
    assert await place.origin.resolve(Reference("app", digest=manifest.digest)) == manifest
    assert await place.origin.tags() == [("app:v1", manifest)]
    assert await place.origin.size(digest) == len(data)
    assert await place.origin.read(digest) == data
    assert await place.origin.read_range(digest, 1000, 5000) == data[1000:6000]
    assert await place.origin.read_range(digest, len(data) - 1, 1) == data[-1:]
    assert await place.origin.read_range(digest, 0, 0) == b""


async def test_ranges_in_parallel(place: Place, payload: Path) -> None:
    digest, _ = await store_file(place.origin, payload, "app:v1")
    data = payload.read_bytes()
    starts = range(0, 300_000, 10_000)
    parts = await asyncio.gather(*[place.origin.read_range(digest, start, 10_000) for start in starts])
    assert b"".join(parts) == data


async def test_a_blob_that_is_there_is_not_sent_again(place: Place, payload: Path) -> None:
    digest = digest_of(payload.read_bytes())
    seen: list[int] = []
    assert await place.origin.write_blob(digest, payload, on_bytes=seen.append) == 300_000
    assert sum(seen) == 300_000
    assert await place.origin.write_blob(digest, payload, on_bytes=seen.append) == 0
    assert sum(seen) == 300_000


async def test_a_truncated_blob_is_sent_again(place: Place, payload: Path) -> None:
    digest, _ = await store_file(place.origin, payload, "app:v1")
    place.damage(digest, b"short")
    assert await place.origin.write_blob(digest, payload) == 300_000
    assert await place.origin.read(digest) == payload.read_bytes()


@pytest.mark.parametrize("size", [300_000, 20 << 20], ids=["small", "multipart"])
async def test_an_altered_file_is_never_stored(place: Place, tmp_path: Path, size: int) -> None:
    """A local file that is not what its digest says leaves no trace at the origin."""
    path = tmp_path / "altered"
    path.write_bytes(bytes(size))
    digest = digest_of(b"something else")
    with pytest.raises(Corrupt, match=str(path)):
        await place.origin.write_blob(digest, path)
    assert await place.origin.size(digest) is None


async def test_a_large_blob_goes_whole(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "large"
    data = b"".join(number.to_bytes(4, "big") * 1024 for number in range(5 * 1024))
    path.write_bytes(data)
    digest = digest_of(data)
    assert await place.origin.write_blob(digest, path) == len(data)
    assert await place.origin.read(digest) == data


async def test_cancelling_a_write_ends_it_and_stores_nothing(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(20 << 20))
    digest = digest_of(path.read_bytes())
    loop, chunks, cancelled = asyncio.get_running_loop(), 0, threading.Event()

    def cancel() -> None:
        task.cancel()
        loop.call_later(0.05, cancelled.set)

    def slow(count: int) -> None:
        """Called by the sending thread, which it keeps from finishing before the write has been
        cancelled."""
        nonlocal chunks
        chunks += 1
        if chunks == 2:
            loop.call_soon_threadsafe(cancel)
            assert cancelled.wait(60)
        time.sleep(0.05)

    task = asyncio.create_task(place.origin.write_blob(digest, path, on_bytes=slow))
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.3)
    before = chunks
    await asyncio.sleep(0.2)
    assert chunks == before < 6
    assert await place.origin.size(digest) is None


async def test_unknown_names_say_where_they_were_sought(place: Place, payload: Path) -> None:
    await store_file(place.origin, payload, "app:v1")
    absent = digest_of(b"absent")
    for attempt in (
        place.origin.resolve(parse_reference("app:v2")),
        place.origin.resolve(Reference("app", digest=absent)),
        place.origin.read(absent),
        place.origin.read_range(absent, 0, 10),
    ):
        with pytest.raises(NotFound) as caught:
            await attempt
        assert place.url in str(caught.value)
        assert caught.value.exit_code == 3
    assert await place.origin.size(absent) is None


async def test_altered_and_truncated_blobs_are_corrupt_and_named(place: Place, payload: Path) -> None:
    digest, _ = await store_file(place.origin, payload, "app:v1")
    data = payload.read_bytes()
    place.damage(digest, data[:1000])
    for attempt in (
        place.origin.read(digest),
        place.origin.read_range(digest, 500, 1000),
        place.origin.read_range(digest, 1000, 10),
        place.origin.read_range(digest, 200_000, 10),
    ):
        with pytest.raises(Corrupt) as caught:
            await attempt
        assert digest in str(caught.value)
        assert place.url in str(caught.value)
        assert caught.value.exit_code == 6
    place.damage(digest, bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(Corrupt, match=digest):
        await place.origin.read(digest)


async def test_small_blobs_have_a_limit(place: Place, payload: Path) -> None:
    digest, _ = await store_file(place.origin, payload, "app:v1")
    assert len(await place.origin.read(digest, limit=300_000)) == 300_000
    with pytest.raises(TooLarge):
        await place.origin.read(digest, limit=299_999)


async def test_concurrent_taggers_lose_nothing(place: Place) -> None:
    """Twelve tasks of two clients tag at once; every tag is there, each with its own manifest."""
    other = open_origin(place.url)
    manifests = [Descriptor(MANIFEST_TYPE, digest_of(b"%d" % number), number) for number in range(12)]
    try:
        await asyncio.gather(
            *[
                (place.origin, other)[number % 2].tag(parse_reference(f"app:v{number}"), manifest)
                for number, manifest in enumerate(manifests)
            ]
        )
    finally:
        await other.close()
    found = dict(await place.origin.tags())
    assert found == {f"app:v{number}": manifest for number, manifest in enumerate(manifests)}


async def test_a_tag_moves(place: Place) -> None:
    first, second = (Descriptor(MANIFEST_TYPE, digest_of(text), 1) for text in (b"1", b"2"))
    await place.origin.tag(parse_reference("app:v1"), first)
    await place.origin.tag(parse_reference("app:v1"), second)
    assert await place.origin.tags() == [("app:v1", second)]


async def test_what_others_keep_in_the_index_stays(place: Place) -> None:
    foreign = {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "digest": "sha512:" + "0" * 128,
        "size": 7,
        "platform": {"os": "linux", "architecture": "riscv64"},
        "annotations": {"org.opencontainers.image.ref.name": "foreign:v1"},
    }
    await place.origin.tag(parse_reference("app:v1"), Descriptor(MANIFEST_TYPE, digest_of(b""), 1))
    place.overwrite("index.json", json.dumps({"schemaVersion": 2, "x": [1], "manifests": [foreign]}).encode())
    manifest = Descriptor(MANIFEST_TYPE, digest_of(b"2"), 2)
    await place.origin.tag(parse_reference("app:v2"), manifest)
    assert await place.origin.tags() == [("app:v2", manifest)]
    with pytest.raises(Corrupt, match="foreign:v1"):
        await place.origin.resolve(parse_reference("foreign:v1"))
    objects = place.origin._objects
    body = json.loads(objects.read("index.json", 1 << 20) or b"")
    assert body["manifests"][0] == foreign
    assert body["x"] == [1]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"manifests": 3}',
        b'{"manifests": [3]}',
        b"\xff\xfe",
        b'{"manifests":[],"note":"\xff"}',
        b"[" * 100_000,
        b'{"manifests":[{"digest":"../../etc","size":1,"annotations":{"org.opencontainers.image.ref.name":"app:v1"}}]}',
        b'{"manifests":[{"digest":"sha256:%s","size":-1,"annotations":{"org.opencontainers.image.ref.name":"app:v1"}}]}'
        % (b"0" * 64),
    ],
)
async def test_a_malformed_index_is_corrupt(place: Place, text: bytes) -> None:
    await place.origin.tag(parse_reference("app:v0"), Descriptor(MANIFEST_TYPE, digest_of(b""), 1))
    place.overwrite("index.json", text)
    with pytest.raises(Corrupt) as caught:
        await place.origin.resolve(parse_reference("app:v1"))
    assert place.url in str(caught.value)


async def test_processes_that_tag_at_once_lose_nothing(tmp_path: Path) -> None:
    """The lock of a directory holds between processes."""
    script = """
import asyncio, sys
from p2pdist.model.manifest import *
from p2pdist.model.digest import digest_of
from p2pdist.origin.drivers import open_origin
async def work():
    origin = open_origin(sys.argv[1])
    for number in range(10):
        await origin.tag(parse_reference(f"app:{sys.argv[2]}-{number}"), Descriptor(MANIFEST_TYPE, digest_of(b""), 1))
    await origin.close()
asyncio.run(work())
"""
    url = (tmp_path / "origin").as_uri()
    running = [subprocess.Popen([sys.executable, "-c", script, url, str(number)]) for number in range(4)]
    assert [process.wait(30) for process in running] == [0, 0, 0, 0]
    origin = open_origin(url)
    assert len(await origin.tags()) == 40
    await origin.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "packages",
        "/srv/packages",
        "ftp://host/x",
        "file://host/x",
        "file:relative",
        "s3://",
        "http://",
        "http://a:b/",
    ],
)
def test_urls_that_name_no_origin_are_usage_errors(url: str) -> None:
    with pytest.raises(P2PDistError) as caught:
        open_origin(url)
    assert caught.value.exit_code == 2
    assert caught.value.remedy
