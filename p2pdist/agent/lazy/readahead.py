"""Has what lies ahead of the readers of a lazy view come before they ask, as kernels read files
ahead.

A piece of a pack holds more than the cell for which it came, and files that lie near each other
are read one after the other. So around a miss NEAR cells either way are filled as far as their
bytes are here, and the pieces of the FIRST cells behind it are fetched: they are the first window.
Once a reader comes to the second half of a window, the next one, twice as long, follows, up to FAR
cells. A window is what lies ahead of one reader. Windows come one request after the other, behind
what readers wait for; those that have gathered meanwhile share the next one, as far as TOGETHER
cells, the latest first, for readers move on. A request costs more than a piece.

Pieces are cheap and cells are not: each is decoded, compared and written. So only the windows of
readers that read most of what they pass are filled before they get there; of others the pieces
wait in the store, and a reader waits for no other host.

What has come ahead and is not read is no more than a share of the package, or UNREAD_CELLS_MIN: a
reader that jumps about makes use of little of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from p2pdist.agent.lazy.chunks import Asked
from p2pdist.agent.lazy.filler import Filler
from p2pdist.model.errors import P2PDistError

NEAR = 24
"""Cells on either side of a miss."""

FIRST, FAR = 32, 64
"""Cells of the first window, and of the longest."""

DENSE = 0.5
"""A reader that reads this share of the cells that it passes is going to read the others."""

WINDOWS_MAX = 64
"""Windows that are known, and those that wait to be fetched; the oldest are forgotten."""

TOGETHER = 128
"""Cells of windows that are fetched with one request, unless one window has more."""

FILLS_MAX = 4
"""So often at the same time what lies around misses is filled; other misses are left without."""

UNREAD_SHARE, UNREAD_CELLS_MIN = 0.1, 2048
"""Of the cells of the device."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Window:
    """Cells that lie ahead of a reader."""

    cells: range
    fills: bool = False
    """Whether they are filled once their pieces are here."""
    reads: int = 0
    """How many of them were read."""

    def passed(self, cell: int) -> bool:
        """Note that one of them is read; returns whether the next window is due."""
        self.reads += 1
        return cell >= self.cells[len(self.cells) // 2]

    def dense(self, cell: int) -> bool:
        """Whether most of them were read, up to this one."""
        return self.reads >= DENSE * (cell - self.cells.start + 1)


class ReadAhead:
    """Serves one device, of whose readers nothing is known but what they read. On the event
    loop."""

    def __init__(self, filler: Filler) -> None:
        self._filler = filler
        self._windows: list[Window] = []
        """Of which the second half was not read yet, the latest last."""
        self._waiting: list[Window] = []
        """To be fetched, the latest last."""
        self._unread: set[int] = set()
        """Cells that have come ahead and were not read."""
        self._fetching: asyncio.Task[None] | None = None
        self._filling: set[asyncio.Task[None]] = set()

    def missed(self, cells: Collection[int]) -> None:
        """Readers had to wait for these cells, which are filled now."""
        if not cells or self._filler.layout is None:
            return
        first, last = min(cells), max(cells)
        near = self._within(first - NEAR, last + 1 + NEAR)
        if len(self._filling) < FILLS_MAX:
            around = [*range(last + 1, near.stop), *range(near.start, first)]
            task = asyncio.create_task(self._bring(around, around, "none"))
            self._filling.add(task)
            task.add_done_callback(self._filling.discard)
        if not any(last + 1 in window.cells for window in self._windows):
            self._open(Window(self._within(last + 1, last + 1 + FIRST)))

    def read(self, cells: Iterable[int]) -> None:
        """A reader reads these cells, filled or not."""
        for cell in cells:
            self._unread.discard(cell)
            for window in [window for window in self._windows if cell in window.cells]:
                if window.passed(cell):
                    self._windows.remove(window)
                    stop = window.cells.stop
                    following = self._within(stop, stop + min(2 * len(window.cells), FAR))
                    self._open(Window(following, fills=window.dense(cell)))

    def close(self) -> None:
        """Fetch and fill nothing more."""
        self._waiting.clear()
        for task in filter(None, (self._fetching, *self._filling)):
            task.cancel()

    def _every(self) -> range:
        layout = self._filler.layout
        return self._filler.device.cells.holding(0, layout.size if layout is not None else 0)

    def _within(self, first: int, end: int) -> range:
        every = self._every()
        return range(max(first, every.start), min(end, every.stop))

    def _open(self, window: Window) -> None:
        if not window.cells:
            return
        for windows in (self._windows, self._waiting):
            windows.append(window)
            del windows[:-WINDOWS_MAX]
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._fetch())

    async def _fetch(self) -> None:
        """Fetch the windows that wait, the latest first."""
        while self._waiting:
            wanted, filled = list[int](), list[int]()
            while self._waiting and (not wanted or len(wanted) + len(self._waiting[-1].cells) <= TOGETHER):
                window = self._waiting.pop()
                missing = [cell for cell in window.cells if not self._filler.has_cell(cell)]
                wanted += missing
                filled += missing if window.fills else []
            if wanted and self._take(wanted):
                await self._bring(wanted, filled, "ahead")

    def _take(self, cells: Sequence[int]) -> bool:
        """Count cells that come ahead; False where too many have and were not read."""
        if len(self._unread) > max(UNREAD_CELLS_MIN, UNREAD_SHARE * self._every().stop):
            return False
        self._unread.update(cells)
        return True

    async def _bring(self, cells: Sequence[int], filled: Sequence[int], asked: Asked) -> None:
        """Fetch these cells, and fill those."""
        try:
            blobs = await self._filler.bring([cell for cell in cells if not self._filler.has_cell(cell)], asked)
            await self._filler.fill_in_order(filled, blobs)
        except (P2PDistError, OSError) as error:
            logger.info("what lies ahead of a reader is left to the pull: %s", error)
