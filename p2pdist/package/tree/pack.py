"""Packing a directory as a tree: scan it, read what is new, and write packs, a catalog with what no
other catalog has, and the root.

An unchanged directory writes nothing. The blobs are in the layout when pack_tree returns, and no
manifest names them yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import Manifest
from p2pdist.model.trace import Part
from p2pdist.model.tree import ChunkList
from p2pdist.package.repository.contract import LocalRepository, Repository
from p2pdist.package.source.scan import Ignore, TreeScan, check_names, scan_tree
from p2pdist.package.thread import stoppable
from p2pdist.package.tree.cache import CacheFile, Damaged, FilesCache, Head, Outcome
from p2pdist.package.tree.entries import Assembler
from p2pdist.package.tree.order import FileChunks, WaitingChunks
from p2pdist.package.tree.pack_pool import PackPool, blob_sizes, read_pack_pool
from p2pdist.package.tree.packfile import PackWriter
from p2pdist.package.tree.reader import ContentReader, FileToRead, Read
from p2pdist.package.tree.usage import Usage
from p2pdist.package.tree.writer import Built, remember, store_tree

SECONDS_MAX = (1 << 63) // 1_000_000_000

XATTRS_KEY = "xattrs, pages halved"
"""In the key of a files cache of a packing with extended attributes. Earlier releases had True
there, and made pages of them that hosts refuse: what their caches say is not taken over."""


@dataclass(frozen=True, slots=True)
class Options:
    """What of a directory becomes a tree."""

    xattrs: bool = False
    """Carry the extended attributes `user.*`."""
    ignore: Ignore | None = None
    only: Collection[bytes] | None = None
    """The paths to keep, with the directories above them; None keeps all."""
    mtime: int | None = None
    """The latest modification time of an entry, in seconds since 1970."""
    modes: Mapping[bytes, int] = field(default_factory=dict)
    """Modes by path in place of the source's, which must be new to the files cache."""
    timeless: bool = False
    """Give directories the time 0."""
    world_readable: bool = False
    """chmod a+rX."""
    order: tuple[Part, ...] = ()
    """The chunks that go into packs before all others, in this order, as far as no pack has them,
    and behind them the other chunks of their files."""


@dataclass(frozen=True, slots=True)
class Base:
    """A package to stack on: digest and body of its manifest, and where its blobs are."""

    digest: str
    name: str
    manifest: Manifest
    repositories: list[Repository]


@dataclass(frozen=True, slots=True)
class Tree:
    """A packed tree, `bytes_written` to the layout for it, the scan of its directory, and
    warnings for the user."""

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
    """Pack the directory `source` for a package called `name`. `on_bytes` is called with
    the bytes of each read, and the bytes in all.

    Raises NotFound, UsageError, DiskFull; Corrupt when a file changes meanwhile or a catalog is
    broken; P2PDistError.
    """
    if options.mtime is not None and not 0 <= options.mtime < SECONDS_MAX:
        raise UsageError(f"{options.mtime} is not a modification time", remedy="Give seconds since 1970")
    scan = await asyncio.to_thread(scan_tree, source, ignore=options.ignore, only=options.only)
    attributes = XATTRS_KEY if options.xattrs else False
    chosen = (attributes, options.mtime, options.only is not None, options.timeless, options.world_readable)
    key = (scan.source, *chosen, base.name if base else None, *([options.order] if options.order else []))
    work = _Work(scan, name, layout, base, options, on_bytes, CacheFile(layout.directory, key))
    try:
        return await _with_cache(work)
    except Damaged as error:
        built = await _build(work, FilesCache())
        warning = f"the files cache of the last packing is damaged and was not used: {error}"
        return Tree(built.outcome, built.bytes_written, scan, (warning,))


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to be packed, how, and where to."""

    scan: TreeScan
    name: str
    layout: LocalRepository
    base: Base | None
    options: Options
    on_bytes: Callable[[int, int], None]
    cache_file: CacheFile


async def _with_cache(work: _Work) -> Tree:
    """Pack with the files cache of the last packing. Raises Damaged."""
    head = await asyncio.to_thread(work.cache_file.head)
    under = work.base.digest if work.base else ""
    unchanged = head and (head.fingerprint, head.base) == (work.scan.fingerprint, under)
    if head and unchanged and await asyncio.to_thread(_present, work.layout, head.outcome):
        return Tree(head.outcome, 0, work.scan)
    with contextlib.closing(await asyncio.to_thread(work.cache_file.load)) as files_cache:
        return await _build(work, files_cache)


async def _build(work: _Work, files_cache: FilesCache) -> Tree:
    layout, base = work.layout, work.base
    repositories: list[Repository] = base.repositories if base else [layout]
    pool = await read_pack_pool(
        work.name, layout, base.manifest if base else None, repositories, files_cache.index.catalogs
    )
    stopped = threading.Event()
    with layout.temporary_directory() as scratch:
        built = Built(PackWriter(scratch), PackWriter(scratch))
        try:
            await stoppable(stopped, _assemble, built, work, pool, files_cache, scratch, stopped)
            outcome, written = await store_tree(built, pool, layout, stopped)
        finally:
            stopped.set()
            built.new.abandon()
            built.moved.abandon()
    fingerprint = work.scan.fingerprint if built.builder.stable else b""
    head = Head(fingerprint, base.digest if base else "", outcome)
    await asyncio.to_thread(remember, built, pool, work.cache_file, files_cache, head)
    return Tree(outcome, written, work.scan)


def _assemble(
    built: Built, work: _Work, pool: PackPool, files_cache: FilesCache, scratch: Path, stopped: threading.Event
) -> None:
    """On a thread: build the tree, and write its new contents into packs."""
    options = work.options
    usage = Usage(pool, files_cache)
    assembler = Assembler(
        work.scan,
        usage.cached,
        usage.available,
        xattrs=options.xattrs,
        mtime=options.mtime,
        modes=options.modes,
        timeless=options.timeless,
        world_readable=options.world_readable,
        whiteouts=work.base is not None,
    )
    builder = assembler.assemble()
    total = sum(file.row.size for file in builder.unread)
    reader = ContentReader(
        usage.chunk_index.lookup(len(builder.unread)), built.new, lambda count: work.on_bytes(count, total), stopped
    )
    order = [part._replace(path=work.scan.path(part.path)) for part in options.order]
    first = _read_first(reader, builder.unread, order, built.new, scratch) if order else {}
    rest = [number for number in range(len(builder.unread)) if number not in first]
    results = zip(rest, reader.read(builder.unread[number] for number in rest), strict=True)
    builder.fill([read for _, read in sorted((*first.items(), *results))])
    check_names(work.scan, ignore=options.ignore, only=options.only)
    built.new.close()
    usage.update(builder, reader.chunk_lists)
    built.builder, built.usage = builder, usage
    built.pages, built.sections = builder.pages(usage.cached, pool.pages.__contains__)


def _read_first(
    reader: ContentReader, files: Sequence[FileToRead], order: Sequence[Part], packs: PackWriter, scratch: Path
) -> dict[int, Read]:
    """Read the files whose chunks lie first in packs, and add them to the packs; returns what was
    read, by the number of the file."""
    numbers = {file.path: number for number, file in enumerate(files)}
    chosen = list(dict.fromkeys(numbers[part.path] for part in order if part.path in numbers))
    waiting = reader.writer = WaitingChunks(scratch)
    try:
        results = dict(zip(chosen, reader.read(files[number] for number in chosen), strict=True))
        chunks = {files[number].path: _chunks_of(read, reader.chunk_lists) for number, read in results.items()}
        wanted = (chunks[part.path].brought_by(part) for part in order if part.path in chunks)
        waiting.write(packs, chain.from_iterable(wanted))
    finally:
        reader.writer = packs
        waiting.close()
    return results


def _chunks_of(read: Read, chunk_lists: Mapping[bytes, bytes]) -> FileChunks:
    return FileChunks(ChunkList.decode(chunk_lists[read.chunks]).chunks if read.chunks else [(read.content, 0)])


def _present(layout: LocalRepository, outcome: Outcome) -> bool:
    """Whether all blobs of an earlier outcome are still in the layout."""
    blobs = (outcome.root, *outcome.parts, *outcome.lists)
    sizes = blob_sizes(layout, (blob.digest for blob in blobs))
    return all(blob.size == sizes[blob.digest] for blob in blobs)
