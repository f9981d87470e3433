"""Pace: how often agents are to report.

Reports are most of what a tracker hears, and the sooner they come the sooner it sees who holds others up. So a small fleet reports often,
and a large one as often as a fifth of a core can take; those around a complaint report often in any fleet (close_watch.py).
"""

from __future__ import annotations

SHORTEST_S = 0.25
REPORTS_PER_S = 4000
"""At about 50 us each."""


def report_interval_s(hosts: int, shortest_s: float = SHORTEST_S) -> float:
    """Seconds between two reports of a host in a fleet of so many: up to a thousand `shortest_s` of 0.25, at ten thousand 2.5."""
    return max(shortest_s, hosts / REPORTS_PER_S)
