"""Fills the device of a lazy view in the order of a trace, before the program reads.

Pieces come in batches, AHEAD of them at a time, as `Wanted` with `prefetch`: before what the pull
brings in the background, and behind what readers wait for. While a reader waits, the next batch is
put off for PAUSE_S at most. Cells are filled in the order of the trace, once there is a device: the
first pieces come while the view is mounted. What does not come is left to the pull.

Where the trace names the places of all this in packs (`Places`), and nothing of the package is
here, the pieces are asked for as soon as the trace is known, before it is known where contents are.
Cells that hold other chunks besides are left to readers then: they did not read them before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice

from p2pdist.agent.lazy.chunks import Fetcher
from p2pdist.agent.lazy.filler import Filler
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.model.catalog import Stored
from p2pdist.model.device import CELL_BYTES, Cells, DeviceChunk, DeviceLayout
from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.model.manifest import PACK_TYPE, Manifest
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.trace import Trace
from p2pdist.store.blobs.blob import Blob

BATCH_PIECES = 24
"""Pieces that are asked for by their places at a time, AHEAD times as many at once. Of a batch the
lowest numbers come first, whatever is read first."""

PIECES_MAX = 1 << 15
"""Pieces that a trace may name by their places, each as often as it does; what is over it comes as
without."""

BATCH_CELLS, BATCH_CELLS_MAX = 32, 128
"""Of the first batch, and at most; each has twice as many as the one before. A batch comes in about
the same time however large it is, unless the link is slow."""

AHEAD = 2
FILLS = 2
"""Batches that are filled at once: of the time that one takes a thread waits for the interpreter
more than half."""

PAUSE_S, PAUSE_STEP_S = 0.1, 0.01

logger = logging.getLogger(__name__)


def cells_of_trace(trace: Trace, layout: DeviceLayout, cells: Cells) -> Iterator[tuple[int, DeviceChunk]]:
    """The cells that hold chunks of a trace, in its order, with these chunks."""
    for span in trace.spans:
        for chunk in layout.content_chunks(trace.contents[span.content].content, span.first, span.count):
            for cell in cells.holding(chunk.at, chunk.length):
                yield cell, chunk


def batches(cells: Iterable[int]) -> Iterator[list[int]]:
    """The cells, in order, some at a time."""
    rest, count = iter(cells), BATCH_CELLS
    while batch := list(islice(rest, count)):
        yield batch
        count = min(2 * count, BATCH_CELLS_MAX)


class Places:
    """The pieces of a package's packs that a trace names by their places. On the event loop. Raises
    Corrupt for a manifest that does not say how packs are cut."""

    def __init__(self, trace: Trace, manifest: Manifest) -> None:
        packs = {part.digest: part for part in manifest.parts if part.media_type == PACK_TYPE}
        self._packs = [packs[Digest(pack)] for pack in trace.packs if pack in packs]
        self._cut: dict[Digest, tuple[PieceLayout, set[int]]] = {
            pack.digest: (pack.layout, set()) for pack in self._packs
        }
        """How packs are cut, and the numbers of these pieces."""
        self._order: dict[tuple[Digest, int], None] = {}
        named = 0
        for place in trace.places:
            pack, end = Digest(trace.packs[place.pack]), place.offset + place.length
            if pack not in self._cut or end > packs[pack].size:
                continue  # it is of another version
            layout, numbers = self._cut[pack]
            covering = layout.covering(place.offset, end)
            if (named := named + len(covering)) > PIECES_MAX:
                break
            numbers.update(covering)
            self._order.update(dict.fromkeys((pack, piece) for piece in covering))

    def hold(self, pack: Digest, stored: Stored) -> bool:
        """Whether a chunk lies in these pieces."""
        if pack not in self._cut:
            return False
        layout, numbers = self._cut[pack]
        return numbers.issuperset(layout.covering(stored.offset, stored.offset + stored.stored))

    async def bring(self, fetcher: Fetcher) -> None:
        """Have the pieces come, in order, behind what readers wait for. Raises P2PDistError."""
        found = await asyncio.gather(*(fetcher.fetch(pack, "preseed", None) for pack in self._packs))
        pulls = {blob.digest: (blob, pull) for blob, pull in found if pull is not None}
        rest = iter([place for place in self._order if place[0] in pulls])
        ahead: deque[asyncio.Task[None]] = deque()
        try:
            while batch := list(islice(rest, BATCH_PIECES)):
                ahead.append(asyncio.create_task(_demand(batch, pulls)))
                if len(ahead) == AHEAD:
                    await ahead.popleft()
            while ahead:
                await ahead.popleft()
        finally:
            for task in ahead:
                task.cancel()


async def _demand(places: Iterable[tuple[Digest, int]], pulls: Mapping[Digest, tuple[Blob, BlobPull]]) -> None:
    pieces: dict[Digest, list[int]] = {}
    for pack, piece in places:
        pieces.setdefault(pack, []).append(piece)
    with ExitStack() as holds:
        for pack in pieces:
            holds.enter_context(pulls[pack][0].held())
        await asyncio.gather(*(pulls[pack][1].demand(numbers, prefetch=True) for pack, numbers in pieces.items()))


class Prefetch:
    """Fills one device ahead of its readers, and counts which of it they read. `waiting` says
    whether a reader waits now; `total` counts the bytes of all devices, "filled" ahead and "read"
    since. On the event loop."""

    def __init__(self, filler: Filler, waiting: Callable[[], bool], total: Counter[str]) -> None:
        self.bytes = 0
        """What was filled before it was read."""
        self.bytes_packed = 0
        """Bytes in packs of what is filled so, here or not. Written by the owner."""
        self.hits = 0
        """Cells of it that were read since."""
        self._filler, self._waiting, self._total = filler, waiting, total
        self._unread: set[int] = set()
        """Cells of it that were not read so far."""

    @property
    def unread_bytes(self) -> int:
        """What was filled and not read so far."""
        return len(self._unread) * CELL_BYTES

    def read(self, cells: Iterable[int]) -> None:
        """A reader reads these."""
        found = self._unread.intersection(cells)
        self._unread -= found
        self.hits += len(found)
        self._total["read"] += len(found) * CELL_BYTES

    async def run(self, cells: Iterable[int], opened: asyncio.Event) -> None:
        """Fill these cells, in order; `opened` is set once the device can be written to. What has
        come by then waits in the store."""
        come: asyncio.Queue[tuple[list[int], Mapping[Digest, Blob]] | None] = asyncio.Queue()
        filling = asyncio.create_task(self._fill_all(come, opened))
        ahead: deque[tuple[list[int], asyncio.Task[Mapping[Digest, Blob]]]] = deque()
        try:
            for batch in batches(cell for cell in cells if not self._filler.has_cell(cell)):
                await self._pause()
                ahead.append((batch, asyncio.create_task(self._filler.bring(batch))))
                if len(ahead) == AHEAD:
                    await self._take(ahead, come)
            while ahead:
                await self._take(ahead, come)
            come.put_nowait(None)
            await filling
        finally:
            for task in (filling, *(task for _, task in ahead)):
                task.cancel()

    @staticmethod
    async def _take(
        ahead: deque[tuple[list[int], asyncio.Task[Mapping[Digest, Blob]]]],
        come: asyncio.Queue[tuple[list[int], Mapping[Digest, Blob]] | None],
    ) -> None:
        """Wait for the first of the batches that come."""
        batch, task = ahead.popleft()
        try:
            come.put_nowait((batch, await task))
        except P2PDistError as error:
            logger.info("some of a trace is left to the pull: %s", error)
        finally:
            task.cancel()

    async def _fill_all(
        self, come: asyncio.Queue[tuple[list[int], Mapping[Digest, Blob]] | None], opened: asyncio.Event
    ) -> None:
        await opened.wait()
        filling: deque[asyncio.Task[None]] = deque()
        try:
            while (batch := await come.get()) is not None:
                filling.append(asyncio.create_task(self._fill(*batch)))
                if len(filling) == FILLS:
                    await filling.popleft()
            while filling:
                await filling.popleft()
        finally:
            for task in filling:
                task.cancel()

    async def _pause(self) -> None:
        deadline = asyncio.get_running_loop().time() + PAUSE_S
        while self._waiting() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 # seldom, and not for long
            await asyncio.sleep(PAUSE_STEP_S)

    async def _fill(self, batch: Sequence[int], blobs: Mapping[Digest, Blob]) -> None:
        try:
            filled = await self._filler.fill_in_order(batch, blobs)
        except (P2PDistError, OSError) as error:
            logger.info("some of a trace is left to the pull: %s", error)
            return
        self.bytes += len(filled) * CELL_BYTES
        self._total["filled"] += len(filled) * CELL_BYTES
        self._unread.update(filled)
