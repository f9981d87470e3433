"""The store as a whole: locking, capacity, pins, small blobs, packages."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from store_rig import (
    PIECE,
    bitmap_file,
    complete_file,
    data_file,
    files,
    fill,
    flip,
    in_index,
    keep_from_removal,
    read_piece,
    sample,
)

from p2pdist.core.eviction import choose
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Conflict, Corrupt, DiskFull, NotFound, P2PDistError, TooLarge, UsageError
from p2pdist.model.manifest import DOCUMENT_BYTES_MAX, Config, Descriptor, Manifest, encode_config, encode_manifest
from p2pdist.model.pieces import PieceList, encoded_size
from p2pdist.store.blobs.bitmap import read_bitmap
from p2pdist.store.blobs.blob import Blob, content_digest
from p2pdist.store.blobs.documents import ROW_BYTES_MAX
from p2pdist.store.store import DOCUMENT_IDLE_S, BlobStore


def test_a_second_opener_is_refused_by_name(tmp_path: Path, store: BlobStore) -> None:
    """Another process, and this one too, learn which process has the store; once that has closed
    it, it opens."""
    program = (
        f"from pathlib import Path; from p2pdist.store.store import BlobStore; BlobStore(Path({str(store.root)!r}))"
    )
    second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert second.returncode != 0
    assert f"is in use by process {os.getpid()}" in second.stderr
    with pytest.raises(Conflict, match=f"in use by process {os.getpid()}"):
        BlobStore(store.root)
    store.close()
    store.close()
    BlobStore(store.root).close()


def test_begin_gives_one_object_per_blob(store: BlobStore) -> None:
    found = sample(1, PIECE)
    assert store.get(found.digest) is None
    blob = store.begin(found.digest, found.pieces)
    assert store.begin(found.digest, found.pieces) is blob
    assert store.get(found.digest) is blob
    assert store.blobs() == [blob]
    assert blob.pieces == found.pieces


@pytest.mark.parametrize("what", ["index", pytest.param("file", marks=pytest.mark.root)])
def test_what_could_not_be_removed_is_begun_anew(store: BlobStore, what: str) -> None:
    """As on a disk that is read-only for a while, or whose index takes nothing: it is not here any
    more, counts until it is gone, and is no obstacle to the next pull."""
    found = sample(1, 2 * PIECE)
    path = fill(store.begin(found.digest, found.pieces), found).path
    with keep_from_removal(store.root if what == "index" else path), pytest.raises(P2PDistError):
        store.remove(found.digest)
    assert store.get(found.digest) is None and store.blobs() == [] and store.usage().bytes_complete
    blob = store.begin_held(found.digest, found.pieces)
    assert fill(blob, found).path.read_bytes() == found.data
    blob.release()
    with keep_from_removal(store.root if what == "index" else path), pytest.raises(P2PDistError):
        store.remove(found.digest)
    store.remove(found.digest)
    assert not path.exists() and not store.usage().bytes_complete


def test_who_claims_a_blob_has_it_however_others_make_room(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody is quick enough each time to remove the blob between its beginning and its being
    held, as long as he gets the lock."""
    found = sample(1, PIECE)
    begin, attempts = store.begin, list[object]()

    def remove() -> None:
        try:
            store.remove(found.digest)
            attempts.append(None)
        except P2PDistError as error:
            attempts.append(error)

    def begun_and_removed(digest: Digest, wanted: PieceList) -> Blob:
        blob = begin(digest, wanted)
        remover = threading.Thread(target=remove)
        removers.append(remover)
        remover.start()
        # The second time the store's lock is held, for which the remover waits.
        remover.join(10.0 if len(removers) == 1 else 0.5)
        return blob

    removers: list[threading.Thread] = []
    monkeypatch.setattr(store, "begin", begun_and_removed)
    blob = store.begin_held(found.digest, found.pieces)
    assert blob.in_use and store.get(found.digest) is blob
    for remover in removers:
        remover.join()
    first, second = attempts
    assert first is None and isinstance(second, Conflict)
    assert store.begin_held(found.digest, found.pieces) is blob
    for _ in range(2):
        blob.release()
    assert not blob.in_use


def test_names_that_are_no_digests_are_refused(store: BlobStore, tmp_path: Path) -> None:
    """No name leads out of the directory."""
    pieces = sample(1, 1).pieces
    calls: list[Any] = [
        store.get,
        store.remove,
        store.drop_partial,
        store.read_document,
        store.pins.owners,
        lambda name: store.begin(name, pieces),
        lambda name: store.pins.pin(name, "me"),
        lambda name: store.packages.record("a:b", name),
    ]
    for name in (
        "sha256:" + "../" * 10 + "etc/passwd",
        "",
        "sha256:" + "A" * 64,
        "sha256:" + "a" * 64 + "\n",
        "md5:00",
    ):
        for call in calls:
            with pytest.raises(UsageError):
                call(Digest(name))
    assert files(store.root) == set()


def test_remove_spares_what_is_pinned_or_in_use(store: BlobStore) -> None:
    found = sample(2, PIECE)
    blob = fill(store.begin(found.digest, found.pieces), found)
    store.pins.pin(found.digest, "package a:1")
    store.pins.pin(found.digest, "package b:1")
    assert store.pins.owners(found.digest) == {"package a:1", "package b:1"}
    with pytest.raises(Conflict, match="pinned by package a:1, package b:1"):
        store.remove(found.digest)
    store.pins.unpin("package a:1")
    with pytest.raises(Conflict):
        store.remove(found.digest)
    store.pins.unpin("package b:1")
    with blob.held(), pytest.raises(Conflict):
        store.remove(found.digest)
    store.remove(found.digest)
    assert store.get(found.digest) is None
    assert files(store.root) == set()
    assert store.read_document(found.pieces.digest) is None
    assert store.usage().bytes_total == 0
    with pytest.raises(NotFound):
        store.remove(found.digest)


def test_drop_partial_is_for_partial_blobs(store: BlobStore) -> None:
    found = sample(3, 2 * PIECE)
    store.drop_partial(found.digest)
    blob = store.begin(found.digest, found.pieces)
    store.pins.pin(found.digest, "me")
    with blob.held(), pytest.raises(Conflict):
        store.drop_partial(found.digest)
    store.drop_partial(found.digest)
    assert store.get(found.digest) is None and files(store.root) == set()
    with pytest.raises(NotFound):
        blob.write(0, found.piece(0))
    fill(store.begin(found.digest, found.pieces), found)
    with pytest.raises(Conflict):
        store.drop_partial(found.digest)


def test_pins_and_packages_survive_reopening(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    digest = digest_of(b"x")
    store.pins.pin(digest, "one")
    store.pins.pin(digest, "two")
    store.packages.record("b:1", digest)
    store.packages.record("a:1", digest)
    store.packages.record("a:1", digest_of(b"y"))
    store.packages.forget("b:1")
    store.close()
    store = BlobStore(tmp_path)
    assert store.pins.owners(digest) == {"one", "two"}
    record = store.packages.list()[0]
    assert (record.reference, record.manifest_digest) == ("a:1", digest_of(b"y"))
    assert len(store.packages.list()) == 1 and abs(record.last_used - time.time()) < 60
    store.close()


def test_capacity_counts_partial_blobs_in_full(tmp_path: Path, open_store: Any) -> None:
    """A partial blob that has nothing yet keeps its room; without anything to evict a second one
    finds the store full."""
    found, other = sample(4, 3 * PIECE), sample(5, 2 * PIECE)
    overhead = encoded_size(found.pieces.layout)
    store = open_store(tmp_path, capacity_bytes=4 * PIECE, choose=choose)
    store.begin(found.digest, found.pieces)
    assert store.usage().bytes_partial == 3 * PIECE
    with pytest.raises(DiskFull) as caught:
        store.begin(other.digest, other.pieces)
    assert caught.value.details["needed"] == 2 * PIECE + encoded_size(other.pieces.layout)
    assert caught.value.details["free"] == PIECE - overhead
    assert store.get(other.digest) is None
    assert store.read_document(other.pieces.digest) is None
    store.drop_partial(found.digest)
    store.begin(other.digest, other.pieces)


def test_blobs_are_begun_while_others_become_complete(store: BlobStore) -> None:
    """As when a package of many small ones arrives: files change their names while room for others
    is counted."""
    samples = [sample(1000 + number, 100 + number) for number in range(240)]

    def arrive(first: int) -> None:
        for found in samples[first::4]:
            fill(store.begin(found.digest, found.pieces), found)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(arrive, range(4)))
    assert all((blob := store.get(found.digest)) is not None and blob.complete for found in samples)


def test_the_least_recently_used_goes_first(tmp_path: Path, open_store: Any) -> None:
    """Of four blobs, one pinned, one held, one just read: the one left gives way, and nothing goes
    when that is not enough."""
    old = [sample(seed, 2 * PIECE) for seed in range(20, 24)]
    new, big = sample(24, 2 * PIECE), sample(25, 6 * PIECE)
    store = open_store(tmp_path, capacity_bytes=9 * PIECE, choose=choose)
    for found in old:
        fill(store.begin(found.digest, found.pieces), found)
    store.pins.pin(old[0].digest, "me")
    store.get(old[1].digest).hold()
    read_piece(store.get(old[2].digest), 0)
    store.begin(new.digest, new.pieces)
    assert {blob.digest for blob in store.blobs()} == {found.digest for found in [*old[:3], new]}
    with pytest.raises(DiskFull) as caught:
        store.begin(big.digest, big.pieces)
    assert caught.value.details["free"] < caught.value.details["needed"]
    assert len(store.blobs()) == 4, "nothing may go in vain"
    store.get(old[1].digest).release()
    assert store.make_room(2 * PIECE) == [old[2].digest]
    assert store.make_room(0) == []


def test_without_a_decision_nothing_is_evicted(tmp_path: Path, open_store: Any) -> None:
    found, other = sample(26, 2 * PIECE), sample(27, 2 * PIECE)
    store = open_store(tmp_path, capacity_bytes=3 * PIECE)
    fill(store.begin(found.digest, found.pieces), found)
    with pytest.raises(DiskFull):
        store.begin(other.digest, other.pieces)
    assert len(store.blobs()) == 1


def test_order_of_use_survives_reopening(tmp_path: Path, open_store: Any) -> None:
    first, second = sample(28, PIECE), sample(29, PIECE)
    store = open_store(tmp_path)
    for found in (first, second):
        fill(store.begin(found.digest, found.pieces), found)
    read_piece(store.get(first.digest), 0)
    store.close()
    store = open_store(tmp_path, capacity_bytes=3 * PIECE, choose=choose)
    assert store.make_room(2 * PIECE - 200) == [second.digest]


def test_order_of_use_survives_a_clock_that_is_set_back(tmp_path: Path, open_store: Any) -> None:
    """What is used after it is written down, as ever."""
    first, second = sample(1, PIECE), sample(2, PIECE)
    store = open_store(tmp_path / "store")
    for found in (first, second):
        fill(store.begin(found.digest, found.pieces), found)
    store._use_saved_at += 8 * 3600.0  # written down while the clock was ahead
    with store.get(first.digest).held():
        pass
    used = store.get(first.digest).last_used
    store.close()
    assert open_store(tmp_path / "store").get(first.digest).last_used == used


def test_a_partial_blob_from_before_the_clock_was_set_back_may_go(tmp_path: Path, open_store: Any) -> None:
    """It was last used hours from now, and would keep its room until then."""
    left, fresh, new = (sample(seed, 6 * PIECE) for seed in (1, 2, 3))
    store = open_store(tmp_path / "store", capacity_bytes=14 * PIECE, choose=choose)
    store.begin(left.digest, left.pieces).last_used += 8 * 3600.0
    store.begin(fresh.digest, fresh.pieces)
    store.begin(new.digest, new.pieces)
    assert store.get(left.digest) is None and store.get(fresh.digest) is not None


def test_a_disk_that_is_too_small_is_named(store: BlobStore) -> None:
    """More than the disk has is refused before anything is stored."""
    free = os.statvfs(store.root).f_bavail * os.statvfs(store.root).f_frsize
    with pytest.raises(DiskFull, match="bytes needed"):
        store.make_room(free)
    assert store.make_room(free // 2) == []
    assert store.usage().disk_free == pytest.approx(free, rel=0.05)


@pytest.mark.parametrize("size", [8, ROW_BYTES_MAX, ROW_BYTES_MAX + 1])
def test_small_blobs_are_checked_at_reading(tmp_path: Path, open_store: Any, size: int) -> None:
    """Be they rows of the index or files; and the next process finds them."""
    store, manifest = open_store(tmp_path), b"m" * size
    digest = store.put_document(manifest)
    assert digest == digest_of(manifest) == store.put_document(manifest)
    assert store.read_document(digest) == manifest
    assert store.usage().bytes_small == size
    if size <= ROW_BYTES_MAX:
        in_index(tmp_path, "UPDATE smalls SET data=? WHERE digest=?", manifest[:-1], digest)
    else:
        flip(tmp_path / "small" / "sha256" / digest[7:], 2)
    assert store.read_document(digest) is None
    assert store.put_documents([b"another", manifest]) == [digest_of(b"another"), digest]
    store.close()
    store = open_store(tmp_path)
    assert store.read_document(digest) == manifest and store.read_document(digest_of(b"another")) == b"another"
    assert store.usage().bytes_small == size + 7
    assert store.read_document(digest_of(b"other")) is None
    assert store.put_document(b"") == digest_of(b"") and store.read_document(digest_of(b"")) == b""
    with pytest.raises(TooLarge):
        store.put_document(bytes(DOCUMENT_BYTES_MAX + 1))


def test_old_small_blobs_that_nothing_refers_to_are_swept(tmp_path: Path) -> None:
    """Kept: what a package, a pin or a blob refers to, and what is young."""
    found = sample(30, PIECE)
    store = BlobStore(tmp_path)
    store.begin(found.digest, found.pieces)
    config = encode_config(Config())
    manifest = encode_manifest(Manifest(Descriptor("x", digest_of(config), len(config)), (), ()))
    large = bytes(ROW_BYTES_MAX + 1)
    kept = [
        store.put_document(config),
        store.put_document(manifest),
        store.put_document(b"pinned"),
        found.pieces.digest,
    ]
    store.packages.record("a:1", kept[1])
    store.pins.pin(kept[2], "me")
    strays, young = store.put_documents([b"stray", large]), store.put_document(b"young")
    store.close()
    past = time.time() - DOCUMENT_IDLE_S - 10
    for digest in (*kept, strays[0]):
        in_index(tmp_path, "UPDATE smalls SET stored=? WHERE digest=?", past, digest)
    (tmp_path / "small" / "sha256" / "0123").write_bytes(b"no small blob")
    for path in (tmp_path / "small" / "sha256").iterdir():
        os.utime(path, (past, past))
    store = BlobStore(tmp_path)
    assert all(store.read_document(digest) is not None for digest in [*kept, young])
    assert not any(store.read_document(digest) for digest in strays)
    assert not any((tmp_path / "small" / "sha256").iterdir())
    store.close()


def test_a_store_of_the_last_release_is_read(tmp_path: Path, open_store: Any) -> None:
    """There every small blob was a file."""
    found = sample(35, 2 * PIECE)
    store = open_store(tmp_path)
    fill(store.begin(found.digest, found.pieces), found)
    store.close()
    with sqlite3.connect(tmp_path / "index.sqlite") as database:
        database.execute("DROP TABLE smalls")
        database.execute("PRAGMA user_version=1")
    database.close()
    (tmp_path / "small" / "sha256" / found.pieces.digest[7:]).write_bytes(found.pieces.encode())
    store = open_store(tmp_path)
    blob = store.get(found.digest)
    assert blob is not None and blob.complete and blob.verify() == []
    store.remove(found.digest)
    assert not any((tmp_path / "small" / "sha256").iterdir())


def test_another_piece_list_replaces_a_partial_blob(store: BlobStore) -> None:
    """A partial blob that was begun by another list is begun anew, unless it is in use."""
    found = sample(31, 4 * PIECE)
    other = sample(31, 4 * PIECE, piece_size=2 * PIECE)
    assert found.digest == other.digest
    old = store.begin(found.digest, found.pieces)
    old.write(0, found.piece(0))
    with old.held(), pytest.raises(Conflict):
        store.begin(other.digest, other.pieces)
    new = store.begin(other.digest, other.pieces)
    assert new is not old and len(new.have) == 0 and new.layout == other.pieces.layout
    fill(new, other)
    assert store.begin(found.digest, found.pieces) is new, "complete, and its SHA-256 is its name"


@pytest.mark.parametrize("reopened", [False, True])
def test_a_partial_blob_whose_content_was_removed_is_begun_anew(
    tmp_path: Path, open_store: Any, reopened: bool
) -> None:
    """While the store is open, as somebody does that needs room: what is written to a file that
    nobody finds makes no blob, and the next attempt does not go on with it."""
    store, found = open_store(tmp_path / "store"), sample(7, 4 * PIECE)
    store.begin(found.digest, found.pieces).write(0, found.piece(0))
    if reopened:
        store.close()
        store = open_store(tmp_path / "store")
    with store.begin(found.digest, found.pieces).held() as blob:
        data_file(store.root, found.digest).unlink()
        with pytest.raises(P2PDistError):
            fill(blob, found)
        assert store.begin(found.digest, found.pieces) is blob, "it is in use"
    blob = store.begin(found.digest, found.pieces)
    assert not blob.have
    fill(blob, found)
    assert complete_file(store.root, found.digest).read_bytes() == found.data


def test_a_blob_that_two_pulls_begin_at_once_is_not_taken_for_one_without_files(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One looks whether its content is where it belongs, while the other one closes it."""
    found, fstat = sample(1, PIECE), os.fstat
    blob = store.begin(found.digest, found.pieces)

    def closed_meanwhile(fd: int) -> os.stat_result:
        with blob.held():
            pass
        assert blob.files.fd < 0
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", closed_meanwhile)
    assert store.begin(found.digest, found.pieces) is blob
    monkeypatch.undo()
    fill(blob, found)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_bitmap_that_was_removed_is_written_anew(tmp_path: Path, open_store: Any, reopened: bool) -> None:
    store, found = open_store(tmp_path / "store"), sample(7, 4 * PIECE)
    store.begin(found.digest, found.pieces).write(0, found.piece(0))
    if reopened:
        store.close()
        store = open_store(tmp_path / "store")
    bitmap_file(store.root, found.digest).unlink()
    blob = store.begin(found.digest, found.pieces)
    assert list(blob.have) == [0]
    blob.write(2, found.piece(2))
    bitmap = read_bitmap(bitmap_file(store.root, found.digest), found.count)
    assert bitmap is not None and list(bitmap.pieces) == [0, 2]


def test_a_lying_piece_list_does_not_keep_its_place(store: BlobStore) -> None:
    """Content that was complete by its list, but is not what the name says, gives way to the list
    of another package."""
    liar, found = sample(32, PIECE), sample(33, PIECE)
    fill(store.begin(found.digest, liar.pieces), liar)
    blob = store.begin(found.digest, found.pieces)
    assert not blob.complete and len(blob.have) == 0
    fill(blob, found)
    assert content_digest(blob) == found.digest


def test_a_lost_piece_list_is_said(tmp_path: Path) -> None:
    found = sample(34, PIECE)
    store = BlobStore(tmp_path)
    fill(store.begin(found.digest, found.pieces), found)
    store.close()
    in_index(tmp_path, "DELETE FROM smalls WHERE digest=?", found.pieces.digest)
    store = BlobStore(tmp_path)
    blob = store.get(found.digest)
    assert blob is not None and read_piece(blob, 0) == found.data
    with pytest.raises(Corrupt, match="lost the piece list"):
        blob.verify()
    store.close()


def test_a_damaged_index_is_said_with_a_remedy(tmp_path: Path) -> None:
    BlobStore(tmp_path).close()
    (tmp_path / "index.sqlite").write_bytes(b"no database at all" * 1000)
    with pytest.raises(Corrupt, match="Move the store directory away"):
        BlobStore(tmp_path)
    (tmp_path / "index.sqlite").unlink()
    BlobStore(tmp_path).close()


def test_a_directory_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(P2PDistError, match="cannot be used"):
        BlobStore(tmp_path / "file")


def test_blobs_end_with_their_store(tmp_path: Path) -> None:
    """After close() a blob says why it cannot be used, and changes nothing."""
    found = sample(35, 2 * PIECE)
    store = BlobStore(tmp_path)
    blob = store.begin(found.digest, found.pieces)
    blob.write(0, found.piece(0))
    store.close()
    for use in (lambda: blob.write(1, found.piece(1)), lambda: read_piece(blob, 0), blob.hold, lambda: blob.verify()):
        with pytest.raises(NotFound, match="the store is closed"):
            use()
    assert not any(data_file(tmp_path, found.digest).read_bytes()[PIECE:])
    assert not complete_file(tmp_path, found.digest).exists()
