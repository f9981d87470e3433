"""Collection: blobs that no tag leads to, and no push is about to name, leave a place.

The order is: list blobs; mark what leases and tags lead to (lease.py, mark.py); then, batch by
batch, leave a removal note, read leases and then tags again, and delete what of the batch is still
not needed. Why no blob of a visible tag can get lost is argued in lease.py. A package that is being
packed cannot say beforehand which old packs it will draw on; in a directory packers hold a lock
instead, and a batch waits until none does.

The age that is spared is a second guard, for writers that leave no lease: other tools, or a copy of
files by hand. Ages are by the clock of the storage. A blob that is listed was written before the
marking, so what arrives later is out of reach.

Marking: which blobs the tags of a place lead to.

Every entry of the index is a root. From it the walk goes through documents: manifests of any kind,
nested indexes, what stands under `manifests` or `subject`, and JSON of a media type that is not
known to end there. Of a document every string that is a digest counts as a name, wherever it
stands: layers, config, catalogs, packs, piece lists, and what annotations name (torrent documents,
piece lists). Too much is kept rather than too little.

An index may lack some of what it lists (a copy for one platform alone does), so a document below a
root that is not there ends the walk. A root that cannot be read, or any document that is there and
cannot, ends the marking: what it leads to is not known.
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
from p2pdist.package.repository.leases import (
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
from p2pdist.package.repository.repository import OnProgress

READS_IN_FLIGHT = 64

DOCUMENT_TYPES = frozenset(
    [
        MANIFEST_TYPE,
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.artifact.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    ]
)
"""What must be JSON and names blobs."""
LEAF_TYPES = frozenset(
    [
        *(CONFIG_TYPE, SQUASHFS_TYPE, TREE_TYPE, CATALOG_TYPE, PACK_TYPE, PIECES_TYPE, TORRENT_TYPE, BLOB_TYPE),
        "application/vnd.oci.image.config.v1+json",
        "application/vnd.docker.container.image.v1+json",
    ]
)
"""What is known to lead nowhere, and is not read, also where the index itself names it as it does
torrent documents."""


class Marked(Protocol):
    """The place whose tags are followed; see Origin for the contract."""

    async def roots(self) -> list[tuple[str, Descriptor]]: ...

    async def read(self, digest: Digest, *, limit: int = DOCUMENT_BYTES_MAX) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Document:
    """What a document names, and which of it are documents in their turn: digest, media type, and
    whether it was listed as one."""

    names: frozenset[Digest]
    below: frozenset[tuple[Digest, str, bool]]


LEAF = Document(frozenset(), frozenset())


def read_document(data: bytes, media_type: str) -> Document:
    """What `data` names. Raises Corrupt when it should be a manifest or an index and is no JSON
    object, or lists a document in a way that cannot be followed. Anything else that is no JSON
    object names nothing."""
    try:
        body = msgspec.json.decode(data)
        found = list(_found(body))
    except UNDECODABLE as error:
        if media_type in DOCUMENT_TYPES:
            raise Corrupt(f"it is not JSON: {error}") from error
        return LEAF
    if not isinstance(body, dict):
        if media_type in DOCUMENT_TYPES:
            raise Corrupt("it is not a JSON object")
        return LEAF
    names = frozenset(Digest(text) for text, _, _ in found if is_digest(text))
    below = set()
    for text, kind, listed in found:
        if listed or kind in DOCUMENT_TYPES or (kind.endswith("json") and kind not in LEAF_TYPES):
            if is_digest(text):
                below.add((Digest(text), kind, listed))
            elif listed:
                raise Corrupt(f"it lists {text[:100]!r}, which is no SHA-256 digest")
    return Document(names, frozenset(below))


def _found(body: Any) -> Iterator[tuple[str, str, bool]]:
    """Strings that are digests, with the media type that stands beside them and whether they are
    listed as documents."""
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
    """A document to read: how it was named, by which tag it was reached, and whether the index
    itself names it."""

    digest: Digest
    media_type: str
    listed: bool
    tag: str
    is_root: bool


class Marks:
    """The blobs that the tags of a place lead to. What a document says is remembered, so marking
    again reads only new ones."""

    def __init__(self, place: Marked) -> None:
        self._place = place
        self._known: dict[tuple[Digest, str], Document] = {}
        self._turns = asyncio.Semaphore(READS_IN_FLIGHT)

    async def reached(self) -> set[Digest]:
        """Raises what reading the index raises, and the failure of a document, naming the tag that
        leads to it."""
        roots = await self._place.roots()
        while True:
            try:
                return await self._reached(roots)
            except NotFound:
                # A tag may have been removed since, and another collection have taken what it led
                # to.
                before, roots = roots, await self._place.roots()
                if not set(_named(before)) - set(_named(roots)):
                    raise

    async def _reached(self, roots: list[tuple[str, Descriptor]]) -> set[Digest]:
        front = [_Step(found.digest, found.media_type, True, name, True) for name, found in roots]
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
        if key not in self._known:
            try:
                async with self._turns:
                    data = await self._place.read(step.digest, limit=MANIFEST_BYTES_MAX)
                self._known[key] = read_document(data, step.media_type)
            except NotFound as error:
                if step.is_root:
                    raise _stopped(step, error) from error
                return LEAF  # not remembered: it may arrive yet
            except TooLarge as error:
                if step.listed or step.media_type in DOCUMENT_TYPES:
                    raise _stopped(step, error) from error
                self._known[key] = LEAF
            except P2PDistError as error:
                raise _stopped(step, error) from error
        return self._known[key]


def _named(roots: list[tuple[str, Descriptor]]) -> list[tuple[str, Digest]]:
    return [(name, descriptor.digest) for name, descriptor in roots]


def _stopped(step: _Step, error: P2PDistError) -> P2PDistError:
    kind = Corrupt if isinstance(error, TooLarge) else type(error)
    return kind(
        f"{step.digest}, which {step.tag} leads to, cannot be read: {error.what}",
        remedy="Nothing was removed on its account. Push the package again, or remove the tag with p2pdist rm --at-origin",
        tag=step.tag,
    )


OLDER_THAN_S = 86_400.0
BATCH_BLOBS = 500
"""Removed under one note: what a push may have to wait for."""


class Collectable(Marked, NoteBoard, Protocol):
    """A place that can be collected in; see Origin for the contract."""

    async def blobs(self) -> list[tuple[Digest, int, float]]: ...

    async def remove(self, digests: Sequence[Digest]) -> None: ...

    async def remove_unfinished(self, *, dry_run: bool = False) -> tuple[int, int]: ...

    def packing(self, *, alone: bool = False) -> AbstractAsyncContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Collected:
    """`unfinished` counts what killed writers left, files or directories of them; `bytes_freed`
    counts blobs and these."""

    blobs_removed: int
    bytes_freed: int
    blobs_kept: int
    unfinished: int


async def collect(
    place: Collectable,
    *,
    older_than_s: float = OLDER_THAN_S,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Collected:
    """Remove the blobs that nothing needs and that were written more than `older_than_s` ago. With
    `dry_run` only count them.

    Raises NotFound when the place is no layout; when a tag leads to what cannot be read, an error
    that names the tag, and nothing was removed; Conflict while packages are being packed.
    """
    collection = _Collection(place, on_progress)
    now = await collection.now()
    listed = await place.blobs()
    kept = await collection.needed(now)
    victims = sorted(
        (size, digest) for digest, size, written in listed if digest not in kept and now - written > older_than_s
    )
    # Small ones first: a manifest goes before what it leads to, so that what a killed collection
    # leaves cannot be taken for a package.
    if not dry_run:
        victims = await collection.remove(victims, now)
    count, unfinished_bytes = await place.remove_unfinished(dry_run=dry_run)
    freed = sum(size for size, _ in victims) + unfinished_bytes
    return Collected(len(victims), freed, len(listed) - len(victims), count)


class _Collection:
    def __init__(self, place: Collectable, on_progress: OnProgress | None) -> None:
        self._place, self._on_progress = place, on_progress
        self._marks = Marks(place)
        self._leases: dict[tuple[str, float], frozenset[Digest]] = {}

    async def now(self) -> float:
        """The time by the clock of the storage. Raises NotFound when it is no layout, before
        anything is written there."""
        await self._place.roots()
        name = note_name(REMOVAL)
        await self._place.write_note(name, b"")
        try:
            return await self._written(name)
        finally:
            await self._place.remove_notes([name])

    async def needed(self, now: float) -> set[Digest]:
        """What leases and tags lead to. Leases are read first: one that is gone when it is read has
        left a tag."""
        leased: set[Digest] = set()
        for name, written in await self._place.notes():
            if name.startswith(LEASE) and now - written <= LEASE_S:
                if (name, written) not in self._leases:
                    self._leases[name, written] = await read_note(self._place, name)
                leased |= self._leases[name, written]
        return leased | await self._marks.reached()

    async def remove(self, victims: list[tuple[int, Digest]], now: float) -> list[tuple[int, Digest]]:
        """Remove them in batches, those that are needed by now excepted; returns what was
        removed."""
        total, done, removed = sum(size for size, _ in victims), 0, list[tuple[int, Digest]]()
        for start in range(0, len(victims), BATCH_BLOBS):
            batch = victims[start : start + BATCH_BLOBS]
            async with self._place.packing(alone=True):
                removed += await self._remove_batch(batch)
            done += sum(size for size, _ in batch)
            if self._on_progress:
                self._on_progress("removing", done, total)
        notes = await self._place.notes()
        void = [name for name, written in notes if name.startswith(LEASE) and now - written > LEASE_S]
        void += [name for name, written in notes if name.startswith(REMOVAL) and now - written > REMOVAL_S]
        await self._place.remove_notes(void)
        return removed

    async def _remove_batch(self, batch: list[tuple[int, Digest]]) -> list[tuple[int, Digest]]:
        name, begun_at, is_open = note_name(REMOVAL), clock(), False
        try:
            await self._place.write_note(name, encode_note(digest for _, digest in batch))
            needed = await self.needed(await self._written(name))
            gone = [(size, digest) for size, digest in batch if digest not in needed]
            if clock() - begun_at > START_S:
                raise Unavailable(
                    f"{self._place.url} took over {START_S:.0f} s to say what is needed",
                    remedy="Try again when it is less busy; what has been removed so far was needed by nothing",
                )
            is_open = True
            await self._place.remove([digest for _, digest in gone])
            is_open = False
        finally:
            # A request that failed or was broken off may yet be carried out: then the note stays
            # until it is void.
            if not is_open:
                await self._place.remove_notes([name])
        return gone

    async def _written(self, name: str) -> float:
        found = dict(await self._place.notes()).get(name)
        if found is None:
            raise Unavailable(f"{self._place.url} does not list what was just written", remedy="Try again")
        return found
