"""Vouched piece lists: of a blob whose SHA-256 is known, and of which nobody has made a piece list.

The hosts that read it first hash what they read and state the hashes: they **vouch** for these
pieces. The tracker puts the list together and sends it to all hosts of the swarm; a piece whose
hash is in it is **listed**. A host stores a piece when it matches the list, and takes the blob for
complete only when the SHA-256 of the whole matches its digest.

If it does not, a voucher lied, or upstream changed. The tracker then begins another **round**: one
host, the arbiter, reads all pieces again and vouches for the whole list. So either that list is
right, or the host that lies is known. Round 0 is the first, by as many vouchers as read.
"""

from __future__ import annotations

from p2pdist.model.errors import Conflict
from p2pdist.model.pieces import HASH_SIZE, PieceLayout, PieceList, PieceSet


class VouchedList:
    """The list of one blob as far as it is known. Not thread-safe."""

    __slots__ = ("_hashes", "confirmed", "layout", "listed", "round")

    def __init__(self, layout: PieceLayout) -> None:
        self.layout = layout
        self.round = 0
        """Of which the list is."""
        self.listed = PieceSet(layout.count)
        """The pieces whose hash is known, from this round or an earlier one."""
        self.confirmed = PieceSet(layout.count)
        """The pieces whose hash this round has stated."""
        self._hashes = bytearray(layout.count * HASH_SIZE)

    @property
    def complete(self) -> bool:
        """Whether this round has stated the hash of every piece."""
        return self.confirmed.complete

    def hash_of(self, piece: int) -> bytes | None:
        """The hash of a piece; None while it is not listed."""
        start = piece * HASH_SIZE
        return bytes(self._hashes[start : start + HASH_SIZE]) if piece in self.listed else None

    def begin(self, round_: int) -> None:
        """Another round begins: what is listed stays so, and nothing is confirmed."""
        self.round = round_
        self.confirmed = PieceSet(self.layout.count)

    def put(self, piece: int, stated: bytes) -> bool:
        """List the hash of a piece in this round; returns whether that piece was listed with
        another hash before. Raises Conflict when this round has stated another one already."""
        start = piece * HASH_SIZE
        known = self.hash_of(piece)
        if piece in self.confirmed and known != stated:
            raise Conflict(f"two hashes were stated for piece {piece}")
        self.confirmed.add(piece)
        self._hashes[start : start + HASH_SIZE] = stated
        return not self.listed.add(piece) and known != stated

    def piece_list(self) -> PieceList:
        """The whole list. Raises Conflict while pieces are not listed."""
        if not self.listed.complete:
            raise Conflict(f"{self.layout.count - len(self.listed)} pieces are not listed yet")
        return PieceList(self.layout, bytes(self._hashes))
