"""Bringing a tree whose contents have been read into the layout: packs, one catalog, the root, and their piece lists."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from p2pdist.model.catalog import CATALOG_BYTES_MAX, PACKS_MAX, Catalog, decode_chunk, encode_catalog
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, P2PDistError, UsageError
from p2pdist.model.package import CATALOG_TYPE, PACK_TYPE, TREE_TYPE
from p2pdist.model.pieces import PieceList
from p2pdist.model.tree import PAGE_ENTRIES_MAX, WHOLE_MAX, ChunkList, Entry, File, Root, content_hash, encode_root
from p2pdist.package.content import Content
from p2pdist.package.depot import LocalDepot
from p2pdist.package.pack_writer import PackWriter, Written
from p2pdist.package.pool import Pool
from p2pdist.package.scan import DROPPED_SHOWN_MAX
from p2pdist.package.tree_entries import Draft
from p2pdist.package.tree_plan import Plan, choose
from p2pdist.package.tree_state import Outcome, encode_entries

Args = ParamSpec("Args")
Result = TypeVar("Result")


@dataclass(slots=True)
class Built:
    """Packs with what is new and packs with what moved out of old ones; the tree, complete, and the chunk lists that were made for it."""

    new: PackWriter
    moved: PackWriter
    draft: Draft = field(default_factory=lambda: Draft([], [], [], [], []))
    chunk_lists: dict[bytes, bytes] = field(default_factory=dict)


async def store_tree(built: Built, pool: Pool, layout: LocalDepot, stopped: threading.Event) -> tuple[Outcome, int]:
    """Store what the pool lacks; returns how many bytes that were. Raises UsageError, DiskFull, Corrupt and P2PDistError."""
    files = [entry for entry in built.draft.entries if type(entry) is File]
    pages, root = await asyncio.to_thread(_pages, built.draft, files)
    lists = _chunk_lists(files, built, pool)
    chunks = _chunks(files, lists.values())
    plan = await asyncio.to_thread(choose, pool, chunks, pages, lists, adds=bool(built.new.packs))
    await stoppable(stopped, _rewrite, pool, plan, chunks, built.moved, stopped)
    written = 0
    added: list[tuple[str, Content]] = []
    for writer, is_moved in ((built.new, False), (built.moved, True)):
        catalog = Catalog(
            tuple(page for name, page in pages.items() if name in plan.pages and (name in pool.pages) is is_moved),
            tuple(
                data
                for name, data in lists.items()
                if name in plan.chunk_lists and (name in pool.chunk_lists) is is_moved
            ),
            tuple(pack.pack for pack in writer.packs),
        )
        if catalog != Catalog():
            content, count = await _add(layout, await asyncio.to_thread(_encode, catalog))
            added.append((CATALOG_TYPE, content))
            written += count
        for pack in writer.packs:
            written += await _adopt(layout, pack)
            added.append((PACK_TYPE, pack.content))
    top, count = await _add(layout, encode_root(root))
    written += count
    for _, content in added:
        written += await write_small(layout, content.pieces.encode())
    return _outcome(top, added, plan, pool, root, built.draft), written


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


def _pages(draft: Draft, files: Sequence[File]) -> tuple[dict[bytes, bytes], Root]:
    encoded = (encode_entries(page) for page in cut_pages(draft.entries, draft.ends))
    pages = {content_hash(page): page for page in encoded}
    return pages, Root(len(draft.entries), len(files), sum(file.size for file in files), tuple(pages))


def cut_pages(entries: Sequence[Entry], ends: Collection[bytes]) -> Iterator[Sequence[Entry]]:
    """The entries of each page of a tree (tree.py); `ends` are the paths of the entries behind which a page ends."""
    begin = 0
    for end in (*(place for place, entry in enumerate(entries, start=1) if entry.path in ends), len(entries)):
        while begin < end:
            page = entries[begin : min(end, begin + PAGE_ENTRIES_MAX)]
            yield page
            begin += len(page)


def _chunk_lists(files: Iterable[File], built: Built, pool: Pool) -> dict[bytes, bytes]:
    """The encoded chunk lists of large files by BLAKE3, in walking order."""
    names = dict.fromkeys(file.chunks for file in files if file.size > WHOLE_MAX)
    return {name: built.chunk_lists[name] if name in built.chunk_lists else pool.chunk_lists[name][1] for name in names}


def _chunks(files: Iterable[File], lists: Iterable[bytes]) -> set[bytes]:
    """All chunks that a tree needs."""
    found = {file.content for file in files if 0 < file.size <= WHOLE_MAX}
    for data in lists:
        found.update(name for name, _ in ChunkList.decode(data).chunks)
    return found


def _rewrite(pool: Pool, plan: Plan, chunks: set[bytes], writer: PackWriter, stopped: threading.Event) -> None:
    """On a thread: copy the needed chunks of the packs that are given up. Raises Corrupt naming a pack that is not what it should be."""
    for number in sorted(plan.rewritten):
        known = pool.packs[number]
        assert known.path is not None, "what lies elsewhere is never rewritten"
        try:
            with known.path.open("rb") as stream:
                for stored in known.pack.chunks():
                    if stored.chunk not in chunks or stored.chunk not in known.own:
                        continue
                    if stopped.is_set():
                        raise P2PDistError("packing was cancelled")
                    data = os.pread(stream.fileno(), stored.stored, stored.offset)
                    if len(data) != stored.stored or content_hash(decode_chunk(data, stored.length)) != stored.chunk:
                        raise Corrupt(
                            f"the pack {known.pack.digest} in the layout was altered",
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


_PARTS = "Pack parts of it as layers, one on the other with --base"


async def _adopt(layout: LocalDepot, pack: Written) -> int:
    if await layout.size(pack.content.digest) == pack.content.size:
        return 0
    await layout.adopt(pack.content.digest, pack.path)
    return pack.content.size


async def _add(layout: LocalDepot, data: bytes) -> tuple[Content, int]:
    """Store a document with its piece list; returns how many bytes were not there."""
    pieces = await asyncio.to_thread(PieceList.of_stream, io.BytesIO(data), len(data))
    count = await write_small(layout, data) + await write_small(layout, pieces.encode())
    return Content(digest_of(data), pieces), count


async def write_small(layout: LocalDepot, data: bytes) -> int:
    """Store a small blob unless it is there; returns how many bytes were written."""
    digest = digest_of(data)
    if await layout.size(digest) == len(data):
        return 0
    await layout.write_small(data)
    return len(data)


async def stoppable(
    stopped: threading.Event, function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
) -> Result:
    """Run a function on a thread; when this call is cancelled, tell it by `stopped` and wait for it to end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise
