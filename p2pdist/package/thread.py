"""Work on threads for callers that may be cancelled. A thread cannot be ended from outside: it
looks whether it is to stop, and a cancelled caller waits for that. Afterwards nothing is written
any more, and what the work has written can be removed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from p2pdist.model.errors import P2PDistError

Args = ParamSpec("Args")
Result = TypeVar("Result")


async def stoppable(
    stopped: threading.Event, function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
) -> Result:
    """Run a function on a thread. A cancellation sets `stopped`, and waits for the function to
    end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise


def until(stopped: threading.Event, report: Callable[Args, None]) -> Callable[Args, None]:
    """A report of progress that raises P2PDistError once `stopped` is set, which ends the work that
    it reports."""

    def reported(*args: Args.args, **kwargs: Args.kwargs) -> None:
        if stopped.is_set():
            raise P2PDistError("the work was cancelled")
        report(*args, **kwargs)

    return reported
