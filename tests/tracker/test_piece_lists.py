"""Vouched lists that were held outlive their swarm, and with a state directory the tracker; news of
a list are encoded once for all agents."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.manifest import Descriptor
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    FromTracker,
    Hello,
    Holding,
    Judged,
    Left,
    Listed,
    Vouched,
    decode_from_tracker,
)
from p2pdist.model.pieces import HASH_SIZE, PieceLayout, PieceList
from tracker import piece_lists
from tracker.content import Content
from tracker.core.events import Received, Tick
from tracker.core.fleet import Fleet
from tracker.piece_lists import LIST_TYPE, PieceLists
from tracker.service import Outbox, Service
from tracker.state.documents import Documents

BLOB = digest_of(b"blob")
COUNT = 8
LAYOUT = PieceLayout(COUNT * 65536, 65536)
HASHES = bytes(range(HASH_SIZE)) * COUNT
PIECES = PieceList(LAYOUT, HASHES)
ALL = tuple(range(COUNT))


class Site:
    """A tracker's service with agents. `read` takes what was sent to one of them."""

    def __init__(self, documents: Documents | None = None) -> None:
        self.service = Service(Fleet(-100.0), Content(None, documents))
        self.sessions: dict[str, tuple[int, Outbox]] = {}

    def open(self, *names: str, count: int = 0) -> None:
        for name in names:
            self.sessions[name] = self.service.open_session(Hello(PROTOCOL_VERSION, name, f"{name}:1"))
        for name in names:
            self.say(name, Holding(BLOB, LAYOUT.size, LAYOUT.piece_size, (count,), vouched=True))

    def say(self, name: str, message: Holding | Vouched | Judged | Left) -> None:
        self.service.submit(Received(self.sessions[name][0], message))

    async def read(self, name: str) -> list[FromTracker | bytes]:
        await asyncio.sleep(0.01)
        found = await asyncio.wait_for(self.sessions[name][1].take(), 5.0)
        return [message for message in found if message is not None]

    async def holds(self) -> None:
        """Three agents come to a list that holds."""
        self.open("a", "b", "c")
        while not (roots := self.service.fleet.swarms[BLOB].edges.roots[0]):
            await asyncio.sleep(0.02)
            self.service.submit(Tick())
        (root,) = roots
        self.say(root, Vouched(BLOB, 0, ALL, HASHES))
        for name in "abc":
            self.say(name, Judged(BLOB, 0, True))
        await self.done()

    async def done(self) -> None:
        """What the service began beside its sessions is done."""
        await asyncio.gather(*self.service._tasks)


async def test_news_are_encoded_once_for_all() -> None:
    site = Site()
    await site.holds()
    heard = {name: [each for each in await site.read(name) if isinstance(each, bytes)] for name in "abc"}
    assert decode_from_tracker(heard["a"][0]) == Listed(BLOB, 0, ALL, HASHES)
    assert heard["a"][0] is heard["b"][0] is heard["c"][0]


@pytest.mark.parametrize("state", [True, False])
async def test_a_list_outlives_its_swarm(tmp_path: Path, state: bool) -> None:
    site = Site(Documents(tmp_path) if state else None)
    await site.holds()
    for name in "abc":
        site.say(name, Left(BLOB))
    assert not site.service.fleet.swarms
    site.open("late")
    await site.done()
    assert decode_from_tracker(next(each for each in await site.read("late") if isinstance(each, bytes))) == Listed(
        BLOB, 0, ALL, HASHES
    )


async def test_a_list_outlives_the_tracker(tmp_path: Path) -> None:
    """A host that comes first needs no reader; what it is given is only vouched for, as before."""
    first = Documents(tmp_path)
    await Site(first).holds()
    first.close()
    found = await PieceLists(Documents(tmp_path)).find(BLOB)
    assert found is not None and found[0] == PIECES and len(found[1]) == 2
    site = Site(Documents(tmp_path))
    site.open("late")
    await site.done()
    assert any(isinstance(each, bytes) for each in await site.read("late"))


async def test_without_a_state_nothing_outlives_the_tracker() -> None:
    assert await PieceLists(None).find(BLOB) is None


@pytest.mark.parametrize("data", [b"", b"garbage", PIECES.encode()[:-1]])
async def test_a_kept_list_that_is_damaged_is_not_used(tmp_path: Path, data: bytes) -> None:
    documents = Documents(tmp_path)
    documents.write(digest_of(data), data)
    documents.note({f"vouched {BLOB}": Descriptor(LIST_TYPE, digest_of(data), len(data))})
    assert await PieceLists(documents).find(BLOB) is None


@pytest.mark.parametrize("voters", ["", "x", "5", "{", "null"])
async def test_voters_that_are_none_are_no_reason_to_fail(tmp_path: Path, voters: str) -> None:
    documents, data = Documents(tmp_path), PIECES.encode()
    documents.write(PIECES.digest, data)
    documents.note({f"vouched {BLOB}": Descriptor(LIST_TYPE, PIECES.digest, len(data), {"voters": voters})})
    assert await PieceLists(documents).find(BLOB) is None


async def test_a_list_without_its_document_is_not_there(tmp_path: Path) -> None:
    documents = Documents(tmp_path)
    documents.note({f"vouched {BLOB}": Descriptor(LIST_TYPE, PIECES.digest, 10)})
    assert await PieceLists(documents).find(BLOB) is None


async def test_lists_in_memory_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_lists, "LISTS_BYTES_MAX", 2 * len(HASHES))
    lists = PieceLists(None)
    blobs = [Digest(digest_of(b"%d" % number)) for number in range(3)]
    for blob in (*blobs, blobs[2]):
        await lists.keep(blob, PIECES)
    assert [await lists.find(blob) is not None for blob in blobs] == [False, True, True]
