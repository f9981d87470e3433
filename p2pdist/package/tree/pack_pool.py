"""The pack pool: the catalogs at hand and what they have, so that a new tree stores only what none
of them has.

At hand are the catalogs of the base and of the newest PACKAGES_MAX packages with trees in
the local layout. A pack counts only while it can be sent: when it lies in the layout, or belongs to
the base. Where several packs have a chunk, or several catalogs a page, the base comes first, since
the package draws on it anyhow, then packages of the same name, newest first, since hosts are likely
to have these.

A tree could draw on all catalogs that have a page or chunk of it, and each version would add one
catalog and one pack. Two rules keep manifests small and spare new hosts dead bytes:

- The needed chunks of a pack are written anew when they are less than a quarter of it.
- A tree that would draw on more than CATALOGS_MAX catalogs gets a new one in place of the ones of
  which it needs least, with the chunks of their packs, until CATALOGS_KEPT are left. So this
  happens once in many versions, and the large catalogs stay.

The base's catalogs and packs stay as they are. Chunks that are written anew come from packs, not
from files, and go into packs and a catalog of their own, behind the new ones in the manifest: a
host with the earlier version has all of them and can skip these.
"""

from __future__ import annotations

import asyncio
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.model.catalog import CATALOG_BYTES_MAX, HEAD_BYTES, Catalog, Pack, decode_catalog
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, remedy_of
from p2pdist.model.manifest import (
    CATALOG_TYPE,
    MANIFEST_BYTES_MAX,
    MANIFEST_TYPE,
    TREE_TYPE,
    Descriptor,
    Manifest,
    decode_manifest,
)
from p2pdist.model.tree import content_hash
from p2pdist.package.repository.contract import LocalRepository, Repository, read_document
from p2pdist.package.tree.cache import CachedCatalog

CATALOGS_MAX = 48
CATALOGS_KEPT = 24
LIVE_DIVISOR = 4
PACKAGES_MAX = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """Which catalogs and packs of the pool a tree draws on, by number, and what is written anew."""

    catalogs: frozenset[int]
    packs: frozenset[int]
    rewritten: frozenset[int]
    """Packs whose needed chunks are written anew."""
    pages: frozenset[bytes]
    """Pages that the new catalogs carry, by BLAKE3."""
    chunk_lists: frozenset[bytes]
    """Chunk lists that the new catalogs carry, by BLAKE3."""


def plan_parts(
    pool: PackPool, live: Mapping[int, int], pages: Collection[bytes], chunk_lists: Collection[bytes], *, adds: bool
) -> Plan:
    """The plan of a tree with these pages and chunk lists, that needs `live` stored bytes of packs,
    by number; `adds`: new chunks were written, so there will be a new catalog."""
    rewritten = {
        number
        for number, count in live.items()
        if not pool.packs[number].part.of_base and count * LIVE_DIVISOR < pool.packs[number].size
    }
    weight = _weights(pool, live, rewritten, pages, chunk_lists)
    own = sorted((count, number) for number, count in weight.items() if not pool.catalogs[number].of_base)
    adds = adds or any(name not in pool.pages for name in pages)
    adds = adds or any(name not in pool.chunk_lists for name in chunk_lists)
    fresh = adds + bool(rewritten)
    merged: set[int] = set()
    if len(own) + fresh > CATALOGS_MAX:
        merged = {number for _, number in own[: len(own) - CATALOGS_KEPT]}
    rewritten |= {
        number for number in live if pool.packs[number].catalog in merged and not pool.packs[number].part.of_base
    }
    kept = frozenset(weight) - merged
    return Plan(
        kept,
        frozenset(live) - rewritten,
        frozenset(rewritten),
        frozenset(name for name in pages if pool.pages.get(name, -1) not in kept),
        frozenset(name for name in chunk_lists if pool.chunk_lists.get(name, -1) not in kept),
    )


def _weights(
    pool: PackPool,
    live: Mapping[int, int],
    rewritten: Collection[int],
    pages: Collection[bytes],
    chunk_lists: Collection[bytes],
) -> Counter[int]:
    """Bytes that the tree needs of each catalog and its packs."""
    weight: Counter[int] = Counter()
    for number, count in live.items():
        if number not in rewritten:
            weight[pool.packs[number].catalog] += count
    for name in pages:
        if name in pool.pages:
            weight[pool.pages[name]] += pool.sizes[name]
    for name in chunk_lists:
        if name in pool.chunk_lists:
            weight[pool.chunk_lists[name]] += pool.sizes[name]
    return weight


@dataclass(frozen=True, slots=True)
class Part:
    """A catalog or pack as manifests name it, with its piece list. `of_base`: it belongs to the
    base, so the package draws on it in any case."""

    described: Descriptor
    pieces: Descriptor
    of_base: bool


@dataclass(frozen=True, slots=True)
class PooledPack:
    """A pack, the number of its catalog, and where it lies: None when not in the layout."""

    part: Part
    digest: Digest
    size: int
    catalog: int
    path: Path | None


@dataclass(slots=True)
class PackPool:
    """Catalogs and packs by number. Keys of type bytes are BLAKE3. `add` fills all fields; a
    catalog is decoded at the first read of a page, chunk list or record in it."""

    catalogs: list[Part] = field(default_factory=list)
    packs: list[PooledPack] = field(default_factory=list)
    pages: dict[bytes, int] = field(default_factory=dict)
    """The number of the first catalog that has a page."""
    chunk_lists: dict[bytes, int] = field(default_factory=dict)
    """The number of the first catalog that has a chunk list."""
    sizes: dict[bytes, int] = field(default_factory=dict)
    """Bytes of the pages and chunk lists."""
    cached: dict[str, CachedCatalog] = field(default_factory=dict)
    """What each catalog has, by its digest; the files cache keeps it."""
    _paths: list[Path] = field(default_factory=list)
    """Where the catalogs lie, by number."""
    _decoded: dict[int, Catalog] = field(default_factory=dict)
    _carried: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    """Pages and chunk lists of decoded catalogs, by number."""

    def add(
        self, part: Part, path: Path, catalog: CachedCatalog | Catalog, packs: Mapping[Digest, tuple[Part, Path | None]]
    ) -> None:
        """Add a catalog, which lies at `path`, and its usable packs. What
        another catalog has already stays there."""
        number = len(self.catalogs)
        self.catalogs.append(part)
        self._paths.append(path)
        if isinstance(catalog, Catalog):
            self._decoded[number] = catalog
            catalog = summary(catalog)
        self.cached[part.described.digest] = catalog
        for name, size in catalog.pages:
            self.pages.setdefault(name, number)
            self.sizes[name] = size
        for name, size in catalog.chunk_lists:
            self.chunk_lists.setdefault(name, number)
            self.sizes[name] = size
        for digest, size in catalog.packs:
            if usable := packs.get(Digest(digest)):
                self.packs.append(PooledPack(usable[0], Digest(digest), size, number, usable[1]))

    @property
    def order(self) -> list[Digest]:
        """The digests of the packs by number."""
        return [pack.digest for pack in self.packs]

    def head(self, number: int) -> tuple[int, bytes]:
        """Length and first bytes of a catalog. Raises P2PDistError."""
        path = self._paths[number]
        try:
            with path.open("rb") as stream:
                return self.catalogs[number].described.size, stream.read(HEAD_BYTES)
        except OSError as error:
            raise P2PDistError(
                f"cannot read {path}: {error.strerror}",
                remedy=remedy_of(error),
            ) from error

    def pack(self, number: int) -> Pack:
        """The pack with its records. Raises Corrupt."""
        pooled = self.packs[number]
        return next(pack for pack in self._catalog(pooled.catalog).packs if pack.digest == pooled.digest)

    def page(self, name: bytes) -> bytes:
        """The encoded page. Raises Corrupt."""
        return self._carry(self.pages[name])[name]

    def chunk_list(self, name: bytes) -> bytes:
        """The encoded chunk list. Raises Corrupt."""
        return self._carry(self.chunk_lists[name])[name]

    def _carry(self, number: int) -> dict[bytes, bytes]:
        if number not in self._carried:
            catalog = self._catalog(number)
            self._carried[number] = {content_hash(data): data for data in (*catalog.pages, *catalog.chunk_lists)}
        return self._carried[number]

    def _catalog(self, number: int) -> Catalog:
        if number not in self._decoded:
            try:
                # It was verified when the pool was made, and nothing is removed from the layout
                # meanwhile.
                self._decoded[number] = decode_catalog(self._paths[number].read_bytes())
            except OSError as error:
                raise P2PDistError(
                    f"cannot read {self._paths[number]}: {error.strerror}",
                    remedy=remedy_of(error),
                ) from error
        return self._decoded[number]


def summary(catalog: Catalog) -> CachedCatalog:
    """What the files cache keeps of a catalog."""
    return CachedCatalog(
        tuple((content_hash(page), len(page)) for page in catalog.pages),
        tuple((content_hash(data), len(data)) for data in catalog.chunk_lists),
        tuple((pack.digest, pack.size) for pack in catalog.packs),
    )


async def read_pack_pool(
    name: str,
    layout: LocalRepository,
    base: Manifest | None,
    repositories: list[Repository],
    cached: Mapping[str, CachedCatalog],
) -> PackPool:
    """The pool for a new version of the package `name`. The base's catalogs are brought into the
    layout from `repositories`. Catalogs that are `cached`, by digest, are verified but not decoded.

    Raises NotFound and Corrupt naming the catalog that cannot be read.
    """
    manifests = await _manifests(name, layout)
    if base:
        manifests.insert(0, base)
    parts = _parts(manifests, base)
    sizes = await asyncio.to_thread(blob_sizes, layout, parts)
    packs: dict[Digest, tuple[Part, Path | None]] = {}
    for digest, part in parts.items():
        local = sizes[digest] == part.described.size
        if local or part.of_base:
            packs[digest] = (part, layout.blob_path(digest) if local else None)
    pool = PackPool()
    for digest, part in parts.items():
        if part.described.media_type == CATALOG_TYPE:
            sources: list[Repository] = repositories if part.of_base else [layout]
            summarized = cached.get(digest)
            catalog = await _read(part.described, sources, decode=summarized is None, into=layout)
            pool.add(part, layout.blob_path(digest), catalog or summarized or CachedCatalog((), (), ()), packs)
    return pool


def blob_sizes(layout: LocalRepository, digests: Iterable[Digest]) -> dict[Digest, int | None]:
    """Sizes in bytes of blobs in the layout, None for a blob that is not there."""
    sizes: dict[Digest, int | None] = {}
    for digest in digests:
        try:
            status = layout.blob_path(digest).stat()
        except OSError:  # what cannot be reached cannot be drawn on
            sizes[digest] = None
        else:
            sizes[digest] = status.st_size if stat.S_ISREG(status.st_mode) else None
    return sizes


async def read_catalog(described: Descriptor, repositories: list[Repository]) -> Catalog:
    """Read a catalog. Raises what the repositories raise, naming the catalog."""
    catalog = await _read(described, repositories, decode=True)
    assert catalog is not None
    return catalog


async def _read(
    described: Descriptor, repositories: list[Repository], *, decode: bool, into: LocalRepository | None = None
) -> Catalog | None:
    """Read a catalog, verified, and keep a copy `into` a layout. None when it is not to be
    decoded."""
    try:
        data = await read_document(described.digest, repositories, limit=CATALOG_BYTES_MAX)
        catalog = await asyncio.to_thread(decode_catalog, data) if decode else None
    except P2PDistError as error:
        kind = type(error) if isinstance(error, NotFound | Corrupt) else P2PDistError
        raise kind(
            f"the catalog {described.digest} cannot be read: {error.what}",
            remedy=error.remedy or "Fetch it again from where it was pushed to, or remove the tags that draw on it",
        ) from error
    if into and await into.size(described.digest) != described.size:
        await into.write_document(data)
    return catalog


async def _manifests(name: str, layout: LocalRepository) -> list[Manifest]:
    """The newest packages with trees in the layout: first the ones of this name, then by age."""
    aged: dict[Digest, tuple[bool, int]] = {}
    for tag, described in await layout.tags():
        if described.media_type != MANIFEST_TYPE:  # a torrent, which may be larger than a manifest
            continue
        try:
            written = layout.blob_path(described.digest).stat().st_mtime_ns
        except OSError as error:
            raise NotFound(
                f"the manifest {described.digest} of {tag} is not at {layout.url}", remedy="Remove the tag"
            ) from error
        same = tag.rpartition(":")[0] == name
        aged[described.digest] = (same or aged.get(described.digest, (False, 0))[0], written)
    newest = sorted(aged, key=lambda digest: (-aged[digest][1], digest))
    manifests: list[Manifest] = []
    order: list[bool] = []
    for digest in newest:
        data = await layout.read(digest, limit=MANIFEST_BYTES_MAX)
        # Other tools keep manifests of their own in a layout.
        if TREE_TYPE.encode() in data:
            manifests.append(decode_manifest(data))
            order.append(aged[digest][0])
            if len(manifests) == PACKAGES_MAX:
                break
    return [manifests[index] for index in sorted(range(len(manifests)), key=lambda index: not order[index])]


def _parts(manifests: Iterable[Manifest], base: Manifest | None) -> dict[Digest, Part]:
    """The parts that manifests name, each once, in order of preference."""
    parts: dict[Digest, Part] = {}
    for manifest in manifests:
        lists = {item.digest: item for item in manifest.piece_lists}
        for described in manifest.parts:
            part = Part(described, lists[described.pieces_digest], manifest is base)
            parts.setdefault(described.digest, part)
    return parts
