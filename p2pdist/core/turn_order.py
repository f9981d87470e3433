"""The order in which those who send over one uplink take turns, and how fast they may go.

Theory. Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) on two levels, by bytes given to the kernel: between priorities, and
among those of one priority. On each level the virtual time is the start tag of whoever had the last turn, and who begins to wait starts
there, so it can neither claim the past nor be starved. A priority's tag advances by length / share: while both wait, preseeds get
PRESEED_SHARE however many they are. A priority that waits alone gets everything.

One limit holds for all, another for preseeds alone (bucket.py). While it holds these back they do not wait for the uplink, and start at
the present virtual time like whoever comes anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pdist.core.bucket import Bucket
from p2pdist.model.messages import Priority

PRESEED_SHARE = 1 / 16


@dataclass(slots=True, eq=False)
class Claim:
    """One that sends blocks in turn: the next, or the one that the kernel is taking, has `block` bytes, 0 when there is none."""

    number: int
    queue: Queue
    virtual: float = 0.0
    piece: int = -1
    offset: int = 0
    block: int = 0
    in_flight: bool = False
    since: float = 0.0
    byte_s: float = 0.0


@dataclass(slots=True, eq=False)
class Queue:
    """Those of one priority that wait. `tag` is where the priority stands among the others, `virtual` the virtual time within it."""

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


class TurnOrder:
    """See the module's text. Limits are in bytes/s, None for none."""

    __slots__ = ("_bucket", "_preseed", "_start", "_virtual")

    def __init__(self, limit_bytes_s: float | None, preseed_limit_bytes_s: float | None) -> None:
        self._bucket = Bucket(limit_bytes_s)
        self._start = Queue(1 - PRESEED_SHARE, True, Bucket(None))
        self._preseed = Queue(PRESEED_SHARE, False, Bucket(preseed_limit_bytes_s))
        self._virtual = 0.0

    def queue(self, priority: Priority) -> Queue:
        """Where those of a priority wait."""
        return self._start if priority == "start" else self._preseed

    @property
    def empty(self) -> bool:
        """Whether nobody waits."""
        return not self._start.waiting and not self._preseed.waiting

    def busy(self, now: float) -> bool:
        """Whether somebody could use the uplink, or waits for the limit that holds for all."""
        preseed = self._preseed
        return bool(self._start.waiting) or (bool(preseed.waiting) and now >= preseed.bucket.free_at)

    def free_at(self, *, preseeds: bool) -> float | None:
        """When the limits allow a turn to somebody who waits, None when nobody does. Preseeds may have one only if `preseeds`."""
        if self._start.waiting:
            return self._bucket.free_at
        waits = preseeds and self._preseed.waiting
        return max(self._bucket.free_at, self._preseed.bucket.free_at) if waits else None

    def take(self, now: float, *, preseeds: bool) -> Claim | None:
        """Give out a turn: the claim waits no longer, and its block is paid for. None when nobody may have one now; preseeds may only if
        `preseeds`."""
        if now < self._bucket.free_at:
            return None
        queue, preseed = self._start, self._preseed
        preseeds = preseeds and bool(preseed.waiting) and now >= preseed.bucket.free_at
        if preseeds and (not queue.waiting or queue.tag > preseed.tag):
            queue = preseed
        waiting = queue.waiting
        if not waiting:
            return None
        claim = min(waiting, key=_by_progress) if len(waiting) > 1 else waiting[0]
        waiting.remove(claim)
        queue.virtual = max(queue.virtual, claim.virtual)
        self._virtual = max(queue.tag, self._virtual)
        queue.tag = self._virtual + claim.block / queue.share
        queue.bucket.pay(claim.block, now)
        self._bucket.pay(claim.block, now)
        return claim


def _by_progress(claim: Claim) -> tuple[float, int]:
    return claim.virtual, claim.number
