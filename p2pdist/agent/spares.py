"""Tells the tracker which packs this host need not fetch, though it may not hold them: their
contents stand here in trees that are whole.

The tracker counts them as present when it ranks hosts. The store knows them (`Trees.spare`) and is
asked every LOOK_S, in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.model.messages import BLOBS_PER_MESSAGE_MAX, Spares

LOOK_S = 2.0

_logger = logging.getLogger(__name__)


class SparePacks:
    """`find` gives what is spare now and may block; `send` says something to the tracker, if one
    answers."""

    def __init__(self, find: Callable[[], set[Digest]], send: Callable[[Spares], None]) -> None:
        self._find, self._send = find, send
        self._said: set[Digest] = set()
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def connected(self) -> None:
        """A tracker answers, and knows nothing yet."""
        self._said = set()
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="spare-packs")

    async def stop(self) -> None:
        """Say no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._wanted.clear()
            try:
                self._tell(await asyncio.to_thread(self._find))
            except P2PDistError as error:
                _logger.warning("which packs are spare cannot be told: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wanted.wait()

    def _tell(self, found: set[Digest]) -> None:
        if self._wanted.is_set() or found == self._said:  # another tracker answers by now, and is told at once
            return
        self._said = found
        blobs = sorted(found)
        for start in range(0, max(1, len(blobs)), BLOBS_PER_MESSAGE_MAX):
            self._send(Spares(tuple(blobs[start : start + BLOBS_PER_MESSAGE_MAX]), more=start > 0))
