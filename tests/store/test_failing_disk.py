"""Disks that lose what was written to them and say so once, when it is synchronised: a path to
storage that is gone for a moment, a thin volume that is full for a while.

A directory of the store is on an ext4 whose image lies on a tmpfs, which has no room left while
blocks are written that the image does not have yet. The kernel reports that at one syncfs(2) or
fsync(2), takes the pages for clean and gives them as they were for as long as it keeps them."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_rig import OTHER_BOOT, PIECE, fill, on_disk, sample
from store_tree_rig import noise
from waits import wait_until

from p2pdist.model.errors import P2PDistError
from p2pdist.model.tree import content_hash
from p2pdist.store.disk import boot_id, sync_filesystem
from p2pdist.store.layout import Paths
from p2pdist.store.store import BlobStore

pytestmark = pytest.mark.root

MIB = 1 << 20


class Disk:
    """A file system at `target` over an image on the tmpfs at `backing`."""

    def __init__(self, backing: Path, target: Path) -> None:
        self._filler, self._image, self._target = backing / "filler", backing / "image", target
        with self._image.open("wb") as file:
            file.truncate(16 * MIB)
        options = ["-O", "^has_journal", "-E", "lazy_itable_init=0,discard"]
        subprocess.run(["mkfs.ext4", "-q", "-F", *options, self._image], check=True)
        self.mount()

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop,errors=continue", self._image, self._target], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", self._target], check=True)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Blocks that were never written cannot be within a `with` block."""
        os.sync()
        with self._filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(MIB)) == MIB:
                    pass
            except OSError:
                pass
        yield
        self._filler.unlink()

    def lose_machine(self, root: Path) -> None:
        """What the kernel's memory alone held is gone, and all was written under another boot."""
        self.forget()
        boots = (str(boot_id()), str(OTHER_BOOT))
        with sqlite3.connect(root / "index.sqlite") as database:
            for table in ("objects_state", "blobs"):
                database.execute(f"UPDATE {table} SET boot=replace(boot, ?, ?)", boots)
        database.close()

    def forget(self) -> None:
        """What the kernel's memory alone held is gone."""
        self.unmount()
        self.mount()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[Path], Disk]]:
    """Makes such a file system at a directory."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    backing, made = tmp_path / "backing", list[Disk]()
    backing.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", backing], check=True)

    def make(target: Path) -> Disk:
        made.append(Disk(backing, target))
        return made[-1]

    yield make
    for one in made:
        one.unmount()
    wait_until(lambda: subprocess.run(["umount", backing], check=False).returncode == 0)  # loop devices go late


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
    again = BlobStore(root)
    assert not again.objects.contents()
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
