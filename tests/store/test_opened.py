"""What a store knows of what was decrypted on its host."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from store_rig import fill, keep_from_removal, sample

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import P2PDistError
from p2pdist.store.store import BlobStore, begin_opened

ENCRYPTED = Digest("sha256:" + "ab" * 32)


def version(root: Path) -> int:
    with sqlite3.connect(root / "index.sqlite") as database:
        return int(database.execute("PRAGMA user_version").fetchone()[0])


def test_the_mark_lasts_as_long_as_the_blob(tmp_path: Path) -> None:
    found = sample(1, 100_000)
    digest = found.digest
    store = BlobStore(tmp_path)
    before = version(tmp_path)
    store.opened.record({digest: ENCRYPTED})
    fill(store.begin(digest, found.pieces), found)
    store.close()
    assert version(tmp_path) == before + 1, "a release that would serve it does not open the store"
    store = BlobStore(tmp_path)
    assert digest in store.opened and store.opened.encrypted() == {digest: ENCRYPTED}
    store.remove(digest)
    assert digest not in store.opened
    store.close()
    store = BlobStore(tmp_path)
    assert digest not in store.opened and version(tmp_path) == before
    store.close()


def test_what_could_not_be_removed_leaves_the_mark_of_what_is_decrypted_in_its_place(tmp_path: Path) -> None:
    """Else other hosts would get it."""
    found = sample(1, 100_000)
    store = BlobStore(tmp_path)
    fill(store.begin(found.digest, found.pieces), found)
    with keep_from_removal(tmp_path), pytest.raises(P2PDistError):
        store.remove(found.digest)
    blob = begin_opened(store, found.digest, found.pieces, ENCRYPTED)
    assert blob is not None and not blob.complete and store.opened.encrypted() == {found.digest: ENCRYPTED}
    blob.release()
    store.close()


def test_a_mark_of_what_never_came_is_dropped(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.opened.record({ENCRYPTED: ENCRYPTED})
    store.opened.record_manifest(ENCRYPTED, ENCRYPTED, "team-a/x")
    assert store.opened.manifest(ENCRYPTED) == ENCRYPTED and not store.opened.packages()
    store.close()
    store = BlobStore(tmp_path)
    assert ENCRYPTED not in store.opened and not store.opened.manifests()
    store.close()


def test_a_mark_is_taken_from_what_comes_as_it_is(tmp_path: Path) -> None:
    data = b"x" * 1000
    store = BlobStore(tmp_path)
    store.opened.record({digest_of(data): ENCRYPTED})
    store.put_document(data)
    store.opened.forget(digest_of(data))
    store.close()
    store = BlobStore(tmp_path)
    assert digest_of(data) not in store.opened
    store.close()


def test_names_that_an_earlier_release_kept_among_what_was_opened_move(tmp_path: Path) -> None:
    """A row of theirs was "MANIFEST NAME", MANIFEST and 2."""
    store = BlobStore(tmp_path)
    manifest = store.put_document(b"{}")
    store.opened.record_manifest(ENCRYPTED, manifest, "team-a/new")
    store.close()
    with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as database:
        database.execute("DROP TABLE opened_names")
        rows = [(f"{manifest} {name}", manifest, 2) for name in ("team-a/x", "team-a/y")]
        database.executemany("INSERT INTO opened VALUES (?,?,?)", rows)
    for _ in range(2):
        store = BlobStore(tmp_path)
        assert store.opened.was_given(manifest, "team-a/x") and store.opened.was_given(manifest, "team-a/y")
        assert not store.opened.was_given(manifest, "team-a/new") and not store.opened.encrypted()
        assert store.opened.manifest(ENCRYPTED) == manifest
        store.close()
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as database:
        assert database.execute("SELECT digest, manifest FROM opened").fetchall() == [(ENCRYPTED, 1)]
