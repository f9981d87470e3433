"""The vouched piece list of a partial blob (model/vouched.py), as the threads that store its pieces
and the event loop that hears of the list share it.

A piece that comes before its hash is listed keeps the thread that received it waiting, and with it
the socket: its sender notices that as back pressure. A piece that does not match waits a moment as
well, since the list may be about to change: the sender may know of a new round already. Only a
piece whose hash has never changed, and that does not match after that, is wrong bytes.

The list may change hashes of pieces that are held. Such pieces are lost: they are taken out of
`have` at once, in memory, by `put` on the event loop; `unmark` brings the bitmap in line, in a
thread.

Invariants: what is held is listed, with the hash that its bytes have; while bytes are written for a
piece its hash cannot come to differ unnoticed (`admit`, `keep`); once the SHA-256 of the whole has
matched (`proven`), nothing changes the list any more.

Lock order: BlobFiles.disk before the lock here. Under the lock here nothing waits for the disk, so
the event loop may call everything but `match`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

from blake3 import blake3

from p2pdist.model.errors import Conflict, Unavailable, UsageError
from p2pdist.model.pieces import HASH_SIZE, PieceLayout, PieceList, PieceSet
from p2pdist.model.vouched import VouchedList
from p2pdist.store.blobs.hashes import StoredHash
from p2pdist.store.blobs.whole import WholeDigest

HASH_WAIT_S = 60.0
"""How long a received piece waits for its hash to be listed."""

MISMATCH_WAIT_S = 2.5
"""How long a piece that does not match waits for the list to change: a tracker of many hosts sends
the list on every two seconds."""

FORMER_MAX = 16
"""Hashes that are remembered of one piece: rounds are few."""


class Unlisted(Unavailable):
    """A piece could not be stored because its hash is not listed, or was another one a moment ago:
    that is not its sender's fault."""


@dataclass(slots=True, eq=False)
class HashWait:
    """What a receiver of pieces waits for. Its thread writes `piece`, any thread `cancelled`."""

    piece: int | None = None
    """The piece that waits for its hash now."""
    cancelled: bool = False
    """Set by `VouchedPieces.cancel`: the receiver is to wait no longer."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A part of a list: `hashes` has HASH_SIZE bytes for each of `pieces`."""

    round: int
    pieces: tuple[int, ...]
    hashes: bytes


@dataclass(slots=True)
class _Former:
    """Hashes that pieces had before."""

    by_piece: dict[int, set[bytes]] = field(default_factory=dict)

    def note(self, piece: int, digest: bytes) -> None:
        hashes = self.by_piece.setdefault(piece, set())
        if len(hashes) < FORMER_MAX:
            hashes.add(digest)


class VouchedPieces:
    """Thread-safe. `have` are the pieces that are held, whose hashes `stored` has; only this class
    changes the set as long as the blob is vouched for."""

    def __init__(self, layout: PieceLayout, have: PieceSet, stored: Mapping[int, StoredHash]) -> None:
        self.layout = layout
        self.proven = False
        """Whether the SHA-256 of the whole has matched; written by `prove`."""
        self._have = have
        self._changed = threading.Condition()
        self._list = VouchedList(layout)
        self._own = PieceSet(layout.count)
        """The pieces that this host has read from upstream itself, as the list has them."""
        self._former = _Former()
        self._closed = False
        for piece, slot in stored.items():
            if piece in have:
                self._list.put(piece, slot.hash)
                if slot.own:
                    self._own.add(piece)
        self._list.begin(0)  # what was stored by an earlier process was said in no round that is known
        self.whole = WholeDigest(layout, have, self._changed)
        """The SHA-256 of what is held."""

    # -- the list

    @property
    def round(self) -> int:
        """The round that the list is of."""
        return self._list.round

    @property
    def complete(self) -> bool:
        """Whether the present round has stated the hash of every piece."""
        with self._changed:
            return self._list.complete

    @property
    def listed_count(self) -> int:
        """How many hashes the present round has stated."""
        return len(self._list.confirmed)

    def hash_of(self, piece: int) -> bytes | None:
        """The hash of a piece; None while it is not listed."""
        with self._changed:
            return self._list.hash_of(piece)

    def put(self, listing: Listing) -> list[int]:
        """Take in what the tracker says of the list: its word counts before what was listed. A
        listing of another round begins that round. Returns the pieces that are lost by it, for
        `unmark`. Raises UsageError for what no list can hold."""
        pieces, hashes = listing.pieces, listing.hashes
        if len(hashes) != len(pieces) * HASH_SIZE or any(not 0 <= piece < self.layout.count for piece in pieces):
            raise UsageError("a vouched list names pieces that do not exist, or does not have a hash for each")
        with self._changed:
            if self.proven:
                return []
            if listing.round != self._list.round:
                self._list.begin(listing.round)
            stated = (hashes[start : start + HASH_SIZE] for start in range(0, len(hashes), HASH_SIZE))
            lost = [piece for piece, digest in zip(pieces, stated, strict=True) if self._state(piece, digest)]
            self._changed.notify_all()
        return lost

    def put_missing(self, listing: Listing) -> bool:
        """Take in what another host says of the list: only of pieces for which the present round
        has stated nothing, and that are not held with another hash. Returns whether that was
        anything new. Raises what `put` raises."""
        size, pieces, hashes = HASH_SIZE, list[int](), list[bytes]()
        with self._changed:
            for number, piece in enumerate(listing.pieces):
                if 0 <= piece < self.layout.count and piece not in self._list.confirmed:
                    digest = listing.hashes[number * size : (number + 1) * size]
                    if self._list.hash_of(piece) in (None, digest):
                        pieces.append(piece)
                        hashes.append(digest)
            self.put(Listing(self._list.round, tuple(pieces), b"".join(hashes)))
        return bool(pieces)

    def begin(self, round_: int) -> None:
        """Begin another round, of which nothing is stated yet."""
        with self._changed:
            if not self.proven and round_ != self._list.round:
                self._list.begin(round_)

    def known(self, first: int, pieces_max: int, *, held: bool = False) -> Listing:
        """What is listed of the pieces from `first` on, up to `pieces_max` of them; with `held`
        only of pieces that are held."""
        with self._changed:
            those = self._have if held else self._list.listed
            pieces = tuple(islice((piece for piece in range(first, self.layout.count) if piece in those), pieces_max))
            return Listing(self._list.round, pieces, b"".join(self._list.hash_of(piece) or b"" for piece in pieces))

    def restate(self) -> Listing:
        """All that this host has read itself and still holds: it vouches for it in the present
        round, too."""
        with self._changed:
            pieces = tuple(self._own)
            hashes = [self._list.hash_of(piece) or b"" for piece in pieces]
            for piece, digest in zip(pieces, hashes, strict=True):
                self._list.put(piece, digest)
            return Listing(self._list.round, pieces, b"".join(hashes))

    def first_unlisted(self) -> int | None:
        """The first piece whose hash the present round has not stated; None when there is none."""
        with self._changed:
            confirmed = self._list.confirmed
            return None if confirmed.complete else next(iter(confirmed.missing()), None)

    def unread(self, stripe: int, stripes: int) -> list[int]:
        """The pieces of a stripe that a reader of upstream has to read: first those that are not
        held, then those that are, and for which no host vouches in the present round."""
        with self._changed:
            doubtful = [piece for piece in self._list.confirmed.missing(stripe, stripes) if piece in self._have]
            return [*self._have.missing(stripe, stripes), *doubtful]

    def is_unread(self, piece: int) -> bool:
        """Whether a reader of upstream has to read a piece."""
        with self._changed:
            return piece not in self._have or piece not in self._list.confirmed

    def _state(self, piece: int, digest: bytes) -> bool:
        """List a hash, whatever was listed before; returns whether a held piece is lost by that.
        The caller holds the lock."""
        before = self._list.hash_of(piece)
        changed = before is not None and before != digest
        if changed and before is not None:
            self._list.confirmed.discard(piece)
            self._own.discard(piece)
            self._former.note(piece, before)
        self._list.put(piece, digest)
        return changed and self._lose(piece)

    def _lose(self, piece: int) -> bool:
        if piece not in self._have:
            return False
        self.whole.lost(piece)
        self._have.discard(piece)
        return True

    # -- pieces

    def match(self, piece: int, data: bytes | bytearray | memoryview, wait: HashWait) -> bytes:
        """The hash of `data`, once the list has it for `piece`; b"" for wrong bytes. Raises
        Unlisted. Blocks until the hash is listed, or the wait is cancelled."""
        if len(data) != self.layout.length(piece):
            return b""
        digest = blake3(data).digest()
        with self._changed:
            try:
                return self._matched(piece, digest, wait)
            finally:
                wait.piece = None

    def _matched(self, piece: int, digest: bytes, wait: HashWait) -> bytes:
        began, differs_since = time.monotonic(), 0.0
        while piece not in self._have:
            if self._closed or wait.cancelled:
                raise Unlisted(f"piece {piece} is not waited for any more")
            listed, now = self._list.hash_of(piece), time.monotonic()
            if listed == digest:
                return digest
            wait.piece = piece
            if listed is None:
                left_s, differs_since = began + HASH_WAIT_S - now, 0.0
            else:
                differs_since = differs_since or now
                left_s = differs_since + MISMATCH_WAIT_S - now
            if left_s <= 0:
                if listed is not None and piece not in self._former.by_piece:
                    return b""
                raise Unlisted(f"the hash of piece {piece} is not listed, or was another one before")
            self._changed.wait(left_s)
        return digest

    def cancel(self, wait: HashWait) -> None:
        """Let a receiver wait no longer."""
        with self._changed:
            wait.cancelled = True
            self._changed.notify_all()

    def vouch(self, piece: int, data: bytes, *, prevail: bool = False) -> tuple[bytes, bool]:
        """Hash a piece that this host has read from upstream, and list it. Returns the hash, and
        whether the list has it now: what the present round has stated stays, unless `prevail`."""
        if len(data) != self.layout.length(piece):
            raise Conflict(f"piece {piece} has {len(data)} bytes instead of {self.layout.length(piece)}")
        digest = blake3(data).digest()
        with self._changed:
            listed = self._list.hash_of(piece)
            if listed != digest and (self.proven or (piece in self._list.confirmed and not prevail)):
                return digest, False
            self._state(piece, digest)
            self._own.add(piece)
            self._changed.notify_all()
        return digest, True

    def admit(self, piece: int, digest: bytes) -> StoredHash:
        """What is to be written beside a piece with this hash, before its bytes are. Raises
        Unlisted when the list has come to differ."""
        with self._changed:
            self._require(piece, digest)
            return StoredHash(digest, piece in self._own)

    def keep(self, piece: int, digest: bytes) -> None:
        """Note that the bytes of a piece are in place. Raises Unlisted when the list has come to
        differ meanwhile."""
        with self._changed:
            self._require(piece, digest)
            self._have.add(piece)
            self._changed.notify_all()

    def _require(self, piece: int, digest: bytes) -> None:
        if self._list.hash_of(piece) != digest:
            raise Unlisted(f"the hash of piece {piece} has changed")

    def drop(self, pieces: Collection[int]) -> list[int]:
        """Take pieces out of those that are held; returns those that were."""
        with self._changed:
            self.proven = False
            return [piece for piece in pieces if self._lose(piece)]

    def close(self) -> None:
        """Let all receivers wait no longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- the end

    def provisional(self) -> PieceList:
        """The list as it is: of what is held it has the hashes, of pieces that are not listed it
        has zeros, which nothing matches."""
        with self._changed:
            hashes = [self._list.hash_of(piece) or bytes(HASH_SIZE) for piece in range(self.layout.count)]
        return PieceList(self.layout, b"".join(hashes))

    def prove(self, hexdigest: str) -> bool:
        """Compare the SHA-256 of the whole, if all of it has been summed; from then on the list
        stays as it is."""
        with self.whole.busy, self._changed:
            self.proven = self.proven or self.whole.hexdigest() == hexdigest
            return self.proven
