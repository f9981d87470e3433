"""Packing a directory as a tree: scan, read what is new, write packs and one catalog with what no catalog has, and the root.

Nothing is written when nothing has changed. What is written lies in the layout before this returns, and no manifest names it yet.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from p2pdist.model.errors import UsageError
from p2pdist.model.package import Manifest
from p2pdist.package.depot import Depot, LocalDepot
from p2pdist.package.pack_writer import PackWriter
from p2pdist.package.pool import Pool, read_pool
from p2pdist.package.scan import Ignore
from p2pdist.package.tree_entries import Assembler
from p2pdist.package.tree_read import ContentReader
from p2pdist.package.tree_scan import TreeScan, check_names, scan_tree
from p2pdist.package.tree_state import Damaged, Head, Outcome, Remembered, StateFile
from p2pdist.package.tree_store import Built, stoppable, store_tree

SECONDS_MAX = (1 << 63) // 1_000_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """What of a directory becomes a tree. `mtime`: the latest modification time that an entry may have, in seconds since 1970."""

    xattrs: bool = False
    ignore: Ignore | None = None
    only: Collection[bytes] | None = None
    mtime: int | None = None


@dataclass(frozen=True, slots=True)
class Base:
    """A package to stack on: digest and body of its manifest, and where its blobs are."""

    digest: str
    name: str
    manifest: Manifest
    depots: list[Depot]


@dataclass(frozen=True, slots=True)
class Tree:
    """A packed tree, `bytes_written` to the layout for it, and what the caller should be told."""

    outcome: Outcome
    bytes_written: int
    warnings: tuple[str, ...] = ()


Found = TypeVar("Found")


async def pack_tree(
    source: Path,
    name: str,
    layout: LocalDepot,
    *,
    base: Base | None = None,
    options: Options,
    on_bytes: Callable[[int, int], None],
) -> Tree:
    """Pack the directory `source` for a package called `name`. `on_bytes` hears of bytes read, and of bytes in all.

    Raises NotFound, UsageError, DiskFull; Corrupt when a file changes meanwhile or a catalog is broken; P2PDistError.
    """
    if options.mtime is not None and not 0 <= options.mtime < SECONDS_MAX:
        raise UsageError(f"{options.mtime} is not a modification time", remedy="Give seconds since 1970")
    scratch = await asyncio.to_thread(layout.scratch)
    scan = await asyncio.to_thread(scan_tree, source, ignore=options.ignore, only=options.only)
    key = (scan.source, options.xattrs, options.mtime, options.only is not None, base.name if base else None)
    state, warnings = StateFile(layout.directory, key), list[str]()
    under = base.digest if base else ""
    head = await asyncio.to_thread(_believed, state.head, None, warnings)
    if head and (head.fingerprint, head.base) == (scan.fingerprint, under) and await _present(layout, head.outcome):
        return Tree(head.outcome, 0)
    before: dict[bytes, Remembered] = await asyncio.to_thread(_believed, state.directories, {}, warnings)
    pool = await read_pool(name, layout, base.manifest if base else None, base.depots if base else [layout])
    built = Built(PackWriter(scratch), PackWriter(scratch))
    stopped = threading.Event()
    try:
        await stoppable(stopped, _build, built, scan, before, pool, options, on_bytes, stopped)
        outcome, written = await store_tree(built, pool, layout, stopped)
    finally:
        stopped.set()
        built.new.abandon()
        built.moved.abandon()
    fingerprint = scan.fingerprint if built.draft.settled else b""
    await asyncio.to_thread(state.save, Head(fingerprint, under, outcome), built.draft.remember())
    return Tree(outcome, written, tuple(warnings))


def _build(
    built: Built,
    scan: TreeScan,
    before: dict[bytes, Remembered],
    pool: Pool,
    options: Options,
    on_bytes: Callable[[int, int], None],
    stopped: threading.Event,
) -> None:
    """On a thread: bring the tree's entries together, and what is new into packs."""
    draft = Assembler(scan, before, pool.available, xattrs=options.xattrs, mtime=options.mtime).assemble()
    total = sum(wanted.row.size for wanted in draft.wanted)
    reader = ContentReader(pool.chunks, built.new, lambda count: on_bytes(count, total), stopped)
    draft.fill(reader.read(draft.wanted))
    check_names(scan, ignore=options.ignore, only=options.only)
    built.new.close()
    built.draft, built.chunk_lists = draft, reader.chunk_lists


def _believed(read: Callable[[], Found], otherwise: Found, warnings: list[str]) -> Found:
    try:
        return read()
    except Damaged as error:
        warning = f"the notes of the last packing are damaged and were not used: {error}"
        if warning not in warnings:
            warnings.append(warning)
        return otherwise


async def _present(layout: LocalDepot, outcome: Outcome) -> bool:
    """Whether all blobs of an earlier outcome are still in the layout."""
    blobs = (outcome.root, *outcome.parts, *outcome.lists)
    sizes = await asyncio.gather(*(layout.size(blob.digest) for blob in blobs))
    return all(blob.size == size for blob, size in zip(blobs, sizes, strict=True))
