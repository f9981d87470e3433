"""What was decrypted here: blobs and documents of sealed packages
(p2pdist/model/sealed_package.py), and the manifests by which this host keeps these packages.

All is read from the index once and kept in memory. A method that changes it writes the index first.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt
from p2pdist.model.manifest import TREE_TYPE, Descriptor, Manifest, decode_manifest
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.blobs.documents import Documents
from p2pdist.store.index import (
    Index,
    add_opened,
    add_opened_name,
    opened_names,
    opened_rows,
    remove_opened,
    remove_opened_names,
)

logger = logging.getLogger(__name__)


class OpenedRecords:
    """The blobs and documents that were decrypted here, each with its encrypted blob, and the
    manifests by which this host keeps sealed packages. Other hosts do not get these: they get what
    is encrypted. Thread-safe; methods raise what those of Pins raise."""

    def __init__(self, index: Index, lock: threading.RLock, blobs: Mapping[Digest, Blob], documents: Documents) -> None:
        """`blobs` are the store's own. Records of what is no longer in the store are dropped."""
        self._index, self._lock, self._blobs, self._documents = index, lock, blobs, documents
        self._encrypted: dict[Digest, Digest] = {}
        """The encrypted blob of each blob and document that was decrypted."""
        self._manifests: dict[Digest, Digest] = {}
        """The opened manifest of each sealed package, by the digest of its own."""
        self._decoded: dict[Digest, Manifest] = {}
        """Opened manifests, as they were read."""
        self._unreadable: set[Digest] = set()
        """Opened manifests that are none."""
        self._names: defaultdict[Digest, set[str]] = defaultdict(set)
        """By which names of packages keys of each opened manifest were given to this host."""
        gone = []
        for digest, source, is_manifest in opened_rows(index):
            kept = source if is_manifest else digest
            if kept not in blobs and kept not in documents:
                gone.append(digest)
            elif is_manifest:
                self._manifests[digest] = source
            else:
                self._encrypted[digest] = source
        if gone:
            remove_opened(index, gone)
        rows, kept_manifests = opened_names(index), set(self._manifests.values())
        for manifest, name in rows:
            if manifest in kept_manifests:
                self._names[manifest].add(name)
        if lost := {manifest for manifest, _ in rows} - kept_manifests:
            remove_opened_names(index, list(lost))

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._encrypted

    def record(self, encrypted: Mapping[Digest, Digest]) -> None:
        """Note, before any of it is written, what is decrypted from which encrypted blob."""
        with self._lock:
            new = {digest: source for digest, source in encrypted.items() if self._encrypted.get(digest) != source}
            if new:
                add_opened(self._index, [(digest, source, 0) for digest, source in new.items()])
                self._encrypted.update(new)

    def record_manifest(self, sealed: Digest, opened: Digest, name: str) -> None:
        """Note by which manifest, which is in the store, this host keeps a sealed package, and that
        its keys were given for the package `name`."""
        with self._lock:
            if name not in self._names[opened]:
                add_opened_name(self._index, opened, name)
                self._names[opened].add(name)
            if self._manifests.get(sealed) != opened:
                add_opened(self._index, [(sealed, opened, 1)])
                self._manifests[sealed] = opened

    def manifest(self, digest: Digest) -> Digest:
        """By which manifest this host keeps a package: that of a sealed one which was opened, else
        its own."""
        return self._manifests.get(digest, digest)

    def was_given(self, opened: Digest, name: str) -> bool:
        """Whether the keys of an opened manifest were given for the package `name`."""
        with self._lock:
            return name in self._names.get(opened, ())

    def manifests(self) -> set[Digest]:
        """The opened manifests."""
        with self._lock:
            return set(self._manifests.values())

    def forget(self, digest: Digest) -> None:
        """A blob that was to be opened was not begun."""
        with self._lock:
            if digest in self._encrypted:
                remove_opened(self._index, [digest])
                del self._encrypted[digest]

    def removed(self, digest: Digest) -> None:
        """A blob is gone, in the index as well."""
        self._encrypted.pop(digest, None)

    def encrypted(self) -> Mapping[Digest, Digest]:
        """The encrypted blob of each blob and document that was decrypted."""
        with self._lock:
            return dict(self._encrypted)

    def packages(self) -> dict[Digest, Manifest]:
        """The opened manifests whose documents are here, by digest, but for those that are none.
        Blocks."""
        manifests = self.manifests()
        for digest in manifests - self._decoded.keys() - self._unreadable:
            if (data := self._documents.read(digest)) is None:
                continue
            try:
                self._decoded[digest] = decode_manifest(data)
            except Corrupt as error:
                logger.warning("a package that was opened is left out: %s", error)
                self._unreadable.add(digest)
        return {digest: self._decoded[digest] for digest in manifests if digest in self._decoded}

    def redundant(self, whole: Callable[[Digest], bool]) -> set[Digest]:
        """Encrypted blobs that serve other hosts alone: what is in them is here. `whole`: whether a
        tree is. Blocks."""
        found = set()
        for digest, encrypted in self.encrypted().items():
            blob = self._blobs.get(digest)
            if blob is not None and blob.complete and not blob.gone:
                found.add(encrypted)
        for manifest in self.packages().values():
            if self.is_whole(manifest, whole):
                found.update(part.digest for part in manifest.encrypted)
        return found

    def is_whole(self, manifest: Manifest, whole: Callable[[Digest], bool]) -> bool:
        """Whether all layers of an opened package are here. `whole`: whether a tree is."""
        return all(self._is_here(layer, whole) for layer in manifest.layers)

    def _is_here(self, layer: Descriptor, whole: Callable[[Digest], bool]) -> bool:
        if layer.media_type == TREE_TYPE:
            return whole(layer.digest)
        blob = self._blobs.get(layer.digest)
        return blob is not None and blob.complete and not blob.gone
