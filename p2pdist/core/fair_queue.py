"""The fair queue of one uplink: which flow sends the next block, and how fast flows may send.

Theory. Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) on two levels, by bytes given
to the kernel: between priorities, and among the flows of one priority. On each level the virtual
time is the start tag of the flow that was served last, and a flow that begins to wait starts there,
so it can neither claim the past nor be starved. A priority's tag advances by length / share: while
both wait, preseeds get PRESEED_SHARE however many they are. A priority that waits alone gets
everything.

One limit holds for all flows, another for preseeds alone, and each flow may have one that it shares
with the other flows of its policy (TokenBucket). A flow that one of the latter two holds back
does not wait for the uplink, and other flows are served. A preseed then starts at the present
virtual time like a new flow; among preseeds a flow that was held back comes first, and its limit
keeps that short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from p2pdist.model.messages import Priority

PRESEED_SHARE = 1 / 16


@dataclass(slots=True)
class TokenBucket:
    """Limits what passes to a rate, and may run into debt: bytes pass first and are paid for
    afterwards, and nothing more passes until the debt is paid. In any time t no more than limit *
    (t + burst_s) bytes pass, and the last ones."""

    limit_bytes_s: float | None
    """None for no limit."""
    burst_s: float = 0.02
    """Seconds of the rate that went unused and may be caught up, so that late timers cost
    nothing."""
    free_at: float = -inf
    """When the next bytes may pass (`pay`)."""

    def take(self, length: int, now: float) -> float:
        """Let `length` bytes pass once the debt is paid; returns in how many seconds that is."""
        due = self.free_at
        self.pay(length, now)
        return max(0.0, due - now)

    def pay(self, length: int, now: float) -> None:
        """Let `length` bytes pass now."""
        if self.limit_bytes_s is not None:
            self.free_at = max(self.free_at, now - self.burst_s) + length / self.limit_bytes_s


@dataclass(slots=True, eq=False)
class Flow:
    """A sender of blocks, one at a time."""

    number: int
    queue: Queue
    virtual: float = 0.0
    """Its start tag: bytes of virtual time within the priority."""
    piece: int = -1
    offset: int = 0
    block: int = 0
    """Bytes of the next block, or of the one that the kernel is taking; 0 when there is none."""
    in_flight: bool = False
    """The kernel is taking the block."""
    since: float = 0.0
    """When the block was given to the kernel."""
    byte_s: float = 0.0
    """How long the kernel takes for a byte, smoothed."""
    limit: TokenBucket | None = None
    """Shared with the other flows of its policy."""

    @property
    def free_at(self) -> float:
        """When its own limit allows its next block."""
        return self.limit.free_at if self.limit is not None else -inf


@dataclass(slots=True, eq=False)
class Queue:
    """The flows of one priority that wait."""

    share: float
    """Its part of the uplink while both priorities wait."""
    urgent: bool
    tokens: TokenBucket
    tag: float = 0.0
    """The start tag of the priority among priorities."""
    virtual: float = 0.0
    """The virtual time within the priority."""
    waiting: list[Flow] = field(default_factory=list)

    def enter(self, flow: Flow) -> None:
        """Begin to wait."""
        flow.virtual = max(flow.virtual, self.virtual)
        self.waiting.append(flow)

    def ready(self, now: float) -> list[Flow]:
        """The flows that wait and are not held back. Not to be changed."""
        if now < self.tokens.free_at:
            return []
        for flow in self.waiting:
            if flow.limit is not None:
                return [flow for flow in self.waiting if now >= flow.free_at]
        return self.waiting  # as nearly always, and for every block: no copy

    def free_at(self) -> float:
        """When a flow that waits is not held back, infinity when none waits."""
        soonest = inf
        for flow in self.waiting:
            if flow.limit is None:
                return self.tokens.free_at
            soonest = min(soonest, flow.free_at)
        return max(self.tokens.free_at, soonest)


class FairQueue:
    """All flows of an uplink. Limits are in bytes/s, None for none."""

    __slots__ = ("_preseed", "_start", "_tokens", "_virtual", "preseeds_waiting", "starts_waiting")

    def __init__(self, limit_bytes_s: float | None, preseed_limit_bytes_s: float | None) -> None:
        self._tokens = TokenBucket(limit_bytes_s)
        self._start = Queue(1 - PRESEED_SHARE, True, TokenBucket(None))
        self._preseed = Queue(PRESEED_SHARE, False, TokenBucket(preseed_limit_bytes_s))
        self._virtual = 0.0
        # Read for every block: the queues' own lists, which stay the same for good, not to be
        # changed.
        self.starts_waiting, self.preseeds_waiting = self._start.waiting, self._preseed.waiting

    def queue(self, priority: Priority) -> Queue:
        """Where the flows of a priority wait."""
        return self._start if priority == "start" else self._preseed

    @property
    def empty(self) -> bool:
        """Whether no flow waits."""
        return not self.starts_waiting and not self.preseeds_waiting

    def busy(self, now: float) -> bool:
        """Whether a flow could use the uplink, or waits for the limit that holds for all."""
        return bool(
            (self.starts_waiting and self._start.ready(now)) or (self.preseeds_waiting and self._preseed.ready(now))
        )

    def free_at(self, *, preseeds: bool) -> float | None:
        """When the limits allow a flow that waits its block, None when none waits. Preseeds count
        only if `preseeds`."""
        free_at = min(self._start.free_at(), self._preseed.free_at() if preseeds else inf)
        return max(self._tokens.free_at, free_at) if free_at < inf else None

    def next_flow(self, now: float, *, preseeds: bool) -> Flow | None:
        """The flow that sends its block now: it waits no longer, and the block is paid for. None
        when no flow may send; preseeds may only if `preseeds`."""
        if now < self._tokens.free_at:
            return None
        queue, ready = self._start, self._start.ready(now)
        held = self._preseed.ready(now) if preseeds and self.preseeds_waiting else []
        if held and (not ready or queue.tag > self._preseed.tag):
            queue, ready = self._preseed, held
        if not ready:
            return None
        flow = min(ready, key=_by_progress) if len(ready) > 1 else ready[0]
        queue.waiting.remove(flow)
        queue.virtual = max(queue.virtual, flow.virtual)
        self._virtual = max(queue.tag, self._virtual)
        queue.tag = self._virtual + flow.block / queue.share
        queue.tokens.pay(flow.block, now)
        if flow.limit is not None:
            flow.limit.pay(flow.block, now)
        self._tokens.pay(flow.block, now)
        return flow


def _by_progress(flow: Flow) -> tuple[float, int]:
    return flow.virtual, flow.number
