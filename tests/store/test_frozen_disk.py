"""A disk that hangs: a real file system, frozen as for a snapshot (fsfreeze(8)), under a store that
goes on."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_rig import PIECE, fill, read_piece, sample
from store_tree_rig import Publisher, pull
from waits import wait_until

from p2pdist.store.store import BlobStore

pytestmark = pytest.mark.root

DEADLINE_S = 20.0


class Disk:
    """An ext4 of its own at `root`, which may be frozen."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._frozen = False

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "-f", self.root], check=True)
        self._frozen = True

    def thaw(self) -> None:
        if self._frozen:
            subprocess.run(["fsfreeze", "-u", self.root], check=True)
            self._frozen = False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    image, root = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    root.mkdir()
    subprocess.run(["mount", "-o", "loop", image, root], check=True)
    found = Disk(root)
    try:
        yield found
    finally:
        found.thaw()
        subprocess.run(["umount", "-l", root], check=True)


def started(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def ends(call: Callable[[], object]) -> bool:
    """Whether a call comes to its end while the disk hangs."""
    thread = started(call)
    thread.join(DEADLINE_S)
    return not thread.is_alive()


@pytest.mark.parametrize("hanging", ["write", "finish", "verify"])
def test_what_hangs_keeps_nobody_from_what_needs_no_disk(disk: Disk, hanging: str) -> None:
    """The event loop holds blobs, lets go of them and asks for open files, whatever hangs meanwhile
    in the threads of the same blob."""
    found = sample(1, 3 * PIECE)
    store = BlobStore(disk.root / "store")
    blob = store.begin(found.digest, found.pieces)
    blob.hold()
    pieces = range(3) if hanging == "finish" else range(2)
    for piece in pieces:
        assert blob.write(piece, found.data[piece * PIECE : (piece + 1) * PIECE])
    if hanging == "verify":  # finds a piece altered, and writes that down
        with blob.path.open("r+b") as file:
            file.write(b"other")
    disk.freeze()
    call = {
        "write": lambda: blob.write(2, found.data[2 * PIECE :]),
        "finish": blob.finish,
        "verify": lambda: blob.verify(drop=True),
    }[hanging]
    worker = started(call)
    wait_until(lambda: worker.is_alive() and store.pulse.hangs_s())
    assert blob.files.opened
    assert ends(blob.hold)
    assert ends(blob.fileno)
    assert ends(blob.release)
    assert ends(lambda: store.get(found.digest))
    assert ends(lambda: store.begin(found.digest, found.pieces))
    assert ends(store.usage)
    assert worker.is_alive()
    disk.thaw()
    worker.join(DEADLINE_S)
    assert not worker.is_alive()
    assert list(blob.have) == {"write": [0, 1, 2], "finish": [0, 1, 2], "verify": [1]}[hanging]
    wait_until(lambda: not store.pulse.hangs_s())
    blob.release()
    store.close()


def test_other_blobs_are_read_meanwhile(disk: Disk) -> None:
    found, coming = sample(2, 2 * PIECE), sample(3, 2 * PIECE)
    store = BlobStore(disk.root / "store")
    blob = store.begin(found.digest, found.pieces)
    fill(blob, found)
    other = store.begin(coming.digest, coming.pieces)
    disk.freeze()
    worker = started(lambda: other.write(0, coming.data[:PIECE]))
    assert ends(lambda: read_piece(blob, 0))
    disk.thaw()
    worker.join(DEADLINE_S)
    assert list(other.have) == [0]
    store.close()


def test_what_is_begun_keeps_no_look_waiting(disk: Disk) -> None:
    """Blobs are begun under the store's lock. The event loop holds trees, lets go of them, and asks
    for pins and packages meanwhile."""
    coming, tree = sample(6, 2 * PIECE), Publisher().pack({b"file": b"content"})
    store = BlobStore(disk.root / "store")
    pull(store, tree)
    store.pins.pin(tree.root, "me")
    store.packages.record("app:v1", tree.root)
    disk.freeze()
    worker = started(lambda: store.begin(coming.digest, coming.pieces))
    wait_until(lambda: worker.is_alive() and store.pulse.hangs_s())
    assert ends(lambda: store.trees.hold(tree.root))
    assert ends(lambda: store.trees.release(tree.root))
    assert ends(lambda: store.pins.owners(tree.root))
    assert ends(store.pins.by_owner)
    assert ends(store.packages.list)
    assert worker.is_alive()
    disk.thaw()
    worker.join(DEADLINE_S)
    assert store.pins.by_owner() == {"me": {tree.root}} and store.pins.owners(tree.root) == {"me"}
    store.close()


def test_a_disk_that_answers_does_not_hang(disk: Disk) -> None:
    store = BlobStore(disk.root / "store")
    for _ in range(5):
        assert store.pulse.hangs_s() == 0.0
        wait_until(lambda: not store.pulse.waiting)
    assert (disk.root / "store" / "lock").read_text().strip().isdigit()
    store.close()


def test_only_a_store_in_memory_says_that_no_disk_is_waited_for(disk: Disk, tmp_path: Path) -> None:
    """The event loop itself stores pieces there, and only there."""
    memory = tmp_path / "memory"
    memory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", memory], check=True)
    try:
        for root, expected in ((disk.root, False), (memory, True)):
            found = sample(4, PIECE)
            store = BlobStore(root / "store")
            assert store.begin(found.digest, found.pieces).in_memory is expected
            store.close()
    finally:
        subprocess.run(["umount", "-l", memory], check=True)
