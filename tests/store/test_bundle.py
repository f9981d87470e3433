"""Bundles: contents that become objects together are the same objects as those that are made one by
one."""

from __future__ import annotations

import threading

import pytest
from store_rig import on_disk
from store_tree_rig import Publisher, check, noise, pull, text

from p2pdist.model.catalog import BLOCK_SIZE, ChunkEncoder
from p2pdist.model.tree import content_hash
from p2pdist.store.objects.btrfs import TOGETHER
from p2pdist.store.store import BlobStore
from p2pdist.store.trees import extraction
from p2pdist.store.trees.extraction import HELD_BYTES, Bundle


@pytest.mark.parametrize("together", [False, True])
def test_all_are_there_when_the_block_ends(store: BlobStore, together: bool) -> None:
    """More than are open at a time and than is held; compressed, not compressed and of several
    blocks; one twice, one here already."""
    objects, encoder = store.objects, ChunkEncoder()
    objects.named_at_once = together
    datas = [text(number, 20_000 + number) for number in range(3 * TOGETHER + 5)]
    datas += [noise(number, 100_000) for number in range(HELD_BYTES // 100_000 + 3)]
    datas += [text(number, 3 * BLOCK_SIZE + number) for number in range(4)]
    assert objects.add(content_hash(datas[7]), datas[7])
    with Bundle(objects) as bundle:
        for data in [*datas, datas[3]]:
            assert bundle.add(content_hash(data), data, encoder.encode(data))
    assert on_disk(store.root) == {content_hash(data): data for data in datas}
    assert objects.sizes == {content_hash(data): len(data) for data in datas}
    assert objects.bytes_total == sum(map(len, datas))
    for name in objects.contents():
        found = objects.path(name).stat()
        assert found.st_mode & 0o7777 == 0o444 and found.st_nlink == 1
    assert list((store.root / "tmp").iterdir()) == []


def test_strays_are_replaced(store: BlobStore) -> None:
    objects = store.objects
    objects.named_at_once = True
    datas = [noise(number, 300 + number) for number in range(20)]
    for data in datas[::3]:
        stray = store.root / "objects" / content_hash(data).hex()[:2] / content_hash(data).hex()[2:]
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"something else")
    with Bundle(objects) as bundle:
        assert all(bundle.add(content_hash(data), data) for data in datas)
    assert on_disk(store.root) == {content_hash(data): data for data in datas}


def test_what_has_verified_stays_when_another_is_wrong(store: BlobStore) -> None:
    objects, right, wrong = store.objects, noise(1, 500), noise(2, 500)
    objects.named_at_once = True
    with pytest.raises(ValueError, match="wrong"), Bundle(objects) as bundle:
        assert bundle.add(content_hash(right), right)
        assert bundle.add(content_hash(wrong), wrong[:-1]) is False
        raise ValueError("wrong")
    assert on_disk(store.root) == {content_hash(right): right}
    assert list(objects.contents()) == [content_hash(right)]


def test_many_writers_of_the_same_contents(store: BlobStore) -> None:
    """Each is there once, is counted once, and is right, also those that are written beside
    others."""
    objects = store.objects
    objects.named_at_once = True
    datas = [noise(number, 50 + number) for number in range(300)]
    datas[::30] = [noise(number, 3 * BLOCK_SIZE + number) for number in range(10)]

    def write() -> None:
        with Bundle(objects) as bundle:
            assert all(bundle.add(content_hash(data), data) for data in datas)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert on_disk(store.root) == {content_hash(data): data for data in datas}
    assert objects.bytes_total == sum(map(len, datas))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "together", "most", "least"),
    [
        (9000, False, extraction.RUN_CHUNKS, 9),
        (9000, True, 9000 // 4, 4),
        (500, True, 500, 1),
        (40_000, True, extraction.REACH * extraction.RUN_CHUNKS, 10),
    ],
)
def test_runs_reach_further_where_names_come_together(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, files: int, together: bool, most: int, least: int
) -> None:
    """As far as there is work for all threads."""
    bundles: list[list[bytes]] = []

    class Noted(Bundle):
        def __enter__(self) -> Bundle:
            bundles.append([])
            return super().__enter__()

        def add(self, content: bytes, data: bytes | memoryview, stored: bytes | memoryview = b"") -> bool:
            bundles[-1].append(content)
            return super().add(content, data, stored)

    monkeypatch.setattr(extraction, "Bundle", Noted)
    monkeypatch.setattr(extraction, "_THREADS", 2)
    store.objects.named_at_once = together
    packed = Publisher().pack({b"f%d" % number: b"content %d" % number for number in range(files)})
    pull(store, packed)
    check(store, packed)
    assert sum(map(len, bundles)) == files and len(bundles) >= least
    assert len(bundles) <= -(-files // most) + 1
