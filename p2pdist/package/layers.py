"""Packs several layers as one package: each on top of the one before, and only the last packing
sets the tag.

A layer is packed from its directory if pack() can make it from there. Otherwise a staged copy
(source/stages.py) is packed: of a layer with a `target`, where files are replaced to make the
layer reproducible or links are followed, and where an image holds a part of a directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.manifest import LAYERS_MAX, Descriptor, Reference
from p2pdist.model.trace import Part
from p2pdist.package.image.reproducible import recompile
from p2pdist.package.image.squashfs import LEVEL, check_apart
from p2pdist.package.pack import Packed, Provenance, Settings, examples, pack
from p2pdist.package.repository.contract import LocalRepository, OnProgress, Repository
from p2pdist.package.source.ignore import Ignore, matcher, read_patterns
from p2pdist.package.source.links import FOLLOWED, Followed, followed_links, snapshot_blobs
from p2pdist.package.source.project import Format, Project, ProjectFile
from p2pdist.package.source.scan import Dropped, Link, check_unchanged, scan_tree, source_directory, with_parents
from p2pdist.package.source.split import split
from p2pdist.package.source.stages import stage, walk
from p2pdist.package.source.trace import Trace, select
from p2pdist.package.thread import Stopped, stoppable, until
from p2pdist.package.tree.bootstrap import Bootstrapping


@dataclass(frozen=True, slots=True)
class Layer:
    """What goes into a layer."""

    source: Path
    form: Format
    ignore: Ignore | None = None
    """Which entries of the source to leave out."""
    only: frozenset[bytes] | None = None
    """The paths to keep, directories included; None keeps all."""
    target: str = ""
    """The directory of the package below which the source appears."""
    split: bool = False
    """The rest of the source is in other layers: sources of compiled files may be there, and
    directories have the time 0, since their times change with entries of other layers."""
    warn: bool = True
    """Warn of links and permissions that mean something else on a host."""
    modes: Mapping[bytes, int] = field(default_factory=dict)
    """Modes by path in place of the source's; not for a layer that is staged."""


@dataclass(frozen=True, slots=True)
class PackOptions:
    """What holds for all layers of a package. `mtime` and `world_readable` as pack takes them;
    `reproducible` replaces compiled Python; `follow_links` packs files in the place of links that
    lead out of the package; `order` are the chunks that lie first in the packs of trees;
    without `bootstrapping` the package gets no bootstrap."""

    base: Reference | None = None
    settings: Settings = field(default_factory=Settings)
    level: int = LEVEL
    mtime: int | None = None
    xattrs: bool = False
    reproducible: bool = False
    world_readable: bool = False
    follow_links: bool = False
    order: tuple[Part, ...] = ()
    bootstrapping: Bootstrapping | None = None


def project_layers(file: ProjectFile, form: Format, patterns: Sequence[str] = ()) -> list[Layer]:
    """The layers of a project; `patterns` are left out of packed of them, as what the project and
    `.p2pdistignore` say."""
    project = file.project
    if not project.layer:
        return [plain_layer(file.path.parent, form, patterns, project)]
    layers = []
    for described in project.layer:
        source = source_directory(file.source(described))
        outer = [*project.ignore, *described.ignore, *read_patterns(source), *patterns]
        ignore = matcher(outer, where=f"the patterns of layer {described.source!r}")
        only = None
        if described.only:
            chosen = matcher(described.only, where=f"`only` of layer {described.source!r}")
            only = chosen_paths(source, chosen, ignore) if chosen else None
        layers.append(Layer(source, described.format or form, ignore, only, described.target))
    return layers


def plain_layer(source: Path, form: Format, patterns: Sequence[str] = (), project: Project | None = None) -> Layer:
    """One layer of all that is in `source` but what the patterns leave out."""
    source = source_directory(source)
    ignored = project.ignore if project else ()
    return Layer(source, form, matcher([*ignored, *read_patterns(source), *patterns]))


def chosen_paths(source: Path, chosen: Ignore, ignore: Ignore | None) -> frozenset[bytes]:
    """What of `source` matches, with all that is in matching directories, and the directories
    above. Raises UsageError when that is nothing."""
    paths: set[bytes] = set()
    for entry in walk(source, ignore=ignore):
        if os.path.dirname(entry.path) in paths or chosen(entry.path, entry.is_directory):
            paths.add(entry.path)
    if not paths:
        raise UsageError(f"nothing in {source} matches `only`", remedy="Write patterns as in a .gitignore file")
    return with_parents(paths)


def used_layer(layer: Layer, trace: Trace) -> tuple[Layer, list[str]]:
    """The part of a layer that a run used, and a note when the run used more. Raises UsageError
    when it used nothing of it."""
    used = select(layer.source, trace)
    only = used.paths if layer.only is None else used.paths & layer.only
    notes = [f"{used.missing} files of the trace are not in {layer.source}"] if used.missing else []
    return replace(layer, only=only), notes


def split_layer(layer: Layer, first_party: Sequence[str]) -> tuple[list[Layer], list[str]]:
    """The layers of a virtual environment, up to three, of which none is empty; and notes. Raises
    UsageError."""
    divided = split(layer.source, first_party=first_party, ignore=layer.ignore)
    notes = [
        *divided.notes,
        f"third-party: {len(divided.third_party)} distributions; first-party: {', '.join(divided.first_party) or 'no distribution'}",
    ]
    parts = [
        part if layer.only is None else part & layer.only for part in (divided.lower, divided.compiled, divided.upper)
    ]
    return [replace(layer, only=part, split=True) for part in parts if part], notes


async def pack_layers(
    layers: Sequence[Layer],
    reference: Reference,
    layout: LocalRepository,
    options: PackOptions,
    *,
    origin: Repository | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Packed, list[str]]:
    """Pack `layers`, bottom to top, as `reference`. Returns the package, with sums over all layers,
    and notes for the user. Raises what pack raises; then no tag has moved."""
    if not 1 <= len(layers) <= LAYERS_MAX:
        raise UsageError(f"{reference} would have {len(layers)} layers", remedy=f"It must have 1 to {LAYERS_MAX}")
    below, sums, notes = options.base, list[Packed](), list[str]()
    whole = options.base is None and all(layer.split and layer.source == layers[0].source for layer in layers)
    async with layout.packing():  # no tag leads to the lower layers yet
        for number, layer in enumerate(layers, 1):
            last = number == len(layers)
            async with _packable(layer, number, layout, options, on_progress) as (source, staged):
                packed = await pack(
                    source,
                    reference,
                    layout if last else cast(LocalRepository, _Untagged(layout)),
                    base=below,
                    origin=origin,
                    settings=options.settings if last else None,
                    level=options.level,
                    mtime=options.mtime,
                    format=layer.form,
                    xattrs=options.xattrs,
                    ignore=None if staged else layer.ignore,
                    only=None if staged else layer.only,
                    modes=layer.modes,
                    timeless=layer.split and not staged,
                    world_readable=options.world_readable,
                    order=options.order,
                    bootstrapping=options.bootstrapping if last else None,
                    provenance=Provenance(layer.source, layer.target, layer.warn, whole=whole),
                    on_progress=on_progress,
                )
            if staged:
                notes += staged.notes
                packed = replace(
                    packed,
                    dropped=(*packed.dropped, *staged.lost),
                    dropped_total=packed.dropped_total + len(staged.lost),
                    followed=tuple(staged.followed),
                )
            sums.append(packed)
            below = Reference(reference.name, digest=Digest(packed.digest))
    return _summed(sums), notes


def _summed(sums: Sequence[Packed]) -> Packed:
    return replace(
        sums[-1],
        files=sum(packed.files for packed in sums),
        bytes_total=sum(packed.bytes_total for packed in sums),
        seconds=sum(packed.seconds for packed in sums),
        dropped=tuple(item for packed in sums for item in packed.dropped),
        dropped_total=sum(packed.dropped_total for packed in sums),
        bytes_written=sum(packed.bytes_written for packed in sums),
        warnings=tuple(dict.fromkeys(warning for packed in sums for warning in packed.warnings)),
        links=tuple(link for packed in sums for link in packed.links),
        followed=tuple(link for packed in sums for link in packed.followed),
        narrow=tuple(path for packed in sums for path in packed.narrow),
    )


@dataclass(frozen=True, slots=True)
class _Staged:
    """A staged copy: the entries that it cannot carry, notes, and the links that were replaced by
    files."""

    lost: list[Dropped]
    notes: list[str]
    followed: list[Link]


@contextlib.asynccontextmanager
async def _packable(
    layer: Layer, number: int, layout: LocalRepository, options: PackOptions, on_progress: OnProgress | None
) -> AsyncIterator[tuple[Path, _Staged | None]]:
    """The directory to pack for a layer, and the staged copy where it is one."""
    image_of_part = layer.form == "squashfs" and (layer.ignore is not None or layer.only is not None)
    followed = await asyncio.to_thread(_followed, layer, options)
    if not (layer.target or options.reproducible or image_of_part or followed):
        yield layer.source, None
        return
    check_apart(layer.source, layout.directory)
    purpose = f"{layer.source.absolute()} as layer {number}"
    with layout.stage_directory(purpose) as work:
        stopped = threading.Event()
        report = until(stopped, on_progress or (lambda what, done, total: None))
        staged = await stoppable(stopped, _stage, layer, work, options.reproducible, followed, report)
        yield work / "tree", staged


def _followed(layer: Layer, options: PackOptions) -> dict[bytes, Followed]:
    """What is packed in the place of links. Raises UsageError."""
    if not layer.warn or not (options.follow_links or snapshot_blobs(layer.source)):
        return {}
    walked = walk(layer.source, ignore=layer.ignore, only=layer.only)
    links = [entry.path for entry in walked if stat.S_ISLNK(entry.status.st_mode)]
    return followed_links(layer.source, links, target=layer.target, all_links=options.follow_links)


def _stage(
    layer: Layer, work: Path, reproducible: bool, followed: dict[bytes, Followed], report: OnProgress
) -> _Staged:
    """Make the copy for a layer in `work`/tree. Raises Corrupt naming an entry of the source that
    changes meanwhile."""
    before = scan_tree(layer.source, ignore=layer.ignore, only=layer.only)
    whole = layer.ignore is None and layer.only is None
    scan_again = partial(check_unchanged, before, ignore=layer.ignore, only=layer.only, times_of_directories=whole)
    try:
        made = _make(layer, work, reproducible, followed, report)
    except Stopped:
        raise
    except P2PDistError:
        scan_again()  # what has vanished is the better reason
        raise
    scan_again()
    return made


def _make(layer: Layer, work: Path, reproducible: bool, followed: dict[bytes, Followed], report: OnProgress) -> _Staged:
    replaced: dict[bytes, Path | None] = {}
    notes: list[str] = []
    if reproducible:
        (work / "compiled").mkdir()
        files = walk(layer.source, ignore=layer.ignore, only=layer.only)
        others = walk(layer.source, ignore=layer.ignore) if layer.split else ()
        compiled = recompile(layer.source, files, work / "compiled", others=others, report=report)
        replaced, notes = compiled.files, compiled.notes
    links = [
        Link(os.fsdecode(path), os.fsdecode(os.readlink(layer.source / os.fsdecode(path))), FOLLOWED)
        for path in followed
        if replaced.get(path, layer.source) is not None
    ]
    where = work / "tree" / layer.target
    lost = stage(
        layer.source,
        where,
        ignore=layer.ignore,
        only=layer.only,
        replaced=replaced,
        plain_modes=reproducible,
        timeless=layer.split,
        followed=followed,
        # An image tells whether a file has holes ("sparse count" of mksquashfs), a tree does not.
        holes=layer.form == "tree",
    )
    while where != work / "tree":
        where = where.parent
        where.chmod(0o755)
        os.utime(where, (0, 0))
    if links:
        names = examples([f"{link.path} -> {link.target}" for link in links])
        notes.append(f"packed the files that {len(links)} symbolic links lead to in their place: {names}")
    return _Staged(lost, notes, links)


class _Untagged:
    """A layout in which a package that is not finished gets no tag."""

    def __init__(self, layout: LocalRepository) -> None:
        self._layout = layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layout, name)

    async def tag(self, reference: Reference, descriptor: Descriptor) -> None:
        """Set no tag; the packing of the last layer does."""
