"""Packs a directory as the top layer of a package in the local layout: content, then manifest, then
tag."""

from __future__ import annotations

import asyncio
import os
import posixpath
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import NotFound, P2PDistError, UsageError, printable
from p2pdist.model.manifest import (
    CONFIG_TYPE,
    LAYERS_MAX,
    MANIFEST_BYTES_MAX,
    MANIFEST_TYPE,
    PARTS_MAX,
    SQUASHFS_TYPE,
    TREE_TYPE,
    Config,
    Descriptor,
    Manifest,
    Reference,
    decode_config,
    encode_config,
    encode_manifest,
)
from p2pdist.model.modelpack import is_model
from p2pdist.model.trace import Part
from p2pdist.package.image.preflight import preflight
from p2pdist.package.image.squashfs import LEVEL, build_image, check_apart
from p2pdist.package.repository.contract import (
    LocalRepository,
    OnProgress,
    Repository,
    read_content,
    read_document,
    read_plain_manifest,
)
from p2pdist.package.source.links import NOWHERE, OUT, strange_links
from p2pdist.package.source.scan import Dropped, Ignore, Link, TreeScan, check_unchanged, scan_tree, source_directory
from p2pdist.package.tree.bootstrap import Bootstrapping, add_bootstrap, without_bootstraps
from p2pdist.package.tree.pack import Base, Options, pack_tree
from p2pdist.package.tree.writer import write_document

EXAMPLES = 3
"""Names that a warning gives of many."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run the program of a package. None keeps the base's value; an entry of `env`
    (NAME=value) replaces the base's of the same name."""

    entrypoint: Sequence[str] | None = None
    env: Sequence[str] = ()
    working_dir: str | None = None

    def over(self, base: Config) -> Config:
        """The config of a package on top of one with the config `base`. Raises UsageError."""
        for entry in self.env:
            if not entry.partition("=")[0] or "=" not in entry or "\0" in entry:
                raise UsageError(f"{entry[:100]!r} is not an environment entry", remedy="Write NAME=value")
        for text in (*(self.entrypoint or ()), self.working_dir or ""):
            if "\0" in text:
                raise UsageError(
                    f"{text[:100]!r} holds a zero byte, which no program can be called with", remedy="Leave it away"
                )
        for text in (*self.env, *(self.entrypoint or ()), self.working_dir or ""):
            if any("\ud800" <= character <= "\udfff" for character in text):  # of bytes that are none
                raise UsageError(
                    f"{printable(text[:100])} is not in UTF-8, in which packages keep their settings",
                    remedy="Write it in UTF-8",
                )
        if self.working_dir and _leaves(self.working_dir):
            raise UsageError(
                f"the working directory {self.working_dir} is outside the package",
                remedy="Name a directory in the package, such as app",
            )
        named = dict(entry.split("=", 1) for entry in (*base.env, *self.env))
        return Config(
            base.entrypoint if self.entrypoint is None else tuple(self.entrypoint),
            tuple(f"{name}={value}" for name, value in named.items()),
            base.working_dir if self.working_dir is None else self.working_dir,
        )


def _leaves(working_dir: str) -> bool:
    """Whether a working directory, which is relative to the package even where it begins with a
    slash, is outside."""
    path = posixpath.normpath(working_dir.removeprefix("${P2PDIST_ROOT}").lstrip("/") or ".")
    return path == ".." or path.startswith("../")


@dataclass(frozen=True, slots=True)
class Packed:
    """A package that was packed."""

    reference: Reference
    digest: str
    layers: tuple[Descriptor, ...]
    """All layers, bottom to top."""
    files: int
    """Regular files of the source; a tree counts a file with several names once."""
    bytes_total: int
    """Bytes in these files."""
    seconds: float
    dropped: tuple[Dropped, ...]
    """The first things that the layer does not carry."""
    dropped_total: int
    parts: tuple[Descriptor, ...] = ()
    """The catalogs and packs that trees among the layers draw on."""
    bytes_written: int = 0
    """Bytes that the layout did not have before."""
    warnings: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    """Symbolic links that lead out of the package or nowhere."""
    followed: tuple[Link, ...] = ()
    """Symbolic links that were replaced by the files that they lead to."""
    narrow: tuple[str, ...] = ()
    """Files and directories that their owner may read or execute and other users may not; owners
    become root."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a directory that is packed comes from."""

    source: Path
    """The user's directory; the packed one may be a copy of a part of it."""
    target: str = ""
    """The directory of the package below which the source appears."""
    warn: bool = True
    """Warn of links and permissions that mean something else on a host."""
    whole: bool = False
    """The layers below come from the same source."""


@dataclass(frozen=True, slots=True)
class _Below:
    """The package to stack on."""

    digest: str
    manifest: Manifest
    config: Config
    repositories: list[Repository]
    written: int


@dataclass(frozen=True, slots=True)
class _Layer:
    """The new layer: what the manifest says of it, and how many bytes were written for it."""

    described: Descriptor
    parts: tuple[Descriptor, ...]
    lists: tuple[Descriptor, ...]
    files: int
    bytes_total: int
    dropped: tuple[Dropped, ...]
    dropped_total: int
    written: int
    scan: TreeScan
    warnings: tuple[str, ...] = ()


async def pack(
    source: Path,
    reference: Reference,
    layout: LocalRepository,
    *,
    base: Reference | None = None,
    origin: Repository | None = None,
    settings: Settings | None = None,
    format: Literal["squashfs", "tree"] = "squashfs",
    level: int = LEVEL,
    mtime: int | None = None,
    xattrs: bool = False,
    ignore: Ignore | None = None,
    only: Collection[bytes] | None = None,
    modes: Mapping[bytes, int] | None = None,
    timeless: bool = False,
    world_readable: bool = False,
    order: tuple[Part, ...] = (),
    provenance: Provenance | None = None,
    bootstrapping: Bootstrapping | None = None,
    on_progress: OnProgress | None = None,
) -> Packed:
    """Pack the directory `source` as `reference` into `layout`, on top of `base` (looked up in the
    layout, then at the origin).

    `mtime`, in seconds since 1970, replaces all modification times of an image, and the later ones
    of a tree; without it an image holds times from 1970 to 2106 only. `level` is zstd's, for
    images. `ignore` leaves entries out by path below the source. `only` keeps these paths and the
    directories above them; a directory stands for itself, not for its entries. `modes` replace the
    modes of entries, by path below the source; `world_readable` is chmod a+rX. `xattrs` carries
    extended attributes `user.*`, in trees only; `timeless` gives the directories of a tree the time
    0; `order` are the chunks that lie first in the packs of a tree, by paths below the source.
    `provenance` is by default the source itself. Without `bootstrapping` the package gets no
    bootstrap.

    The package names the base's layers and parts; only its piece lists and catalogs are copied. No
    garbage collection runs in the layout meanwhile. Raises NotFound, UsageError, DiskFull, Conflict
    during a collection, Corrupt naming an entry that changes meanwhile, and what build_image and
    pack_tree raise.
    """
    started, source = time.monotonic(), source_directory(source)
    if not reference.tag:
        raise UsageError(f"{reference} names a digest, which packing decides", remedy="Name the package as name:tag")
    check_apart(source, layout.directory)
    async with layout.packing():
        below = await _read_base(base, layout, origin)
        config = (settings or Settings()).over(below.config if below else Config())
        options = Options(xattrs, ignore, only, mtime, modes or {}, timeless, world_readable, order)
        layer = await _add_layer(source, reference, layout, base, below, format, level, options, on_progress)
        manifest, written = await _add_manifest(reference, layout, below, config, layer)
        if bootstrapping is not None:
            repositories: list[Repository] = below.repositories if below else [layout]
            manifest, count = await add_bootstrap(manifest, layout, repositories, bootstrapping)
            written += count
        remarks = await asyncio.to_thread(
            _remarks, layer.scan, provenance or Provenance(source), below is None, world_readable
        )
        described, count = await _name(reference, layout, manifest)
    written += count + layer.written + (below.written if below else 0)
    return _packed(reference, described.digest, manifest, layer, written, time.monotonic() - started, *remarks)


def _packed(
    reference: Reference,
    digest: str,
    manifest: Manifest,
    layer: _Layer,
    written: int,
    seconds: float,
    links: tuple[Link, ...],
    narrow: tuple[str, ...],
) -> Packed:
    return Packed(
        reference,
        digest,
        manifest.layers,
        layer.files,
        layer.bytes_total,
        seconds,
        layer.dropped,
        layer.dropped_total,
        manifest.parts,
        written,
        (*layer.warnings, *_warnings(links, narrow)),
        links,
        (),
        narrow,
    )


def _remarks(
    scan: TreeScan, provenance: Provenance, whole: bool, world_readable: bool
) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """Links and paths of narrow permissions to warn of."""
    if not provenance.warn:
        return (), ()
    above = os.fsencode(provenance.target) + b"/" if provenance.target else b""
    paths = [path[len(above) :] for path in scan.links if path.startswith(above)]
    links = strange_links(provenance.source, paths, target=provenance.target, whole=whole or provenance.whole)
    return tuple(links), () if world_readable else tuple(map(os.fsdecode, scan.narrow))


def _warnings(links: Sequence[Link], narrow: Sequence[str]) -> list[str]:
    """Warnings of links and permissions, a line for each kind."""
    warnings = []
    for what, advice in (
        (OUT, "on hosts such a link may lead nowhere; --follow-links packs files instead"),
        (NOWHERE, "they are packed as they are"),
    ):
        if some := [f"{link.path} -> {link.target}" for link in links if link.what == what]:
            warnings.append(
                f"1 symbolic link {what}: {examples(some)}; {advice}"
                if len(some) == 1
                else f"{len(some)} symbolic links {what.replace('leads', 'lead', 1)}: {examples(some)}; {advice}"
            )
    if narrow:
        warnings.append(
            f"{len(narrow)} {'entries have' if len(narrow) > 1 else 'entry has'} no rights for others: {examples(narrow)}; owners become "
            "root, so users of hosts whose agent is root are shut out; --world-readable lets all users read"
        )
    return warnings


def examples(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - EXAMPLES}" if len(names) > EXAMPLES else ""
    return ", ".join(printable(name)[:200] for name in names[:EXAMPLES]) + more


async def _read_base(base: Reference | None, layout: LocalRepository, origin: Repository | None) -> _Below | None:
    """The base's manifest and config; its piece lists are brought into the layout. Raises
    UsageError for what hosts show no layer above, such as a model."""
    if base is None:
        return None
    repositories: list[Repository] = [layout, origin] if origin else [layout]
    described, manifest, _ = await read_plain_manifest(base, repositories)
    if strange := [layer.media_type for layer in manifest.layers if layer.media_type not in (SQUASHFS_TYPE, TREE_TYPE)]:
        what = "a model" if is_model(manifest) else f"of a layer of type {printable(strange[0][:100])}"
        raise UsageError(
            f"{base} is {what}, on which no package can be stacked",
            remedy="Pack its directory with --format tree as the base, or mount both packages",
        )
    data = await read_document(manifest.config.digest, repositories, limit=MANIFEST_BYTES_MAX)
    written = await write_document(layout, data)
    for pieces in manifest.piece_lists:
        if await layout.size(pieces.digest) != pieces.size:
            written += await write_document(layout, await read_document(pieces.digest, repositories))
    return _Below(described.digest, manifest, decode_config(data), repositories, written)


async def _add_manifest(
    reference: Reference, layout: LocalRepository, below: _Below | None, config: Config, layer: _Layer
) -> tuple[Manifest, int]:
    """The manifest, and how many bytes its config took."""
    under = without_bootstraps(below.manifest) if below else None
    layers = (*(under.layers if under else ()), layer.described)
    parts = tuple({part.digest: part for part in (*(under.parts if under else ()), *layer.parts)}.values())
    lists = {item.digest: item for item in (*(under.piece_lists if under else ()), *layer.lists)}
    if len(layers) > LAYERS_MAX:
        raise UsageError(
            f"{reference} would have {len(layers)} layers, over the limit of {LAYERS_MAX}",
            remedy="Pack it onto a base with fewer",
        )
    if len(parts) > PARTS_MAX:
        raise UsageError(
            f"{reference} would draw on {len(parts)} catalogs and packs, over the limit of {PARTS_MAX}",
            remedy="Pack it without a base, into a new layout",
        )
    data = encode_config(config)
    written = await write_document(layout, data)
    return Manifest(Descriptor(CONFIG_TYPE, digest_of(data), len(data)), layers, tuple(lists.values()), parts), written


async def _name(reference: Reference, layout: LocalRepository, manifest: Manifest) -> tuple[Descriptor, int]:
    """Store the manifest and let `reference` name it; returns its descriptor, and how many bytes
    were written."""
    body = encode_manifest(manifest)
    described = Descriptor(MANIFEST_TYPE, digest_of(body), len(body))
    written = await write_document(layout, body)
    if await _tagged(reference, layout) != described.digest:
        await layout.tag(reference, described)
    return described, written


async def _tagged(reference: Reference, layout: LocalRepository) -> Digest | None:
    try:
        return (await layout.resolve(reference)).digest
    except NotFound:
        return None


async def _add_layer(
    source: Path,
    reference: Reference,
    layout: LocalRepository,
    base: Reference | None,
    below: _Below | None,
    format: Literal["squashfs", "tree"],
    level: int,
    options: Options,
    on_progress: OnProgress | None,
) -> _Layer:
    if format == "tree":
        return await _add_tree(source, reference, layout, base, below, options, on_progress)
    if options.xattrs:
        raise UsageError("an image carries no extended attributes", remedy="Pack a tree with --format tree")
    return await _add_image(source, layout, level, options, on_progress, whiteouts=below is not None)


async def _add_tree(
    source: Path,
    reference: Reference,
    layout: LocalRepository,
    base: Reference | None,
    below: _Below | None,
    options: Options,
    on_progress: OnProgress | None,
) -> _Layer:
    """Pack the tree into the layout."""
    done = 0

    def report(count: int, total: int) -> None:
        nonlocal done
        done += count
        if on_progress:
            on_progress("packing", done, total)

    under = Base(below.digest, base.name, below.manifest, below.repositories) if base and below else None
    tree = await pack_tree(source, reference.name, layout, base=under, options=options, on_bytes=report)
    outcome = tree.outcome
    dropped = tuple(Dropped(os.fsdecode(path), what) for path, what in outcome.dropped)
    return _Layer(
        outcome.root,
        outcome.parts,
        outcome.lists,
        outcome.files,
        outcome.bytes_total,
        dropped,
        outcome.dropped_total,
        tree.bytes_written,
        tree.scan,
        tree.warnings,
    )


async def _add_image(
    source: Path,
    layout: LocalRepository,
    level: int,
    options: Options,
    on_progress: OnProgress | None,
    *,
    whiteouts: bool,
) -> _Layer:
    """Build the image, hash it and move it into the layout. `whiteouts`: there is something below
    that they hide. Raises Corrupt when something in the source changes meanwhile."""
    scan = await asyncio.to_thread(scan_tree, source, ignore=options.ignore, only=options.only)
    scan_again = partial(check_unchanged, scan, ignore=options.ignore, only=options.only)
    counts = await asyncio.to_thread(preflight, scan, times_kept=options.mtime is None, whiteouts=whiteouts)
    report = _reporter(on_progress, counts.bytes_total)
    stopped = threading.Event()
    with layout.temporary_directory() as scratch:
        image = scratch / "image"
        try:
            try:
                await build_image(
                    source,
                    image,
                    level=level,
                    mtime=options.mtime,
                    exclude=counts.excluded,
                    modes=options.modes,
                    world_readable=options.world_readable,
                    size_estimate=counts.bytes_total,
                    on_bytes=lambda count: report("packing", count),
                )
            except P2PDistError:
                await asyncio.to_thread(scan_again)  # what has vanished is the better reason
                raise
            await asyncio.to_thread(scan_again)
            content = await asyncio.to_thread(read_content, image, stopped=stopped)
            await asyncio.to_thread(_sync, image)
            written = 0 if await layout.size(content.digest) == content.size else content.size
            await layout.import_file(content.digest, image)
        finally:
            stopped.set()
    written += await write_document(layout, content.pieces.encode())
    return _Layer(
        content.descriptor(SQUASHFS_TYPE),
        (),
        (content.pieces_descriptor(),),
        counts.files,
        counts.bytes_total,
        tuple(counts.dropped),
        counts.dropped_total,
        written,
        scan,
    )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reporter(on_progress: OnProgress | None, total: int) -> Callable[[str, int], None]:
    done = 0

    def report(what: str, count: int) -> None:
        nonlocal done
        done = min(total, done + count)
        if on_progress:
            on_progress(what, done, total)

    return report
