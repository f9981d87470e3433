"""Adds a bootstrap to a package of trees (model/bootstrap.py)."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from p2pdist.model.bootstrap import FORMAT, encode_bootstrap
from p2pdist.model.catalog import Catalog
from p2pdist.model.device import DeviceLayout
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, TooLarge
from p2pdist.model.manifest import (
    BOOTSTRAP,
    CATALOG_TYPE,
    PACK_TYPE,
    PARTS_MAX,
    TREE_TYPE,
    Manifest,
    is_bootstrap,
)
from p2pdist.model.pieces import PieceList
from p2pdist.model.tree import Entry, File, content_hash
from p2pdist.package.repository.contract import Content, LocalRepository, Repository
from p2pdist.package.tree.diff import Trees, read_trees
from p2pdist.package.tree.writer import write_document

ENTRIES_MIN = 4096
"""Of fewer entries a host computes an image in less time than a bootstrap saves."""

ADDITION_SHARE_MAX = 1 / 8
"""A catalog with so small a share of the bytes of all belongs to a small edit: its bootstrap would
be larger than all else that hosts fetch for it."""

Draw = Callable[[Sequence[Entry], DeviceLayout], bytes]
"""Makes the image of a tree over a device with this layout."""


@dataclass(frozen=True, slots=True)
class Bootstrapping:
    """How bootstraps are made: `draw` makes images. A package gets one `always`, or where it is of
    use."""

    draw: Draw
    always: bool = False


async def add_bootstrap(
    manifest: Manifest, layout: LocalRepository, repositories: list[Repository], how: Bootstrapping
) -> tuple[Manifest, int]:
    """The manifest with a bootstrap among its parts, stored in `layout`, and how many bytes that
    took; the manifest itself where one is of no use or not possible. Its trees are read from
    `repositories`. Raises what they raise."""
    if any(layer.media_type != TREE_TYPE for layer in manifest.layers) or len(manifest.parts) >= PARTS_MAX:
        return manifest, 0
    if not how.always and _is_addition(manifest):
        return manifest, 0
    trees = await read_trees(manifest, repositories)
    if not how.always and sum(map(len, trees.layers)) < ENTRIES_MIN:
        return manifest, 0
    data = await asyncio.to_thread(_encoded, trees, how.draw)
    if data is None:
        return manifest, 0
    pieces = await asyncio.to_thread(PieceList.of_stream, io.BytesIO(data), len(data))
    content = Content(digest_of(data), pieces)
    written = await write_document(layout, data) + await write_document(layout, pieces.encode())
    described = content.descriptor(PACK_TYPE)
    part = replace(described, annotations={**described.annotations, BOOTSTRAP: FORMAT})
    lists = {item.digest: item for item in (*manifest.piece_lists, content.pieces_descriptor())}
    return replace(manifest, parts=(*manifest.parts, part), piece_lists=tuple(lists.values())), written


def without_bootstraps(manifest: Manifest) -> Manifest:
    """A package as one is stacked on it, which has other layers than its bootstrap knows."""
    dropped = {part.pieces_digest for part in manifest.parts if is_bootstrap(part)}
    parts = tuple(part for part in manifest.parts if not is_bootstrap(part))
    kept = {blob.pieces_digest for blob in (*manifest.layers, *parts)}
    lists = tuple(item for item in manifest.piece_lists if item.digest not in dropped - kept)
    return replace(manifest, parts=parts, piece_lists=lists)


def _is_addition(manifest: Manifest) -> bool:
    """Whether some part of the package was packed as a small addition to the rest. It follows from
    the manifest alone, so that packing the same again gives the same package."""
    sizes = [part.size for part in manifest.parts if part.media_type == CATALOG_TYPE]
    return not sizes or min(sizes) < ADDITION_SHARE_MAX * sum(sizes)


def _encoded(trees: Trees, draw: Draw) -> bytes | None:
    """On a thread: the bootstrap, None where there can be none."""
    sizes: dict[bytes, int] = {}
    lists: dict[bytes, bytes] = {}
    known = {content_hash(data): data for catalog in trees.catalogs for data in catalog.chunk_lists}
    for entries in trees.layers:
        for file in entries:
            if type(file) is File and file.size:
                sizes.setdefault(file.content, file.size)
                if file.chunks:
                    if file.chunks not in known:
                        raise Corrupt("a chunk list of the package is in none of its catalogs", remedy="Pack it again")
                    lists[file.content] = known[file.chunks]  # of several the last, as where it is shown
    try:
        layout = DeviceLayout(sizes, lists)
    except TooLarge:
        return None
    places = _places(trees.catalogs, {part.digest for part in trees.manifest.parts})
    if not places.keys() >= {chunk.chunk for chunk in layout.chunks()}:
        raise Corrupt("a chunk of the package is in none of its packs", remedy="Pack it again")
    images = [draw(entries, layout) for entries in trees.layers]
    return encode_bootstrap(trees.manifest, images, layout, places)


def _places(catalogs: Sequence[Catalog], named: set[Digest]) -> dict[bytes, tuple[Digest, int, int]]:
    """Pack, offset and stored length of each chunk in packs that the package names; of several the
    first."""
    places: dict[bytes, tuple[Digest, int, int]] = {}
    for catalog in catalogs:
        for pack in catalog.packs:
            if pack.digest in named:
                for stored in pack.chunks():
                    places.setdefault(stored.chunk, (pack.digest, stored.offset, stored.stored))
    return places
