"""Work on threads for callers that may be cancelled. A thread cannot be ended from outside: it
looks whether it is to stop, and a cancelled caller waits for that. Afterwards nothing is written
any more, and what the work has written can be removed."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from p2pdist.model.errors import P2PDistError

LOOK_MS = 200
"""How often a thread that waits for the reader of a pipe looks whether it is to stop, and a caller
that waits for a thread whether a signal came."""

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Stopped(P2PDistError):
    """The caller was cancelled: what is half done is of no use."""


async def stoppable(
    stopped: threading.Event, function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
) -> Result:
    """Run a function on a thread. A cancellation sets `stopped`, and waits for the function to
    end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        # A signal that comes just before the loop waits does not wake it, and Python would hear of
        # it once the thread has ended.
        while not work.done():
            await asyncio.wait([work], timeout=LOOK_MS / 1000)
        return work.result()
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise


def until(stopped: threading.Event, report: Callable[Args, None]) -> Callable[Args, None]:
    """A report of progress that raises Stopped once `stopped` is set, which ends the work that
    it reports."""

    def reported(*args: Args.args, **kwargs: Args.kwargs) -> None:
        if stopped.is_set():
            raise Stopped("the work was cancelled")
        report(*args, **kwargs)

    return reported


class PipeWriter:
    """Writes to a pipe or terminal whose reader may stand still, until `stopped` is set: then
    `write` raises Stopped. It raises OSError as write(2) does."""

    def __init__(self, descriptor: int, stopped: threading.Event) -> None:
        self._descriptor, self._stopped = descriptor, stopped
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, data: bytes) -> int:
        """Write all of it."""
        left = memoryview(data)
        while left:
            if self._stopped.is_set():
                raise Stopped("the work was cancelled")
            if self._poll.poll(LOOK_MS):  # there is room for so much at least (pipe(7))
                left = left[os.write(self._descriptor, left[: select.PIPE_BUF]) :]
        return len(data)
