"""Room in a store: what its bytes are, and making more of it within the capacity and on the disk.

What nothing names goes first. After that somebody else decides what to evict (core/eviction); here
it is carried out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from p2pdist.model.candidate import Candidate, Chooser, Share
from p2pdist.model.digest import Digest
from p2pdist.model.errors import DiskFull
from p2pdist.store.disk import failures, sync_filesystem, usable_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a store. Partial blobs count as reserved, in full, and so do objects that a pull is
    about to make; `capacity` None means: as much as the disk has."""

    bytes_complete: int
    bytes_partial: int
    bytes_small: int
    capacity: int | None
    disk_free: int
    bytes_objects: int = 0
    bytes_expected: int = 0
    bytes_images: int = 0
    bytes_variants: int = 0

    @property
    def bytes_total(self) -> int:
        blobs = self.bytes_complete + self.bytes_partial + self.bytes_small
        return blobs + self.bytes_objects + self.bytes_expected + self.bytes_images + self.bytes_variants


class Stock(Protocol):
    """What is in a store, as far as room is concerned."""

    def usage(self) -> Usage: ...

    def bytes_ahead(self) -> int:
        """Bytes counted that are yet to be taken from the disk."""

    def candidates(self) -> tuple[Sequence[Candidate], Sequence[Share]]: ...

    def evict(self, digest: Digest) -> bool:
        """Remove what was chosen; False when it has been taken into use since."""

    def collect(self) -> int:
        """Remove what nothing names; returns bytes."""


class Room:
    """The room of one store; the caller holds the store's lock."""

    def __init__(self, root: Path, capacity: int | None, choose: Chooser | None, stock: Stock) -> None:
        self._root, self._capacity, self._choose, self._stock = root, capacity, choose, stock

    def make(self, needed: int) -> list[Digest]:
        """Evict what must go for `needed` more bytes to fit; returns what went. Raises DiskFull
        when that is impossible, and then evicts nothing."""
        evicted: list[Digest] = []
        collected = False
        while (short := needed - self._free()) > 0:
            if not collected:
                collected = True
                if self._stock.collect():
                    continue
            if evicted:
                # Some filesystems give space back late: look again before more has to go.
                with failures(self._root):
                    sync_filesystem(self._root)
                if (short := needed - self._free()) <= 0:
                    break
            candidates, shares = self._stock.candidates()
            chosen = self._choose(candidates, short, shares) if self._choose is not None else None
            went = [digest for digest in chosen or [] if self._stock.evict(digest)]
            for digest in went:
                log.info("%s evicted to make room", digest)
            if not went:
                could = self._evictable(candidates, shares) if self._choose is not None else 0
                raise DiskFull(str(self._root), needed=needed, free=max(0, needed - short) + could)
            evicted += went
        return evicted

    @staticmethod
    def _evictable(candidates: Sequence[Candidate], shares: Sequence[Share]) -> int:
        going = [item for item in candidates if not item.pinned and not item.in_use]
        names = {item.digest for item in going}
        sizes = [item.size for item in going if item.needed_by <= names]
        return sum(sizes) + sum(share.size for share in shares if share.owners <= names)

    def _free(self) -> int:
        """Bytes that still fit; negative when over capacity."""
        with failures(self._root):
            room = usable_bytes(self._root) - self._stock.bytes_ahead()
        return room if self._capacity is None else min(room, self._capacity - self._stock.usage().bytes_total)
