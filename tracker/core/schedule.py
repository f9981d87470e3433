"""Schedule: which swarms are to be planned anew, and when.

A pass over a swarm costs time in proportion to its members, and what asks for one comes in crowds. So passes keep a distance that grows
with the swarm: with ten thousand hosts a few passes a second take the tracker's time and no more, with a dozen nobody waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pdist.model.digest import Digest
from tracker.core.swarm import Swarm

PAUSE_S_PER_MEMBER = 3e-5
AT_ONCE_MAX = 100
"""Members of a swarm that is small enough to be planned at every event."""


@dataclass(slots=True)
class Schedule:
    """`replans` counts what was asked for, by reason."""

    replans: dict[str, int] = field(default_factory=dict)
    _due: dict[Digest, float] = field(default_factory=dict)

    def ask(self, blob: Digest, reason: str, due: float) -> None:
        """Plan a swarm at `due`, or sooner if that was asked for already."""
        self._due[blob] = min(due, self._due.get(blob, due))
        self.replans[reason] = self.replans.get(reason, 0) + 1

    def retry(self, blob: Digest, due: float) -> None:
        """Plan a swarm at `due` at the latest."""
        self._due.setdefault(blob, due)

    def forget(self, blob: Digest) -> None:
        """The swarm is no more."""
        self._due.pop(blob, None)

    def take(self, swarms: dict[Digest, Swarm], now: float) -> list[Swarm]:
        """The swarms to plan now."""
        found = []
        for blob, due in self._due.items():
            swarm = swarms[blob]
            if due <= now and swarm.planned_at + PAUSE_S_PER_MEMBER * max(0, len(swarm.members) - AT_ONCE_MAX) <= now:
                found.append(swarm)
        for swarm in found:
            del self._due[swarm.blob]
            swarm.planned_at = now
        return found
