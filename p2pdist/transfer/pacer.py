"""Holds back what a host receives, as its downlink decides: a stream that received a piece reads no
further for a while, and TCP holds the sender back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol

from p2pdist.model.messages import Priority


class Downlink(Protocol):
    """Decides for how many seconds a receiver pauses (p2pdist/core/downlink.py)."""

    def received(self, priority: Priority, length: int, now: float) -> float: ...
    def held_s(self, priority: Priority, now: float) -> float: ...


class Pacer:
    """Shared by all receivers of a host: each reports what it received and then pauses.
    Thread-safe."""

    def __init__(self, downlink: Downlink, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._downlink, self._clock = downlink, clock
        self._lock = threading.Lock()

    def beside(self, downlink: Downlink) -> Pacer:
        """A pacer with another view of the same downlink, under the same lock."""
        other = Pacer(downlink, clock=self._clock)
        other._lock = self._lock
        return other

    def received(self, priority: Priority, length: int) -> float:
        """Report `length` received bytes; returns the seconds to pause."""
        with self._lock:
            return self._downlink.received(priority, length, self._clock())

    def holds_preseeds(self) -> bool:
        """Whether preseeds pause now until starts have received their share."""
        return self._held_s("preseed") > 0

    def _held_s(self, priority: Priority) -> float:
        with self._lock:
            return self._downlink.held_s(priority, self._clock())

    def wait(self, priority: Priority, pause_s: float, woken: threading.Event) -> None:
        """Pause in a thread for `pause_s`, and longer as the downlink decides; ends when `woken` is
        set."""
        while pause_s and not woken.wait(pause_s):
            pause_s = self._held_s(priority)

    async def sleep(self, priority: Priority, pause_s: float, woken: asyncio.Event) -> None:
        """Pause on the event loop for `pause_s`, and longer as the downlink decides; ends when
        `woken` is set."""
        while pause_s and not woken.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await woken.wait()
            pause_s = self._held_s(priority)
