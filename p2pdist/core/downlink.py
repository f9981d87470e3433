"""The downlink of one host: for how long a stream is not read on after each piece, so that limits
hold and preseeds give way.

Theory. A receiver cannot choose whose bytes come next; TCP shares its link about evenly among
streams. But it can stop reading one, and TCP holds that sender back. So who has received a piece
pauses until the limits are paid for it, that of preseeds too if it is one. A preseed pauses besides
until pulls that somebody waits for have received as much more as their share is larger
(turn_order.py), unless nothing came for these within IDLE_S, or it has paused for HELD_MAX_S. How
fast the link is nobody knows, so this costs preseeds their time also where it has room for both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from p2pdist.core.fair_queue import PRESEED_SHARE
from p2pdist.core.token_bucket import Bucket
from p2pdist.model.messages import Priority

BURST_S = 0.05
IDLE_S = 1.0
HELD_MAX_S = 10.0
"""A preseed reads on after so long: its sender takes a window that stays shut for 30 s for a dead
host (transfer/stream/server.py)."""

LOOK_AGAIN_S = 0.05
"""A preseed that gives way looks this often whether it may go on: nobody knows when the others will
have got their share."""


@dataclass(frozen=True, slots=True)
class Lane:
    """The downlink as those see it who share another limit besides."""

    downlink: Downlink
    bucket: Bucket

    def received(self, priority: Priority, length: int, now: float) -> float:
        """See Downlink."""
        pause_s = self.downlink.received(priority, length, now)
        self.bucket.pay(length, now)
        return max(pause_s, self.bucket.free_at - now)

    def held_s(self, priority: Priority, now: float) -> float:
        return self.downlink.held_s(priority, now)


@dataclass(slots=True)
class Downlink:
    """See the module's text."""

    limit_bytes_s: float | None = None
    preseed_limit_bytes_s: float | None = None
    _bucket: Bucket = field(init=False)
    _preseed_bucket: Bucket = field(init=False)
    _owed: float = 0.0
    _owed_since: float = 0.0
    _start_at: float = -math.inf

    def __post_init__(self) -> None:
        self._bucket = Bucket(self.limit_bytes_s, BURST_S)
        self._preseed_bucket = Bucket(self.preseed_limit_bytes_s, BURST_S)

    def received(self, priority: Priority, length: int, now: float) -> float:
        """A stream has received so many bytes; returns for how many seconds it pauses. Ask `held_s`
        then."""
        self._bucket.pay(length, now)
        free_at = self._bucket.free_at
        if priority == "start":
            self._owed = max(0.0, self._owed - length)
            self._start_at = now
            return max(0.0, free_at - now)
        self._preseed_bucket.pay(length, now)
        if not self._owed:
            self._owed_since = now
        self._owed += length * (1 / PRESEED_SHARE - 1)
        return max(free_at - now, self._preseed_bucket.free_at - now, self.held_s(priority, now))

    def held_s(self, priority: Priority, now: float) -> float:
        """For how many more seconds a stream that has paused does, 0 when it goes on: a preseed
        while others are owed their share."""
        if priority == "start" or not self._owed:
            return 0.0
        if now - self._start_at >= IDLE_S or now - self._owed_since >= HELD_MAX_S:
            self._owed = 0.0
            return 0.0
        return LOOK_AGAIN_S
