"""One blob on its way into the store: carries out what core/pull.py commands, on real streams and
in a BitTorrent swarm.

Receiver threads write into the blob and post what happened; everything else is on the event loop. A
verified piece goes to the uplink at once, whichever transport brought it, so this host's children
receive it while the rest is still arriving. The pull ends only after a swarm's transfer has let go
of the file.

Of a blob without a piece list every piece is provisional until the SHA-256 of the whole has matched
(vouched_pull.py). Bodies to clients are sent such pieces, but for their last one (`Body`). Of a
blob with a list a client may wait for a part, which comes first then (`DemandedBody`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from p2pdist.agent.bittorrent.fetch import OriginAccess, SwarmFetch
from p2pdist.agent.pull.origin import RangeSource
from p2pdist.agent.pull.streams import BlobWriters, PullContext, PullStreams
from p2pdist.agent.pull.vouched_pull import VouchedPull
from p2pdist.agent.tasks import Tasks
from p2pdist.core.demand.reading_queue import SHORT_BYTES, Reading, ReadingQueue
from p2pdist.core.download.download import Download
from p2pdist.core.download.events import (
    AskTicket,
    CloseStream,
    Complain,
    Completed,
    GaveUp,
    OpenDemand,
    OpenStream,
    PieceStored,
    Planned,
    Rejected,
    Starved,
    StreamEnded,
    Tick,
    TrackerChanged,
    Wanted,
)
from p2pdist.core.pull import (
    SWARM,
    AskList,
    BeginSwarm,
    EndSwarm,
    Event,
    FindPeers,
    PeersKnown,
    PriorityChanged,
    PullCore,
    ReportTransport,
    SwarmClosed,
    Switched,
    TorrentKnown,
    WriterGone,
)
from p2pdist.core.transport import CutShort, Policy
from p2pdist.core.vouched.whole import CheckWhole, Judge, VerifyPieces
from p2pdist.model.address import by_name
from p2pdist.model.errors import Corrupt, P2PDistError, Unavailable, foreseen
from p2pdist.model.messages import Advance, Complaint, Holding, Judged, Priority, Report, Vouched
from p2pdist.model.pieces import PieceSet
from p2pdist.model.plan import Plan, Source
from p2pdist.model.selection import Selection
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.blobs.vouched_pieces import Listing, VouchedPieces
from p2pdist.transfer.names import NAMES
from p2pdist.transfer.stream.events import Mailbox, PieceReceived, StreamClosed, StreamEvent

logger = logging.getLogger(__name__)

TICK_S = 0.25
DEMAND_S = 0.05
"""How often a source is looked for anew while wanted pieces do not come."""

AHEAD_BYTES = 8 << 20
"""So much behind the piece that a client waits for is demanded as well."""

EARLY_LOOK_S, EARLY_S = 0.03, 0.6
"""While nothing of a stripe has come, quiet streams are looked at so often in a pull's first
moments: a first piece that is late by a tenth of a second is to be noticed."""


def agent_stops() -> Unavailable:
    """The failure of pulls whose agent ends; `stops` tells clients that the next agent goes on with
    them."""
    return Unavailable("the agent stops", remedy="Pull again when it has been started", stops=True)


class PieceWaits:
    """Callers that wait for single pieces of a blob."""

    def __init__(self) -> None:
        self.demanded_at = -math.inf
        """When a caller demanded pieces that were not there last, by the loop's time. The owner."""
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def wait(self, piece: int) -> None:
        """Return once the piece is there; raises the pull's failure."""
        waiter = self._waiting.get(piece)
        if waiter is None:
            waiter = self._waiting[piece] = asyncio.get_running_loop().create_future()
        await asyncio.shield(waiter)  # several callers may wait for the same piece, and one may be cancelled

    def stored(self, piece: int) -> None:
        """Wake the callers of a piece."""
        if (waiter := self._waiting.pop(piece, None)) is not None:
            waiter.set_result(None)

    def ended(self, error: P2PDistError | None) -> None:
        """Wake all callers: the blob is complete, or `error` is why it will not be."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
                waiter.exception()  # marks it as seen: the callers may have been cancelled


class Looks:
    """When a pull looks whether its stripes come: every TICK_S, and when one may stand still. That
    is foreseen from the pieces that are here, so a look is spared where each stripe has given one
    since: a look runs much code that nothing else does. Times are the loop's."""

    def __init__(self) -> None:
        self._latest = -math.inf
        """When the pull looks in any case; written by `looked`."""
        self._counts: tuple[int, ...] = ()
        """Pieces of each stripe when the next look was foreseen; written by `next_s`."""

    def looked(self, now: float) -> None:
        """The pull looks now."""
        self._latest = now + TICK_S

    def spared(self, counts: Sequence[int], now: float) -> bool:
        """Whether nothing can stand still now, where stripes have `counts` pieces."""
        return now < self._latest and all(map(operator.gt, counts, self._counts))

    def next_s(self, counts: Sequence[int], still_s: float, now: float) -> float:
        """How long to wait until the next look, where a stripe may stand still in `still_s`."""
        self._counts = tuple(counts)
        return max(EARLY_LOOK_S, min(self._latest - now, still_s))


class Receipts:
    """Bytes of the pieces of a blob."""

    def __init__(self, blob: Blob) -> None:
        self._layout, self._counted = blob.layout, PieceSet(blob.layout.count, blob.have.bits)
        self.before = sum(blob.layout.length(piece) for piece in blob.have)
        """Bytes that the store held before the pull."""
        self.by_source = {"origin": 0, "peer": 0}
        """Bytes received, each piece once."""
        self.first_at: float | None = None
        """When the first of them came, by the monotonic clock."""
        self.twice = 0
        """Bytes that came again, since two sources had the piece under way."""

    def count(self, piece: int, *, from_origin: bool) -> bool:
        """A piece has come; returns whether it is new."""
        new = self._counted.add(piece)
        if self.first_at is None:
            self.first_at = time.monotonic()
        if new:
            self.by_source["origin" if from_origin else "peer"] += self._layout.length(piece)
        else:
            self.twice += self._layout.length(piece)
        return new


@contextmanager
def demanded(pull: BlobPull | None, pieces: Sequence[int], *, prefetch: bool) -> Iterator[None]:
    """While a child waits for pieces that a pull lacks, they come first here as well, with
    `prefetch` behind those that are demanded without. So what many
    hosts wait for at once is asked of the root of its stripe, and of the origin, once."""
    task = asyncio.create_task(_brought(pull, pieces, prefetch)) if pull is not None and pieces else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _brought(pull: BlobPull, pieces: Sequence[int], prefetch: bool, reading: Reading | None = None) -> None:
    with suppress(P2PDistError):  # the child's stream ends as well
        await pull.demand(pieces, prefetch=prefetch, reading=reading)


class Body:
    """One reading of a blob while it is pulled, by a client that is sent what comes. Not before the
    blob is complete it may be sent its last piece."""

    def __init__(self, pull: BlobPull) -> None:
        self._pull, self._losses = pull, pull.vouched.losses if pull.vouched is not None else 0

    async def piece(self, piece: int) -> None:
        """Wait until a piece is there; raises the pull's failure, and Corrupt when a piece that may
        have been sent turned out to be wrong since this reading began."""
        await self._pull.piece(piece)
        self._check()

    async def proven(self) -> None:
        """Wait until everything that was sent is certain to be right; raises what `piece`
        raises."""
        if self._pull.vouched is not None:
            await asyncio.shield(self._pull.done)
            self._check()

    def _check(self) -> None:
        vouched = self._pull.vouched
        if vouched is not None and vouched.losses != self._losses:
            raise Corrupt(
                f"some of what came of {self._pull.blob.digest} was wrong, and comes again", remedy="Ask again"
            )


class DemandedBody(Body):
    """One reading of a part of a blob by a client that waits for it: what it waits for comes before
    all else, what it reads next right behind. Of a blob without a piece list nothing can be given
    early, so nothing is demanded. `pieces` hold the part, of `length` bytes; close it in any
    case."""

    def __init__(self, pull: BlobPull, pieces: range, length: int) -> None:
        super().__init__(pull)
        self._reading = Reading(length <= SHORT_BYTES)
        pull.turns.reads(self._reading, pieces.start, now=asyncio.get_running_loop().time())
        self._end, self._look_at = pieces.stop, 0
        self._ahead: asyncio.Task[None] | None = None

    async def piece(self, piece: int) -> None:
        """Wait until a piece is there, before all others; raises what Body.piece raises."""
        if self._pull.vouched is None:
            self._look_ahead(piece)
            await self._pull.demand((piece,), reading=self._reading)
        await super().piece(piece)

    def _look_ahead(self, piece: int) -> None:
        if piece < self._look_at:
            return
        count = max(2, AHEAD_BYTES // self._pull.blob.layout.piece_size)
        self._look_at = piece + count // 2
        self._leave_ahead()
        following = range(piece + 1, min(self._end, piece + 1 + count))
        self._ahead = asyncio.create_task(_brought(self._pull, following, True, self._reading))

    def close(self) -> None:
        """The client waits no longer. Idempotent."""
        self._reading.over = True
        self._leave_ahead()

    def _leave_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()


class BlobPull:
    """Fetches one blob. `selection`: the part of another blob at the origin that this blob is.
    `upstream`: the registry that a lease lets this host read, in place of the origin. Lives on the
    event loop."""

    def __init__(
        self,
        blob: Blob,
        context: PullContext,
        *,
        tracker_present: bool,
        priority: Priority = "start",
        selection: Selection | None = None,
        upstream: RangeSource | None = None,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.blob = blob
        self.done: asyncio.Future[None] = loop.create_future()
        """Gets None, or the failure, at the end."""
        self.note = ""
        """What the pull waits for before its first piece, in words for the user."""
        self.receipts = Receipts(blob)
        self._context, self._stripes = context, blob.layout.stripes
        self._download = _download_of(blob, context, loop.time())
        self._mail: Mailbox[StreamEvent] = Mailbox(loop, self._deliver)
        self.vouched = VouchedPull(blob, blob.vouched, _VouchedSide(self)) if blob.vouched is not None else None
        """What the pull of a blob without a piece list does beside."""
        self._streams = PullStreams(
            blob, context, self._mail, priority=priority, selection=selection, upstream=upstream, vouched=self.vouched
        )
        self.unreached, self.leave_revoked = self._streams.unreached, self._streams.leave_revoked
        self._reported: tuple[int, ...] = tuple(self._download.counts)
        self.waits, self._unreported, self.turns = PieceWaits(), Unreported(), ReadingQueue()
        self._completing: asyncio.Task[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._looks = Looks()
        self._outcome: tuple[P2PDistError | None] | None = None
        self._lookups = Tasks(logger, f"{blob.digest} finds no swarm")
        # A selection has no torrent of its own, an empty blob needs none, and of what comes from an
        # upstream there is none.
        may_swarm = selection is None and upstream is None and blob.size > 0
        policy, self._swarm = _swarm_of(self, context) if may_swarm else ("trees", None)
        self._writers = BlobWriters(context.writers, blob.digest)
        self._core = PullCore(
            self._download,
            policy,
            priority=priority,
            other_writers=self._writers.others,
            vouched=self.vouched is not None,
            hedges=True,
        )
        self._begins_with_swarm = policy == "swarm"
        context.uplink.held(blob.digest, blob.layout, self._stripes, self._download.have)
        if not tracker_present:
            self.tracker_changed(False)

    @property
    def priority(self) -> Priority:
        """Whether a start waits for this pull, or it gives way to starts."""
        return self._streams.priority

    def start(self) -> None:
        """Begin; a blob that lacks nothing is done at once."""
        if self._swarm is not None and not self.blob.have.complete:
            self._lookups.spawn(_find_torrent(self, self._swarm))
        if self.vouched is not None:
            self.vouched.restate()  # what an earlier pull read
        self._tick()
        _look(self, self._loop.time() + EARLY_S)

    def holding(self) -> Holding:
        """What a tracker must know to take this pull into its swarm."""
        layout = self.blob.layout
        counts = self._reported = tuple(self._download.counts)
        read = self._swarm.reading if self._swarm is not None else ()
        parents = tuple("" if stripe in read else host for stripe, host in enumerate(self._download.parents()))
        by_swarm = self._core.report_swarm()
        shown, vouched = self._context.proof(self.blob.digest), self.vouched is not None
        return Holding(
            self.blob.digest, layout.size, layout.piece_size, counts, parents, self.priority, by_swarm, *shown, vouched
        )

    def advance(self) -> Advance | None:
        """Progress since the last report, None when there is none and the pull did not yield."""
        counts, yielded = tuple(self._download.counts), self._streams.yields.take(self.priority)
        if counts == self._reported and not yielded:
            return None
        self._reported = counts
        return Advance(self.blob.digest, counts, self.receipts.by_source["origin"], yielded)

    def trouble(self) -> str:
        """What the pull waits for, in words for the user; empty while pieces come."""
        return self._download.trouble(self._loop.time())

    def planned(self, plan: Plan, *, reopen: bool = False) -> None:
        """A tracker, or this agent itself, has planned. `reopen`: streams end after the pieces
        under way and are opened again, with the ticket that came with the plan."""
        if reopen:
            self._streams.reopen()
        self._streams.limit_rates(plan)
        if self._swarm is not None:
            self._swarm.planned(plan)
        self._mail.context.run(self._submit, Planned(plan))

    def tracker_changed(self, present: bool) -> None:
        """A tracker answers from now on, or none does."""
        if self.vouched is not None:
            self.vouched.tracker_changed(present)
        self._mail.context.run(self._submit, TrackerChanged(present))

    def escalate(self) -> None:
        """A start waits for this preseed from now on. Its streams end after the pieces under way
        and are opened again, at the new priority."""
        self._streams.escalate()
        self._submit(PriorityChanged("start"))

    def reject(self, error: P2PDistError) -> None:
        """The swarm cannot go on, or the agent stops: streams are closed, what has arrived stays.
        Where this host has met the reason itself, it can say more."""
        met = self._streams.origin_error
        self._submit(Rejected(met if met is not None and type(met) is type(error) else error))

    async def piece(self, piece: int) -> None:
        """Wait until a piece is there; raises the pull's failure. The last piece of a blob without
        a piece list is there when the blob is complete."""
        if self.vouched is not None and piece == self.blob.layout.count - 1:
            await asyncio.shield(self.done)
            return
        if piece in self._download.have:
            return
        if self.done.done():
            self.done.result()
            return
        await self.waits.wait(piece)

    def body(self) -> Body:
        """A reading of the blob that begins now."""
        return Body(self)

    async def demand(self, pieces: Sequence[int], *, prefetch: bool = False, reading: Reading | None = None) -> None:
        """Have pieces come before all others, but with `prefetch` behind those that are demanded
        without, and wait for them; for a `reading`, while it has a turn. Raises the pull's
        failure."""
        while missing := tuple(piece for piece in pieces if piece not in self._download.have):
            if self.done.done():
                return self.done.result()
            self.waits.demanded_at = self._loop.time()
            if reading is None or _has_turn(self, reading, None if prefetch else missing[0]):
                self._mail.context.run(self._submit, Wanted(missing, prefetch))
            with suppress(TimeoutError):  # there may be a plan by then
                # One of them: many children may demand many pieces, of which none comes for long.
                async with asyncio.timeout(DEMAND_S):
                    await self.piece(missing[0])

    # -- core

    def _submit(self, event: Event) -> None:
        for command in self._core.handle(event, now=self._loop.time()):
            match command:
                case OpenStream(stream, source, stripe):
                    self._writers.changed(1)
                    self._streams.open(stream, source, stripe)
                case OpenDemand(stream, source, stripe, pieces, prefetch, hedge):
                    self._writers.changed(1)
                    self._streams.open(stream, source, stripe, pieces, prefetch=prefetch, hedge=hedge)
                case CloseStream(stream, after_piece):
                    self._streams.close(stream, after_piece=after_piece)
                case Complain(stripe, source, reason, piece):
                    logger.warning("source=%s stripe=%d blob=%s reason=%s", source, stripe, self.blob.digest, reason)
                    nameless = (
                        self._streams.is_unreached(stripe, source, reason) and NAMES.silent and by_name(source.address)
                    )
                    complaint = Complaint(self.blob.digest, stripe, source.host, reason, piece, nameless)
                    self._context.send_to_tracker(complaint)
                case Completed():
                    self._end(None)
                case GaveUp(error):
                    self._end(error)
                case ReportTransport():
                    self._context.send_to_tracker(self.holding())
                case CheckWhole() | Judge() | VerifyPieces() | AskList() if self.vouched is not None:
                    self.vouched.carry_out(command)
                case Starved(stripe, source, waits):
                    logger.info("source=%s stripe=%d blob=%s gives nothing yet", source, stripe, self.blob.digest)
                    self._context.send_to_tracker(Report(tuple(filter(None, [self.advance()]))))  # what is here now
                    starved = Complaint(self.blob.digest, stripe, source.host, "slow", starved=True, waits=waits)
                    self._context.send_to_tracker(starved)
                case AskTicket():
                    self._context.ask_ticket(self.blob.digest, self.holding, refused=True)
                case Switched(before, after):
                    logger.info("blob=%s comes by %s from now on, by %s before", self.blob.digest, after, before)
                case CutShort():
                    self._streams.cut_short()
                case BeginSwarm(transport) if self._swarm is not None:
                    self._writers.changed(1)
                    self._swarm.begin(transport)
                case EndSwarm() if self._swarm is not None:
                    self._swarm.close()
                case FindPeers() if self._swarm is not None:
                    self._lookups.spawn(_find_peers(self, self._swarm))

    def _tick(self) -> None:
        for piece in self._unreported.find(self.blob.have, self._download.have):
            self._stored(0, piece)
        for _ in range(self._writers.count_gone()):
            self._submit(WriterGone())
        for event in self._streams.observed():
            self._submit(event)
        self._submit(Tick())
        self._context.ask_ticket(self.blob.digest, self.holding)
        if not self._download.finished:
            _look_later(self, looked=True)

    def _end(self, error: P2PDistError | None) -> None:
        """The core has ended; so does the pull, once a swarm that still writes has let go of the
        file."""
        self._outcome = (error,)
        self._lookups.cancel()
        if self.vouched is not None:
            self.vouched.close()
        if self._swarm is not None and self._core.swarm_writes:
            self._swarm.close()
            return
        if self._swarm is not None:
            self._swarm.stop()
        if error is None:
            self._completing = asyncio.create_task(self._complete())
        else:
            self._finish(error)

    async def _complete(self) -> None:
        self._finish(await _completed(self.blob))

    def _finish(self, error: P2PDistError | None) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
            self.done.exception()  # marks it as seen: there may be no waiter
        self.waits.ended(error)

    # -- what streams and the swarm report

    def _deliver(self, events: list[StreamEvent]) -> None:
        for event in events:
            match event:
                case PieceReceived(number, piece, ok):
                    self._received(number, piece, ok)
                case StreamClosed(number):
                    self._writers.changed(-1)
                    if number == SWARM:
                        self._swarm_closed(event)
                    else:
                        self._stream_closed(event)

    def _stream_closed(self, closed: StreamClosed) -> None:
        number, error = closed.stream, closed.error
        source, stripe, reason = self._streams.closed(closed)
        if reason not in ("done", "closed"):
            logger.info("stream from %s, stripe %d, ended: %s %s", source, stripe, reason, closed.detail)
        busy = source.is_origin and reason == "busy"
        self._submit(StreamEnded(number, "unavailable" if busy else reason, error=error))

    def _swarm_closed(self, closed: StreamClosed) -> None:
        assert self._swarm is not None
        self._swarm.closed(closed)
        self._submit(SwarmClosed(closed.reason))
        if self._outcome is not None:
            self._end(self._outcome[0])

    def _received(self, number: int, piece: int, ok: bool) -> None:
        source = self._streams.source(number) if number != SWARM else None
        if ok and self.vouched is not None and piece not in self.blob.have:
            return  # it was listed otherwise since, and comes again
        if not ok:
            logger.warning("source=%s sent wrong bytes for piece %d of %s", source, piece, self.blob.digest)
            self._context.count_rejected("corrupt")
            return
        from_origin = (
            source.is_origin if source is not None else self._swarm is not None and self._swarm.read_here(piece)
        )
        length = self.blob.layout.length(piece)
        if not self.receipts.count(piece, from_origin=from_origin):
            self._context.count_received("twice", length)
        centre = "origin" if self.vouched is None else "upstream"
        self._context.count_received(centre if from_origin else "peer" if source is not None else "bittorrent", length)
        self._stored(number, piece)

    def _stored(self, number: int, piece: int) -> None:
        self._context.uplink.verified(self.blob.digest, piece)
        if self._swarm is not None:
            self._swarm.held(piece)
        self._submit(PieceStored(number, piece))
        if self.vouched is not None:
            self.vouched.piece_stored(piece)
        self.waits.stored(piece)


def _download_of(blob: Blob, context: PullContext, now: float) -> Download:
    download = Download(
        blob.digest, blob.layout, blob.layout.stripes, blob.have, context.sources, now, host=context.host
    )
    download.alone_patience_s = context.peer_wait_s
    return download


def _has_turn(pull: BlobPull, reading: Reading, piece: int | None) -> bool:
    now = pull._loop.time()
    if piece is not None:
        pull.turns.reads(reading, piece, now=now)
    return pull.turns.has(reading, now=now) or (piece is not None and pull.turns.late(reading, now=now))


def _look_later(pull: BlobPull, *, looked: bool) -> None:
    """Look at a pull's stripes when that is due; `looked`: the pull has done so now."""
    now, download, looks = pull._loop.time(), pull._download, pull._looks
    if looked:
        looks.looked(now)
    wait_s = looks.next_s(download.counts, download.due_s(now), now)
    pull._ticker = pull._loop.call_later(wait_s, _look_if_needed, pull)


def _look_if_needed(pull: BlobPull) -> None:
    if pull._looks.spared(pull._download.counts, pull._loop.time()):
        _look_later(pull, looked=False)
    else:
        pull._tick()


def _look(pull: BlobPull, until: float) -> None:
    """Look at a pull's quiet streams until a piece of each stripe has come, or a time of the
    loop."""
    if pull._download.finished or all(pull._download.counts) or pull._loop.time() >= until:
        return
    for quiet in pull._streams.quiet():
        pull._submit(quiet)
    pull._loop.call_later(EARLY_LOOK_S, _look, pull, until)


def _swarm_of(pull: BlobPull, context: PullContext) -> tuple[Policy, SwarmFetch | None]:
    """By which transports a blob may come, and its part in a BitTorrent swarm."""
    swarming = context.swarming
    policy = swarming.policy_of(pull.blob.digest) if swarming is not None else "trees"
    if swarming is None or policy == "trees":
        return policy, None
    origin = OriginAccess(pull._download.readers, pull._streams.read_origin, pull._streams.complain_of_origin)
    return policy, SwarmFetch(pull.blob, context.host, swarming, origin, pull._mail.post)


async def _find_torrent(pull: BlobPull, swarm: SwarmFetch) -> None:
    exists = await swarm.find(at_once=pull._begins_with_swarm)
    if not exists:
        logger.info("blob=%s has no torrent: it comes by trees", pull.blob.digest)
    pull._submit(TorrentKnown(exists))


async def _find_peers(pull: BlobPull, swarm: SwarmFetch) -> None:
    pull._submit(PeersKnown(await swarm.peers_v1()))


class Unreported:
    """Pieces that are stored and that no stream of this pull reports: a stream of an earlier pull
    may have written them."""

    def __init__(self) -> None:
        self._before: set[int] = set()  # at the last look

    def find(self, stored: PieceSet, known: PieceSet) -> list[int]:
        """The pieces that are stored, and were at the last look, but are not known."""
        before, self._before = self._before, stored.beyond(known) if len(stored) > len(known) else set()
        return sorted(self._before & before)


async def _completed(blob: Blob) -> P2PDistError | None:
    """Make a blob complete; returns why it could not be."""
    try:
        await asyncio.to_thread(blob.finish)
    except P2PDistError as error:
        return error
    except Exception as error:
        logger.exception("%s cannot be completed", blob.digest)
        expected = foreseen(error) if isinstance(error, OSError) else None
        return expected or P2PDistError(f"{blob.digest} stays incomplete: {error!r}", remedy="See the agent's log")
    return None


class _VouchedSide:
    """What the vouched side of a pull needs of it (VouchedContext)."""

    def __init__(self, pull: BlobPull) -> None:
        self._pull = pull

    def submit(self, event: Event) -> None:
        self._pull._submit(event)

    def send(self, message: Vouched | Judged) -> None:
        self._pull._context.send_to_tracker(message)

    def lost(self, pieces: Sequence[int]) -> None:
        self._pull._context.uplink.lost(self._pull.blob.digest, pieces)

    def stored(self, piece: int) -> None:
        self._pull._stored(0, piece)

    def fail(self, error: P2PDistError) -> None:
        self._pull.reject(error)

    async def read_upstream(self, piece: int) -> bytes:
        data = await self._pull._streams.read_origin(piece, again=True)
        self._pull._context.count_received("origin", len(data))
        return data

    async def ask_list(self, source: Source, known: VouchedPieces) -> Listing | None:
        return await self._pull._context.ask_list(source, self._pull.blob.digest, known)
