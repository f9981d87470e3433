"""What differs between two packages with trees: paths, and the bytes that a host with the first
fetches for the second.

A host has the contents of the trees of its package, and the chunks of their large files. For
another package it fetches the roots and catalogs that it does not have whole, and from packs the
missing chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from p2pdist.model.catalog import Catalog
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt
from p2pdist.model.manifest import CATALOG_TYPE, PACK_TYPE, TREE_TYPE, Manifest
from p2pdist.model.tree import (
    WHOLE_MAX,
    ChunkList,
    Directory,
    Entry,
    File,
    HardLink,
    Whiteout,
    content_hash,
    decode_root,
    decode_tree,
    walking_order,
)
from p2pdist.package.repository.contract import Repository, read_document
from p2pdist.package.repository.push import Difference, compare
from p2pdist.package.tree.pack_pool import read_catalog

Paths = tuple[bytes, ...]
PathChanges = tuple[Paths, Paths, Paths]
"""Paths that were added, changed and removed, each in walking order."""


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to a path. Sizes are in bytes, None where the path is not there; 0 for what is
    no file. `aspects` of a changed one: "content", "mode", "time", "attributes", "target" of a
    link, or "kind"."""

    path: bytes
    what: Literal["added", "changed", "removed"]
    size_before: int | None
    size_after: int | None
    aspects: tuple[str, ...] = ()
    directory: bool = False


@dataclass(frozen=True, slots=True)
class Trees:
    """The tree layers of a package, bottom to top, and its catalogs."""

    manifest: Manifest
    layers: tuple[list[Entry], ...]
    catalogs: tuple[Catalog, ...]

    def chunks(self) -> set[bytes]:
        """All chunks of all contents. Raises Corrupt when a chunk list is in no catalog."""
        lists = {content_hash(data): data for catalog in self.catalogs for data in catalog.chunk_lists}
        names: set[bytes] = set()
        for entries in self.layers:
            for file in (entry for entry in entries if type(entry) is File):
                if file.size <= WHOLE_MAX:
                    names.update((file.content,) if file.size else ())
                elif file.chunks in lists:
                    names.update(name for name, _ in ChunkList.decode(lists[file.chunks]).chunks)
                else:
                    raise Corrupt("a chunk list of the package is in none of its catalogs", remedy="Pack it again")
        return names


async def compare_packages(
    old: Manifest, new: Manifest, repositories: list[Repository]
) -> tuple[Difference, PathChanges | None]:
    """What a host with `old` fetches for `new`: layer by layer with exact bytes, and path by path,
    None when no layer is a tree. Reads roots and catalogs from `repositories`. Raises
    NotFound and Corrupt."""
    difference, changes = await compare_in_detail(old, new, repositories)
    return difference, None if changes is None else _by_kind(changes)


async def compare_in_detail(
    old: Manifest, new: Manifest, repositories: list[Repository]
) -> tuple[Difference, list[Change] | None]:
    """As compare_packages, with what happened to each path: added, changed, then removed ones, each
    in walking order."""
    difference = compare(old, new)
    if not any(layer.media_type == TREE_TYPE for layer in (*old.layers, *new.layers)):
        return difference, None
    before, after = await read_trees(old, repositories), await read_trees(new, repositories)
    changes = await asyncio.to_thread(lambda: changes_of(merge(before.layers), merge(after.layers)))
    return replace(difference, bytes_to_move=await asyncio.to_thread(bytes_to_move, before, after)), changes


async def read_trees(manifest: Manifest, repositories: list[Repository]) -> Trees:
    """The trees of a package. Raises NotFound and Corrupt."""
    parts = [part for part in manifest.parts if part.media_type == CATALOG_TYPE]
    catalogs = tuple([await read_catalog(part, repositories) for part in parts])
    pages = {content_hash(page): page for catalog in catalogs for page in catalog.pages}
    layers = []
    for layer in manifest.layers:
        if layer.media_type == TREE_TYPE:
            root = decode_root(await read_document(layer.digest, repositories))
            try:
                layers.append(await asyncio.to_thread(decode_tree, root, pages))
            except KeyError as error:
                raise Corrupt(
                    f"a page of {layer.digest} is in no catalog of its package", remedy="Pack it again"
                ) from error
    return Trees(manifest, tuple(layers), catalogs)


def bytes_to_move(old: Trees, new: Trees) -> int:
    """Bytes of the layers and catalogs of `new` that `old` does not name, and of the stored chunks
    that it does not have."""
    have = {blob.digest for blob in old.manifest.blobs}
    whole = sum(blob.size for blob in new.manifest.blobs if blob.digest not in have and blob.media_type != PACK_TYPE)
    missing = new.chunks() - old.chunks()
    named: set[Digest] = {part.digest for part in new.manifest.parts}
    sizes: dict[bytes, int] = {}
    for catalog in new.catalogs:
        for pack in catalog.packs:
            if pack.digest in named:
                sizes.update((stored.chunk, stored.stored) for stored in pack.chunks() if stored.chunk in missing)
    if len(sizes) != len(missing):
        raise Corrupt("a chunk of the package is in none of its packs", remedy="Pack it again")
    return whole + sum(sizes.values())


def merge(layers: Iterable[Sequence[Entry]]) -> list[Entry]:
    """What layers show together, bottom to top, in walking order, as an overlay does. A hard link
    is shown as the file that it names."""
    shown: list[Entry] = []
    for entries in layers:
        upper = {entry.path: entry for entry in _resolved(entries)}
        if shown:
            upper = {**{entry.path: entry for entry in _left(shown, upper)}, **upper}
        shown = sorted(
            (entry for entry in upper.values() if type(entry) is not Whiteout),
            key=lambda entry: walking_order(entry.path),
        )
    return shown


def compare_trees(old: Sequence[Entry], new: Sequence[Entry]) -> PathChanges:
    """Paths that were added, changed and removed, in walking order. The time of a directory, which
    every change in it sets, does not count as a change of it; another name of a file does not
    differ from a file of its own."""
    return _by_kind(changes_of(old, new))


def changes_of(old: Sequence[Entry], new: Sequence[Entry]) -> list[Change]:
    """What happened to each path: added, changed, then removed ones, each in walking order
    (compare_trees)."""
    before = {entry.path: _essence(entry) for entry in _resolved(old)}
    after = {entry.path: _essence(entry) for entry in _resolved(new)}
    added = [
        Change(path, "added", None, _size(entry), directory=isinstance(entry, Directory))
        for path, entry in after.items()
        if path not in before
    ]
    changed = [
        Change(
            path,
            "changed",
            _size(before[path]),
            _size(entry),
            _aspects(before[path], entry),
            isinstance(entry, Directory),
        )
        for path, entry in after.items()
        if path in before and before[path] != entry
    ]
    removed = [
        Change(path, "removed", _size(entry), None, directory=isinstance(entry, Directory))
        for path, entry in before.items()
        if path not in after
    ]
    return added + changed + removed


def _by_kind(changes: Iterable[Change]) -> PathChanges:
    paths: dict[str, list[bytes]] = {"added": [], "changed": [], "removed": []}
    for change in changes:
        paths[change.what].append(change.path)
    return tuple(paths["added"]), tuple(paths["changed"]), tuple(paths["removed"])


def _size(entry: Entry) -> int:
    return entry.size if isinstance(entry, File) else 0


def _aspects(before: Entry, after: Entry) -> tuple[str, ...]:
    """In what two entries of one path differ."""
    if type(before) is not type(after):
        return ("kind",)
    fields = {"content": ("content",), "target": ("target",), "mode": ("mode",), "attributes": ("xattrs", "opaque")}
    fields["time"] = ("mtime_ns",)
    return tuple(
        aspect
        for aspect, names in fields.items()
        if any(getattr(before, name, None) != getattr(after, name, None) for name in names)
    )


def _resolved(entries: Iterable[Entry]) -> list[Entry]:
    """Entries with hard links replaced by files."""
    files: dict[bytes, File] = {}
    resolved: list[Entry] = []
    for entry in entries:
        if isinstance(entry, File):
            files[entry.path] = entry
        elif isinstance(entry, HardLink):
            file = files[entry.target]
            resolved.append(
                File(entry.path, file.mode, file.mtime_ns, file.size, file.content, file.chunks, file.xattrs)
            )
            continue
        resolved.append(entry)
    return resolved


def _left(lower: Sequence[Entry], upper: dict[bytes, Entry]) -> list[Entry]:
    """The entries of `lower`, which are in walking order, that `upper` lets be seen."""
    entries: list[Entry] = []
    hidden = b""
    for entry in lower:
        if hidden and entry.path.startswith(hidden):
            continue
        above = upper.get(entry.path)
        if above is None:
            entries.append(entry)
        elif not isinstance(above, Directory) or above.opaque or not isinstance(entry, Directory):
            hidden = entry.path + b"/"
    return entries


def _essence(entry: Entry) -> Entry:
    return Directory(entry.path, entry.mode, 0, entry.opaque, entry.xattrs) if isinstance(entry, Directory) else entry
