"""A limit on a rate: a token bucket that may run into debt.

Bytes pass first and are paid for afterwards; nothing more passes until the debt is paid. Invariant:
in any time t no more than limit * (t + burst_s) bytes pass, and the last ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Limits what passes to a rate."""

    limit_bytes_s: float | None
    """None for no limit."""
    burst_s: float = 0.02
    """Seconds of the rate that went unused and may be caught up, so that late timers cost
    nothing."""
    free_at: float = -math.inf
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
