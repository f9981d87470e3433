"""Reading trees out of the blobs that carry them: root and catalogs.

The next version of a tree has most pages in common with the last one. So the trees that were read last are kept, with their decoded pages
and what their catalogs list, as far as KEPT_BYTES_MAX allows. Of a tree that has pages in common with one of them, its base, only the
other pages are decoded and checked, and how they fit in; of its catalogs, those that are new, and those that carry a page that is
neither in a kept tree nor in a new catalog. All of this is named by digests, so nothing that is kept becomes wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from weakref import WeakValueDictionary

from p2pdist.model.catalog import Pack, decode_catalog
from p2pdist.model.digest import Digest
from p2pdist.model.entries import Entries
from p2pdist.model.errors import Corrupt, NotFound
from p2pdist.model.tree import Page, Root, check_page, check_pages, content_hash, decode_page, decode_root
from p2pdist.store.blob import READ_BYTES_MAX, Blob
from p2pdist.store.images import image_bytes_max
from p2pdist.store.lack import Contents, Tree, contents_of, tree_of

ROOT_BYTES_MAX = 64 << 20
CATALOG_BYTES_MAX = 512 << 20
"""Of a root or a catalog as it is stored; more is not read."""

KEPT_TREES_MAX = 4
KEPT_BYTES_MAX = 192 << 20
"""Of memory for the trees that were read last, estimated; what they share counts once. A larger tree is not kept."""

ENTRY_BYTES = 300
"""Memory that an entry takes besides its encoded bytes, measured: values, places in lists and in the contents of its page."""

PAGE_BYTES = 1500
"""Memory that a page takes besides its entries."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownPage:
    """A page that was decoded and checked, its contents, its memory and the bytes that it was `encoded` in. Compared by identity, as
    pages are."""

    page: Page
    contents: Contents
    size: int
    encoded: int

    @classmethod
    def decode(cls, encoded: bytes) -> KnownPage:
        """Raises Corrupt."""
        entries = decode_page(encoded)
        size = PAGE_BYTES + ENTRY_BYTES * len(entries) + len(encoded)
        return cls(check_page(entries), contents_of(entries), size, len(encoded))


@dataclass(frozen=True, slots=True, eq=False)
class KnownCatalog:
    """What a catalog lists: packs, encoded chunk lists by BLAKE3, and the BLAKE3 of the pages that it carries."""

    packs: tuple[Pack, ...]
    chunk_lists: Mapping[bytes, bytes]
    pages: frozenset[bytes]

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


class TreeReader:
    """Thread-safe. Methods raise NotFound for a blob that is not here, Corrupt."""

    def __init__(self, get: Callable[[Digest], Blob | None]) -> None:
        self._get = get
        self._lock = threading.Lock()
        self._kept: dict[Digest, KnownTree] = {}  # read last comes last
        self._shared: WeakValueDictionary[Digest, Entries] = WeakValueDictionary()

    def known(self, root: Digest) -> Entries | None:
        """The entries of a tree, if somebody has them or they are kept."""
        return self._shared.get(root)

    def entries(self, root: Digest, catalogs: Sequence[Digest]) -> Entries:
        """The entries of a tree, checked."""
        known = self.known(root)
        return known if known is not None else self.read(root, catalogs).tree.entries

    def read(self, root: Digest, catalogs: Sequence[Digest]) -> TreeRead:
        """A tree, checked."""
        described = decode_root(self._bytes(root, ROOT_BYTES_MAX))
        with self._lock:
            kept = dict(self._kept)
        pages = {name: page for tree in kept.values() for name, page in tree.pages.items()}
        known = {digest: catalog for tree in kept.values() for digest, catalog in tree.catalogs.items()}
        encoded: dict[bytes, bytes] = {}
        lacking = set(described.pages) - pages.keys()
        # New ones first: they are likely to carry what is lacking, and are decoded anyhow.
        order = sorted(catalogs, key=known.__contains__)
        found = {digest: self._catalog(digest, known.get(digest), lacking, encoded) for digest in order}
        # Of those that are known, too, or the tree could be read here and now only.
        carried = frozenset().union(*(catalog.pages for catalog in found.values()))
        for name in described.pages:
            if name not in carried:
                raise Corrupt(
                    f"no catalog carries the page {name.hex()} of a tree", remedy="Pack and push the package again"
                )
        pages |= {name: KnownPage.decode(encoded[name]) for name in lacking}
        tree, own = _joined(described, pages, kept)
        self._keep(root, KnownTree(own, tree.entries, found))
        image = image_bytes_max(len(tree.entries), sum(page.encoded for page in own.values()))
        return TreeRead(tree, [found[digest] for digest in catalogs], image)

    def _catalog(
        self, digest: Digest, known: KnownCatalog | None, lacking: Collection[bytes], encoded: dict[bytes, bytes]
    ) -> KnownCatalog:
        """A catalog; those of the lacking pages that it carries are put into `encoded`, unless they are there."""
        if known is not None and not any(name in known.pages and name not in encoded for name in lacking):
            return known
        catalog = decode_catalog(self._bytes(digest, CATALOG_BYTES_MAX))
        names = list(map(content_hash, catalog.pages))
        for name, page in zip(names, catalog.pages, strict=True):
            if name in lacking:
                encoded[name] = page
        lists = {content_hash(each): each for each in catalog.chunk_lists}
        return known or KnownCatalog(catalog.packs, lists, frozenset(names))

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
        with blob.held():
            steps = range(0, blob.size, READ_BYTES_MAX)
            return b"".join(blob.read_range(at, min(READ_BYTES_MAX, blob.size - at)) for at in steps)


def _joined(
    root: Root, pages: Mapping[bytes, KnownPage], kept: Mapping[Digest, KnownTree]
) -> tuple[Tree, dict[bytes, KnownPage]]:
    """The tree with this root, and its pages in order. Its base is the kept tree with most pages in common."""
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
