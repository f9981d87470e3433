"""Marking: which blobs the tags of a place lead to.

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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, P2PDistError, TooLarge
from p2pdist.model.manifest import (
    BLOB_TYPE,
    CATALOG_TYPE,
    CONFIG_TYPE,
    MANIFEST_BYTES_MAX,
    MANIFEST_TYPE,
    PACK_TYPE,
    PIECES_TYPE,
    SMALL_BYTES_MAX,
    SQUASHFS_TYPE,
    TREE_TYPE,
    Descriptor,
)
from p2pdist.model.torrent import TORRENT_TYPE

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

    async def read(self, digest: Digest, *, limit: int = SMALL_BYTES_MAX) -> bytes: ...


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
