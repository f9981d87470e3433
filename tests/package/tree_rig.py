"""What the tests of trees share: packages read back by the formats alone, and a slow, obvious way
to list a directory."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from p2pdist.model.catalog import Catalog, decode_catalog, decode_chunk
from p2pdist.model.digest import Digest
from p2pdist.model.manifest import CATALOG_TYPE, MANIFEST_BYTES_MAX, PACK_TYPE, TREE_TYPE, Manifest, decode_manifest
from p2pdist.model.pieces import PieceList
from p2pdist.model.tree import (
    WHOLE_MAX,
    ChunkList,
    Directory,
    Entry,
    File,
    HardLink,
    Symlink,
    Whiteout,
    content_hash,
    decode_root,
    decode_tree,
    walking_order,
)
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.pack import Packed


@dataclass
class Package:
    """A package as it was read back: the entries of its tree layers, bottom to top, and its
    catalogs."""

    manifest: Manifest
    trees: list[list[Entry]]
    catalogs: list[Catalog]
    layout: LocalLayout

    @property
    def entries(self) -> dict[bytes, Entry]:
        """Those of the top layer, by path."""
        return {entry.path: entry for entry in self.trees[-1]}

    def content(self, path: bytes) -> bytes:
        """The content of a regular file, from the packs that the manifest names, every chunk
        verified."""
        entry = self.entries[path]
        assert isinstance(entry, File)
        if not entry.size:
            assert entry.content == blake3(b"").digest()
            return b""
        if entry.size <= WHOLE_MAX:
            data = self.chunk(entry.content)
        else:
            lists = {content_hash(data): data for catalog in self.catalogs for data in catalog.chunk_lists}
            data = b"".join(self.chunk(name) for name, _ in ChunkList.decode(lists[entry.chunks]).chunks)
        assert len(data) == entry.size
        assert blake3(data).digest() == entry.content
        return data

    def chunk(self, name: bytes) -> bytes:
        """A chunk, verified."""
        named = {part.digest for part in self.manifest.parts}
        for catalog in self.catalogs:
            for pack in catalog.packs:
                if pack.digest not in named:
                    continue
                for stored in pack.chunks():
                    if stored.chunk == name:
                        with self.layout.blob_path(pack.digest).open("rb") as stream:
                            data = os.pread(stream.fileno(), stored.stored, stored.offset)
                        found = decode_chunk(data, stored.length)
                        assert content_hash(found) == name
                        return found
        raise AssertionError(f"chunk {name.hex()} is in no pack of the package")


async def read_back(layout: LocalLayout, packed: Packed) -> Package:
    """Read a package as a host would, checking what a host checks."""
    manifest = decode_manifest(await layout.read(Digest(packed.digest), limit=MANIFEST_BYTES_MAX))
    assert manifest.layers == packed.layers
    assert manifest.parts == packed.parts
    for blob in manifest.blobs:
        pieces = PieceList.decode(await layout.read(blob.pieces_digest))
        data = await layout.read(blob.digest, limit=1 << 30)
        assert pieces.layout == blob.layout
        assert all(
            pieces.verify(piece, data[pieces.layout.offset(piece) :][: pieces.layout.length(piece)])
            for piece in range(pieces.layout.count)
        )
    parts = [part for part in manifest.parts if part.media_type == CATALOG_TYPE]
    assert {part.media_type for part in manifest.parts} <= {CATALOG_TYPE, PACK_TYPE}
    catalogs = [decode_catalog(await layout.read(part.digest, limit=1 << 30)) for part in parts]
    pages = {content_hash(page): page for catalog in catalogs for page in catalog.pages}
    roots = [layer for layer in manifest.layers if layer.media_type == TREE_TYPE]
    trees = [decode_tree(decode_root(await layout.read(layer.digest)), pages) for layer in roots]
    return Package(manifest, trees, catalogs, layout)


def listed(source: Path) -> list[Entry]:
    """The entries that a tree of `source` must have, in an obvious way."""
    found: list[Entry] = []
    paths = []
    for directory, directories, files in os.walk(os.fsencode(source)):
        paths += [os.path.relpath(os.path.join(directory, name), os.fsencode(source)) for name in directories + files]
    first: dict[tuple[int, int], bytes] = {}
    for path in sorted(paths, key=walking_order):
        full = os.fsencode(source) + b"/" + path
        status = os.lstat(full)
        mode = stat.S_IMODE(status.st_mode) & 0o1777
        if stat.S_ISDIR(status.st_mode):
            found.append(Directory(path, mode, status.st_mtime_ns))
        elif stat.S_ISLNK(status.st_mode):
            found.append(Symlink(path, status.st_mtime_ns, os.readlink(full)))
        elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            found.append(Whiteout(path))
        elif stat.S_ISREG(status.st_mode):
            identity = (status.st_dev, status.st_ino)
            if identity in first:
                found.append(HardLink(path, first[identity]))
                continue
            first[identity] = path
            data = Path(os.fsdecode(full)).read_bytes()
            found.append(File(path, mode, status.st_mtime_ns, len(data), blake3(data).digest()))
    return found
