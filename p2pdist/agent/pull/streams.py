"""The streams of one blob's pull: from other agents and from the origin, and how the origin is read
within this host's limits.

A stream writes into the blob from a thread of its own, or the event loop, and posts what happened;
its last event is StreamClosed. Everything else is on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from p2pdist.agent.bittorrent.service import SwarmService
from p2pdist.agent.pull.origin import OriginReader, RangeSource, read_upstream
from p2pdist.agent.pull.vouched_pull import VouchedPull
from p2pdist.agent.uplink import LEAD_MAX, Uplink
from p2pdist.core.download.events import Awaiting, HeldBack, Quiet
from p2pdist.core.fair_queue import TokenBucket
from p2pdist.core.sources import Sources
from p2pdist.model.access import TICKET_HEADER
from p2pdist.model.address import Vicinity
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, Refused
from p2pdist.model.messages import (
    Complaint,
    Holding,
    Judged,
    Priority,
    Reason,
    Report,
    Selected,
    StreamRequest,
    Vouched,
)
from p2pdist.model.pieces import PieceSet
from p2pdist.model.plan import ORIGIN, Plan, Source
from p2pdist.model.selection import Selection
from p2pdist.origin.contract import Origin
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.blobs.vouched_pieces import HashWait, Listing, Unlisted, VouchedPieces
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream.client import IncomingStream
from p2pdist.transfer.stream.connections import ConnectionPool
from p2pdist.transfer.stream.events import Ended, Ending, Mailbox, StreamClosed, StreamEvent
from p2pdist.transfer.tls import Tls

logger = logging.getLogger(__name__)

PACE_BURST_S = 0.05

UNREAD_BESIDE_BYTES = 16 << 10
"""While readers of a preseed wait for single pieces, its streams of stripes are read seldom. What
comes over them and lies unread in the kernel, the readers would request again: no more than about a
piece of each stream, and so much beside, may lie there."""


class PullContext(Protocol):
    """What a blob pull needs from its agent. `writers` counts the streams and swarms that write
    into each blob, also for pulls that have ended; `peer_wait_s` is how long it waits for hosts
    that may come back, while no tracker answers."""

    host: str
    uplink: Uplink
    sources: Sources
    origin_share: TokenBucket
    connections: ConnectionPool
    swarming: SwarmService | None
    writers: Counter[Digest]
    peer_wait_s: float

    @property
    def tls(self) -> Tls | None:
        """How connections to other agents are secured; None for plain ones."""

    @property
    def vicinity(self) -> Vicinity:
        """From where this host connects to others."""

    def is_revoked(self, host: str) -> bool:
        """Whether nothing may come from a host any more."""

    def proof(self, blob: Digest) -> tuple[str, Selected | None]:
        """What a holding of a blob shows to a tracker: a ticket, and what it was selected from."""

    def ask_ticket(self, blob: Digest, holding: Callable[[], Holding], *, refused: bool = False) -> None:
        """Have the tracker send another ticket where one is due; `refused`: a sender did not take
        the one that is here."""

    def origin(self) -> Origin:
        """The origin to read now. Raises Unavailable."""

    def pacer_of(self, blob: Digest) -> Pacer:
        """The limits on receiving a blob."""

    def send_to_tracker(self, message: Complaint | Holding | Report | Vouched | Judged) -> None:
        """Send a message to the tracker, if one answers."""

    async def ask_list(self, source: Source, blob: Digest, known: VouchedPieces) -> Listing | None:
        """Ask another host for what it knows of a vouched list beyond `known`; None where it does
        not say."""

    def count_received(self, source: str, length: int) -> None:
        """Count bytes received, for the metrics."""

    def count_rejected(self, reason: str) -> None:
        """Count a rejected piece, for the metrics."""


class BlobWriters:
    """The streams and swarms that write into one blob. `counts` has all blobs and pulls: a
    writer of a pull that has ended may go on for a while."""

    def __init__(self, counts: Counter[Digest], blob: Digest) -> None:
        self._counts, self._blob = counts, blob
        self._own = 0
        self.others = counts[blob]
        """Writers of earlier pulls, as of the last `count_gone`."""

    def changed(self, by: int) -> None:
        """Count one writer of this pull more, or less."""
        self._own += by
        self._counts[self._blob] += by
        if not self._counts[self._blob]:
            del self._counts[self._blob]

    def count_gone(self) -> int:
        """How many writers of earlier pulls have ended since the last time."""
        before, self.others = self.others, self._counts[self._blob] - self._own
        return before - self.others


class UnreadLimit:
    """Has little lie unread of the streams of a preseed's stripes, once readers wait for single
    pieces."""

    def __init__(self, blob: Blob) -> None:
        # The connection of a blob of one stripe serves other streams after it.
        self._limits, self._bytes = blob.layout.stripes > 1, blob.layout.piece_size + UNREAD_BESIDE_BYTES
        self._stripes: dict[int, IncomingStream] = {}
        """Open streams of stripes that are preseeds, by number."""
        self._demanded = False
        """Whether a reader has waited."""

    def opened(self, stream: IncomingStream, *, demand: bool, priority: Priority) -> None:
        """A stream is about to begin, of a stripe or, with `demand`, of what a reader waits for."""
        if not self._limits or (not demand and priority == "start"):
            return
        if not demand:
            self._stripes[stream.number] = stream
        if demand and not self._demanded:
            self._demanded = True
            for stripe in self._stripes.values():
                stripe.limit_unread(self._bytes)
        elif self._demanded and not demand:
            stream.limit_unread(self._bytes)

    def closed(self, number: int) -> None:
        """A stream has ended."""
        self._stripes.pop(number, None)


class Yields:
    """Notes whether a preseed holds back for what readers of it, or starts at its host, wait for.
    `demanded` has the pieces that streams bring for readers, by stream."""

    def __init__(self, demanded: Mapping[int, tuple[int, ...]], pacer: Callable[[], Pacer]) -> None:
        self._demanded, self._pacer = demanded, pacer
        self._noted = False
        """Whether it did since `take`."""

    def look(self, priority: Priority) -> None:
        """Look whether it does now; a start never does. Called when a reader begins to wait."""
        if priority == "preseed" and not self._noted:
            self._noted = any(self._demanded.values()) or self._pacer().holds_preseeds()

    def take(self, priority: Priority) -> bool:
        """Whether it did at some moment since this was asked last."""
        self.look(priority)
        noted, self._noted = self._noted, False
        self.look(priority)  # what begins now with a reader that waits
        return noted


class PullStreams:
    """The open streams of a pull. `selection`: the part of another blob at the origin that this
    blob is. `upstream`: the registry that is read in place of the origin. `vouched`: the blob has
    no piece list. Their events go to `mail`."""

    def __init__(
        self,
        blob: Blob,
        context: PullContext,
        mail: Mailbox[StreamEvent],
        *,
        priority: Priority,
        selection: Selection | None,
        upstream: RangeSource | None = None,
        vouched: VouchedPull | None = None,
    ) -> None:
        self.priority: Priority = priority
        self.unreached: dict[str, str] = {}
        """Hosts that have some of the blob and could not be reached, and how that ended."""
        self.origin_error: P2PDistError | None = None
        """Why the origin, or upstream, could not be read last."""
        self._blob, self._context, self._mail, self._selection = blob, context, mail, selection
        self._stripes, self._upstream, self._vouched = blob.layout.stripes, upstream, vouched
        self._hash_waits: dict[int, HashWait] = {}  # of streams of a vouched blob
        self._open: dict[int, IncomingStream | OriginReader] = {}
        self._sources: dict[int, tuple[Source, int]] = {}  # source and stripe of each stream that has not ended
        self._demanded: dict[int, tuple[int, ...]] = {}  # what streams bring for which a reader waits
        self._read_now: set[int] = set()  # pieces that are being read from the origin
        self._paces: dict[int, TokenBucket] = {}  # limits of stripes that cross a WAN with a budget
        self._left: set[int] = set()  # streams that were ended because their source is revoked
        self._escalated, self._unread = asyncio.Event(), UnreadLimit(blob)
        self.yields = Yields(self._demanded, lambda: context.pacer_of(blob.digest))

    def open(
        self,
        number: int,
        source: Source,
        stripe: int,
        pieces: tuple[int, ...] = (),
        *,
        prefetch: bool = False,
        hedge: bool = False,
    ) -> None:
        """Receive a stripe from a source, or of it only the `pieces` for which a reader waits, or
        with `prefetch` is going to, or that are a `hedge`; StreamClosed follows in any case."""
        self._sources[number] = (source, stripe)
        self._demanded[number] = () if hedge else pieces
        self.yields.look(self.priority)
        stream: IncomingStream | OriginReader
        if not source.is_origin and self._context.is_revoked(source.host):
            self._mail.post(StreamClosed(number, "refused", f"{source} is revoked", Refused(f"{source} is revoked")))
            return
        if source.is_origin:
            try:
                origin = self._upstream or self._context.origin()
            except P2PDistError as error:
                self._mail.post(StreamClosed(number, "failed", error.what, error))
                return
            stream = OriginReader(
                origin,
                self._blob,
                stripe,
                self._stripes,
                self._mail.post,
                number=number,
                selection=self._selection,
                reading=lambda length: self._reading(stripe, length, again=bool(pieces)),
                pause=self._pause,
                pieces=pieces,
                vouched=self._vouched,
                under_way=self._read_now,
                first=tuple if pieces else partial(self._waited_for, stripe),
            )
        else:
            stream = self._from_host(number, source, self._request(stripe, pieces, prefetch, hedge))
        self._open[number] = stream
        if isinstance(stream, IncomingStream):
            self._unread.opened(stream, demand=bool(pieces) and not hedge, priority=self.priority)
        stream.start()

    def _from_host(self, number: int, source: Source, request: StreamRequest) -> IncomingStream:
        if (request.demand or request.prefetch) and not request.rides and self._stripes > 1:
            for other, stream in self._open.items():  # the source leaves out of them what this one brings
                if isinstance(stream, IncomingStream) and self._sources[other] == (source, request.stripe):
                    stream.share()
        write: Callable[[int, memoryview], bool] = self._blob.write
        if self._vouched is not None:
            wait = self._hash_waits[number] = HashWait()
            write = _write_listed(self._blob, wait)
        return IncomingStream(
            source,
            request,
            self._blob.layout,
            write,
            self._mail.post,
            number=number,
            tls=self._context.tls,
            pacer=self._context.pacer_of(self._blob.digest),
            connections=self._context.connections if self._stripes == 1 else None,
            # A disk may hang, and the loop with it; so may a piece that waits for its hash.
            inbox=self._mail if self._blob.in_memory and self._vouched is None else None,
            fields=self._ticket(),
            vicinity=self._context.vicinity,
        )

    def _request(self, stripe: int, pieces: tuple[int, ...], prefetch: bool, hedge: bool) -> StreamRequest:
        have = _all_but(pieces, self._blob.layout.count) if pieces else self._stored_or_coming()
        demand, pace = bool(pieces) and not hedge, self._paces.get(stripe)
        return StreamRequest(
            self._blob.digest,
            stripe,
            self._stripes,
            have.to_bytes(),
            self._context.host,
            "start" if pieces else self.priority,
            demand=demand,
            prefetch=prefetch,
            bytes_s=pace.limit_bytes_s or 0.0 if pace is not None else 0.0,
            # Another priority of the other stream would hold up what is waited for, and so would a
            # large piece that has begun over it.
            rides=demand and self.priority == "start" and self._stripes > 1 and not self._blob.layout.large,
        )

    def awaiting(self) -> list[int]:
        """The streams of which a piece has come whose hash is not listed yet."""
        return [number for number, wait in self._hash_waits.items() if wait.piece is not None]

    def _stored_or_coming(self) -> PieceSet:
        have = PieceSet(self._blob.layout.count, self._blob.have.bits)
        for other in self._open.values():
            if other.receiving is not None:
                have.add(other.receiving)
        for pieces in self._demanded.values():
            for piece in pieces:
                have.add(piece)
        return have

    def _waited_for(self, stripe: int) -> Iterator[int]:
        """The pieces of a stripe that are to come from the origin for readers, the lowest first."""
        numbers = [number for number in self._demanded if self._sources[number] == (ORIGIN, stripe)]
        return iter(sorted(piece for number in numbers for piece in self._demanded[number]))

    def observed(self) -> list[HeldBack | Awaiting | Quiet]:
        """What there is to say of open streams: which ones this host holds back, of which a piece
        waits for its hash, and which sources have given nothing."""
        open_streams = self._open.items()
        held = [number for number, each in open_streams if isinstance(each, IncomingStream) and each.held_back]
        return [*map(HeldBack, held), *map(Awaiting, self.awaiting()), *self.quiet()]

    def quiet(self) -> list[Quiet]:
        """The streams whose sources have given nothing. A preseed whose source has responded is
        none: it gives way to starts, there and here."""
        return [
            Quiet(
                number,
                stream.responded_s is not None,
                stream.received_bytes,
                stream.waits,
                stream.responded_s or 0.0,
                stream.connected_s,
            )
            for number, stream in self._open.items()
            if isinstance(stream, IncomingStream)
            and stream.quiet
            and (self.priority == "start" or stream.responded_s is None)
        ]

    def _ticket(self) -> dict[str, str]:
        """The header field that shows this host's ticket for the blob, if it has one."""
        ticket, _ = self._context.proof(self._blob.digest)
        return {TICKET_HEADER: ticket} if ticket else {}

    def cut_short(self) -> None:
        """End all streams now."""
        for number in list(self._open):
            self.close(number, after_piece=False)

    def escalate(self) -> None:
        """Be a start from now on. Streams end after the pieces under way and are opened again, at
        the new priority."""
        self.priority = "start"
        self._escalated.set()
        self.reopen()

    def reopen(self) -> None:
        """End the streams to other agents after the pieces under way: they are opened again."""
        for stream in self._open.values():
            if isinstance(stream, IncomingStream):
                stream.finish_piece_and_close()

    def limit_rates(self, plan: Plan) -> None:
        """Keep to the rates of a plan: streams from a parent that stays are opened anew, with
        another one, after the pieces under way."""
        for choice in plan.stripes:
            before = self._paces.pop(choice.stripe, None)
            if choice.bytes_s:
                self._paces[choice.stripe] = pace = before or TokenBucket(None, PACE_BURST_S)
                same, pace.limit_bytes_s = pace.limit_bytes_s == choice.bytes_s, choice.bytes_s
            else:
                same = before is None
            for number, stream in self._open.items() if not same else ():
                if isinstance(stream, IncomingStream) and self._sources[number] == (choice.parent, choice.stripe):
                    stream.finish_piece_and_close()

    def leave_revoked(self) -> None:
        """End the streams from hosts that are revoked; to the core each was refused."""
        for number, stream in self._open.items():
            if isinstance(stream, IncomingStream) and self._context.is_revoked(stream.source.host):
                self._left.add(number)
                stream.close()

    def source(self, number: int) -> Source:
        """The source of a stream that has not ended."""
        return self._sources[number][0]

    def closed(self, closed: StreamClosed) -> tuple[Source, int, Ending]:
        """Take in that a stream has ended; returns its source and stripe, and why it ended."""
        stream = self._open.pop(closed.stream, None)
        self._hash_waits.pop(closed.stream, None)
        self._demanded.pop(closed.stream, None)
        self._unread.closed(closed.stream)
        left = closed.stream in self._left
        self._left.discard(closed.stream)
        source, stripe = self._sources.pop(closed.stream)
        if source.is_origin and closed.error is not None:
            self.origin_error = closed.error
        if isinstance(stream, IncomingStream) and stream.responded_s is not None:
            self._context.sources.times.responded(stream.responded_s)
        elif isinstance(stream, IncomingStream) and closed.reason == "closed":
            self._context.sources.times.unanswered(stream.connected_s)
        answered = not isinstance(stream, IncomingStream) or stream.responded or closed.error
        if closed.reason == "refused" and not answered:
            self.unreached[source.host] = closed.detail
        return source, stripe, "refused" if left and closed.reason != "done" else closed.reason

    def is_unreached(self, stripe: int, source: Source, reason: Reason) -> bool:
        """Whether a source that failed could not be reached at all; `unreached` notes it."""
        if reason == "stalled":
            numbers = (number for number, origin in self._sources.items() if origin == (source, stripe))
            streams = [self._open.get(number) for number in numbers]
            if any(isinstance(stream, IncomingStream) and not stream.responded for stream in streams):
                self.unreached.setdefault(source.host, f"{source} at {source.address} does not answer")
        return source.host in self.unreached

    async def read_origin(self, piece: int, *, again: bool = False) -> bytes:
        """A piece from the origin, within the limits of this host and the fleet; `again`: whatever
        this host's children have of it. Raises P2PDistError."""
        layout = self._blob.layout
        async with self._reading(piece % self._stripes, layout.length(piece), again=again):
            where = self._blob.digest, layout.offset(piece), layout.length(piece)
            if self._upstream is not None:
                data = await read_upstream(self._upstream, *where)
            else:
                data = await self._context.origin().read_range(*where)
        await self._pause(len(data))
        return data

    @asynccontextmanager
    async def _reading(self, stripe: int, length: int, *, again: bool = False) -> AsyncIterator[None]:
        """Within it a piece may be read from the origin: it begins when this host's children and
        the fleet's share of the origin allow that."""
        lead_max = self._vouched.lead_max(stripe) if self._vouched is not None else LEAD_MAX
        lead_max = self._blob.layout.count if again else lead_max
        async with self._context.uplink.reading(self._blob.digest, stripe, lead_max):
            await asyncio.sleep(self._context.origin_share.take(length, time.monotonic()))
            if (pace := self._paces.get(stripe)) is not None:
                await asyncio.sleep(pace.take(length, time.monotonic()))
            yield

    async def _pause(self, length: int) -> None:
        """Keep to the limits after a piece from the origin, as streams do."""
        pacer, priority = self._context.pacer_of(self._blob.digest), self.priority
        woken = self._escalated if priority == "preseed" else asyncio.Event()
        await pacer.sleep(priority, pacer.received(priority, length), woken)

    def close(self, number: int, *, after_piece: bool) -> None:
        """End a stream; `after_piece` lets the piece under way arrive first."""
        self._demanded.pop(number, None)  # a stream that is opened now may bring it
        if (stream := self._open.get(number)) is None:
            return
        if after_piece:
            stream.finish_piece_and_close()
        else:
            stream.close()
            if self._vouched is not None and (wait := self._hash_waits.get(number)) is not None:
                self._vouched.list.cancel(wait)

    def complain_of_origin(self, stripe: int, reason: Reason, error: P2PDistError) -> None:
        """Tell the tracker that a piece could not be read for the swarm, and why."""
        logger.warning("source=origin stripe=%d blob=%s: %s", stripe, self._blob.digest, error)
        if reason == "corrupt":
            self._context.count_rejected("corrupt")
        self._context.send_to_tracker(Complaint(self._blob.digest, stripe, ORIGIN.host, reason))


def _write_listed(blob: Blob, wait: HashWait) -> Callable[[int, memoryview], bool]:
    """How a stream of a vouched blob stores a piece: its thread waits for the hash."""

    def write(piece: int, data: memoryview) -> bool:
        try:
            return blob.write(piece, data, wait)
        except Unlisted as error:
            raise Ended("closed" if wait.cancelled else "stale", error.what) from error

    return write


def _all_but(pieces: tuple[int, ...], count: int) -> PieceSet:
    have = PieceSet.full(count)
    for piece in pieces:
        have.discard(piece)
    return have
