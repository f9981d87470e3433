"""A limit on a rate: a bucket of tokens that may owe.

What goes through is paid for afterwards, and nothing more goes until the debt is paid. Invariant:
in any time t no more than limit * (t + burst_s) bytes go through, and what went last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Bucket:
    """`limit_bytes_s`, None for no limit. `burst_s`: how much of it, unused a moment ago, may be
    caught up, so that late timers cost nothing. `free_at` is when the next may go."""

    limit_bytes_s: float | None
    burst_s: float = 0.02
    free_at: float = -math.inf

    def take(self, length: int, now: float) -> float:
        """So many bytes go through once the debt is paid: in how many seconds."""
        due = self.free_at
        self.pay(length, now)
        return max(0.0, due - now)

    def pay(self, length: int, now: float) -> None:
        """So many bytes go through now."""
        if self.limit_bytes_s is not None:
            self.free_at = max(self.free_at, now - self.burst_s) + length / self.limit_bytes_s
