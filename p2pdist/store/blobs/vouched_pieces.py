"""The vouched piece list of a partial blob (model/vouched_list.py), as the threads that store its
pieces and the event loop that hears of the list share it.

A piece that comes before its hash is listed keeps the thread that received it waiting, and with it
the socket: its sender notices that as back pressure. A piece that does not match what the round
has stated waits a moment as well, since the list may be about to change: the sender may know of
another round already.

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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from blake3 import blake3

from p2pdist.model.errors import Conflict, Unavailable, UsageError
from p2pdist.model.pieces import HASH_SIZE, PieceLayout, PieceList, PieceSet
from p2pdist.model.vouched_list import VouchedList
from p2pdist.store.blobs.hashes import StoredHash
from p2pdist.store.blobs.whole import WholeDigest

HASH_WAIT_S = 60.0
"""How long a received piece waits for its hash to be listed."""

MISMATCH_WAIT_S = 2.5
"""How long a piece that does not match waits for the list to change: a tracker of many hosts sends
the list on every two seconds."""


class Unlisted(Unavailable):
    """A piece could not be stored because its hash is not listed, or is another one since a moment
    ago: that is not its sender's fault."""


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


class ListView:
    """What may be asked of a list. Thread-safe; `guard` guards the other three: the list, the
    pieces that are held, and the pieces that this host has read from upstream itself."""

    def __init__(self, guard: threading.Condition, vouched: VouchedList, have: PieceSet, own: PieceSet) -> None:
        self._changed, self._list, self._have, self._own = guard, vouched, have, own

    def known(self, first: int, pieces_max: int) -> Listing:
        """What is listed of the pieces from `first` on, up to `pieces_max` of them."""
        with self._changed:
            listed = (piece for piece in range(first, self._list.layout.count) if piece in self._list.listed)
            return self._listing(islice(listed, pieces_max))

    def read_here(self) -> Listing:
        """What this host has read from upstream itself."""
        with self._changed:
            return self._listing(self._own)

    def from_others(self) -> Listing:
        """What is listed and was read by other hosts."""
        with self._changed:
            return self._listing(piece for piece in self._list.listed if piece not in self._own)

    def _listing(self, pieces: Iterable[int]) -> Listing:
        chosen = tuple(pieces)
        return Listing(self._list.round, chosen, b"".join(self._list.hash_of(piece) or b"" for piece in chosen))

    def first_unlisted(self) -> int | None:
        """The first piece whose hash is not listed; None when there is none."""
        with self._changed:
            return None if self._list.listed.complete else self._list.listed.missing()[0]

    def unread(self, stripe: int, stripes: int, *, doubtful: bool) -> list[int]:
        """The pieces of a stripe that a reader of upstream has to read: those that are not held,
        and after them, with `doubtful`, those that are held and for which no host vouches in the
        present round, nor does this one."""
        with self._changed:
            held = self._list.confirmed.missing(stripe, stripes) if doubtful else []
            return [
                *self._have.missing(stripe, stripes),
                *(piece for piece in held if piece in self._have and piece not in self._own),
            ]

    def is_unread(self, piece: int) -> bool:
        """Whether a reader of upstream still has to read a piece that `unread` named."""
        with self._changed:
            return piece not in self._have or not (piece in self._list.confirmed or piece in self._own)


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
        self._closed = False
        for piece, slot in stored.items():
            if piece in have:
                self._list.put(piece, slot.hash)
                if slot.own:
                    self._own.add(piece)
        self.view = ListView(self._changed, self._list, have, self._own)
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

    def hash_of(self, piece: int) -> bytes | None:
        """The hash of a piece; None while it is not listed."""
        with self._changed:
            return self._list.hash_of(piece)

    def put(self, listing: Listing) -> list[int]:
        """Take in what the tracker says of the list: its word counts before what was listed. A
        listing of a later round begins that round, one of an earlier round says nothing. Returns
        the pieces that are lost by it, for `unmark`. Raises UsageError for what no list can
        hold."""
        self._check(listing)
        pieces, hashes = listing.pieces, listing.hashes
        with self._changed:
            if self.proven or listing.round < self._list.round:
                return []
            if listing.round > self._list.round:
                self._list.begin(listing.round)
            stated = (hashes[start : start + HASH_SIZE] for start in range(0, len(hashes), HASH_SIZE))
            lost = [piece for piece, digest in zip(pieces, stated, strict=True) if self._state(piece, digest)]
            self._changed.notify_all()
        return lost

    def suggest(self, listing: Listing) -> None:
        """Take in what another host says of the list: of pieces of which no hash is known. Raises
        UsageError for what no list can hold."""
        self._check(listing)
        size, hashes = HASH_SIZE, listing.hashes
        with self._changed:
            for number, piece in enumerate(listing.pieces):
                self._list.suggest(piece, hashes[number * size : (number + 1) * size])
            self._changed.notify_all()

    def _check(self, listing: Listing) -> None:
        pieces, count = listing.pieces, self.layout.count
        if len(listing.hashes) != len(pieces) * HASH_SIZE or any(not 0 <= piece < count for piece in pieces):
            raise UsageError("a vouched list names pieces that do not exist, or does not have a hash for each")

    def begin(self, round_: int) -> None:
        """Begin a round, of which nothing is stated yet: another one, or the first of a tracker
        that has just answered."""
        with self._changed:
            if not self.proven:
                self._list.begin(round_)

    def _state(self, piece: int, digest: bytes) -> bool:
        """List a hash, whatever was listed before; returns whether a held piece is lost by that.
        The caller holds the lock."""
        before = self._list.hash_of(piece)
        if before not in (None, digest):
            self._list.confirmed.discard(piece)
            self._own.discard(piece)
        return self._list.put(piece, digest) and self._lose(piece)

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
        began, wrong_since = time.monotonic(), 0.0
        while piece not in self._have:
            if self._closed or wait.cancelled:
                raise Unlisted(f"piece {piece} is not waited for any more")
            now = time.monotonic()
            match self._list.verdict(piece, digest):
                case "good":
                    return digest
                case "stale":
                    raise Unlisted(f"piece {piece} came as it was listed before")
                case "unlisted":
                    left_s, wrong_since = began + HASH_WAIT_S - now, 0.0
                    if left_s <= 0:
                        raise Unlisted(f"the hash of piece {piece} is not listed")
                case "wrong":
                    wrong_since = wrong_since or now
                    left_s = wrong_since + MISMATCH_WAIT_S - now
                    if left_s <= 0:
                        return b""
            wait.piece = piece
            self._changed.wait(left_s)
        return digest

    def cancel(self, wait: HashWait) -> None:
        """Let a receiver wait no longer."""
        with self._changed:
            wait.cancelled = True
            self._changed.notify_all()

    def hash(self, piece: int, data: bytes) -> bytes:
        """The hash of a piece that came from upstream. Raises Conflict for another length."""
        if len(data) != self.layout.length(piece):
            raise Conflict(f"piece {piece} has {len(data)} bytes instead of {self.layout.length(piece)}")
        return blake3(data).digest()

    def vouch(self, piece: int, digest: bytes, *, prevail: bool = False) -> bool:
        """List the hash of a piece that this host has read from upstream, where none is listed, or
        with `prevail` in any case. Returns whether the list has this hash now. A piece that was
        held with another hash is held no more."""
        with self._changed:
            if prevail and not self.proven:
                self._state(piece, digest)
            if not self._list.suggest(piece, digest):
                return False
            self._own.add(piece)
            self._changed.notify_all()
        return True

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
