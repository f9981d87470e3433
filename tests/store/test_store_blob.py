"""One blob: writing, reading, finishing, checking and giving it away."""

from __future__ import annotations

import os
import random
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from store_rig import KIB, PIECE, complete_file, data_file, fill, flip, read_piece, sample

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Conflict, NotFound, P2PDistError, UsageError
from p2pdist.store.blobs import blob as blob_module
from p2pdist.store.blobs.audit import wrong_pieces
from p2pdist.store.blobs.blob import content_digest
from p2pdist.store.scrub import read_blob
from p2pdist.store.store import BlobStore


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 17])
def test_a_blob_of_any_size_comes_back_as_it_was(store: BlobStore, size: int) -> None:
    """Pieces in any order, then finish: the file, read() and read_range() all give the content, and
    the file is read-only."""
    found = sample(1, size)
    blob = store.begin(found.digest, found.pieces)
    order = list(range(found.count))
    random.Random(2).shuffle(order)
    for piece in order:
        assert piece not in blob.have
        assert blob.write(piece, memoryview(bytearray(found.piece(piece))))
        assert piece in blob.have
        assert read_piece(blob, piece) == found.piece(piece)
    blob.finish()
    blob.finish()
    assert blob.complete
    assert blob.path == complete_file(store.root, found.digest)
    assert blob.path.read_bytes() == found.data
    assert stat.S_IMODE(blob.path.stat().st_mode) == 0o444
    assert blob.read_range(0, size) == found.data
    assert blob.read_range(size // 3, size // 2) == found.data[size // 3 :][: size // 2]
    assert content_digest(blob) == found.digest
    assert blob.verify() == []
    assert store.get(found.digest) is blob


def test_wrong_bytes_are_refused_and_leave_no_trace(store: BlobStore) -> None:
    """A flipped bit, another piece's bytes, a short and a long piece are all False, and the file
    stays empty."""
    found = sample(3, 3 * PIECE + 5)
    blob = store.begin(found.digest, found.pieces)
    wrong = bytearray(found.piece(1))
    wrong[77] ^= 1
    for piece, data in [
        (1, wrong),
        (1, found.piece(0)),
        (1, found.piece(1)[:-1]),
        (1, found.piece(1) + b"x"),
        (3, b""),
        (3, found.piece(3) + bytes(PIECE - 5)),
    ]:
        assert blob.write(piece, data) is False
    assert len(blob.have) == 0
    assert not any(data_file(store.root, found.digest).read_bytes())
    with pytest.raises(NotFound):
        read_piece(blob, 1)


def test_a_piece_that_is_held_is_not_written_again(store: BlobStore) -> None:
    """The answer is True whatever the bytes, and the file keeps the verified ones."""
    found = sample(4, 2 * PIECE)
    blob = store.begin(found.digest, found.pieces)
    assert blob.write(0, found.piece(0))
    assert blob.write(0, b"anything") is True
    assert read_piece(blob, 0) == found.piece(0)


def test_ranges_need_every_piece_they_touch(store: BlobStore) -> None:
    found = sample(5, 4 * PIECE)
    blob = store.begin(found.digest, found.pieces)
    for piece in (0, 1, 3):
        blob.write(piece, found.piece(piece))
    assert blob.read_range(PIECE - 10, 20) == found.data[PIECE - 10 : PIECE + 10]
    with pytest.raises(NotFound):
        blob.read_range(2 * PIECE - 1, 2)
    assert blob.read_range(4 * PIECE, 0) == b""
    for start, length in [(-1, 2), (0, -1), (4 * PIECE - 1, 2), (5 * PIECE, 0)]:
        with pytest.raises(UsageError):
            blob.read_range(start, length)
    for piece in (-1, 4):
        with pytest.raises(UsageError):
            blob.write(piece, b"")


def test_finish_needs_every_piece(store: BlobStore) -> None:
    found = sample(6, 2 * PIECE)
    blob = store.begin(found.digest, found.pieces)
    blob.write(1, found.piece(1))
    with pytest.raises(Conflict, match="1 of 2 pieces are missing"):
        blob.finish()
    assert not blob.complete
    with pytest.raises(Conflict):
        content_digest(blob)


def test_threads_write_the_same_pieces_at_once(store: BlobStore) -> None:
    """Eight threads, each writing all pieces in an order of its own, mark each piece once and lose
    none."""
    found = sample(7, 100 * PIECE + 1)
    blob = store.begin(found.digest, found.pieces)
    answers: list[bool] = []

    def write(seed: int) -> None:
        order = list(range(found.count))
        random.Random(seed).shuffle(order)
        answers.extend(blob.write(piece, found.piece(piece)) for piece in order)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8 * found.count and all(answers)
    assert len(blob.have) == found.count == len(list(blob.have))
    blob.finish()
    assert blob.path.read_bytes() == found.data


def test_the_descriptor_outlives_finish(store: BlobStore) -> None:
    """A stream that sends from the descriptor goes on while the blob becomes complete; without
    holds the file is closed again."""
    found = sample(8, 2 * PIECE)
    blob = store.begin(found.digest, found.pieces)
    with blob.held():
        fd = blob.fileno()
        fill(blob, found)
        assert blob.fileno() == fd
        assert os.pread(fd, 2 * PIECE, 0) == found.data
    with pytest.raises(OSError):
        os.fstat(fd)
    with pytest.raises(AssertionError):
        blob.fileno()


def test_a_flipped_bit_is_found_and_healed(store: BlobStore) -> None:
    """verify() names the piece; dropping it makes the blob partial on the same descriptor, and
    writing it again completes the blob."""
    found = sample(9, 5 * PIECE)
    blob = fill(store.begin(found.digest, found.pieces), found)
    flip(blob.path, 3 * PIECE + 100)
    assert blob.verify() == [3]
    assert blob.complete, "verify alone changes nothing"
    with blob.held():
        fd = blob.fileno()
        assert blob.verify(drop=True) == [3]
        assert not blob.complete and blob.have.missing() == [3]
        assert blob.path == data_file(store.root, found.digest)
        assert blob.fileno() == fd
        with pytest.raises(NotFound):
            read_piece(blob, 3)
        assert blob.write(3, found.piece(3))
        blob.finish()
        assert os.pread(fd, 5 * PIECE, 0) == found.data
    assert blob.path.read_bytes() == found.data


@pytest.mark.parametrize("reader", ["scrub", "verify"])
@pytest.mark.parametrize("healed", ["complete", "partial"])
def test_what_was_healed_while_a_blob_was_read_is_not_dropped(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, reader: str, healed: str
) -> None:
    """Reading a large blob takes long, and longer while pulls run. A pull that has brought a piece
    again meanwhile counts on it."""
    found = sample(12, 4 * PIECE)
    blob = fill(store.begin(found.digest, found.pieces), found)
    flip(blob.path, 5)
    flip(blob.path, 2 * PIECE)

    def heal() -> None:
        if blob.complete:
            blob.drop([0, 2])
            blob.write(0, found.piece(0))
            if healed == "complete":
                fill(blob, found)

    def read_and_heal(*asked: Any) -> list[int]:
        monkeypatch.undo()
        wrong = wrong_pieces(*asked)
        heal()
        return wrong

    if reader == "scrub":
        read_blob(store, blob, lambda count: heal())
    else:
        monkeypatch.setattr(blob_module, "wrong_pieces", read_and_heal)
        assert blob.verify(drop=True) == []
    assert list(blob.have) == ([0, 1, 2, 3] if healed == "complete" else [0, 1, 3])
    assert blob.complete == (healed == "complete") and blob.verify() == []


def test_a_dropped_piece_stays_dropped_after_reopening(tmp_path: Path) -> None:
    """Both for a blob that was complete and for one that was partial."""
    whole, part = sample(10, 4 * PIECE), sample(11, 4 * PIECE)
    store = BlobStore(tmp_path)
    fill(store.begin(whole.digest, whole.pieces), whole)
    blob = store.begin(part.digest, part.pieces)
    for piece in (0, 2):
        blob.write(piece, part.piece(piece))
    for found in (whole, part):
        blob = store.get(found.digest)
        assert blob is not None
        flip(blob.path, 2 * PIECE)
        assert blob.verify(drop=True) == [2]
    store.close()
    store = BlobStore(tmp_path)
    for found, held in ((whole, [0, 1, 3]), (part, [0])):
        blob = store.get(found.digest)
        assert blob is not None and not blob.complete
        assert list(blob.have) == held
    store.close()


def test_a_shortened_file_is_bad_not_a_crash(store: BlobStore) -> None:
    found = sample(12, 3 * PIECE)
    blob = fill(store.begin(found.digest, found.pieces), found)
    blob.path.chmod(0o644)
    os.truncate(blob.path, PIECE + 10)
    assert blob.verify() == [1, 2]


@pytest.mark.parametrize("size", [0, 10, 3 * PIECE + 1])
def test_give_places_a_copy(store: BlobStore, tmp_path: Path, size: int) -> None:
    """The output has the content, also over an existing file or a symbolic link; no other file is
    left. It is a file of its own: what is written into it, by root too, changes nothing in the
    store."""
    found = sample(13, size)
    blob = fill(store.begin(found.digest, found.pieces), found)
    target = tmp_path / "out"
    target.mkdir()
    output = target / ("x" * 255)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"keep")
    output.symlink_to(elsewhere)
    for _ in range(2):
        assert blob.give(output) in {"reflink", "copy"}
        assert output.read_bytes() == found.data
        assert not output.is_symlink()
        assert not output.samefile(blob.path)
    assert elsewhere.read_bytes() == b"keep"
    assert list(target.iterdir()) == [output]
    with output.open("r+b") as file:
        file.write(b"changed")
    assert blob.verify() == []
    assert blob.read_range(0, size) == found.data


def test_give_says_what_is_wrong(store: BlobStore, tmp_path: Path) -> None:
    found = sample(14, PIECE)
    blob = store.begin(found.digest, found.pieces)
    with pytest.raises(Conflict):
        blob.give(tmp_path / "out")
    fill(blob, found)
    with pytest.raises(Conflict, match="is a directory"):
        blob.give(tmp_path)
    with pytest.raises(NotFound, match="does not exist"):
        blob.give(tmp_path / "nowhere" / "out")
    with pytest.raises(Conflict, match="in the agent's store"):
        blob.give(blob.path.parent / "out")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        before = (tmp_path / name).lstat()
        with pytest.raises(Conflict, match="no file"):
            blob.give(tmp_path / name)
        assert (tmp_path / name).lstat().st_ino == before.st_ino


def test_a_blob_whose_publisher_lied_has_another_sha256(store: BlobStore) -> None:
    """The piece list verifies, but sha256() tells that the content is not what the name says."""
    found = sample(15, PIECE)
    blob = fill(store.begin(digest_of(b"other"), found.pieces), found)
    assert content_digest(blob) == found.digest != blob.digest


def test_a_released_blob_is_held_no_more(store: BlobStore) -> None:
    found = sample(16, 10 * KIB)
    blob = fill(store.begin(found.digest, found.pieces), found)
    blob.hold()
    blob.hold()
    blob.release()
    assert blob.in_use
    with pytest.raises(Conflict, match="in use"):
        store.remove(found.digest)
    blob.release()
    assert not blob.in_use
    store.remove(found.digest)
    with pytest.raises(NotFound):
        blob.hold()
    with pytest.raises(NotFound):
        read_piece(blob, 0)


def test_a_copy_is_written_before_the_blob_is_whole(store: BlobStore, tmp_path: Path) -> None:
    """It has no name before it is published, and is a file of its own afterwards."""
    found = sample(16, 2 * PIECE)
    blob = store.begin(found.digest, found.pieces)
    output = tmp_path / ("x" * 255)
    output.write_bytes(b"old")
    before = set(tmp_path.iterdir())
    copy = blob.begin_copy(output)
    assert copy is not None
    copy.write(PIECE, memoryview(found.data)[PIECE:])
    assert set(tmp_path.iterdir()) == before and output.read_bytes() == b"old"
    copy.write(0, memoryview(found.data)[:PIECE])
    copy.publish()
    copy.close()
    copy.write(0, memoryview(b"late"))  # by a thread that a given up pull left behind
    assert set(tmp_path.iterdir()) == before and output.read_bytes() == found.data


def test_a_copy_appears_in_the_directory_that_it_was_begun_in(store: BlobStore, tmp_path: Path) -> None:
    """A link in its path that leads into the store by then changes nothing there."""
    found = sample(18, PIECE)
    blob = store.begin(found.digest, found.pieces)
    (tmp_path / "here").mkdir()
    link = tmp_path / "link"
    link.symlink_to("here")
    copy = blob.begin_copy(link / blob.path.name)
    assert copy is not None
    copy.write(0, memoryview(found.data))
    link.unlink()
    link.symlink_to(blob.path.parent)
    kept = blob.path.stat().st_ino
    copy.publish()
    copy.close()
    assert (tmp_path / "here" / blob.path.name).read_bytes() == found.data and blob.path.stat().st_ino == kept


def test_a_copy_that_is_given_up_leaves_nothing(store: BlobStore, tmp_path: Path) -> None:
    blob = store.begin(sample(17, PIECE).digest, sample(17, PIECE).pieces)
    before = set(tmp_path.iterdir())
    copy = blob.begin_copy(tmp_path / "out")
    assert copy is not None
    copy.write(0, memoryview(b"some"))
    copy.close()
    copy.close()
    copy.write(0, memoryview(b"late"))
    with pytest.raises(P2PDistError, match="given up"):
        copy.publish()
    assert set(tmp_path.iterdir()) == before
    for name, error in ((".", Conflict), ("nowhere/out", NotFound)):
        with pytest.raises(error):
            blob.begin_copy(tmp_path / name)
    with pytest.raises(Conflict, match="in the agent's store"):
        blob.begin_copy(blob.path.parent / "out")
