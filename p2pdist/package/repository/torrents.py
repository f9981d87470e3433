"""Torrents of blobs and packages at an origin: made by reading the bytes once, kept at the origin
under a tag of their own (p2pdist/model/torrent.py).

A blob and its package may have pieces of different sizes; both are hashed in one reading. The bytes
are compared with the blob's digest, so a damaged copy gives no torrent.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from p2pdist.model.digest import Digest, digest_of, hex_of
from p2pdist.model.errors import Corrupt, NotFound, UsageError
from p2pdist.model.manifest import MANIFEST_BYTES_MAX, Descriptor, Reference, decode_manifest
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
from p2pdist.package.repository.contract import Repository
from p2pdist.package.repository.notes import PushLease
from p2pdist.package.repository.push import Target

READ_BYTES = 8 << 20

ReadRange = Callable[[Digest, int, int], Awaitable[bytes]]
"""`length` bytes of a blob from `start`."""

OnHashed = Callable[[int, int], None]
"""Hears how many bytes of how many have been hashed."""


class Readable(Target, Protocol):
    """A repository with ranges of blobs and a list of tags, as every origin."""

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes: ...

    async def tags(self) -> list[tuple[str, Descriptor]]: ...


class Layout(Readable, Protocol):
    """The local layout."""

    def blob_path(self, digest: Digest) -> Path: ...


@dataclass(frozen=True, slots=True)
class Made:
    """A torrent document about a blob or package, published at an origin."""

    subject: Digest
    document: Digest
    torrent: Torrent


def keeps_torrents(repository: Repository) -> bool:
    """Whether a tag there may lead to a torrent document: a registry tags manifests alone."""
    return not repository.url.lower().startswith(_REGISTRIES)


def check_keeps_torrents(repository: Repository) -> None:
    """Raises UsageError for a repository that keeps no torrents."""
    if not keeps_torrents(repository):
        raise UsageError(
            f"{repository.url} is a registry, which keeps no torrents",
            remedy="Leave the torrent away, or push to a directory or bucket (file://, s3://, gs://, az://)",
        )


_REGISTRIES = ("oci://", "oci+http://")


async def make_torrent(reference: Reference, repository: Readable, *, on_progress: OnHashed | None = None) -> Made:
    """Make the torrent of a package, or of a blob that was pushed alone (`blob:sha256-...`), and
    tag it. Raises NotFound, UsageError, Corrupt and what reading and writing raise."""
    check_keeps_torrents(repository)
    described = await repository.resolve(reference)
    manifest = decode_manifest(await repository.read(described.digest, limit=MANIFEST_BYTES_MAX))
    alone = reference.name == "blob" and len(manifest.blobs) == 1
    blobs = [blob for blob in manifest.blobs if blob.size]
    if not blobs:
        raise NotFound(
            f"{reference} holds no bytes that a torrent could be made of", remedy="Name a package with files"
        )
    if alone:
        return (await _make(repository.read_range, repository, blobs, (), None, on_progress))[0]
    return (await _make(repository.read_range, repository, (), blobs, described.digest, on_progress))[0]


async def make_torrents(
    reference: Reference, layout: Layout, repository: Readable, *, on_progress: OnHashed | None = None
) -> list[Made]:
    """Make the torrents of a package in the local layout that was pushed to `repository`, and of
    each of its blobs, as far as they have none yet; a blob of the base that is not in the layout is
    read from the repository. Raises as make_torrent, UsageError for too many blobs."""
    described = await layout.resolve(reference)
    manifest = decode_manifest(await layout.read(described.digest, limit=MANIFEST_BYTES_MAX))
    blobs = list({blob.digest: blob for blob in manifest.blobs if blob.size}.values())
    tags = {name for name, _ in await repository.tags()}
    missing = [blob for blob in blobs if str(torrent_reference(blob.digest)) not in tags]
    whole = blobs if str(torrent_reference(described.digest)) not in tags else []

    async def read(digest: Digest, start: int, length: int) -> bytes:
        here = layout.blob_path(digest).exists()
        return await (layout if here else repository).read_range(digest, start, length)

    return await _make(read, repository, missing, whole, described.digest, on_progress)


async def make_file_torrent(digest: Digest, file: Path, repository: Target) -> Digest | None:
    """The torrent document of a file that was pushed as the blob `digest`, made now unless there is
    one; an empty file has none. Raises Corrupt when the file has changed."""
    size = file.stat().st_size
    if not size:
        return None
    with suppress(NotFound):
        return (await repository.resolve(torrent_reference(digest))).digest

    def hashed() -> FileHashes:
        with file.open("rb") as stream:
            hashers = _Hashers(digest, {piece_size_for(size)})
            while data := stream.read(READ_BYTES):
                hashers.update(data)
            return hashers.finish()[piece_size_for(size)]

    return (await publish(digest, blob_torrent(await asyncio.to_thread(hashed), hex_of(digest)), repository)).document


async def _make(
    read: ReadRange,
    repository: Target,
    alone: Iterable[Descriptor],
    together: Iterable[Descriptor],
    package: Digest | None,
    on_progress: OnHashed | None,
) -> list[Made]:
    """The torrents of each blob in `alone`, and the torrent of all blobs in `together` as a
    package. A blob in both is read once."""
    single, parts = {blob.digest: blob for blob in alone}, {blob.digest: blob for blob in together}
    blobs = {**parts, **single}
    total, done = sum(blob.size for blob in blobs.values()), 0
    package_size = piece_size_for(sum(blob.size for blob in parts.values()))
    made: list[Made] = []
    hashes: list[tuple[str, FileHashes]] = []
    for digest, blob in blobs.items():
        sizes = {blob.layout.piece_size} if digest in single else set()
        hashers = _Hashers(digest, sizes | ({package_size} if digest in parts else set()))
        for start in range(0, blob.size, READ_BYTES):
            data = await read(digest, start, min(READ_BYTES, blob.size - start))
            await asyncio.to_thread(hashers.update, data)
            done += len(data)
            if on_progress:
                on_progress(done, total)
        hashes_by_size = await asyncio.to_thread(hashers.finish)
        if digest in parts:
            hashes.append((hex_of(digest), hashes_by_size[package_size]))
        if digest in single:
            made.append(
                await publish(digest, blob_torrent(hashes_by_size[blob.layout.piece_size], hex_of(digest)), repository)
            )
    if hashes and package is not None:
        made.append(await publish(package, package_torrent(hashes), repository))
    return made


class _Hashers:
    """Hashes one blob for torrents of several piece sizes, and compares it with its digest."""

    def __init__(self, digest: Digest, piece_sizes: Iterable[int]) -> None:
        self._digest, self._whole = digest, hashlib.sha256()
        self._hashers = {size: TorrentHasher(size) for size in piece_sizes}

    def update(self, data: bytes) -> None:
        self._whole.update(data)
        for hasher in self._hashers.values():
            hasher.update(data)

    def finish(self) -> dict[int, FileHashes]:
        if self._whole.hexdigest() != hex_of(self._digest):
            raise Corrupt(f"{self._digest} is not what its digest says", remedy="Push it again")
        return {size: hasher.finish() for size, hasher in self._hashers.items()}


async def publish(subject: Digest, document: bytes, repository: Target) -> Made:
    """Keep a torrent document at a repository, and tag it as the one about `subject`."""
    async with PushLease(repository, [digest_of(document)]):  # until the tag leads to it
        described = Descriptor(TORRENT_TYPE, await repository.write_document(document), len(document))
        await repository.tag(torrent_reference(subject), described)
    return Made(subject, described.digest, decode_torrent(document))
