"""Virtual time: what happens next, and the only source of chance in a simulation.

Theory. A heap of (time, number, call, arguments). The earliest call is made first; calls for the
same time are made in the order in which they were asked for. So a run depends on its seed alone:
not on the wall clock, not on hash seeds, not on memory addresses.

Invariants: time never goes back; no call is planned for the past.

When a simulated process handles what has come for it: at once, or late while its machine is busy
or paused.

Model. Whatever comes for the process (a piece, a message, the end of a stream, room for the next
block, its own timers) waits in one queue. With a share of a processor, each entry waits for as much
longer than usual as the share is smaller, where usual is the time that a piece takes on the host's
link: a host with a tenth of a processor sends and receives at about a tenth of its rate, and
reports late. With none the process stops until it has a processor again, and then handles
all that has gathered.
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


class Processor:
    """One process's share of a processor. `usual_s` is what an entry of the queue takes usually, in
    seconds."""

    __slots__ = ("_busy_until", "_lag_s", "_usual_s", "_world")

    def __init__(self, world: World, usual_s: float) -> None:
        self._world, self._usual_s = world, usual_s
        #: What each entry waits at least, in seconds; slow_to() sets it.
        self._lag_s = 0.0
        #: When all that has come is handled, in seconds.
        self._busy_until = 0.0

    def slow_to(self, share: float, *, until: float) -> None:
        """Have this share of a processor from now on; with none, stop until `until`."""
        self._lag_s = self._usual_s * (1 / share - 1) if share else 0.0
        if not share:
            self._busy_until = max(self._busy_until, until)

    @property
    def idle(self) -> bool:
        """Whether the process handles at once what comes now."""
        return not self._lag_s and self._world.now >= self._busy_until

    def run(self, call: Call, *arguments: object) -> None:
        """Make the call when the process gets to it, after all that came before it."""
        if self.idle:
            call(*arguments)
            return
        self._busy_until = max(self._busy_until, self._world.now + self._lag_s)
        self._world.at(self._busy_until, call, *arguments)

    def then(self, call: Call, *arguments: object) -> None:
        """Make the call right after all that came before it."""
        if self._world.now < self._busy_until:
            self._world.at(self._busy_until, call, *arguments)
        else:
            call(*arguments)
