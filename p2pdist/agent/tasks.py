"""Background tasks of one owner, which are kept until they end and whose failures are logged; and
work in threads, which cannot be stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], undo: Callable[[Result], object]) -> Result:
    """What `work` returns in a thread. When the caller is cancelled the thread goes on, and `undo`
    gets its result."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        # When the loop ends it cancels everything, and the thread's result is lost.
        working.add_done_callback(lambda done: done.cancelled() or done.exception() or undo(done.result()))
        raise


class Tasks:
    """The background tasks of one owner. `failure` is the log line for a task that fails, which is
    a defect: a task handles the failures that it expects."""

    def __init__(self, logger: logging.Logger, failure: str) -> None:
        self._logger, self._failure = logger, failure
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._running:
            task.cancel()

    async def stop(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._logger.error("%s", self._failure, exc_info=task.exception())
