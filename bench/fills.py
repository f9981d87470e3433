"""Making a packed tree's objects in a store: the whole extraction, and the writing alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bench.btrfs import Meter
from p2pdist.model.catalog import Stored
from p2pdist.model.digest import Digest, hex_of
from p2pdist.model.manifest import CATALOG_TYPE, TREE_TYPE, Descriptor, decode_manifest
from p2pdist.model.pieces import PieceList
from p2pdist.model.tree import content_hash
from p2pdist.store.objects.files import Objects
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.assembly import Decoder, Part
from p2pdist.store.trees.extraction import REACH, RUN_BYTES, RUN_CHUNKS, Bundle
from p2pdist.store.trees.missing_contents import Missing

HELD_BYTES = 512 << 20
"""So much is held decompressed at a time, until it has been written."""

_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Packed:
    """A tree in a layout: blobs by media type, and what its catalogs list."""

    layout: Path
    root: Descriptor
    parts: Sequence[Descriptor]
    files: int = 0
    bytes_content: int = 0

    @property
    def bytes_stored(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def catalogs(self) -> list[Digest]:
        return [part.digest for part in self.parts if part.media_type == CATALOG_TYPE]

    def path(self, digest: Digest) -> Path:
        return self.layout / "blobs" / "sha256" / hex_of(digest)

    @classmethod
    def of_layout(cls, layout: Path, files: int = 0, size: int = 0) -> Packed:
        """The only package of a layout, which is one tree."""
        (tag,) = json.loads((layout / "index.json").read_bytes())["manifests"]
        manifest = decode_manifest((layout / "blobs" / "sha256" / hex_of(tag["digest"])).read_bytes())
        (root,) = (layer for layer in manifest.layers if layer.media_type == TREE_TYPE)
        return cls(layout, root, manifest.parts, files, size)


def load(store: BlobStore, packed: Packed) -> None:
    """Have all blobs of the package complete in a store."""
    for described in (packed.root, *packed.parts):
        pieces = PieceList.decode(packed.path(described.pieces_digest).read_bytes())
        blob = store.begin(described.digest, pieces)
        with blob.held(), packed.path(described.digest).open("rb") as file:
            for piece in range(pieces.layout.count):
                assert blob.write(piece, file.read(pieces.layout.length(piece)))
            blob.finish()


def fill(store: BlobStore, packed: Packed, meter: Meter) -> None:
    """All that a pull does with packs that are here."""
    with store.trees.missing(packed.root.digest, packed.catalogs) as missing:
        with meter.running():
            filled = store.trees.fill(missing)
        assert filled.missing == 0
        store.trees.finish(missing)


@dataclass(frozen=True)
class Content:
    """A content to be written: where its chunks are."""

    name: bytes
    size: int
    chunks: bytes
    parts: Sequence[Part]


@dataclass(frozen=True)
class Verified:
    """A content with its chunks as stored and, unless they are to be decompressed by the writing,
    what they decode to."""

    content: Content
    stored: Sequence[memoryview]
    data: Sequence[bytes | memoryview]


def write(store: BlobStore, packed: Packed, meter: Meter) -> None:
    """Write what has verified: reading, verifying and, where it serves that alone, decompressing is
    not counted."""
    with store.trees.missing(packed.root.digest, packed.catalogs) as missing:
        contents = _contents(missing)
        objects, keep = store.objects, store.objects.encoded.works
        decoder = Decoder()
        while batch := [_verified(store, decoder, content, keep) for content in _some(contents)]:
            with meter.running(), ThreadPoolExecutor(_THREADS) as pool:
                for written in [pool.submit(_write, objects, share) for share in _shares(batch)]:
                    written.result()
        with meter.running():
            objects.save()
        assert not missing.contents.keys() - objects.contents()


def _contents(missing: Missing) -> Iterator[Content]:
    """In the order of the packs."""
    for pack, todo in missing.whole.items():
        for stored in todo:
            yield Content(stored.chunk, stored.length, b"", [_part(pack, stored)])
    for name, assembly in missing.assemblies.items():
        yield Content(name, assembly.size, assembly.chunks, assembly.pending)


def _part(pack: Digest, stored: Stored) -> Part:
    return Part(0, stored.chunk, stored.length, pack, at=stored.offset, stored=stored.stored)


def _some(contents: Iterator[Content]) -> Iterator[Content]:
    """The next ones, of about HELD_BYTES."""
    held = 0
    while held < HELD_BYTES and (found := next(islice(contents, 1), None)) is not None:
        held += found.size
        yield found


def _verified(store: BlobStore, decoder: Decoder, content: Content, keep: bool) -> Verified:
    """The chunks of a content. `keep` what they decode to: bytes of its own, since a decoder's
    memory is good for one chunk."""
    found: list[memoryview] = []
    data: list[bytes | memoryview] = []
    for part in content.parts:
        assert part.pack is not None
        blob = store.get(part.pack)
        assert blob is not None
        stored = memoryview(bytearray(blob.read_range(part.at, part.stored)))
        plain = decoder.decode(part.pack, part.chunk, stored, part.length)
        assert content_hash(plain) == part.chunk
        found.append(stored)
        if keep:
            data.append(bytes(plain))
    return Verified(content, found, data)


def _shares(batch: Sequence[Verified]) -> Iterator[list[Verified]]:
    """What a thread writes at a time: as much as a run has when much is filled."""
    share: list[Verified] = []
    held = 0
    for verified in batch:
        share.append(verified)
        held += sum(map(len, verified.stored))
        if held > REACH * RUN_BYTES or len(share) == REACH * RUN_CHUNKS:
            yield share
            share, held = [], 0
    if share:
        yield share


def _write(objects: Objects, share: Sequence[Verified]) -> None:
    decoder = Decoder()
    with Bundle(objects) as bundle:
        for verified in share:
            _write_content(objects, bundle, decoder, verified)


def _write_content(objects: Objects, bundle: Bundle, decoder: Decoder, verified: Verified) -> None:
    content = verified.content
    temporary = objects.begin() if content.chunks else None
    try:
        if temporary is not None:
            os.ftruncate(temporary.fd, content.size)
        for number, (part, stored) in enumerate(zip(content.parts, verified.stored, strict=True)):
            assert part.pack is not None
            data = (
                verified.data[number] if verified.data else decoder.decode(part.pack, part.chunk, stored, part.length)
            )
            if temporary is None:
                bundle.put(content.name, data, stored)
            else:
                objects.write_chunk(temporary, part.offset, stored, data)
        if temporary is not None:
            objects.name(temporary, content.name, content.size, content.chunks)
    finally:
        if temporary is not None:
            temporary.close()
