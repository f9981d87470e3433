"""What buckets have: the files that a package shows as objects, with overlays, links, and names
that are no keys; and blobs that settings name."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from image_site import serve
from test_alone import TAG, pack_tree, pulled
from waits import until

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.s3 import make_s3_app
from p2pdist.agent.api.server import make_apps
from p2pdist.agent.bodies import Brought
from p2pdist.agent.buckets import package
from p2pdist.agent.buckets.blobs import DESCRIBED_AT_ONCE, NamedBlob, OriginBlobs
from p2pdist.agent.buckets.files import PackageFiles, files_of
from p2pdist.agent.buckets.settings import BucketSettings, S3Settings, parse_bucket, s3_settings
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.cli.daemon import listen_unix
from p2pdist.gateway.s3.signatures import AccessKey
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Unavailable, UsageError
from p2pdist.model.manifest import PACK_TYPE, Descriptor, Reference, blob_reference
from p2pdist.model.tree import Directory, Entry, File, HardLink, Symlink, Whiteout, content_hash
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.repository.push import push_blob
from p2pdist.store import integrity
from p2pdist.store.blobs.blob import Blob


def file(path: str, data: bytes = b"x") -> File:
    return File(path.encode(), 0o644, 1_500_000_000, len(data), content_hash(data))


def shown(*layers: list[Entry]) -> dict[str, bytes]:
    return {path.decode(): found.content for path, found in files_of(layers, "app:v1").items()}


def test_upper_layers_hide_what_is_below() -> None:
    lower: list[Entry] = [
        file("both", b"old"),
        Directory(b"d", 0o755, 0),
        file("d/kept"),
        Directory(b"gone", 0o755, 0),
        file("gone/a"),
        Directory(b"o", 0o755, 0),
        file("o/old"),
        Directory(b"was", 0o755, 0),
        file("was/a"),
        file("wiped"),
        file("turned"),
        Symlink(b"link", 0, b"both"),
    ]
    upper: list[Entry] = [
        file("both", b"new"),
        Directory(b"d", 0o755, 0),
        Whiteout(b"gone"),
        Whiteout(b"link"),
        Directory(b"o", 0o755, 0, opaque=True),
        file("o/new"),
        Directory(b"turned", 0o755, 0),
        file("turned/a"),
        file("was"),
        Whiteout(b"wiped"),
    ]
    assert sorted(shown(lower)) == ["both", "d/kept", "gone/a", "link", "o/old", "turned", "was/a", "wiped"]
    both = shown(lower, upper)
    assert sorted(both) == ["both", "d/kept", "o/new", "turned/a", "was"]
    assert both["both"] == content_hash(b"new")


def test_links_are_the_files_that_they_lead_to(caplog: pytest.LogCaptureFixture) -> None:
    entries: list[Entry] = [
        file("blobs/1", b"one"),
        HardLink(b"hard", b"blobs/1"),
        Symlink(b"snap/a", 0, b"../blobs/1"),
        Symlink(b"snap/b", 0, b"./a"),
        Symlink(b"loop", 0, b"loop"),
        Symlink(b"outside", 0, b"../../etc/passwd"),
        Symlink(b"absolute", 0, b"/blobs/1"),
        Symlink(b"directory", 0, b"blobs"),
        Symlink(b"nowhere", 0, b"none"),
    ]
    found = shown(entries)
    assert found == dict.fromkeys(["blobs/1", "hard", "snap/a", "snap/b"], content_hash(b"one"))
    assert "5 files and links of app:v1 are no objects" in caplog.text


def test_names_that_are_no_keys_are_left_out() -> None:
    long, bytes_ = file("d/" * 512 + "x"), File(b"\xff", 0o644, 0, 1, content_hash(b"x"))
    objects = PackageFiles(files_of([[long, bytes_, file("ü")]], "app:v1"))
    assert objects.keys == ["ü".encode()]
    info = objects.describe("ü".encode())
    assert info is not None and (info.size, info.modified_s) == (1, 1.5)
    assert objects.describe(b"\xff") is None


# -- settings

DIGEST = digest_of(b"blob")
BLOBS = f'[[bucket]]\nname = "blobs"\nblobs = {{ "a/b" = "{DIGEST}" }}\n'
KEY = '[[key]]\nid = "loader"\nsecret = "0123456789abcdef"\nbuckets = ["blobs"]\n'


def test_settings_of_options_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s3.toml"
    path.write_text(BLOBS + KEY)
    path.chmod(0o600)
    settings = s3_settings(["weights=team/weights:v3"], path)
    weights = BucketSettings("weights", Reference("team/weights", "v3"))
    assert settings.buckets == (weights, BucketSettings("blobs", blobs=((b"a/b", DIGEST),)))
    assert settings.keys == (AccessKey("loader", "0123456789abcdef", ("blobs",)),)
    assert "0123456789abcdef" not in repr(settings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[bucket", "no TOML"),
        ("x = 1", "unknown field"),
        ('[[bucket]]\nname = "A"\npackage = "a:v1"', "no name of a bucket"),
        ('[[bucket]]\nname = "abc"', "either a package or blobs"),
        ('[[bucket]]\nname = "abc"\nblobs = { "" = "' + DIGEST + '" }', "empty"),
        ('[[bucket]]\nname = "abc"\nblobs = { "a" = "b" }', "digest"),
        (BLOBS + BLOBS, "named twice"),
        (KEY, "names the bucket"),
        (BLOBS + KEY.replace("0123456789abcdef", "hidden"), "length"),
    ],
)
def test_settings_that_are_wrong_are_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "s3.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UsageError) as failure:
        s3_settings((), path)
    assert said in failure.value.what and "hidden" not in str(failure.value)


def test_secrets_that_others_may_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s3.toml"
    path.write_text(BLOBS + KEY)
    path.chmod(0o640)
    with pytest.raises(UsageError, match="holds secrets"):
        s3_settings((), path)


@pytest.mark.parametrize("text", ["", "abc", "abc=", "=app:v1", "abc=A:v1", "ABC=app:v1", "abc=hf://org/model"])
def test_what_is_no_bucket_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bucket(text)


async def test_nothing_is_looked_up_any_more_for_a_request_that_has_failed() -> None:
    """The requests after it would wait behind all of that, and each would leave as much again."""
    asked: list[Digest] = []

    async def describe(digest: Digest) -> None:
        asked.append(digest)
        await asyncio.sleep(0)
        raise Unavailable("the origin does not answer")

    context: Any = SimpleNamespace(registry=SimpleNamespace(describe=describe))
    blobs = OriginBlobs({b"%d" % number: digest_of(b"%d" % number) for number in range(1000)}, context)
    tasks = len(asyncio.all_tasks())
    for _ in range(3):
        asked.clear()
        with pytest.raises(Unavailable):
            await blobs.blobs()
        assert len(asked) <= 2 * DESCRIBED_AT_ONCE
        assert len(asyncio.all_tasks()) == tasks


async def test_a_blob_of_which_nothing_can_be_said_keeps_clients_from_no_other(
    origin: LocalLayout, tmp_path: Path
) -> None:
    """One that the origin does not answer for, while others are here."""
    digests = []
    for data in (b"sound", b"odd"):
        (tmp_path / "content").write_bytes(data)
        digests.append((await push_blob(tmp_path / "content", origin)).digest)
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0))
    sound, odd = digests
    await origin.tag(blob_reference(odd), await origin.resolve(blob_reference(sound)))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(agent.stop)
        await agent.start()
        settings = S3Settings((BucketSettings("blobs", blobs=((b"odd", odd), (b"sound", sound))),))
        port = await serve(stack, make_s3_app(agent, settings))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        assert (await pulled(agent, blob=str(sound))).error is None
        for path, status in (("sound", 200), ("odd", 503), ("none", 404), ("?list-type=2", 503)):
            async with asyncio.timeout(60), http.get(f"/blobs/{path}") as answer:
                assert answer.status == status, path
                assert await answer.read() == b"sound" or status != 200


async def test_a_blob_that_is_evicted_as_it_is_given_is_brought_again(
    origin: LocalLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pull makes room between the fetch of a blob and its reading: it is not nowhere."""
    (tmp_path / "content").write_bytes(b"content")
    digest = (await push_blob(tmp_path / "content", origin)).digest
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0))
    evicted, fetch = False, OriginBlobs.fetch

    async def evict(blobs: OriginBlobs, blob: NamedBlob) -> Brought:
        nonlocal evicted
        brought = await fetch(blobs, blob)
        if not evicted:
            evicted = True
            await asyncio.to_thread(agent.store.remove, digest)
        return brought

    async with AsyncExitStack() as stack:
        stack.push_async_callback(agent.stop)
        await agent.start()
        port = await serve(stack, make_s3_app(agent, S3Settings((BucketSettings("blobs", blobs=((b"a", digest),)),))))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        assert (await pulled(agent, blob=str(digest))).error is None
        monkeypatch.setattr(OriginBlobs, "fetch", evict)
        async with asyncio.timeout(60), http.get("/blobs/a") as answer:
            assert (answer.status, await answer.read()) == (200, b"content")
        assert evicted


async def test_programs_of_the_host_get_a_blob_that_is_evicted_as_it_is_given(
    origin: LocalLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that loads weights gets it all the same, and one that reads it hears that it may ask
    again: it is not nowhere."""
    (tmp_path / "content").write_bytes(b"content")
    digest = (await push_blob(tmp_path / "content", origin)).digest
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0))
    get, evictions = agent.store.get, 0

    def evict(wanted: Digest) -> Blob | None:
        nonlocal evictions
        blob = get(wanted)
        if evictions and blob is not None and blob.complete:
            evictions -= 1
            agent.store.remove(wanted)
        return blob

    async with AsyncExitStack() as stack:
        stack.push_async_callback(agent.stop)
        await agent.start()
        stack.push_async_callback((await listen_unix(make_apps(agent)[1], tmp_path / "s")).cleanup)
        connector = aiohttp.UnixConnector(str(tmp_path / "s"))
        http = await stack.enter_async_context(aiohttp.ClientSession("http://agent", connector=connector))
        monkeypatch.setattr(agent.store, "get", evict)
        for path, status in (("/file?start=0&end=7", 200), ("", 503)):
            evictions = 0
            assert (await pulled(agent, blob=str(digest))).error is None
            evictions = 1
            async with asyncio.timeout(60), http.get(f"/v1/blobs/{digest}{path}") as answer:
                assert answer.status == status, await answer.text()


async def test_a_tag_that_cannot_be_looked_up_delays_one_request_alone(
    origin: LocalLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs read thousands of small files one after the other, and all of them are here."""
    await pack_tree(tmp_path, origin, [b"content"])
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(agent.stop)
        await agent.start()
        port = await serve(stack, make_s3_app(agent, S3Settings((BucketSettings("files", TAG),))))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))

        async def read() -> bytes:
            async with http.get("/files/f0") as answer:
                return await answer.read()

        assert await read() == b"content"
        monkeypatch.setattr(package, "REFRESH_S", 0.0)

        async def hangs(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(agent.packages, "find", hangs)
        async with asyncio.timeout(60):
            for _ in range(120):
                assert await read() == b"content"


async def test_a_range_that_cannot_be_is_refused_with_the_size_of_the_object(
    origin: LocalLayout, tmp_path: Path
) -> None:
    """The AWS CRT asks for any object by a range, and takes an empty one for a failure without."""
    await pack_tree(tmp_path, origin, [b"", b"12345"])
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(agent.stop)
        await agent.start()
        port = await serve(stack, make_s3_app(agent, S3Settings((BucketSettings("files", TAG),))))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        for key, span, size in (("f0", "0-8388607", 0), ("f1", "5-", 5)):
            async with http.get(f"/files/{key}", headers={"Range": f"bytes={span}"}) as answer:
                assert (answer.status, answer.headers["Content-Type"]) == (416, "application/xml")
                assert f"<ActualObjectSize>{size}</ActualObjectSize>" in await answer.text()


@pytest.mark.parametrize("damage", ["written to", "shorter"])
async def test_an_object_that_is_no_longer_what_it_was_is_brought_again(
    origin: LocalLayout, tmp_path: Path, damage: str
) -> None:
    """S3 clients compare nothing: to them an object of the store that was changed would be the
    file."""
    data = os.urandom(300_000)
    await pack_tree(tmp_path, origin, [data, os.urandom(3000)])
    settings = AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0)
    agent = Agent(settings)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(agent.stop)
        await agent.start()
        port = await serve(stack, make_s3_app(agent, S3Settings((BucketSettings("files", TAG),))))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        assert (await pulled(agent, package=str(TAG))).error is None
        path = agent.store.objects.path(content_hash(data))
        path.chmod(0o644)
        if damage == "shorter":
            os.truncate(path, 1000)
        else:
            with path.open("r+b") as file:
                file.write(bytes(1000))
        async with asyncio.timeout(60), http.get("/files/f0") as answer:
            assert answer.status == 200 and await answer.read() == data
        assert agent.store.integrity.damaged["object"] == 1


async def test_an_object_that_is_lost_while_others_come_is_not_said_to_be_none(
    origin: LocalLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull that is under way does not know that it is lacking: the next one does."""
    here, lacking = os.urandom(300_000), os.urandom(300_000)
    await pack_tree(tmp_path, origin, [here, lacking])
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(agent.stop)
        await agent.start()
        port = await serve(stack, make_s3_app(agent, S3Settings((BucketSettings("files", TAG),))))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))

        async def read(key: str) -> tuple[int, bytes]:
            async with http.get(f"/files/{key}") as answer:
                return answer.status, await answer.read()

        assert (await pulled(agent, package=str(TAG))).error is None
        assert await read("f0") == (200, here)
        await asyncio.to_thread(agent.store.trees.drop_objects, {content_hash(lacking)})
        gate, held, fetch = asyncio.Event(), asyncio.Event(), agent.registry.fetch

        async def late(layer: Descriptor, *more: Any) -> tuple[Blob, BlobPull | None]:
            if layer.media_type == PACK_TYPE:
                held.set()
                await gate.wait()
            return await fetch(layer, *more)

        monkeypatch.setattr(agent.registry, "fetch", late)
        coming = asyncio.create_task(read("f1"))
        await held.wait()
        path = agent.store.objects.path(content_hash(here))
        path.chmod(0o644)
        path.write_bytes(bytes(len(here)))
        assert (await read("f0"))[0] == 503
        gate.set()
        async with asyncio.timeout(60):
            assert await coming == (200, lacking)
            while (answer := await read("f0"))[0] == 503:
                await asyncio.sleep(0.05)
        assert answer == (200, here)


async def test_a_file_whose_object_is_read_again_keeps_clients_from_no_other(
    origin: LocalLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of weights takes long to read, and clients ask for it in many ranges at once."""
    written, other = os.urandom(300_000), os.urandom(3000)
    await pack_tree(tmp_path, origin, [written, other])
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0))
    gate = threading.Event()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(agent.stop)
        stack.callback(gate.set)
        await agent.start()
        port = await serve(stack, make_s3_app(agent, S3Settings((BucketSettings("files", TAG),))))
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector))

        async def read(key: str) -> tuple[int, bytes]:
            async with http.get(f"/files/{key}") as answer:
                return answer.status, await answer.read()

        assert (await pulled(agent, package=str(TAG))).error is None
        await asyncio.to_thread(agent.store.integrity.look_at_all)
        began, hash_of = threading.Event(), integrity.file_hash

        def slow_hash(path: Path) -> bytes:
            began.set()
            gate.wait()
            return hash_of(path)

        monkeypatch.setattr(integrity, "file_hash", slow_hash)
        path = agent.store.objects.path(content_hash(written))
        path.chmod(0o644)
        path.write_bytes(bytes(len(written)))
        waiting = [asyncio.create_task(read("f0")) for _ in range(100)]
        await until(began.is_set)
        assert await read("f1") == (200, other)
        gate.set()
        assert {status for status, _ in await asyncio.gather(*waiting)} <= {200, 503}
        assert await read("f0") == (200, written)
