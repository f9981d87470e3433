"""How far the reader of a stripe may be ahead of its children, where pieces are vouched for.

Theory. A reader of central storage waits when it is more than a few pieces ahead of its children:
it would fill its downlink for nothing. But a piece that is not listed yet cannot be taken by any
child, and the tracker lists pieces in batches, seldom in a large fleet. A reader that waited for
its children would read nothing from one batch to the next, and the children would have nothing to
take once they had what the batch listed. So the reader is ahead by as many pieces as the last
batches listed, twice: one batch for the children to take, and one to be listed next. The batches
grow with the pause between them, and the lead grows with the batches.
"""

from __future__ import annotations

LEAD_MIN = 4
LEAD_SHARE = 16
"""Before anything is listed a reader may be ahead by this part of its stripe."""

SHRINK = 0.5
"""After a smaller batch, the lead is at least this part of what it was."""


class ReadAhead:
    """The lead that the reader of one stripe may have. `total` is the number of its pieces."""

    __slots__ = ("_batch", "_unlisted", "_usual")

    def __init__(self, total: int) -> None:
        self._usual = max(LEAD_MIN, total // LEAD_SHARE)
        self._batch = 0.0
        self._unlisted: set[int] = set()

    def read(self, piece: int) -> None:
        """A piece was read and vouched for."""
        self._unlisted.add(piece)

    def listed(self, pieces: tuple[int, ...]) -> None:
        """The tracker has listed these pieces, of any stripe."""
        before = len(self._unlisted)
        self._unlisted.difference_update(pieces)
        if listed := before - len(self._unlisted):
            self._batch = max(float(listed), SHRINK * self._batch)

    @property
    def lead_max(self) -> int:
        """By how many pieces the reader may be ahead of its children."""
        return max(self._usual, LEAD_MIN + int(2 * self._batch))
