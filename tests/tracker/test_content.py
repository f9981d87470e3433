"""Small content at the tracker, over a real layout: what happens when its own disk, or the origin,
fails."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import NotFound, Unavailable
from p2pdist.model.manifest import Descriptor, Reference, blob_reference, parse_reference
from p2pdist.origin.contract import Origin
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.repository.push import push_blob
from tracker import content as module
from tracker import joined_reads
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.service import Service
from tracker.state.documents import FILE_NAME, Documents


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    (tmp_path / "origin" / "blobs" / "sha256").mkdir(parents=True)
    return tmp_path / "origin"


def put(layout: Path, data: bytes) -> str:
    digest = digest_of(data)
    (layout / "blobs" / "sha256" / digest[7:]).write_bytes(data)
    return digest


def opened(layout: Path) -> Origin:
    return open_origin(layout.as_uri())


async def test_a_state_that_fails_costs_a_look_at_the_origin_and_no_more(
    tmp_path: Path, layout: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = Documents(tmp_path / "state")
    with sqlite3.connect(tmp_path / "state" / FILE_NAME) as other:
        other.execute("DROP TABLE documents")
    other.close()
    digest = put(layout, b"document")
    assert await Content(opened(layout), documents).read(digest_of(b"document")) == b"document", digest
    assert "cannot be read" in caplog.text and "cannot be written" in caplog.text
    documents.close()


async def test_many_documents_at_once_keep_within_their_bytes(tmp_path: Path, layout: Path) -> None:
    documents = Documents(tmp_path / "state", bytes_max=5_000)
    content = Content(opened(layout), documents)
    bodies = [bytes([number]) * 1000 for number in range(40)]
    for body in bodies:
        put(layout, body)
    assert await asyncio.gather(*(content.read(digest_of(body)) for body in bodies)) == bodies
    assert sum(documents.read(digest_of(body)) is not None for body in bodies) == 5
    documents.close()


async def test_the_digest_of_something_else_names_no_package(layout: Path) -> None:
    """The document is right, and the reference is not: nothing is corrupt."""
    digest = Digest(put(layout, b"{}"))
    content = Content(opened(layout))
    for _ in range(2):
        with pytest.raises(NotFound, match=f"no package team/x@{digest}"):
            await content.resolve(Reference("team/x", digest=digest))
    async with aiohttp.ClientSession() as http:
        runner = web.AppRunner(make_app(Service(Fleet(started_at=0.0), content)), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        for path, status in ((f"packages?reference=team/x@{digest}", 404), (f"content/{digest}?as=manifest", 400)):
            async with http.get(f"{url}/{path}") as answer:
                assert answer.status == status, path
        await runner.cleanup()


async def test_whoever_asks_and_leaves_does_not_take_the_answer_from_others(layout: Path) -> None:
    put(layout, b"document")
    content = Content(opened(layout))
    tasks = [asyncio.create_task(content.read(digest_of(b"document"))) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await asyncio.gather(*tasks[1:]) == [b"document"] * 2
    with pytest.raises(NotFound):
        await content.read(digest_of(b"missing"))


async def test_a_document_that_was_read_outlives_the_origin(tmp_path: Path, layout: Path) -> None:
    put(layout, b"document")
    documents = Documents(tmp_path / "state")
    await Content(opened(layout), documents).read(digest_of(b"document"))
    shutil.rmtree(layout)
    assert await Content(opened(layout), documents).read(digest_of(b"document")) == b"document"
    documents.close()


async def pushed(directory: Path) -> tuple[LocalLayout, Reference, Reference]:
    """A layout with one package, by tag and by digest."""
    layout = LocalLayout(directory / "pushed")
    layout.scratch()
    (directory / "content").write_bytes(b"content" * 1000)
    blob = await push_blob(directory / "content", layout)
    tag = blob_reference(blob.digest)
    return layout, tag, Reference("any/name", digest=(await layout.resolve(tag)).digest)


def serving(layout: LocalLayout) -> Origin:
    return open_origin(layout.url, serving=True)


@pytest.mark.parametrize("away", ["gone", "empty"])
async def test_a_package_that_is_known_needs_no_origin_by_tag_or_by_digest(
    tmp_path: Path, away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, tag, by_digest = await pushed(tmp_path)
    content = Content(serving(layout))
    await content.bundle((await content.resolve(tag)).digest)
    shutil.rmtree(tmp_path / "pushed")
    if away == "empty":  # as where a file system is not mounted
        (tmp_path / "pushed").mkdir()
    monkeypatch.setattr(module, "TAG_FRESH_S", 0.0)
    assert (await content.resolve(by_digest)).digest == by_digest.digest
    assert await content.resolve(by_digest) == await content.resolve(by_digest)
    assert (await content.resolve(tag)).digest == by_digest.digest
    assert await content.bundle(by_digest.digest)
    with pytest.raises(Unavailable):
        await content.resolve(parse_reference("another:tag"))
    with pytest.raises(Unavailable):
        await content.resolve(Reference("another", digest=digest_of(b"another")))
    await layout.close()


async def test_tags_digests_and_layers_outlive_a_restart_while_the_origin_is_away(tmp_path: Path) -> None:
    layout, tag, by_digest = await pushed(tmp_path)
    documents = Documents(tmp_path / "state")
    before = Content(serving(layout), documents)
    described = await before.resolve(tag)
    await before.bundle(described.digest)
    layer = next(iter(before._layers.values()))
    documents.close()
    shutil.rmtree(tmp_path / "pushed")
    documents = Documents(tmp_path / "state")
    after = Content(serving(layout), documents)
    assert await after.resolve(tag) == described
    assert (await after.resolve(by_digest)).digest == described.digest
    assert await after.bundle(described.digest)
    assert await after.layer(layer.digest) == layer
    documents.close()
    await layout.close()


async def test_a_layer_that_is_known_is_no_question_to_an_origin_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that was never pushed alone: an agent that hears NotFound asks for it as a layer."""
    monkeypatch.setattr(joined_reads, "ABSENT_S", 0.0)
    layout, tag, _ = await pushed(tmp_path)
    content = Content(serving(layout))
    layer = Descriptor("layer", digest_of(b"layer"), 5)
    content._layers[layer.digest] = layer
    with pytest.raises(NotFound):
        await content.resolve(blob_reference(layer.digest))
    shutil.rmtree(tmp_path / "pushed")
    with pytest.raises(NotFound, match="cannot be now"):
        await content.resolve(blob_reference(layer.digest))
    with pytest.raises(Unavailable):
        await content.resolve(tag)
    await layout.close()


async def test_an_origin_that_hangs_keeps_nobody_waiting_for_a_tag_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, tag, _ = await pushed(tmp_path)

    class Hangs:
        url = layout.url
        asked = 0

        async def resolve(self, reference: Reference) -> Descriptor:
            self.asked += 1
            if self.asked > 1:
                await asyncio.Event().wait()
            return await layout.resolve(reference)

    origin = Hangs()
    content = Content(origin)  # type: ignore[arg-type]
    described = await content.resolve(tag)
    monkeypatch.setattr(module, "TAG_FRESH_S", 0.0)
    monkeypatch.setattr(module, "TAG_WAIT_S", 0.02)
    assert await content.resolve(tag) == described
    assert await content.resolve(tag) == described and origin.asked == 2
    for task in content._reads._reads.values():
        task.cancel()
    await layout.close()


class Counted:
    """An origin that counts what it is asked."""

    def __init__(self, origin: Origin) -> None:
        self._origin, self.asked = origin, 0
        self.url = origin.url

    async def read(self, digest: Digest) -> bytes:
        self.asked += 1
        return await self._origin.read(digest)

    async def resolve(self, reference: Reference) -> Descriptor:
        self.asked += 1
        return await self._origin.resolve(reference)


async def test_what_the_origin_does_not_have_is_not_asked_again_at_once(
    layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = Counted(opened(layout))
    content = Content(origin)  # type: ignore[arg-type]
    monkeypatch.setattr(joined_reads, "ABSENT_S", 3600.0)
    for _ in range(5):
        with pytest.raises(NotFound):
            await content.read(digest_of(b"missing"))
        with pytest.raises(NotFound):
            await content.resolve(parse_reference("missing:v1"))
    assert origin.asked == 2
    monkeypatch.setattr(joined_reads, "ABSENT_S", 0.0)
    with pytest.raises(NotFound):
        await content.read(digest_of(b"late"))
    put(layout, b"late")
    assert await content.read(digest_of(b"late")) == b"late"


async def test_one_address_causes_a_bounded_number_of_misses(layout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a request at central storage; what it has may still be asked for by others."""
    monkeypatch.setattr(joined_reads, "MISSES_BURST", 5)
    monkeypatch.setattr(joined_reads, "MISSES_PER_S", 0.001)
    origin = Counted(opened(layout))
    content = Content(origin)  # type: ignore[arg-type]

    async def ask(address: str, number: int) -> type[BaseException] | None:
        joined_reads.ASKER.set(address)
        try:
            await content.read(digest_of(b"%d" % number))
        except (NotFound, Unavailable) as error:
            return type(error)
        return None

    found = [await ask("10.0.0.1", number) for number in range(20)]
    assert found.count(NotFound) == origin.asked == 6 and found[-1] is Unavailable
    assert await ask("10.0.0.2", 100) is NotFound
    put(layout, b"200")
    assert await ask("10.0.0.2", 200) is None
    assert await ask("10.0.0.1", 200) is None, "what is here costs the origin nothing"
