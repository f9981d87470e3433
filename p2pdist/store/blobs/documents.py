"""Documents of a store: manifests, configs, piece lists, read and written whole.

The name is the SHA-256, which every reading checks. So nothing is synchronised: a document that a
lost machine tore is noticed and fetched again. Most have a few hundred bytes, and a package of
hundreds of layers has as many piece lists. Up to ROW_BYTES_MAX they are rows of the index, all that
arrive together in one transaction, since a file for each would cost several times as much. Larger
ones are files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from p2pdist.model.digest import Digest, digest_of, hex_of
from p2pdist.model.errors import TooLarge
from p2pdist.model.manifest import DOCUMENT_BYTES_MAX
from p2pdist.store.disk import UNREADABLE, failures
from p2pdist.store.index import Index
from p2pdist.store.layout import Paths

ROW_BYTES_MAX = 16 << 10

logger = logging.getLogger(__name__)


class Documents:
    """Thread-safe, but that the caller serialises put, remove and sweep."""

    def __init__(self, paths: Paths, index: Index) -> None:
        self._paths, self._index = paths, index
        self._rows = index.document_sizes()
        self._files = {Digest(f"sha256:{entry.name}"): entry.stat().st_size for entry in os.scandir(paths.documents)}
        self.bytes_total = sum(self._rows.values()) + sum(self._files.values())
        """What all documents take."""

    def put(self, documents: Sequence[bytes]) -> list[Digest]:
        """Store documents; raises TooLarge over DOCUMENT_BYTES_MAX, DiskFull."""
        for data in documents:
            if len(data) > DOCUMENT_BYTES_MAX:
                raise TooLarge(f"a small blob of {len(data)} bytes is over the limit of {DOCUMENT_BYTES_MAX}")
        digests = list(map(digest_of, documents))
        rows = {}
        for digest, data in zip(digests, documents, strict=True):
            if self.read(digest) is None:
                if len(data) <= ROW_BYTES_MAX:
                    rows[digest] = data
                else:
                    self._write(digest, data)
        if rows:
            self._index.put_documents(rows)
            for digest, data in rows.items():
                self._count(self._rows, digest, len(data))
        return digests

    def read(self, digest: Digest) -> bytes | None:
        """The bytes, or None when they are not here or damaged."""
        data = self._index.document(digest) if digest in self._rows else self._read(digest)
        return data if data is not None and digest_of(data) == digest else None

    def size(self, digest: Digest) -> int:
        """The bytes of a document; 0 when it is not here."""
        return self._rows.get(digest) or self._files.get(digest, 0)

    def files_new(self, documents: Sequence[bytes]) -> int:
        """How many files `put` would make of these."""
        return sum(len(data) > ROW_BYTES_MAX and digest_of(data) not in self for data in documents)

    def files_of(self, digests: set[Digest]) -> int:
        """How many of these documents are files."""
        return len(digests & self._files.keys())

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._rows or digest in self._files

    def remove(self, digest: Digest) -> None:
        """Remove a document, if it is here."""
        if digest in self._rows:
            self._index.remove_document(digest)
            self._count(self._rows, digest, None)
        if digest in self._files:
            path = self._paths.document(digest)
            with failures(path):
                path.unlink(missing_ok=True)
            self._count(self._files, digest, None)

    def sweep(self, named: set[Digest], *, idle_s: float) -> None:
        """Remove documents that are neither named nor younger than `idle_s` seconds, and files that
        are no documents."""
        oldest = time.time() - idle_s
        for digest in self._index.old_documents(oldest):
            if digest not in named:
                self.remove(digest)
        for digest in [stored for stored in self._files if stored not in named]:
            path = self._paths.documents / hex_of(digest)  # which may be any name
            with failures(path):
                if path.stat().st_mtime < oldest:
                    path.unlink()
                    self._count(self._files, digest, None)

    def _write(self, digest: Digest, data: bytes) -> None:
        path = self._paths.document(digest)
        temporary = os.fspath(self._paths.temporary / secrets.token_hex(8))
        with failures(path, needed=len(data)):
            try:
                with open(temporary, "xb", opener=_read_only) as file:
                    file.write(data)
                os.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise
        self._count(self._files, digest, len(data))

    def _read(self, digest: Digest) -> bytes | None:
        path: Path = self._paths.document(digest)
        with failures(path):
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                size = os.fstat(file).st_size
                return os.read(file, size) if size <= DOCUMENT_BYTES_MAX else None
            except OSError as error:
                if error.errno not in UNREADABLE:
                    raise
                logger.warning("%s cannot be read: %s", path, error)
                return None
            finally:
                os.close(file)

    def _count(self, sizes: dict[Digest, int], digest: Digest, size: int | None) -> None:
        """Note that a document takes so many bytes, or is gone."""
        self.bytes_total -= sizes.pop(digest, 0)
        if size is not None:
            sizes[digest] = size
            self.bytes_total += size


def _read_only(path: str, flags: int) -> int:
    """Open a new file that can be written to through this descriptor alone."""
    return os.open(path, flags | os.O_CLOEXEC, 0o444)
