"""Vouched piece lists: of a blob of which the SHA-256 is known and no piece list was made.

The hosts that read it first hash what they read and state the hashes: they **vouch** for these
pieces. The tracker puts the list together and sends it to all hosts of the swarm; a piece whose
hash is in it is **listed**. A host stores a piece when it matches the list, and takes the blob for
complete only when the SHA-256 of the whole matches its digest.

If it does not, a voucher lied, or upstream changed. The tracker then begins another **round**: one
host, the arbiter, reads all pieces again and vouches for the whole list. So either that list is
right, or the host that lies is known. Round 0 is the first, by as many vouchers as read.

A round **confirms** what it states. What was listed before stays so until the round states it
otherwise: most of it is right, and pieces go on meanwhile. So bytes that differ from a hash which
is listed and not confirmed say nothing yet of the host that sent them, and bytes that match a hash
which the round has replaced were right when they were sent.
"""

from __future__ import annotations

from typing import Literal

from p2pdist.model.errors import Conflict
from p2pdist.model.pieces import HASH_SIZE, PIECE_SIZE_MAX, PIECE_SIZE_MIN, PieceLayout, PieceList, PieceSet

PIECES_WANTED_MAX = 2048

Verdict = Literal["good", "unlisted", "stale", "wrong"]
"""What a list says of the hash of bytes that came for a piece: it is the listed one; nothing yet,
wait for the list; it was the listed one before, and the sender has not heard; it is wrong."""


def vouched_layout(size: int) -> PieceLayout:
    """How every host cuts a blob of `size` bytes that nobody has cut before: no document says it,
    so it follows from the size.

    The pieces are fewer and larger than those of prepared content: each is a request of its own to
    the registry, and registries may do much for a request (docker-registry reads 4 MiB for any
    range, which takes it 8 ms of a processor).
    """
    piece = PIECE_SIZE_MIN
    while piece < PIECE_SIZE_MAX and size > piece * PIECES_WANTED_MAX:
        piece *= 2
    return PieceLayout(size, piece)


class VouchedList:
    """The list of one blob as far as it is known. Not thread-safe."""

    __slots__ = ("_former", "_hashes", "confirmed", "layout", "listed", "round")

    def __init__(self, layout: PieceLayout) -> None:
        self.layout = layout
        self.round = 0
        """Of which the list is."""
        self.listed = PieceSet(layout.count)
        """The pieces whose hash is known, from this round or an earlier one."""
        self.confirmed = PieceSet(layout.count)
        """The pieces whose hash this round has stated."""
        self._hashes = bytearray(layout.count * HASH_SIZE)
        self._former: dict[int, tuple[bytes, ...]] = {}
        """By piece the hashes that were listed before the present one."""

    @classmethod
    def of(cls, pieces: PieceList) -> VouchedList:
        """The list that a whole piece list gives, all of it confirmed."""
        vouched = cls(pieces.layout)
        vouched.listed = PieceSet.full(pieces.layout.count)
        vouched.confirmed = PieceSet.full(pieces.layout.count)
        vouched._hashes[:] = pieces.hashes
        return vouched

    @property
    def complete(self) -> bool:
        """Whether this round has stated the hash of every piece."""
        return self.confirmed.complete

    def hash_of(self, piece: int) -> bytes | None:
        """The hash of a piece; None while it is not listed."""
        start = piece * HASH_SIZE
        return bytes(self._hashes[start : start + HASH_SIZE]) if piece in self.listed else None

    def verdict(self, piece: int, found: bytes) -> Verdict:
        """What is to be thought of bytes with this hash that came for a piece."""
        known = self.hash_of(piece)
        if known == found:
            return "good"
        if piece not in self.confirmed:
            return "unlisted"
        return "stale" if found in self._former.get(piece, ()) else "wrong"

    def begin(self, round_: int) -> None:
        """Another round begins, or the rounds of another tracker: what is listed stays so, and
        nothing is confirmed."""
        self.round = round_
        self.confirmed = PieceSet(self.layout.count)

    def put(self, piece: int, stated: bytes) -> bool:
        """List the hash of a piece in this round; returns whether that piece was listed with
        another hash before. Raises Conflict when this round has stated another one already."""
        known = self.hash_of(piece)
        if piece in self.confirmed and known != stated:
            raise Conflict(f"two hashes were stated for piece {piece}")
        self.confirmed.add(piece)
        return self._set(piece, known, stated)

    def suggest(self, piece: int, stated: bytes) -> bool:
        """List a hash that this round has not stated (this host has read the piece itself, or a
        peer knows it) unless the piece is listed; returns whether the piece is listed with it
        now."""
        known = self.hash_of(piece)
        if known is None:
            self._set(piece, None, stated)
        return known is None or known == stated

    def _set(self, piece: int, known: bytes | None, stated: bytes) -> bool:
        if known == stated:
            return False
        if known is not None:
            self._former[piece] = (*self._former.get(piece, ()), known)
        self._hashes[piece * HASH_SIZE : (piece + 1) * HASH_SIZE] = stated
        return not self.listed.add(piece)

    def piece_list(self) -> PieceList:
        """The whole list. Raises Conflict while pieces are not listed."""
        if not self.listed.complete:
            raise Conflict(f"{self.layout.count - len(self.listed)} pieces are not listed yet")
        return PieceList(self.layout, bytes(self._hashes))
