"""When a simulated process handles what has come for it: at once, or late while its machine is busy
or paused.

Model. Whatever comes for the process (a piece, a message, the end of a stream, room for the next
block, its own timers) waits in one queue. With a share of a processor, each entry waits for as much
longer than usual as the share is smaller, where usual is the time that a piece takes on the host's
link: a host with a tenth of a processor sends and receives at about a tenth of its rate, and
reports late. With none the process stops until it has a processor again, and then handles
all that has gathered.
"""

from __future__ import annotations

from p2pdist.simulate.clock import Call, World


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

    def run(self, call: Call, *arguments: object) -> None:
        """Make the call when the process gets to it, after all that came before it."""
        now = self._world.now
        if not self._lag_s and now >= self._busy_until:
            call(*arguments)
            return
        self._busy_until = max(self._busy_until, now + self._lag_s)
        self._world.at(self._busy_until, call, *arguments)

    def then(self, call: Call, *arguments: object) -> None:
        """Make the call right after all that came before it."""
        if self._world.now < self._busy_until:
            self._world.at(self._busy_until, call, *arguments)
        else:
            call(*arguments)
