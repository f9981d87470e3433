"""Complaints of hosts that a tracker which has just started has not heard of: they wait.

Theory. Agents open their sessions anew over about UNHEARD_S, and say from which hosts they receive.
One of these that has not spoken itself may have more of a stripe, or wait as its child does, so a
complaint that it gives nothing cannot be judged. It is judged once that host has spoken, and the
one that complains has reported since, as it may have got what it waited for meanwhile; or when the
time is over. It is dropped where a piece of the stripe came, or the parent is another by then.

Kept apart from the complaints themselves (tracker/core/complaints.py), which keep nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from p2pdist.model.digest import Digest
from p2pdist.model.messages import Complaint
from tracker.core.member import Member
from tracker.core.swarm import Swarm

UNHEARD_S = 1.5
"""So long after the tracker's start agents that live have mostly opened a session again."""


class _Early(NamedTuple):
    """A complaint that waits, and what was known of the host that complains."""

    complaint: Complaint
    at: float
    state: tuple[int, str | None]
    """Its pieces of the stripe, and its parent there."""


@dataclass(slots=True)
class Unheard:
    """Keeps the latest such complaint of each host and stripe of a swarm."""

    swarms: dict[Digest, Swarm]
    """The fleet's, by key."""
    started_at: float
    """Time at which the tracker started."""
    _early: dict[tuple[Digest, str, int], _Early] = field(default_factory=dict)
    """By key of the swarm, host and stripe. `keep`, `due`."""

    def keep(self, swarm: Swarm, child: Member, complaint: Complaint, *, now: float) -> bool:
        """Whether a complaint of standing still waits, as its source has yet to speak."""
        if not swarm.members[complaint.source].hearsay or self._over(now):
            return False
        stripe = complaint.stripe
        self._early[swarm.key, child.host, stripe] = _Early(complaint, now, _state(child, stripe))
        return True

    def due(self, *, now: float) -> Iterator[tuple[Swarm, Member, Complaint]]:
        """The complaints to be judged now. Called often and regularly."""
        for key, early in list(self._early.items()):
            swarm, stripe = self.swarms.get(key[0]), key[2]
            child = swarm.members.get(key[1]) if swarm is not None else None
            source = swarm.members.get(early.complaint.source) if swarm is not None else None
            if swarm is None or child is None or source is None or _state(child, stripe) != early.state:
                del self._early[key]
            elif self._over(now) or (not source.hearsay and child.heard_at > early.at):
                del self._early[key]
                yield swarm, child, early.complaint

    def _over(self, now: float) -> bool:
        return now - self.started_at >= UNHEARD_S


def _state(member: Member, stripe: int) -> tuple[int, str | None]:
    return member.counts[stripe], member.parents[stripe]
