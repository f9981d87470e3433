"""Garbage collection in a repository, by mark and sweep: a blob leaves when no tag leads to it and
no push is about to name it.

It lists the blobs and marks the ones to which push leases and tags lead. Then, batch by batch, it
leaves a removal note, reads leases and tags once more in this order, and deletes the blobs of the
batch that are still not marked. notes.py proves that no blob of a visible tag is ever deleted. A
packing cannot name beforehand the old packs that it will draw on; in a directory it holds a lock
instead, and a batch waits for it.

The minimum age is a second guard, for writers without leases: other tools, and copies of files by
hand. Ages are by the clock of the storage. A blob that is written after the listing is not deleted.

Every entry of the index is a root of the marking. It goes through manifests of any kind, nested
indexes, descriptors under `manifests` or `subject`, and JSON of any media type that is not in
LEAF_TYPES. In a document every string that is a digest marks a blob: layers, config, catalogs,
packs, piece lists, and the ones in annotations. Too many blobs are kept rather than too few.

A document below a root may be absent, since an index may lack some entries (a copy for one platform
does). A root that is absent, or a document that is there and cannot be read, ends the collection,
because the blobs that it names are unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, P2PDistError, TooLarge, Unavailable
from p2pdist.model.manifest import (
    BLOB_TYPE,
    CATALOG_TYPE,
    CONFIG_TYPE,
    DOCUMENT_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    MANIFEST_TYPE,
    PACK_TYPE,
    PIECES_TYPE,
    SQUASHFS_TYPE,
    TREE_TYPE,
    Descriptor,
)
from p2pdist.model.torrent import TORRENT_TYPE
from p2pdist.package.repository.contract import OnProgress
from p2pdist.package.repository.notes import (
    LEASE,
    LEASE_S,
    REMOVAL,
    REMOVAL_S,
    START_S,
    NoteBoard,
    clock,
    encode_note,
    note_name,
    read_note,
)

READS_IN_FLIGHT = 64
OLDER_THAN_S = 86_400.0
BATCH_BLOBS = 500
"""Blobs that one removal note names; a push waits for at most one batch that names its blobs."""

DOCUMENT_TYPES = frozenset(
    [
        MANIFEST_TYPE,
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.artifact.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    ]
)
"""Media types of documents that must be JSON and name blobs."""
LEAF_TYPES = frozenset(
    [
        *(CONFIG_TYPE, SQUASHFS_TYPE, TREE_TYPE, CATALOG_TYPE, PACK_TYPE, PIECES_TYPE, TORRENT_TYPE, BLOB_TYPE),
        "application/vnd.oci.image.config.v1+json",
        "application/vnd.docker.container.image.v1+json",
    ]
)
"""Media types that name no blobs; their blobs are not read, not even as roots (torrents are)."""


class Markable(Protocol):
    """A repository whose tags can be followed. p2pdist/origin/contract.py has the contract."""

    async def roots(self) -> list[tuple[str, Descriptor]]: ...

    async def read(self, digest: Digest, *, limit: int = DOCUMENT_BYTES_MAX) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Document:
    """The blobs that a document names."""

    names: frozenset[Digest]
    below: frozenset[tuple[Digest, str, bool]]
    """The blobs that may be documents: digest, media type, and whether it was listed as one."""


LEAF = Document(frozenset(), frozenset())


def read_document(data: bytes, media_type: str) -> Document:
    """The blobs that `data` names. Raises Corrupt when it should be a manifest or an index and is
    no JSON object, or lists a document without a SHA-256 digest. Other data that is no JSON object
    names nothing."""
    try:
        body = msgspec.json.decode(data)
        digests = list(_digests(body))
    except UNDECODABLE as error:
        if media_type in DOCUMENT_TYPES:
            raise Corrupt(f"it is not JSON: {error}") from error
        return LEAF
    if not isinstance(body, dict):
        if media_type in DOCUMENT_TYPES:
            raise Corrupt("it is not a JSON object")
        return LEAF
    names = frozenset(Digest(text) for text, _, _ in digests if is_digest(text))
    below = set()
    for text, kind, listed in digests:
        if listed or kind in DOCUMENT_TYPES or (kind.endswith("json") and kind not in LEAF_TYPES):
            if is_digest(text):
                below.add((Digest(text), kind, listed))
            elif listed:
                raise Corrupt(f"it lists {text[:100]!r}, which is no SHA-256 digest")
    return Document(names, frozenset(below))


def _digests(body: Any) -> Iterator[tuple[str, str, bool]]:
    """Strings that are digests, with the media type beside them, and whether they are listed as
    documents."""
    pending: list[tuple[Any, bool]] = [(body, False)]
    while pending:
        value, listed = pending.pop()
        if isinstance(value, dict):
            kind, named = value.get("mediaType"), value.get("digest")
            if isinstance(named, str):
                yield named, kind if isinstance(kind, str) else "", listed
            pending += [(inner, key in ("manifests", "subject")) for key, inner in value.items() if key != "digest"]
            # A `digest` of another shape may still hold names.
            if not isinstance(named, str):
                pending.append((named, False))
        elif isinstance(value, list):
            pending += [(inner, listed) for inner in value]
        elif isinstance(value, str) and is_digest(value):
            yield value, "", False


@dataclass(frozen=True, slots=True)
class _Step:
    """A document to read."""

    digest: Digest
    media_type: str
    listed: bool
    """Its parent lists it as a document."""
    tag: str
    """The tag that leads to it."""
    is_root: bool
    """The index itself names it."""


class Marker:
    """Marks the blobs to which the tags of a repository lead. It remembers the documents that it
    has read, so a second marking reads new ones only."""

    def __init__(self, repository: Markable) -> None:
        self._repository = repository
        self._documents: dict[tuple[Digest, str], Document] = {}
        self._turns = asyncio.Semaphore(READS_IN_FLIGHT)

    async def mark(self) -> set[Digest]:
        """The marked blobs. Raises what reading the index raises, and the failure of a document,
        naming the tag that leads to it."""
        roots = await self._repository.roots()
        while True:
            try:
                return await self._mark_from(roots)
            except NotFound:
                # A tag may have been removed since, and another collection have taken what it led
                # to.
                before, roots = roots, await self._repository.roots()
                if not set(_named(before)) - set(_named(roots)):
                    raise

    async def _mark_from(self, roots: list[tuple[str, Descriptor]]) -> set[Digest]:
        front = [_Step(root.digest, root.media_type, True, name, True) for name, root in roots]
        kept = {step.digest for step in front}
        seen: set[tuple[Digest, str]] = set()
        while front:
            steps = list({(step.digest, step.media_type): step for step in reversed(front)}.values())
            seen.update((step.digest, step.media_type) for step in steps)
            read = await asyncio.gather(*map(self._read, steps), return_exceptions=True)
            front = []
            for step, document in zip(steps, read, strict=True):
                if isinstance(document, BaseException):
                    raise document
                kept |= document.names
                front += [
                    _Step(digest, kind, listed, step.tag, False)
                    for digest, kind, listed in document.below
                    if (digest, kind) not in seen
                ]
        return kept

    async def _read(self, step: _Step) -> Document:
        key = (step.digest, step.media_type)
        if step.media_type in LEAF_TYPES:
            return LEAF
        if key not in self._documents:
            try:
                async with self._turns:
                    data = await self._repository.read(step.digest, limit=MANIFEST_BYTES_MAX)
                self._documents[key] = read_document(data, step.media_type)
            except NotFound as error:
                if step.is_root:
                    raise _stopped(step, error) from error
                return LEAF  # not remembered: it may arrive yet
            except TooLarge as error:
                if step.listed or step.media_type in DOCUMENT_TYPES:
                    raise _stopped(step, error) from error
                self._documents[key] = LEAF
            except P2PDistError as error:
                raise _stopped(step, error) from error
        return self._documents[key]


def _named(roots: list[tuple[str, Descriptor]]) -> list[tuple[str, Digest]]:
    return [(name, descriptor.digest) for name, descriptor in roots]


def _stopped(step: _Step, error: P2PDistError) -> P2PDistError:
    kind = Corrupt if isinstance(error, TooLarge) else type(error)
    return kind(
        f"{step.digest}, which {step.tag} leads to, cannot be read: {error.what}",
        remedy="Nothing was removed on its account. Push the package again, or remove the tag with p2pdist rm --at-origin",
        tag=step.tag,
    )


class Sweepable(Markable, NoteBoard, Protocol):
    """A repository in which blobs can be deleted. p2pdist/origin/contract.py has the contract."""

    async def blobs(self) -> list[tuple[Digest, int, float]]: ...

    async def remove(self, digests: Sequence[Digest]) -> None: ...

    async def remove_unfinished(self, *, dry_run: bool = False) -> tuple[int, int]: ...

    def packing(self, *, alone: bool = False) -> AbstractAsyncContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Swept:
    """What a collection removed."""

    blobs_removed: int
    bytes_freed: int
    """Of blobs and unfinished files."""
    blobs_kept: int
    unfinished: int
    """Files and directories that killed writers left."""


async def sweep(
    repository: Sweepable,
    *,
    older_than_s: float = OLDER_THAN_S,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Swept:
    """Remove the blobs that no tag or lease needs and that were written more than `older_than_s`
    ago. With `dry_run` only count them.

    Raises NotFound when the repository is no layout, Conflict while packages are being packed, and
    an error naming a tag that leads to an unreadable document; then nothing was removed.
    """
    run = _Sweep(repository, on_progress)
    now = await run.now()
    listed = await repository.blobs()
    kept = await run.needed(now)
    victims = sorted(
        (size, digest) for digest, size, written in listed if digest not in kept and now - written > older_than_s
    )
    # Small ones first: a manifest goes before what it leads to, so that what a killed collection
    # leaves cannot be taken for a package.
    if not dry_run:
        victims = await run.remove(victims, now)
    count, unfinished_bytes = await repository.remove_unfinished(dry_run=dry_run)
    freed = sum(size for size, _ in victims) + unfinished_bytes
    return Swept(len(victims), freed, len(listed) - len(victims), count)


class _Sweep:
    """One garbage collection in a repository."""

    def __init__(self, repository: Sweepable, on_progress: OnProgress | None) -> None:
        self._repository, self._on_progress = repository, on_progress
        self._marker = Marker(repository)
        self._leases: dict[tuple[str, float], frozenset[Digest]] = {}

    async def now(self) -> float:
        """The time by the clock of the storage. Raises NotFound when it is no layout, before
        anything is written there."""
        await self._repository.roots()
        name = note_name(REMOVAL)
        await self._repository.write_note(name, b"")
        try:
            return await self._written(name)
        finally:
            await self._repository.remove_notes([name])

    async def needed(self, now: float) -> set[Digest]:
        """What leases and tags lead to. Leases are read first: one that is gone when it is read has
        left a tag."""
        leased: set[Digest] = set()
        for name, written in await self._repository.notes():
            if name.startswith(LEASE) and now - written <= LEASE_S:
                if (name, written) not in self._leases:
                    self._leases[name, written] = await read_note(self._repository, name)
                leased |= self._leases[name, written]
        return leased | await self._marker.mark()

    async def remove(self, victims: list[tuple[int, Digest]], now: float) -> list[tuple[int, Digest]]:
        """Remove in batches the victims that are still not marked. Returns the removed ones."""
        total, done, removed = sum(size for size, _ in victims), 0, list[tuple[int, Digest]]()
        for start in range(0, len(victims), BATCH_BLOBS):
            batch = victims[start : start + BATCH_BLOBS]
            async with self._repository.packing(alone=True):
                removed += await self._remove_batch(batch)
            done += sum(size for size, _ in batch)
            if self._on_progress:
                self._on_progress("removing", done, total)
        notes = await self._repository.notes()
        void = [name for name, written in notes if name.startswith(LEASE) and now - written > LEASE_S]
        void += [name for name, written in notes if name.startswith(REMOVAL) and now - written > REMOVAL_S]
        await self._repository.remove_notes(void)
        return removed

    async def _remove_batch(self, batch: list[tuple[int, Digest]]) -> list[tuple[int, Digest]]:
        name, begun_at, is_open = note_name(REMOVAL), clock(), False
        try:
            await self._repository.write_note(name, encode_note(digest for _, digest in batch))
            needed = await self.needed(await self._written(name))
            gone = [(size, digest) for size, digest in batch if digest not in needed]
            if clock() - begun_at > START_S:
                raise Unavailable(
                    f"{self._repository.url} took over {START_S:.0f} s to say what is needed",
                    remedy="Try again when it is less busy; what has been removed so far was needed by nothing",
                )
            is_open = True
            await self._repository.remove([digest for _, digest in gone])
            is_open = False
        finally:
            # A request that failed or was broken off may yet be carried out: then the note stays
            # until it is void.
            if not is_open:
                await self._repository.remove_notes([name])
        return gone

    async def _written(self, name: str) -> float:
        written = dict(await self._repository.notes()).get(name)
        if written is None:
            raise Unavailable(f"{self._repository.url} does not list what was just written", remedy="Try again")
        return written
