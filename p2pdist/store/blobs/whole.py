"""The SHA-256 of a blob, taken while its pieces come.

The sum follows the prefix of pieces that are held without a gap, as the page cache still has them,
so that next to nothing is left to be read when the last piece comes. A piece that turns out to be
wrong after it was summed takes the sum back to the last state that was kept before it: SNAPSHOTS
states are kept over the whole blob.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable

from p2pdist.model.pieces import PieceLayout, PieceSet

SNAPSHOTS = 16
"""States of the sum that are kept, at even distances: a piece that is lost costs at most about this
part of the blob to be read again."""

BUFFER_BYTES = 256 << 10
"""What is read at once, into memory that is used again: new memory would cost more than reading."""


class WholeDigest:
    """The running sum of one blob. `guard` guards the set of held pieces: who changes that set
    holds it, and calls `lost` before a piece is taken out."""

    __slots__ = ("_guard", "_have", "_kept", "_layout", "_lost_from", "_next", "_state", "busy")

    def __init__(self, layout: PieceLayout, have: PieceSet, guard: threading.Condition) -> None:
        self._layout, self._have, self._guard = layout, have, guard
        self.busy = threading.Lock()
        """Held by the one thread that sums; comes before the guard."""
        self._next = 0
        """The piece that is summed next, or is being summed."""
        self._state = hashlib.sha256()
        """Of all pieces before `_next`; the thread that sums alone uses it."""
        self._kept = [(0, self._state.copy())]
        """Earlier states, each with its next piece."""
        self._lost_from: int | None = None
        """The first piece that was lost since the state was last right; guarded."""

    def lost(self, piece: int) -> None:
        """Note that a piece is held no more. The caller holds the guard."""
        if piece <= self._next:
            self._lost_from = piece if self._lost_from is None else min(piece, self._lost_from)

    def follow(self, fileno: Callable[[], int], *, bytes_max: int | None = None) -> bool:
        """Sum the held pieces that follow, up to about `bytes_max` bytes; returns whether more
        follow. `fileno` gives the file, which stays open. Blocks; raises OSError."""
        buffer = memoryview(bytearray(min(BUFFER_BYTES, max(1, self._layout.size))))
        left = self._layout.size if bytes_max is None else bytes_max
        with self.busy:
            while self._due():
                if left <= 0:
                    return True
                piece = self._next
                left -= self._layout.length(piece)
                if not self._sum(fileno(), piece, buffer):
                    return False
        return False

    def hexdigest(self) -> str:
        """The sum of the whole; empty while pieces are missing, or have not been summed. The caller
        holds `busy` and the guard."""
        whole = self._next == self._layout.count and self._have.complete and self._lost_from is None
        return self._state.hexdigest() if whole else ""

    def _due(self) -> bool:
        """Go back to where the sum is right, and say whether the piece there is held."""
        with self._guard:
            if self._lost_from is not None:
                while self._kept[-1][0] > self._lost_from:
                    self._kept.pop()
                self._next, kept = self._kept[-1]
                self._state = kept.copy()
                self._lost_from = None
            return self._next < self._layout.count and self._next in self._have

    def _sum(self, file: int, piece: int, buffer: memoryview) -> bool:
        """Sum one piece; False when the file is shorter than it should be. Raises OSError."""
        start, end = self._layout.offset(piece), self._layout.offset(piece) + self._layout.length(piece)
        while start < end:
            count = os.preadv(file, [buffer[: end - start]], start)
            if not count:
                with self._guard:
                    self.lost(piece)
                return False
            self._state.update(buffer[:count])
            start += count
        with self._guard:
            self._next = piece + 1
            distance = max(1, self._layout.count // SNAPSHOTS)
            if self._next % distance == 0:  # `_due` drops it if the piece was lost meanwhile
                self._kept.append((self._next, self._state.copy()))
        return True
