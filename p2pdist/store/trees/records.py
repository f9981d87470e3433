"""Records of trees: what the index says of them, kept in memory.

A record names the catalogs, packs and contents of a tree. A complete one vouches that every content
has an object.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from p2pdist.model.candidate import Share
from p2pdist.model.digest import Digest, parse_digest
from p2pdist.model.errors import NotFound
from p2pdist.store.index import Index, TreeRecord


class TreeRecords:
    """All records, by root. The caller holds the store's lock, but where it only looks, and for
    `use`, which waits for no disk. Methods raise P2PDistError when the disk fails."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = threading.Lock()
        """Held while a record is exchanged; under it nothing waits for the disk."""
        self._records = {record.root: record for record in index.trees()}

    def __contains__(self, root: Digest) -> bool:
        return root in self._records

    def __iter__(self) -> Iterator[TreeRecord]:
        return iter(list(self._records.values()))

    def find(self, root: Digest) -> TreeRecord | None:
        """The record of a tree, None when there is none. Raises UsageError for what is no
        digest."""
        return self._records.get(parse_digest(root))

    def get(self, root: Digest) -> TreeRecord:
        """The record of a tree. Raises NotFound, UsageError."""
        record = self.find(root)
        if record is None:
            raise NotFound(f"the tree {root} is not in the store", remedy="Pull the package first")
        return record

    def add(self, record: TreeRecord, pages: Mapping[bytes, Iterable[bytes]]) -> None:
        """Write a record; `pages` are the names of the contents of each page, by its BLAKE3."""
        self._index.add_tree(record, pages)
        with self._lock:
            self._records[record.root] = record

    def remove(self, root: Digest) -> None:
        """Remove the record of a tree."""
        self._index.reserve.use()
        self._index.remove_tree(root)
        with self._lock:
            del self._records[root]

    def use(self, root: Digest) -> None:
        """Note that a tree is used now, if there is a record of it; save_use() writes it down."""
        with self._lock:
            if (record := self._records.get(root)) is not None:
                self._records[root] = replace(record, last_used=time.time())

    def save_use(self, since: float) -> None:
        """Write down when trees were used, of those that were used since then. A row is written
        whole, with the names of all pages."""
        self._index.touch_trees([(record.last_used, record.root) for record in self if record.last_used >= since])

    def set_incomplete(self, root: Digest) -> None:
        """Note that contents of a tree have no object any more."""
        self._index.set_tree(root, complete=False)
        with self._lock:
            self._records[root] = replace(self._records[root], complete=False)

    def contents(self, root: Digest) -> set[bytes]:
        """The names of all contents of a tree."""
        return self._index.tree_contents(root)

    def with_any(self, contents: set[bytes]) -> set[Digest]:
        """The trees that have one of these contents."""
        return {record.root for record in self if contents and not contents.isdisjoint(self.contents(record.root))}

    def needing(self, digest: Digest) -> set[Digest]:
        """The trees that keep a blob: their root or a catalog."""
        return {record.root for record in self if digest == record.root or digest in record.catalogs}

    def needed_by(self) -> dict[Digest, set[Digest]]:
        """For each catalog of a tree, the trees."""
        trees: dict[Digest, set[Digest]] = {}
        for record in self:
            for catalog in record.catalogs:
                trees.setdefault(catalog, set()).add(record.root)
        return trees


def shared_bytes(
    trees: Mapping[Digest, Iterable[bytes]], staying: Iterable[bytes], sizes: Mapping[bytes, int]
) -> tuple[dict[Digest, int], list[Share]]:
    """Bytes of the contents that one tree alone names, and of those that several do. `trees` are
    the contents of each, without repetition; `staying` stay whichever of them go; what has no size
    here counts nothing."""
    owners: dict[bytes, int] = {}
    roots = list(trees)
    for number, root in enumerate(roots):
        bit = 1 << number
        for content in trees[root]:
            owners[content] = owners.get(content, 0) | bit
    for content in staying:
        owners.pop(content, None)
    totals: dict[int, int] = {}
    for content, mask in owners.items():
        totals[mask] = totals.get(mask, 0) + sizes.get(content, 0)
    own: dict[Digest, int] = {}
    shares = []
    for mask, size in totals.items():
        named = [root for number, root in enumerate(roots) if mask >> number & 1]
        if len(named) == 1:
            own[named[0]] = size
        else:
            shares.append(Share(frozenset(named), size))
    return own, shares
