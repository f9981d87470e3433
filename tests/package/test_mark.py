"""Marking: what tags lead to, compared with a slow, obvious walk; and what stops it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, NotFound, TooLarge, Unavailable
from p2pdist.model.manifest import (
    CONFIG_TYPE,
    DOCUMENT_BYTES_MAX,
    MANIFEST_TYPE,
    PACK_TYPE,
    PIECES_DIGEST,
    TREE_TYPE,
    Descriptor,
)
from p2pdist.model.torrent import TORRENT_TYPE
from p2pdist.package.repository.gc import DOCUMENT_TYPES, Marker, read_document

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
UNKNOWN_TYPE = "application/vnd.example.bundle+json"


class Shelf:
    """Blobs in memory, with an index."""

    def __init__(self) -> None:
        self.blobs: dict[Digest, bytes] = {}
        self.index: list[tuple[str, Descriptor]] = []
        self.reads = 0

    def put(self, data: bytes | dict[str, Any], kind: str = "", **annotations: str) -> dict[str, Any]:
        """Store a blob; returns its descriptor in JSON."""
        body = json.dumps(data).encode() if isinstance(data, dict) else data
        self.blobs[digest_of(body)] = body
        return {"mediaType": kind, "digest": digest_of(body), "size": len(body), "annotations": annotations}

    def tag(self, name: str, descriptor: dict[str, Any]) -> None:
        self.index.append((name, Descriptor(descriptor["mediaType"], descriptor["digest"], descriptor["size"])))

    async def roots(self) -> list[tuple[str, Descriptor]]:
        return list(self.index)

    async def read(self, digest: Digest, *, limit: int = DOCUMENT_BYTES_MAX) -> bytes:
        self.reads += 1
        if digest not in self.blobs:
            raise NotFound(f"{digest} is not there")
        if len(self.blobs[digest]) > limit:
            raise TooLarge(f"{digest} is over {limit}")
        return self.blobs[digest]


def obvious(shelf: Shelf) -> set[Digest]:
    """Every digest that can be read out of what is reached, over and over until nothing is added.
    Types are not looked at."""
    kept = {descriptor.digest for _, descriptor in shelf.index}
    while True:
        texts = [shelf.blobs[digest].decode(errors="replace") for digest in kept if digest in shelf.blobs]
        more = {Digest(word) for text in texts for word in text.split('"') if word.startswith("sha256:")}
        if more <= kept:
            return kept
        kept |= more


@st.composite
def shelves(draw: st.DrawFn) -> Shelf:
    """Leaves, manifests over them, indexes over those and over each other, in any of the known
    forms; some of it tagged."""
    shelf = Shelf()
    kinds = st.sampled_from([TREE_TYPE, PACK_TYPE, "application/x-thing", CONFIG_TYPE])
    leaves = [shelf.put(f"leaf {number}".encode(), draw(kinds)) for number in range(draw(st.integers(1, 8)))]
    some = st.lists(st.sampled_from(leaves), max_size=4)
    documents = []
    for number in range(draw(st.integers(1, 6))):
        named = draw(st.sampled_from(leaves))
        key = draw(st.sampled_from([PIECES_DIGEST, "org.p2pdist.torrent.digest", "org.example.other"]))
        layers = [{**layer, "annotations": {key: named["digest"]}} for layer in draw(some)]
        body = {"schemaVersion": 2, "n": number, "config": draw(st.sampled_from(leaves)), "layers": layers}
        if documents and draw(st.booleans()):
            body["subject"] = draw(st.sampled_from(documents))
        documents.append(shelf.put(body, draw(st.sampled_from([MANIFEST_TYPE, UNKNOWN_TYPE]))))
    for number in range(draw(st.integers(0, 4))):
        body = {"n": number, "manifests": draw(st.lists(st.sampled_from(documents), max_size=4))}
        documents.append(shelf.put(body, draw(st.sampled_from([INDEX_TYPE, UNKNOWN_TYPE, "what/ever"]))))
    for number, found in enumerate(draw(st.lists(st.sampled_from(documents), max_size=3))):
        shelf.tag(f"app:{number}", found)
    return shelf


@given(shelves())
async def test_marking_finds_what_an_obvious_walk_finds(shelf: Shelf) -> None:
    marks = Marker(shelf)
    found = await marks.mark()
    assert found == obvious(shelf)
    reads = shelf.reads
    assert await marks.mark() == found
    assert shelf.reads == reads, "documents were read twice"


async def test_the_same_digest_may_be_content_here_and_a_manifest_there() -> None:
    shelf = Shelf()
    layer = shelf.put(b"layer", TREE_TYPE)
    manifest = shelf.put({"layers": [layer]}, MANIFEST_TYPE)
    shelf.tag("app:1", shelf.put({"layers": [{**manifest, "mediaType": "what/ever"}]}, MANIFEST_TYPE))
    assert layer["digest"] not in await Marker(shelf).mark()
    shelf.tag("app:2", shelf.put({"manifests": [manifest]}, INDEX_TYPE))
    assert layer["digest"] in await Marker(shelf).mark()


async def test_what_arrives_later_is_found_by_the_same_marks() -> None:
    """A nested manifest that was missing is looked for again."""
    shelf = Shelf()
    layer = shelf.put(b"layer", TREE_TYPE)
    manifest = shelf.put({"layers": [layer]}, MANIFEST_TYPE)
    body = shelf.blobs.pop(manifest["digest"])
    shelf.tag("app:1", shelf.put({"manifests": [manifest]}, INDEX_TYPE))
    marks = Marker(shelf)
    assert manifest["digest"] in await marks.mark()
    shelf.blobs[manifest["digest"]] = body
    assert layer["digest"] in await marks.mark()


async def test_a_torrent_document_of_any_size_is_no_manifest() -> None:
    shelf = Shelf()
    document = shelf.put(b"d" * (5 << 20), TORRENT_TYPE)
    shelf.tag("torrent:1", document)
    assert await Marker(shelf).mark() == {document["digest"]}


@pytest.mark.parametrize("kind", sorted(DOCUMENT_TYPES))
async def test_a_tag_that_cannot_be_read_stops_the_marking_and_is_named(kind: str) -> None:
    shelf = Shelf()
    shelf.tag("app:good", shelf.put({"layers": []}, MANIFEST_TYPE))
    shelf.tag("app:bad", shelf.put(b"not json", kind))
    with pytest.raises(Corrupt, match="app:bad"):
        await Marker(shelf).mark()


async def test_a_missing_or_a_large_root_stops_the_marking() -> None:
    shelf = Shelf()
    manifest = shelf.put({"layers": []}, MANIFEST_TYPE)
    del shelf.blobs[manifest["digest"]]
    shelf.tag("app:gone", manifest)
    with pytest.raises(NotFound, match="app:gone"):
        await Marker(shelf).mark()
    shelf.index.clear()
    shelf.tag("app:large", shelf.put(b" " * (5 << 20), "what/ever"))
    with pytest.raises(Corrupt, match="app:large"):
        await Marker(shelf).mark()


async def test_a_tag_that_was_removed_while_its_manifest_was_looked_for_does_not_stop_the_marking() -> None:
    """Another collection may have taken what the tag led to."""

    class Moving(Shelf):
        async def read(self, digest: Digest, *, limit: int = DOCUMENT_BYTES_MAX) -> bytes:
            if digest == removed["digest"]:
                self.index[:] = [entry for entry in self.index if entry[0] != "app:removed"]
                self.blobs.pop(digest, None)
            return await super().read(digest, limit=limit)

    shelf = Moving()
    layer = shelf.put(b"layer", TREE_TYPE)
    removed = shelf.put({"layers": []}, MANIFEST_TYPE)
    shelf.tag("app:removed", removed)
    kept = shelf.put({"layers": [layer]}, MANIFEST_TYPE)
    shelf.tag("app:kept", kept)
    assert await Marker(shelf).mark() == {kept["digest"], layer["digest"]}


async def test_an_outage_below_a_tag_stops_the_marking_too() -> None:
    class Broken(Shelf):
        async def read(self, digest: Digest, *, limit: int = DOCUMENT_BYTES_MAX) -> bytes:
            if digest == manifest["digest"]:
                raise Unavailable("no answer")
            return await super().read(digest, limit=limit)

    shelf = Broken()
    manifest = shelf.put({"layers": []}, MANIFEST_TYPE)
    shelf.tag("app:1", shelf.put({"manifests": [manifest]}, INDEX_TYPE))
    with pytest.raises(Unavailable, match="app:1"):
        await Marker(shelf).mark()


def test_a_document_listed_by_another_digest_cannot_be_followed() -> None:
    listed = {"mediaType": MANIFEST_TYPE, "digest": "sha512:" + "0" * 128, "size": 2}
    with pytest.raises(Corrupt, match="sha512"):
        read_document(json.dumps({"manifests": [listed]}).encode(), INDEX_TYPE)


@pytest.mark.parametrize("data", [b"", b"[1]", b"\xff", b"[" * 100_000, b'{"a":'])
def test_what_is_no_document_names_nothing(data: bytes) -> None:
    assert not read_document(data, "what/ever").names
    with pytest.raises(Corrupt):
        read_document(data, MANIFEST_TYPE)
