"""What survives kill -9 and the loss of the machine: every verified piece, and never a wrong byte
as good."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_child import FIRST, LIFE, VOUCHED
from store_rig import (
    PIECE,
    Sample,
    bitmap_file,
    complete_file,
    data_file,
    files,
    fill,
    flip,
    in_index,
    pretend_other_boot,
    read_piece,
    sample,
)

from p2pdist.model.pieces import PieceSet
from p2pdist.store.blobs.bitmap import BitmapFile, has_bitmap
from p2pdist.store.blobs.blob import Blob, check_whole, unmark
from p2pdist.store.blobs.vouched_pieces import Listing
from p2pdist.store.disk import boot_id
from p2pdist.store.store import BlobStore

CHILD = Path(__file__).parent / "crash_child.py"


def held(store: BlobStore, digest: str) -> Blob:
    blob = store.get(digest)  # type: ignore[arg-type]
    assert blob is not None
    return blob


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [1, 100, 250])
def test_a_killed_writer_loses_no_piece_it_had_reported(tmp_path: Path, wanted: int) -> None:
    """SIGKILL while four threads write: each piece whose write() had returned is held, all held
    pieces verify, and the rest can follow."""
    found, threads = sample(50, 400 * PIECE - 9), 4
    command = [sys.executable, str(CHILD), "write", str(tmp_path), str(len(found.data)), str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            for _ in range(wanted):
                child.stdout.readline()
        finally:
            child.kill()
        reported = wanted + sum(line != b"end" for line in child.stdout.read().splitlines())
    store = BlobStore(tmp_path)
    blob = held(store, found.digest)
    assert reported <= len(blob.have) <= reported + threads
    assert blob.verify() == []
    on_disk = blob.path.read_bytes()
    written = sum(on_disk[piece * PIECE :][:PIECE] == found.piece(piece) for piece in range(found.count))
    assert written - len(blob.have) <= threads, "bytes that were written but not marked are fetched twice"
    fill(blob, found)
    assert blob.path.read_bytes() == found.data
    store.close()


@pytest.mark.slow
def test_a_process_may_be_killed_at_every_step(tmp_path: Path) -> None:
    """A process that does everything a store can do is killed at each of its changes of the disk in
    turn. Each time, the store opens, holds only right bytes, has no stray file and can be filled;
    and also if the machine was lost with it and all that was not synchronised."""
    done = subprocess.run(
        [sys.executable, str(CHILD), "steps", str(tmp_path)], capture_output=True, text=True, check=True
    )
    count, status = map(int, done.stdout.split())
    assert status == 0 and count > 50, done.stdout
    for number in range(count):
        root = tmp_path / str(number)
        if root.exists():
            lost = tmp_path / "lost"
            shutil.copytree(root, lost)
            _check_recovery(root)
            _lose_machine(lost, number)
            _check_recovery(lost)
            shutil.rmtree(lost)


def _lose_machine(root: Path, seed: int) -> None:
    """Another boot, and half of the blocks that nobody synchronised have become zeros."""
    if (root / "partial").exists() and (root / "index.sqlite").exists():
        _pretend_other_boot(root)
        choice = random.Random(seed)
        for path in [*(root / "partial").glob("*.data"), *(root / "blobs" / "sha256").iterdir()]:
            path.chmod(0o644)
            with path.open("r+b") as file:
                for offset in range(0, path.stat().st_size, 4096):
                    if choice.random() < 0.02:
                        file.seek(offset)
                        file.write(bytes(10))


def _pretend_other_boot(root: Path) -> None:
    """An index that was killed while it was made has no tables yet, and a bitmap no header."""
    with sqlite3.connect(root / "index.sqlite") as database:
        tables = database.execute("SELECT count(*) FROM sqlite_master WHERE name='trees'").fetchone()[0]
    database.close()
    for path in (root / "partial").glob("*.have"):
        if path.stat().st_size < 64:
            path.unlink()
    if tables:
        pretend_other_boot(root)


def _check_recovery(root: Path) -> None:
    store = BlobStore(root)
    try:
        expected = set()
        for blob in store.blobs():
            found = next(item for item in LIFE if item.digest == blob.digest)
            if found is FIRST and (root / "flipped").exists() and not (root / "dropped").exists():
                # Killed after the bit was flipped behind the store's back and before it had looked.
                blob.verify(drop=True)
            assert blob.verify() == []
            vouched = blob.vouched
            wrong = {0} if vouched is not None else set()  # of which another round lists something else
            for piece in blob.have:
                assert read_piece(blob, piece) == found.piece(piece) or piece in wrong
            assert blob.complete == blob.have.complete or vouched is not None
            expected.add(blob.path)
            if vouched is not None:
                expected.add(blob.path.with_suffix(".hashes"))
            if has_bitmap(blob.layout) and not blob.complete:
                expected.add(bitmap_file(root, blob.digest))
        assert files(root) == {path.relative_to(root).as_posix() for path in expected}
        for found in LIFE:
            blob = fill_vouched(store) if found is VOUCHED else fill(store.begin(found.digest, found.pieces), found)
            assert blob.path.read_bytes() == found.data
    finally:
        store.close()


def fill_vouched(store: BlobStore) -> Blob:
    """What is left is listed and comes; only the whole makes it complete."""
    with (blob := store.begin_vouched(VOUCHED.digest, len(VOUCHED.data))).held():
        blob.release()
        if blob.vouched is not None:
            unmark(blob, blob.vouched.put(Listing(7, tuple(range(VOUCHED.count)), VOUCHED.pieces.hashes)))
            fill(blob, VOUCHED, finish=False)
            assert check_whole(blob).matches
        else:
            fill(blob, VOUCHED, finish=False)
        blob.finish()
    return blob


def test_a_partial_blob_of_another_boot_is_verified(tmp_path: Path) -> None:
    """Of five marked pieces one was torn when the machine was lost: that one is dropped, the others
    are held, and the next opening has nothing left to check."""
    found = sample(51, 8 * PIECE)
    store = BlobStore(tmp_path)
    blob = store.begin(found.digest, found.pieces)
    for piece in range(5):
        blob.write(piece, found.piece(piece))
    store.close()
    pretend_other_boot(tmp_path)
    flip(data_file(tmp_path, found.digest), 2 * PIECE + 1)
    for _ in range(2):
        store = BlobStore(tmp_path)
        assert list(held(store, found.digest).have) == [0, 1, 3, 4]
        store.close()
    fill_again = BlobStore(tmp_path)
    fill(held(fill_again, found.digest), found)
    fill_again.close()


def test_marks_of_this_boot_and_clean_marks_are_believed(tmp_path: Path) -> None:
    """No re-reading where none is needed: a bit flipped behind the store's back goes unnoticed,
    which shows that nothing was read. A store that is closed in order is clean, so the same holds
    after a restart of the machine."""
    found = sample(52, 4 * PIECE)
    store = BlobStore(tmp_path)
    blob = store.begin(found.digest, found.pieces)
    for piece in range(3):
        blob.write(piece, found.piece(piece))
    store.close()
    flip(data_file(tmp_path, found.digest), 10)
    have = bitmap_file(tmp_path, found.digest)
    assert have.read_bytes()[36] == 1
    with have.open("r+b") as file:
        file.seek(16)
        file.write(bytes(16))
    store = BlobStore(tmp_path)
    assert list(held(store, found.digest).have) == [0, 1, 2]
    held(store, found.digest).write(3, found.piece(3))
    assert have.read_bytes()[36] == 0, "the first bit that is set ends the clean state, under this boot"
    assert have.read_bytes()[16:32] != bytes(16)
    store.close()


@pytest.mark.parametrize("torn", [False, True])
def test_a_blob_of_one_piece_is_known_by_its_content(tmp_path: Path, torn: bool) -> None:
    """It has no bitmap. A process that dies after the piece was written has lost nothing; a machine
    that is lost with half of it on the disk leaves nothing that is believed."""
    found = sample(65, PIECE - 1)
    store = BlobStore(tmp_path / "killed")
    assert store.begin(found.digest, found.pieces).write(0, found.piece(0))
    assert not bitmap_file(tmp_path / "killed", found.digest).exists()
    shutil.copytree(tmp_path / "killed", tmp_path / "left")
    store.close()
    if torn:
        flip(data_file(tmp_path / "left", found.digest), 4096)
    store = BlobStore(tmp_path / "left")
    assert held(store, found.digest).complete is not torn
    assert list(held(store, found.digest).have) == ([] if torn else [0])
    assert fill(held(store, found.digest), found).path.read_bytes() == found.data
    store.close()


def test_a_damaged_bitmap_costs_a_verification_not_the_pieces(tmp_path: Path) -> None:
    found = sample(53, 4 * PIECE)
    for damage in (b"", b"nonsense" * 20, None):
        store = BlobStore(tmp_path)
        blob = store.begin(found.digest, found.pieces)
        for piece in (0, 2):
            blob.write(piece, found.piece(piece))
        store.close()
        have = bitmap_file(tmp_path, found.digest)
        if damage is None:
            have.unlink()
        else:
            have.write_bytes(damage)
        store = BlobStore(tmp_path)
        assert list(held(store, found.digest).have) == [0, 2]
        store.drop_partial(found.digest)
        store.close()


def test_a_complete_blob_of_another_boot_is_verified_unless_durable(tmp_path: Path) -> None:
    """Lost pieces make it partial again; with all pieces right it stays complete; once it is
    durable nothing is read."""
    torn, right, durable = sample(54, 3 * PIECE), sample(55, 3 * PIECE), sample(56, 3 * PIECE)
    store = BlobStore(tmp_path)
    for found in (torn, right):
        fill(store.begin(found.digest, found.pieces), found)
    store.close()
    pretend_other_boot(tmp_path)
    flip(complete_file(tmp_path, torn.digest), PIECE)
    store = BlobStore(tmp_path)
    assert held(store, torn.digest).have.missing() == [1] and not held(store, torn.digest).complete
    assert held(store, right.digest).complete
    fill(store.begin(durable.digest, durable.pieces), durable)
    deadline = time.monotonic() + 60
    while not _durable(tmp_path, durable.digest) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _durable(tmp_path, durable.digest), "durable soon after finish(), not only at close()"
    store.close()


def _durable(root: Path, digest: str) -> bool:
    database = sqlite3.connect(root / "index.sqlite")
    try:
        return bool(database.execute("SELECT durable FROM blobs WHERE digest=?", (digest,)).fetchone()[0])
    finally:
        database.close()


def test_a_bitmap_is_believed_before_the_index(tmp_path: Path) -> None:
    """A process died after it had found a bad piece in a complete blob and written the bitmap, and
    before the index knew."""
    found = sample(59, 3 * PIECE)
    store = BlobStore(tmp_path)
    fill(store.begin(found.digest, found.pieces), found)
    store.close()
    BitmapFile.create(bitmap_file(tmp_path, found.digest), PieceSet(3, b"\x05"), boot_id()).close()
    store = BlobStore(tmp_path)
    assert list(held(store, found.digest).have) == [0, 2] and not held(store, found.digest).complete
    store.close()


def test_what_lost_a_piece_is_no_longer_durable(tmp_path: Path) -> None:
    """Or the piece that is written anew would be believed after the loss of the machine, whether or
    not it reached the disk."""
    found = sample(63, 3 * PIECE)
    store = BlobStore(tmp_path)
    fill(store.begin(found.digest, found.pieces), found)
    store.close()
    assert _durable(tmp_path, found.digest)
    store = BlobStore(tmp_path)
    flip(held(store, found.digest).path, 5)
    held(store, found.digest).verify(drop=True)
    assert not _durable(tmp_path, found.digest)
    store.close()


def partial(root: Path, seed: int, held_pieces: tuple[int, ...]) -> Sample:
    """A store that was left with some pieces of a blob of eight."""
    found = sample(seed, 8 * PIECE)
    store = BlobStore(root)
    blob = store.begin(found.digest, found.pieces)
    for piece in held_pieces:
        blob.write(piece, found.piece(piece))
    store.close()
    return found


def flip_bit(root: Path, found: Sample) -> None:
    """Piece 6, which never came, is marked."""
    with bitmap_file(root, found.digest).open("r+b") as file:
        file.seek(64)
        bits = file.read(1)[0]
        file.seek(64)
        file.write(bytes([bits | 1 << 6]))


def flip_data(root: Path, found: Sample) -> None:
    flip(data_file(root, found.digest), 2 * PIECE + 7)


def take_over_bitmap(root: Path, found: Sample) -> None:
    """The bitmap of another blob, of as many pieces, of which others had come."""
    other = sample(71, 8 * PIECE)
    store = BlobStore(root)
    store.begin(other.digest, other.pieces).write(5, other.piece(5))
    store.close()
    shutil.copy(bitmap_file(root, other.digest), bitmap_file(root, found.digest))


def mark_all(root: Path, found: Sample) -> None:
    with bitmap_file(root, found.digest).open("r+b") as file:
        file.seek(64)
        file.write(b"\xff")


def claim_complete(root: Path, found: Sample) -> None:
    """The index takes it for complete and on the disk, and there is no bitmap."""
    bitmap_file(root, found.digest).unlink()
    in_index(root, "UPDATE blobs SET complete=1, durable=1 WHERE digest=?", found.digest)


def lengthen(root: Path, found: Sample) -> None:
    with data_file(root, found.digest).open("ab") as file:
        file.write(bytes(100))


@pytest.mark.parametrize("damage", [flip_bit, flip_data, take_over_bitmap, mark_all, claim_complete, lengthen])
def test_what_changed_at_rest_never_becomes_complete(tmp_path: Path, damage: Callable[[Path, Sample], None]) -> None:
    """Under the boot that marks are believed of: wrong pieces are dropped when the blob is gone on
    with, and fetched again."""
    found = partial(tmp_path, 70, (0, 1, 2, 3))
    damage(tmp_path, found)
    store = BlobStore(tmp_path)
    blob = store.begin(found.digest, found.pieces)
    assert not blob.complete and blob.verify() == []
    assert fill(blob, found).path.read_bytes() == found.data
    store.close()


def test_pieces_of_an_earlier_process_are_read_again_once(tmp_path: Path) -> None:
    """And not at the opening, which may not take as long as it takes to read a large blob."""
    found = partial(tmp_path, 72, (0, 1))
    flip(data_file(tmp_path, found.digest), 3)
    store = BlobStore(tmp_path)
    blob = held(store, found.digest)
    assert list(blob.have) == [0, 1]
    assert blob.recheck() == [0] and list(blob.have) == [1]
    flip(data_file(tmp_path, found.digest), PIECE + 3)
    assert blob.recheck() == []
    blob.verify(drop=True)
    assert fill(blob, found).path.read_bytes() == found.data
    store.close()


@pytest.mark.parametrize(
    "change", ["size=size+1", "size=1<<61", "size=-1", "piece_size=0", "piece_size=piece_size*2", "piece_size=3"]
)
@pytest.mark.parametrize("pieces", [4, 8])
def test_a_row_that_contradicts_the_piece_list_is_dropped(tmp_path: Path, change: str, pieces: int) -> None:
    """The store opens, whatever a damaged index says of a blob, and the blob can be fetched
    anew."""
    found = sample(73, 8 * PIECE)
    store = BlobStore(tmp_path)
    blob = store.begin(found.digest, found.pieces)
    for piece in range(pieces):
        blob.write(piece, found.piece(piece))
    if pieces == 8:
        blob.finish()
    store.close()
    in_index(tmp_path, f"UPDATE blobs SET {change} WHERE digest=?", found.digest)
    store = BlobStore(tmp_path)
    blob = store.begin(found.digest, found.pieces)
    assert fill(blob, found).path.read_bytes() == found.data
    store.close()


def test_a_complete_file_that_was_cut_short_is_found(tmp_path: Path) -> None:
    found = sample(57, 3 * PIECE)
    store = BlobStore(tmp_path)
    fill(store.begin(found.digest, found.pieces), found)
    store.close()
    path = complete_file(tmp_path, found.digest)
    path.chmod(0o644)
    os.truncate(path, 2 * PIECE)
    store = BlobStore(tmp_path)
    assert held(store, found.digest).have.missing() == [2]
    fill(held(store, found.digest), found)
    assert path.read_bytes() == found.data
    store.close()


def test_leftovers_are_removed(tmp_path: Path) -> None:
    """Files that belong to no blob, and index rows without a file, go at the next opening."""
    found = sample(58, PIECE)
    store = BlobStore(tmp_path)
    fill(store.begin(found.digest, found.pieces), found)
    store.close()
    complete_file(tmp_path, found.digest).unlink()
    for name in ("tmp/0123", "partial/feed.data", "partial/feed.have", "blobs/sha256/feed"):
        (tmp_path / name).write_bytes(b"left")
    store = BlobStore(tmp_path)
    assert files(tmp_path) == set() and store.blobs() == []
    store.close()
