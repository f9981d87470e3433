"""Objects: adding, finding, removing, and what survives."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from store_rig import flip, on_disk, pretend_other_boot
from store_tree_rig import noise

from p2pdist.model.errors import NotFound, P2PDistError
from p2pdist.model.tree import content_hash
from p2pdist.store.objects.files import Objects
from p2pdist.store.store import BlobStore

OpenStore = Callable[..., BlobStore]


def put(objects: Objects, *datas: bytes) -> list[bytes]:
    """Add contents; returns their names."""
    names = [content_hash(data) for data in datas]
    assert all(objects.add(name, data) for name, data in zip(names, datas, strict=True))
    return names


@pytest.mark.parametrize("way", ["unnamed", "named", "named at once"])
def test_an_object_is_a_read_only_file_with_its_name(store: BlobStore, way: str) -> None:
    """With drafts that have no name, where the filesystem has none such, and without a draft; a
    second adding changes nothing."""
    objects = store.objects
    objects.named_at_once = way == "named at once"
    objects._unnamed = way != "named"
    data = noise(1, 5000)
    (name,) = put(objects, data)
    path = objects.path(name)
    assert path == store.root / "objects" / name.hex()[:2] / name.hex()[2:]
    assert path.read_bytes() == data and path.stat().st_mode & 0o7777 == 0o444
    inode = path.stat().st_ino
    put(objects, data)
    assert objects.path(name).stat().st_ino == inode and path.stat().st_nlink == 1
    assert name in objects and objects.sizes[name] == 5000 and list(objects.contents()) == [name]
    assert objects.bytes_total == 5000 == store.usage().bytes_objects
    assert list((store.root / "tmp").iterdir()) == []


def test_wrong_bytes_leave_nothing(store: BlobStore) -> None:
    data = noise(2, 100)
    assert store.objects.add(content_hash(data), data[:-1]) is False
    assert store.objects.add(content_hash(data), b"") is False
    assert len(store.objects) == 0 and on_disk(store.root) == {}
    with pytest.raises(NotFound, match=content_hash(data).hex()):
        store.objects.path(content_hash(data))


@pytest.mark.parametrize("at_once", [False, True])
def test_the_mode_does_not_hang_on_the_mask(tmp_path: Path, open_store: OpenStore, at_once: bool) -> None:
    before = os.umask(0o077)
    try:
        store = open_store(tmp_path)
        store.objects.named_at_once = at_once
        (name,) = put(store.objects, b"data")
    finally:
        os.umask(before)
    assert store.objects.path(name).stat().st_mode & 0o7777 == 0o444


def test_many_writers_of_the_same_contents_are_harmless(store: BlobStore) -> None:
    """Each is there once, is counted once, and is right."""
    datas = [noise(seed, 50 + seed) for seed in range(200)]

    def write(seed: int) -> None:
        put(store.objects, *random.Random(seed).sample(datas, len(datas)))

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert on_disk(store.root) == {content_hash(data): data for data in datas}
    assert store.objects.bytes_total == sum(map(len, datas))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stray_of_that_name_is_replaced(store: BlobStore, at_once: bool) -> None:
    store.objects.named_at_once = at_once
    data = noise(3, 100)
    name = content_hash(data)
    stray = store.root / "objects" / name.hex()[:2] / name.hex()[2:]
    stray.parent.mkdir()
    stray.write_bytes(b"something else")
    put(store.objects, data)
    assert store.objects.path(name).read_bytes() == data


def test_objects_survive_reopening_and_removal_does_too(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    names = put(store.objects, b"one", b"two", b"three")
    store.close()
    store = open_store(tmp_path)
    assert set(store.objects.contents()) == set(names) and store.objects.bytes_total == 11
    assert store.objects.remove(names[:1]) == 3 and store.objects.remove(names[:1]) == 0
    assert set(on_disk(tmp_path)) == set(names[1:])
    store.close()
    store = open_store(tmp_path)
    assert set(store.objects.contents()) == set(names[1:]) and store.objects.bytes_total == 8


def test_what_rows_and_files_say_is_brought_in_line_after_a_kill(tmp_path: Path, open_store: OpenStore) -> None:
    """Files whose rows were not written yet are taken in, rows without a file go, and what is no
    object is removed."""
    store = open_store(tmp_path / "store")
    old = put(store.objects, b"old", b"lost")
    store.objects.save()
    young = put(store.objects, b"young")
    left = _killed(tmp_path)
    Path(left / "objects" / old[1].hex()[:2] / old[1].hex()[2:]).unlink()
    (left / "objects" / "00").mkdir(exist_ok=True)
    (left / "objects" / "00" / "nonsense").write_bytes(b"?")
    again = open_store(left)
    assert set(again.objects.contents()) == {old[0], young[0]} == set(on_disk(left))
    assert again.objects.bytes_total == 8
    again.close()
    assert open_store(left).objects.bytes_total == 8


def test_what_a_killed_process_left_half_written_is_dropped(tmp_path: Path, open_store: OpenStore) -> None:
    """Of files without a row, since these may have been written under their names."""
    store = open_store(tmp_path / "store")
    store.objects.named_at_once = True
    right, half, empty = put(store.objects, noise(1, 9000), noise(2, 9000), noise(3, 9000))
    left = _killed(tmp_path)
    for name, size in ((half, 4096), (empty, 0)):
        os.truncate(left / "objects" / name.hex()[:2] / name.hex()[2:], size)
    again = open_store(left)
    assert set(again.objects.contents()) == {right} == set(on_disk(left))
    put(again.objects, noise(2, 9000))
    assert on_disk(left)[half] == noise(2, 9000)


def test_what_a_lost_machine_tore_is_dropped(tmp_path: Path, open_store: OpenStore) -> None:
    """Of objects that had not reached the disk, with rows and without: only those that are still
    right are believed."""
    store = open_store(tmp_path / "store")
    torn, right, empty = put(store.objects, noise(1, 9000), noise(2, 9000), noise(3, 9000))
    store.objects.save()
    torn_stray, right_stray = put(store.objects, noise(4, 9000), noise(5, 9000))
    left = _killed(tmp_path)
    pretend_other_boot(left)
    for name in (torn, torn_stray):
        flip(left / "objects" / name.hex()[:2] / name.hex()[2:], 4096)
    os.truncate(left / "objects" / empty.hex()[:2] / empty.hex()[2:], 0)
    again = open_store(left)
    assert set(again.objects.contents()) == {right, right_stray} == set(on_disk(left))


def test_what_has_reached_the_disk_is_not_read_again(tmp_path: Path, open_store: OpenStore) -> None:
    """A bit flipped behind the store's back goes unnoticed after the loss of the machine, which
    shows that nothing was read."""
    store = open_store(tmp_path / "store")
    (durable,) = put(store.objects, noise(1, 9000))
    store.objects.sync()
    (young,) = put(store.objects, noise(2, 9000))
    store.objects.save()
    left = _killed(tmp_path)
    pretend_other_boot(left, durable=1)
    for name in (durable, young):
        flip(left / "objects" / name.hex()[:2] / name.hex()[2:], 100)
    assert set(open_store(left).objects.contents()) == {durable}


def test_expected_objects_count_once(store: BlobStore) -> None:
    """Whoever expects them, until they come or nobody expects them any more."""
    objects, data = store.objects, b"0123456789"
    name = content_hash(data)
    objects.expected.add({name: 10, b"x" * 32: 5})
    objects.expected.add({name: 10})
    assert objects.expected.bytes_total == 15 and objects.expected.bytes_new({name: 10, b"y" * 32: 7}) == 7
    objects.expected.remove([name])
    assert store.usage().bytes_total == 15
    put(objects, data)
    assert (objects.expected.bytes_total, objects.bytes_total, store.usage().bytes_total) == (5, 10, 15)
    objects.expected.remove([name, b"x" * 32])
    assert store.usage().bytes_total == 10


def _killed(directory: Path) -> Path:
    """What a process that is killed now would leave of the store in `directory`."""
    shutil.copytree(directory / "store", directory / "left")
    return directory / "left"


def refuse_removal(root: Path, *, refuse: bool) -> None:
    """Have the index fail to give up rows of objects, as on a full disk."""
    with sqlite3.connect(root / "index.sqlite") as database:
        if refuse:
            database.execute("CREATE TRIGGER full BEFORE DELETE ON objects BEGIN SELECT RAISE(ABORT, 'full'); END")
        else:
            database.execute("DROP TRIGGER full")
    database.close()


def test_what_was_removed_does_not_come_back_with_its_row(store: BlobStore, open_store: OpenStore) -> None:
    names = put(store.objects, noise(1, 500), noise(2, 500))
    store.objects.save()
    refuse_removal(store.root, refuse=True)
    with pytest.raises(P2PDistError):
        store.objects.remove(names[:1])
    refuse_removal(store.root, refuse=False)
    store.close()
    again = open_store(store.root).objects
    assert set(again.contents()) == {names[1]} == on_disk(store.root).keys()


@pytest.mark.parametrize("way", ["named at once", "from a draft", "from chunks"])
def test_nothing_is_made_under_a_name_that_still_has_a_row(store: BlobStore, way: str) -> None:
    """The row would vouch for what a killed process leaves of it."""
    objects, data = store.objects, noise(1, 500)
    objects.named_at_once = way == "named at once"
    (name,) = put(objects, data)
    objects.save()
    refuse_removal(store.root, refuse=True)
    with pytest.raises(P2PDistError):
        objects.remove([name])
    with pytest.raises(P2PDistError):
        if way == "from chunks":
            objects.name(draft := objects.begin(), name, len(data), b"")
        else:
            put(objects, data)
    assert name not in objects and on_disk(store.root) == {}
    refuse_removal(store.root, refuse=False)
    if way == "from chunks":
        draft.close()
    put(objects, data)
    assert on_disk(store.root) == {name: data}
