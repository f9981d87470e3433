"""How an agent finds the small parts of a package, against a real tracker over a real layout, and
against trackers that lie."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from p2pdist.agent.pull.packages import Packages
from p2pdist.agent.tracker.connection import Handlers
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.model import manifest as bundles
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, NotFound, Unsuitable
from p2pdist.model.manifest import (
    BLOB_TYPE,
    CONFIG_TYPE,
    MANIFEST_TYPE,
    PIECES_DIGEST,
    PIECES_SIZE,
    PIECES_TYPE,
    Bundle,
    Config,
    Descriptor,
    Manifest,
    Reference,
    encode_bundle,
    encode_config,
    encode_manifest,
    parse_reference,
)
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Welcome, encode
from p2pdist.model.pieces import HASH_SIZE, PieceLayout, PieceList, piece_size_for
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LocalLayout
from p2pdist.store.store import BlobStore
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.service import Service

TAG = parse_reference("team/app:v1")


class Published:
    """A package of layers that nobody has, only their piece lists: the small documents in a
    layout."""

    def __init__(self, *pieces: int) -> None:
        self.config = encode_config(Config(("true",), (f"SALT={os.urandom(4).hex()}",)))
        self.lists = [PieceList(_layout(count), os.urandom(count * HASH_SIZE)).encode() for count in pieces]
        config = Descriptor(CONFIG_TYPE, digest_of(self.config), len(self.config))
        layers = [self._layer(data) for data in self.lists]
        lists = [Descriptor(PIECES_TYPE, digest_of(data), len(data)) for data in self.lists]
        self.manifest = encode_manifest(Manifest(config, tuple(layers), tuple(lists)))
        self.digest = digest_of(self.manifest)
        self.documents = (self.manifest, self.config, *self.lists)

    def _layer(self, data: bytes) -> Descriptor:
        layout = PieceList.decode(data).layout
        notes = {PIECES_DIGEST: digest_of(data), PIECES_SIZE: str(layout.piece_size)}
        return Descriptor(BLOB_TYPE, digest_of(data + b"content"), layout.size, notes)

    async def push(self, origin: LocalLayout, *, tag: Reference = TAG) -> None:
        for document in self.documents:
            await origin.write_document(document)
        await origin.tag(tag, Descriptor(MANIFEST_TYPE, self.digest, len(self.manifest)))


def _layout(pieces: int) -> PieceLayout:
    size = pieces * (64 << 10)
    return PieceLayout(size, piece_size_for(size))


class Site:
    """A layout, a tracker over it that notes what it is asked, and agents' stores."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory, self._stack = directory, stack
        self.origin = LocalLayout(directory / "origin")
        self.origin.scratch()
        self.asked: list[tuple[str, int]] = []
        self._stores = 0

    async def tracker(self) -> str:
        app = make_app(Service(Fleet(started_at=asyncio.get_running_loop().time()), Content(self.origin)))

        @web.middleware
        async def note(
            request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            answer = await handler(request)
            if "session" not in request.path:
                self.asked.append((request.path.split("/sha256:")[0], answer.status))
            return answer

        app.middlewares.append(note)
        return await self._stack.enter_async_context(serving(app))

    async def agent(self, *urls: str, own: LocalLayout | None = None) -> tuple[Packages, BlobStore]:
        self._stores += 1
        store = BlobStore(self.directory / f"store-{self._stores}")
        self._stack.callback(store.close)
        session = TrackerSession(urls, Hello(PROTOCOL_VERSION, f"h{self._stores}", f"127.0.0.1:{self._stores}"))
        handlers = Handlers(list, lambda: None, lambda message: None, lambda present: None)
        running = asyncio.create_task(session.run(handlers))

        async def end() -> None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        self._stack.push_async_callback(end)
        if urls:
            assert await session.wait_connected(60)
        return Packages(store, session, own, wait_s=3.0), store


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        made = Site(tmp_path, stack)
        yield made
    await made.origin.close()


def silent(text: str) -> None:
    raise AssertionError(f"somebody waits: {text}")


async def test_a_package_that_is_all_new_costs_one_request(site: Site) -> None:
    package = Published(100, 1, 4096)
    await package.push(site.origin)
    packages, store = await site.agent(await site.tracker())
    found = await packages.find(TAG, silent)
    assert site.asked == [("/v1/packages", 200)]
    assert found.digest == package.digest and found.config.entrypoint == ("true",)
    assert all(store.read_document(digest_of(each)) == each for each in package.documents)
    assert [packages.pieces(layer).encode() for layer in found.manifest.layers] == package.lists


async def test_an_origin_that_must_be_set_up_otherwise_is_not_waited_for(site: Site) -> None:
    """The tracker's, which states no lengths: asking again gives the same."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"{}")
        return response

    odd = web.Application()
    odd.router.add_get("/{path:.*}", answer)
    async with serving(odd) as url:
        site.origin = open_origin(url)  # type: ignore[assignment] # which is read alone
        packages, _ = await site.agent(await site.tracker())
        with pytest.raises(Unsuitable, match="how long its answer is"):
            await packages.find(TAG, silent)


async def test_what_a_tag_still_means_is_not_sent_again_and_a_new_meaning_is(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracker.content.TAG_FRESH_S", 0.0)
    first, second = Published(50), Published(60)
    await first.push(site.origin)
    packages, store = await site.agent(await site.tracker())
    store.packages.record(str(TAG), (await packages.find(TAG, silent)).digest)
    assert (await packages.find(TAG, silent)).digest == first.digest
    assert site.asked == [("/v1/packages", 200), ("/v1/packages", 304)]
    await second.push(site.origin)
    assert (await packages.find(TAG, silent)).digest == second.digest
    assert site.asked[2:] == [("/v1/packages", 200)]
    by_digest = Reference("team/app", digest=first.digest)
    assert (await packages.find(by_digest, silent)).digest == first.digest
    assert site.asked[3:] == [("/v1/policies", 200)], "what a digest names, and is here, is not asked for"


async def test_a_damaged_document_of_a_known_package_is_fetched_again(site: Site) -> None:
    package = Published(50, 60)
    await package.push(site.origin)
    packages, store = await site.agent(await site.tracker())
    store.packages.record(str(TAG), (await packages.find(TAG, silent)).digest)
    with sqlite3.connect(store.root / "index.sqlite") as database:
        database.execute("UPDATE smalls SET data=? WHERE digest=?", (b"damaged", digest_of(package.lists[1])))
    database.close()
    found = await packages.find(TAG, silent)
    assert packages.pieces(found.manifest.layers[1]).encode() == package.lists[1]


async def test_what_does_not_fit_a_bundle_is_asked_for_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Published(4000, 10, 4001)
    await package.push(site.origin)
    room = len(package.manifest) + len(package.config) + len(package.lists[0]) + len(package.lists[1])
    monkeypatch.setattr(bundles, "BUNDLE_BYTES_MAX", room)
    packages, _ = await site.agent(await site.tracker())
    found = await packages.find(TAG, silent)
    assert site.asked == [("/v1/packages", 200), ("/v1/content", 200)]
    assert [packages.pieces(layer).encode() for layer in found.manifest.layers] == package.lists


async def test_a_document_that_the_origin_lost_is_missed_only_by_who_lacks_it(site: Site) -> None:
    package = Published(50, 60)
    await package.push(site.origin)
    lost = package.lists[1]
    site.origin.blob_path(digest_of(lost)).unlink()
    url = await site.tracker()
    packages, store = await site.agent(url)
    store.put_document(lost)
    assert (await packages.find(TAG, silent)).digest == package.digest
    without, _ = await site.agent(url)
    with pytest.raises(NotFound, match=digest_of(lost)):
        await without.find(TAG, silent)


async def test_a_reference_that_names_nothing_is_told_by_its_name(site: Site) -> None:
    await Published(5).push(site.origin)
    packages, _ = await site.agent(await site.tracker())
    with pytest.raises(NotFound, match="team/other:v9"):
        await packages.find(parse_reference("team/other:v9"), silent)


async def test_without_a_tracker_the_own_origin_is_asked(site: Site) -> None:
    package = Published(7, 8)
    await package.push(site.origin)
    packages, _ = await site.agent(own=site.origin)
    assert (await packages.find(TAG, silent)).digest == package.digest
    again, _ = await site.agent(own=site.origin)
    assert (await again.find(Reference("team/app", digest=package.digest), silent)).digest == package.digest


async def test_many_agents_at_once_are_answered_with_one_read_of_each_document(site: Site) -> None:
    reads: list[Digest] = []

    class Counted(LocalLayout):
        async def read(self, digest: Digest, *, limit: int = 1 << 26) -> bytes:
            reads.append(digest)
            return await super().read(digest, limit=limit)

    package = Published(4000, 10, 4001)
    await package.push(site.origin)
    counted = Counted(site.directory / "origin")
    content = Content(counted)
    answers = await asyncio.gather(*(content.bundle(package.digest) for _ in range(200)))
    assert sorted(reads) == sorted(map(digest_of, package.documents))
    assert all(each is answers[0] for each in answers), "encoded once"
    assert answers[0] == encode_bundle(Bundle(package.digest, package.documents))
    await counted.close()


HONEST, OTHER = Published(30, 40), Published(30, 40)
ALTERED = HONEST.lists[0][:-1] + bytes([HONEST.lists[0][-1] ^ 1])
LIES = {
    "an altered piece list": Bundle(HONEST.digest, (HONEST.manifest, HONEST.config, ALTERED)),
    "an altered manifest": Bundle(HONEST.digest, (HONEST.manifest + b" ", HONEST.config)),
    "more than was asked for": Bundle(HONEST.digest, (*HONEST.documents, b"a stranger")),
    "another package": Bundle(OTHER.digest, OTHER.documents),
}


def lying(body: bytes) -> web.Application:
    """A tracker that welcomes everybody and answers every request with `body`."""

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_str(encode(Welcome(PROTOCOL_VERSION, 1.0)).decode())
        async for _ in socket:
            continue
        return socket

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get("/v1/session", session)
    app.router.add_get("/{path:.*}", answer)
    return app


@pytest.mark.parametrize("body", [*map(encode_bundle, LIES.values()), b"", b"\xc1 nonsense", b"\x81"])
async def test_nothing_of_an_answer_that_lies_is_stored(site: Site, body: bytes) -> None:
    async with serving(lying(body)) as url:
        packages, store = await site.agent(url)
        with pytest.raises(Corrupt):
            await packages.find(Reference("team/app", digest=HONEST.digest), silent)
        assert store.usage().bytes_small == 0
