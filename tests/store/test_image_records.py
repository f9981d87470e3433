"""What a store remembers of images."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.store import pins
from p2pdist.store.store import BlobStore


def test_images_outlive_the_process_and_their_documents_stay(
    tmp_path: Path, open_store: Callable[..., BlobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "store")
    small, large = b'{"small": 1}', b'{"large": "' + b"x" * 100_000 + b'"}'
    other = store.put_document(b"named by nothing")
    for tag, data in (("v1", small), ("v2", large)):
        digest = store.put_document(data)
        store.images.record("docker.io/team/app", (tag, digest), digest, "a/b")
    store.close()
    long_ago = 1.0
    with sqlite3.connect(tmp_path / "store" / "index.sqlite") as database:
        database.execute("UPDATE smalls SET stored=?", (long_ago,))
    for path in (tmp_path / "store" / "small" / "sha256").iterdir():
        os.utime(path, (long_ago, long_ago))
    store = open_store(tmp_path / "store")
    for tag, data in (("v1", small), ("v2", large)):
        for target in (tag, digest_of(data)):
            record = store.images.get("docker.io/team/app", target)
            assert record is not None and (record.digest, record.media_type) == (digest_of(data), "a/b")
            assert store.read_document(record.digest) == data
    assert store.read_document(other) is None
    assert store.images.get("docker.io/team/other", "v1") is None, "a name is not another one"
    assert len(store.images.of("docker.io/team/app")) == 4


def test_the_images_that_were_confirmed_last_are_remembered(
    tmp_path: Path, open_store: Callable[..., BlobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "IMAGE_RECORDS_MAX", 3)
    store, digest = open_store(tmp_path / "store"), digest_of(b"x")
    for tag in ("a", "b", "c", "a", "d", "e"):
        store.images.record("r/app", (tag,), digest, "a/b")
    assert [record.target for record in store.images.list()] == ["a", "d", "e"]
    store.close()
    store = open_store(tmp_path / "store")
    assert {record.target for record in store.images.list()} == {"a", "d", "e"}
