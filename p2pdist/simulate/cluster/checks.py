"""What must hold of the leases of all trackers of a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from p2pdist.model.digest import Digest
from p2pdist.model.messages import Assign
from tracker.core.fleet import Fleet
from tracker.core.planning.rescue import RESCUES_MAX

FULL_CHECK_S = 0.25
FULL_CHECK_S_PER_HOST = 1e-4
"""Checking all trees takes time for each host: in a large fleet it would take more than the run."""

Lease = tuple[Digest, int, str]
"""Blob, stripe and host."""


@dataclass(slots=True)
class _Granted:
    """What one fleet core, the process of a tracker, has granted."""

    fleet: Fleet
    out: dict[Lease, None] = field(default_factory=dict)
    """Leases that may be out."""
    full_check_at: float = 0.0
    """When its trees are next checked as a whole, in seconds."""


class LeaseChecks:
    """The checks; `require` ends the run unless a condition holds. `leases_max` is the cap that
    each fleet is given."""

    def __init__(self, require: Callable[[bool, str], None], leases_max: int) -> None:
        self._require, self._leases_max = require, leases_max
        #: Leases that any fleet has granted.
        self.ever: dict[Lease, None] = {}
        self._fleets: list[_Granted] = []
        #: The tracker that planned a blob by the ownership of an epoch.
        self._planners: dict[tuple[Digest, int], str] = {}

    def full_check_due(self, fleet: Fleet, *, now: float) -> bool:
        """Whether the trees of a fleet are to be checked as a whole now."""
        known = self._of(fleet)
        due = now >= known.full_check_at
        if due:
            known.full_check_at = now + max(FULL_CHECK_S, FULL_CHECK_S_PER_HOST * len(fleet.hosts))
        return due

    def planned(self, fleet: Fleet, message: Assign) -> None:
        """A fleet sends a plan: one tracker plans a blob in an epoch, and grants its leases."""
        blob, epoch, handover = message.plan.blob, message.plan.epoch, fleet.handover
        self._require(epoch == handover.epoch, "a plan has another epoch than its tracker")
        if handover.ownership is not None:
            planner = self._planners.setdefault((blob, epoch), handover.me)
            self._require(planner == handover.me, f"{planner} and {handover.me} plan {blob} in epoch {epoch}")

    def granted(self, fleet: Fleet, blob: Digest, stripe: int, host: str) -> None:
        """A fleet tells a host of its lease. At most one lease a stripe and site, and no more than
        the cap in all, of the leases that it granted and that are out; RESCUES_MAX a stripe besides
        for hosts that were starved (planning/rescue.py). The lease of a host that is doubted
        (repair/claims.py) keeps no other from its site."""
        out = self._of(fleet).out
        out[blob, stripe, host] = self.ever[blob, stripe, host] = None
        granted: dict[tuple[Digest, int, str], int] = {}
        rescued: dict[tuple[Digest, int], int] = {}
        doubted = 0
        for lease in list(out):
            digest, number, name = lease
            swarm = fleet.swarms.get(digest)
            if swarm is None or name not in swarm.edges.roots[number]:
                del out[lease]
                continue
            if number in swarm.members[name].rescued:
                rescued[digest, number] = rescued.get((digest, number), 0) + 1
                continue
            if swarm.members[name].doubted_until:
                doubted += 1
                continue
            key = digest, number, swarm.members[name].site
            granted[key] = granted.get(key, 0) + 1
        self._require(max(granted.values(), default=0) <= 1, "a stripe has two leases at one site")
        self._require(max(rescued.values(), default=0) <= RESCUES_MAX, "a stripe has too many leases beyond the rule")
        in_all = sum(granted.values()) + sum(rescued.values()) + doubted
        self._require(in_all <= self._leases_max, "more leases than the cap are out")

    def _of(self, fleet: Fleet) -> _Granted:
        # From the end: the latest processes are the ones that run.
        for known in reversed(self._fleets):
            if known.fleet is fleet:
                return known
        self._fleets = [known for known in self._fleets if known.fleet.hosts]  # not those of processes that died
        self._fleets.append(_Granted(fleet))
        return self._fleets[-1]
