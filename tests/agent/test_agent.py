"""One agent in this process, over a real store and a real origin, with the tracker's plans given by
hand."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from email.utils import parsedate_to_datetime
from pathlib import Path

import aiohttp
import pytest
from image_site import serve
from waits import until

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.s3 import make_s3_app
from p2pdist.agent.api.server import make_apps
from p2pdist.agent.buckets.settings import BucketSettings, S3Settings
from p2pdist.agent.pull import origin as origin_reader
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.origin import INLINE_S, OriginReader
from p2pdist.agent.pull.readers import FETCHES_MAX
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable
from p2pdist.model.manifest import BLOB_TYPE, Descriptor, Manifest, blob_reference, decode_manifest, encode_manifest
from p2pdist.model.messages import COUNT_MAX, Condition, PullRequest, decode_from_agent, encode
from p2pdist.model.pieces import PieceLayout, PieceList, PieceSet
from p2pdist.model.plan import ORIGIN, Plan, StripePlan
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.repository.push import push_blob
from p2pdist.store.blobs.blob import Blob
from p2pdist.transfer import documents
from p2pdist.transfer.stream.events import PieceReceived, StreamClosed, StreamEvent

PIECE = 64 << 10
PIECES = 8


class Rig:
    """An agent and an origin with one blob of PIECES pieces."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.layout = LocalLayout(directory / "origin")
        self.layout.scratch()
        self.data = os.urandom(PIECES * PIECE)
        origin = self.layout.url
        self.agent = Agent(AgentSettings((), "h1", "127.0.0.1:7071", directory / "store", origin=origin))

    async def publish(self, data: bytes) -> Digest:
        file = self.directory / "content"
        file.write_bytes(data)
        return (await push_blob(file, self.layout)).digest

    async def publish_lie(self) -> Digest:
        """A blob whose pieces verify and whose bytes are not those that its digest names."""
        true = await self.publish(self.data)
        described = await self.layout.resolve(blob_reference(true))
        manifest = decode_manifest(await self.layout.read(described.digest))
        (layer,) = manifest.layers
        lie = Digest("sha256:" + "ab" * 32)
        self.layout.blob_path(lie).write_bytes(self.data)
        false = Descriptor(BLOB_TYPE, lie, layer.size, layer.annotations)
        digest = await self.layout.write_document(
            encode_manifest(Manifest(manifest.config, (false,), manifest.piece_lists))
        )
        await self.layout.tag(blob_reference(lie), Descriptor(described.media_type, digest, 1))
        return lie

    async def fetch(self, digest: Digest) -> tuple[Blob, BlobPull | None]:
        return await self.agent.registry.fetch(await self.agent.registry.describe(digest))

    def plan_origin(self, digest: Digest) -> None:
        """What a tracker would say."""
        pull = self.agent.registry._fetching[digest]
        pull.planned(Plan(digest, (StripePlan(0, ORIGIN),)))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    await made.agent.start()
    try:
        yield made
    finally:
        await made.agent.stop()
        await made.layout.close()


async def test_what_was_evicted_is_not_offered_while_it_is_fetched_again(rig: Rig) -> None:
    """Otherwise children would be sent the zeros of a file that has just been begun."""
    digest = await rig.publish(rig.data)
    blob, pull = await rig.fetch(digest)
    assert pull is not None
    rig.plan_origin(digest)
    await asyncio.wait_for(pull.done, 60)
    await until(lambda: not blob.in_use)
    rig.agent.store.remove(digest)
    _, again = await rig.fetch(digest)
    assert again is not None and not again.blob.have
    flow = rig.agent.uplink.open(digest, 0, PieceSet(PIECES))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(flow.next_block(), 0.2)
    flow.close()


async def test_a_pull_goes_on_when_its_blob_is_removed_before_it_is_held(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody removes a package that has the same layer, at the very moment at which a pull has
    found or begun it."""
    digest = await rig.publish(rig.data)
    begin, removed = rig.agent.store.begin, list[Digest]()

    def begun_and_removed(wanted: Digest, pieces: PieceList) -> Blob:
        blob = begin(wanted, pieces)
        if wanted == digest and not removed:
            removed.append(wanted)
            rig.agent.store.remove(wanted)
        return blob

    monkeypatch.setattr(rig.agent.store, "begin", begun_and_removed)
    pull = rig.agent.pulls.start(PullRequest(package=str(blob_reference(digest))))
    await until(lambda: removed and digest in rig.agent.registry._fetching)
    rig.plan_origin(digest)
    await until(lambda: pull.state in ("done", "failed"))
    assert pull.state == "done" and rig.agent.store.get(digest) is not None


async def test_a_blob_that_is_found_wrong_while_a_pull_takes_it_is_not_fetched_unheld(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verification that runs meanwhile keeps the pull from letting it go until it has become a
    partial one."""
    digest = await rig.publish(rig.data)
    blob, pull = await rig.fetch(digest)
    assert pull is not None
    rig.plan_origin(digest)
    await asyncio.wait_for(pull.done, 60)
    await until(lambda: not blob.in_use)
    release = Blob.release

    def found_wrong(self: Blob) -> None:
        if self.complete:
            self.path.chmod(0o644)
            self.path.write_bytes(b"?" * len(rig.data))
            self.verify(drop=True)
        release(self)

    monkeypatch.setattr(Blob, "release", found_wrong)
    taken, again = await rig.fetch(digest)
    assert again is None and not taken.complete
    monkeypatch.undo()
    _, again = await rig.fetch(digest)
    assert again is not None
    rig.plan_origin(digest)
    await asyncio.wait_for(again.done, 60)
    await until(lambda: not taken.in_use)
    assert taken.complete and taken.path.read_bytes() == rig.data


async def test_a_piece_that_a_stream_of_an_earlier_pull_stored_counts(rig: Rig) -> None:
    digest = await rig.publish(rig.data)
    blob, pull = await rig.fetch(digest)
    assert pull is not None
    for piece in range(PIECES):
        assert await asyncio.to_thread(blob.write, piece, rig.data[piece * PIECE : (piece + 1) * PIECE])
    await asyncio.wait_for(pull.piece(3), 60)
    await asyncio.wait_for(pull.done, 60)
    assert blob.complete


async def test_one_who_waits_for_a_piece_may_leave_without_the_others(rig: Rig) -> None:
    digest = await rig.publish(rig.data)
    _, pull = await rig.fetch(digest)
    assert pull is not None
    readers = [asyncio.create_task(pull.piece(5)) for _ in range(1000)]
    await asyncio.sleep(0)
    for reader in readers[1:]:
        reader.cancel()
    rig.plan_origin(digest)
    await asyncio.wait_for(readers[0], 60)


@pytest.mark.parametrize("way", ["pull", "read"])
async def test_pieces_that_verify_do_not_make_a_blob_that_is_not_its_digest(rig: Rig, way: str) -> None:
    """Who asks for a digest trusts neither the manifest nor the piece list at the origin: also over
    plain HTTP."""
    lie = await rig.publish_lie()
    if way == "pull":
        pull = rig.agent.pulls.start(PullRequest(blob=lie))
    else:
        reading = asyncio.create_task(rig.agent.pulls.blob(lie))
    await until(lambda: lie in rig.agent.registry._fetching)
    rig.plan_origin(lie)
    if way == "pull":
        assert pull.task is not None
        await pull.task
        assert isinstance(pull.error, Corrupt)
    else:
        await reading
    await until(lambda: rig.agent.store.get(lie) is None)
    assert not rig.agent.registry.serves(lie)


async def test_a_new_pull_survives_the_end_of_one_that_failed(rig: Rig) -> None:
    """What is discarded is what was wrong, not what was begun since."""
    digest = await rig.publish(rig.data)
    _, failing = await rig.fetch(digest)
    assert failing is not None
    with failing.blob.held():
        discarding = asyncio.create_task(rig.agent.registry.discard(digest))
        with pytest.raises(Corrupt):
            await failing.done
        await asyncio.sleep(0)
        _, again = await rig.fetch(digest)
    assert again is not None and again is not failing
    rig.plan_origin(digest)
    await asyncio.wait_for(again.done, 60)
    await asyncio.wait_for(discarding, 60)
    found = rig.agent.store.get(digest)
    assert found is not None and found.complete


async def test_no_pull_begins_once_the_agent_stops(rig: Rig) -> None:
    digest = await rig.publish(rig.data)
    pull = rig.agent.pulls.start(PullRequest(blob=digest))
    reading = asyncio.create_task(rig.agent.pulls.blob(digest))
    await until(lambda: digest in rig.agent.registry._fetching)
    await rig.agent.stop()
    assert pull.task is not None and pull.task.done()
    await asyncio.wait([reading], timeout=60)
    assert reading.done()
    with pytest.raises(Unavailable):
        rig.agent.pulls.start(PullRequest(blob=digest))


class SlowBlob:
    """A blob whose writing takes until `go` is set."""

    def __init__(self, blob: Blob) -> None:
        self.blob, self.layout, self.digest, self.have = blob, blob.layout, blob.digest, blob.have
        self.writing, self.go = threading.Event(), threading.Event()
        self.in_memory = True

    def write(self, piece: int, data: bytes) -> bool:
        self.writing.set()
        self.go.wait(60)
        return self.blob.write(piece, data)


async def at_once(length: int) -> None:
    return None


class NotedBlob:
    """A blob that notes in which thread each piece is written; number `slow` takes long."""

    def __init__(self, blob: Blob, slow: int, *, in_memory: bool) -> None:
        self.in_memory = in_memory
        self.blob, self.layout, self.digest, self.have = blob, blob.layout, blob.digest, blob.have
        self.slow, self.on_loop = slow, list[bool]()
        self.loop = threading.get_ident()

    def write(self, piece: int, data: bytes) -> bool:
        self.on_loop.append(threading.get_ident() == self.loop)
        if len(self.on_loop) == self.slow:
            time.sleep(INLINE_S)
        return self.blob.write(piece, data)


@pytest.mark.parametrize("in_memory", [False, True])
async def test_short_pieces_of_the_origin_are_stored_on_the_loop_where_no_disk_may_hang(
    rig: Rig, in_memory: bool
) -> None:
    """And there until storing them is slow."""
    digest = await rig.publish(rig.data)
    blob, _ = await rig.fetch(digest)
    noted, events = NotedBlob(blob, slow=2, in_memory=in_memory), list[StreamEvent]()
    reader = OriginReader(
        rig.layout,
        noted,  # type: ignore[arg-type]
        0,
        1,
        events.append,
        number=1,
        reading=lambda length: nullcontext(),
        pause=at_once,
    )
    reader.start()
    await until(lambda: events and isinstance(events[-1], StreamClosed))
    assert events[-1] == StreamClosed(1, "done")
    assert len(noted.on_loop) == blob.layout.count > 2
    assert noted.on_loop == [in_memory, in_memory] + [False] * (blob.layout.count - 2)


async def test_two_readers_of_the_origin_read_nothing_twice(rig: Rig) -> None:
    """What a client waits for is read beside its stripe: pieces that the one has under way the
    other leaves out, also where it chose them before."""
    digest = await rig.publish(rig.data)
    blob, _ = await rig.fetch(digest)
    read, under_way, events = list[int](), set[int](), list[StreamEvent]()

    class Counted:
        async def read_range(self, digest: Digest, offset: int, length: int) -> bytes:
            read.append(offset)
            return await rig.layout.read_range(digest, offset, length)

    readers = [
        OriginReader(
            Counted(),
            SlowBlob(blob),  # type: ignore[arg-type]
            0,
            1,
            events.append,
            number=number,
            reading=lambda length: nullcontext(),
            pause=at_once,
            pieces=pieces,
            under_way=under_way,
        )
        for number, pieces in ((1, ()), (2, tuple(reversed(range(blob.layout.count)))))
    ]
    for reader in readers:
        reader._blob.go.set()  # type: ignore[attr-defined]
        reader.start()
    await until(lambda: sum(isinstance(event, StreamClosed) for event in events) == 2)
    assert sorted(read) == [blob.layout.offset(piece) for piece in range(blob.layout.count)]
    assert len(blob.have) == blob.layout.count > 2 and not under_way


async def test_a_reader_of_the_origin_that_is_closed_tells_of_every_piece_it_stored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece on disk that nobody was told of would never be asked for again, and the pull would
    wait for it for ever."""
    digest = await rig.publish(rig.data)
    blob, _ = await rig.fetch(digest)
    slow, events = SlowBlob(blob), list[StreamEvent]()
    monkeypatch.setattr(origin_reader, "INLINE_BYTES", 0)
    reader = OriginReader(
        rig.layout,
        slow,
        0,
        1,
        events.append,
        number=1,
        reading=lambda length: nullcontext(),
        pause=at_once,  # type: ignore[arg-type]
    )
    reader.start()
    await asyncio.to_thread(slow.writing.wait, 60)
    reader.close()
    await asyncio.sleep(0.05)
    slow.go.set()
    await until(lambda: events and isinstance(events[-1], StreamClosed))
    assert events[-1] == StreamClosed(1, "closed")
    told = {event.piece for event in events if isinstance(event, PieceReceived)}
    await asyncio.sleep(0.1)
    assert told == set(blob.have) and told


async def test_a_reader_of_the_origin_that_is_closed_as_it_begins_says_that_it_has_ended(rig: Rig) -> None:
    """A pull would count it among the writers of its blob for ever, and so would the next pulls:
    none could change over to a swarm."""
    digest = await rig.publish(rig.data)
    blob, _ = await rig.fetch(digest)
    events = list[StreamEvent]()
    reader = OriginReader(
        rig.layout,
        blob,
        0,
        1,
        events.append,
        number=1,
        reading=lambda length: nullcontext(),
        pause=at_once,
    )
    reader.start()
    reader.close()
    await until(lambda: events)
    assert events == [StreamClosed(1, "closed")]


async def test_a_wrong_setting_is_found_before_the_store_is_opened(tmp_path: Path) -> None:
    for wrong in (
        {"origin": "nonsense"},
        {"trackers": ("nonsense",)},
        {"host": ""},
        {"host": "a b"},
        {"address": "nowhere"},
    ):
        settings = {"trackers": (), "host": "h", "address": "h:1", "store": tmp_path / "store"} | wrong
        with pytest.raises(P2PDistError):
            Agent(AgentSettings(**settings))  # type: ignore[arg-type]
        assert not (tmp_path / "store").exists()


async def test_clients_of_the_network_that_read_no_documents_take_a_share_of_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document is whole in memory once for each client that has yet to read it, and the clients
    of one address leave most of that to the others."""
    size, silent = 16 << 20, list[asyncio.StreamWriter]()
    digest = digest_of(data := os.urandom(size))
    monkeypatch.setattr(documents, "BYTES_MAX", 3 * size)
    monkeypatch.setattr(documents, "ADDRESS_PART", 2)
    monkeypatch.setattr(documents, "SECONDS_MAX", 3600.0)
    await asyncio.to_thread(rig.agent.store.put_document, data)
    async with AsyncExitStack() as stack:
        port = await serve(stack, make_apps(rig.agent)[0])
        path = f"/v1/blobs/{digest}"
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))

        async def status() -> int:
            async with http.get(path) as answer:
                assert answer.status == 503 or await answer.read() == data
                return answer.status

        async def begun(host: str) -> bool:
            """Whether a client at an address that reads nothing has the head of the document."""
            opened = asyncio.open_connection("127.0.0.1", port, limit=1 << 12, local_addr=(host, 0))
            reader, writer = await opened
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            silent.append(writer)
            return b" 200 " in await reader.readline()

        async with asyncio.timeout(60):
            for number in range(2, 5):
                assert await status() == 200, "others have taken all"
                while not await begun(f"127.0.0.{number}"):
                    await asyncio.sleep(0.05)  # the last answer is about to end
                assert not await begun(f"127.0.0.{number}"), "an address takes its share"
            assert await status() == 503, "all of them take no more than all"
            for writer in silent:
                writer.transport.abort()
            while await status() != 200:
                await asyncio.sleep(0.05)


async def test_a_client_behind_a_slow_link_has_the_time_that_a_document_takes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "SECONDS_MAX", 0.0)
    monkeypatch.setattr(documents, "BYTES_S_MIN", 1 << 10)
    digest = digest_of(data := os.urandom(16 << 20))
    await asyncio.to_thread(rig.agent.store.put_document, data)
    async with AsyncExitStack() as stack:
        port = await serve(stack, make_apps(rig.agent)[0])
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        async with http.get(f"/v1/blobs/{digest}") as answer:
            assert await answer.read() == data


async def test_an_object_that_is_a_blob_has_a_time_as_all_objects_do(rig: Rig) -> None:
    """The AWS command line and minio-go copy no object whose head has none."""
    digest = await rig.publish(rig.data)
    settings = S3Settings((BucketSettings("blobs", blobs=((b"a/weights", digest),)),))
    async with AsyncExitStack() as stack:
        port = await serve(stack, make_s3_app(rig.agent, settings))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        async with http.head("/blobs/a/weights") as head, http.get("/blobs?list-type=2") as listing:
            modified, listed = parsedate_to_datetime(head.headers["Last-Modified"]), await listing.text()
        assert f"<LastModified>{modified:%Y-%m-%dT%H:%M:%S}.000Z</LastModified>" in listed
        assert abs(time.time() - modified.timestamp()) < 600, "a key of other settings may have named another blob"
        getting = asyncio.create_task(_whole(http, "/blobs/a/weights"))
        await until(lambda: digest in rig.agent.registry._fetching)
        rig.plan_origin(digest)
        body, headers = await getting
        assert (body, headers["Last-Modified"]) == (rig.data, head.headers["Last-Modified"])
        since = {"If-Modified-Since": head.headers["Last-Modified"]}
        assert (await _whole(http, "/blobs/a/weights", **since))[0] == b""


async def _whole(http: aiohttp.ClientSession, path: str, **fields: str) -> tuple[bytes, Mapping[str, str]]:
    async with http.get(path, headers=fields) as answer:
        return await answer.read(), answer.headers


async def test_readers_that_ask_for_one_blob_at_once_are_one_fetch(rig: Rig) -> None:
    """Clients of one address, such as jobs that begin together, ask before any pull is there."""
    digest = await rig.publish(rig.data)
    async with AsyncExitStack() as stack:
        port = await serve(stack, make_apps(rig.agent)[0])
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, raise_for_status=True)
        )
        asking = [asyncio.create_task(_whole(http, f"/v1/blobs/{digest}")) for _ in range(3 * FETCHES_MAX)]
        await until(lambda: digest in rig.agent.registry._fetching)
        rig.plan_origin(digest)
        async with asyncio.timeout(60):
            assert all(body == rig.data for body, _ in await asyncio.gather(*asking))
        await until(lambda: not rig.agent.readers._fetches)


async def test_a_blob_that_readers_ask_for_at_once_takes_its_room_once(rig: Rig, tmp_path: Path) -> None:
    """One of them looks for room only when another one has begun the blob."""
    found = PieceList(PieceLayout(PIECES * PIECE, PIECE), bytes(32 * PIECES))
    settings = AgentSettings((), "h2", "127.0.0.1:7071", tmp_path / "small", capacity_bytes=PIECES * PIECE * 3 // 2)
    agent, digest = Agent(settings), digest_of(rig.data)
    first, gate = threading.Event(), threading.Event()
    begun: list[Blob] = []

    async def size() -> int:
        return found.layout.size

    async def begin() -> None:
        begun.append(agent.store.begin(digest, found))

    async with AsyncExitStack() as stack:
        stack.push_async_callback(agent.stop)
        await agent.start()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        thread = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(thread)
        stack.callback(gate.set)
        stack.callback(first.set)
        thread.submit(first.wait)
        readers = [asyncio.create_task(agent.readers.bring(digest, "127.0.0.1", size, begin))]
        await until(lambda: [fetch.entering for fetch in agent.readers._fetches.values()] == [1])
        thread.submit(gate.wait)
        readers.append(asyncio.create_task(agent.readers.bring(digest, "127.0.0.1", size, begin)))
        await until(lambda: agent.readers._fetches[digest].entering == 2)
        first.set()
        await until(lambda: bool(begun))
        gate.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*readers)
    assert len(begun) == 2


async def test_a_document_is_given_by_ranges_and_conditions_as_all_blobs_are(rig: Rig) -> None:
    digest = digest_of(data := bytes(range(100)))
    await asyncio.to_thread(rig.agent.store.put_document, data)
    tag, other = f'"{digest}"', '"other"'
    async with AsyncExitStack() as stack:
        port = await serve(stack, make_apps(rig.agent)[0])
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))

        async def ask(method: str = "GET", **fields: str) -> tuple[int, bytes, str, str]:
            headers = {name.replace("_", "-"): value for name, value in fields.items()}
            async with http.request(method, f"/v1/blobs/{digest}", headers=headers) as answer:
                body, head = await answer.read(), answer.headers
                return answer.status, body, head.get("Content-Range", ""), head.get("ETag", "")

        assert await ask() == await ask(If_Match=tag) == await ask(Range="bytes=5-1") == (200, data, "", tag)
        assert await ask(Range="bytes=90-") == (206, data[90:], "bytes 90-99/100", tag)
        assert await ask(Range="bytes=-3", If_Range=tag) == (206, data[97:], "bytes 97-99/100", tag)
        assert await ask(Range="bytes=-3", If_Range=other) == (200, data, "", tag)
        assert (await ask(Range="bytes=100-"))[::2] == (416, "bytes */100")
        assert await ask(If_None_Match=f"{other}, {tag}") == (304, b"", "", tag)
        assert (await ask(If_Match=other))[0] == 412
        assert await ask("HEAD") == (200, b"", "", tag)


async def test_a_tracker_takes_the_condition_of_a_store_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As filesystems in user space have, which say that 16 EiB are free: the session would end at
    the message, again and again."""
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:7071", tmp_path / "store"))
    try:
        usage = replace(agent.store.usage(), disk_free=1 << 64)
        monkeypatch.setattr(agent.store, "usage", lambda: usage)
        told = decode_from_agent(encode(agent._condition()))
        assert isinstance(told, Condition) and told.disk_free_bytes == COUNT_MAX
    finally:
        await agent.stop()
