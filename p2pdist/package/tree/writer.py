"""Bringing a tree whose contents have been read into the layout: packs, one catalog, the root, and
their piece lists."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

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
from p2pdist.model.errors import Corrupt, P2PDistError, UsageError
from p2pdist.model.manifest import CATALOG_TYPE, PACK_TYPE, TREE_TYPE
from p2pdist.model.pieces import PieceList
from p2pdist.model.tree import ENTRY_BYTES, PAGE_BYTES, Root, check_memory, content_hash, encode_root
from p2pdist.package.repository.repository import Content, LocalRepository
from p2pdist.package.source.scan import DROPPED_SHOWN_MAX
from p2pdist.package.tree.builder import Draft
from p2pdist.package.tree.cache import Head, Index, Notes, Outcome, Section, StateFile
from p2pdist.package.tree.packfile import PackWriter, Written
from p2pdist.package.tree.pool import Plan, Pool, choose, summary
from p2pdist.package.tree.usage import Ledger

Args = ParamSpec("Args")
Result = TypeVar("Result")


@dataclass(slots=True)
class Built:
    """Packs with what is new and packs with what moved out of old ones; the tree, complete, its
    pages by BLAKE3, None where the pool has them, and what the pool has of it."""

    new: PackWriter
    moved: PackWriter
    draft: Draft = field(default_factory=Draft)
    ledger: Ledger = field(default_factory=lambda: Ledger(Pool(), Notes()))
    pages: dict[bytes, bytes | None] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)


async def store_tree(
    built: Built, pool: Pool, layout: LocalRepository, stopped: threading.Event
) -> tuple[Outcome, int]:
    """Store what the pool lacks; returns how many bytes that were. Raises UsageError, DiskFull,
    Corrupt and P2PDistError."""
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
            pool.known[content.digest] = summary(catalog)
            written += count
        for pack in writer.packs:
            written += await _adopt(layout, pack)
            added.append((PACK_TYPE, pack.content))
    root = Root(*built.draft.counts(), tuple(built.pages))
    _check_readable(built, pool, root, heads)
    top, count = await _add(layout, encode_root(root))
    written += count
    for _, content in added:
        written += await write_small(layout, content.pieces.encode())
    return _outcome(top, added, plan, pool, root, built.draft), written


def remember(built: Built, pool: Pool, state: StateFile, notes: Notes, head: Head) -> None:
    """Save what the next packing may know. Raises P2PDistError, and Damaged."""
    draft = state.draft(notes)
    directories, packs, chunk_lists = built.ledger.remember(built.draft, (built.new, built.moved), draft)
    holdings = built.ledger.holdings
    shared = [
        (chunk, chunk in holdings.needed, {str(name): stored for name, stored in held.items()})
        for chunk, held in holdings.shared.items()
    ]
    index = Index(
        notes.index.volume,
        notes.index.length,
        directories,
        built.sections,
        dict(pool.known),
        packs,
        shared,
        chunk_lists,
    )
    state.save(head, index, draft)


def _prepare(built: Built, pool: Pool, stopped: threading.Event) -> tuple[tuple[Catalog, Catalog], Plan]:
    """On a thread: the catalogs of what is new and of what moves, the latter being written."""
    lists, holdings = built.draft.chunk_lists(), built.ledger.holdings
    plan = choose(pool, holdings.live_bytes(pool.order), built.pages, lists, adds=bool(built.new.packs))
    if plan.rewritten:
        _rewrite(pool, plan, built, stopped)
    found: list[Catalog] = []
    for writer, is_moved in ((built.new, False), (built.moved, True)):
        found.append(
            Catalog(
                tuple(
                    data or pool.page(name)
                    for name, data in built.pages.items()
                    if name in plan.pages and (name in pool.pages) is is_moved
                ),
                tuple(
                    built.ledger.chunk_list(name)
                    for name in lists
                    if name in plan.chunk_lists and (name in pool.chunk_lists) is is_moved
                ),
                tuple(pack.pack for pack in writer.packs),
            )
        )
    return (found[0], found[1]), plan


def _outcome(
    top: Content, added: list[tuple[str, Content]], plan: Plan, pool: Pool, root: Root, draft: Draft
) -> Outcome:
    kept = [pool.catalogs[number] for number in sorted(plan.catalogs)]
    kept += [pool.packs[number].part for number in sorted(plan.packs)]
    own = [part for part in kept if not part.of_base]
    dropped = draft.dropped
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


def _rewrite(pool: Pool, plan: Plan, built: Built, stopped: threading.Event) -> None:
    """Copy the needed chunks of the packs that are given up. Raises Corrupt naming a pack that is
    not what it should be."""
    chunks, order, writer = built.ledger.needed(built.draft), pool.order, built.moved
    holdings = built.ledger.holdings
    for number in sorted(plan.rewritten):
        known = pool.packs[number]
        assert known.path is not None, "what lies elsewhere is never rewritten"
        try:
            with known.path.open("rb") as stream:
                for stored in pool.pack(number).chunks():
                    if stored.chunk not in chunks or not holdings.is_first(known.digest, stored.chunk, order):
                        continue
                    if stopped.is_set():
                        raise P2PDistError("packing was cancelled")
                    data = os.pread(stream.fileno(), stored.stored, stored.offset)
                    if len(data) != stored.stored or content_hash(decode_chunk(data, stored.length)) != stored.chunk:
                        raise Corrupt(
                            f"the pack {known.digest} in the layout was altered",
                            remedy="Delete it and fetch it again, or remove the tags that draw on it",
                        )
                    if stored.chunk not in writer.chunks:
                        writer.add(stored.chunk, stored.length, data)
        except OSError as error:
            raise P2PDistError(f"cannot read {known.path}: {error.strerror}") from error
    writer.close()


def _encode(catalog: Catalog) -> bytes:
    if len(catalog.packs) > PACKS_MAX:
        raise UsageError(f"the source fills {len(catalog.packs)} packs, over the limit of {PACKS_MAX}", remedy=_PARTS)
    size = sum(map(len, (*catalog.pages, *catalog.chunk_lists, *(pack.records for pack in catalog.packs))))
    # A little is left for what MessagePack puts between them.
    if size > CATALOG_BYTES_MAX - (CATALOG_BYTES_MAX >> 4):
        raise UsageError(f"the source needs a catalog of {size} bytes, which is too large", remedy=_PARTS)
    return encode_catalog(catalog)


def _check_readable(built: Built, pool: Pool, root: Root, heads: Iterable[tuple[int, bytes]]) -> None:
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
    count = await write_small(layout, data) + await write_small(layout, pieces.encode())
    return Content(digest_of(data), pieces), count


async def write_small(layout: LocalRepository, data: bytes) -> int:
    """Store a small blob unless it is there; returns how many bytes were written."""
    digest = digest_of(data)
    if await layout.size(digest) == len(data):
        return 0
    await layout.write_small(data)
    return len(data)


async def stoppable(
    stopped: threading.Event, function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
) -> Result:
    """Run a function on a thread; when this call is cancelled, tell it by `stopped` and wait for it
    to end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise
