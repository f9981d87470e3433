"""Traces of the starts at this host: which trace a start is prefetched by, and what it reads.

A start asks the tracker for the trace of its package and entry point, and hears whether it is to be
recorded. It is recorded from when the view is mounted until the view lacks nothing, is taken away,
or RECORD_S have passed; then the tracker gets the recording. A tracker that does not answer costs a
start nothing: it goes on without a trace.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

from p2pdist.agent.lazy.forecast import located
from p2pdist.agent.tasks import Tasks
from p2pdist.model.catalog import Pack
from p2pdist.model.device import Cells, DeviceLayout
from p2pdist.model.errors import P2PDistError
from p2pdist.model.trace import Trace, TraceBuilder, placed, read_chunks
from p2pdist.model.tree import Entry, File

RECORD_S = 600.0
CELLS_MAX = 1 << 17
"""Cells that are recorded of one start."""

FIND_S = 30.0
"""A tracker has so long to say what the trace is; the start goes on meanwhile."""

logger = logging.getLogger(__name__)


class TraceSource(Protocol):
    """Where traces are kept."""

    async def find(self, reference: str, entry: str, *, records: bool) -> tuple[Trace | None, bool]:
        """The trace of a package and entry point, if there is one, and whether this start is to be
        recorded, if it `records`. Raises P2PDistError."""

    async def state(self, reference: str, entry: str, trace: Trace) -> None:
        """Give what a start read. Raises P2PDistError."""


@dataclass(frozen=True, slots=True)
class ViewContent:
    """What a view shows: trees, bottom to top, where their contents lie in cells, and the packs
    that their catalogs list."""

    trees: Sequence[Sequence[Entry]]
    layout: DeviceLayout
    cells: Cells
    packs: Sequence[Pack]


class Start:
    """One start of a package, from its view's opening on. `records`: what it reads can be recorded,
    as that of trees. On the event loop."""

    def __init__(self, traces: Traces, reference: str, entry: str, *, records: bool = True) -> None:
        self.trace: asyncio.Future[Trace | None] = asyncio.get_running_loop().create_future()
        """Gets the trace that the start is prefetched by."""
        self.traces, self._reference, self._entry, self._records = traces, reference, entry, records
        self._read_ms: dict[int, int] | None = None
        """By cell when it was read first, in order; None while nothing is recorded."""
        self.content: ViewContent | None = None
        """What the view shows. Written by the owner once that is known by its full names, which
        what is recorded needs at its end."""
        self.late: Callable[[], Awaitable[ViewContent]] | None = None
        """Finds it where the start ends before it is known. Written by the owner. May raise
        P2PDistError."""
        self._recording = False
        """Set from when the view is mounted until the recording has ended."""
        self._mounted_at = 0.0
        self._ending: asyncio.TimerHandle | None = None

    async def find(self) -> None:
        """Ask for the trace."""
        trace, wanted = await self.traces.find(self._reference, self._entry, records=self._records)
        if wanted:
            self._read_ms = {}
        self.trace.set_result(trace)

    def mounted(self) -> None:
        """The view is mounted: the recording begins."""
        loop = asyncio.get_running_loop()
        self._mounted_at, self._recording = loop.time(), True
        self._ending = loop.call_later(RECORD_S, self.end)

    def read(self, cells: Iterable[int]) -> None:
        """A reader reads these cells, filled or not."""
        if self._read_ms is not None and self._recording:
            at_ms = self._since_ms()
            for cell in cells:
                if len(self._read_ms) < CELLS_MAX:
                    self._read_ms.setdefault(cell, at_ms)

    def end(self) -> None:
        """Nothing more is recorded; the tracker gets what was. Idempotent."""
        (read_ms, shown), self._read_ms, self.content = (self._read_ms, self.content), None, None
        self._recording = False
        if self._ending is not None:
            self._ending.cancel()
        late = self.late if shown is None else partial(_itself, shown)
        if read_ms and late is not None:
            self.traces.state(self._reference, self._entry, late, read_ms, self._since_ms())

    def _since_ms(self) -> int:
        return int(1000 * (asyncio.get_running_loop().time() - self._mounted_at))


class Traces:
    """The traces of an agent's starts, which `source` keeps."""

    def __init__(self, source: TraceSource) -> None:
        self.prefetched: Counter[str] = Counter()
        """Bytes that were "filled" ahead of readers, and "read" since, of all starts."""
        self._source = source
        self._tasks = Tasks(logger, "a trace was not given to the tracker")

    async def find(self, reference: str, entry: str, *, records: bool) -> tuple[Trace | None, bool]:
        """The trace of an entry point, None where none is known in time; and whether the start is
        to be recorded, if it `records`."""
        try:
            async with asyncio.timeout(FIND_S):
                return await self._source.find(reference, entry, records=records)
        except (P2PDistError, TimeoutError) as error:
            logger.info("%s starts without a trace: %s", reference, str(error) or "the tracker does not answer")
            return None, False

    def state(
        self,
        reference: str,
        entry: str,
        shown: Callable[[], Awaitable[ViewContent]],
        read_ms: Mapping[int, int],
        lasted_ms: int,
    ) -> None:
        """Give the tracker what a start read of what was `shown`, while the agent goes on."""
        self._tasks.spawn(self._state(reference, entry, shown, read_ms, lasted_ms))

    async def close(self) -> None:
        """The agent stops."""
        await self._tasks.stop()

    async def _state(
        self,
        reference: str,
        entry: str,
        shown: Callable[[], Awaitable[ViewContent]],
        read_ms: Mapping[int, int],
        lasted_ms: int,
    ) -> None:
        try:
            trace = await asyncio.to_thread(recorded, await shown(), read_ms, lasted_ms)
            await self._source.state(reference, entry, trace)
        except P2PDistError as error:
            logger.info("the tracker does not get the trace of %s: %s", reference, error)
        else:
            logger.info("the tracker has a trace of %s %s: %d chunks", reference, entry, trace.chunks)


async def _itself(shown: ViewContent) -> ViewContent:
    return shown


def recorded(shown: ViewContent, read_ms: Mapping[int, int], lasted_ms: int) -> Trace:
    """The trace of a start that read cells at these times, with the paths at which its contents
    are, where those of upper layers count, and with where the chunks of the cells lie in packs. In
    a thread."""
    builder = TraceBuilder()
    for chunk, at_ms in read_chunks(shown.layout, shown.cells, read_ms):
        builder.add(chunk.content, chunk.number, at_ms)
    contents = builder.contents
    paths: dict[bytes, bytes] = {}
    for entries in shown.trees:
        fresh: dict[bytes, bytes] = {}
        for entry in entries:
            if type(entry) is File and entry.content in contents:
                fresh.setdefault(entry.content, entry.path)
        paths |= fresh
    return placed(builder.trace(paths, lasted_ms), _places(shown, read_ms))


def _places(shown: ViewContent, cells: Iterable[int]) -> Iterator[tuple[str, int, int]]:
    """Pack, offset and bytes of each chunk of the cells, in their order."""
    packed, seen = located(shown.packs), set[int]()
    for chunk in chain.from_iterable(map(shown.layout.cell_chunks, cells)):
        if chunk.at not in seen and (place := packed.get(chunk.chunk)) is not None:
            seen.add(chunk.at)
            yield place[0], place[1].offset, place[1].stored
