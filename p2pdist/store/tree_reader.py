"""Reading trees out of the blobs that carry them: root and catalogs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from p2pdist.model.catalog import Catalog, decode_catalog
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound
from p2pdist.model.tree import decode_root
from p2pdist.store.blob import READ_BYTES_MAX, Blob
from p2pdist.store.lack import Entries, read_tree

ROOT_BYTES_MAX = 64 << 20
CATALOG_BYTES_MAX = 512 << 20
"""Of a root or a catalog as it is stored; more is not read."""


class TreeReader:
    """Thread-safe. Decoding takes a second for each million entries, so those of a tree are decoded once for all who use them at a time.
    Methods raise NotFound for a blob that is not here, Corrupt."""

    def __init__(self, get: Callable[[Digest], Blob | None]) -> None:
        self._get = get
        self._known: WeakValueDictionary[Digest, Entries] = WeakValueDictionary()

    def entries(self, root: Digest, catalogs: Sequence[Digest]) -> Entries:
        """The entries of a tree, checked."""
        known = self._known.get(root)
        return known if known is not None else self.read(root, catalogs)[0]

    def read(self, root: Digest, catalogs: Sequence[Digest]) -> tuple[Entries, list[Catalog], dict[bytes, bytes]]:
        """The entries of a tree, its catalogs, and the encoded chunk lists in them by BLAKE3."""
        decoded = [decode_catalog(self._bytes(digest, CATALOG_BYTES_MAX)) for digest in catalogs]
        entries, lists = read_tree(decode_root(self._bytes(root, ROOT_BYTES_MAX)), decoded)
        self._known[root] = entries
        return entries, decoded, lists

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
