"""What tags and digests of images were found to name. Their manifests are documents of the store.

A digest is recorded for each name under which a registry served it: it says nothing of a name by
itself.
"""

from __future__ import annotations

import threading
import time

from p2pdist.model.digest import Digest, parse_digest
from p2pdist.store.index import ImageRecord, Index

RECORDS_MAX = 10_000
"""Of which those that were made or confirmed last are kept."""


class ImageRecords:
    """Records of images. Thread-safe; methods raise what those of Index raise."""

    def __init__(self, index: Index, lock: threading.RLock) -> None:
        self._index, self._lock = index, lock
        self._records = {(record.name, record.target): record for record in index.images()}
        """The oldest first."""

    def record(self, name: str, targets: tuple[str, ...], digest: Digest, media_type: str) -> None:
        """Note that these tags and digests of an image name this manifest or index."""
        now = time.time()
        records = [ImageRecord(name, target, parse_digest(digest), media_type, now) for target in targets]
        with self._lock:
            self._index.record_images(records)
            for record in records:
                self._records.pop((name, record.target), None)
                self._records[name, record.target] = record
            gone = list(self._records)[: max(0, len(self._records) - RECORDS_MAX)]
            if gone:
                self._index.forget_images(gone)
                for key in gone:
                    del self._records[key]

    def get(self, name: str, target: str) -> ImageRecord | None:
        """What a tag or digest of an image named last."""
        return self._records.get((name, target))

    def of(self, name: str) -> list[ImageRecord]:
        """All records of one image, of which some may name the same document."""
        with self._lock:
            return [record for record in self._records.values() if record.name == name]

    def list(self) -> list[ImageRecord]:
        """All records, the oldest first."""
        with self._lock:
            return [*self._records.values()]

    def digests(self) -> set[Digest]:
        """The documents that records name."""
        with self._lock:
            return {record.digest for record in self._records.values()}
