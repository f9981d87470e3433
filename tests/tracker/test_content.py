"""Small content at the tracker, over a real layout: what happens when its own disk, or the origin, fails."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import NotFound
from p2pdist.origin.origin import Origin, open_origin
from tracker.content import Content
from tracker.state.documents import FILE_NAME, Documents


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    (tmp_path / "origin" / "blobs" / "sha256").mkdir(parents=True)
    return tmp_path / "origin"


def put(layout: Path, data: bytes) -> str:
    digest = digest_of(data)
    (layout / "blobs" / "sha256" / digest[7:]).write_bytes(data)
    return digest


def opened(layout: Path) -> Origin:
    return open_origin(layout.as_uri())


async def test_a_state_that_fails_costs_a_look_at_the_origin_and_no_more(
    tmp_path: Path, layout: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = Documents(tmp_path / "state")
    with sqlite3.connect(tmp_path / "state" / FILE_NAME) as other:
        other.execute("DROP TABLE documents")
    other.close()
    digest = put(layout, b"document")
    assert await Content(opened(layout), documents).read(digest_of(b"document")) == b"document", digest
    assert "cannot be read" in caplog.text and "cannot be written" in caplog.text
    documents.close()


async def test_many_documents_at_once_keep_within_their_bytes(tmp_path: Path, layout: Path) -> None:
    documents = Documents(tmp_path / "state", bytes_max=5_000)
    content = Content(opened(layout), documents)
    bodies = [bytes([number]) * 1000 for number in range(40)]
    for body in bodies:
        put(layout, body)
    assert await asyncio.gather(*(content.read(digest_of(body)) for body in bodies)) == bodies
    assert sum(documents.read(digest_of(body)) is not None for body in bodies) == 5
    documents.close()


async def test_whoever_asks_and_leaves_does_not_take_the_answer_from_others(layout: Path) -> None:
    put(layout, b"document")
    content = Content(opened(layout))
    tasks = [asyncio.create_task(content.read(digest_of(b"document"))) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await asyncio.gather(*tasks[1:]) == [b"document"] * 2
    with pytest.raises(NotFound):
        await content.read(digest_of(b"missing"))


async def test_a_document_that_was_read_outlives_the_origin(tmp_path: Path, layout: Path) -> None:
    put(layout, b"document")
    documents = Documents(tmp_path / "state")
    await Content(opened(layout), documents).read(digest_of(b"document"))
    shutil.rmtree(layout)
    assert await Content(opened(layout), documents).read(digest_of(b"document")) == b"document"
    documents.close()
