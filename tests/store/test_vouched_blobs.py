"""Blobs of which nobody has made a piece list: their pieces are stored by what is vouched for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from store_rig import PIECE, Sample, complete_file, data_file, files, flip, pretend_other_boot, read_piece, sample

from p2pdist.model.digest import Digest, digest_of, hex_of
from p2pdist.model.errors import Conflict, Corrupt, NotFound, UsageError
from p2pdist.store.blobs import blob as blob_module
from p2pdist.store.blobs import vouched_pieces as vouched_module
from p2pdist.store.blobs.blob import Blob, check_whole, require_vouched, unmark, vouch
from p2pdist.store.blobs.vouched_pieces import HashWait, Listing, Unlisted
from p2pdist.store.store import BlobStore

OpenStore = Callable[..., BlobStore]
COUNT = 20
BLOB = sample(1, COUNT * PIECE - 100)


def begin(store: BlobStore, blob: Sample = BLOB) -> Blob:
    return store.begin_vouched(blob.digest, len(blob.data))


def listing(blob: Sample, *pieces: int, round_: int = 0, wrong: bool = False) -> Listing:
    """What a tracker says of these pieces, or a liar does."""
    hashes = [blake3(b"wrong" if wrong else blob.piece(piece)).digest() for piece in pieces]
    return Listing(round_, pieces, b"".join(hashes))


def put(blob: Blob, what: Listing) -> list[int]:
    lost = require_vouched(blob).put(what)
    unmark(blob, lost)
    return lost


def fill(blob: Blob, found: Sample, pieces: range | None = None) -> None:
    every = pieces if pieces is not None else range(found.count)
    put(blob, listing(found, *every))
    for piece in every:
        assert blob.write(piece, found.piece(piece))


def hashes_file(root: Path, digest: Digest) -> Path:
    return root / "partial" / f"{hex_of(digest)}.hashes"


# -- the end


def test_a_blob_is_complete_once_its_whole_matches(store: BlobStore, open_store: OpenStore) -> None:
    """Then it is a blob like any other, with a piece list of its own."""
    blob = begin(store)
    fill(blob, BLOB)
    with pytest.raises(Conflict, match="has not matched"):
        blob.finish()
    assert not blob.complete
    assert check_whole(blob).matches
    blob.finish()
    assert blob.complete and blob.whole and blob.vouched is None
    assert blob.pieces.hashes == BLOB.pieces.hashes
    assert complete_file(store.root, BLOB.digest).read_bytes() == BLOB.data
    assert files(store.root) == {f"blobs/sha256/{hex_of(BLOB.digest)}"}
    blob.release()
    store.close()
    again = open_store(store.root)
    stored = again.get(BLOB.digest)
    assert stored is not None and stored.complete and stored.whole
    assert not stored.verify()


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1])
def test_a_small_blob_is_whole_as_well(store: BlobStore, size: int) -> None:
    found = sample(7, size)
    blob = begin(store, found)
    fill(blob, found)
    assert check_whole(blob).matches
    blob.finish()
    assert complete_file(store.root, found.digest).read_bytes() == found.data


def test_what_is_listed_wrong_does_not_become_complete(store: BlobStore) -> None:
    """All pieces match a list that a liar stated; the whole does not."""
    other = sample(2, len(BLOB.data))
    blob = begin(store)
    put(blob, listing(other, *range(COUNT)))
    for piece in range(COUNT):
        assert blob.write(piece, other.piece(piece))
    assert check_whole(blob) == check_whole(blob)
    comparison = check_whole(blob)
    assert not comparison.matches and not comparison.lost
    with pytest.raises(Conflict):
        blob.finish()


def test_a_round_that_lists_otherwise_brings_the_pieces_again(store: BlobStore) -> None:
    other = sample(2, len(BLOB.data))
    blob = begin(store)
    fill(blob, BLOB, range(COUNT - 3))
    put(blob, listing(other, COUNT - 3, COUNT - 2, COUNT - 1))
    for piece in range(COUNT - 3, COUNT):
        assert blob.write(piece, other.piece(piece))
    assert not check_whole(blob).matches
    lost = put(blob, listing(BLOB, *range(COUNT), round_=1))
    assert lost == [COUNT - 3, COUNT - 2, COUNT - 1] and blob.have.missing() == lost
    for piece in lost:
        assert blob.write(piece, BLOB.piece(piece))
    assert check_whole(blob).matches
    blob.finish()
    assert blob.pieces.hashes == BLOB.pieces.hashes


def test_once_the_whole_has_matched_no_list_changes_it(store: BlobStore) -> None:
    """An arbiter may lie as well, of a blob that is right here."""
    blob = begin(store)
    fill(blob, BLOB)
    assert check_whole(blob).matches
    assert put(blob, listing(BLOB, *range(COUNT), round_=3, wrong=True)) == []
    blob.finish()
    assert blob.pieces.hashes == BLOB.pieces.hashes


def test_a_disk_that_is_wrong_is_not_the_lists_fault(store: BlobStore) -> None:
    """The pieces are dropped, and nothing is said of the whole before they have come again."""
    blob = begin(store)
    fill(blob, BLOB)
    flip(data_file(store.root, BLOB.digest), 3 * PIECE + 5)
    comparison = check_whole(blob)
    assert not comparison.matches and comparison.lost == (3,)
    assert blob.write(3, BLOB.piece(3))
    assert check_whole(blob).matches


# -- waiting for the list


def test_a_piece_waits_for_its_hash(store: BlobStore) -> None:
    blob, wait, results = begin(store), HashWait(), list[bool]()
    writer = threading.Thread(target=lambda: results.append(blob.write(4, BLOB.piece(4), wait)))
    writer.start()
    while wait.piece != 4:
        time.sleep(0.001)
    put(blob, listing(BLOB, 3))
    assert writer.is_alive() and 4 not in blob.have
    put(blob, listing(BLOB, 4))
    writer.join()
    assert results == [True] and read_piece(blob, 4) == BLOB.piece(4) and wait.piece is None


def test_a_receiver_that_is_closed_waits_no_longer(store: BlobStore) -> None:
    blob, wait, results = begin(store), HashWait(), list[str]()

    def write() -> None:
        with pytest.raises(Unlisted) as caught:
            blob.write(4, BLOB.piece(4), wait)
        results.append(str(caught.value))

    writer = threading.Thread(target=write)
    writer.start()
    while wait.piece != 4:
        time.sleep(0.001)
    require_vouched(blob).cancel(wait)
    writer.join()
    assert len(results) == 1 and 4 not in blob.have


def test_wrong_bytes_are_found_wrong(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the list had time to change."""
    blob = begin(store)
    monkeypatch.setattr(vouched_module, "MISMATCH_WAIT_S", 0.05)
    put(blob, listing(BLOB, 4))
    assert not blob.write(4, b"x" * PIECE) and not blob.write(4, BLOB.piece(4)[:-1])
    assert 4 not in blob.have


def test_a_sender_that_knows_of_the_next_round_first_is_right(store: BlobStore) -> None:
    blob, wait, results = begin(store), HashWait(), list[bool]()
    put(blob, listing(BLOB, 4, wrong=True))
    writer = threading.Thread(target=lambda: results.append(blob.write(4, BLOB.piece(4), wait)))
    writer.start()
    while wait.piece != 4:
        time.sleep(0.001)
    put(blob, listing(BLOB, 4, round_=1))
    writer.join()
    assert results == [True]


def test_a_sender_that_has_not_heard_of_the_round_is_not_blamed(store: BlobStore) -> None:
    other, blob = sample(2, len(BLOB.data)), begin(store)
    put(blob, listing(other, 4))
    put(blob, listing(BLOB, 4, round_=1))
    with pytest.raises(Unlisted, match="before"):
        blob.write(4, other.piece(4))


def test_a_list_that_changes_while_a_piece_is_written_is_noticed(
    store: BlobStore, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are on the disk, and it is neither held nor marked."""
    blob, write = begin(store), blob_module.pwrite_all
    put(blob, listing(BLOB, 4))

    def change(fd: int, data: bytes, offset: int) -> None:
        write(fd, data, offset)
        put(blob, listing(BLOB, 4, round_=1, wrong=True))

    monkeypatch.setattr(blob_module, "pwrite_all", change)
    with pytest.raises(Unlisted):
        blob.write(4, BLOB.piece(4))
    assert 4 not in blob.have
    blob.release()
    store.close()
    monkeypatch.undo()
    again = open_store(store.root).get(BLOB.digest)
    assert again is not None and not len(again.have)


def test_a_list_for_other_pieces_is_refused(store: BlobStore) -> None:
    blob = begin(store)
    for wrong in (Listing(0, (COUNT,), bytes(32)), Listing(0, (-1,), bytes(32)), Listing(0, (1, 2), bytes(32))):
        with pytest.raises(UsageError):
            put(blob, wrong)


# -- reading upstream


def test_what_is_read_is_listed_and_stored(store: BlobStore) -> None:
    blob = begin(store)
    digest, stored = vouch(blob, 4, BLOB.piece(4))
    assert stored and digest == BLOB.pieces.hashes[4 * 32 : 5 * 32] and 4 in blob.have
    assert require_vouched(blob).view.read_here() == listing(BLOB, 4)
    assert require_vouched(blob).view.unread(0, 1, doubtful=True) == [piece for piece in range(COUNT) if piece != 4]


def test_what_is_listed_otherwise_is_stated_and_not_stored(store: BlobStore) -> None:
    blob = begin(store)
    put(blob, listing(BLOB, 4, wrong=True))
    digest, stored = vouch(blob, 4, BLOB.piece(4))
    assert not stored and digest == blake3(BLOB.piece(4)).digest() and 4 not in blob.have
    digest, stored = vouch(blob, 4, BLOB.piece(4), prevail=True)
    assert stored and 4 in blob.have


def test_a_short_piece_is_no_piece(store: BlobStore) -> None:
    blob = begin(store)
    with pytest.raises(Conflict):
        vouch(blob, 4, BLOB.piece(4)[:-1])
    assert 4 not in blob.have


def test_the_tracker_may_have_heard_another_host_first(store: BlobStore) -> None:
    """Its list counts, and what this host has read comes again."""
    other, blob = sample(2, len(BLOB.data)), begin(store)
    assert vouch(blob, 4, other.piece(4))[1]
    assert put(blob, listing(BLOB, 4)) == [4] and 4 not in blob.have
    assert not require_vouched(blob).view.read_here().pieces


def test_pieces_that_nobody_vouches_for_are_read_again(store: BlobStore) -> None:
    """As after a new start of tracker and agents."""
    blob = begin(store)
    fill(blob, BLOB, range(4))
    vouch(blob, 5, BLOB.piece(5))
    state = require_vouched(blob)
    state.begin(1)
    rest = [4, *range(6, COUNT)]
    assert state.view.unread(0, 1, doubtful=True) == [*rest, 0, 1, 2, 3]
    assert state.view.unread(0, 1, doubtful=False) == rest
    assert all(map(state.view.is_unread, [0, 4])) and not state.view.is_unread(5)
    assert vouch(blob, 0, BLOB.piece(0))[1] and not state.view.is_unread(0)


# -- restarts


def test_what_was_stored_survives_a_restart(store: BlobStore, open_store: OpenStore) -> None:
    blob = begin(store)
    fill(blob, BLOB, range(10))
    vouch(blob, 12, BLOB.piece(12))
    blob.release()
    store.close()
    again = open_store(store.root)
    blob = begin(again)
    assert sorted(blob.have) == [*range(10), 12]
    state = require_vouched(blob)
    assert state.view.read_here() == listing(BLOB, 12) and not state.complete
    assert state.view.known(0, 100) == listing(BLOB, *range(10), 12)
    fill(blob, BLOB)
    assert check_whole(blob).matches


def test_hashes_that_were_removed_cost_the_pieces(store: BlobStore) -> None:
    """While the store is open: after a kill nothing could be believed of the blob."""
    blob = begin(store)
    fill(blob, BLOB, range(10))
    hashes_file(store.root, BLOB.digest).unlink()
    blob.release()
    blob = begin(store)
    assert not blob.have
    fill(blob, BLOB)
    assert hashes_file(store.root, BLOB.digest).exists() and check_whole(blob).matches


def test_a_lost_machine_costs_what_is_wrong(store: BlobStore, open_store: OpenStore) -> None:
    """Bytes and hashes that did not reach the disk."""
    blob = begin(store)
    fill(blob, BLOB, range(10))
    blob.release()
    store.close()
    pretend_other_boot(store.root)
    flip(data_file(store.root, BLOB.digest), 3 * PIECE)
    flip(hashes_file(store.root, BLOB.digest), 64 + 33 * 5 + 7)
    with hashes_file(store.root, BLOB.digest).open("r+b") as file:
        file.seek(64 + 33 * 6)
        file.write(bytes(33))
    again = open_store(store.root)
    blob = begin(again)
    assert sorted(blob.have) == [0, 1, 2, 4, 7, 8, 9]
    fill(blob, BLOB)
    assert check_whole(blob).matches


def test_a_mark_without_a_hash_is_no_piece(store: BlobStore, open_store: OpenStore) -> None:
    blob = begin(store)
    fill(blob, BLOB, range(10))
    blob.release()
    store.close()
    with hashes_file(store.root, BLOB.digest).open("r+b") as file:
        file.seek(64 + 33 * 6)
        file.write(bytes(33))
    again = open_store(store.root).get(BLOB.digest)
    assert again is not None and sorted(again.have) == [0, 1, 2, 3, 4, 5, 7, 8, 9]


@pytest.mark.parametrize("damage", ["gone", "short", "other"])
def test_without_hashes_nothing_is_believed(store: BlobStore, open_store: OpenStore, damage: str) -> None:
    blob = begin(store)
    fill(blob, BLOB, range(10))
    blob.release()
    store.close()
    path = hashes_file(store.root, BLOB.digest)
    match damage:
        case "gone":
            path.unlink()
        case "short":
            path.write_bytes(path.read_bytes()[:-1])
        case "other":
            path.write_bytes(b"x" + path.read_bytes()[1:])
    again = open_store(store.root)
    assert again.get(BLOB.digest) is None and files(again.root) == set()
    blob = begin(again)
    assert not len(blob.have)


def test_a_whole_that_was_not_compared_is_after_a_restart(store: BlobStore, open_store: OpenStore) -> None:
    """All pieces are there: that does not make it complete."""
    blob = begin(store)
    fill(blob, BLOB)
    blob.release()
    store.close()
    again = open_store(store.root)
    stored = again.get(BLOB.digest)
    assert stored is not None and not stored.complete and stored.have.complete
    blob = begin(again)
    assert check_whole(blob).matches
    blob.finish()
    assert blob.complete


def test_an_earlier_release_drops_what_it_cannot_verify(store: BlobStore) -> None:
    """It finds the name of a piece list that is not there."""
    begin(store)
    row = next(entry for entry in store._index.entries())
    assert row.digest == BLOB.digest and store.read_document(row.pieces_digest) is None


# -- what is there already


def test_a_complete_blob_is_read_once(store: BlobStore, open_store: OpenStore) -> None:
    """What came by a piece list is not what its name says before its SHA-256 was compared."""
    with store.begin_held(BLOB.digest, BLOB.pieces).held() as blob:
        for piece in range(COUNT):
            blob.write(piece, BLOB.piece(piece))
        blob.finish()
        blob.release()
    assert not blob.whole
    again = begin(store)
    assert again is blob and blob.complete and blob.whole
    again.release()
    store.close()
    stored = open_store(store.root).get(BLOB.digest)
    assert stored is not None and stored.whole


def test_a_complete_blob_of_a_lying_list_is_begun_anew(store: BlobStore) -> None:
    digest = digest_of(b"something else")
    blob = store.begin_held(digest, BLOB.pieces)
    for piece in range(COUNT):
        blob.write(piece, BLOB.piece(piece))
    blob.finish()
    with pytest.raises(Conflict):
        store.begin_vouched(digest, len(BLOB.data))
    blob.release()
    again = store.begin_vouched(digest, len(BLOB.data))
    assert again is not blob and not len(again.have) and again.vouched is not None


def test_a_partial_blob_of_a_list_that_may_lie_is_begun_anew(store: BlobStore) -> None:
    blob = store.begin_held(BLOB.digest, BLOB.pieces)
    blob.write(0, BLOB.piece(0))
    blob.release()
    again = begin(store)
    assert again.vouched is not None and not len(again.have)


def test_a_whole_blob_that_lost_a_piece_is_verified_by_its_list(store: BlobStore) -> None:
    blob = begin(store)
    fill(blob, BLOB)
    assert check_whole(blob).matches
    blob.finish()
    flip(complete_file(store.root, BLOB.digest), 5)
    assert blob.verify(drop=True) == [0] and not blob.complete
    blob.release()
    again = begin(store)
    assert again is blob and blob.vouched is None
    assert not blob.write(0, b"x" * PIECE) and blob.write(0, BLOB.piece(0))
    blob.finish()
    assert blob.complete


def test_another_size_is_another_blob(store: BlobStore) -> None:
    begin(store).release()
    blob = store.begin_vouched(BLOB.digest, len(BLOB.data) + 1)
    assert blob.size == len(BLOB.data) + 1
    for wrong in (-1, 1, 1 << 60):
        with pytest.raises(UsageError):
            store.begin_vouched(digest_of(b""), wrong)
    with pytest.raises(UsageError):
        store.begin_vouched(BLOB.digest, 0)


def test_a_lie_about_its_size_does_not_cost_a_blob_that_is_here(store: BlobStore) -> None:
    """Anyone may push a manifest that names it."""
    blob = begin(store)
    fill(blob, BLOB)
    assert check_whole(blob).matches
    blob.finish()
    blob.release()
    for wrong in (1, BLOB.pieces.layout.size - 1, BLOB.pieces.layout.size + 1):
        with pytest.raises(Corrupt):
            store.begin_vouched(BLOB.digest, wrong)
    assert begin(store) is blob and blob.complete


def test_a_package_may_name_what_is_vouched_for(store: BlobStore) -> None:
    """Its list is one list, and the vouched one another: the blob is begun anew, unless it is in
    use."""
    blob = begin(store)
    with pytest.raises(Conflict):
        store.begin_held(BLOB.digest, BLOB.pieces)
    blob.release()
    again = store.begin_held(BLOB.digest, BLOB.pieces)
    assert again.vouched is None and again.pieces_digest == BLOB.pieces.digest


def test_it_can_be_removed(store: BlobStore) -> None:
    blob = begin(store)
    fill(blob, BLOB, range(3))
    with pytest.raises(Conflict):
        store.drop_partial(BLOB.digest)
    blob.release()
    store.drop_partial(BLOB.digest)
    assert files(store.root) == set() and store.get(BLOB.digest) is None
    with pytest.raises(NotFound):
        blob.write(5, BLOB.piece(5))
