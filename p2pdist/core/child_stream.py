"""What a child is sent of one stripe: the pieces that verified here, in that order, cut into
blocks."""

from __future__ import annotations

from dataclasses import dataclass

from p2pdist.core.bucket import Bucket
from p2pdist.core.turn_order import Claim
from p2pdist.model.pieces import PieceLayout, PieceSet


@dataclass(slots=True, eq=False)
class Feed:
    """Verified pieces of one blob, per stripe in the order in which they verified."""

    layout: PieceLayout
    block_size: int
    order: list[list[int]]
    known: PieceSet
    streams: list[list[ChildStream]]
    limit: Bucket | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class ChildStream(Claim):
    """`cursor`: how many of the verified pieces it has passed; `behind`: of how many it was short
    when it was short of fewest."""

    feed: Feed
    stripe: int
    skip: PieceSet
    left: int
    cursor: int = 0
    behind: int
    length: int = 0
    ended: bool = False

    def advance(self) -> bool:
        """Whether a block is ready: cuts one from the piece under way, or from the next verified
        one that the child lacks."""
        feed = self.feed
        if self.piece < 0:
            order = feed.order[self.stripe]
            while self.cursor < len(order):
                piece = order[self.cursor]
                self.cursor += 1
                if piece not in self.skip:
                    self.piece, self.offset, self.length = piece, 0, feed.layout.length(piece)
                    break
            self.behind = min(self.behind, len(order) - self.cursor)
            if self.piece < 0:
                return False
        self.block = min(feed.block_size, self.length - self.offset)
        return True

    def take_off(self) -> None:
        """The block has been sent."""
        self.offset += self.block
        self.block = 0
        if self.offset >= self.length:
            self.piece = -1
            self.left -= 1
