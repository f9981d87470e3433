"""Storing a tree in the layout: packs, catalogs, the root, and their piece lists."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2pdist.model.catalog import (
    CATALOG_BYTES_MAX,
    HEAD_BYTES,
    PACKS_MAX,
    Catalog,
    check_expansion,
    decode_chunk,
    encode_catalog,
)
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, P2PDistError, UsageError, remedy_of
from p2pdist.model.manifest import CATALOG_TYPE, PACK_TYPE, TREE_TYPE
from p2pdist.model.pieces import PieceList
from p2pdist.model.tree import ENTRY_BYTES, PAGE_BYTES, Root, check_memory, content_hash, encode_root
from p2pdist.package.repository.contract import Content, LocalRepository
from p2pdist.package.source.scan import DROPPED_SHOWN_MAX
from p2pdist.package.thread import stoppable
from p2pdist.package.tree.builder import TreeBuilder
from p2pdist.package.tree.cache import CacheFile, FilesCache, Head, Index, Outcome, Section
from p2pdist.package.tree.pack_pool import PackPool, Plan, plan_parts, summary
from p2pdist.package.tree.packfile import PackWriter, Written
from p2pdist.package.tree.usage import Usage


@dataclass(slots=True)
class Built:
    """A tree whose contents have been read, before it is stored."""

    new: PackWriter
    """Packs of chunks that no other pack has."""
    moved: PackWriter
    """Packs of chunks that move out of old packs."""
    builder: TreeBuilder = field(default_factory=TreeBuilder)
    usage: Usage = field(default_factory=lambda: Usage(PackPool(), FilesCache()))
    pages: dict[bytes, bytes | None] = field(default_factory=dict)
    """By BLAKE3; None where the pool has the page."""
    sections: list[Section] = field(default_factory=list)


async def store_tree(
    built: Built, pool: PackPool, layout: LocalRepository, stopped: threading.Event
) -> tuple[Outcome, int]:
    """Store the blobs that the pool does not have. Returns the outcome, and how many bytes were
    written. Raises UsageError, DiskFull, Corrupt and P2PDistError."""
    catalogs, plan = await stoppable(stopped, _prepare, built, pool, stopped)
    written = 0
    added: list[tuple[str, Content]] = []
    drawn = plan.catalogs | {number for number, catalog in enumerate(pool.catalogs) if catalog.of_base}
    heads = [pool.head(number) for number in drawn]
    for writer, catalog in zip((built.new, built.moved), catalogs, strict=True):
        if catalog != Catalog():
            data = await asyncio.to_thread(_encode, catalog)
            heads.append((len(data), data[:HEAD_BYTES]))
            content, count = await _add(layout, data)
            added.append((CATALOG_TYPE, content))
            pool.cached[content.digest] = summary(catalog)
            written += count
        for pack in writer.packs:
            written += await _adopt(layout, pack)
            added.append((PACK_TYPE, pack.content))
    root = Root(*built.builder.counts(), tuple(built.pages))
    _check_readable(built, pool, root, heads)
    top, count = await _add(layout, encode_root(root))
    written += count
    for _, content in added:
        written += await write_document(layout, content.pieces.encode())
    return _outcome(top, added, plan, pool, root, built.builder), written


def remember(built: Built, pool: PackPool, cache_file: CacheFile, files_cache: FilesCache, head: Head) -> None:
    """Save the files cache for the next packing. Raises P2PDistError and Damaged."""
    cache_builder = cache_file.builder(files_cache)
    directories, packs, chunk_lists = built.usage.remember(built.builder, (built.new, built.moved), cache_builder)
    chunk_index = built.usage.chunk_index
    shared = [
        (chunk, chunk in chunk_index.needed, {str(name): stored for name, stored in holders.items()})
        for chunk, holders in chunk_index.shared.items()
    ]
    index = Index(
        files_cache.index.volume,
        files_cache.index.length,
        directories,
        built.sections,
        dict(pool.cached),
        packs,
        shared,
        chunk_lists,
    )
    cache_file.save(head, index, cache_builder)


def _prepare(built: Built, pool: PackPool, stopped: threading.Event) -> tuple[tuple[Catalog, Catalog], Plan]:
    """On a thread: the catalogs of new chunks and of chunks that move, after writing the packs of
    the latter."""
    lists, chunk_index = built.builder.chunk_lists(), built.usage.chunk_index
    plan = plan_parts(pool, chunk_index.live_bytes(pool.order), built.pages, lists, adds=bool(built.new.packs))
    if plan.rewritten:
        _rewrite(pool, plan, built, stopped)
    catalogs: list[Catalog] = []
    for writer, is_moved in ((built.new, False), (built.moved, True)):
        catalogs.append(
            Catalog(
                tuple(
                    data or pool.page(name)
                    for name, data in built.pages.items()
                    if name in plan.pages and (name in pool.pages) is is_moved
                ),
                tuple(
                    built.usage.chunk_list(name)
                    for name in lists
                    if name in plan.chunk_lists and (name in pool.chunk_lists) is is_moved
                ),
                tuple(pack.pack for pack in writer.packs),
            )
        )
    return (catalogs[0], catalogs[1]), plan


def _outcome(
    top: Content, added: list[tuple[str, Content]], plan: Plan, pool: PackPool, root: Root, builder: TreeBuilder
) -> Outcome:
    kept = [pool.catalogs[number] for number in sorted(plan.catalogs)]
    kept += [pool.packs[number].part for number in sorted(plan.packs)]
    own = [part for part in kept if not part.of_base]
    dropped = builder.dropped
    return Outcome(
        top.descriptor(TREE_TYPE),
        (*(content.descriptor(kind) for kind, content in added), *(part.described for part in own)),
        (
            top.pieces_descriptor(),
            *(content.pieces_descriptor() for _, content in added),
            *(part.pieces for part in own),
        ),
        root.files,
        root.bytes_total,
        tuple(dropped[:DROPPED_SHOWN_MAX]),
        len(dropped),
    )


def _rewrite(pool: PackPool, plan: Plan, built: Built, stopped: threading.Event) -> None:
    """Copy the needed chunks of the packs that the plan rewrites. Raises Corrupt naming a pack that
    was altered."""
    chunks, order, writer = built.usage.needed(built.builder), pool.order, built.moved
    chunk_index = built.usage.chunk_index
    for number in sorted(plan.rewritten):
        pack = pool.packs[number]
        assert pack.path is not None, "what lies elsewhere is never rewritten"
        try:
            with pack.path.open("rb") as stream:
                for stored in pool.pack(number).chunks():
                    if stored.chunk not in chunks or not chunk_index.is_first(pack.digest, stored.chunk, order):
                        continue
                    if stopped.is_set():
                        raise P2PDistError("packing was cancelled")
                    data = os.pread(stream.fileno(), stored.stored, stored.offset)
                    if len(data) != stored.stored or content_hash(decode_chunk(data, stored.length)) != stored.chunk:
                        raise Corrupt(
                            f"the pack {pack.digest} in the layout was altered",
                            remedy="Delete it and fetch it again, or remove the tags that draw on it",
                        )
                    if stored.chunk not in writer.chunks:
                        writer.add(stored.chunk, stored.length, data)
        except OSError as error:
            raise P2PDistError(
                f"cannot read {pack.path}: {error.strerror}",
                remedy=remedy_of(error),
            ) from error
    writer.close()


def _encode(catalog: Catalog) -> bytes:
    if len(catalog.packs) > PACKS_MAX:
        raise UsageError(f"the source fills {len(catalog.packs)} packs, over the limit of {PACKS_MAX}", remedy=_PARTS)
    size = sum(map(len, (*catalog.pages, *catalog.chunk_lists, *(pack.records for pack in catalog.packs))))
    # A little is left for what MessagePack puts between them.
    if size > CATALOG_BYTES_MAX - (CATALOG_BYTES_MAX >> 4):
        raise UsageError(f"the source needs a catalog of {size} bytes, which is too large", remedy=_PARTS)
    return encode_catalog(catalog)


def _check_readable(built: Built, pool: PackPool, root: Root, heads: Iterable[tuple[int, bytes]]) -> None:
    """Raises UsageError for a tree that every agent would refuse: it, or the catalogs with these
    heads, would take too much memory."""
    encoded = sum(len(data) if data else pool.sizes[name] for name, data in built.pages.items())
    try:
        check_memory(root.entries * ENTRY_BYTES + len(root.pages) * PAGE_BYTES + encoded)
        check_expansion(heads)
    except Corrupt as error:
        raise UsageError(f"no host would take the package: {error.what}", remedy=_FEWER) from error


_FEWER = "Pack an image (--format squashfs), fewer files into each package, or into a layout without large packages (--layout)"
_PARTS = "Pack parts of it as layers, one on the other with --base"


async def _adopt(layout: LocalRepository, pack: Written) -> int:
    if await layout.size(pack.content.digest) == pack.content.size:
        return 0
    await layout.import_file(pack.content.digest, pack.path)
    return pack.content.size


async def _add(layout: LocalRepository, data: bytes) -> tuple[Content, int]:
    """Store a document with its piece list; returns how many bytes were not there."""
    pieces = await asyncio.to_thread(PieceList.of_stream, io.BytesIO(data), len(data))
    count = await write_document(layout, data) + await write_document(layout, pieces.encode())
    return Content(digest_of(data), pieces), count


async def write_document(layout: LocalRepository, data: bytes) -> int:
    """Store a small blob unless it is there; returns how many bytes were written."""
    digest = digest_of(data)
    if await layout.size(digest) == len(data):
        return 0
    await layout.write_document(data)
    return len(data)
