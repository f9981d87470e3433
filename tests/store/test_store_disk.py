"""Disks that are full, and disks with features of their own: real, tiny filesystems."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from store_rig import KIB, PIECE, files, fill, on_disk, sample
from store_tree_rig import Publisher, bring, check, noise, pull

from p2pdist.core.eviction import choose
from p2pdist.model.errors import DiskFull
from p2pdist.model.tree import content_hash
from p2pdist.store import disk
from p2pdist.store import store as store_module
from p2pdist.store.disk import free_bytes, usable_bytes, usable_files
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.extraction import Bundle

pytestmark = pytest.mark.root

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts filesystems that are unmounted at the end: `mount("tmpfs", size)`, with `inodes` where
    they are few, or an image of a type made by its mkfs."""
    mounted: list[Path] = []

    def start(kind: str, size: int, inodes: int = 0) -> Path:
        target = tmp_path / f"{kind}-{len(mounted)}"
        target.mkdir()
        if kind == "tmpfs":
            command = ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes or '1m'}", "tmpfs", str(target)]
        else:
            if shutil.which(f"mkfs.{kind}") is None:
                pytest.skip(f"mkfs.{kind} is not installed")
            image = tmp_path / f"{kind}.image"
            with image.open("wb") as file:
                file.truncate(size)
            subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True, capture_output=True)
            command = ["mount", "-o", "loop", str(image), str(target)]
        subprocess.run(command, check=True, capture_output=True)
        mounted.append(target)
        return target

    yield start
    for target in reversed(mounted):
        subprocess.run(["umount", str(target)], check=True)


def test_a_full_disk_keeps_what_has_arrived(mount: Mount) -> None:
    """1 MiB in all: a second blob that does not fit is refused with both numbers, leaves nothing,
    and the first one goes on."""
    root = mount("tmpfs", 1024 * KIB)
    first, second = sample(1, 8 * PIECE), sample(2, 8 * PIECE)
    store = BlobStore(root)
    try:
        blob = store.begin(first.digest, first.pieces)
        for piece in range(4):
            blob.write(piece, first.piece(piece))
        with pytest.raises(DiskFull) as caught:
            store.begin(second.digest, second.pieces)
        assert caught.value.details["needed"] >= 8 * PIECE > caught.value.details["free"] > 0
        assert store.get(second.digest) is None and len(files(root)) == 2
        fill(blob, first)
        assert blob.path.read_bytes() == first.data
    finally:
        store.close()


def test_a_store_over_its_capacity_calls_nothing_free(tmp_path: Path) -> None:
    """It was made smaller while pins keep more: what could go does not count as free."""
    kept, other, new = (sample(seed, 4 * PIECE) for seed in range(3))
    store = BlobStore(tmp_path, choose=choose)
    for item in (kept, other):
        fill(store.begin(item.digest, item.pieces), item)
    store.pins.pin(kept.digest, "me")
    store.close()
    store = BlobStore(tmp_path, capacity_bytes=2 * PIECE, choose=choose)
    try:
        with pytest.raises(DiskFull) as caught:
            store.begin(new.digest, new.pieces)
        assert caught.value.details["free"] == 0 and store.get(other.digest) is not None
    finally:
        store.close()


def test_room_is_made_on_the_disk(mount: Mount) -> None:
    """Without a capacity of its own the store evicts when the disk is short, no more than
    needed."""
    root = mount("tmpfs", 1056 * KIB)
    found = [sample(seed, 4 * PIECE) for seed in range(4)]
    store = BlobStore(root, choose=choose)
    try:
        for item in found:
            fill(store.begin(item.digest, item.pieces), item)
        present = [store.get(item.digest) is not None for item in found]
        assert present == [False, True, True, True]
    finally:
        store.close()


def test_room_is_made_for_files(mount: Mount) -> None:
    """Where inodes are short and bytes are not, the least recently used blobs go, and no more than
    needed."""
    root = mount("tmpfs", 64 << 20, inodes=30)
    found = [sample(seed, PIECE) for seed in range(40)]
    store = BlobStore(root, choose=choose)
    try:
        for item in found:
            fill(store.begin(item.digest, item.pieces), item)
        present = [store.get(item.digest) is not None for item in found]
        assert present == sorted(present) and 15 <= sum(present) < 30, present
    finally:
        store.close()


def test_a_tree_gives_its_files_to_another(mount: Mount) -> None:
    """Of two trees of 300 files each a disk has inodes for one."""
    root = mount("tmpfs", 64 << 20, inodes=750)
    store = BlobStore(root, choose=choose)
    try:
        contents = ({f"{n}".encode(): noise(1000 * seed + n, 100) for n in range(300)} for seed in (1, 2))
        first, second = (Publisher().pack(each) for each in contents)
        for tree in (first, second):
            pull(store, tree)
            check(store, tree)
        assert first.root not in store.trees.records
    finally:
        store.close()


@pytest.mark.parametrize("bytes_too", [False, True])
def test_many_files_are_made_room_for_at_once(mount: Mount, bytes_too: bool) -> None:
    """About as many blobs go, also where some go for bytes before."""
    root = mount("tmpfs", 24 << 20, inodes=200)
    found = [sample(seed, 64 * KIB) for seed in range(120)]
    store = BlobStore(root, choose=choose)
    try:
        for item in found:
            fill(store.begin(item.digest, item.pieces), item)
        left = os.statvfs(root).f_favail - 2  # the reserve
        needed = usable_bytes(root) + 1280 * KIB if bytes_too else 0
        went = store.make_room(needed, left + 60)
        assert 60 <= len(went) <= 65, len(went)
        assert os.statvfs(root).f_favail - 2 >= left + 60
    finally:
        store.close()


def test_documents_of_the_index_need_no_inode(mount: Mount) -> None:
    """Short ones are rows of it, and nothing goes for them; nor for what is here."""
    root = mount("tmpfs", 16 << 20, inodes=60)
    store, kept = BlobStore(root, choose=choose), sample(1, PIECE)
    try:
        fill(store.begin(kept.digest, kept.pieces), kept)
        for number in range(os.statvfs(root).f_favail):
            (root / f"other{number}").touch()
        assert store.read_document(store.put_document(b"{}")) == b"{}"
        assert store.get(kept.digest) is not None
        long = store.put_document(bytes(20_000))
        assert store.get(kept.digest) is None
        assert store.put_document(bytes(20_000)) == long, "it is here"
        with pytest.raises(DiskFull):
            store.put_document(bytes(20_001))
        assert store.read_document(long)
    finally:
        store.close()


@pytest.mark.parametrize("pinned", [False, True])
def test_files_that_never_fit_evict_nothing(mount: Mount, pinned: bool) -> None:
    """More than all that may go has: it says what is missing."""
    root = mount("tmpfs", 64 << 20, inodes=900 if pinned else 400)
    store, kept = BlobStore(root, choose=choose), sample(1, PIECE)
    try:
        fill(store.begin(kept.digest, kept.pieces), kept)
        if pinned:
            before = Publisher().pack({f"{n}".encode(): noise(5000 + n, 100) for n in range(300)})
            pull(store, before)
            store.pins.pin(before.root, "me")
        tree = Publisher().pack({f"{n}".encode(): noise(n, 100) for n in range(700)})
        with pytest.raises(DiskFull) as caught:
            pull(store, tree)
        assert caught.value.details["short_of"] == "inodes" and store.get(kept.digest) is not None
    finally:
        store.close()


@pytest.mark.parametrize("held", ["pinned", "pulled"])
def test_files_that_another_tree_needs_do_not_count(mount: Mount, held: str) -> None:
    """A version that shares nearly all files with one that stays has few to give, and a complete
    blob has one: where that is not enough nothing goes, and where it just is, all of it."""
    root = mount("tmpfs", 64 << 20, inodes=1000)
    store, publisher = BlobStore(root, choose=choose), Publisher()
    kept = [sample(seed, 2 * PIECE) for seed in range(20)]
    try:
        files = {f"{n}".encode(): noise(n, 100) for n in range(300)}
        first, second = publisher.pack(files), publisher.pack(files | {b"new": b"new"})
        pull(store, first)
        pull(store, second)
        for item in kept:
            fill(store.begin(item.digest, item.pieces), item)
        with contextlib.ExitStack() as claims:
            if held == "pinned":
                store.pins.pin(first.root, "me")
            else:
                store.trees.remove(first.root)
                claims.enter_context(store.trees.missing(first.root, first.catalogs, first.packs))
            usable = usable_files(root, root)
            assert usable is not None
            count = store._stock.files_of(store.candidates()[0])
            with pytest.raises(DiskFull):
                store.make_room(0, usable + count + 1)
            assert second.root in store.trees.records
            assert all(store.get(item.digest) for item in kept)
            assert second.root in store.make_room(0, usable + count)
            assert usable_files(root, root) == usable + count
            assert not any(store.get(item.digest) for item in kept)
    finally:
        store.close()


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("kind", ["ext4", "btrfs"])
def test_a_disk_that_others_filled_lets_trees_go(mount: Mount, kind: str, reopened: bool) -> None:
    """To the last block: the index has room of its own to write down what goes, also where the
    store is opened on it, and takes it again once there is some."""
    root = mount(kind, 128 << 20)
    store, filler = BlobStore(root / "store", choose=choose), root / "filler"
    size = (root / "store/reserve").stat().st_size
    try:
        trees = [
            Publisher().pack({f"{n}".encode(): noise(1000 * seed + n, 3000) for n in range(50)}) for seed in (1, 2)
        ]
        for tree in trees:
            pull(store, tree)
        _fill_up(filler)
        if reopened:
            store.close()
            _fill_up(filler)
            store = BlobStore(root / "store", choose=choose)
        for tree in trees:
            store.trees.remove(tree.root)
        assert not on_disk(store.root) and not (root / "store/reserve").exists()
        filler.unlink()
        store.close()
        store = BlobStore(root / "store", choose=choose)
        assert (root / "store/reserve").stat().st_size == size
        assert (root / "store/reserve").stat().st_blocks * 512 >= size >= 1 << 20
    finally:
        store.close()


@pytest.fixture
def limited(mount: Mount) -> Path:
    """A directory in which its quota allows 32 MiB, of a disk that has more."""
    root = mount("btrfs", 256 << 20)
    for words in (
        ["subvolume", "create", root / "limited"],
        ["quota", "enable", root],
        ["qgroup", "limit", "32M", root / "limited"],
    ):
        subprocess.run(["btrfs", *words], check=True, capture_output=True)
    return root / "limited"


def test_a_quota_that_is_used_up_lets_trees_go(limited: Path) -> None:
    """The disk has room, and this store gets none of it."""
    store = BlobStore(limited / "store", choose=choose)
    try:
        tree = Publisher().pack({f"{n}".encode(): noise(n, 3000) for n in range(50)})
        pull(store, tree)
        _fill_up(limited / "filler")
        assert free_bytes(limited) > 64 << 20
        with pytest.raises(DiskFull, match="quota"):
            for number in range(1000):
                store.put_document(b"%d" % number * 4000)
        store.trees.remove(tree.root)
        assert not on_disk(store.root) and not (store.root / "reserve").exists()
    finally:
        store.close()


def test_room_is_made_within_a_quota(limited: Path) -> None:
    """Blobs and trees go for what the quota allows no more, the least recently used first; nothing
    goes for what could not come in any case."""
    store = BlobStore(limited / "store", choose=choose)
    found = [sample(seed, 64 * PIECE) for seed in range(12)]
    try:
        for item in found:
            fill(store.begin(item.digest, item.pieces), item)
        present = [store.get(item.digest) is not None for item in found]
        assert present == sorted(present) and 3 <= sum(present) < 8, present
        tree = Publisher().pack({f"{n}".encode(): noise(n, 1 << 20) for n in range(10)})
        pull(store, tree)
        check(store, tree)
        before, large = {blob.digest for blob in store.blobs()}, sample(99, 600 * PIECE)
        with pytest.raises(DiskFull, match="quota"):
            store.begin(large.digest, large.pieces)
        assert {blob.digest for blob in store.blobs()} == before
    finally:
        store.close()


def test_what_makes_room_within_a_quota_flushes_the_disk_a_few_times(
    limited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for each of many small blobs; others write to the disk as well. What is free counts
    beside what goes."""
    store = BlobStore(limited / "store", choose=choose)
    flushed: list[Path] = []

    def flush(path: Path) -> None:
        flushed.append(path)
        disk.sync_filesystem(path)

    try:
        for seed in range(200):
            fill(store.begin((small := sample(seed, PIECE)).digest, small.pieces), small)
        large = sample(999, 400 * PIECE)
        monkeypatch.setattr(store_module, "sync_filesystem", flush)
        store.begin(large.digest, large.pieces)
        evicted = 200 - sum(blob.complete for blob in store.blobs())
        assert evicted > 2 * store_module.QUOTA_STEPS >= len(flushed) > 0, (evicted, len(flushed))
    finally:
        store.close()


def test_the_quota_is_not_tried_for_each_of_many_things_that_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But after a while, and where something could not be written meanwhile."""
    now, reserve = [5.0], disk.Reserve(tmp_path)
    tried: list[int] = []

    def refusal(directory: Path, size: int) -> int:
        tried.append(size)
        return 0

    monkeypatch.setattr(disk, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(disk, "refusal", refusal)
    (tmp_path / "reserve").touch()
    for _ in range(1000):
        reserve.use()
    assert len(tried) == 1
    now[0] += disk.TRIED_AGAIN_S
    reserve.use()
    assert len(tried) == 2
    assert reserve.doubt() == 0
    reserve.use()
    assert len(tried) == 4


def test_a_disk_that_others_filled_lets_damage_go(mount: Mount) -> None:
    """Of a tree that is called complete the index says first that it is not."""
    root = mount("ext4", 128 << 20)
    store = BlobStore(root / "store", choose=choose)
    try:
        tree = Publisher().pack({f"{n}".encode(): noise(n, 3000) for n in range(50)})
        pull(store, tree)
        _fill_up(root / "filler")
        store.trees.drop_objects(set(list(store.objects.contents())[:3]))
        assert not store.trees.complete(tree.root) and len(store.objects) == 47
    finally:
        store.close()


def test_the_room_of_the_index_comes_again_beside_a_full_store(mount: Mount) -> None:
    """A store takes all but a hundredth of the disk, and of that is the room of its index."""
    root = mount("ext4", 1 << 30)
    store, reserve = BlobStore(root / "store"), root / "store/reserve"
    reserve.unlink()  # as where the disk was full
    with (root / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, free_bytes(root) - (8 << 20))
    assert not usable_bytes(root)
    store.close()
    assert reserve.stat().st_blocks


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_a_file_that_keeps_no_room_for_the_index_gets_it(mount: Mount, size: int) -> None:
    """As of an agent that was killed while it made the file, or of a store that was copied."""
    root = mount("ext4", 128 << 20)
    BlobStore(root / "store").close()
    reserve = root / "store/reserve"
    for length in (0, size):
        os.truncate(reserve, length)
    BlobStore(root / "store").close()
    assert reserve.stat().st_blocks * 512 >= 1 << 20


def test_no_memory_is_kept_for_the_index(mount: Mount) -> None:
    store = BlobStore(mount("tmpfs", 128 << 20))
    assert not (store.root / "reserve").exists()
    store.close()


def _fill_up(path: Path) -> None:
    """Write to a file until the disk has no room left."""
    for size in (1 << 20, 4096, 1):
        with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(size)):
                pass


def test_no_space_in_the_middle_of_a_blob(mount: Mount) -> None:
    """Where space cannot be reserved (ext2), somebody else may take it: write() says DiskFull, what
    is held stays held, and goes on when there is space again."""
    root = mount("ext2", 4096 * KIB)
    found = sample(3, 20 * PIECE)
    store = BlobStore(root / "store")
    try:
        blob = store.begin(found.digest, found.pieces)
        for piece in range(4):
            blob.write(piece, found.piece(piece))
        filler = root / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while file.write(bytes(4096)):
                pass
        with pytest.raises(DiskFull) as caught:
            for piece in range(4, found.count):
                blob.write(piece, found.piece(piece))
        assert caught.value.details["needed"] > 0
        held = list(blob.have)
        assert held[:4] == [0, 1, 2, 3] and len(held) < found.count
        assert blob.verify() == []
        filler.unlink()
        fill(blob, found)
        assert blob.path.read_bytes() == found.data
    finally:
        store.close()


def test_what_partial_blobs_will_take_counts(mount: Mount) -> None:
    """Where space cannot be reserved, what partial blobs have not yet written is not given away."""
    root = mount("ext2", 4096 * KIB)
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    half = (free // 2 // PIECE + 1) * PIECE
    first, second = sample(4, half), sample(5, half)
    store = BlobStore(root / "store")
    try:
        store.begin(first.digest, first.pieces)
        assert store.usage().disk_free > half, "sparse"
        with pytest.raises(DiskFull):
            store.begin(second.digest, second.pieces)
    finally:
        store.close()


def test_an_output_on_a_full_disk_is_not_half_there(mount: Mount, tmp_path: Path) -> None:
    small = mount("tmpfs", 256 * KIB)
    found = sample(6, 5 * PIECE)
    store = BlobStore(tmp_path / "store")
    try:
        blob = fill(store.begin(found.digest, found.pieces), found)
        with pytest.raises(DiskFull, match=str(small)):
            blob.give(small / "out")
        assert list(small.iterdir()) == []
        assert blob.give(mount("tmpfs", 1024 * KIB) / "out") == "copy"
    finally:
        store.close()


def test_a_copy_that_does_not_fit_says_so_at_its_end(mount: Mount, tmp_path: Path) -> None:
    """Nothing of it is published, and the pull goes on: give() has the last word."""
    small = mount("tmpfs", 256 * KIB)
    found = sample(6, 5 * PIECE)
    store = BlobStore(tmp_path / "store")
    try:
        copy = store.begin(found.digest, found.pieces).begin_copy(small / "out")
        assert copy is not None
        copy.write(0, memoryview(found.data))
        assert copy.failed
        copy.close()
        assert list(small.iterdir()) == []
    finally:
        store.close()


def test_a_disk_that_can_shares_extents(mount: Mount) -> None:
    """On btrfs a copy is a reflink: it takes no space, and writing to it leaves the store alone."""
    root = mount("btrfs", 128 << 20)
    found = sample(7, 64 * PIECE)
    store = BlobStore(root / "store", choose=choose)
    try:
        blob = fill(store.begin(found.digest, found.pieces), found)
        output = root / "out"
        assert blob.begin_copy(output) is None
        assert blob.give(output) == "reflink"
        assert output.read_bytes() == found.data
        with output.open("r+b") as file:
            file.write(b"changed")
        assert blob.verify() == []
    finally:
        store.close()


def test_space_that_comes_back_late_is_waited_for(mount: Mount) -> None:
    """btrfs frees the space of removed files with its next commit: no more blobs go than must."""
    root = mount("btrfs", 128 << 20)
    store = BlobStore(root / "store", choose=choose)
    try:
        free = store.usage().disk_free
        size = free // 5 // PIECE * PIECE
        found = [sample(seed, size) for seed in range(10, 16)]
        for item in found[:4]:
            fill(store.begin(item.digest, item.pieces), item)
            os.sync()
        evicted = store.make_room(2 * size)
        assert evicted == [item.digest for item in found[: len(evicted)]] and len(evicted) <= 2
    finally:
        store.close()


@pytest.mark.slow
def test_a_disk_that_gives_less_than_it_says(mount: Mount) -> None:
    """btrfs calls space free that a reservation does not get: more goes, rather than the pull."""
    root = mount("btrfs", 300 << 20)
    store = BlobStore(root / "store", choose=choose)
    try:
        for seed in range(24):
            item = sample(seed, 26 << 20, piece_size=1 << 20)
            fill(store.begin(item.digest, item.pieces), item)
    finally:
        store.close()


def test_a_disk_that_others_fill_while_objects_are_made(mount: Mount) -> None:
    """Room that was made for a tree is not reserved on the disk: when it is gone, more is made."""
    root = mount("tmpfs", 16 << 20)
    store = BlobStore(root / "store", choose=choose)
    try:
        first, second = (Publisher().pack({b"f": noise(seed, 3 << 20)}) for seed in (1, 2))
        pull(store, first)
        bring(store, second, second.small)
        with store.trees.missing(second.root, second.catalogs) as missing:
            bring(store, second, second.packs)
            (root / "other").write_bytes(bytes(store.usage().disk_free - (1 << 20)))
            assert store.trees.fill(missing).missing == 0
            store.trees.finish(missing)
        check(store, second)
    finally:
        store.close()


def test_in_memory_space_is_taken_piece_by_piece(mount: Mount) -> None:
    """There reserving means writing zeros, which whoever waits for the first piece would wait for
    as well."""
    root = mount("tmpfs", 4 * 1024 * KIB)
    store = BlobStore(root)
    found = sample(1, 4 * PIECE)
    blob = store.begin(found.digest, found.pieces)
    assert blob.path.stat().st_size == 4 * PIECE
    assert blob.path.stat().st_blocks == 0
    assert blob.write(1, found.piece(1))
    assert blob.path.stat().st_blocks * 512 == PIECE
    store.close()


def test_an_object_that_the_disk_has_no_room_for_leaves_nothing(mount: Mount) -> None:
    """Nor its bytes now, nor the file after the next opening, where files are named before they are
    written."""
    root = mount("tmpfs", 2048 * KIB)
    small, large = noise(1, 9000), noise(2, 4096 * KIB)
    store = BlobStore(root)
    store.objects.named_at_once = True
    assert store.objects.add(content_hash(small), small)
    (root / "objects" / content_hash(large).hex()[:2]).mkdir()
    with pytest.raises(DiskFull):
        store.objects.add(content_hash(large), large)
    assert set(store.objects.contents()) == {content_hash(small)}
    assert sum(path.stat().st_size for path in (root / "objects").rglob("*") if path.is_file()) == 9000
    store.close()
    store = BlobStore(root)
    try:
        assert set(store.objects.contents()) == {content_hash(small)}
        assert [path.name for path in (root / "objects").rglob("*") if path.is_file()] == [
            content_hash(small).hex()[2:]
        ]
    finally:
        store.close()


def test_a_disk_that_is_full_halfway(mount: Mount) -> None:
    """What was written before is counted and right; what was not has no bytes now, and no file
    after the next opening."""
    root = mount("tmpfs", 2048 * KIB)
    datas = {content_hash(data): data for data in (noise(number, 60_000) for number in range(64))}
    store = BlobStore(root)
    objects = store.objects
    objects.named_at_once = True
    for name in datas:
        (root / "objects" / name.hex()[:2]).mkdir(exist_ok=True)
    with pytest.raises(DiskFull), Bundle(objects) as bundle:
        for name, data in datas.items():
            bundle.put(name, data)
    made = set(objects.contents())
    assert 0 < len(made) < len(datas)
    assert made == set(sorted(datas)[: len(made)]), "in the order of their names"
    assert {name: data for name, data in on_disk(root).items() if data} == {name: datas[name] for name in made}
    assert objects.bytes_total == 60_000 * len(made)
    subprocess.run(["mount", "-o", "remount,size=4m", str(root)], check=True)
    store.close()
    store = BlobStore(root)
    try:
        assert set(store.objects.contents()) == made == on_disk(root).keys()
    finally:
        store.close()


@pytest.mark.parametrize("size", [4096 * pages for pages in (2, 4, 8, 16)])
def test_a_store_on_a_disk_that_is_full_says_so(mount: Mount, size: int) -> None:
    """Wherever the index meets it first; SQLite calls some of that a disk I/O error."""
    place = mount("tmpfs", size)
    with pytest.raises(DiskFull, match="lacks"):
        BlobStore(place / "store", choose=choose)
