"""What changed at rest is noticed before it is used, in an open store and after it was closed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from btrfs_rig import lose
from store_rig import data_file, fill, flip, pretend_other_boot, sample
from store_tree_rig import Publisher, check, noise, pull, text

from p2pdist.model.errors import DiskFull, P2PDistError
from p2pdist.model.tree import content_hash
from p2pdist.mount.erofs.writer import is_image, write_image
from p2pdist.mount.layers import make_image
from p2pdist.store import integrity as integrity_module
from p2pdist.store.objects.recovery import file_hash
from p2pdist.store.scrub import read_objects
from p2pdist.store.store import BlobStore

OpenStore = Callable[..., BlobStore]
FILES = {b"d%d/f%d" % (number % 3, number): text(number, 300 + 40 * number) for number in range(20)}
OTHER = {b"e%d" % number: noise(number, 400 + number) for number in range(10)}


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    path.chmod(0o644)
    with path.open("ab") as file:
        file.write(b"more")


def turn(path: Path) -> None:
    flip(path, path.stat().st_size // 3)


def swap(path: Path) -> None:
    """Another file of the same length, as a restored backup may be."""
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.rename(path)


def link(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    elsewhere = path.parent.parent.parent / "elsewhere"
    elsewhere.write_bytes(bytes(size))
    path.symlink_to(elsewhere)


DAMAGES = [cut, empty, grow, turn, swap, link, Path.unlink]
Damage = Callable[[Path], object]


def reopened(store: BlobStore, open_store: OpenStore, way: str, damage: Callable[[], object]) -> BlobStore:
    """Do the damage while the store is open, or while it is closed."""
    if way == "open":
        damage()
        return store
    store.integrity.look_at_all()
    store.close()
    damage()
    return open_store(store.root)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("way", ["open", "closed"])
def test_a_blob_that_changed_loses_what_is_wrong(
    tmp_path: Path, open_store: OpenStore, way: str, damage: Damage
) -> None:
    """And is whole again with these pieces alone, of its own length, at its own path."""
    found = sample(1, 5 * 65536 + 99)
    store = open_store(tmp_path)
    path = fill(store.begin(found.digest, found.pieces), found).path
    store = reopened(store, open_store, way, lambda: damage(path))
    here = store.get(found.digest)
    dropped = store.integrity.look([found.digest])
    if here is not None and here.complete and damage is not grow:  # else it was noticed at opening
        assert dropped == [found.digest] and not here.complete and store.integrity.damaged["blob"] == 1
    blob = fill(store.begin(found.digest, found.pieces), found)
    assert blob.path.read_bytes() == found.data and not blob.path.is_symlink()
    assert blob.verify() == [] and store.integrity.look([found.digest]) == []


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("way", ["open", "closed"])
def test_an_object_that_changed_makes_its_trees_incomplete(
    tmp_path: Path, open_store: OpenStore, way: str, damage: Damage
) -> None:
    """Trees without it stay as they are; a pull makes the tree whole again."""
    publisher = Publisher()
    packed, other = publisher.pack(FILES), Publisher().pack(OTHER)
    store = open_store(tmp_path)
    pull(store, packed)
    pull(store, other)
    assert store.integrity.look([packed.root, other.root]) == []
    content = max(packed.contents, key=lambda name: len(packed.contents[name]))
    path = store.objects.path(content)
    store = reopened(store, open_store, way, lambda: damage(path))
    assert store.integrity.look([other.root]) == []
    assert store.integrity.look([packed.root]) == [content.hex()]
    assert store.integrity.damaged["object"] == 1
    assert not store.trees.complete(packed.root) and store.trees.complete(other.root)
    pull(store, packed)
    check(store, packed)
    assert store.integrity.look([packed.root]) == []


def test_objects_that_were_lost_together_are_dropped_together(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where somebody removed a directory: a look at all trees for each would take hours."""
    store, publisher = open_store(tmp_path), Publisher()
    first, second = publisher.pack(FILES), publisher.pack(FILES | OTHER)
    pull(store, first)
    pull(store, second)
    assert store.integrity.look([first.root, second.root]) == []
    for content in first.contents:
        store.objects.path(content).unlink()
    looks: list[set[bytes]] = []
    with_any = store.trees.records.with_any
    monkeypatch.setattr(store.trees.records, "with_any", lambda asked: (looks.append(asked), with_any(asked))[1])
    assert sorted(store.integrity.look([first.root])) == sorted(content.hex() for content in first.contents)
    assert looks == [set(first.contents)]
    assert not store.trees.complete(first.root) and not store.trees.complete(second.root)
    pull(store, second)
    check(store, second)


def test_an_object_that_was_made_anew_while_others_were_looked_at_stays(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading many takes long. p2pdist verify has dropped the first one by then, and a pull has it
    again."""
    store, packed = open_store(tmp_path), Publisher().pack(FILES)
    pull(store, packed)
    assert store.integrity.look([packed.root]) == []
    for content in packed.contents:
        turn(store.objects.path(content))
    read: list[bytes] = []

    def read_and_heal(path: Path) -> bytes:
        found = file_hash(path)
        read.append(bytes.fromhex(path.parent.name + path.name))
        if len(read) == len(packed.contents):
            store.trees.drop_objects({read[0]})
            pull(store, packed)
        return found

    monkeypatch.setattr(integrity_module, "file_hash", read_and_heal)
    dropped = store.integrity.look([packed.root])
    assert sorted(dropped) == sorted(content.hex() for content in packed.contents if content != read[0])
    assert read[0] in store.objects
    pull(store, packed)
    check(store, packed)


@pytest.mark.root
@pytest.mark.parametrize("way", ["verify", "look", "scrub", "crash"])
def test_an_object_that_the_disk_has_lost_is_dropped(btrfs: Path, open_store: OpenStore, way: str) -> None:
    """A mapped page that cannot be read ends a process."""
    data = noise(7, 200_000)
    tree, store = Publisher().pack({b"lost": data, b"kept": b"kept"}), open_store(btrfs / "store")
    pull(store, tree)
    for pack in tree.packs:
        store.remove(pack)
    store.close()
    if way == "crash":
        pretend_other_boot(store.root)
    lose(btrfs, data[50_000:50_064])
    store = open_store(store.root)
    content = content_hash(data)
    if way == "verify":
        assert [each.name for each in store.verify() if not each.ok] == [content.hex()]
    elif way == "look":
        store.integrity._changed.add(content)
        assert store.integrity.look([tree.root]) == [content.hex()]
    elif way == "scrub":
        assert not all(each.ok for each in read_objects(store, content.hex()[:2], lambda count: None))
    assert content not in store.objects and not store.trees.complete(tree.root)
    pull(store, tree)
    check(store, tree)
    store.close()


@pytest.mark.root
def test_a_document_that_the_disk_has_lost_comes_again(btrfs: Path, open_store: OpenStore) -> None:
    """The store opens, with all else, and the blob that the list is of stays."""
    found, store = sample(1, 600 * 65536), open_store(btrfs / "store")
    fill(store.begin(found.digest, found.pieces), found)
    encoded = found.pieces.encode()
    store.close()
    lose(btrfs, encoded[100:164])
    store = open_store(store.root)
    assert store.read_document(found.pieces.digest) is None
    assert store.put_document(encoded) == found.pieces.digest
    blob = store.get(found.digest)
    assert blob.complete and blob.verify() == []
    store.close()


@pytest.mark.root
def test_an_image_that_the_disk_has_lost_is_made_anew(btrfs: Path, open_store: OpenStore) -> None:
    """By the next pull or mount of its tree."""
    tree, store = Publisher().pack(FILES), open_store(btrfs / "store")
    pull(store, tree)
    image = store.trees.images.path(tree.root)
    write_image(tree.entries, image)
    made = image.read_bytes()
    store.close()
    lose(btrfs, made[1024:1088])
    with pytest.raises(OSError, match="Input/output"):
        image.read_bytes()
    make_image(image, lambda: write_image(tree.entries, image))
    assert image.read_bytes() == made and is_image(image)


def test_what_nothing_uses_is_found_when_all_are_looked_at(tmp_path: Path, open_store: OpenStore) -> None:
    """It goes over all objects once after the store was opened."""
    packed = Publisher().pack(FILES)
    store = open_store(tmp_path)
    pull(store, packed)
    store.integrity.look_at_all()
    store.close()
    first, second = sorted(packed.contents)[:2]
    cut(tmp_path / "objects" / first.hex("/", 31))
    store = open_store(tmp_path)
    turn(store.objects.path(second))
    assert sorted(store.integrity.look_at_all()) == [first.hex(), second.hex()]
    assert store.integrity.look_at_all() == []
    assert not store.trees.complete(packed.root)


def test_a_store_is_not_called_right_while_something_is_in_doubt(tmp_path: Path, open_store: OpenStore) -> None:
    """A flip that nothing has looked at when the store closes, or its process is killed, is still
    found later."""
    packed = Publisher().pack(FILES)
    store = open_store(tmp_path)
    pull(store, packed)
    store.integrity.look_at_all()
    content = sorted(packed.contents)[0]
    turn(store.objects.path(content))
    store.close()
    store = open_store(tmp_path)
    store.close()
    store = open_store(tmp_path)
    assert store.integrity.look([packed.root]) == [content.hex()]


def test_what_changed_while_the_clock_was_set_back_is_found(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was last known to be right at a time that has not come yet."""
    found = sample(3, 5 * 65536)
    store = open_store(tmp_path)
    fill(store.begin(found.digest, found.pieces), found)
    store.integrity.look_at_all()
    with monkeypatch.context() as ahead:
        later = time.time() + 3600
        ahead.setattr("time.time", lambda: later)
        store.close()
    turn(tmp_path / "blobs/sha256" / found.digest.removeprefix("sha256:"))
    store = open_store(tmp_path)
    assert store.integrity.look([found.digest]) == [found.digest]


def test_what_did_not_change_is_not_read(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what was pulled just now, nor after the store was closed in order, is compared byte
    by byte."""
    packed = Publisher().pack(FILES)
    found = sample(3, 5 * 65536)
    store = open_store(tmp_path)
    pull(store, packed)
    fill(store.begin(found.digest, found.pieces), found)
    read: list[object] = []
    monkeypatch.setattr("p2pdist.store.integrity.file_hash", read.append)
    monkeypatch.setattr("p2pdist.store.integrity.wrong_pieces_in_threads", lambda *words: read.append(words) or [])
    # What was made within a tick of the clock before the store was closed is read again.
    later = os.stat(tmp_path / "blobs/sha256").st_ctime + 3600
    monkeypatch.setattr("time.time", lambda: later)
    for _ in range(2):
        assert store.integrity.look([packed.root, found.digest]) == []
        store.integrity.look_at_all()
        store.close()
        store = open_store(tmp_path)
        store.integrity.look_at_all()
    assert store.integrity.look([packed.root, found.digest]) == []
    assert read == []


@pytest.mark.parametrize("damage", [cut, turn, grow])
@pytest.mark.parametrize("way", ["open", "closed"])
def test_an_image_of_metadata_that_was_written_to_is_removed(
    tmp_path: Path, open_store: OpenStore, way: str, damage: Damage
) -> None:
    packed = Publisher().pack(FILES)
    store = open_store(tmp_path)
    pull(store, packed)
    image = store.trees.images.path(packed.root)
    draft = image.with_name("draft.partial")
    draft.write_bytes(noise(1, 9000))
    draft.rename(image)
    store.integrity.look([packed.root])
    assert image.exists(), "the agent has made it"
    store = reopened(store, open_store, way, lambda: damage(image))
    store.integrity.look([packed.root])
    assert not image.exists() and store.integrity.damaged["image"] == (way == "open")


@pytest.mark.parametrize("how", ["moved", "linked"])
def test_an_image_that_another_file_took_the_place_of_is_removed(
    tmp_path: Path, open_store: OpenStore, how: str
) -> None:
    """It may be a right image, of another tree."""
    packed = Publisher().pack(FILES)
    store = open_store(tmp_path / "store")
    pull(store, packed)
    image = store.trees.images.path(packed.root)
    for _ in range(2):
        draft = image.with_name(f"{image.name}.partial")
        draft.write_bytes(noise(1, 9000))
        draft.rename(image)
        store.integrity.look([packed.root])
        assert image.exists(), "the agent has made it"
        other = tmp_path / "other"
        other.write_bytes(noise(2, 9000))
        if how == "moved":
            other.rename(image)
        else:
            image.unlink()
            os.link(other, image)
        store.integrity.look([packed.root])
        assert not image.exists()
    assert store.integrity.damaged["image"] == 2


def test_directories_of_objects_that_come_and_go_are_watched(tmp_path: Path, open_store: OpenStore) -> None:
    """A directory that was moved away and back, or made by another process, hides nothing."""
    packed = Publisher().pack(FILES)
    store = open_store(tmp_path)
    pull(store, packed)
    store.integrity.look_at_all()
    content = sorted(packed.contents)[0]
    directory = store.objects.path(content).parent
    away = tmp_path / "away"
    directory.rename(away)
    away.rename(directory)
    assert store.integrity.look([packed.root]) == []
    turn(store.objects.path(content))
    assert store.integrity.look([packed.root]) == [content.hex()]


def test_a_kernel_that_cannot_watch_costs_a_look_at_each_file(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where fs.inotify.max_user_instances is reached."""
    monkeypatch.setattr("p2pdist.store.watch._INIT_FLAGS", -1)
    packed = Publisher().pack(FILES)
    store = open_store(tmp_path)
    assert "fs.inotify" in caplog.text
    pull(store, packed)
    store.integrity.look_at_all()
    rounds = iter(range(100))
    store.integrity.look_at_all(lambda: next(rounds) < 99)
    assert next(rounds) == 1, "nothing was used since the last survey, so there is nothing to look at again"
    assert store.integrity.look([packed.root]) == []
    content = sorted(packed.contents)[0]
    cut(store.objects.path(content))
    assert store.integrity.look([packed.root]) == [content.hex()]


def test_events_that_the_kernel_dropped_are_made_up_for(tmp_path: Path, open_store: OpenStore) -> None:
    """More changes than its queue holds: two files written to in turn, so that events are not
    merged."""
    packed = Publisher().pack(FILES)
    store = open_store(tmp_path)
    pull(store, packed)
    store.integrity.look_at_all()
    first, second, third = sorted(packed.contents)[:3]
    queue = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    handles = [os.open(store.objects.path(name), os.O_RDONLY) for name in (first, second)]
    sizes = [os.fstat(handle).st_size for handle in handles]
    for number in range(queue + 10):
        os.truncate(store.objects.path((first, second)[number % 2]), sizes[number % 2])
    for handle in handles:
        os.close(handle)
    cut(store.objects.path(third))
    assert store.integrity.look([packed.root]) == [third.hex()]


def test_a_packed_tree_is_what_it_was(tmp_path: Path, open_store: OpenStore) -> None:
    """Nothing is dropped of stores that nothing happened to, however often they are opened."""
    packed, found = Publisher().pack(FILES), sample(1, 5 * 65536 + 99)
    store = open_store(tmp_path)
    fill(store.begin(found.digest, found.pieces), found)
    pull(store, packed)
    for _ in range(3):
        assert store.integrity.look([packed.root, found.digest]) == [] and store.integrity.look_at_all() == []
        store.close()
        store = open_store(tmp_path)
    check(store, packed)
    assert not +store.integrity.damaged


@pytest.mark.root
def test_a_full_disk_leaves_what_is_wrong_in_doubt(tmp_path: Path, open_store: OpenStore) -> None:
    """What cannot be dropped is not used either, and is dropped when there is room again."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "test", place], check=True)
    try:
        packed = Publisher().pack(FILES)
        store = open_store(place)
        pull(store, packed)
        store.integrity.look_at_all()
        content = sorted(packed.contents)[0]
        (place / "other").write_bytes(b"")
        with contextlib.suppress(OSError), (place / "other").open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        store.integrity.mark()
        turn(store.objects.path(content))
        for _ in range(2):
            with pytest.raises(DiskFull):
                store.integrity.look([packed.root])
        with contextlib.suppress(DiskFull):
            store.close()
        (place / "other").unlink()
        store = open_store(place)
        assert store.integrity.look([packed.root]) == [content.hex()]
        pull(store, packed)
        check(store, packed)
        store.close()
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_blob_that_cannot_be_made_partial_leaves_nothing_open(tmp_path: Path, open_store: OpenStore) -> None:
    """As where files of the store belong to another user: each attempt fails, the scrub makes one
    every few minutes, and the one after the end of the trouble succeeds."""
    found, store = sample(1, 5 * 65536), open_store(tmp_path)
    blob = fill(store.begin(found.digest, found.pieces), found)
    turn(blob.path)
    data_file(tmp_path, found.digest).mkdir()

    def opened() -> list[str]:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        paths = (os.readlink(link) for link in links if os.path.islink(link))
        return [path for path in paths if path.startswith(str(tmp_path)) and found.digest[7:] in path]

    for _ in range(3):
        with pytest.raises(P2PDistError):
            store.integrity.look([found.digest])
    assert len(opened()) == 1, "the bitmap"
    data_file(tmp_path, found.digest).rmdir()
    assert store.integrity.look([found.digest]) == [found.digest]
    fill(blob, found)
    assert opened() == []
