"""What becomes of a store whose disk lost what was written to it (failing_disk.py)."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from failing_disk import Disk, failing_disks
from store_rig import PIECE, fill, on_disk, sample
from store_tree_rig import Publisher, noise, pull

from p2pdist.model.errors import P2PDistError
from p2pdist.model.tree import content_hash
from p2pdist.store.disk import sync_filesystem
from p2pdist.store.layout import Paths
from p2pdist.store.store import BlobStore

pytestmark = pytest.mark.root


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[Path], Disk]]:
    """Makes such a file system at a directory."""
    with failing_disks(tmp_path) as make:
        yield make


@pytest.mark.parametrize("lost", ["machine", "agent"])
def test_objects_that_a_disk_lost_are_dropped_at_the_next_start(
    tmp_path: Path, disk: Callable[[Path], Disk], lost: str
) -> None:
    """The next synchronisation succeeds, and says nothing of what the one before lost."""
    root, contents = tmp_path / "store", list[bytes]()
    Paths(root).make()
    objects = disk(root / "objects")
    for number in range(256):
        (root / "objects" / f"{number:02x}").mkdir()
    store = BlobStore(root)
    for number in range(3):
        contents.append(content_hash(data := noise(number, 256 << 10)))
        if number != 1:
            assert store.objects.add(contents[-1], data)
            store.objects.sync()
            continue
        with objects.failing():
            assert store.objects.add(contents[-1], data)
            with pytest.raises(P2PDistError):
                store.objects.sync()
    store.close()
    if lost == "machine":
        objects.lose_machine(root)
    again = BlobStore(root)
    held = set(again.objects.contents())
    again.close()
    objects.forget()
    assert held == {contents[0], contents[2]}, "and no wrong bytes count as an object"
    assert {name for name, data in on_disk(root).items() if content_hash(data) == name} == held


def test_what_a_program_has_mapped_is_read_from_the_disk_too(tmp_path: Path, disk: Callable[[Path], Disk]) -> None:
    """The kernel keeps the pages of its libraries, and the next synchronisation would call them
    durable."""
    root, data = tmp_path / "store", [noise(number, (2 << 20) + 5) for number in range(2)]
    Paths(root).make()
    objects = disk(root / "objects")
    for number in range(256):
        (root / "objects" / f"{number:02x}").mkdir()
    store, contents = BlobStore(root), [content_hash(each) for each in data]
    assert store.objects.add(contents[0], data[0])
    with objects.failing():
        assert store.objects.add(contents[1], data[1])
        with pytest.raises(P2PDistError):
            store.objects.sync()
    with store.objects.path(contents[1]).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == data[1]
        store.close()
        again = BlobStore(root)
        assert set(again.objects.contents()) == {contents[0]}, "which is read to its end"
        again.close()


def test_what_another_program_was_told_of_a_disk_is_not_passed_over(
    tmp_path: Path, disk: Callable[[Path], Disk]
) -> None:
    """The kernel tells each descriptor once that something was lost, and a new one nothing of what
    another one was told, as that by which the store made room."""
    root = tmp_path / "store"
    Paths(root).make()
    objects = disk(root / "objects")
    for number in range(256):
        (root / "objects" / f"{number:02x}").mkdir()
    store = BlobStore(root)
    try:
        with objects.failing():
            assert store.objects.add(content_hash(data := noise(1, 256 << 10)), data)
            with pytest.raises(OSError):
                sync_filesystem(root / "objects")
        with pytest.raises(P2PDistError):
            store.objects.sync()
    finally:
        store.close()
    (name,) = on_disk(root)
    path = root / "objects" / name.hex()[:2] / name.hex()[2:]
    path.unlink()
    os.mkfifo(path)  # which is damage, and nothing to wait for
    again = BlobStore(root)
    assert not again.objects.contents()
    again.close()


def test_the_image_of_a_tree_is_made_again_after_a_disk_failed(
    tmp_path: Path, disk: Callable[[Path], Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in it tells whether it was lost, nor in variants."""
    root, packed = tmp_path / "store", Publisher().pack({b"app.py": noise(2, 9000)})
    Paths(root).make()
    objects = disk(root / "objects")
    for number in range(256):
        (root / "objects" / f"{number:02x}").mkdir()
    store = BlobStore(root)
    pull(store, packed)
    store.objects.sync()
    image = store.trees.images.path(packed.root)
    with objects.failing():
        (draft := image.with_name(f"{image.name}.partial")).write_bytes(b"image")
        draft.rename(image)
        assert store.objects.add(content_hash(data := noise(1, 256 << 10)), data)
        with pytest.raises(P2PDistError):
            store.objects.sync()
    later = time.time() + 3600  # one of the last moment is made again in any case
    monkeypatch.setattr("time.time", lambda: later)
    store.close()
    again = BlobStore(root)
    assert not image.exists() and again.trees.complete(packed.root)
    again.close()


@pytest.mark.parametrize("finish", [True, False])
def test_a_blob_that_a_disk_lost_is_dropped_at_the_next_start(
    tmp_path: Path, disk: Callable[[Path], Disk], finish: bool
) -> None:
    """It is read from the disk, complete or not: the kernel still has what was written."""
    root, found = tmp_path / "store", sample(1, 4 * PIECE)
    (root / "blobs").mkdir(parents=True)
    blobs = disk(root / "blobs")
    (root / "blobs/partial").mkdir()
    (root / "partial").symlink_to("blobs/partial")
    store = BlobStore(root)
    blob = store.begin(found.digest, found.pieces)
    with blobs.failing():
        fill(blob, found, finish=finish)
        store.close()
    again = BlobStore(root)
    there = again.get(found.digest)
    assert there is not None and not there.complete and not len(there.have), "and no wrong bytes count as a piece"
    again.close()
