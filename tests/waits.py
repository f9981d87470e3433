"""Waiting for what another task, thread or process does. The limit is for what never happens: no
test may pass or fail by how soon something does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

LIMIT_S = 60.0
LOOK_S = 0.005


async def until(condition: Callable[[], object], what: str = "it", *, within_s: float = LIMIT_S) -> None:
    """Let the event loop go on until something holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(LOOK_S)


def wait_until(condition: Callable[[], object], what: str = "it", *, within_s: float = LIMIT_S) -> None:
    """Block this thread until something holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(LOOK_S)


class LoopClock:
    """The clock of the running event loop, which a test puts forward instead of waiting: timers
    that are due by then run at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0.0
        loop = asyncio.get_running_loop()
        time_of_loop = loop.time
        monkeypatch.setattr(loop, "time", lambda: time_of_loop() + self._ahead_s)

    def put_forward(self, seconds: float) -> None:
        """Let so much time pass at once."""
        self._ahead_s += seconds
