"""What a pull does beside any other where its blob has no piece list: it states what it reads from
upstream, takes in the list that the tracker sends, sums the whole while pieces come, and reads all
again as the arbiter of a round (model/vouched.py).

Statements leave a little later than they are made, so that what was read at one moment shares a
message. Everything here is on the event loop but for reading, hashing and writing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from p2pdist.agent.tasks import Tasks
from p2pdist.core.pull import Event
from p2pdist.core.vouched.read_ahead import ReadAhead
from p2pdist.core.vouched.whole import CheckWhole, Judge, ListChanged, WholeChecked
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, P2PDistError, UsageError
from p2pdist.model.messages import LISTED_MAX, Basis, Judged, Listed, Vouched
from p2pdist.model.pieces import HASH_SIZE, PieceList
from p2pdist.store.blobs.blob import Blob, check_whole, store_vouched, unmark, vouch
from p2pdist.store.blobs.vouched import Listing, VouchedPieces

logger = logging.getLogger(__name__)

GATHER_S = 0.02
"""How long a statement waits for others, to leave with them."""

FOLLOW_BYTES = 4 << 20
"""The whole is summed on when so much more of it has come without a gap."""

FOLLOW_BYTES_MAX = 64 << 20
"""What is summed at once for one blob, before others have their turn."""

REREAD_AT_ONCE = 4
REREAD_TRIES = 3
REREAD_PAUSE_S = 1.0
LOST_PAUSE_S = 0.2
"""Between taking a wrong piece from what is served, and writing over it: a child may be just being
sent it."""

_hasher = ThreadPoolExecutor(1, thread_name_prefix="whole-digest")
"""One thread sums the blobs of all pulls: about one processor at most."""

_readers = ThreadPoolExecutor(4, thread_name_prefix="reread")


class VouchedContext(Protocol):
    """What this needs of the pull. `lost` takes pieces from what is served; `stored` offers one
    that has been stored."""

    def submit(self, event: Event) -> None:
        """Have the core handle an event."""

    def send(self, message: Vouched | Judged) -> None:
        """Send a message to the tracker, if one answers."""

    def lost(self, pieces: Sequence[int]) -> None:
        """Offer these pieces no more."""

    def stored(self, piece: int) -> None:
        """Take in that a piece is stored."""

    def fail(self, error: P2PDistError) -> None:
        """End the pull."""

    async def read_upstream(self, piece: int) -> bytes:
        """A piece from upstream, within the limits of this host and the fleet."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What a reader of upstream found: the hash of a piece."""

    piece: int
    hash: bytes


class Statements:
    """Gathers what this host states, and sends it."""

    def __init__(self, blob: Blob, vouched: VouchedPieces, send: Callable[[Vouched], None]) -> None:
        self._blob, self._vouched, self._send = blob, vouched, send
        self._waiting: list[Statement] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, statement: Statement) -> None:
        """State the hash of a piece, together with others of the same moment."""
        self._waiting.append(statement)
        if len(self._waiting) >= LISTED_MAX:
            self.leave()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.leave)

    def leave(self) -> None:
        """Send what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        if waiting:
            pieces = tuple(statement.piece for statement in waiting)
            hashes = b"".join(statement.hash for statement in waiting)
            self._send(Vouched(self._blob.digest, self._vouched.round, pieces, hashes))

    def drop(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class VouchedPull:
    """The vouched side of one pull. On the event loop."""

    def __init__(self, blob: Blob, vouched: VouchedPieces, context: VouchedContext) -> None:
        self.list = vouched
        self.tracked = True
        """Whether a tracker answers."""
        self.losses = 0
        """How often pieces that had been stored turned out to be wrong."""
        self._blob, self._context = blob, context
        self._statements = Statements(blob, vouched, context.send)
        self._ahead = [
            ReadAhead(len(range(stripe, blob.layout.count, blob.layout.stripes)))
            for stripe in range(blob.layout.stripes)
        ]
        self._tasks = Tasks(logger, f"{blob.digest} is not vouched for as it should be")
        self._prefix = 0
        """The pieces before this one are stored."""
        self._followed = 0
        """Bytes that have been given to the hasher."""
        self._following = False
        self._rereading: asyncio.Task[None] | None = None

    def close(self) -> None:
        """The pull has ended."""
        self._statements.leave()
        self._tasks.cancel()

    # -- what this host reads

    def is_unread(self, piece: int) -> bool:
        """Whether a reader of upstream has to read a piece."""
        return self.list.is_unread(piece)

    def unread(self, stripe: int) -> list[int]:
        """The pieces of a stripe that a reader of upstream has to read."""
        return self.list.unread(stripe, self._blob.layout.stripes, doubtful=self.tracked)

    def lead_max(self, stripe: int) -> int:
        """By how many pieces a reader may be ahead of this host's children."""
        return self._ahead[stripe].lead_max

    def store(self, piece: int, data: bytes) -> tuple[Statement, bool]:
        """Hash and store a piece that came from upstream; returns whether the list has it so. In a
        thread."""
        digest, stored = vouch(self._blob, piece, data, prevail=not self.tracked)
        return Statement(piece, digest), stored

    def state(self, statement: Statement) -> None:
        """Vouch for what a reader found."""
        self._ahead[statement.piece % len(self._ahead)].read(statement.piece)
        self._statements.add(statement)

    def tracker_changed(self, present: bool) -> None:
        """A tracker answers from now on, and counts its rounds anew, or none does."""
        self.tracked = present
        if present:
            self._statements.drop()
            self.list.begin(0)

    def restate(self) -> None:
        """Vouch again for all that this host has read: a tracker may know nothing of the list."""
        for message in statements(self._blob.digest, self.list.read_here(), "read"):
            self._context.send(message)

    def recalled(self) -> None:
        """The tracker lacks hashes of the list: tell it all that is known here."""
        self.restate()
        for message in statements(self._blob.digest, self.list.told(), "told"):
            self._context.send(message)

    # -- the list

    def listed(self, message: Listed) -> None:
        """Take in more of the list from the tracker."""
        try:
            lost = self.list.put(Listing(message.round, message.pieces, message.hashes))
        except UsageError as error:
            logger.warning("blob=%s: what the tracker lists is not believed: %s", self._blob.digest, error)
            return
        for ahead in self._ahead:
            ahead.listed(message.pieces)
        self._changed(lost)

    def heard(self, listing: Listing) -> None:
        """Take in what another host knows of the list, while no tracker answers."""
        try:
            self.list.suggest(listing)
        except UsageError as error:
            logger.warning("blob=%s: what a host lists is not believed: %s", self._blob.digest, error)
            return
        self._changed([])

    def _changed(self, lost: Sequence[int]) -> None:
        if lost:
            logger.warning("blob=%s: %d pieces were listed otherwise and come again", self._blob.digest, len(lost))
            self._lost(lost)
            self._tasks.spawn(self._unmark(lost))
        self._context.submit(ListChanged(self.list.complete, tuple(lost), self.list.round))

    def _lost(self, pieces: Sequence[int]) -> None:
        self.losses += 1
        self._prefix = min(self._prefix, *pieces)
        self._followed = min(self._followed, self._blob.layout.offset(self._prefix))
        self._context.lost(pieces)

    async def _unmark(self, lost: Sequence[int]) -> None:
        try:
            await asyncio.to_thread(unmark, self._blob, lost)
        except P2PDistError as error:
            self._context.fail(error)

    # -- the whole

    def piece_stored(self, piece: int) -> None:
        """Sum the whole on, when enough of it has come."""
        if piece != self._prefix:
            return
        have, layout = self._blob.have, self._blob.layout
        while self._prefix < layout.count and self._prefix in have:
            self._prefix += 1
        self._follow()

    def _follow(self) -> None:
        end = min(self._blob.size, self._blob.layout.offset(self._prefix))
        if not self._following and end - self._followed >= FOLLOW_BYTES:
            self._following, self._followed = True, min(end, self._followed + FOLLOW_BYTES_MAX)
            self._tasks.spawn(self._sum())

    async def _sum(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(_hasher, self._sum_here)
        except (P2PDistError, OSError) as error:  # check_whole says what is wrong, if it still is
            logger.info("blob=%s could not be summed: %s", self._blob.digest, error)
            return
        finally:
            self._following = False
        self._follow()

    def _sum_here(self) -> None:
        with self._blob.held():
            self.list.whole.follow(self._blob.fileno, bytes_max=FOLLOW_BYTES_MAX)

    def check(self, command: CheckWhole) -> None:
        """Compare the SHA-256 of the whole with the digest."""
        self._tasks.spawn(self._check(command))

    async def _check(self, command: CheckWhole) -> None:
        loop = asyncio.get_running_loop()
        try:
            comparison = await loop.run_in_executor(_hasher, check_whole, self._blob)
        except Conflict as changed:  # the core hears of the pieces that were lost
            logger.debug("blob=%s: %s", self._blob.digest, changed)
            return
        except P2PDistError as error:
            self._context.fail(error)
            return
        if comparison.lost:
            self._lost(comparison.lost)
            self._context.submit(ListChanged(self.list.complete, comparison.lost, self.list.round))
        else:
            if not comparison.matches:
                logger.warning(
                    "blob=%s: the whole does not match, as round %d lists it", self._blob.digest, self.list.round
                )
            self._context.submit(WholeChecked(comparison.matches, command.check))

    def verify(self) -> None:
        """Read all pieces from the disk and compare them with the list."""
        self._tasks.spawn(self._verify())

    async def _verify(self) -> None:
        try:
            lost = await asyncio.get_running_loop().run_in_executor(_hasher, lambda: self._blob.verify(drop=True))
        except P2PDistError as error:
            self._context.fail(error)
            return
        if lost:
            self._lost(lost)
        self._context.submit(ListChanged(self.list.complete, tuple(lost), self.list.round))

    def judge(self, command: Judge) -> None:
        """Tell the tracker whether the whole matches."""
        self._statements.leave()
        self._context.send(Judged(self._blob.digest, command.round, command.matches))

    # -- the arbiter

    def reread(self, round_: int) -> None:
        """Be the arbiter of a round: read every piece from upstream again, and vouch for it."""
        if self._rereading is not None:
            self._rereading.cancel()
        logger.warning("blob=%s is read from upstream again, as round %d", self._blob.digest, round_)
        self._statements.leave()
        self.list.begin(round_)
        self._context.submit(ListChanged(self.list.complete, (), round_))
        self._tasks.spawn(self._reread(round_))

    async def _reread(self, round_: int) -> None:
        self._rereading = asyncio.current_task()
        pieces = iter(range(self._blob.layout.count))

        async def some() -> None:
            for piece in pieces:
                await self._reread_piece(piece, round_)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(REREAD_AT_ONCE):
                    group.create_task(some())
        except* P2PDistError as failures:
            error = failures.exceptions[0]
            logger.warning("blob=%s could not be read again for round %d: %s", self._blob.digest, round_, error)
        self._statements.leave()
        self._context.submit(ListChanged(self.list.complete, (), self.list.round))

    async def _reread_piece(self, piece: int, round_: int) -> None:
        data = await self._read_again(piece)
        if self.list.round != round_:
            return
        loop = asyncio.get_running_loop()
        digest = await loop.run_in_executor(_readers, self.list.hash, piece, data)
        held = piece in self._blob.have
        if not self.list.vouch(piece, digest, prevail=True):
            return
        if held and piece not in self._blob.have:
            self._changed([piece])
            await asyncio.sleep(LOST_PAUSE_S)
        self.state(Statement(piece, digest))
        if piece not in self._blob.have:
            await loop.run_in_executor(_readers, store_vouched, self._blob, piece, data, digest)
            if piece in self._blob.have:
                self._context.stored(piece)

    async def _read_again(self, piece: int) -> bytes:
        for attempt in range(1, REREAD_TRIES + 1):
            try:
                return await self._context.read_upstream(piece)
            except P2PDistError as error:
                if attempt == REREAD_TRIES:
                    raise
                logger.info("blob=%s: piece %d could not be read again: %s", self._blob.digest, piece, error)
                await asyncio.sleep(REREAD_PAUSE_S * attempt)
        raise AssertionError("the last attempt raises")


def statements(blob: Digest, listing: Listing, basis: Basis, round_: int | None = None) -> list[Vouched]:
    """The messages that state a listing, in a round that need not be its own."""
    return [
        Vouched(
            blob,
            listing.round if round_ is None else round_,
            listing.pieces[start : start + LISTED_MAX],
            listing.hashes[start * HASH_SIZE : (start + LISTED_MAX) * HASH_SIZE],
            basis,
        )
        for start in range(0, len(listing.pieces), LISTED_MAX)
    ]


def listing_of(pieces: PieceList, first: int = 0, pieces_max: int | None = None) -> Listing:
    """The listing of a whole piece list, from a piece on."""
    first = min(first, pieces.layout.count)
    last = pieces.layout.count if pieces_max is None else min(pieces.layout.count, first + pieces_max)
    return Listing(0, tuple(range(first, last)), pieces.hashes[first * HASH_SIZE : last * HASH_SIZE])
