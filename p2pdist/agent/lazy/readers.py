"""Those who read lazy views: serves them, and counts how long they waited and how many got an error
in the end.

A reader waits for a limit at most, then it gets EIO, and the log says why.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from p2pdist.agent.lazy.filler import Filler, keep_trying
from p2pdist.agent.lazy.images import LazyImages
from p2pdist.agent.lazy.prefetch import Prefetch
from p2pdist.agent.lazy.readahead import ReadAhead
from p2pdist.agent.lazy.traces import Start
from p2pdist.agent.tasks import Tasks
from p2pdist.model.errors import P2PDistError
from p2pdist.mount.supervisor.protocol import ANSWER, EXPIRED, FAULT, NOTICE, ORDER, READ, Notice

KEPT = 4096

logger = logging.getLogger(__name__)


class Stalls:
    """The waits of one view, or, without `whole`, of all views of an agent: a view counts towards
    `whole` as well. On the event loop."""

    def __init__(self, whole: Stalls | None = None) -> None:
        self.count = self.refused = 0
        """Readers that waited, and those of them that got an error."""
        self._whole = whole
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._observers: list[Callable[[float], None]] = []

    def observe(self, observer: Callable[[float], None]) -> None:
        """Call `observer` with the seconds of each wait that ends."""
        self._observers.append(observer)

    def add(self, seconds: float, *, refused: bool) -> None:
        """A reader waited for so long, and got its bytes unless it was `refused`."""
        self.count += 1
        self.refused += refused
        self._seconds.append(seconds)
        for observer in self._observers:
            observer(seconds)
        if self._whole is not None:
            self._whole.add(seconds, refused=refused)

    def refuse(self, count: int = 1) -> None:
        """So many readers got an error that this agent has not given."""
        self.refused += count
        if self._whole is not None:
            self._whole.refuse(count)

    def quantile(self, share: float) -> float:
        """The time, in seconds, below which this share of the last KEPT waits stayed."""
        seconds = sorted(self._seconds)
        return seconds[min(len(seconds) - 1, int(len(seconds) * share))] if seconds else 0.0


class Readers:
    """Those who read one view. `limit_s` is how long one waits for its bytes, `total` gets the
    waits of all views, `extent` returns the bytes of the device once contents can be filled in, and
    `start` hears what is read. On the event loop."""

    def __init__(
        self,
        reference: str,
        limit_s: float,
        total: Stalls,
        filler: Filler,
        images: LazyImages,
        extent: Callable[[], Awaitable[int]],
        start: Start | None,
    ) -> None:
        self.awaited: dict[int, int] = {}
        """Bytes that each waiting reader waits for, by its number."""
        self.stalls = Stalls(total)
        """The waits here."""
        self.misses = 0
        """Reads of what was missing."""
        self.trouble = "it has not come"
        """Or why the pull failed last. Written by the owner."""
        self.prefetch: Prefetch | None = None
        """Hears what is read. Written by the owner before anybody reads."""
        self.ahead = ReadAhead(filler)
        self._reference, self._limit_s, self._filler, self._images = reference, limit_s, filler, images
        self._extent, self._start = extent, start
        self._waited_at = asyncio.get_running_loop().time()
        """When one waited last, or the view was made."""
        self._told_refused = 0
        """How many refusals the supervisor has told of."""
        self._tasks = Tasks(logger, "a reader was not served")

    def note_refused(self, refused: int) -> None:
        """The supervisor tells how many readers it has refused so far."""
        self.stalls.refuse(max(0, refused - self._told_refused))
        self._told_refused = refused

    def quiet_in(self, seconds: float) -> float:
        """In how many seconds nobody will have waited for so long at the earliest; 0 or less where
        that is so."""
        last = asyncio.get_running_loop().time() if self.awaited else self._waited_at
        return last + seconds - asyncio.get_running_loop().time()

    async def listen(self, connection: socket.socket) -> None:
        """Serve readers until the supervisor has ended, or gave its place to its guard."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                notice = Notice.parse(await loop.sock_recv(connection, NOTICE.size))
            except OSError:
                return
            match notice:
                case None:
                    return
                case Notice(kind=kind, number=number, offset=offset, count=count) if kind == FAULT:
                    self._tasks.spawn(self.serve(connection, number, offset, count))
                case Notice(kind=kind, offset=offset, count=count) if kind == READ:
                    self.read(self._filler.device.cells.covering(offset, count))
                case Notice(kind=kind, number=number) if kind == EXPIRED:
                    self._told_refused += 1
                    self.stalls.refuse()
                    self.awaited.pop(number, None)

    async def serve(self, connection: socket.socket, number: int, offset: int, count: int) -> None:
        """Have what a reader waits for filled, and let it go on."""
        began = asyncio.get_running_loop().time()
        self.awaited[number] = count
        failed, refused = [self.trouble], errno.EIO
        try:
            async with asyncio.timeout(self._limit_s):
                end = min(offset + count, await self._extent())
                cells = self._filler.device.cells.covering(offset, end - offset)
                self.read(cells)
                missing = [cell for cell in cells if not self._filler.has_cell(cell)]
                self.misses += bool(missing)
                await asyncio.gather(*(keep_trying(self._filler, cell, failed) for cell in missing))
                await self._images.bring(offset, count, failed)
                self.ahead.missed(missing)
            refused = 0
        except (P2PDistError, TimeoutError) as error:
            reason = error.what if isinstance(error, P2PDistError) else failed[-1]
            waited = f"{asyncio.get_running_loop().time() - began:.1f} s, it waited for {count} bytes at {offset}"
            logger.error("a reader of %s gets EIO after %s: %s", self._reference, waited, reason)
        except Exception:
            logger.exception("a reader of %s gets EIO", self._reference)
        finally:
            self.awaited.pop(number, None)
            self._waited_at = asyncio.get_running_loop().time()
        self.stalls.add(asyncio.get_running_loop().time() - began, refused=bool(refused))
        with suppress(OSError):  # the supervisor has ended: its guard asks again
            connection.send(ORDER.pack(ANSWER, number, refused))

    def read(self, cells: range) -> None:
        """A reader reads these cells, filled or not."""
        self.ahead.read(cells)
        if self.prefetch is not None:
            self.prefetch.read(cells)
        if self._start is not None:
            self._start.read(cells)

    def close(self) -> None:
        """Serve nobody any more. Idempotent."""
        self._tasks.cancel()
        self.ahead.close()

    async def stop(self) -> None:
        """As `close`, and wait until nobody is served."""
        self.ahead.close()
        await self._tasks.stop()
