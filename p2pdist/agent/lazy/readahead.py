"""Fills a lazy view behind what its readers wait for, as kernels read files ahead.

A piece of a pack holds more than the cell for which it came, and files that lie near each other
are read one after the other. So around a miss NEAR cells either way are filled as far as their
bytes are here: nothing is fetched for them. Those behind it are the first window. Once a reader
comes to the middle of a window, the next one, twice as long, is fetched and filled, up to FAR
cells. A window is what lies ahead of one reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence

from p2pdist.agent.lazy.chunks import Asked
from p2pdist.agent.lazy.filler import Filler
from p2pdist.model.errors import P2PDistError

NEAR, FAR = 12, 64
"""Cells of the first window, and of the longest."""

WINDOWS_MAX = 256
"""Windows that are known; the oldest is forgotten."""

AT_ONCE = 4
"""Windows that are filled at the same time; others are left to misses."""

logger = logging.getLogger(__name__)


class ReadAhead:
    """Fills one device ahead of readers of whom nothing is known but what they read. On the event
    loop."""

    def __init__(self, filler: Filler) -> None:
        self.fetches = True
        """Whether pieces are fetched for what lies ahead: not while a trace says what is read next.
        Written by the owner."""
        self._filler = filler
        self._windows: dict[int, range] = {}
        """By the cell in its middle each window of which that was not read yet, the latest last."""
        self._tasks: set[asyncio.Task[None]] = set()

    def missed(self, cells: Collection[int]) -> None:
        """Readers had to wait for these cells, which are filled now."""
        if cells:
            before = range(max(0, min(cells) - NEAR), min(cells))
            self._open(max(cells) + 1, NEAR, "none", before)

    def read(self, cells: Iterable[int]) -> None:
        """A reader reads these cells, filled or not."""
        for cell in cells:
            window = self._windows.pop(cell, None)
            if window is not None:
                self._open(window.stop, min(2 * len(window), FAR), "ahead" if self.fetches else "none")

    def close(self) -> None:
        """Fill nothing more."""
        for task in self._tasks:
            task.cancel()

    def _open(self, first: int, count: int, asked: Asked, before: range = range(0)) -> None:
        layout = self._filler.layout
        if layout is None or len(self._tasks) >= AT_ONCE:
            return
        cells = self._filler.device.cells.holding(0, layout.size)
        window = range(min(first, cells.stop), min(first + count, cells.stop))
        if window:
            self._windows[window[len(window) // 2]] = window
            if len(self._windows) > WINDOWS_MAX:
                del self._windows[next(iter(self._windows))]
        missing = [cell for cell in (*window, *before) if not self._filler.has_cell(cell)]
        if missing:
            task = asyncio.create_task(self._fill(missing, asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _fill(self, cells: Sequence[int], asked: Asked) -> None:
        try:
            await self._filler.fill_in_order(cells, await self._filler.bring(cells, asked))
        except (P2PDistError, OSError) as error:
            logger.info("what lies ahead of a reader is left to the pull: %s", error)
