"""Fills the device of a lazy view in the order of a trace, before the program reads.

Pieces come in batches, AHEAD of them at a time, as `Wanted` with `prefetch`: before what the pull
brings in the background, and behind what readers wait for. While a reader waits, the next batch is
put off for PAUSE_S at most. Chunks are written in the order of the trace. What does not come is left
to the pull.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from p2pdist.agent.lazy.filler import Filler
from p2pdist.model.device import DeviceChunk, DeviceLayout
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.model.trace import Trace
from p2pdist.store.blobs.blob import Blob

BATCH_BYTES = 2 << 20
BATCH_CHUNKS_MAX = 256
AHEAD = 2
PAUSE_S, PAUSE_STEP_S = 0.1, 0.01

logger = logging.getLogger(__name__)


def chunks_of(trace: Trace, layout: DeviceLayout) -> Iterator[DeviceChunk]:
    """The chunks of a trace that the device has, in its order."""
    for span in trace.spans:
        yield from layout.content_chunks(trace.contents[span.content].content, span.first, span.count)


def batches(chunks: Iterable[DeviceChunk]) -> Iterator[list[DeviceChunk]]:
    """The chunks, in order, in batches of about BATCH_BYTES."""
    batch: list[DeviceChunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += chunk.length
        if size >= BATCH_BYTES or len(batch) == BATCH_CHUNKS_MAX:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Prefetch:
    """Fills one device ahead of its readers, and counts which of it they read. `waiting` says
    whether a reader waits now. On the event loop."""

    def __init__(self, filler: Filler, waiting: Callable[[], bool]) -> None:
        self.bytes = 0
        """What was filled before it was read."""
        self.hits = 0
        """Chunks of it that were read since."""
        self._filler, self._waiting = filler, waiting
        self._unread: dict[int, int] = {}
        """Bytes of the chunks that were not read so far, by where they are in the device."""

    @property
    def unread_bytes(self) -> int:
        """What was filled and not read so far."""
        return sum(self._unread.values())

    def read(self, chunks: Iterable[DeviceChunk]) -> None:
        """A reader reads these."""
        for chunk in chunks:
            if self._unread.pop(chunk.at, None) is not None:
                self.hits += 1

    async def run(self, chunks: Iterable[DeviceChunk], opened: asyncio.Event) -> None:
        """Fill these chunks, in order; `opened` is set once the device can be written to."""
        ahead: deque[tuple[list[DeviceChunk], asyncio.Task[Mapping[Digest, Blob]]]] = deque()
        try:
            for batch in batches(chunk for chunk in chunks if not self._filler.has(chunk)):
                await self._pause()
                ahead.append((batch, asyncio.create_task(self._filler.bring(batch))))
                if len(ahead) == AHEAD:
                    await self._fill(*ahead.popleft(), opened)
            while ahead:
                await self._fill(*ahead.popleft(), opened)
        finally:
            for _, task in ahead:
                task.cancel()

    async def _pause(self) -> None:
        deadline = asyncio.get_running_loop().time() + PAUSE_S
        while self._waiting() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(PAUSE_STEP_S)

    async def _fill(
        self, batch: Sequence[DeviceChunk], coming: asyncio.Task[Mapping[Digest, Blob]], opened: asyncio.Event
    ) -> None:
        try:
            blobs = await coming
            await opened.wait()
            for chunk in await self._filler.fill_in_order(batch, blobs):
                self.bytes += chunk.length
                self._unread[chunk.at] = chunk.length
        except (P2PDistError, OSError) as error:
            logger.info("some of a trace is left to the pull: %s", error)
