"""The downlink of one host: how long a stream pauses after each piece, so that limits hold and
preseeds give way.

Theory. A receiver cannot choose which sender's bytes come next; TCP shares its link about evenly
among streams. But it can stop reading a stream, and TCP holds that sender back. So a stream that
has received a piece pauses until the limits are paid for it, that of preseeds too if it is one. A
preseed also pauses until starts have received as much more as their share is larger
(PRESEED_SHARE), unless nothing came for starts within IDLE_S, or it has paused for HELD_MAX_S. The
speed of the link is unknown, so preseeds lose time also where it has room for both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from p2pdist.core.fair_queue import PRESEED_SHARE, TokenBucket
from p2pdist.model.messages import Priority

BURST_S = 0.05
IDLE_S = 1.0
HELD_MAX_S = 10.0
"""A preseed reads on after so long: its sender takes a window that stays shut for 30 s for a dead
host (transfer/stream/server.py)."""

LOOK_AGAIN_S = 0.05
"""How often a preseed that gives way looks whether it may go on: when starts will have received
their share is unknown."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A downlink as the streams of one policy see it, which share another limit."""

    downlink: Downlink
    tokens: TokenBucket

    def received(self, priority: Priority, length: int, now: float) -> float:
        """Account for a piece of a stream; returns for how many seconds the stream pauses."""
        pause_s = self.downlink.received(priority, length, now)
        self.tokens.pay(length, now)
        return max(pause_s, self.tokens.free_at - now)

    def held_s(self, priority: Priority, now: float) -> float:
        """For how many more seconds a stream that has paused does, 0 when it goes on."""
        return self.downlink.held_s(priority, now)


@dataclass(slots=True)
class Downlink:
    """Says how long streams pause; with limits in bytes/s, None for none."""

    limit_bytes_s: float | None = None
    preseed_limit_bytes_s: float | None = None
    _tokens: TokenBucket = field(init=False)
    _preseed_tokens: TokenBucket = field(init=False)
    _owed: float = 0.0
    """Bytes that starts are to receive before preseeds go on (`received`)."""
    _owed_since: float = 0.0
    _start_at: float = -math.inf
    """When a start received something last."""

    def __post_init__(self) -> None:
        self._tokens = TokenBucket(self.limit_bytes_s, BURST_S)
        self._preseed_tokens = TokenBucket(self.preseed_limit_bytes_s, BURST_S)

    def received(self, priority: Priority, length: int, now: float) -> float:
        """Account for `length` bytes of a stream; returns for how many seconds the stream pauses.
        Ask `held_s` then."""
        self._tokens.pay(length, now)
        free_at = self._tokens.free_at
        if priority == "start":
            self._owed = max(0.0, self._owed - length)
            self._start_at = now
            return max(0.0, free_at - now)
        self._preseed_tokens.pay(length, now)
        if not self._owed:
            self._owed_since = now
        self._owed += length * (1 / PRESEED_SHARE - 1)
        return max(free_at - now, self._preseed_tokens.free_at - now, self.held_s(priority, now))

    def held_s(self, priority: Priority, now: float) -> float:
        """For how many more seconds a stream that has paused does, 0 when it goes on: a preseed
        while starts are owed their share."""
        if priority == "start" or not self._owed:
            return 0.0
        if now - self._start_at >= IDLE_S or now - self._owed_since >= HELD_MAX_S:
            self._owed = 0.0
            return 0.0
        return LOOK_AGAIN_S
