"""Central storage as an agent reads it: at its own URL, else at the URL that its tracker names; and
the stream that reads one stripe from it, or from an upstream registry, for the host that holds the
stripe's lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Protocol

from p2pdist.agent.pull.vouched_pull import VouchedPull
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Refused, Unavailable, Unsuitable
from p2pdist.model.selection import Selection
from p2pdist.origin.contract import Origin
from p2pdist.origin.drivers import open_origin
from p2pdist.store.blobs.blob import Blob
from p2pdist.transfer.stream.events import PieceReceived, StreamClosed, StreamEvent

logger = logging.getLogger(__name__)

ORIGINS_MAX = 16
"""Different origins that trackers may name while an agent runs."""

REQUESTS_MAX = 4
"""Range requests under way at once for one stripe: enough to hide the round trip, few enough to
keep the pieces in order."""
UPSTREAM_TRIES = 3
UPSTREAM_PAUSE_S = 0.1
INLINE_BYTES = 64 << 10
"""A piece up to this size is stored on the event loop where the store is in memory, which takes the
loop less time than a thread would. A disk may hang, and would hang the loop."""

INLINE_S = 0.05
"""Once storing a piece on the loop took so long, threads store the rest."""

_storers = ThreadPoolExecutor(16, thread_name_prefix="origin-store")
"""Threads that write pieces of the origin: their own, so that a disk that hangs stops no other
threads."""


class Origins:
    """The origins that an agent may read. `own` is the origin of its settings. On the event
    loop."""

    def __init__(self, own: Origin | None, session: TrackerSession) -> None:
        self._own, self._session = own, session
        self._named: dict[str, Origin] = {}
        """The origins that trackers named, by URL."""
        self._preparing: asyncio.Task[None] | None = None

    def get(self) -> Origin:
        """The origin to read now. Raises Unavailable."""
        if self._own is not None:
            return self._own
        url = self._session.origin
        if not url:
            raise Unavailable(
                "neither this agent nor its tracker was given an origin", remedy="Start one with --origin"
            )
        if url not in self._named:
            if len(self._named) >= ORIGINS_MAX:
                raise Unavailable(
                    f"trackers have named {ORIGINS_MAX} origins by now",
                    remedy="Restart this agent, or give it --origin",
                )
            self._named[url] = open_origin(url, serving=True)
        return self._named[url]

    def prepare(self) -> None:
        """Load the driver of the origin that a tracker has just named, if it named one."""
        if self._own is None and self._session.origin:
            self._preparing = asyncio.create_task(self._prepare(), name="prepare-origin")

    async def _prepare(self) -> None:
        """Load the driver before it is needed: all hosts that depend on the holder of a lease wait
        for it."""
        try:
            await asyncio.to_thread(import_module, "p2pdist.origin.bucket")
            self.get()
        except P2PDistError as error:
            logger.warning("the origin that the tracker names cannot be used: %s", error)

    async def close(self) -> None:
        """Close all origins."""
        for origin in (*self._named.values(), *([self._own] if self._own is not None else [])):
            await origin.close()


class RangeSource(Protocol):
    """What blobs can be read from by ranges: central storage, or an upstream registry."""

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        """`length` bytes of a blob. Raises P2PDistError."""


async def read_upstream(source: RangeSource, digest: Digest, start: int, length: int) -> bytes:
    """A range of a blob from an upstream registry. What is not that range may come once and again
    from a proxy before it; from UPSTREAM_TRIES on it is believed. Raises P2PDistError."""
    for attempt in range(1, UPSTREAM_TRIES + 1):
        try:
            data = await source.read_range(digest, start, length)
            if len(data) != length:
                raise Corrupt(f"upstream sent {len(data)} bytes of {digest} from {start} on, and not {length}")
            return data
        except Corrupt as error:
            if attempt == UPSTREAM_TRIES:
                raise
            logger.info("blob=%s is read once more: %s", digest, error)
            await asyncio.sleep(UPSTREAM_PAUSE_S * attempt)
    raise AssertionError("the last attempt raises")


class OriginReader:
    """A stream whose source is the origin: posts the events of an IncomingStream, on the event
    loop. `selection` is the part of another blob at the origin that this blob is. Each piece is
    read within `reading`, and `pause` is awaited after it, both with the piece's length in bytes.
    With `vouched` the blob has no piece list, and the reader vouches for what it reads. `pieces`
    are the only ones to read, none for all that the stripe lacks. `under_way` are the pieces that
    streams of the blob read right now: what a reader waits for has a stream of its own, beside the
    one of the stripe, and nothing is read twice. `first` says for which pieces of the stripe
    readers wait: its stream reads them before others, too, since both share the link."""

    def __init__(
        self,
        origin: RangeSource,
        blob: Blob,
        stripe: int,
        stripes: int,
        on_event: Callable[[StreamEvent], None],
        *,
        number: int,
        reading: Callable[[int], AbstractAsyncContextManager[None]],
        pause: Callable[[int], Awaitable[None]],
        selection: Selection | None = None,
        pieces: Sequence[int] = (),
        vouched: VouchedPull | None = None,
        under_way: set[int] | None = None,
        first: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self.number = number
        self.receiving: int | None = None
        """Always None: a reader has several pieces under way."""
        self._origin, self._blob = origin, blob
        self._stripe, self._stripes, self._selection = stripe, stripes, selection
        self._on_event, self._vouched, self._pieces = on_event, vouched, pieces
        self._under_way = under_way if under_way is not None else set()
        self._first = first
        self._storing_s = 0.0
        self._reading, self._pause = reading, pause
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._read_all(), name=f"origin-stripe-{self._stripe}")
        self._task.add_done_callback(self._ended)  # a task may be cancelled before it runs

    def close(self) -> None:
        """End now; StreamClosed still follows."""
        if self._task is not None:
            self._task.cancel()

    def finish_piece_and_close(self) -> None:
        """End now, as `close` does."""
        self.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._on_event(StreamClosed(self.number, "closed"))
        elif (error := task.exception()) is None:
            self._on_event(StreamClosed(self.number, "done"))
        else:
            self._on_event(self._failure(error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error))

    async def _read_all(self) -> None:
        vouched = self._vouched
        lacking = (
            self._blob.have.missing(self._stripe, self._stripes) if vouched is None else vouched.unread(self._stripe)
        )
        pieces = iter(self._pieces or lacking)
        async with asyncio.TaskGroup() as group:
            for _ in range(REQUESTS_MAX):
                group.create_task(self._read_some(pieces))

    async def _read_some(self, pieces: Iterator[int]) -> None:
        layout, vouched = self._blob.layout, self._vouched
        while (piece := self._next(pieces)) is not None:
            if vouched is None and self._comes(piece):
                continue  # by another stream
            if vouched is not None and not await vouched.is_unread(piece):
                continue
            async with self._reading(layout.length(piece)):
                if vouched is None and self._comes(piece):  # it has waited for its turn
                    continue
                self._under_way.add(piece)
                try:
                    await self._read_piece(piece)
                finally:
                    self._under_way.discard(piece)
            await self._pause(layout.length(piece))

    def _next(self, pieces: Iterator[int]) -> int | None:
        """A piece for which a reader waits, else the next one; None when there is none."""
        waited_for = (piece for piece in self._first() if not self._comes(piece)) if self._vouched is None else iter(())
        piece = next(waited_for, None)
        return piece if piece is not None else next(pieces, None)

    def _comes(self, piece: int) -> bool:
        """Whether a piece is stored or another reader is at it."""
        return piece in self._blob.have or piece in self._under_way

    async def _read_piece(self, piece: int) -> None:
        layout, vouched = self._blob.layout, self._vouched
        data = await self._read(layout.offset(piece), layout.length(piece))
        inline = vouched is None and self._blob.in_memory and len(data) <= INLINE_BYTES
        if inline and self._storing_s < INLINE_S:
            began = time.monotonic()
            self._stored(piece, self._blob.write(piece, data))
            self._storing_s = time.monotonic() - began
        else:
            await self._store_in_thread(piece, data)

    async def _store_in_thread(self, piece: int, data: bytes) -> None:
        storing = asyncio.create_task(self._store(piece, data))
        try:
            await asyncio.shield(storing)
        except asyncio.CancelledError:
            # The thread cannot be stopped, and the pull would wait for ever for a piece that is
            # stored without an event.
            await asyncio.wait([storing])
            storing.exception()  # marks it as seen: the stream has ended for another reason
            raise

    async def _read(self, offset: int, length: int) -> bytes:
        if self._vouched is not None:
            return await read_upstream(self._origin, self._blob.digest, offset, length)
        if self._selection is None:
            return await self._origin.read_range(self._blob.digest, offset, length)
        ((offset, length),) = self._selection.spans(offset, length)  # one span: it is one piece
        return await self._origin.read_range(self._selection.blob.digest, offset, length)

    async def _store(self, piece: int, data: bytes) -> None:
        loop, vouched = asyncio.get_running_loop(), self._vouched
        if vouched is None:
            self._stored(piece, await loop.run_in_executor(_storers, self._blob.write, piece, data))
            return
        statement, stored = await loop.run_in_executor(_storers, vouched.store, piece, data)
        vouched.state(statement)
        if not stored:
            raise _WrongBytes(f"piece {piece} is not what another host has read")
        self._on_event(PieceReceived(self.number, piece, True))

    def _stored(self, piece: int, ok: bool) -> None:
        self._on_event(PieceReceived(self.number, piece, ok))
        if not ok:
            raise _WrongBytes(f"piece {piece} does not match its hash")

    def _failure(self, error: BaseException) -> StreamClosed:
        match error:
            case _WrongBytes():
                return StreamClosed(self.number, "corrupt", str(error))
            case NotFound():
                return StreamClosed(self.number, "missing", error.what, error)
            case Refused() | Unsuitable():
                return StreamClosed(self.number, "refused", error.what, error)
            case Unavailable():
                return StreamClosed(self.number, "busy", error.what, error)
            case Corrupt():
                return StreamClosed(self.number, "corrupt", error.what, error)
            case P2PDistError():
                return StreamClosed(self.number, "failed", error.what, error)
        return StreamClosed(self.number, "failed", repr(error), P2PDistError(f"reading the origin failed: {error!r}"))


class _WrongBytes(Exception):
    """A piece from the origin did not verify."""
