"""Selections: some pieces of a blob, moved and kept as a blob of their own.

A host that misses a few chunks of a large pack selects the pieces that hold them. Hosts that miss
the same chunks select the same pieces, so these form a swarm like any other blob: the selection has
a name, a piece list and a layout that follow from the blob's own and from which pieces they are.
Only reading the origin differs, since the origin has the blob.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from blake3 import blake3

from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound
from p2pdist.model.manifest import PIECES_DIGEST, PIECES_SIZE, Descriptor
from p2pdist.model.pieces import HASH_SIZE, PieceLayout, PieceList, PieceSet

_MAGIC = b"p2pdist-selection-1"


def pieces_covering(layout: PieceLayout, ranges: Iterable[tuple[int, int]]) -> PieceSet:
    """The pieces that hold any of the byte ranges, each a start and an end."""
    pieces = PieceSet(layout.count)
    for start, end in ranges:
        for piece in layout.covering(start, end):
            pieces.add(piece)
    return pieces


def selection_digest(blob: Digest, pieces: Digest, chosen: bytes) -> Digest:
    """The name of the selection of some pieces of a blob: `pieces` is the digest of its piece list,
    `chosen` the bitmap of the pieces."""
    named = b"\0".join((_MAGIC, blob.encode(), pieces.encode(), chosen))
    return Digest(f"sha256:{blake3(named).hexdigest()}")


@dataclass(frozen=True)
class Selection:
    """`chosen` pieces, at least one and in ascending order, of the blob that `blob` describes and
    `whole` is the piece list of."""

    blob: Descriptor
    whole: PieceList
    chosen: tuple[int, ...]

    @classmethod
    def of(cls, blob: Descriptor, whole: PieceList, chosen: PieceSet) -> Selection:
        return cls(blob, whole, tuple(chosen))

    @cached_property
    def pieces(self) -> PieceList:
        """The piece list of the selection."""
        layout = self.whole.layout
        size = sum(layout.length(piece) for piece in self.chosen)
        hashes = self.whole.hashes
        parts = (hashes[piece * HASH_SIZE : (piece + 1) * HASH_SIZE] for piece in self.chosen)
        return PieceList(PieceLayout(size, layout.piece_size), b"".join(parts))

    @cached_property
    def descriptor(self) -> Descriptor:
        """Describes the selection as a blob. Its name is the BLAKE3 of what was selected from what:
        no blob can be made whose SHA-256 that is, so none is taken for the selection."""
        bitmap = PieceSet(self.whole.layout.count)
        for piece in self.chosen:
            bitmap.add(piece)
        digest = selection_digest(self.blob.digest, self.whole.digest, bitmap.to_bytes())
        annotations = {PIECES_DIGEST: self.pieces.digest, PIECES_SIZE: str(self.whole.layout.piece_size)}
        return Descriptor(self.blob.media_type, digest, self.pieces.layout.size, annotations)

    @property
    def digest(self) -> Digest:
        return self.descriptor.digest

    def spans(self, start: int, length: int) -> list[tuple[int, int]]:
        """Where in the blob `length` bytes of the selection from `start` are: offsets and lengths,
        in order."""
        size = self.whole.layout.piece_size
        found: list[tuple[int, int]] = []
        while length > 0:
            within = start % size
            offset = self.chosen[start // size] * size + within
            count = min(length, size - within)
            if found and sum(found[-1]) == offset:
                found[-1] = (found[-1][0], found[-1][1] + count)
            else:
                found.append((offset, count))
            start, length = start + count, length - count
        return found

    def position(self, offset: int, length: int) -> int:
        """Where in the selection `length` bytes of the blob from `offset` begin; they are together
        there, if they are there at all. Raises NotFound."""
        size = self.whole.layout.piece_size
        first, last = offset // size, (offset + max(length, 1) - 1) // size
        at = bisect_right(self.chosen, first) - 1
        if at < 0 or self.chosen[at : at + last - first + 1] != tuple(range(first, last + 1)):
            raise NotFound(f"bytes {offset} to {offset + length} of {self.blob.digest} were not selected")
        return at * size + offset - first * size
