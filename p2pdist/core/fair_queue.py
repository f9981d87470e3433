"""The order in which those who send over one uplink take turns, and how fast they may go.

Theory. Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) on two levels, by bytes given
to the kernel: between priorities, and among those of one priority. On each level the virtual time
is the start tag of whoever had the last turn, and who begins to wait starts there, so it can
neither claim the past nor be starved. A priority's tag advances by length / share: while both wait,
preseeds get PRESEED_SHARE however many they are. A priority that waits alone gets everything.

One limit holds for all, another for preseeds alone, and each claim may have one that it shares with
others, those of its policy (bucket.py). Those whom one of the latter two holds back do not wait for
the uplink, and others take their turns. A preseed then starts at the present virtual time like
whoever comes anew; among its own a claim that was held back comes first, and its limit keeps that
short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from p2pdist.core.token_bucket import Bucket
from p2pdist.model.messages import Priority

PRESEED_SHARE = 1 / 16


@dataclass(slots=True, eq=False)
class Claim:
    """One that sends blocks in turn: the next, or the one that the kernel is taking, has `block`
    bytes, 0 when there is none. `limit` is shared by those for whom it holds together."""

    number: int
    queue: Queue
    virtual: float = 0.0
    piece: int = -1
    offset: int = 0
    block: int = 0
    in_flight: bool = False
    since: float = 0.0
    byte_s: float = 0.0
    limit: Bucket | None = None

    @property
    def free_at(self) -> float:
        """When its own limit allows its next block."""
        return self.limit.free_at if self.limit is not None else -inf


@dataclass(slots=True, eq=False)
class Queue:
    """Those of one priority that wait. `tag` is where the priority stands among the others,
    `virtual` the virtual time within it."""

    share: float
    urgent: bool
    bucket: Bucket
    tag: float = 0.0
    virtual: float = 0.0
    waiting: list[Claim] = field(default_factory=list)

    def enter(self, claim: Claim) -> None:
        """Begin to wait."""
        claim.virtual = max(claim.virtual, self.virtual)
        self.waiting.append(claim)

    def ready(self, now: float) -> list[Claim]:
        """Those that wait and are not held back. Not to be changed."""
        if now < self.bucket.free_at:
            return []
        for claim in self.waiting:
            if claim.limit is not None:
                return [claim for claim in self.waiting if now >= claim.free_at]
        return self.waiting  # as nearly always, and for every block: no copy

    def free_at(self) -> float:
        """When one that waits is not held back, infinity when nobody waits."""
        soonest = inf
        for claim in self.waiting:
            if claim.limit is None:
                return self.bucket.free_at
            soonest = min(soonest, claim.free_at)
        return max(self.bucket.free_at, soonest)


class TurnOrder:
    """See the module's text. Limits are in bytes/s, None for none."""

    __slots__ = ("_bucket", "_preseed", "_start", "_virtual", "preseeds_waiting", "starts_waiting")

    def __init__(self, limit_bytes_s: float | None, preseed_limit_bytes_s: float | None) -> None:
        self._bucket = Bucket(limit_bytes_s)
        self._start = Queue(1 - PRESEED_SHARE, True, Bucket(None))
        self._preseed = Queue(PRESEED_SHARE, False, Bucket(preseed_limit_bytes_s))
        self._virtual = 0.0
        # For every block it is asked who waits: the lists, which stay the same for good, not to be
        # changed.
        self.starts_waiting, self.preseeds_waiting = self._start.waiting, self._preseed.waiting

    def queue(self, priority: Priority) -> Queue:
        """Where those of a priority wait."""
        return self._start if priority == "start" else self._preseed

    @property
    def empty(self) -> bool:
        """Whether nobody waits."""
        return not self.starts_waiting and not self.preseeds_waiting

    def busy(self, now: float) -> bool:
        """Whether somebody could use the uplink, or waits for the limit that holds for all."""
        return bool(
            (self.starts_waiting and self._start.ready(now)) or (self.preseeds_waiting and self._preseed.ready(now))
        )

    def free_at(self, *, preseeds: bool) -> float | None:
        """When the limits allow a turn to somebody who waits, None when nobody does. Preseeds may
        have one only if `preseeds`."""
        free_at = min(self._start.free_at(), self._preseed.free_at() if preseeds else inf)
        return max(self._bucket.free_at, free_at) if free_at < inf else None

    def take(self, now: float, *, preseeds: bool) -> Claim | None:
        """Give out a turn: the claim waits no longer, and its block is paid for. None when nobody
        may have one now; preseeds may only if `preseeds`."""
        if now < self._bucket.free_at:
            return None
        queue, ready = self._start, self._start.ready(now)
        held = self._preseed.ready(now) if preseeds and self.preseeds_waiting else []
        if held and (not ready or queue.tag > self._preseed.tag):
            queue, ready = self._preseed, held
        if not ready:
            return None
        claim = min(ready, key=_by_progress) if len(ready) > 1 else ready[0]
        queue.waiting.remove(claim)
        queue.virtual = max(queue.virtual, claim.virtual)
        self._virtual = max(queue.tag, self._virtual)
        queue.tag = self._virtual + claim.block / queue.share
        queue.bucket.pay(claim.block, now)
        if claim.limit is not None:
            claim.limit.pay(claim.block, now)
        self._bucket.pay(claim.block, now)
        return claim


def _by_progress(claim: Claim) -> tuple[float, int]:
    return claim.virtual, claim.number
