"""Trees to store: packed as a publisher would, from contents by path."""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO

from formats_rig import encode_pages

from p2pdist.model.catalog import Catalog, ChunkEncoder, Pack, encode_catalog, record
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.pieces import PieceList
from p2pdist.model.tree import (
    WHOLE_MAX,
    ChunkList,
    Directory,
    Entry,
    File,
    Root,
    content_hash,
    encode_root,
    walking_order,
)
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.missing_contents import Missing

CHUNK = 128 << 10


def noise(seed: int, size: int) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size)


def text(seed: int, size: int) -> bytes:
    """Bytes that compress about four times."""
    source = random.Random(seed)
    words = [source.randbytes(5).hex().encode() for _ in range(300)]
    made = b" ".join(source.choices(words, k=size // 10 + 1))
    return made[:size]


@dataclass
class Packed:
    """A tree as its publisher has it."""

    root: Digest
    entries: list[Entry]
    contents: dict[bytes, bytes]
    blobs: dict[Digest, bytes]
    catalogs: list[Digest]
    packs: list[Digest]

    @property
    def small(self) -> list[Digest]:
        """What is here before anything is said to be lacking."""
        return [self.root, *self.catalogs]


@dataclass
class Publisher:
    """Packs trees one after the other, each with what its catalogs missing only. Large files are
    cut every `chunk` bytes; `cut` says that the blocks of their chunks are as short as they are
    today."""

    chunk: int = CHUNK
    cut: bool = True
    pack_bytes: int = 1 << 30
    known: set[bytes] = field(default_factory=set)
    blobs: dict[Digest, bytes] = field(default_factory=dict)
    catalogs: list[Digest] = field(default_factory=list)
    packs: list[Digest] = field(default_factory=list)

    def pack(self, files: Mapping[bytes, bytes], extra: Iterable[Entry] = ()) -> Packed:
        contents: dict[bytes, bytes] = {}
        lists: dict[bytes, bytes] = {}
        chunks: dict[bytes, bytes] = {}
        parts: set[bytes] = set()
        entries: list[Entry] = list(extra)
        named = {path.rpartition(b"/")[0] for path in files} - {b""}
        directories = {
            b"/".join(path.split(b"/")[:depth]) for path in named for depth in range(1, path.count(b"/") + 2)
        }
        entries += [Directory(path, 0o755, 0) for path in directories]
        for path, data in files.items():
            content, listed = content_hash(data), b""
            if data:
                contents[content] = data
            if len(data) > WHOLE_MAX:
                cut = [data[at : at + self.chunk] for at in range(0, len(data), self.chunk)]
                encoded = ChunkList(tuple((content_hash(each), len(each)) for each in cut)).encode()
                listed = content_hash(encoded)
                lists[listed] = encoded
                chunks.update((content_hash(each), each) for each in cut)
                parts.update(map(content_hash, cut))
            elif data:
                chunks[content] = data
            entries.append(File(path, 0o644, 0, len(data), content, listed))
        entries.sort(key=lambda entry: walking_order(entry.path))
        pages = list(encode_pages(entries))
        new = {name: chunk for name, chunk in chunks.items() if name not in self.known}
        packs = self._packs(new, parts if self.cut else set())
        catalog = Catalog(
            tuple(page for page in pages if content_hash(page) not in self.known),
            tuple(encoded for name, encoded in lists.items() if name not in self.known),
            packs,
        )
        self.known |= {*chunks, *lists, *map(content_hash, pages)}
        regular = [entry for entry in entries if isinstance(entry, File)]
        root = Root(len(entries), len(regular), sum(file.size for file in regular), tuple(map(content_hash, pages)))
        self.catalogs.append(self._blob(encode_catalog(catalog)))
        made = self._blob(encode_root(root))
        return Packed(made, entries, contents, self.blobs, list(self.catalogs), list(self.packs))

    def _packs(self, chunks: Mapping[bytes, bytes], cut: Container[bytes]) -> tuple[Pack, ...]:
        packs: list[Pack] = []
        records, data = bytearray(), bytearray()
        for number, (name, chunk) in enumerate(chunks.items()):
            stored = ChunkEncoder().encode(chunk, cut=name in cut)
            records += record(name, len(chunk), len(stored))
            data += stored
            if len(data) >= self.pack_bytes or number == len(chunks) - 1:
                packs.append(Pack(self._blob(bytes(data)), len(data), bytes(records)))
                records, data = bytearray(), bytearray()
        self.packs += [pack.digest for pack in packs]
        return tuple(packs)

    def _blob(self, data: bytes) -> Digest:
        digest = digest_of(data)
        self.blobs[digest] = data
        return digest


def bring(store: BlobStore, packed: Packed, digests: Sequence[Digest]) -> None:
    """Have blobs of a package complete in a store."""
    for digest in digests:
        data = packed.blobs[digest]
        pieces = PieceList.of_stream(BytesIO(data), len(data))
        blob = store.begin(digest, pieces)
        for piece in range(pieces.layout.count):
            start = pieces.layout.offset(piece)
            assert blob.write(piece, data[start : start + pieces.layout.length(piece)])
        blob.finish()


def pull(store: BlobStore, packed: Packed) -> Missing:
    """Have a tree complete in a store; returns what it lacked."""
    bring(store, packed, packed.small)
    with store.trees.missing(packed.root, packed.catalogs, packed.packs) as missing:
        bring(store, packed, [need.pack for need in missing.needs])
        filled = store.trees.fill(missing)
        assert filled.missing == 0
        store.trees.finish(missing)
    return missing


def check(store: BlobStore, packed: Packed) -> None:
    """All contents of a tree stand in the store, read-only and right."""
    for content, data in packed.contents.items():
        path = store.objects.path(content)
        assert path.read_bytes() == data
        assert path.stat().st_mode & 0o7777 == 0o444
        assert path == store.root / "objects" / content.hex()[:2] / content.hex()[2:]
