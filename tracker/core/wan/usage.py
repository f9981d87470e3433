"""Usage of a WAN: what came to one site over it within the last hour, and whether more may come.

Theory. An hour is any stretch of HOUR_S, not one of the clock, so that two hours' budgets cannot
pass within minutes. Bytes are kept by the minute and are forgotten an hour later, a minute at a
time. A site that has used up its budget goes on once a twentieth of it is free: else its imports
would begin and end with every minute that is forgotten.

Usage is soft: a tracker that starts knows nothing of the hour before. Each of several trackers
has its part of the budget, and counts of its own (Handover.fraction).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tracker.core.policy.budget import HOUR_S, SiteBudget

MINUTE_S = 60.0
FREE_SHARE = 0.05
"""So much of an hour's budget must be free again before a site that has used it up goes on."""


@dataclass(slots=True)
class Usage:
    """Of one site. Times only grow."""

    total: int = 0
    """Bytes since the tracker began to count; a metric. `count`."""
    spent: bool = False
    """Whether the hour's budget is used up. `refusal`."""
    _minutes: deque[tuple[float, int]] = field(default_factory=deque)
    """Bytes by the minute in which they came, the oldest first. `count`, `used`."""
    _used: int = 0
    """Their sum."""

    def count(self, length: int, *, now: float) -> None:
        """So many bytes have come."""
        minute = now // MINUTE_S
        before = self._minutes.pop()[1] if self._minutes and self._minutes[-1][0] == minute else 0
        self._minutes.append((minute, before + length))
        self._used += length
        self.total += length

    def used(self, *, now: float) -> int:
        """Bytes of the last hour."""
        while self._minutes and self._minutes[0][0] * MINUTE_S <= now - HOUR_S:
            self._used -= self._minutes.popleft()[1]
        return self._used

    def refusal(self, budget: SiteBudget, fraction: float, *, now: float, utc_s: float) -> str:
        """Why nothing more may come now, in words for people; empty where it may. `fraction`: the
        part of the budget that is this tracker's; `utc_s`: the time of day, in seconds since the
        epoch."""
        hourly = budget.hourly_bytes
        if hourly is not None:
            used, allowed = self.used(now=now), hourly * fraction
            self.spent = used >= allowed or (self.spent and used > (1 - FREE_SHARE) * allowed)
        if not budget.open_at(utc_s):
            return f"its WAN is for {', '.join(map(str, budget.hours))} UTC"
        if hourly is not None and self.spent:
            return f"it has used its {_size(hourly)} of the last hour"
        return ""


def _size(count: int) -> str:
    """Bytes for people, as budgets are written."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
