"""Pins and records of packages and images: what names blobs and documents for longer than a pull.

All are read from the index once and kept in memory. A method that changes them writes the index
first. `lock` is the store's: eviction looks at pins under it. A thread that makes room may hold it
as long as a disk hangs, so what the event loop asks takes no lock: `owners`, `by_owner`, and the
packages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from p2pdist.model.digest import Digest, parse_digest
from p2pdist.store.index import ImageRecord, Index, PackageRecord, TagRecord


class Pins:
    """Which blobs stay, present or to come, and for which owners. Thread-safe; methods raise
    P2PDistError when the disk fails and UsageError for what is no digest."""

    def __init__(self, index: Index, lock: threading.RLock) -> None:
        self._index, self._lock = index, lock
        self._owners: dict[Digest, set[str]] = {}
        for digest, owner in index.pins():
            self._owners.setdefault(digest, set()).add(owner)

    def pin(self, digest: Digest, owner: str) -> None:
        """Keep a blob from eviction and removal until `owner` unpins."""
        with self._lock:
            self._index.pin(parse_digest(digest), owner)
            self._owners.setdefault(digest, set()).add(owner)

    def unpin(self, owner: str) -> None:
        """Take away all pins of `owner`."""
        with self._lock:
            self._index.reserve.use()
            self._index.unpin(owner)
            for digest, owners in list(self._owners.items()):
                owners.discard(owner)
                if not owners:
                    del self._owners[digest]

    def unpin_blob(self, digest: Digest, owner: str) -> None:
        """Take away the pin of a blob by `owner`, if there is one."""
        with self._lock:
            self._index.reserve.use()
            self._index.unpin(owner, parse_digest(digest))
            owners = self._owners.get(digest, set())
            owners.discard(owner)
            if not owners:
                self._owners.pop(digest, None)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._owners

    def owners(self, digest: Digest) -> set[str]:
        """The owners of the pins of a blob."""
        return set(self._owners.get(parse_digest(digest), ()))

    def digests(self) -> set[Digest]:
        """All blobs that are pinned."""
        return set(self._owners)

    def by_owner(self) -> dict[str, set[Digest]]:
        """All pins, by owner."""
        pins: dict[str, set[Digest]] = {}
        for digest in list(self._owners):
            for owner in self.owners(digest):
                pins.setdefault(owner, set()).add(digest)
        return pins


class PackageRecords:
    """Packages that were used here. Thread-safe; methods raise what those of Pins raise."""

    def __init__(self, index: Index, lock: threading.RLock) -> None:
        self._index, self._lock = index, lock
        self._records = {record.reference: record for record in index.packages()}

    def record(self, reference: str, manifest_digest: Digest) -> None:
        """Note that a package is, or was, used here now."""
        record = PackageRecord(reference, parse_digest(manifest_digest), time.time())
        with self._lock:
            self._index.record_package(record)
            self._records[reference] = record

    def get(self, reference: str) -> PackageRecord | None:
        """A package that was used here. Its blobs may have been evicted since."""
        return self._records.get(reference)

    def list(self) -> list[PackageRecord]:
        """All records, by reference."""
        return sorted(self._records.values(), key=lambda record: record.reference)

    def forget(self, reference: str) -> None:
        """Drop the record of a package, if there is one."""
        with self._lock:
            self._index.forget_package(reference)
            self._records.pop(reference, None)


TAGS_MAX = 1000
"""Tags of which it is known what they name; those that were confirmed last are kept."""

TAG_WRITTEN_S = 60.0
"""How often it is written at most that a tag still names the same: many starts of one package cost
no more than one."""


class TagRecords:
    """What trackers and the origin last said that tags name. Their documents stay in the store.
    Thread-safe; methods raise what those of Pins raise."""

    def __init__(self, index: Index, lock: threading.RLock) -> None:
        self._index, self._lock = index, lock
        self._records = {record.reference: record for record in index.tags()}
        """As written; the one that was confirmed first comes first."""

    def due(self, reference: str, digest: Digest) -> bool:
        """Whether it is to be recorded that a tag names this manifest now."""
        record = self._records.get(reference)
        return record is None or record.digest != digest or not 0 <= time.time() - record.told < TAG_WRITTEN_S

    def record(self, reference: str, digest: Digest) -> None:
        """Note that a tracker or the origin says now that a tag names this manifest."""
        record = TagRecord(reference, parse_digest(digest), time.time())
        with self._lock:
            self._index.record_tag(record)
            self._records.pop(reference, None)
            self._records[reference] = record
            if gone := list(self._records)[: max(0, len(self._records) - TAGS_MAX)]:
                self._forget(gone)

    def get(self, reference: str) -> TagRecord | None:
        """What a tag was last said to name."""
        return self._records.get(reference)

    def list(self) -> list[TagRecord]:
        """All records, the oldest first."""
        with self._lock:
            return [*self._records.values()]

    def forget(self, reference: str) -> None:
        """Drop what a tag named, if anything: there is no such tag any more, or not for this
        host."""
        with self._lock:
            if reference in self._records:
                self._forget([reference])

    def _forget(self, references: Sequence[str]) -> None:
        self._index.forget_tags(references)
        for reference in references:
            del self._records[reference]


IMAGE_RECORDS_MAX = 10_000
"""Records of images, of which those that were made or confirmed last are kept."""


class ImageRecords:
    """What tags and digests of images were found to name; their manifests are documents of the
    store. A digest is recorded for each name under which a registry served it, since it says
    nothing of a name by itself. Thread-safe; methods raise what those of Pins raise."""

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
            gone = list(self._records)[: max(0, len(self._records) - IMAGE_RECORDS_MAX)]
            if gone:
                self._index.forget_images(gone)
                for key in gone:
                    del self._records[key]

    def forget(self, name: str, targets: Sequence[str]) -> None:
        """Drop what these tags and digests of an image named, if anything."""
        keys = [(name, target) for target in targets if (name, target) in self._records]
        with self._lock:
            self._index.forget_images(keys)
            for key in keys:
                self._records.pop(key, None)

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
