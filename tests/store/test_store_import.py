"""Pieces that another writer left in a blob's file count once they have verified, and not
before."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_rig import PIECE, data_file, sample

from p2pdist.model.errors import Conflict, P2PDistError, UsageError
from p2pdist.store.blobs.blob import content_digest
from p2pdist.store.store import BlobStore

FOUND = sample(70, 3 * PIECE - 9)


def lay(root: Path, offset: int, data: bytes) -> None:
    """Write into the data file as libtorrent does."""
    with data_file(root, FOUND.digest).open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_right_bytes_are_adopted_and_survive(tmp_path: Path) -> None:
    """A piece is held after import_piece(), also for whoever opens the store next; a blob of
    imported pieces is complete."""
    store = BlobStore(tmp_path)
    blob = store.begin(FOUND.digest, FOUND.pieces)
    for piece in (0, 2):
        lay(tmp_path, piece * PIECE, FOUND.piece(piece))
        assert blob.import_piece(piece)
        assert blob.import_piece(piece), "once more"
    store.close()
    store = BlobStore(tmp_path)
    again = store.get(FOUND.digest)
    assert again is not None
    assert list(again.have) == [0, 2]
    assert again.write(1, FOUND.piece(1))
    again.finish()
    assert content_digest(again) == FOUND.digest
    store.close()


def test_wrong_bytes_are_not(tmp_path: Path) -> None:
    """Neither what nobody wrote, nor one wrong bit, nor another piece's bytes."""
    store = BlobStore(tmp_path)
    blob = store.begin(FOUND.digest, FOUND.pieces)
    assert not blob.import_piece(0)
    wrong = bytearray(FOUND.piece(0))
    wrong[100] ^= 1
    lay(tmp_path, 0, bytes(wrong))
    assert not blob.import_piece(0)
    lay(tmp_path, PIECE, FOUND.piece(0))
    assert not blob.import_piece(1)
    assert len(blob.have) == 0
    with pytest.raises(Conflict):
        blob.finish()
    store.close()


def test_what_cannot_be_adopted(tmp_path: Path) -> None:
    """A piece that does not exist, and one of a blob that was removed; a file that was cut short
    holds no piece beyond its end."""
    store = BlobStore(tmp_path)
    blob = store.begin(FOUND.digest, FOUND.pieces)
    with pytest.raises(UsageError):
        blob.import_piece(3)
    with blob.path.open("r+b") as file:
        file.truncate(PIECE)
    assert not blob.import_piece(1)
    store.remove(FOUND.digest)
    with pytest.raises(P2PDistError):
        blob.import_piece(0)
    store.close()
