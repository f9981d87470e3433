"""Liars: hosts that stated hashes which a list that is held contradicts.

For PENALTY_S a liar is not believed and does not read blobs with vouched lists from upstream,
unless no other host of the swarm could. Where it is the root of a stripe, the lease goes to another
host at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.planning.schedule import Schedule
from tracker.core.repair.remedies import move_lease
from tracker.core.swarm import Swarm

PENALTY_S = 3600.0
LIARS_MAX = 10_000


@dataclass(slots=True)
class Liars:
    """Remembers liars, and keeps them from reading."""

    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    until: dict[str, float] = field(default_factory=dict)
    """By host until when it is not believed. `add`, `expire`."""

    def lies(self, name: str, *, now: float) -> bool:
        """Whether a host is not believed."""
        return bool(self.until) and self.until.get(name, 0.0) > now

    def add(self, name: str, *, now: float) -> None:
        """A host lied."""
        while len(self.until) >= LIARS_MAX:
            del self.until[next(iter(self.until))]
        self.until[name] = now + PENALTY_S

    def expire(self, *, now: float) -> None:
        """Forget old lies."""
        self.until = {name: until for name, until in self.until.items() if until > now}

    def bar(self, swarm: Swarm, member: Member, *, now: float) -> None:
        """A liar reads nothing more from upstream: its leases go to other hosts at once."""
        if not any(name != member.host and name not in self.until for name in swarm.members):
            return
        swarm.origin.bar(member.host)
        for stripe, parent in enumerate(member.parents):
            if parent == FROM_ORIGIN:
                if not move_lease(swarm, stripe, member.host, now=now, at_once=True):
                    swarm.edges.detach(stripe, member.host)
                self.schedule.ask(swarm.key, "liar", now)

    def unbar(self, swarm: Swarm) -> None:
        """Let liars read again after their time, and all where none but liars are left: the
        digest tells what comes of it."""
        alone = all(name in swarm.origin.barred for name, member in swarm.members.items() if member.present)
        for name in list(swarm.origin.barred):
            if alone or name not in self.until:
                swarm.origin.unbar(name)
