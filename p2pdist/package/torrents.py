"""Torrents of what lies at an origin: made by reading it once, kept there under a tag of their own (p2pdist/model/torrent.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from p2pdist.model.digest import Digest, hex_of
from p2pdist.model.errors import NotFound
from p2pdist.model.package import Descriptor, Reference, decode_manifest
from p2pdist.model.pieces import piece_size_for
from p2pdist.model.torrent import (
    TORRENT_TYPE,
    FileHashes,
    Torrent,
    TorrentHasher,
    blob_torrent,
    decode_torrent,
    package_torrent,
    torrent_reference,
)
from p2pdist.package.depot import Depot

READ_BYTES = 8 << 20


class Readable(Depot, Protocol):
    """A depot whose blobs can be read in ranges, as every origin can."""

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Made:
    """A torrent document about a blob or package, published at an origin."""

    subject: Digest
    document: Digest
    torrent: Torrent


async def make_torrent(
    reference: Reference, depot: Readable, *, on_progress: Callable[[int, int], None] | None = None
) -> Made:
    """Make the torrent of a package, or of a blob that was pushed alone (`blob:sha256-...`), and tag it. Raises NotFound, Corrupt and what
    reading and writing raise."""
    described = await depot.resolve(reference)
    manifest = decode_manifest(await depot.read(described.digest))
    alone = reference.name == "blob" and len(manifest.blobs) == 1
    blobs = [blob for blob in manifest.blobs if blob.size]
    if not blobs:
        raise NotFound(f"{reference} holds no bytes that a torrent could be made of")
    total, done = sum(blob.size for blob in blobs), 0
    piece_size = piece_size_for(total)
    hashes: list[tuple[str, FileHashes]] = []
    for blob in blobs:
        hasher = TorrentHasher(piece_size)
        for start in range(0, blob.size, READ_BYTES):
            data = await depot.read_range(blob.digest, start, min(READ_BYTES, blob.size - start))
            await asyncio.to_thread(hasher.update, data)
            done += len(data)
            if on_progress:
                on_progress(done, total)
        hashes.append((hex_of(blob.digest), hasher.finish()))
    document = blob_torrent(hashes[0][1], hashes[0][0]) if alone else package_torrent(hashes)
    return await publish(blobs[0].digest if alone else described.digest, document, depot)


async def publish(subject: Digest, document: bytes, depot: Depot) -> Made:
    """Keep a torrent document at a depot, and tag it as the one about `subject`."""
    described = Descriptor(TORRENT_TYPE, await depot.write_small(document), len(document))
    await depot.tag(torrent_reference(subject), described)
    return Made(subject, described.digest, decode_torrent(document))
