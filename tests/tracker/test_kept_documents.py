"""What outlives a tracker: small documents, verified when they are read back."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import P2PDistError
from p2pdist.model.image_manifest import TagPage
from p2pdist.model.manifest import Descriptor
from tracker.state import documents as documents_of_state
from tracker.state.documents import FILE_NAME, Documents
from tracker.upstreams import lists as kept_lists
from tracker.upstreams.lists import LastLists


def test_a_document_outlives_the_tracker(tmp_path: Path) -> None:
    first = Documents(tmp_path / "state")
    first.write(digest_of(b"manifest"), b"manifest")
    first.close()
    second = Documents(tmp_path / "state")
    assert second.read(digest_of(b"manifest")) == b"manifest"
    assert second.read(digest_of(b"other")) is None
    second.close()


def test_a_damaged_document_is_not_believed(tmp_path: Path) -> None:
    documents = Documents(tmp_path)
    documents.write(digest_of(b"manifest"), b"manifest")
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute("UPDATE documents SET data = ?", (b"manifesT",))
    assert documents.read(digest_of(b"manifest")) is None
    documents.close()


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    documents = Documents(tmp_path, bytes_max=250)
    contents = [bytes([number]) * 100 for number in range(3)]
    documents.write(digest_of(contents[0]), contents[0])
    documents.write(digest_of(contents[1]), contents[1])
    assert documents.read(digest_of(contents[0])) is not None
    documents.write(digest_of(contents[2]), contents[2])
    assert [documents.read(digest_of(each)) is not None for each in contents] == [True, False, True]
    documents.close()


async def test_lists_that_clients_ask_for_push_out_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as what tags mean: pages behind any tag, and referrers of any type, are a list each."""
    monkeypatch.setattr(documents_of_state, "DESCRIPTORS_MAX", 20)
    monkeypatch.setattr(kept_lists, "KEPT_MAX", 10)
    tag = Descriptor("text/plain", digest_of(b"data"), 4)
    with closing(Documents(tmp_path)) as documents:
        documents.note({"image a:v1": tag})
        lists = LastLists(documents)
        for number in range(60):
            await lists.keep(f"tags a {number} ", TagPage((f"v{number}",), False))
        assert documents.recall("image a:v1") == tag
        kept = [documents.recall(f"list tags a {number} ") is not None for number in range(60)]
        assert kept == [False] * 50 + [True] * 10
        for number in range(30):
            documents.note({f"image b:{number}": tag})
        assert [documents.recall(f"image b:{number}") is not None for number in range(30)] == [False] * 10 + [True] * 20


def test_what_is_no_document_or_descriptor_any_more_is_not_there(tmp_path: Path) -> None:
    documents, digest = Documents(tmp_path), digest_of(b"data")
    documents.write(digest, b"data")
    documents.note({"a:v1": Descriptor("text/plain", digest, 4)})
    assert documents.read(digest) == b"data" and documents.recall("a:v1") is not None
    with closing(sqlite3.connect(tmp_path / "tracker.sqlite")) as file, file:
        file.execute("UPDATE documents SET data = 7")
        file.execute("UPDATE descriptors SET descriptor = 7")
    assert documents.read(digest) is None and documents.recall("a:v1") is None
    documents.close()


def test_a_state_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(P2PDistError, match="cannot keep its state"):
        Documents(tmp_path / "file")
