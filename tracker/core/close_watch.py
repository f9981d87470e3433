"""Close watch: a few hosts report often for a while, because one of them complained.

In a large fleet hosts report seldom, and what goes wrong would be seen late. So a host complains when a stripe stands still or lags, and
then it, its parent and its sisters are asked to report every CLOSE_S for WATCH_S. Whoever does not is away. Who begins to read from the
origin is watched as well: everybody depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

CLOSE_S = 0.25
SELDOM_S = 0.4
"""Hosts that report more often than this are not watched: it would not show anything sooner."""

WATCH_S = 3.0
WATCHED_MAX = 1000
"""A thousand hosts that report four times a second are about a tenth of what a tracker can take."""


@dataclass(slots=True)
class CloseWatch:
    """`asked_at`: since when each host has been watched."""

    asked_at: dict[str, float] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    def watch(self, names: Iterable[str], *, now: float) -> list[str]:
        """Watch hosts; returns those that are not watched yet and are to be told."""
        found = []
        for name in names:
            if name not in self.asked_at:
                if len(self.asked_at) >= WATCHED_MAX:
                    break
                self.asked_at[name] = now
                found.append(name)
            self._until[name] = now + WATCH_S
        return found

    def over(self, now: float) -> list[str]:
        """Hosts that are watched no longer, and are to be told."""
        found = [name for name, until in self._until.items() if until <= now]
        for name in found:
            del self._until[name], self.asked_at[name]
        return found
