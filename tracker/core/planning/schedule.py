"""Schedule: which swarms are to be planned anew, and when.

A plan costs time in proportion to the swarm's members, and requests for one come in crowds. So
plans keep a distance that grows with the swarm: with ten thousand hosts a few plans a second take
the tracker's time and no more, with a dozen hosts nothing waits. A plan with little to do takes
less, and the next need not wait as long: when a swarm has just begun, the first host that turns out
slow is soon followed by hundreds, whose children all stand still. Most events find nothing due,
however many swarms wait, and cost one comparison.

Joins come in crowds: the plan after one waits until no more come, which is soon, and JOIN_BATCH_S
at most (SMALL_BATCH_S where a blob has one stripe), or as long as the plan itself will take, where
that is longer: trees that grew by a part are drawn anew, and while thousands join one large plan
serves them sooner than several smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from p2pdist.model.digest import Digest
from tracker.core.swarm import Swarm

PAUSE_S_PER_MEMBER = 3e-5
MEMBERS_PER_EDGE = 16
"""A pass looks at about so many members for each edge that it makes or tells of, those of a rack,
and at a tenth of all in any case."""

AT_ONCE_MAX = 100
"""Members of a swarm that is small enough to be planned at every event."""

PLAN_S_PER_MEMBER = 7e-5
"""What a plan takes, by the members that it looks at: 0.7 s for 10,000 hosts."""

JOIN_BATCH_S = 0.1
JOIN_QUIET_S, CROWD = 0.03, 8
"""So long after a join no other has come: the crowd is there. Fewer than CROWD hosts are not
planned so soon: the first hosts would be given all slots at the top, and hosts that come a
moment later none."""

SMALL_BATCH_S = 0.02
"""Where a blob has one stripe: its pieces are there before the rest of a longer batch would have
come."""


@dataclass(slots=True)
class Schedule:
    """Requests for plans, by swarm key."""

    replans: dict[str, int] = field(default_factory=dict)
    """Requests by reason; a metric. `ask`, `join`."""
    next_at: float = inf
    """Time before which no plan is due. `ask`, `join`, `retry`, `take`."""
    wake_at: float = inf
    """Time at which a plan is due that shall not wait for the next tick. `ask`, `join`, `take`."""
    restless: dict[Digest, None] = field(default_factory=dict)
    """Keys of swarms that time may change: something was asked for them since they were last found
    at rest. `ask`, `join`, `rest`, `gone`."""
    _due: dict[Digest, float] = field(default_factory=dict)
    """Times of requests. `ask`, `retry`, `forget`."""
    _wakes: dict[Digest, float] = field(default_factory=dict)
    """Times of requests that shall not wait for the next event. `ask`, `forget`."""
    _crowds: dict[Digest, tuple[float, float]] = field(default_factory=dict)
    """When a crowd of joins began, and when it is planned. `join`, `forget`."""

    def ask(self, blob: Digest, reason: str, due: float, *, wake: bool = False) -> None:
        """Plan a swarm at `due`, or sooner if that was requested already; with `wake` then, else at
        the next event."""
        self.restless[blob] = None
        self._due[blob] = min(due, self._due.get(blob, due))
        self.next_at = min(due, self.next_at)
        if wake:
            self._wakes[blob] = min(due, self._wakes.get(blob, due))
            self.wake_at = min(due, self.wake_at)
        self.replans[reason] = self.replans.get(reason, 0) + 1

    def join(self, swarm: Swarm, now: float) -> None:
        """Plan a swarm for a host that joins now, and for the hosts that come with it."""
        if swarm.stripes == 1:
            self.ask(swarm.key, "join", now + SMALL_BATCH_S, wake=True)
            return
        self.restless[swarm.key] = None
        began = self._crowds[swarm.key][0] if swarm.key in self._crowds else now
        latest = began + max(JOIN_BATCH_S, PLAN_S_PER_MEMBER * _looked_at(swarm, len(swarm.edges.unplanned)))
        due = min(latest, now + (JOIN_QUIET_S if len(swarm.members) >= CROWD else JOIN_BATCH_S))
        self._crowds[swarm.key] = began, due
        planned_at = max(due, swarm.passes.rested_at)
        self.next_at, self.wake_at = min(planned_at, self.next_at), min(planned_at, self.wake_at)
        self.replans["join"] = self.replans.get("join", 0) + 1

    def retry(self, blob: Digest, due: float) -> None:
        """Plan a swarm at `due` at the latest."""
        self.next_at = min(self._due.setdefault(blob, due), self.next_at)

    def rest(self, swarm: Swarm, retry_at: float | None) -> None:
        """A swarm was looked at: plan it at `retry_at` at the latest, if it waits for something.
        One that time changes no more rests until something is asked for it."""
        if retry_at is not None:
            self.retry(swarm.key, retry_at)
        elif not (swarm.edges.avoided or swarm.edges.parted or swarm.passes.strained):
            self.restless.pop(swarm.key, None)

    def gone(self, blob: Digest) -> None:
        """The swarm is no more, or has another key."""
        self.forget(blob)
        self.restless.pop(blob, None)

    def forget(self, blob: Digest) -> None:
        """The swarm is gone, or is being planned."""
        self._due.pop(blob, None)
        self._wakes.pop(blob, None)
        self._crowds.pop(blob, None)

    def take(self, swarms: dict[Digest, Swarm], now: float) -> list[Swarm]:
        """The swarms to plan now."""
        due: list[Swarm] = []
        if now < self.next_at:
            return due
        self.next_at = self.wake_at = inf
        for blob in self._due | self._crowds:
            swarm = swarms[blob]
            rested = swarm.passes.rested_at
            gathered = self._crowds[blob][1] if blob in self._crowds else inf
            awaited = max(rested, min(gathered, self._wakes.get(blob, inf)))
            planned_at = min(awaited, max(rested, self._due.get(blob, inf)))
            if planned_at <= now:
                due.append(swarm)
            else:
                self.next_at, self.wake_at = min(planned_at, self.next_at), min(awaited, self.wake_at)
        for swarm in due:
            self.forget(swarm.key)
            swarm.passes.rest(now + _pause_s(swarm))
        return due


def _pause_s(swarm: Swarm) -> float:
    """How long a swarm rests after the plan that is about to be made."""
    edges = len(swarm.edges.unplanned) + sum(map(len, swarm.edges.changed.values()))
    return PAUSE_S_PER_MEMBER * max(0, _looked_at(swarm, edges) - AT_ONCE_MAX)


def _looked_at(swarm: Swarm, edges: int) -> int:
    """About how many members a plan looks at that makes or tells of so many edges."""
    members = len(swarm.members)
    return min(members, members // 10 + MEMBERS_PER_EDGE * edges)
