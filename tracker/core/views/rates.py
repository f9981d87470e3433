"""The rates of swarms: bytes a second, the time left, which of them are stalled, and at how many
sites they are late.

Theory. What a swarm holds is the sum of its members' piece counts; two looks at it give a rate, and
what is missing over the rate is the time left. A look costs time in proportion to the members, so
one call looks at VISITS_MAX members in all, beginning with the swarms whose last look is oldest.
When hosts came or went since the last look the two sums are of different hosts, and no rate follows
from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from p2pdist.model.digest import Digest
from tracker.core.swarm import Swarm

VISITS_MAX = 20_000
STALLED_S = 30.0
"""A swarm is stalled in which connected hosts lack pieces and none of them got one for so long."""

LOOK_S = 0.5
"""Looks that are closer together than this say little: agents report every 0.25 s or less often."""

LATE_SHARE = 0.5
"""A site is late in a swarm when its best host has less than this share of what the best host of
another site has."""

WEIGHT = 0.4
"""Of the newest rate in the one that is reported."""

SwarmState = Literal["running", "stalled", "seeded"]


@dataclass(slots=True)
class Rate:
    """One swarm: pieces held when it was last looked at, pieces a second (None while unknown),
    since when it got no piece, and at how many sites it is late."""

    looked_at: float
    members: int
    pieces: int
    moved_at: float
    waiting: bool = True
    pieces_s: float | None = None
    sites_late: int = 0


@dataclass(slots=True)
class SwarmRates:
    """The rates of the fleet's swarms, which it reads and does not change."""

    swarms: Mapping[Digest, Swarm]
    _rates: dict[Digest, Rate] = field(default_factory=dict)

    def look(self, *, now: float) -> None:
        """Look at swarms with receivers, beginning with the oldest looks."""
        for gone in [blob for blob in self._rates if blob not in self.swarms]:
            del self._rates[gone]
        running = [swarm for swarm in self.swarms.values() if swarm.receivers]
        running.sort(key=lambda swarm: self._rates[swarm.key].looked_at if swarm.key in self._rates else 0.0)
        visits = 0
        for swarm in running:
            visits += len(swarm.members)
            if visits > VISITS_MAX and visits > len(swarm.members):
                return
            self._look(swarm, now)

    def _look(self, swarm: Swarm, now: float) -> None:
        pieces, waiting = 0, False
        for member in swarm.members.values():
            pieces += sum(member.counts)
            waiting = waiting or (member.absent_since is None and not member.seed)
        late = _sites_late(swarm) if len(swarm.sites) > 1 else 0
        rate = self._rates.get(swarm.key)
        if rate is None:
            self._rates[swarm.key] = Rate(now, len(swarm.members), pieces, now, waiting, sites_late=late)
            return
        passed_s = now - rate.looked_at
        if passed_s < LOOK_S:
            return
        if rate.members != len(swarm.members):
            rate.pieces_s = None
        else:
            newest = max(0, pieces - rate.pieces) / passed_s
            rate.pieces_s = newest if rate.pieces_s is None else rate.pieces_s + WEIGHT * (newest - rate.pieces_s)
        if pieces != rate.pieces or not waiting or not rate.waiting or swarm.wan.waiting:
            rate.moved_at = now
        rate.looked_at, rate.members, rate.pieces, rate.waiting = now, len(swarm.members), pieces, waiting
        rate.sites_late = late

    def state(self, swarm: Swarm) -> SwarmState:
        """`running` while members lack pieces and get some, `stalled` while they get none, `seeded`
        when all have everything."""
        if not swarm.receivers:
            return "seeded"
        rate = self._rates.get(swarm.key)
        return "stalled" if rate is not None and rate.looked_at - rate.moved_at >= STALLED_S else "running"

    def pieces(self, swarm: Swarm) -> int:
        """Pieces that the members held together at the last look."""
        rate = self._rates.get(swarm.key)
        if not swarm.receivers:
            return sum(swarm.totals) * len(swarm.members)
        return rate.pieces if rate is not None else 0

    def bytes_s(self, swarm: Swarm) -> float:
        """What the members get in a second, all together; 0 while unknown."""
        rate = self._rates.get(swarm.key)
        if rate is None or not swarm.receivers:
            return 0.0
        return (rate.pieces_s or 0.0) * swarm.layout.size / sum(swarm.totals)

    def sites_late(self) -> int:
        """At how many sites swarms are late, over all swarms with receivers."""
        return sum(rate.sites_late for key, rate in self._rates.items() if key in self.swarms)

    def eta_s(self, swarm: Swarm) -> float | None:
        """Seconds until all have everything if it goes on like this; None while unknown or without
        end."""
        if not swarm.receivers:
            return 0.0
        rate = self._rates.get(swarm.key)
        if rate is None or not rate.pieces_s:
            return None
        missing = sum(swarm.totals) * len(swarm.members) - rate.pieces
        return max(0, missing) / rate.pieces_s


def _sites_late(swarm: Swarm) -> int:
    """At how many sites a swarm is late, of those with a connected host that lacks pieces. One with
    a budget is as late as that says."""
    best: dict[str, int] = {}
    lacking: dict[str, None] = {}
    for site, names in swarm.sites.items():
        members = [swarm.members[name] for name in names]
        best[site] = max(sum(member.counts) for member in members)
        if any(member.present and not member.seed for member in members):
            lacking[site] = None
    most = max(best.values())
    budgeted = swarm.wan.waiting.keys() | swarm.wan.paced
    return sum(best[site] < LATE_SHARE * most for site in lacking if site not in budgeted)
