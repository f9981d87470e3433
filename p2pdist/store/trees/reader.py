"""Reader of trees out of the blobs that carry them: root and catalogs.

The next version of a tree has most pages in common with the last one. So the trees that were read
last are kept, with their decoded pages and what their catalogs list, as far as KEPT_BYTES_MAX
allows. Of a tree that has pages in common with one of them, its base, only the other pages are
decoded and checked, and how they fit in; of its catalogs, those that are new, and those that carry
a page that is neither in a kept tree nor in a new catalog. All of this is named by digests, so
nothing that is kept becomes wrong.

What the catalogs of a tree may take of memory is limited for all of them together, before any is
decompressed. They are decoded one at a time, and of each is kept what the tree names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from weakref import WeakValueDictionary

from p2pdist.model.catalog import (
    CATALOG_BYTES_MAX,
    CHUNK_LISTS_MAX,
    HEAD_BYTES,
    Catalog,
    Pack,
    check_expansion,
    decode_catalog,
)
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound
from p2pdist.model.tree import (
    ENTRY_BYTES,
    PAGE_BYTES,
    PAGES_MAX,
    Entries,
    Page,
    Root,
    check_memory,
    check_page,
    check_pages,
    content_hash,
    decode_page,
    decode_root,
)
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.trees.damage import read_again
from p2pdist.store.trees.images import image_bytes_max
from p2pdist.store.trees.missing_contents import Contents, Tree, contents_of, tree_of

ROOT_BYTES_MAX = 64 << 20
"""Of a root as it is stored; more is not read."""

KEPT_TREES_MAX = 4
KEPT_BYTES_MAX = 192 << 20
"""Of memory for the trees that were read last, estimated; what they share counts once. A larger
tree is not kept."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownPage:
    """A page that was decoded and checked. Compared by identity, as pages are."""

    page: Page
    contents: Contents
    size: int
    """Bytes of memory, estimated."""
    encoded: int
    """Bytes of its encoded form."""

    @classmethod
    def decode(cls, encoded: bytes) -> KnownPage:
        """Raises Corrupt."""
        entries = decode_page(encoded)
        size = PAGE_BYTES + ENTRY_BYTES * len(entries) + len(encoded)
        return cls(check_page(entries), contents_of(entries), size, len(encoded))


@dataclass(frozen=True, slots=True, eq=False)
class KnownCatalog:
    """What a catalog lists."""

    packs: tuple[Pack, ...]
    chunk_lists: Mapping[bytes, bytes]
    """The encoded chunk lists that trees named so far, by BLAKE3."""
    pages: frozenset[bytes]
    """The BLAKE3 of the pages that it carries."""
    head: tuple[int, bytes]
    """Its length and its first bytes."""

    @property
    def size(self) -> int:
        return sum(len(pack.records) for pack in self.packs) + sum(map(len, self.chunk_lists.values()))


@dataclass(frozen=True, slots=True)
class KnownTree:
    """A tree that was read: its pages by BLAKE3, in order, and its catalogs."""

    pages: Mapping[bytes, KnownPage]
    entries: Entries
    catalogs: Mapping[Digest, KnownCatalog]

    def parts(self) -> Iterator[KnownPage | KnownCatalog]:
        return chain(self.pages.values(), self.catalogs.values())


@dataclass(frozen=True, slots=True)
class TreeRead:
    """A tree, and its catalogs in the order in which they were named."""

    tree: Tree
    catalogs: Sequence[KnownCatalog]
    image_bytes_max: int
    """Of its metadata image."""

    def chunk_lists(self) -> dict[bytes, bytes]:
        """Those that the catalogs carry, encoded, by BLAKE3."""
        return dict(chain.from_iterable(catalog.chunk_lists.items() for catalog in self.catalogs))


@dataclass(slots=True)
class _Reading:
    """A tree that is being read."""

    missing: set[bytes]
    """Its pages that are not known, by BLAKE3."""
    pages: dict[bytes, bytes] = field(default_factory=dict)
    """The missing pages that catalogs carry, encoded."""
    lists: dict[Digest, tuple[bytes, ...]] = field(default_factory=dict)
    """The chunk lists of the catalogs that were decoded."""
    found: dict[Digest, KnownCatalog] = field(default_factory=dict)
    """What all catalogs list."""

    def take(self, digest: Digest, head: tuple[int, bytes], catalog: Catalog) -> None:
        """Take over a catalog that was decoded. Raises Corrupt when all of them have too many pages
        or chunk lists."""
        names = list(map(content_hash, catalog.pages))
        for name, page in zip(names, catalog.pages, strict=True):
            if name in self.missing:
                self.pages[name] = page
        self.lists[digest] = catalog.chunk_lists
        self.found[digest] = KnownCatalog(catalog.packs, {}, frozenset(names), head)
        pages, lists = sum(len(each.pages) for each in self.found.values()), sum(map(len, self.lists.values()))
        if pages > PAGES_MAX or lists > CHUNK_LISTS_MAX:
            raise Corrupt(f"the catalogs of a tree have {pages} pages and {lists} chunk lists, over the limit")


class TreeReader:
    """Reads trees and keeps those that were read last. Thread-safe. Methods raise NotFound for a
    blob that is not here, Damaged for one that changed on the disk, and Corrupt."""

    def __init__(self, get: Callable[[Digest], Blob | None]) -> None:
        self._get = get
        self._lock = threading.Lock()
        self._kept: dict[Digest, KnownTree] = {}  # read last comes last
        self._shared: WeakValueDictionary[Digest, Entries] = WeakValueDictionary()

    def known(self, root: Digest) -> Entries | None:
        """The entries of a tree, if they are in memory."""
        return self._shared.get(root)

    def entries(self, root: Digest, catalogs: Sequence[Digest]) -> Entries:
        """The entries of a tree, checked."""
        known = self.known(root)
        return known if known is not None else self.read(root, catalogs).tree.entries

    def read(self, root: Digest, catalogs: Sequence[Digest]) -> TreeRead:
        """A tree, checked."""
        described = decode_root(self._bytes(root, ROOT_BYTES_MAX))
        check_memory(described.entries * ENTRY_BYTES + len(described.pages) * PAGE_BYTES)
        with self._lock:
            kept = dict(self._kept)
        pages = {name: page for tree in kept.values() for name, page in tree.pages.items()}
        known = {digest: catalog for tree in kept.values() for digest, catalog in tree.catalogs.items()}
        missing = set(described.pages) - pages.keys()
        # New ones first: they are likely to carry what is missing, and are decoded anyhow.
        order = sorted(dict.fromkeys(catalogs), key=known.__contains__)
        heads = {digest: known[digest].head if digest in known else self._head(digest) for digest in order}
        check_expansion(heads.values())
        reading = _Reading(missing)
        for digest in order:
            before = known.get(digest)
            if before is None or any(name in before.pages for name in reading.missing - reading.pages.keys()):
                reading.take(digest, heads[digest], decode_catalog(self._bytes(digest, CATALOG_BYTES_MAX)))
            else:
                reading.found[digest] = before
        # Known pages must be carried, too, or the tree could be read here and now only.
        carried = frozenset().union(*(catalog.pages for catalog in reading.found.values()))
        for name in described.pages:
            if name not in carried:
                raise Corrupt(
                    f"no catalog carries the page {name.hex()} of a tree", remedy="Pack and push the package again"
                )
        size = 0
        for name in missing:
            pages[name] = KnownPage.decode(reading.pages.pop(name))
            check_memory(size := size + pages[name].size)
        tree, own = _joined(described, pages, kept)
        self._find_lists(set(tree.chunk_lists.values()), reading, known)
        self._keep(root, KnownTree(own, tree.entries, reading.found))
        image = image_bytes_max(len(tree.entries), sum(page.encoded for page in own.values()))
        return TreeRead(tree, [reading.found[digest] for digest in catalogs], image)

    def _find_lists(self, wanted: set[bytes], reading: _Reading, known: Mapping[Digest, KnownCatalog]) -> None:
        """Keep the chunk lists that a tree names. A known catalog has those that earlier trees
        named, and is decoded again where that is not enough."""
        for digest, lists in reading.lists.items():
            named = {name: data for data in lists if (name := content_hash(data)) in wanted}
            before = known[digest].chunk_lists if digest in known else {}
            reading.found[digest] = replace(reading.found[digest], chunk_lists={**before, **named})
        missing = wanted.difference(*(catalog.chunk_lists for catalog in reading.found.values()))
        for digest, catalog in list(reading.found.items()):
            if not missing or digest in reading.lists:
                continue
            lists = decode_catalog(self._bytes(digest, CATALOG_BYTES_MAX)).chunk_lists
            named = {name: data for data in lists if (name := content_hash(data)) in missing}
            if named:
                reading.found[digest] = replace(catalog, chunk_lists={**catalog.chunk_lists, **named})
                missing -= named.keys()

    def _head(self, digest: Digest) -> tuple[int, bytes]:
        """Length and first bytes of a catalog."""
        blob = self.blob(digest)
        return blob.size, read_again(blob, 0, min(HEAD_BYTES, blob.size))

    def _keep(self, root: Digest, tree: KnownTree) -> None:
        with self._lock:
            self._shared[root] = tree.entries
            self._kept.pop(root, None)
            self._kept[root] = tree
            counted: set[KnownPage | KnownCatalog] = set()
            size = 0
            for number, (digest, each) in enumerate(reversed(list(self._kept.items()))):
                own = set(each.parts()) - counted
                counted |= own
                size += sum(part.size for part in own)
                if number >= KEPT_TREES_MAX or size > KEPT_BYTES_MAX:
                    del self._kept[digest]

    def blob(self, digest: Digest) -> Blob:
        """A complete blob."""
        blob = self._get(digest)
        if blob is None or not blob.complete:
            raise NotFound(f"{digest}, which a tree needs, is not in the store", remedy="Pull the package again")
        return blob

    def _bytes(self, digest: Digest, limit: int) -> bytes:
        blob = self.blob(digest)
        if blob.size > limit:
            raise Corrupt(f"{digest} of {blob.size} bytes is over the limit of {limit}")
        return read_again(blob, 0, blob.size)


def _joined(
    root: Root, pages: Mapping[bytes, KnownPage], kept: Mapping[Digest, KnownTree]
) -> tuple[Tree, dict[bytes, KnownPage]]:
    """The tree with this root, and its pages in order. Its base is the kept tree with most pages in
    common."""
    own = {name: pages[name] for name in root.pages}
    common = {digest: len(own.keys() & tree.pages.keys()) for digest, tree in kept.items()}
    base = max(reversed(common), key=common.__getitem__, default=None)
    before = kept[base].pages if base is not None and common[base] else {}
    in_order = [pages[name] for name in root.pages]
    check_pages(root, _plain(in_order), _plain(before.values()))
    entries = Entries(known.page.entries for known in in_order)
    return tree_of(entries, _contents(own), base if before else None, _contents(before)), own


def _contents(pages: Mapping[bytes, KnownPage]) -> dict[bytes, Contents]:
    return {name: known.contents for name, known in pages.items()}


def _plain(pages: Iterable[KnownPage]) -> list[Page]:
    return [known.page for known in pages]
