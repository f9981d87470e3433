"""Virtual time: what happens next, and the only source of chance in a simulation.

Theory. A heap of (time, number, call, arguments). The earliest call is made first; calls for the
same time are made in the order in which they were asked for. So a run depends on its seed alone:
not on the wall clock, not on hash seeds, not on memory addresses.

Invariants: time never goes back; no call is planned for the past.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

Call = Callable[..., object]
_Entry = tuple[float, int, Call, tuple[Any, ...]]


class World:
    """A virtual clock with the calls that are due."""

    __slots__ = ("_asked", "_heap", "events", "now", "random", "stopped")

    def __init__(self, seed: int) -> None:
        #: Time in seconds.
        self.now = 0.0
        #: How many calls have been made.
        self.events = 0
        #: Set from outside to end a run.
        self.stopped = False
        self.random = Random(seed)
        self._heap: list[_Entry] = []
        #: How many calls have been asked for: the number of the last.
        self._asked = 0

    def at(self, time: float, call: Call, *arguments: Any) -> None:
        """Make the call `call(*arguments)` at `time`, or now when that is past."""
        self._asked += 1
        heappush(self._heap, (time if time > self.now else self.now, self._asked, call, arguments))

    def after(self, delay_s: float, call: Call, *arguments: Any) -> None:
        """Make the call `call(*arguments)` in `delay_s` seconds."""
        self._asked += 1
        heappush(self._heap, (self.now + delay_s, self._asked, call, arguments))

    def run(self, *, until: float, events_max: int) -> bool:
        """Make at most `events_max` calls; returns False when the run is stopped, none is left, or
        the time `until` is reached."""
        heap, pop = self._heap, heappop
        for _ in range(events_max):
            if self.stopped or not heap:
                return False
            if heap[0][0] > until:
                self.now = until
                return False
            self.now, _number, call, arguments = pop(heap)
            self.events += 1
            call(*arguments)
        return True
