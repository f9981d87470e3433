"""The pool: what the catalogs at hand know, so that a new tree stores only what none of them has.

At hand are the catalogs of the base, and those of the newest PACKAGES_MAX packages with trees in the local layout. A pack counts only
while it can be sent: when it lies in the layout, or belongs to the base. Where several packs have a chunk, or several catalogs a page,
the base comes first, since the package draws on it anyhow, then packages of the same name, newest first, since hosts are likely to
have these.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.model.catalog import CATALOG_BYTES_MAX, Catalog, Pack, decode_catalog
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError
from p2pdist.model.package import (
    CATALOG_TYPE,
    MANIFEST_BYTES_MAX,
    TREE_TYPE,
    Descriptor,
    Manifest,
    decode_manifest,
)
from p2pdist.model.tree import WHOLE_MAX, ChunkList, Entry, File, content_hash
from p2pdist.package.depot import Depot, LocalDepot, read_small

PACKAGES_MAX = 64
_RECORD = struct.Struct("<32sII")
"""A pack's record of a chunk (catalog.py): BLAKE3, length, stored length."""


@dataclass(frozen=True, slots=True)
class Part:
    """A catalog or pack as manifests name it, with its piece list. `of_base`: the package draws on it whatever its own tree needs."""

    described: Descriptor
    pieces: Descriptor
    of_base: bool


@dataclass(frozen=True, slots=True)
class KnownPack:
    """A pack, the number of its catalog, and where it lies: None when not in the layout. `own` are the chunks that are taken from it and
    from no other pack, with their stored lengths."""

    part: Part
    pack: Pack
    catalog: int
    path: Path | None
    own: dict[bytes, int]


@dataclass(slots=True)
class Pool:
    """Catalogs and packs by number; the chunks that packs have; the number of the catalog that has a page; of the catalog that has a chunk
    list, with its encoded bytes. All keys are BLAKE3."""

    catalogs: list[Part] = field(default_factory=list)
    packs: list[KnownPack] = field(default_factory=list)
    chunks: set[bytes] = field(default_factory=set)
    pages: dict[bytes, int] = field(default_factory=dict)
    chunk_lists: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)
    sizes: dict[bytes, int] = field(default_factory=dict)
    """Bytes of the pages and chunk lists."""

    def add(self, part: Part, catalog: Catalog, packs: dict[Digest, tuple[Part, Path | None]]) -> None:
        """Add a catalog and those of its packs that can be used. What is known already stays where it was."""
        number = len(self.catalogs)
        self.catalogs.append(part)
        for page in catalog.pages:
            name = content_hash(page)
            self.pages.setdefault(name, number)
            self.sizes[name] = len(page)
        for data in catalog.chunk_lists:
            name = content_hash(data)
            self.chunk_lists.setdefault(name, (number, data))
            self.sizes[name] = len(data)
        for pack in catalog.packs:
            if found := packs.get(pack.digest):
                records = _RECORD.iter_unpack(pack.records)
                own = {chunk: stored for chunk, _, stored in records if chunk not in self.chunks}
                self.packs.append(KnownPack(found[0], pack, number, found[1], own))
                self.chunks.update(own)

    def available(self, entries: Iterable[Entry]) -> bool:
        """Whether packs have the whole contents of all files among the entries."""
        chunks = self.chunks
        for entry in entries:
            if type(entry) is not File or not entry.size:
                continue
            if not (self._cut_available(entry) if entry.size > WHOLE_MAX else entry.content in chunks):
                return False
        return True

    def _cut_available(self, file: File) -> bool:
        known = self.chunk_lists.get(file.chunks)
        return known is not None and all(name in self.chunks for name, _ in ChunkList.decode(known[1]).chunks)


async def read_pool(name: str, layout: LocalDepot, base: Manifest | None, depots: list[Depot]) -> Pool:
    """The pool for a new version of the package `name`. The base's catalogs are brought into the layout from `depots`.

    Raises NotFound and Corrupt naming the catalog that cannot be read.
    """
    manifests = await _manifests(name, layout)
    if base:
        manifests.insert(0, base)
    parts = _parts(manifests, base)
    packs: dict[Digest, tuple[Part, Path | None]] = {}
    for digest, part in parts.items():
        local = await layout.size(digest) == part.described.size
        if local or part.of_base:
            packs[digest] = (part, layout.blob_path(digest) if local else None)
    pool = Pool()
    for part in parts.values():
        if part.described.media_type == CATALOG_TYPE:
            catalog = await read_catalog(part.described, depots if part.of_base else [layout], into=layout)
            await asyncio.to_thread(pool.add, part, catalog, packs)
    return pool


async def read_catalog(described: Descriptor, depots: list[Depot], *, into: LocalDepot | None = None) -> Catalog:
    """Read a catalog, and keep a copy `into` a layout. Raises what the depots raise, naming the catalog."""
    try:
        data = await read_small(described.digest, depots, limit=CATALOG_BYTES_MAX)
        catalog = await asyncio.to_thread(decode_catalog, data)
    except P2PDistError as error:
        kind = type(error) if isinstance(error, NotFound | Corrupt) else P2PDistError
        raise kind(
            f"the catalog {described.digest} cannot be read: {error.what}",
            remedy=error.remedy or "Fetch it again from where it was pushed to, or remove the tags that draw on it",
        ) from error
    if into and await into.size(described.digest) != described.size:
        await into.write_small(data)
    return catalog


async def _manifests(name: str, layout: LocalDepot) -> list[Manifest]:
    """Packages with trees in the layout, the newest ones: those of this name first, then by age."""
    aged: dict[Digest, tuple[bool, int]] = {}
    for tag, described in await layout.tags():
        try:
            written = layout.blob_path(described.digest).stat().st_mtime_ns
        except OSError as error:
            raise NotFound(
                f"the manifest {described.digest} of {tag} is not at {layout.url}", remedy="Remove the tag"
            ) from error
        same = tag.rpartition(":")[0] == name
        aged[described.digest] = (same or aged.get(described.digest, (False, 0))[0], written)
    newest = sorted(aged, key=lambda digest: (-aged[digest][1], digest))
    found: list[Manifest] = []
    order: list[bool] = []
    for digest in newest:
        data = await layout.read(digest, limit=MANIFEST_BYTES_MAX)
        # Other tools keep manifests of their own in a layout.
        if TREE_TYPE.encode() in data:
            found.append(decode_manifest(data))
            order.append(aged[digest][0])
            if len(found) == PACKAGES_MAX:
                break
    return [found[index] for index in sorted(range(len(found)), key=lambda index: not order[index])]


def _parts(manifests: Iterable[Manifest], base: Manifest | None) -> dict[Digest, Part]:
    """The parts that manifests name, each once, in order of preference."""
    parts: dict[Digest, Part] = {}
    for manifest in manifests:
        lists = {item.digest: item for item in manifest.piece_lists}
        for described in manifest.parts:
            found = Part(described, lists[described.pieces_digest], manifest is base)
            parts.setdefault(described.digest, found)
    return parts
