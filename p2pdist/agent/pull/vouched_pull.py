"""What a pull does beside any other where its blob has no piece list: it states what it reads from
upstream, takes in the list that the tracker sends, sums the whole while pieces come, and reads all
again as the arbiter of a round (model/vouched_list.py).

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
from p2pdist.core.pull import AskList, Event
from p2pdist.core.vouched.read_ahead import ReadAhead
from p2pdist.core.vouched.whole import CheckWhole, Judge, ListChanged, VerifyPieces, WholeChecked
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict, P2PDistError, UsageError
from p2pdist.model.messages import LISTED_MAX, Basis, Judged, Listed, Recall, Reread, Vouched
from p2pdist.model.pieces import HASH_SIZE, PieceList
from p2pdist.model.plan import Source
from p2pdist.store.blobs.blob import Blob, Comparison, check_whole, store_vouched, unmark, vouch
from p2pdist.store.blobs.vouched_pieces import Listing, VouchedPieces

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

    async def ask_list(self, source: Source, known: VouchedPieces) -> Listing | None:
        """What another host knows of the list beyond `known`; None where it does not say."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What a reader of upstream found: the hash of a piece."""

    piece: int
    hash: bytes
    replaces: bool = False
    """Whether other bytes had been stored for the piece, and may have been sent on."""


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


class WholeSum:
    """Has the whole summed while its pieces come, and compared in the end. `tasks` run what takes
    time."""

    def __init__(self, blob: Blob, vouched: VouchedPieces, tasks: Tasks) -> None:
        self._blob, self._list, self._tasks = blob, vouched, tasks
        self._prefix = 0
        """The pieces before this one are stored."""
        self._given = 0
        """Bytes that the hasher was given."""
        self._running = False

    def stored(self, piece: int) -> None:
        """A piece is stored: sum on, when enough has come."""
        if piece != self._prefix:
            return
        have, count = self._blob.have, self._blob.layout.count
        while self._prefix < count and self._prefix in have:
            self._prefix += 1
        self._follow()

    def lost(self, pieces: Sequence[int]) -> None:
        """Pieces are stored no more."""
        self._prefix = min(self._prefix, *pieces)
        self._given = min(self._given, self._blob.layout.offset(self._prefix))

    def _follow(self) -> None:
        end = min(self._blob.size, self._blob.layout.offset(self._prefix))
        if not self._running and end - self._given >= FOLLOW_BYTES:
            self._running, self._given = True, min(end, self._given + FOLLOW_BYTES_MAX)
            self._tasks.spawn(self._sum())

    async def _sum(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(_hasher, self._sum_here)
        except (P2PDistError, OSError) as error:  # `compare` says what is wrong, if it still is
            logger.info("blob=%s could not be summed: %s", self._blob.digest, error)
            return
        finally:
            self._running = False
        self._follow()

    def _sum_here(self) -> None:
        with self._blob.held():
            self._list.whole.follow(self._blob.fileno, bytes_max=FOLLOW_BYTES_MAX)

    async def compare(self) -> Comparison:
        """Compare the SHA-256 of the whole with the digest. Raises what check_whole raises."""
        return await asyncio.get_running_loop().run_in_executor(_hasher, check_whole, self._blob)

    async def verify(self) -> list[int]:
        """Read all pieces from the disk; those that are not what is listed, and that were
        dropped."""
        return await asyncio.get_running_loop().run_in_executor(_hasher, lambda: self._blob.verify(drop=True))


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
        count, stripes = blob.layout.count, blob.layout.stripes
        self._ahead = [ReadAhead(len(range(stripe, count, stripes))) for stripe in range(stripes)]
        self._tasks = Tasks(logger, f"{blob.digest} is not vouched for as it should be")
        self._whole = WholeSum(blob, vouched, self._tasks)
        self._arbiter: asyncio.Task[None] | None = None
        self._left: set[int] = set()
        """The pieces that this host has yet to read as the arbiter."""
        self._moved = asyncio.Event()
        """Set, and replaced, when one of them has been read."""
        self._told_round = -1
        """The last round of which the log says that pieces were lost."""

    def close(self) -> None:
        """The pull has ended."""
        self._statements.leave()
        self._tasks.cancel()

    # -- what this host reads

    async def is_unread(self, piece: int) -> bool:
        """Whether a reader of upstream still has to read a piece that `unread` named. What this
        host reads as the arbiter is waited for."""
        while piece in self._left:
            await self._moved.wait()
        return self.list.view.is_unread(piece)

    def unread(self, stripe: int) -> list[int]:
        """The pieces of a stripe that a reader of upstream has to read."""
        return self.list.view.unread(stripe, self._blob.layout.stripes, doubtful=self.tracked)

    def lead_max(self, stripe: int) -> int:
        """By how many pieces a reader may be ahead of this host's children."""
        return self._ahead[stripe].lead_max

    def store(self, piece: int, data: bytes) -> tuple[Statement, bool]:
        """Hash and store a piece that came from upstream; returns whether the list has it so. In a
        thread."""
        before = self.list.hash_of(piece) if piece in self._blob.have else None
        digest, stored = vouch(self._blob, piece, data, prevail=not self.tracked)
        return Statement(piece, digest, stored and before not in (None, digest)), stored

    def state(self, statement: Statement) -> None:
        """Vouch for what a reader found."""
        if statement.replaces:
            self._changed([statement.piece], marked=False)
        self._ahead[statement.piece % len(self._ahead)].read(statement.piece)
        self._statements.add(statement)

    # -- the list

    def tracker_changed(self, present: bool) -> None:
        """A tracker answers from now on, or none does. A new one counts its rounds anew, and hears
        again what this host has read, after it has heard of what this host holds."""
        self.tracked = present
        if present:
            self._statements.drop()
            self.list.begin(0)
            asyncio.get_running_loop().call_soon(self.restate)

    def restate(self) -> None:
        """Vouch again for all that this host has read: a tracker may know nothing of the list."""
        for message in statements(self._blob.digest, self.list.view.read_here(), "read"):
            self._context.send(message)

    def _tell_all(self) -> None:
        """Tell the tracker all that is known of the list."""
        self.restate()
        basis: Basis = "whole" if self.list.proven else "told"
        for known in statements(self._blob.digest, self.list.view.from_others(), basis):
            self._context.send(known)

    def receive(self, message: Listed | Reread | Recall) -> None:
        """Take in what the tracker sends."""
        match message:
            case Listed():
                self._listed(message)
            case Reread(_, round_):
                self._reread(round_)
            case Recall():
                self._tell_all()

    def _listed(self, message: Listed) -> None:
        try:
            lost = self.list.put(Listing(message.round, message.pieces, message.hashes))
        except UsageError as error:
            logger.warning("blob=%s: what the tracker lists is not believed: %s", self._blob.digest, error)
            return
        for ahead in self._ahead:
            ahead.listed(message.pieces)
        self._changed(lost)

    def _changed(self, lost: Sequence[int] = (), *, marked: bool = True) -> None:
        """Pieces are lost or the list has changed. `marked`: the bitmap still has the pieces."""
        if lost:
            level = logging.DEBUG if self._told_round == self.list.round else logging.WARNING
            logger.log(level, "blob=%s: pieces were listed or stored wrong, and come again", self._blob.digest)
            self._told_round = self.list.round
            self.losses += 1
            self._whole.lost(lost)
            self._context.lost(lost)
            if marked:
                self._tasks.spawn(self._unmark(lost))
        self._context.submit(ListChanged(self.list.complete, tuple(lost), self.list.round))

    async def _unmark(self, lost: Sequence[int]) -> None:
        try:
            await asyncio.to_thread(unmark, self._blob, lost)
        except P2PDistError as error:
            self._context.fail(error)

    # -- what the core commands

    def piece_stored(self, piece: int) -> None:
        """A piece is stored."""
        self._whole.stored(piece)

    def carry_out(self, command: CheckWhole | Judge | VerifyPieces | AskList) -> None:
        """Carry out what the core commands about the list and the whole."""
        match command:
            case CheckWhole(number):
                self._tasks.spawn(self._check(number))
            case Judge(matches, round_):
                self._statements.leave()
                if matches and self._left:
                    # The arbiter reads no further, and what it has is the rest of its list. Once
                    # the pull has ended it knows no round that the tracker could be told of.
                    self._tell_all()
                self._context.send(Judged(self._blob.digest, round_, matches))
            case VerifyPieces():
                self._tasks.spawn(self._verify())
            case AskList(source):
                self._tasks.spawn(self._ask(source))

    async def _check(self, number: int) -> None:
        try:
            comparison = await self._whole.compare()
        except Conflict as changed:  # the core hears of the pieces that were lost
            logger.debug("blob=%s: %s", self._blob.digest, changed)
            return
        except P2PDistError as error:
            self._context.fail(error)
            return
        if comparison.lost:
            self._changed(comparison.lost, marked=False)
            return
        if not comparison.matches:
            logger.warning("blob=%s does not match as round %d lists it", self._blob.digest, self.list.round)
        self._context.submit(WholeChecked(comparison.matches, number))

    async def _verify(self) -> None:
        try:
            lost = await self._whole.verify()
        except P2PDistError as error:
            self._context.fail(error)
            return
        self._changed(lost, marked=False)

    async def _ask(self, source: Source) -> None:
        listing = await self._context.ask_list(source, self.list)
        if listing is None:
            return
        try:
            self.list.suggest(listing)
        except UsageError as error:
            logger.warning("blob=%s: what %s lists is not believed: %s", self._blob.digest, source, error)
            return
        self._changed()

    # -- the arbiter

    def _reread(self, round_: int) -> None:
        """Be the arbiter of a round: read every piece from upstream again, and vouch for it."""
        if self._arbiter is not None:
            self._arbiter.cancel()
        logger.warning("blob=%s is read from upstream again, as round %d", self._blob.digest, round_)
        self._statements.drop()
        self.list.begin(round_)
        self._changed()
        self._tasks.spawn(self._reread_all(round_))

    async def _reread_all(self, round_: int) -> None:
        self._arbiter = asyncio.current_task()
        self._left = left = set(range(self._blob.layout.count))
        pieces = iter(range(self._blob.layout.count))

        async def some() -> None:
            for piece in pieces:
                if self.list.round != round_:
                    return
                await self._reread_piece(piece, round_)
                self._read_past(left, {piece})

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(REREAD_AT_ONCE):
                    group.create_task(some())
        except* P2PDistError as failures:
            error = failures.exceptions[0]
            logger.warning("blob=%s could not be read again for round %d: %s", self._blob.digest, round_, error)
        finally:
            self._read_past(left, set(left))
        self._statements.leave()
        self._changed()

    def _read_past(self, left: set[int], pieces: set[int]) -> None:
        left -= pieces
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _reread_piece(self, piece: int, round_: int) -> None:
        data = await self._read_again(piece)
        if self.list.round != round_:
            return
        loop, have = asyncio.get_running_loop(), self._blob.have
        digest = await loop.run_in_executor(_readers, self.list.hash, piece, data)
        held = piece in have
        if not self.list.vouch(piece, digest, prevail=True):
            return
        if held and piece not in have:
            self._changed([piece])
            await asyncio.sleep(LOST_PAUSE_S)
        self.state(Statement(piece, digest))
        if piece not in have:
            await loop.run_in_executor(_readers, store_vouched, self._blob, piece, data, digest)
            if piece in have:
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
