"""Traces of the starts at this host: which trace a start is prefetched by, and what it reads.

A start asks the tracker for the trace of its package and entry point, and hears whether it is to be
recorded. It is recorded from when the view is mounted until the view lacks nothing, is taken away,
or RECORD_S have passed; then the tracker gets the recording. A tracker that does not answer costs a
start nothing: it goes on without a trace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from p2pdist.agent.tasks import Tasks
from p2pdist.model.device import DeviceChunk
from p2pdist.model.errors import P2PDistError
from p2pdist.model.trace import Trace, TraceBuilder
from p2pdist.model.tree import Entry, File

RECORD_S = 600.0
FIND_S = 5.0
"""A tracker has so long to say what the trace is."""

logger = logging.getLogger(__name__)


class TraceSource(Protocol):
    """Where traces are kept."""

    async def find(self, reference: str, entry: str) -> tuple[Trace | None, bool]:
        """The trace of a package and entry point, if there is one, and whether this start is to be
        recorded. Raises P2PDistError."""

    async def state(self, reference: str, entry: str, trace: Trace) -> None:
        """Give what a start read. Raises P2PDistError."""


class Start:
    """One start of a package, from its view's opening on. On the event loop."""

    def __init__(self, traces: Traces, reference: str, entry: str) -> None:
        self.trace: asyncio.Future[Trace | None] = asyncio.get_running_loop().create_future()
        """Gets the trace that the start is prefetched by."""
        self._traces, self._reference, self._entry = traces, reference, entry
        self._recorded: TraceBuilder | None = None
        """What was read so far; None while nothing is recorded."""
        self._mounted_at = 0.0
        self._trees: Sequence[Sequence[Entry]] = ()
        """The package's, once the view is mounted."""
        self._ending: asyncio.TimerHandle | None = None

    async def find(self) -> None:
        """Ask for the trace."""
        trace, wanted = await self._traces.find(self._reference, self._entry)
        if wanted:
            self._recorded = TraceBuilder()
        self.trace.set_result(trace)

    def mounted(self, trees: Sequence[Sequence[Entry]]) -> None:
        """The view of these trees, bottom to top, is mounted: the recording begins."""
        loop = asyncio.get_running_loop()
        self._mounted_at, self._trees = loop.time(), trees
        self._ending = loop.call_later(RECORD_S, self.end)

    def read(self, chunks: Iterable[DeviceChunk]) -> None:
        """A reader reads these chunks, filled or not."""
        at_s = asyncio.get_running_loop().time() - self._mounted_at
        if self._recorded is not None and self._ending is not None:
            for chunk in chunks:
                self._recorded.add(chunk.content, chunk.number, int(1000 * at_s))

    def end(self) -> None:
        """Nothing more is recorded; the tracker gets what was. Idempotent."""
        recorded, self._recorded = self._recorded, None
        if self._ending is not None:
            self._ending.cancel()
        if recorded is not None and recorded.chunks:
            lasted_s = min(RECORD_S, asyncio.get_running_loop().time() - self._mounted_at)
            self._traces.state(self._reference, self._entry, recorded, int(1000 * lasted_s), self._trees)


class Traces:
    """The traces of an agent's starts. `source` is None where no tracker keeps any."""

    def __init__(self, source: TraceSource | None) -> None:
        self._source = source
        self._tasks = Tasks(logger, "a trace was not given to the tracker")

    async def find(self, reference: str, entry: str) -> tuple[Trace | None, bool]:
        """The trace of an entry point, None where none is known in time; and whether the start is
        to be recorded."""
        if self._source is None:
            return None, False
        try:
            return await asyncio.wait_for(self._source.find(reference, entry), FIND_S)
        except (P2PDistError, TimeoutError) as error:
            logger.info("%s starts without a trace: %s", reference, str(error) or "the tracker does not answer")
            return None, False

    def state(
        self, reference: str, entry: str, recorded: TraceBuilder, lasted_ms: int, trees: Sequence[Sequence[Entry]]
    ) -> None:
        """Give the tracker what a start read, while the agent goes on."""
        self._tasks.spawn(self._state(reference, entry, recorded, lasted_ms, trees))

    async def close(self) -> None:
        """The agent stops."""
        await self._tasks.stop()

    async def _state(
        self, reference: str, entry: str, recorded: TraceBuilder, lasted_ms: int, trees: Sequence[Sequence[Entry]]
    ) -> None:
        if self._source is None:
            return
        trace = await asyncio.to_thread(_finished, recorded, lasted_ms, trees)
        try:
            await self._source.state(reference, entry, trace)
        except P2PDistError as error:
            logger.info("the tracker does not get the trace of %s: %s", reference, error)
        else:
            logger.info("the tracker has a trace of %s %s: %d chunks", reference, entry, trace.chunks)


def _finished(recorded: TraceBuilder, lasted_ms: int, trees: Sequence[Sequence[Entry]]) -> Trace:
    """The recording, with the paths at which its contents are; those of upper layers count. In a
    thread."""
    contents = recorded.contents
    paths: dict[bytes, bytes] = {}
    for entries in trees:
        fresh: dict[bytes, bytes] = {}
        for entry in entries:
            if type(entry) is File and entry.content in contents:
                fresh.setdefault(entry.content, entry.path)
        paths |= fresh
    return recorded.trace(paths, lasted_ms)
