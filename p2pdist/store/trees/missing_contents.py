"""What is missing of a tree in a store: which contents have no object, and which chunks of which
packs make them.

A content of up to WHOLE_MAX bytes is one chunk. That of a larger file is a list of chunks, and
those that older objects here hold are taken from them. Each chunk is taken from one pack, the first
that has it: complete packs first, then partial ones, then those that are not here (`remoteness`),
and among these in the order of the catalogs.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter

from p2pdist.model.catalog import Pack, Stored
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, Corrupt
from p2pdist.model.tree import CHUNK_MAX, ChunkList, Entries, Entry, File, content_hash
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.objects.files import bytes_taken
from p2pdist.store.trees.assembly import Assembly, Part, SelectedPack

_RECORD = struct.Struct("<32sII")
"""A pack's record of a chunk (catalog.py): BLAKE3, length, stored length."""

_LISTED = struct.Struct("<32sI")
"""A chunk in a chunk list (tree.py): BLAKE3 and length."""

EMPTY = content_hash(b"")

_FEW = 32
"""So many chunks are looked for one by one in the records of a pack."""

Located = dict[bytes, tuple[Digest, Stored]]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a page or a tree states of contents, none of which is empty: their `sizes` in bytes, and
    the names of the chunk lists of those that have one."""

    sizes: dict[bytes, int]
    chunk_lists: dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree as its root and catalogs have it; `pages` say by BLAKE3, in order, what each states of
    contents. `changed` are the sizes that pages state which the tree `base` has not: whatever else
    is in `contents` is a content of `base`, with this size. Without a base that is all of them."""

    entries: Entries
    pages: Mapping[bytes, Contents]
    chunk_lists: dict[bytes, bytes]
    base: Digest | None
    changed: dict[bytes, int]

    @property
    def contents(self) -> dict[bytes, int]:
        """The sizes of all contents, put together when they are asked for: of a version that hardly
        differs few are needed."""
        sizes: dict[bytes, int] = {}
        for page in self.pages.values():
            sizes.update(page.sizes)
        return sizes


@dataclass(frozen=True, slots=True)
class Need:
    """What is needed of a pack of `size` bytes: chunks by offset, in all `stored` bytes, in these
    ranges (begin, end) of the pack."""

    pack: Digest
    size: int
    chunks: tuple[Stored, ...]
    stored: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Missing:
    """What is missing of the tree `root`, and where it comes from. As long as it is open, nothing
    that the tree needs is evicted; `close` it, or use it in a `with` block."""

    root: Digest
    catalogs: tuple[Digest, ...]
    tree: Tree
    packs: tuple[Digest, ...]
    """All packs that the catalogs list."""
    contents: dict[bytes, int] = field(default_factory=dict)
    """Sizes in bytes of the contents without an object; extraction removes what it makes."""
    needs: tuple[Need, ...] = ()
    """What is taken of which packs, whether these are here or not."""
    located: Located = field(default_factory=dict)
    """By chunk, where in packs what is needed is."""
    bytes_content: int = 0
    """What the objects will take."""
    image_bytes_max: int | None = None
    """Bytes for which room is kept for the metadata image; None before that."""
    assemblies: dict[bytes, Assembly] = field(default_factory=dict)
    """The contents of several chunks that are not objects yet."""
    sources: frozenset[bytes] = frozenset()
    """Older objects from which chunks are taken."""
    close: Callable[[], None] = lambda: None
    """Gives up what is kept. Idempotent."""
    extraction: threading.Lock = field(default_factory=threading.Lock)
    """Held while objects are made."""
    whole: dict[Digest, list[Stored]] = field(default_factory=dict)
    """By pack, the contents of one chunk that are not objects yet."""
    selected: dict[Digest, SelectedPack] = field(default_factory=dict)
    """Selections of packs; the caller, which holds their blobs, adds them."""

    def __enter__(self) -> Missing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenPulls:
    """Every Missing that is open. The caller of add and remove holds the store's lock."""

    def __init__(self) -> None:
        self._open: list[Missing] = []

    def __iter__(self) -> Iterator[Missing]:
        return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def add(self, missing: Missing) -> None:
        """From now on the tree is being pulled."""
        self._open.append(missing)

    def remove(self, missing: Missing) -> None:
        """The pull has ended."""
        self._open = [other for other in self._open if other is not missing]

    def require(self, missing: Missing) -> None:
        """Raises Conflict when it was closed."""
        if not any(other is missing for other in self._open):
            raise Conflict(f"what {missing.root} lacks is no longer kept for it", remedy="Pull again")

    def of(self, root: Digest) -> bool:
        """Whether the tree is being pulled."""
        return any(missing.root == root for missing in self._open)

    def packs(self) -> set[Digest]:
        """Packs that are needed."""
        return {need.pack for missing in self._open for need in missing.needs}


def contents_of(entries: Iterable[Entry]) -> Contents:
    """The contents of checked entries. Raises Corrupt when they contradict each other."""
    sizes: dict[bytes, int] = {}
    chunk_lists: dict[bytes, bytes] = {}
    for entry in entries:
        if type(entry) is not File:
            continue
        content, size = entry.content, entry.size
        if sizes.setdefault(content, size) != size or (size == 0) != (content == EMPTY):
            raise _sizes_differ(content)
        if entry.chunks:
            chunk_lists[content] = entry.chunks
    sizes.pop(EMPTY, None)
    return Contents(sizes, chunk_lists)


def tree_of(
    entries: Entries, pages: Mapping[bytes, Contents], base: Digest | None, before: Mapping[bytes, Contents]
) -> Tree:
    """The tree with these entries, whose pages state these contents in turn; `before` are the pages
    of `base`, which has passed here. Raises Corrupt when pages contradict each other."""
    new = [page for name, page in pages.items() if name not in before]
    changed: dict[bytes, int] = {}
    for page in new:
        changed.update(page.sizes)
    stated: dict[bytes, int] = {}
    for name in before.keys() - pages.keys():
        stated.update(before[name].sizes)
    # What a page that is gone stated agreed with all that stay; so these are compared only for
    # sizes that they did not state.
    fresh = changed
    if stated:
        fresh = {content: size for content, size in changed.items() if stated.get(content) != size}
    for page in new:
        if not page.sizes.items() <= changed.items():
            raise _sizes_differ(next(content for content, size in page.sizes.items() if changed[content] != size))
    chunk_lists: dict[bytes, bytes] = {}
    for name, page in pages.items():
        chunk_lists.update(page.chunk_lists)
        for content in fresh.keys() & page.sizes.keys() if name in before else ():
            if fresh[content] != page.sizes[content]:
                raise _sizes_differ(content)
    return Tree(entries, pages, chunk_lists, base, changed)


def _sizes_differ(content: bytes) -> Corrupt:
    return Corrupt(f"the tree states impossible sizes for the content {content.hex()}")


@dataclass(frozen=True, slots=True)
class Backed:
    """What backs the sizes that a tree states of contents that are missing: where those are that
    are one chunk, and the encoded chunk lists of the others. `room` is what their objects will
    take."""

    whole: Located
    chunked: dict[bytes, bytes]
    room: dict[bytes, int]


def back(missing: Missing, lists: Mapping[bytes, bytes], packs: Iterable[Pack]) -> Backed:
    """What backs the sizes in `contents`, so that no room is made for bytes that are only claimed.
    `packs` come in order of preference. Memory does not grow with the sizes. Raises Corrupt for
    what is nowhere or has another size."""
    named = missing.tree.chunk_lists
    chunked = {
        content: _chunk_list(content, missing.contents, named[content], lists)
        for content in missing.contents.keys() & named
    }
    whole, sizes = missing.contents.keys() - chunked.keys(), missing.contents
    located = _locate(whole, packs)
    if len(located) < len(whole):
        content = next(iter(whole - located.keys()))
        raise _nowhere(content, content)
    for content, (pack, stored) in located.items():
        if stored.length != sizes[content]:
            raise Corrupt(f"the tree and {pack} state different sizes for the content {content.hex()}")
    taken = {content: bytes_taken(missing.contents[content], encoded) for content, encoded in chunked.items()}
    return Backed(located, chunked, missing.contents | taken)


def plan(missing: Missing, backed: Backed, packs: Sequence[Pack], old: Iterable[tuple[bytes, bytes]]) -> None:
    """Fill in what is needed; `contents` are known and `backed`. `packs` come in order of
    preference, `old` are objects here and their encoded chunk lists. Raises Corrupt for what is
    nowhere."""
    chunked = {content: ChunkList.decode(encoded) for content, encoded in backed.chunked.items()}
    pieces = {chunk for chunks in chunked.values() for chunk, _ in chunks.chunks}
    held = _held_chunks(pieces, old) if pieces else {}
    located = missing.located = backed.whole | _locate(pieces - held.keys() - backed.whole.keys(), packs)
    missing.whole.update(_by_pack(backed.whole))
    for content, chunks in chunked.items():
        missing.assemblies[content] = _assembly(content, missing.contents[content], chunks, held, located)
    missing.sources = frozenset(content for content, _ in held.values())
    missing.needs = tuple(_needs({pack.digest: pack.size for pack in packs}, located))


def remoteness(pack: Blob | None) -> int:
    """The order in which packs are asked for chunks: complete ones, partial ones, those that are
    not here."""
    return 2 if pack is None else 0 if pack.complete else 1


def _chunk_list(content: bytes, sizes: Mapping[bytes, int], name: bytes, lists: Mapping[bytes, bytes]) -> bytes:
    encoded = lists.get(name)
    if encoded is None:
        raise Corrupt(f"no catalog carries the chunk list {name.hex()}", remedy="Pack and push the package again")
    if ChunkList.size_of(encoded) != sizes[content]:
        raise Corrupt(f"the chunks of the content {content.hex()} do not add up to its size")
    return encoded


def _held_chunks(wanted: Collection[bytes], old: Iterable[tuple[bytes, bytes]]) -> dict[bytes, tuple[bytes, int]]:
    """Where objects here hold chunks: object and offset in it."""
    held: dict[bytes, tuple[bytes, int]] = {}
    for content, encoded in old:
        offset = 0
        for chunk, length in _LISTED.iter_unpack(encoded):
            if chunk in wanted:
                held.setdefault(chunk, (content, offset))
            offset += length
    return held


def _locate(wanted: Collection[bytes], packs: Iterable[Pack]) -> Located:
    """Where packs hold chunks; the first one counts."""
    located: Located = {}
    if not wanted:
        return located
    for pack in packs:
        # Finding bytes takes a hundredth of the time that a look at each record takes.
        if len(wanted) <= _FEW and not any(chunk in pack.records for chunk in wanted):
            continue
        offset = 0
        for chunk, length, stored in _RECORD.iter_unpack(pack.records):
            if chunk in wanted and chunk not in located:
                located[chunk] = pack.digest, Stored(chunk, length, offset, stored)
            offset += stored
    return located


def _assembly(
    content: bytes, size: int, chunks: ChunkList, held: Mapping[bytes, tuple[bytes, int]], located: Located
) -> Assembly:
    parts, offset = [], 0
    for chunk, length in chunks.chunks:
        if chunk in held:
            source, at = held[chunk]
            parts.append(Part(offset, chunk, length, source=source, at=at))
        else:
            found = located.get(chunk)
            if found is None:
                raise _nowhere(chunk, content)
            pack, stored = found
            if stored.length != length or length > CHUNK_MAX:
                raise Corrupt(f"a chunk list and {pack} state different lengths for the chunk {chunk.hex()}")
            parts.append(Part(offset, chunk, length, pack=pack, at=stored.offset, stored=stored.stored))
        offset += length
    return Assembly(content, size, chunks.encode(), parts)


def _by_pack(located: Located) -> dict[Digest, list[Stored]]:
    """Chunks by their pack, in its order."""
    by_pack: dict[Digest, list[Stored]] = {}
    for pack, found in groupby(located.values(), itemgetter(0)):  # long runs: it is looked for pack by pack
        by_pack.setdefault(pack, []).extend(map(itemgetter(1), found))
    for chunks in by_pack.values():
        chunks.sort(key=attrgetter("offset"))
    return by_pack


def _needs(sizes: Mapping[Digest, int], located: Located) -> Iterable[Need]:
    for pack, chunks in _by_pack(located).items():
        ranges: list[tuple[int, int]] = []
        begin = end = 0
        for each in chunks:
            if each.offset != end:
                if begin < end:
                    ranges.append((begin, end))
                begin = each.offset
            end = each.offset + each.stored
        ranges.append((begin, end))
        yield Need(pack, sizes[pack], tuple(chunks), sum(stop - start for start, stop in ranges), tuple(ranges))


def _nowhere(chunk: bytes, content: bytes) -> Corrupt:
    what = "content" if chunk == content else f"chunk {chunk.hex()} of the content"
    return Corrupt(f"no catalog says where the {what} {content.hex()} is", remedy="Pack and push the package again")
