"""Packing a directory as a tree: scan, read what is new, write packs and one catalog with what no
catalog has, and the root.

Nothing is written when nothing has changed. What is written lies in the layout before this returns,
and no manifest names it yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import Manifest
from p2pdist.package.repository.repository import LocalRepository, Repository
from p2pdist.package.source.scan import Ignore, TreeScan, check_names, scan_tree
from p2pdist.package.tree.cache import Damaged, Head, Notes, Outcome, StateFile
from p2pdist.package.tree.entries import Assembler
from p2pdist.package.tree.packfile import PackWriter
from p2pdist.package.tree.pool import Pool, blob_sizes, read_pool
from p2pdist.package.tree.reader import ContentReader
from p2pdist.package.tree.usage import Ledger
from p2pdist.package.tree.writer import Built, remember, stoppable, store_tree

SECONDS_MAX = (1 << 63) // 1_000_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """What of a directory becomes a tree. `mtime`: the latest modification time that an entry may
    have, in seconds since 1970; with `timeless` directories have the time 0. `modes`: those that
    entries are to have, by path, in the place of their own, only for a source that no packing has
    seen; with `world_readable` everybody may read, and execute what anybody may."""

    xattrs: bool = False
    ignore: Ignore | None = None
    only: Collection[bytes] | None = None
    mtime: int | None = None
    modes: Mapping[bytes, int] = field(default_factory=dict)
    timeless: bool = False
    world_readable: bool = False


@dataclass(frozen=True, slots=True)
class Base:
    """A package to stack on: digest and body of its manifest, and where its blobs are."""

    digest: str
    name: str
    manifest: Manifest
    repositories: list[Repository]


@dataclass(frozen=True, slots=True)
class Tree:
    """A packed tree, `bytes_written` to the layout for it, what its directory looked like, and what
    the caller should be told."""

    outcome: Outcome
    bytes_written: int
    scan: TreeScan
    warnings: tuple[str, ...] = ()


async def pack_tree(
    source: Path,
    name: str,
    layout: LocalRepository,
    *,
    base: Base | None = None,
    options: Options,
    on_bytes: Callable[[int, int], None],
) -> Tree:
    """Pack the directory `source` for a package called `name`. `on_bytes` hears of bytes read, and
    of bytes in all.

    Raises NotFound, UsageError, DiskFull; Corrupt when a file changes meanwhile or a catalog is
    broken; P2PDistError.
    """
    if options.mtime is not None and not 0 <= options.mtime < SECONDS_MAX:
        raise UsageError(f"{options.mtime} is not a modification time", remedy="Give seconds since 1970")
    scan = await asyncio.to_thread(scan_tree, source, ignore=options.ignore, only=options.only)
    kept = (options.xattrs, options.mtime, options.only is not None, options.timeless, options.world_readable)
    key = (scan.source, *kept, base.name if base else None)
    work = _Work(scan, name, layout, base, options, on_bytes, StateFile(layout.directory, key))
    try:
        return await _with_notes(work)
    except Damaged as error:
        found = await _build(work, Notes())
        warning = f"the notes of the last packing are damaged and were not used: {error}"
        return Tree(found.outcome, found.bytes_written, scan, (warning,))


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to be packed, how, and where to."""

    scan: TreeScan
    name: str
    layout: LocalRepository
    base: Base | None
    options: Options
    on_bytes: Callable[[int, int], None]
    state: StateFile


async def _with_notes(work: _Work) -> Tree:
    """Pack with what the last packing left. Raises Damaged."""
    head = await asyncio.to_thread(work.state.head)
    under = work.base.digest if work.base else ""
    unchanged = head and (head.fingerprint, head.base) == (work.scan.fingerprint, under)
    if head and unchanged and await asyncio.to_thread(_present, work.layout, head.outcome):
        return Tree(head.outcome, 0, work.scan)
    with contextlib.closing(await asyncio.to_thread(work.state.notes)) as notes:
        return await _build(work, notes)


async def _build(work: _Work, notes: Notes) -> Tree:
    layout, base = work.layout, work.base
    repositories: list[Repository] = base.repositories if base else [layout]
    pool = await read_pool(work.name, layout, base.manifest if base else None, repositories, notes.index.catalogs)
    stopped = threading.Event()
    with layout.drafting() as drafts:
        built = Built(PackWriter(drafts), PackWriter(drafts))
        try:
            await stoppable(stopped, _assemble, built, work, pool, notes, stopped)
            outcome, written = await store_tree(built, pool, layout, stopped)
        finally:
            stopped.set()
            built.new.abandon()
            built.moved.abandon()
    fingerprint = work.scan.fingerprint if built.draft.settled else b""
    head = Head(fingerprint, base.digest if base else "", outcome)
    await asyncio.to_thread(remember, built, pool, work.state, notes, head)
    return Tree(outcome, written, work.scan)


def _assemble(built: Built, work: _Work, pool: Pool, notes: Notes, stopped: threading.Event) -> None:
    """On a thread: bring the tree's entries together, and what is new into packs."""
    options = work.options
    ledger = Ledger(pool, notes)
    assembler = Assembler(
        work.scan,
        ledger.known,
        ledger.available,
        xattrs=options.xattrs,
        mtime=options.mtime,
        modes=options.modes,
        timeless=options.timeless,
        world_readable=options.world_readable,
    )
    draft = assembler.assemble()
    total = sum(wanted.row.size for wanted in draft.wanted)
    reader = ContentReader(
        ledger.holdings.known(len(draft.wanted)), built.new, lambda count: work.on_bytes(count, total), stopped
    )
    draft.fill(reader.read(draft.wanted))
    check_names(work.scan, ignore=options.ignore, only=options.only)
    built.new.close()
    ledger.settle(draft, reader.chunk_lists)
    built.draft, built.ledger = draft, ledger
    built.pages, built.sections = draft.pages(ledger.known, pool.pages.__contains__)


def _present(layout: LocalRepository, outcome: Outcome) -> bool:
    """Whether all blobs of an earlier outcome are still in the layout."""
    blobs = (outcome.root, *outcome.parts, *outcome.lists)
    sizes = blob_sizes(layout, (blob.digest for blob in blobs))
    return all(blob.size == sizes[blob.digest] for blob in blobs)
