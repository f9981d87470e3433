"""The contents of trees out of packs in a local layout, as objects: one read-only file for each
content, by its BLAKE3."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from p2pdist.model.catalog import Catalog, Stored, decode_chunk
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, DiskFull, NotFound, P2PDistError, remedy_of
from p2pdist.model.manifest import CATALOG_TYPE, Descriptor, Manifest
from p2pdist.model.tree import WHOLE_MAX, ChunkList, Entry, File, content_hash, data_ranges, decode_root, decode_tree
from p2pdist.package.repository.contract import LocalRepository
from p2pdist.package.tree.pack_pool import read_catalog

ROOT_BYTES_MAX = 64 << 20


@dataclass(slots=True)
class Packs:
    """The contents of all catalogs of a package, by BLAKE3."""

    pages: dict[bytes, bytes] = field(default_factory=dict)
    chunk_lists: dict[bytes, bytes] = field(default_factory=dict)
    chunks: dict[bytes, tuple[Digest, Stored]] = field(default_factory=dict)
    """The pack that has a chunk, and its record there."""

    def add(self, catalog: Catalog) -> None:
        """Add the contents of a catalog."""
        self.pages.update((content_hash(page), page) for page in catalog.pages)
        self.chunk_lists.update((content_hash(data), data) for data in catalog.chunk_lists)
        for pack in catalog.packs:
            for stored in pack.chunks():
                self.chunks[stored.chunk] = (pack.digest, stored)


async def read_packs(manifest: Manifest, layout: LocalRepository) -> Packs:
    """The contents of all catalogs of a package. Raises NotFound or Corrupt naming the one that
    cannot be read."""
    packs = Packs()
    for part in manifest.parts:
        if part.media_type == CATALOG_TYPE:
            packs.add(await read_catalog(part, [layout]))
    return packs


async def read_entries(layer: Descriptor, packs: Packs, layout: LocalRepository) -> list[Entry]:
    """The entries of a tree layer, in walking order and checked. Raises NotFound or Corrupt."""
    try:
        root = decode_root(await layout.read(layer.digest, limit=ROOT_BYTES_MAX))
    except NotFound as error:
        raise NotFound(
            f"layer {layer.digest} is not at {layout.url}", remedy="Pack it there, with the base it stands on"
        ) from error
    if any(page not in packs.pages for page in root.pages):
        raise Corrupt(f"no catalog of the package has all pages of layer {layer.digest}", remedy="Pack it again")
    return decode_tree(root, packs.pages)


def write_objects(
    entries: Sequence[Entry],
    packs: Packs,
    layout: LocalRepository,
    objects: Path,
    *,
    report: Callable[[int], None] = lambda count: None,
) -> None:
    """Write the objects of a tree that are not in `objects` yet, verified. Blocks. Raises NotFound
    where a pack is not in the layout, Corrupt, DiskFull or P2PDistError."""
    handles: dict[Digest, int] = {}
    try:
        for entry in entries:
            if isinstance(entry, File) and entry.size:
                name = entry.content.hex()
                target = objects / name[:2] / name[2:]
                if not target.exists():
                    target.parent.mkdir(exist_ok=True)
                    _write(entry, _chunks(entry, packs), target, layout, handles)
                    report(entry.size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = sum(entry.size for entry in entries if isinstance(entry, File))
            raise DiskFull.on(str(objects), os.statvfs(objects), needed=needed, code=error.errno, kept=False) from error
        raise P2PDistError(
            f"cannot write the files of the package: {error.strerror}",
            remedy=remedy_of(error),
        ) from error
    finally:
        for handle in handles.values():
            os.close(handle)


def _chunks(entry: File, packs: Packs) -> Iterable[tuple[Digest, Stored]]:
    """Where the chunks of a file are."""
    names: Sequence[bytes] = (entry.content,)
    if entry.size > WHOLE_MAX:
        data = packs.chunk_lists.get(entry.chunks)
        if data is None:
            raise Corrupt(
                f"no catalog of the package has the chunk list of {entry.content.hex()}", remedy="Pack it again"
            )
        names = [name for name, _ in ChunkList.decode(data).chunks]
    for name in names:
        if name not in packs.chunks:
            raise Corrupt(f"no pack of the package has the chunk {name.hex()}", remedy="Pack it again")
        yield packs.chunks[name]


def _write(
    entry: File,
    chunks: Iterable[tuple[Digest, Stored]],
    target: Path,
    layout: LocalRepository,
    handles: dict[Digest, int],
) -> None:
    """Write an object under another name first: what has the name of a content has verified, its
    chunks and as a whole."""
    partial = target.with_suffix(".partial")
    whole, size = blake3(), 0
    with partial.open("xb") as file:
        for digest, stored in chunks:
            if digest not in handles:
                handles[digest] = _open(digest, layout)
            data = _decoded(os.pread(handles[digest], stored.stored, stored.offset), stored)
            if data is None:
                raise Corrupt(f"pack {digest} at {layout.url} is damaged", remedy="Delete it there and pack again")
            for begin, end in data_ranges(size, data):
                file.seek(size + begin)
                file.write(memoryview(data)[begin:end])
            whole.update(data)
            size += len(data)
        file.truncate(size)
    if size != entry.size or whole.digest() != entry.content:
        raise Corrupt(f"the chunks of the content {entry.content.hex()} do not make it up", remedy="Pack it again")
    partial.chmod(0o444)
    partial.rename(target)


def _decoded(data: bytes, stored: Stored) -> bytes | None:
    """The chunk that a pack holds as `data`; None when it is another one, or none."""
    try:
        chunk = decode_chunk(data, stored.length)
    except Corrupt:
        return None
    return chunk if content_hash(chunk) == stored.chunk and len(chunk) == stored.length else None


def _open(digest: Digest, layout: LocalRepository) -> int:
    try:
        return os.open(layout.blob_path(digest), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(
            f"pack {digest} is not at {layout.url}", remedy="Pack it there, with the base it stands on"
        ) from error
