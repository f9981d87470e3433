"""One blob on its way into the store: runs the download core's commands on real streams, or takes
part in a BitTorrent swarm.

Receiver threads write into the blob and post what happened; everything else is on the event loop. A
verified piece goes to the uplink at once, so this host's children get it while the rest is still
arriving, whichever way it came (ways.py tells which is taken, and how one is left for the other).
The pull ends only after a transfer has let go of the file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from p2pdist.agent.bittorrent.fetch import SWARM
from p2pdist.agent.bittorrent.service import Swarming
from p2pdist.agent.bittorrent.ways import Ways
from p2pdist.agent.pull.origin import OriginReader
from p2pdist.agent.uplink import Uplink
from p2pdist.core.download import (
    CloseStream,
    Complain,
    Completed,
    Download,
    Event,
    GaveUp,
    OpenStream,
    Paused,
    PieceStored,
    Planned,
    Rejected,
    StreamEnded,
    Tick,
    TrackerChanged,
)
from p2pdist.core.origin_seeding import Readers
from p2pdist.core.sources import Sources
from p2pdist.core.token_bucket import Bucket
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, Unavailable, foreseen
from p2pdist.model.messages import Advance, Complaint, Holding, Priority, Reason, StreamRequest
from p2pdist.model.pieces import PieceSet
from p2pdist.model.plan import ORIGIN, Plan, Source, by_name
from p2pdist.model.selection import Selection
from p2pdist.origin.origin import Origin
from p2pdist.store.blobs.blob import Blob
from p2pdist.transfer.names import NAMES
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream.client import IncomingStream
from p2pdist.transfer.stream.connect import ConnectionPool
from p2pdist.transfer.stream.events import Mailbox, PieceReceived, StreamClosed, StreamEvent
from p2pdist.transfer.tls import Tls

TICK_S = 0.25
_logger = logging.getLogger(__name__)


class Surroundings(Protocol):
    """What a blob's pull needs of the agent around it."""

    host: str
    turns: Uplink
    sources: Sources
    tls: Tls | None
    origin_share: Bucket
    connections: ConnectionPool
    swarming: Swarming | None
    writers: Counter[Digest]

    def origin(self) -> Origin: ...
    def pacer_of(self, blob: Digest) -> Pacer: ...
    def tell_tracker(self, message: Complaint | Holding) -> None: ...
    def count_received(self, source: str, length: int) -> None: ...
    def count_rejected(self, reason: str) -> None: ...


class BlobPull:
    """See the module's text. `selection`: what of which blob at the origin this is. `done` gets
    None, or the failure, at the end."""

    def __init__(
        self,
        blob: Blob,
        agent: Surroundings,
        *,
        tracker_present: bool,
        priority: Priority = "start",
        selection: Selection | None = None,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.blob, self.priority, self._selection = blob, priority, selection
        self.done: asyncio.Future[None] = loop.create_future()
        self.note = ""  # what it waits for before its first piece, for people
        self.bytes_by_source = {"origin": 0, "peer": 0}
        self.unreached: dict[str, str] = {}
        """Hosts that have some of the blob and could not be reached, and how that ended."""
        self.bytes_before = sum(blob.layout.length(piece) for piece in blob.have)
        self._counted = PieceSet(blob.layout.count, blob.have.bits)
        self._agent = agent
        self._stripes = blob.layout.stripes
        self._core = Download(
            blob.digest, blob.layout, self._stripes, blob.have, agent.sources, loop.time(), host=agent.host
        )
        self._streams: dict[int, IncomingStream | OriginReader] = {}
        self._sources: dict[int, tuple[Source, int]] = {}
        self._mail: Mailbox[StreamEvent] = Mailbox(loop, self._deliver)
        self._reported: tuple[int, ...] = tuple(self._core.counts)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._untold: set[int] = set()
        self._hurried = asyncio.Event()
        self._completing: asyncio.Task[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._outcome: tuple[P2PDistError | None] | None = None
        # A selection has no torrent of its own, and an empty blob needs none.
        swarming = agent.swarming if selection is None and blob.size else None
        self._ways = Ways(self, agent.host, swarming, agent.writers, self._mail.post)
        agent.turns.held(blob.digest, blob.layout, self._stripes, self._core.have)
        if not tracker_present:
            self.tracker_changed(False)

    def start(self) -> None:
        """Begin; a blob that lacks nothing is done at once."""
        self._ways.start()
        self._tick()

    def holding(self) -> Holding:
        """What a tracker must know to take this pull into its swarm."""
        layout = self.blob.layout
        counts = self._reported = tuple(self._core.counts)
        read = self._ways.reading
        parents = tuple("" if stripe in read else host for stripe, host in enumerate(self._core.parents()))
        return Holding(
            self.blob.digest, layout.size, layout.piece_size, counts, parents, self.priority, self._ways.tell()
        )

    def advance(self) -> Advance | None:
        """Progress since the last report, None when there is none."""
        counts = tuple(self._core.counts)
        if counts == self._reported:
            return None
        self._reported = counts
        return Advance(self.blob.digest, counts)

    def trouble(self) -> str:
        """What it waits for, in words for the user; empty while pieces come."""
        return self._core.trouble(self._loop.time())

    def planned(self, plan: Plan) -> None:
        self._ways.planned(plan)
        self._mail.context.run(self._submit, Planned(plan))

    def tracker_changed(self, present: bool) -> None:
        self._ways.tracker_changed(present)
        self._mail.context.run(self._submit, TrackerChanged(present))

    def hurry(self) -> None:
        """Somebody waits for this preseed from now on. Its streams end after the pieces under way
        and are opened again, at the priority that it has now."""
        self.priority = "start"
        self._hurried.set()
        for stream in self._streams.values():
            if isinstance(stream, IncomingStream):
                stream.finish_piece_and_close()

    def reject(self, error: P2PDistError) -> None:
        """The swarm cannot go on."""
        self._submit(Rejected(error))

    async def piece(self, piece: int) -> None:
        """Wait until a piece is there; raises the pull's failure."""
        if piece in self._core.have:
            return
        if self.done.done():
            self.done.result()
            return
        waiter = self._waiting.get(piece)
        if waiter is None:
            waiter = self._waiting[piece] = asyncio.get_running_loop().create_future()
        await asyncio.shield(waiter)  # others may be waiting for the same piece when this one goes away

    def stop(self) -> None:
        """End without a result, as when the agent stops: streams are closed, what has arrived
        stays."""
        self._submit(Rejected(Unavailable("the agent stops")))

    # -- core

    def _submit(self, event: Event) -> None:
        for command in self._core.handle(event, now=self._loop.time()):
            match command:
                case OpenStream(stream, source, stripe):
                    self._open(stream, source, stripe)
                case CloseStream(stream, after_piece):
                    self._close(stream, after_piece)
                case Complain(stripe, source, reason, piece):
                    _logger.warning("source=%s stripe=%d blob=%s reason=%s", source, stripe, self.blob.digest, reason)
                    nameless = self._is_unreached(stripe, source, reason) and NAMES.silent and by_name(source.address)
                    self._agent.tell_tracker(Complaint(self.blob.digest, stripe, source.host, reason, piece, nameless))
                case Completed():
                    self._end(None)
                case GaveUp(error):
                    self._end(error)

    def _is_unreached(self, stripe: int, source: Source, reason: Reason) -> bool:
        """Whether a source that failed could not be reached at all; notes it."""
        if reason == "stalled":
            of = (number for number, where in self._sources.items() if where == (source, stripe))
            streams = [self._streams.get(number) for number in of]
            if any(isinstance(stream, IncomingStream) and not stream.responded for stream in streams):
                self.unreached.setdefault(source.host, f"{source} at {source.address} does not answer")
        return source.host in self.unreached

    def _tick(self) -> None:
        self._find_untold()
        self._ways.steer()
        if self._ways.changed:
            self._agent.tell_tracker(self.holding())
        self._submit(Tick())
        if not self._core.finished:
            self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _find_untold(self) -> None:
        """Take in stored pieces of which no stream of this pull has told for a whole tick: one of
        an earlier pull may have been writing."""
        if len(self.blob.have) <= len(self._core.have):
            self._untold.clear()
            return
        unknown = self.blob.have.beyond(self._core.have)
        for piece in sorted(unknown & self._untold):
            self._stored(0, piece)
        self._untold = unknown

    def _end(self, error: P2PDistError | None) -> None:
        """The core has ended; so does the pull, once a transfer, if there is one, has let go of the
        file."""
        self._outcome = (error,)
        if not self._ways.end():
            return
        if error is None:
            self._completing = asyncio.create_task(self._complete())
        else:
            self._finish(error)

    async def _complete(self) -> None:
        try:
            await asyncio.to_thread(self.blob.finish)
        except P2PDistError as error:
            self._finish(error)
        except Exception as error:
            _logger.exception("%s cannot be completed", self.blob.digest)
            known = foreseen(error) if isinstance(error, OSError) else None
            failure = P2PDistError(f"{self.blob.digest} stays incomplete: {error!r}", remedy="See the agent's log")
            self._finish(known or failure)
        else:
            self._finish(None)

    def _finish(self, error: P2PDistError | None) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
            self.done.exception()  # marks it as seen: nobody may be waiting
        for piece in list(self._waiting):
            self._wake(piece, error)

    # -- the other way (ways.py)

    def pause(self, paused: bool) -> None:
        """See Pull in ways.py; so are those that follow."""
        self._submit(Paused(paused))

    def close_streams(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def fed(self) -> bool:
        parents = enumerate(self._core.parents())
        return all(host is not None or not self.blob.have.missing(stripe, self._stripes) for stripe, host in parents)

    def readers(self) -> Readers:
        return self._core.readers()

    async def read_origin(self, piece: int) -> bytes:
        layout = self.blob.layout
        async with self._reading(piece % self._stripes, layout.length(piece)):
            data = await self._agent.origin().read_range(self.blob.digest, layout.offset(piece), layout.length(piece))
        await self._pause(len(data))
        return data

    def complain_of_origin(self, stripe: int, reason: Reason, error: P2PDistError) -> None:
        _logger.warning("source=origin stripe=%d blob=%s: %s", stripe, self.blob.digest, error)
        if reason == "corrupt":
            self._agent.count_rejected("corrupt")
        self._agent.tell_tracker(Complaint(self.blob.digest, stripe, ORIGIN.host, reason))

    # -- streams

    def _open(self, number: int, source: Source, stripe: int) -> None:
        self._sources[number] = (source, stripe)
        self._ways.begin_write()
        stream: IncomingStream | OriginReader
        if source.is_origin:
            try:
                origin = self._agent.origin()
            except P2PDistError as error:
                self._mail.post(StreamClosed(number, "failed", error.what, error))
                return
            stream = OriginReader(
                origin,
                self.blob,
                stripe,
                self._stripes,
                self._mail.post,
                number=number,
                selection=self._selection,
                reading=lambda length: self._reading(stripe, length),
                pause=self._pause,
            )
        else:
            have = PieceSet(self.blob.layout.count, self.blob.have.bits)
            for other in self._streams.values():
                if other.receiving is not None:
                    have.add(other.receiving)
            request = StreamRequest(
                self.blob.digest, stripe, self._stripes, have.to_bytes(), self._agent.host, self.priority
            )
            stream = IncomingStream(
                source,
                request,
                self.blob.layout,
                self.blob.write,
                self._mail.post,
                number=number,
                tls=self._agent.tls,
                pacer=self._agent.pacer_of(self.blob.digest),
                connections=self._agent.connections if self._stripes == 1 else None,
                inbox=self._mail if self.blob.in_memory else None,  # a disk may hang, and the loop with it
            )
        self._streams[number] = stream
        stream.start()

    @asynccontextmanager
    async def _reading(self, stripe: int, length: int) -> AsyncIterator[None]:
        """Read a piece from the origin within: begins when this host's children and what all hosts
        together may read allow it."""
        async with self._agent.turns.reading(self.blob.digest, stripe):
            await asyncio.sleep(self._agent.origin_share.take(length, time.monotonic()))
            yield

    async def _pause(self, length: int) -> None:
        """After a piece from the origin: hold back as streams do."""
        pacer, priority = self._agent.pacer_of(self.blob.digest), self.priority
        woken = self._hurried if priority == "preseed" else asyncio.Event()
        await pacer.sleep(priority, pacer.received(priority, length), woken)

    def _close(self, number: int, after_piece: bool) -> None:
        if (stream := self._streams.get(number)) is None:
            return
        if after_piece:
            stream.finish_piece_and_close()
        else:
            stream.close()

    def _deliver(self, events: list[StreamEvent]) -> None:
        for event in events:
            match event:
                case PieceReceived(number, piece, ok):
                    self._received(number, piece, ok)
                case StreamClosed(number, reason, detail, error):
                    self._ways.end_write()
                    if number == SWARM:
                        self._swarm_closed(event)
                        continue
                    stream = self._streams.pop(number, None)
                    source, stripe = self._sources.pop(number)
                    if (
                        reason == "refused"
                        and isinstance(stream, IncomingStream)
                        and not stream.responded
                        and not error
                    ):
                        self.unreached[source.host] = detail
                    if reason not in ("done", "closed"):
                        _logger.info("stream from %s, stripe %d, ended: %s %s", source, stripe, reason, detail)
                    if source.is_origin and reason == "busy":
                        self._submit(StreamEnded(number, "unavailable", error=error))
                    else:
                        self._submit(StreamEnded(number, reason, error=error))
                    self._ways.steer()

    def _swarm_closed(self, closed: StreamClosed) -> None:
        self._ways.swarm_closed(closed)
        if self._outcome is not None:
            self._end(self._outcome[0])
        self._ways.steer()

    def _received(self, number: int, piece: int, ok: bool) -> None:
        source, _ = self._sources[number] if number != SWARM else (None, 0)
        if not ok:
            _logger.warning("source=%s sent wrong bytes for piece %d of %s", source, piece, self.blob.digest)
            self._agent.count_rejected("corrupt")
            return
        from_origin = source.is_origin if source is not None else self._ways.read_here(piece)
        length = self.blob.layout.length(piece)
        if self._counted.add(piece):  # what two sources had under way is received twice, and counts once here
            self.bytes_by_source["origin" if from_origin else "peer"] += length
        self._agent.count_received("origin" if from_origin else "peer" if source is not None else "bittorrent", length)
        self._stored(number, piece)

    def _stored(self, number: int, piece: int) -> None:
        self._agent.turns.verified(self.blob.digest, piece)
        self._ways.progressed(piece)
        self._submit(PieceStored(number, piece))
        self._wake(piece, None)

    def _wake(self, piece: int, error: P2PDistError | None) -> None:
        """Tell those who wait for a piece that it is there, or why it will not come."""
        if (waiter := self._waiting.pop(piece, None)) is None:
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
            waiter.exception()  # marks it as seen: those who waited may have gone away
