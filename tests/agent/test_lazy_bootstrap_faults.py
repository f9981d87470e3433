"""Views that are mounted by bootstraps where something is amiss: with real packages and stores, to
which blobs come when they are asked for."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lazy_rig import FetchedPack

from p2pdist.agent.lazy import view as lazy_view
from p2pdist.agent.lazy.bootstrap import bring_lists
from p2pdist.agent.lazy.chunks import Chunks, Whereabouts
from p2pdist.agent.lazy.readers import Stalls
from p2pdist.agent.lazy.view import LazyView
from p2pdist.agent.mounts import PackageMounts
from p2pdist.agent.pull.packages import Package
from p2pdist.agent.pull.pulls import Pulls
from p2pdist.core.demand.reading_queue import Reading
from p2pdist.model.bootstrap import NAME_BYTES, Bootstrap, bootstrap_of, decode_bootstrap, encode_bootstrap
from p2pdist.model.catalog import Catalog, Pack, record
from p2pdist.model.device import Cells, DeviceChunk, DeviceLayout
from p2pdist.model.digest import Digest, digest_of, parse_digest
from p2pdist.model.errors import Conflict, Corrupt, NotFound
from p2pdist.model.manifest import PACK_TYPE, TREE_TYPE, Config, Descriptor, Manifest, decode_manifest, parse_reference
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import PieceList
from p2pdist.model.selection import Selection
from p2pdist.model.tree import ChunkList, File, content_hash
from p2pdist.mount.erofs.writer import device_image
from p2pdist.mount.lazy.fill_method import FANOTIFY
from p2pdist.mount.lazy.view import LazyPackage, _write_images
from p2pdist.mount.supervisor.protocol import DEVICE
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import pack
from p2pdist.package.tree.bootstrap import Bootstrapping, _encoded
from p2pdist.package.tree.diff import Trees, read_trees
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore

Absent: Any = None
CELLS = Cells(headed=True)
PATIENCE_S = 20.0
REFERENCE = parse_reference("app:v1")
SIZES = {"a": 3000, "b": 2000, "c": 500, "large": 20 << 20}


def piece_list(layout: LocalLayout, blob: Descriptor) -> PieceList:
    return PieceList.decode(layout.blob_path(blob.pieces_digest).read_bytes())


class Coming:
    """A blob of a layout of which those pieces come that are demanded."""

    def __init__(self, blob: Blob, data: bytes) -> None:
        self._blob, self._data = blob, data
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def demand(self, pieces: Sequence[int], *, prefetch: bool = False, reading: Reading | None = None) -> None:
        layout = self._blob.layout
        for piece in pieces:
            if piece not in self._blob.have:
                self._blob.write(piece, self._data[layout.offset(piece) :][: layout.length(piece)])
        if len(self._blob.have) == layout.count:
            self._blob.finish()
            if not self.done.done():
                self.done.set_result(None)


class Host:
    """A host that has nothing of a package at first."""

    def __init__(self, directory: Path, layout: LocalLayout, package: Package) -> None:
        self.store, self.layout, self.package = BlobStore(directory / "store"), layout, package
        self.pulled = asyncio.Event()
        self.held = asyncio.Event()
        """Blobs come once it is set."""
        self.held.set()
        self.directory = directory

    async def fetch(self, layer: Descriptor, priority: Priority, selection: Selection | None) -> tuple[Blob, Any]:
        await self.held.wait()
        pieces = piece_list(self.layout, layer)
        blob = self.store.get(layer.digest) or self.store.begin(layer.digest, pieces)
        return blob, Coming(blob, self.layout.blob_path(layer.digest).read_bytes())

    def start(self, request: Any, *, planned: Any) -> Any:
        """Pulls that begin, and go on for ever."""
        self.pulled.set()
        return SimpleNamespace(task=asyncio.create_task(asyncio.Event().wait()), status=Absent, error=None)

    def view(self, bootstrap: Bootstrap, pulls: Any = None) -> LazyView:
        """A view that is mounted by a bootstrap, as far as it needs no kernel for that."""
        shared: Any = pulls or self
        view = LazyView(self.store, shared, self, str(REFERENCE), PATIENCE_S, Stalls(), CELLS)
        with (self.directory / DEVICE).open("wb") as device:
            device.truncate(CELLS.file_size(bootstrap.size))
        view._filler.device.take(os.open(self.directory / DEVICE, os.O_RDWR), os.open(os.devnull, os.O_RDONLY))
        view.show(bootstrap, self.package)
        return view


async def packed(directory: Path) -> tuple[LocalLayout, Package]:
    """A package with a bootstrap."""
    source, drawn = directory / "source", random.Random(5)
    source.mkdir()
    for name, size in SIZES.items():
        (source / name).write_bytes(drawn.randbytes(size))
    layout = LocalLayout(directory / "layout")
    made = await pack(source, REFERENCE, layout, format="tree", bootstrapping=Bootstrapping(device_image, always=True))
    digest = parse_digest(made.digest)
    manifest = decode_manifest(layout.blob_path(digest).read_bytes())
    return layout, Package(REFERENCE, digest, manifest, Config())


def bootstrap_in(layout: LocalLayout, package: Package) -> Bootstrap:
    part = bootstrap_of(package.manifest)
    assert part is not None
    return decode_bootstrap(layout.blob_path(part.digest).read_bytes())


async def forged(layout: LocalLayout, package: Package, how: str) -> Bootstrap:
    """A bootstrap that has something else in the places of contents."""
    trees = await read_trees(package.manifest, [layout])
    (entries,) = trees.layers
    lists = {content_hash(data): data for catalog in trees.catalogs for data in catalog.chunk_lists}
    files = [entry for entry in entries if type(entry) is File]
    sizes = {file.content: file.size for file in files}
    cut = {file.content: ChunkList.decode(lists[file.chunks]).chunks for file in files if file.chunks}
    if how == "others":  # each has a block of its own, and no other length is seen
        first, second, *rest = sizes.items()
        sizes = dict((second, first, *rest))
    (content, chunks), *_ = cut.items()
    (one, length), (other, more), *_ = chunks
    if how == "shorter":
        cut[content] = ((one, length - 100), (other, more + 100), *chunks[2:])
    elif how == "chunks":
        cut[content] = ((other, length), (one, more), *chunks[2:])
    places: dict[bytes, tuple[Digest, int, int]] = {}
    for catalog in trees.catalogs:
        for pool in catalog.packs:
            for stored in pool.chunks():
                length = 1 if how in ("shorter", "chunks") else stored.stored  # as long as all of them
                places[stored.chunk] = pool.digest, stored.offset + (1 << 40) * (how == "beyond"), length
    laid = DeviceLayout(sizes, {content: ChunkList(chunks).encode() for content, chunks in cut.items()})
    data = encode_bootstrap(package.manifest, [device_image(entries, laid)], laid, places)
    assert data is not None
    return decode_bootstrap(data)


async def settled(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await event.wait()


@pytest.mark.parametrize("how", ["others", "shorter", "chunks", ""])
async def test_what_a_bootstrap_says_of_contents_is_compared_with_the_trees(tmp_path: Path, how: str) -> None:
    """Not only where they begin: a chunk that was written in the place of a longer one would count
    as that, and programs would read zeros behind it."""
    layout, package = await packed(tmp_path)
    host = Host(tmp_path, layout, package)
    view = host.view(await forged(layout, package, how))
    view.sight.show()
    await settled(view._arranged)
    await bring_lists(host.store, host, package.manifest)
    if how:
        with pytest.raises(Corrupt, match="contradict"):
            await view.read_layout(package.manifest)
        assert not view._arranged.is_set() and not view.layers
    else:
        await view.read_layout(package.manifest)
        assert view._arranged.is_set() and view.layers
    await view.close()
    host.store.close()


@pytest.mark.parametrize("how", ["little", "beyond", "broken"])
async def test_a_reader_of_what_a_bootstrap_does_not_tell_waits_for_no_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """There is none as long as the reader waits: of a pack of which little is needed, and where the
    bootstrap names bytes that no pack has, which would be asked of all hosts of its swarm."""
    monkeypatch.setattr(lazy_view, "SHOWN_S_MAX", 60 * PATIENCE_S)
    layout, package = await packed(tmp_path)
    bootstrap = await forged(layout, package, how)
    if how == "little":
        parts = [replace(part, size=9 * part.size * (part.media_type == PACK_TYPE)) for part in package.manifest.parts]
        package = replace(package, manifest=replace(package.manifest, parts=tuple(parts)))
    elif how == "broken":
        bootstrap = replace(bootstrap, _chunks=b"")
    host = Host(tmp_path, layout, package)
    view = host.view(bootstrap)
    view.sight.show()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        reading = asyncio.create_task(view.readers.serve(here, 1, 0, 4096))
        await settled(host.pulled)
        assert not reading.done() and not view.readers.stalls.refused
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await view.close()
    host.store.close()


class Brought(Host):
    """A host to which blobs come whole."""

    async def fetch(self, layer: Descriptor, priority: Priority, selection: Selection | None) -> tuple[Blob, Any]:
        assert selection is None
        blob, coming = await super().fetch(layer, priority, selection)
        await coming.demand(range(blob.layout.count))
        return blob, None


async def test_a_package_that_was_shown_by_its_bootstrap_is_here_by_its_tag(tmp_path: Path) -> None:
    """What is pulled is the version that is shown, by its digest: the tag may have moved. People
    list and remove the package by the tag."""
    layout, package = await packed(tmp_path)
    host = Brought(tmp_path, layout, package)
    by_digest = replace(package, reference=parse_reference(f"app@{package.digest}"))

    async def find(reference: Any, note: Any) -> Package:
        return by_digest

    pieces = partial(piece_list, layout)
    packages: Any = SimpleNamespace(find=find, pieces=pieces)
    fetcher: Any = host
    view = host.view(bootstrap_in(layout, package), Pulls(host.store, packages, fetcher))
    view.sight.show()
    await settled(view._pulled)
    records = {record.reference: record.manifest_digest for record in host.store.packages.list()}
    assert records == {"app:v1": package.digest, f"app@{package.digest}": package.digest}
    assert view.layers and not view._filler.chunks.whereabouts.replaced
    await view.close()
    host.store.close()


async def test_a_bootstrap_with_broken_images_is_no_reason_not_to_show_a_package(tmp_path: Path) -> None:
    """What is broken is the packer's work, and shows late: the package is shown eagerly."""
    layout, package = await packed(tmp_path)
    bootstrap = bootstrap_in(layout, package)
    broken = replace(bootstrap, images=(replace(bootstrap.images[0], size=bootstrap.images[0].size + 1),))
    host = Host(tmp_path, layout, package)
    view = host.view(broken)

    async def opened(*_: Any, **__: Any) -> Any:
        return view, package

    async def package_of(view: LazyView) -> LazyPackage:
        assert view.bootstrap is not None
        return LazyPackage(view.bootstrap.images, view.bootstrap, PATIENCE_S)

    async def fill_method(manifest: Any) -> Any:
        return FANOTIFY

    async def mount(*_: Any, show: Any, **__: Any) -> Any:
        await asyncio.to_thread(_write_images, show.args[0], tmp_path, FANOTIFY)

    lazy: Any = SimpleNamespace(open=opened, package_of=package_of, fill_method=fill_method)
    mounts: Any = SimpleNamespace(hold_inherited=lambda _: None, mount=mount, finish=asyncio.ensure_future)
    shown = PackageMounts(host.store, Absent, mounts, lazy)
    with pytest.raises(Conflict) as conflict:
        await shown._show_lazily(view, package, Absent, None)
    assert "another size" in conflict.value.details["eager"] and view.sight.gone.is_set()
    host.store.close()


@pytest.mark.parametrize("waits", [False, True])
async def test_a_reader_that_knows_a_short_name_asks_again_by_the_full_one(tmp_path: Path, *, waits: bool) -> None:
    """Where names change between its look among objects and among packs it does not wait for what
    the pull computes, and what it asked for is not taken for lost: all would be pulled again."""
    data, store, lost = b"content" * 99, BlobStore(tmp_path), list[None]()
    name = content_hash(data)
    pool = FetchedPack(store, [data])
    chunks = Chunks(store, pool)
    chunks.lost = partial(lost.append, None)
    early = Whereabouts(replaced=asyncio.Event(), name_bytes=NAME_BYTES)
    late = replace(pool.whereabouts, replaced=asyncio.Event())
    chunks.whereabouts = early if waits else late
    reading = asyncio.create_task(chunks.read(DeviceChunk(0, name[:NAME_BYTES], 0, name[:NAME_BYTES], len(data))))
    if waits:
        awaited = asyncio.Event()
        chunks.awaited = awaited.set
        await settled(awaited)
        chunks.whereabouts = late
        assert early.replaced is not None
        early.replaced.set()
    with pytest.raises(NotFound, match="full name"):
        async with asyncio.timeout(PATIENCE_S):
            await reading
    assert not lost and await chunks.read(DeviceChunk(0, name, 0, name, len(data))) == data
    store.close()


def test_a_content_that_trees_cut_in_two_ways_is_cut_as_hosts_cut_it() -> None:
    """Releases may cut otherwise. Of several lists hosts take the last, and compare."""
    data = random.Random(5).randbytes(5 << 20)
    content, ways = content_hash(data), [(data[:cut], data[cut:]) for cut in (3 << 20, 2 << 20)]
    lists = [ChunkList(tuple((content_hash(part), len(part)) for part in way)).encode() for way in ways]
    chunks = [part for way in ways for part in way]
    records = b"".join(record(content_hash(part), len(part), len(part)) for part in chunks)
    pool = Pack(digest_of(b"".join(chunks)), sum(map(len, chunks)), records)
    layers = [Descriptor(TREE_TYPE, digest_of(bytes([number])), 1) for number in range(2)]
    manifest = Manifest(Absent, tuple(layers), (), (Descriptor(PACK_TYPE, pool.digest, pool.size),))
    trees: Any = tuple([File(b"file", 0o644, 0, len(data), content, content_hash(encoded))] for encoded in lists)
    encoded = _encoded(Trees(manifest, trees, (Catalog((), tuple(lists), (pool,)),)), device_image)
    assert encoded is not None
    stated, _ = decode_bootstrap(encoded).contents()
    assert DeviceLayout({content: len(data)}, {content: lists[1]}).agrees_with(stated)
