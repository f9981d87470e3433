"""Many threads store, list, lose and sum the pieces of one blob at the same time."""

from __future__ import annotations

import hashlib
import random
import threading
from dataclasses import replace

import pytest
from blake3 import blake3
from store_rig import PIECE, sample

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict
from p2pdist.model.pieces import PieceLayout, PieceList, PieceSet
from p2pdist.store.blobs.blob import check_whole, require_vouched, unmark, vouch
from p2pdist.store.blobs.hashes import read_hashes
from p2pdist.store.blobs.vouched_pieces import HashWait, Listing, Unlisted
from p2pdist.store.blobs.whole import SNAPSHOTS, WholeDigest
from p2pdist.store.store import BlobStore

COUNT = 40
RIGHT = sample(1, COUNT * PIECE - 9)
WRONG = sample(2, COUNT * PIECE - 9)


def hash_of(found: object, piece: int) -> bytes:
    return blake3(found.piece(piece)).digest()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(6))
def test_the_whole_is_right_whatever_the_order(store: BlobStore, seed: int) -> None:
    """Writers bring right and wrong versions of each piece, while rounds say now one of them and
    now the other, and a thread sums. In the end everything that is held is what the list says, on
    disk as well, and the sum is that of the file."""
    chance = random.Random(seed)
    blob = store.begin_vouched(RIGHT.digest, len(RIGHT.data))
    state = require_vouched(blob)
    ended = threading.Event()

    def write(source: object, order: list[int]) -> None:
        while not ended.is_set():
            for piece in order:
                wait = HashWait()
                threading.Timer(0.01, state.cancel, (wait,)).start() if piece not in blob.have else None
                try:
                    blob.write(piece, source.piece(piece), wait)  # type: ignore[attr-defined]
                except Unlisted:
                    continue

    def follow() -> None:
        while not ended.is_set():
            with blob.held():
                state.whole.follow(blob.fileno, bytes_max=5 * PIECE)

    orders = [chance.sample(range(COUNT), COUNT) for _ in range(4)]
    threads = [threading.Thread(target=write, args=(RIGHT if n % 2 else WRONG, orders[n])) for n in range(4)]
    threads.append(threading.Thread(target=follow))
    for thread in threads:
        thread.start()
    for round_ in range(12):
        pieces = tuple(chance.sample(range(COUNT), 30))
        hashes = [hash_of(chance.choice((RIGHT, WRONG)), piece) for piece in pieces]
        unmark(blob, state.put(Listing(round_, pieces, b"".join(hashes))))
    every = tuple(range(COUNT))
    unmark(blob, state.put(Listing(12, every, RIGHT.pieces.hashes)))
    while not blob.have.complete:
        ended.wait(0.005)
    ended.set()
    for thread in threads:
        thread.join()
    assert not blob.verify()
    stored = read_hashes(store.root / "partial" / f"{RIGHT.digest[7:]}.hashes", COUNT)
    assert stored is not None and {piece: slot.hash for piece, slot in stored.items()} == {
        piece: hash_of(RIGHT, piece) for piece in every
    }
    assert check_whole(blob).matches
    blob.finish()
    assert blob.path.read_bytes() == RIGHT.data


def test_the_sum_goes_back_no_further_than_it_must(store: BlobStore) -> None:
    """It reads a part of the blob again, not all, when a late piece was wrong."""
    blob = store.begin_vouched(RIGHT.digest, len(RIGHT.data))
    state = require_vouched(blob)
    for piece in range(COUNT):
        vouch(blob, piece, (WRONG if piece == COUNT - 2 else RIGHT).piece(piece))
    assert not check_whole(blob).matches
    unmark(blob, state.put(Listing(1, (COUNT - 2,), hash_of(RIGHT, COUNT - 2))))
    blob.write(COUNT - 2, RIGHT.piece(COUNT - 2))
    assert state.whole._due() and state.whole._next >= COUNT - 2 - COUNT // SNAPSHOTS
    assert check_whole(blob).matches


def test_a_blob_that_changes_while_it_is_completed_is_not_complete(store: BlobStore) -> None:
    """A piece turns out to be wrong on the disk after the whole matched, and comes again as another
    list has it, while the first list is being written."""
    blob = store.begin_vouched(RIGHT.digest, len(RIGHT.data))
    for piece in range(COUNT):
        vouch(blob, piece, RIGHT.piece(piece))
    assert check_whole(blob).matches
    keep = blob._context.keep

    def changed(pieces: PieceList) -> Digest:
        blob.drop([3])
        vouch(blob, 3, WRONG.piece(3), prevail=True)
        return keep(pieces)

    blob._context = replace(blob._context, keep=changed)
    with pytest.raises(Conflict):
        blob.finish()
    assert not blob.complete and not check_whole(blob).matches


def test_a_piece_that_is_lost_while_it_is_summed_is_summed_again(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The guard is taken by the one that loses it, in the middle of the reading."""
    layout = PieceLayout(3 * PIECE, PIECE)
    have, guard = PieceSet.full(3), threading.Condition()
    whole = WholeDigest(layout, have, guard)
    path = tmp_path / "blob"
    path.write_bytes(WRONG.data[: 3 * PIECE])
    read = 0

    def fileno() -> int:
        nonlocal read
        read += 1
        if read == 2:
            with guard:
                whole.lost(1)
                have.discard(1)
        return file.fileno()

    with path.open("r+b") as file:
        assert not whole.follow(fileno)
        with whole.busy, guard:
            assert whole.hexdigest() == ""
        file.write(RIGHT.data[: 3 * PIECE])
        file.flush()
        with guard:
            whole.lost(0)
            have.add(1)
        whole.follow(file.fileno)
        with whole.busy, guard:
            assert whole.hexdigest() == hashlib.sha256(RIGHT.data[: 3 * PIECE]).hexdigest()
