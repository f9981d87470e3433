"""A selection of pieces (p2pdist/model/selection.py) seen as the pack that it was taken from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound
from p2pdist.model.selection import Selection
from p2pdist.store.blob import Blob


@dataclass(frozen=True, slots=True)
class SelectedPack:
    """`blob` holds the selection, in whole or in part."""

    selection: Selection
    blob: Blob

    @property
    def digest(self) -> Digest:
        """Of the pack."""
        return self.selection.blob.digest

    @property
    def size(self) -> int:
        """Of the pack."""
        return self.selection.blob.size

    @contextmanager
    def held(self) -> Iterator[SelectedPack]:
        """Hold the selection within a `with` block."""
        with self.blob.held():
            yield self

    def holds(self, start: int, length: int) -> bool:
        """Whether bytes of the pack are here."""
        try:
            at = self.selection.position(start, length)
        except NotFound:
            return False
        return self.blob.holds(at, length)

    def read_range(self, start: int, length: int) -> bytes:
        """Bytes of the pack; see Blob.read_range."""
        return self.blob.read_range(self.selection.position(start, length), length)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Bytes of the pack; see Blob.read_into."""
        self.blob.read_into(self.selection.position(start, len(buffer)), buffer)
