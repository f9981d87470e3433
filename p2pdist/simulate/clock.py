"""Virtual time: what happens next, and the only source of chance.

Theory. A heap of (time, number, call, arguments). Whatever is due first happens first; what is due
at the same time happens in the order in which it was asked for, so a run depends on its seed alone:
not on the wall clock, not on hash seeds, not on memory addresses.

Invariants: time never goes back; nothing is planned for the past.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

Call = Callable[..., object]
_Entry = tuple[float, int, Call, tuple[Any, ...]]


class World:
    """See the module's text. `now` is in seconds; `events` is how many things have happened;
    `stopped` ends the run."""

    __slots__ = ("_asked", "_heap", "events", "now", "random", "stopped")

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.events = 0
        self.stopped = False
        self.random = Random(seed)
        self._heap: list[_Entry] = []
        self._asked = 0

    def at(self, time: float, call: Call, *arguments: Any) -> None:
        """Let `call(*arguments)` happen at `time`, or now when that is over."""
        self._asked += 1
        heappush(self._heap, (time if time > self.now else self.now, self._asked, call, arguments))

    def after(self, delay_s: float, call: Call, *arguments: Any) -> None:
        """Let `call(*arguments)` happen `delay_s` from now."""
        self._asked += 1
        heappush(self._heap, (self.now + delay_s, self._asked, call, arguments))

    def run(self, *, until: float, events_max: int) -> bool:
        """Let at most `events_max` things happen; returns False when the run is stopped, nothing is
        left, or `until` is reached."""
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
