"""The trees of a package on their way into a store, from a layout of the local disk: no network
takes part."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from p2pdist.agent.pull import trees
from p2pdist.agent.pull.trees import TreePull
from p2pdist.model.digest import Digest
from p2pdist.model.manifest import PACK_TYPE, Descriptor, Manifest, decode_manifest, parse_reference
from p2pdist.model.pieces import PieceList
from p2pdist.model.selection import Selection
from p2pdist.mount.erofs import patch
from p2pdist.mount.erofs.writer import write_image
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import pack
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore

FILES = 200


@pytest.fixture
async def layout(tmp_path: Path) -> AsyncIterator[LocalLayout]:
    opened = LocalLayout(tmp_path / "layout")
    yield opened
    await opened.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    for number in range(FILES):
        path = made / f"lib/{number % 5}/{number:03}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x = %d\n" % number)
    return made


async def bring(source: Path, tag: str, layout: LocalLayout, store: BlobStore) -> Digest:
    """Pack a version of the source and have it complete in the store; returns its root."""
    packed = await pack(source, parse_reference(f"app:{tag}"), layout, format="tree")
    manifest: Manifest = decode_manifest(await layout.read(Digest(packed.digest)))
    lists = {blob.digest: PieceList.decode(await layout.read(blob.pieces_digest)) for blob in manifest.blobs}

    async def fetch(described: Descriptor, selection: Selection | None = None) -> Blob:
        assert selection is None, "the packs of this test have one piece"
        pieces, data = lists[described.digest], layout.blob_path(described.digest).read_bytes()
        blob = store.begin(described.digest, pieces)
        if not blob.complete:
            for piece in range(pieces.layout.count):
                start = pieces.layout.offset(piece)
                assert blob.write(piece, data[start : start + pieces.layout.length(piece)])
            blob.finish()
        return blob

    with ExitStack() as holds:
        await TreePull(manifest, store, fetch, lambda blob: lists[blob.digest], holds, lambda _: None).run()
    return manifest.layers[0].digest


async def test_the_image_of_a_second_version_comes_from_the_first(
    layout: LocalLayout, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit patches the image that is there, of any tree that was used before another; a new file
    does not."""
    whole: list[Path] = []

    def spy(entries: object, path: Path) -> None:
        whole.append(path)
        write_image(entries, path)  # type: ignore[arg-type]

    monkeypatch.setattr(patch, "write_image", spy)
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_bytes(b"another package")
    store = BlobStore(tmp_path / "store")
    try:
        first = await bring(source, "v1", layout, store)
        another = await bring(other, "other", layout, store)
        (source / "lib/3/003.py").write_bytes(b"edited\n" * 20)
        second = await bring(source, "v2", layout, store)
        assert whole == [store.trees.images.path(first), store.trees.images.path(another)]
        (source / "lib/3/new.py").write_bytes(b"new\n")
        third = await bring(source, "v3", layout, store)
        assert whole[2:] == [store.trees.images.path(third)]
        for root in (first, second, third):
            write_image(store.trees.entries(root), tmp_path / "image")
            assert store.trees.images.path(root).read_bytes() == (tmp_path / "image").read_bytes()
    finally:
        store.close()


async def test_a_first_image_that_is_gone_or_damaged_is_not_missed(
    layout: LocalLayout, source: Path, tmp_path: Path
) -> None:
    store = BlobStore(tmp_path / "store")
    try:
        for tag, damage in (("v1", b""), ("v2", b"no image"), ("v3", None)):
            (source / "lib/3/003.py").write_bytes(tag.encode())
            root = await bring(source, tag, layout, store)
            image = store.trees.images.path(root)
            write_image(store.trees.entries(root), tmp_path / "image")
            assert image.read_bytes() == (tmp_path / "image").read_bytes()
            if damage is None:
                continue
            image.unlink()
            if damage:
                image.write_bytes(damage)
    finally:
        store.close()


@pytest.mark.parametrize("readers", ["none", "go", "wait for long"])
async def test_objects_are_made_while_a_pack_is_on_its_way(
    layout: LocalLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: str
) -> None:
    """The second half of the pack comes only once the first one has become objects; while readers
    wait for pieces it becomes none, until they have waited for long."""
    monkeypatch.setattr(trees, "COME_BYTES_MIN", 1)
    monkeypatch.setattr(trees, "PUT_OFF_S_MAX", 0.5 if readers == "wait for long" else 60.0)
    waiting, looks = readers != "none", 0

    def waited_for() -> bool:
        nonlocal looks
        looks += 1
        return waiting

    source = tmp_path / "source"
    source.mkdir()
    for number in range(FILES):
        (source / f"{number}").write_bytes(os.urandom(64 << 10))
    packed = await pack(source, parse_reference("app:v1"), layout, format="tree")
    manifest: Manifest = decode_manifest(await layout.read(Digest(packed.digest)))
    lists = {blob.digest: PieceList.decode(await layout.read(blob.pieces_digest)) for blob in manifest.blobs}
    store = BlobStore(tmp_path / "store")

    async def fetch(described: Descriptor, selection: Selection | None = None) -> Blob:
        pieces, data = lists[described.digest], layout.blob_path(described.digest).read_bytes()
        blob, count = store.begin(described.digest, pieces), pieces.layout.count
        for piece in range(count):
            start = pieces.layout.offset(piece)
            assert blob.write(piece, data[start : start + pieces.layout.length(piece)])
            if described.media_type == PACK_TYPE and piece == count // 2:
                await half_has_become_objects()
        blob.finish()
        return blob

    async def half_has_become_objects() -> None:
        nonlocal waiting
        async with asyncio.timeout(60):
            if readers == "go":
                before = looks
                while looks < before + 3:
                    await asyncio.sleep(0.01)
                assert objects() == 0
                waiting = False
            while objects() < FILES // 4:
                await asyncio.sleep(0.01)

    def objects() -> int:
        return len(list((tmp_path / "store/objects").glob("??/*")))

    try:
        with ExitStack() as holds:
            pull = TreePull(manifest, store, fetch, lambda blob: lists[blob.digest], holds, lambda _: None)
            pull.waited_for = waited_for
            await pull.run()
        assert max(pieces.layout.count for pieces in lists.values()) > 2
        assert store.trees.complete(manifest.layers[0].digest)
    finally:
        store.close()


async def closed(store: BlobStore) -> None:
    while any(blob.in_use for blob in store.blobs()):
        await asyncio.sleep(0.01)


async def test_a_pull_that_ends_while_it_looks_what_is_lacking_keeps_no_room(
    layout: LocalLayout, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that looks cannot be stopped, and what it makes room for would be lost until the
    agent ends."""
    store = BlobStore(tmp_path / "store")
    looking, go_on, looked = (threading.Event() for _ in range(3))
    missing = store.trees.missing

    def slow(*words: object) -> object:
        looking.set()
        assert go_on.wait(60)
        try:
            return missing(*words)  # type: ignore[arg-type]
        finally:
            looked.set()

    monkeypatch.setattr(store.trees, "missing", slow)
    try:
        pull = asyncio.create_task(bring(source, "v1", layout, store))
        assert await asyncio.to_thread(looking.wait, 60)
        pull.cancel()
        with suppress(asyncio.CancelledError):
            await pull
        go_on.set()
        assert await asyncio.to_thread(looked.wait, 60)
        async with asyncio.timeout(60):
            await closed(store)
        usage = store.usage()
        assert usage.bytes_expected == usage.bytes_images == 0
    finally:
        store.close()
