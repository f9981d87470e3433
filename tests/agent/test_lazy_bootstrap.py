"""What an agent makes of the bootstrap of a package: when it is of use, what of it is believed, and
what becomes of a view whose trees say something else."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from waits import until

from p2pdist.agent.lazy import bootstrap as lazy_bootstrap
from p2pdist.agent.lazy import view as lazy_view
from p2pdist.agent.lazy.bootstrap import bring_bootstrap, bring_lists, useful_bootstrap
from p2pdist.agent.lazy.chunks import Chunks
from p2pdist.agent.lazy.forecast import forecast, forecast_by_bootstrap
from p2pdist.agent.lazy.readers import Stalls
from p2pdist.agent.lazy.traces import Start, Traces
from p2pdist.agent.lazy.view import LazyView, layout_of
from p2pdist.agent.pull.packages import Package
from p2pdist.model.bootstrap import (
    NAME_BYTES,
    Bootstrap,
    PlacedChunks,
    bootstrap_of,
    decode_bootstrap,
    encode_bootstrap,
)
from p2pdist.model.catalog import Pack, record
from p2pdist.model.device import CELL_BYTES, Cells, DeviceLayout
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, Unavailable
from p2pdist.model.manifest import (
    CATALOG_TYPE,
    PACK_TYPE,
    Config,
    Descriptor,
    Manifest,
    decode_manifest,
    parse_reference,
)
from p2pdist.model.messages import PullRequest, PullStatus
from p2pdist.model.pieces import PieceList
from p2pdist.model.trace import Trace
from p2pdist.model.tree import CHUNK_LEAST, ChunkList, content_hash
from p2pdist.mount.erofs.writer import device_image
from p2pdist.mount.supervisor.protocol import ANSWER, DEVICE, ORDER
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import pack
from p2pdist.package.tree.bootstrap import Bootstrapping
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore

Absent: Any = None
CELLS = Cells(headed=True)
REFERENCE = parse_reference("team/app:v1")


class Fetched:
    """Fetches blobs of a layout into a store: what is asked for comes at once, if anything does.
    `came` is called with each blob of which all is here then; it is complete a moment later."""

    def __init__(self, store: BlobStore, layout: LocalLayout) -> None:
        self.store, self.layout = store, layout
        self.asked: list[Digest] = []
        self.comes = True
        self.failure: Exception | None = None
        self.came: Callable[[Blob], None] = lambda blob: None

    async def fetch(self, layer: Descriptor, priority: str, selection: object) -> tuple[Blob, Any]:
        self.asked.append(layer.digest)
        if self.failure is not None:
            raise self.failure
        blob = self.store.get(layer.digest)
        if blob is not None and blob.complete:
            return blob, None
        pieces = PieceList.decode(self.layout.blob_path(layer.pieces_digest).read_bytes())
        blob = self.store.begin(layer.digest, pieces)
        done = asyncio.get_running_loop().create_future()
        return blob, SimpleNamespace(demand=lambda numbers, **_: self._come(blob, numbers, done), done=done)

    async def _come(self, blob: Blob, numbers: Sequence[int], done: asyncio.Future[None]) -> None:
        if not self.comes:
            await asyncio.Event().wait()
        data = self.layout.blob_path(blob.digest).read_bytes()
        for piece in numbers:
            blob.write(piece, data[blob.layout.offset(piece) :][: blob.layout.length(piece)])
        if len(blob.have) == blob.layout.count and not done.done():
            self.came(blob)
            asyncio.get_running_loop().call_later(0.01, self._finish, blob, done)

    def _finish(self, blob: Blob, done: asyncio.Future[None]) -> None:
        if not blob.complete and len(blob.have) == blob.layout.count:  # else something of it was dropped
            blob.finish()
        if not done.done():
            done.set_result(None)

    async def all_of(self, *parts: Descriptor) -> None:
        for part in parts:
            blob, pull = await self.fetch(part, "preseed", None)
            if pull is not None:
                await pull.demand(range(blob.layout.count))
                await pull.done


@dataclass
class Site:
    """A package in a layout, and a store that has nothing of it."""

    layout: LocalLayout
    store: BlobStore
    fetcher: Fetched
    package: Package
    source: Path

    @property
    def manifest(self) -> Manifest:
        return self.package.manifest

    @property
    def part(self) -> Descriptor:
        found = bootstrap_of(self.manifest)
        assert found is not None
        return found

    @property
    def bootstrap(self) -> Bootstrap:
        return decode_bootstrap(self.layout.blob_path(self.part.digest).read_bytes())

    def parts(self, media_type: str) -> list[Descriptor]:
        return [part for part in self.manifest.parts if part.media_type == media_type and part != self.part]

    @property
    def files(self) -> dict[bytes, bytes]:
        """The files by path, in walking order."""
        return {os.fsencode(path.name): path.read_bytes() for path in sorted(self.source.iterdir())}

    async def whole(self) -> None:
        """Have the tree of the top layer complete in the store."""
        lists = [part.digest for part in self.parts(CATALOG_TYPE)]
        packs = self.parts(PACK_TYPE)
        await self.fetcher.all_of(self.manifest.layers[-1], *self.parts(CATALOG_TYPE), *packs)
        store, root = self.store, self.manifest.layers[-1].digest
        with store.trees.missing(root, lists, [pack.digest for pack in packs]) as missing:
            assert store.trees.fill(missing).missing == 0
            store.trees.finish(missing)


async def site_of(directory: Path, files: int = 300) -> Site:
    source, drawn = directory / "source", random.Random(files)
    source.mkdir()
    for number in range(files):
        (source / f"{number:03}").write_bytes(drawn.randbytes(drawn.randrange(1000, 9000)))
    layout, store = LocalLayout(directory / "layout"), BlobStore(directory / "store")
    how = Bootstrapping(device_image, always=True)
    packed = await pack(source, REFERENCE, layout, format="tree", bootstrapping=how)
    manifest = decode_manifest(await layout.read(Digest(packed.digest)))
    package = Package(REFERENCE, Digest(packed.digest), manifest, Config())
    return Site(layout, store, Fetched(store, layout), package, source)


@pytest.fixture
async def site(tmp_path: Path) -> Any:
    made = await site_of(tmp_path)
    yield made
    await made.layout.close()
    made.store.close()


# -- when it is of use


async def test_a_bootstrap_is_of_use_where_nothing_of_the_lists_is_here(site: Site) -> None:
    part = site.part
    assert useful_bootstrap(site.store, site.manifest) == part
    (root,), (catalog,) = site.manifest.layers, site.parts(CATALOG_TYPE)
    assert part.size < catalog.size
    without = replace(site.manifest, parts=tuple(each for each in site.manifest.parts if each != part))
    assert useful_bootstrap(site.store, without) is None
    await site.fetcher.all_of(root, *site.parts(PACK_TYPE))
    await site.fetcher.fetch(catalog, "preseed", None)  # it has begun, and nothing of it is here
    assert useful_bootstrap(site.store, site.manifest) == part
    await site.fetcher.all_of(catalog)
    assert useful_bootstrap(site.store, site.manifest) is None


async def test_one_that_is_no_smaller_than_what_is_missing_of_the_lists_is_of_no_use(site: Site) -> None:
    missing = site.manifest.layers[0].size + sum(each.size for each in site.parts(CATALOG_TYPE))
    for size, useful in ((missing - 1, True), (missing, False)):
        part = replace(site.part, size=size)
        manifest = replace(site.manifest, parts=(*site.parts(CATALOG_TYPE), part))
        assert useful_bootstrap(site.store, manifest) == (part if useful else None)
    await site.fetcher.all_of(site.manifest.layers[0])
    part = replace(site.part, size=missing - 1)
    assert useful_bootstrap(site.store, replace(site.manifest, parts=(*site.parts(CATALOG_TYPE), part))) is None


async def test_a_bootstrap_is_of_no_use_where_all_trees_are_here(site: Site) -> None:
    """Though another catalog is not, which a later version brought."""
    other = Descriptor(CATALOG_TYPE, digest_of(b"other"), 10**6)
    manifest = replace(site.manifest, parts=(*site.manifest.parts, other))
    assert useful_bootstrap(site.store, manifest) == site.part
    await site.whole()
    assert useful_bootstrap(site.store, manifest) is None
    above = replace(site.manifest.layers[0], digest=digest_of(b"above"))
    assert useful_bootstrap(site.store, replace(manifest, layers=(*manifest.layers, above))) == site.part


# -- bringing it


def flip(path: Path, at: int) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


async def brought(site: Site, part: Descriptor | None = None, layers: Sequence[Descriptor] = ()) -> Bootstrap | None:
    come: list[int] = []
    found = await bring_bootstrap(
        site.fetcher, part or site.part, layers or site.manifest.layers, lambda: come.append(1)
    )
    assert found is None or come == [1]
    return found


async def test_a_bootstrap_comes(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it is here already."""
    for _ in range(2):
        found = await brought(site)
        assert found == site.bootstrap and not caplog.records
    assert site.fetcher.asked == 2 * [site.part.digest]


async def test_what_is_no_use_to_a_view_is_told_and_left(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def left(reason: str, **options: Any) -> None:
        caplog.clear()
        assert await brought(site, **options) is None
        (line,) = [item.getMessage() for item in caplog.records if item.levelno == logging.WARNING]
        assert line.startswith("a view is shown without its bootstrap") and reason in line

    (root,) = site.manifest.layers
    await left("other layers", layers=[root, root])
    await left("other layers", layers=[replace(root, digest=digest_of(b"other"))])
    await left("is no bootstrap", part=site.parts(CATALOG_TYPE)[0])
    with monkeypatch.context() as patched:
        patched.setattr(lazy_bootstrap, "ARRANGEMENT", 3)
        await left("does not arrange")
    site.fetcher.failure = Unavailable("storage does not answer")
    await left("storage does not answer")
    site.fetcher.failure = OSError(errno.EIO, "the disk is broken")
    await left("the disk is broken")
    site.fetcher.failure = None
    assert await brought(site) == site.bootstrap


async def test_one_that_changed_on_the_disk_is_dropped_and_comes_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pieces were right when they came."""
    site.fetcher.came = lambda blob: flip(blob.path, blob.size - 1)
    assert await brought(site) is None
    assert f"{site.part.digest} has changed on the disk" in caplog.text
    blob = site.store.get(site.part.digest)
    assert blob is not None and not blob.complete
    assert set(range(blob.layout.count)) - set(blob.have) == {blob.layout.count - 1}
    site.fetcher.came = lambda blob: None
    assert await brought(site) == site.bootstrap


async def test_one_of_which_nothing_comes_is_waited_for_no_longer(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_bootstrap, "STILL_S", 0.01)
    site.fetcher.comes = False
    async with asyncio.timeout(60):
        assert await brought(site) is None
    assert f"nothing of {site.part.digest} has come for 0.01 s" in caplog.text
    site.fetcher.comes = True
    assert await brought(site) == site.bootstrap


async def test_lists_are_brought_and_nothing_else(site: Site) -> None:
    await bring_lists(site.store, site.fetcher, site.manifest)
    lists = {site.manifest.layers[0].digest, *(part.digest for part in site.parts(CATALOG_TYPE))}
    assert set(site.fetcher.asked) == lists
    assert all((blob := site.store.get(digest)) is not None and blob.complete for digest in lists)
    await bring_lists(site.store, site.fetcher, site.manifest)
    assert len(site.fetcher.asked) == len(lists)


# -- where contents come from


def shortened(chunks: Sequence[PlacedChunks]) -> list[PlacedChunks]:
    return [replace(each, names=[name[:NAME_BYTES] for name in each.names]) for each in chunks]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_foreseen_by_a_bootstrap_is_foreseen_by_catalogs(tmp_path: Path, seed: int) -> None:
    """The same packs, for the same chunks: of some contents, whole or of several chunks, objects
    are here. Most of one pack is, and it is no source."""
    drawn, store = random.Random(seed), BlobStore(tmp_path)
    contents = [drawn.randbytes(drawn.randrange(300, 900)) for _ in range(60)]
    sizes = {content_hash(data): len(data) for data in contents}
    lists: dict[bytes, bytes] = {}
    for number in range(3):
        parts = [drawn.randbytes(CHUNK_LEAST + length) for length in range(3)]
        cut = ChunkList(tuple((content_hash(part), len(part)) for part in parts))
        content = content_hash(b"".join(parts))
        if seed % 4 == number:
            assert store.objects.add(content, b"".join(parts))
        sizes[content], lists[content] = sum(length for _, length in cut.chunks), cut.encode()
    layout = DeviceLayout(sizes, lists)
    chunks = [(chunk.chunk, chunk.length, max(1, chunk.length // 3)) for chunk in layout.chunks()]
    if seed % 2:
        drawn.shuffle(chunks)
    placed, packs = [], []
    for number in range(3):
        mine = chunks[number * 23 : (number + 1) * 23]
        rows, at = [], 0
        for name, length, stored in mine:
            rows.append((name, length, stored, at))
            at += stored
        digest = digest_of(b"%d" % number)
        placed.append(PlacedChunks(digest, *map(list, zip(*rows, strict=True))))
        packs.append(Pack(digest, at, b"".join(record(*row[:3]) for row in rows)))
    here = [data for data in contents if content_hash(data) in dict.fromkeys(placed[0].names[: 4 * (seed % 6)])]
    assert all(store.objects.add(content_hash(data), data) for data in here)
    named = tuple(Descriptor(PACK_TYPE, pack.digest, pack.size) for pack in packs[: 2 + seed % 3])
    manifest = Manifest(Absent, (), (), named)
    names = {content[:NAME_BYTES]: size for content, size in sizes.items()}
    cuts = {
        content[:NAME_BYTES]: (layout._cuts(content)[0], [name[:NAME_BYTES] for name in layout._cuts(content)[1]])
        for content in lists
    }
    full = forecast(store, manifest, packs, layout)
    short = forecast_by_bootstrap(store, manifest, shortened(placed), DeviceLayout(names, {}, 2, cuts))
    assert short.sources == full.sources and not short.objects and short.replaced is not None
    for name, _, _ in chunks:
        there, place = full.packs.get(name), short.packs.get(name[:NAME_BYTES])
        assert (there is None) == (place is None)
        if there is not None and place is not None:
            assert place == (there[0], structs.replace(there[1], chunk=name[:NAME_BYTES]))


async def test_a_pack_of_which_most_is_here_is_not_foreseen(site: Site) -> None:
    """The pull may take no more than a part of it, or none."""
    layout, chunks = site.bootstrap.contents()
    (pack_,) = site.parts(PACK_TYPE)
    contents = list(site.files.values())
    assert list(forecast_by_bootstrap(site.store, site.manifest, chunks, layout).sources) == [pack_.digest]
    for data in contents[: len(contents) * 2 // 3]:
        assert site.store.objects.add(content_hash(data), data)
    whereabouts = forecast_by_bootstrap(site.store, site.manifest, chunks, layout)
    assert not whereabouts.sources and not whereabouts.packs
    others = replace(site.manifest, parts=())
    assert not forecast_by_bootstrap(BlobStore(site.source.parent / "empty"), others, chunks, layout).sources


async def test_by_a_short_name_nothing_is_taken_from_an_object(site: Site) -> None:
    """Whoever made the object may have looked for one with this name."""
    layout, placed = site.bootstrap.contents()
    first, *_ = site.files.values()
    assert site.store.objects.add(content_hash(first), first)
    chunks = Chunks(site.store, site.fetcher)
    chunks.whereabouts = forecast_by_bootstrap(site.store, site.manifest, placed, layout)
    chunk = next(layout.chunks())
    assert chunk.content == content_hash(first)[:NAME_BYTES]
    assert chunks.from_objects(chunk) is None and chunks.here(chunk, {}) is None and chunks.in_pack(chunk)
    assert await chunks.read(chunk) == first
    assert site.fetcher.asked == [part.digest for part in site.parts(PACK_TYPE)]
    assert chunks.from_objects(replace(chunk, content=content_hash(first), chunk=content_hash(first))) == first


@pytest.mark.parametrize("beyond", [1, 1 << 40])
async def test_places_behind_the_end_of_a_pack_are_corrupt(site: Site, beyond: int) -> None:
    """Else a reader asks for pieces that there are not."""
    layout, (placed,) = site.bootstrap.contents()
    forecast_by_bootstrap(site.store, site.manifest, [placed], layout)
    wrong = replace(placed, offsets=[*placed.offsets[:-1], placed.offsets[-1] + beyond])
    with pytest.raises(Corrupt):
        forecast_by_bootstrap(site.store, site.manifest, [wrong], layout)


# -- views


class Listing:
    """Pulls whose lists of files are here once they may go on, and of which nothing more comes."""

    def __init__(self, package: Package) -> None:
        self.package, self.go, self.count = package, asyncio.Event(), 0

    def start(self, request: PullRequest, *, planned: Any) -> Any:
        pull = SimpleNamespace(error=None, package=None, status=lambda: PullStatus("1", "running", "app:v1"))

        async def run() -> None:
            await self.go.wait()
            self.count += 1
            try:
                await pull.listed(self.package)
            except Corrupt as error:
                pull.error = error
                return
            await asyncio.Event().wait()

        pull.task = asyncio.create_task(run())
        return pull


@dataclass
class Shown:
    """A view that is shown by a bootstrap, with a device and readers."""

    view: LazyView
    pulls: Listing
    device: Path

    async def read(self, cell: int) -> int:
        """What a reader of a cell is answered: 0, or an error number."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, there:
            await self.view.readers.serve(here, 7, cell * CELLS.file_bytes, CELLS.file_bytes)
            kind, number, refused = ORDER.unpack(there.recv(ORDER.size))
        assert (kind, number) == (ANSWER, 7)
        return int(refused)

    def cell(self, cell: int) -> bytes:
        """The bytes of a cell, without its head."""
        return self.device.read_bytes()[cell * CELLS.file_bytes :][4096 : CELLS.file_bytes]


def show(site: Site, bootstrap: Bootstrap, start: Start | None = None) -> Shown:
    pulls: Any = Listing(site.package)
    view = LazyView(site.store, pulls, site.fetcher, "app:v1", 600.0, Stalls(), CELLS, start)
    device = site.source.parent / DEVICE
    with device.open("xb") as file:
        file.truncate(CELLS.file_size(bootstrap.size))
    view._filler.device.take(os.open(device, os.O_RDWR), os.open(os.devnull, os.O_RDONLY))
    view.show(bootstrap, site.package)
    return Shown(view, pulls, device)


def contents_of(site: Site, layout: DeviceLayout) -> bytes:
    """All contents as they lie in a device without heads."""
    data = bytearray(-(-layout.size // CELL_BYTES) * CELL_BYTES)
    for content, block in layout.first_blocks().items():
        (found,) = [each for each in site.files.values() if content_hash(each).startswith(content)]
        data[block * 4096 : block * 4096 + len(found)] = found
    return bytes(data)


async def test_readers_are_served_by_a_bootstrap_and_later_by_full_names(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same places."""
    monkeypatch.setattr(lazy_view, "QUIET_S", 0.0)
    shown = show(site, site.bootstrap)
    view = shown.view
    assert await view.known == site.package and not view._arranged.is_set()
    view.sight.show()
    async with asyncio.timeout(60):
        assert await shown.read(0) == 0
    assert view.layout is not None and not view.layers
    wanted = contents_of(site, view.layout)
    assert shown.cell(0) == wanted[:CELL_BYTES]
    assert {len(content) for content in view.layout.contents} == {NAME_BYTES}
    shown.pulls.go.set()
    await until(view.listed.is_set, "the lists are read")
    assert {len(content) for content in view.layout.contents} == {32}
    async with asyncio.timeout(60):
        last = len(wanted) // CELL_BYTES - 1
        assert await shown.read(last) == await shown.read(1) == 0
    assert shown.cell(1) == wanted[CELL_BYTES : 2 * CELL_BYTES] and shown.cell(last) == wanted[last * CELL_BYTES :]
    assert view.status().bytes_total == sum(map(len, site.files.values()))
    await view.close()


async def contradicting(site: Site, how: str) -> Bootstrap:
    """A bootstrap of other trees, which names this package's layers."""
    lists = Fetched(BlobStore(site.source.parent / "other store"), site.layout)
    await bring_lists(lists.store, lists, site.manifest)
    _, layout, (listed,) = layout_of(lists.store, site.manifest)
    sizes = {chunk.content: chunk.length for chunk in layout.chunks()}
    if how == "order":
        sizes = dict(reversed(sizes.items()))
    else:
        sizes[layout.contents[-1]] += 1 << 16
    places = {stored.chunk: (listed.digest, stored.offset, stored.stored) for stored in listed.chunks()}
    images = [b"".join(image.parts()) for image in site.bootstrap.images]
    data = encode_bootstrap(site.manifest, images, DeviceLayout(sizes, {}), places)
    assert data is not None
    return decode_bootstrap(data)


@pytest.mark.parametrize("late", [False, True], ids=["read", "read late"])
@pytest.mark.parametrize("how", ["size", "order"])
async def test_a_view_whose_trees_contradict_its_bootstrap_gives_no_more_bytes(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str, late: bool
) -> None:
    """And says so. Nor where the lists were here before all of the bootstrap was read."""
    monkeypatch.setattr(lazy_view, "QUIET_S", 0.0)
    monkeypatch.setattr(lazy_view, "PULL_AGAIN_S", 0.01)
    contents, released = Bootstrap.contents, threading.Event()

    def read(bootstrap: Bootstrap) -> Any:
        assert released.wait(60)
        return contents(bootstrap)

    monkeypatch.setattr(Bootstrap, "contents", read)
    shown = show(site, await contradicting(site, how))
    view, looked = shown.view, asyncio.Event()
    begin = view.images.begin

    async def look(*given: Any) -> None:
        await begin(*given)
        looked.set()

    monkeypatch.setattr(view.images, "begin", look)
    view.sight.show()
    if late:
        shown.pulls.go.set()
        await until(looked.is_set, "the lists are read")
        await asyncio.sleep(0)
        released.set()
    else:
        released.set()
        async with asyncio.timeout(60):
            assert await shown.read(0) == 0
            await asyncio.gather(*view.readers.ahead._tasks)
        shown.pulls.go.set()
    await until(lambda: shown.pulls.count > 1, "the pull is tried again")
    assert "its bootstrap and its trees contradict each other" in caplog.text
    view.readers._limit_s = 0.05
    missing = [cell for cell in range(25) if not view._filler.has_cell(cell)][-2:]
    assert [await shown.read(cell) for cell in missing] == [errno.EIO, errno.EIO]
    assert [shown.cell(cell) for cell in missing] == 2 * [bytes(CELL_BYTES)]
    (line, _) = [item.getMessage() for item in caplog.records if "gets EIO" in item.getMessage()]
    assert "contradict each other" in line
    await view.close()


async def test_a_bootstrap_whose_places_are_wrong_leaves_readers_to_the_lists(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_view, "QUIET_S", 0.0)
    shown = show(site, replace(site.bootstrap, _chunks=b"no frame"))
    shown.view.sight.show()
    await until(lambda: "wait for its lists of files" in caplog.text, "the log says so")
    assert not shown.view._arranged.is_set()
    shown.pulls.go.set()
    async with asyncio.timeout(60):
        assert await shown.read(0) == 0
    assert shown.view.layout is not None
    assert shown.cell(0) == contents_of(site, shown.view.layout)[:CELL_BYTES]
    await shown.view.close()


async def test_readers_of_a_view_that_is_not_mounted_yet_are_served_by_lists(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the bootstrap only what mounts it is read by then."""
    monkeypatch.setattr(lazy_view, "SHOWN_S_MAX", 0.01)
    monkeypatch.setattr(lazy_view, "QUIET_S", 0.0)
    shown = show(site, site.bootstrap)
    shown.pulls.go.set()
    async with asyncio.timeout(60):
        assert await shown.read(0) == 0
    assert shown.view.layout is not None and not shown.view.bootstrap_read.is_set()
    assert shown.cell(0) == contents_of(site, shown.view.layout)[:CELL_BYTES]
    shown.view.sight.show()
    await until(shown.view.bootstrap_read.is_set, "it is read")
    async with asyncio.timeout(60):
        assert await shown.read(5) == 0
    await shown.view.close()


class Kept:
    """Keeps traces, and asks for recordings."""

    def __init__(self) -> None:
        self.stated: list[tuple[str, str, Trace]] = []

    async def find(self, reference: str, entry: str, *, records: bool) -> tuple[Trace | None, bool]:
        assert records
        return None, True

    async def state(self, reference: str, entry: str, trace: Trace) -> None:
        self.stated.append((reference, entry, trace))


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "fails"])
async def test_a_start_that_ends_before_its_lists_are_here_is_recorded(
    site: Site, caplog: pytest.LogCaptureFixture, comes: bool
) -> None:
    """By full names, which are fetched for it; where they do not come the log says so."""
    caplog.set_level(logging.INFO)
    kept = Kept()
    traces = Traces(kept)
    start = Start(traces, "app:v1", "train")
    shown = show(site, site.bootstrap, start)
    await start.trace
    shown.view.sight.show()
    start.mounted()
    async with asyncio.timeout(60):
        assert await shown.read(2) == 0
    layout = shown.view.layout
    assert layout is not None and not shown.view.layers
    contents = {chunk.content for chunk in layout.cell_chunks(2)}
    await shown.view.close()
    assert shown.pulls.count == 0
    if not comes:
        site.fetcher.failure = Unavailable("storage does not answer")
        await until(lambda: "does not get the trace of app:v1" in caplog.text, "the log says so")
        assert not kept.stated
    else:
        await until(lambda: kept.stated, "it is recorded")
        ((reference, entry, trace),) = kept.stated
        assert (reference, entry) == ("app:v1", "train")
        read = {content_hash(data): path for path, data in site.files.items() if content_hash(data)[:8] in contents}
        assert {traced.content: traced.path for traced in trace.contents} == read and len(read) > 1
    await traces.close()
