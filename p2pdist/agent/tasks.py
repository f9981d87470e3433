"""Tasks that one owner has under way beside itself: each is kept until it ends, and what it fails
with is logged. And work in threads, which nobody can stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], undo: Callable[[Result], object]) -> Result:
    """What `work` returns in a thread. When this is cancelled the thread goes on; `undo` gets what
    it returns then."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        # When the loop ends it cancels everything, and nobody learns what the thread returns.
        working.add_done_callback(lambda done: done.cancelled() or done.exception() or undo(done.result()))
        raise


class Tasks:
    """`failure` is what a log line says of a task that fails, which is a defect: expected failures
    are for the task to deal with."""

    def __init__(self, logger: logging.Logger, failure: str) -> None:
        self._logger, self._failure = logger, failure
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """All of them are to end."""
        for task in self._running:
            task.cancel()

    async def stop(self) -> None:
        """Cancel them, and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._logger.error("%s", self._failure, exc_info=task.exception())
