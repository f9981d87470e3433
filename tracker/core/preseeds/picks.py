"""Picks: which hosts a preseed of some number of hosts, or of copies in each zone, goes to.

A picked host is kept while it can be counted on: it is connected here, another tracker reports it
or has it, or it has been away for less than REPLACE_S. Others are picked in the place of the rest,
those first that lack the fewest bytes. Where the other trackers can be asked of their hosts
(`AskCandidates`), they are asked before some number of hosts is picked or replaced; copies in each
zone are picked among the hosts of this tracker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from p2pdist.model.preseed import Failure
from tracker.core.affinity import Affinity
from tracker.core.host import AtHome, Host
from tracker.core.preseeds.preseed import CANDIDATES_AGAIN_S, AskCandidates, Command, HostReport, Preseed

REPLACE_S = 5.0
"""So long a pick may be away before another host is picked for it."""


@dataclass(frozen=True, slots=True)
class Picker:
    """Picks hosts for preseeds at one moment."""

    affinity: Affinity
    """The hosts of this tracker and what they hold."""

    hosts: Mapping[str, Host]
    """Those of them with their home here."""

    left_at: Mapping[str, float]
    """When hosts left, or reported that they were about to, or when another tracker reported them
    no more."""

    settled_at: float
    """When all hosts have had time to return since the tracker's start; never, while another one
    that has just started reports none yet."""

    asks_others: bool
    """The other trackers can be asked of their hosts."""

    now: float
    out: list[Command]
    """Takes what is asked of the other trackers."""

    def picks(self, preseed: Preseed, members: Iterable[str], others: Mapping[str, HostReport]) -> tuple[str, ...]:
        """The hosts that should be picked now: picked hosts that can be counted on, then as many
        others as are missing, in each zone and in all."""
        record, request = preseed.record, preseed.request
        if not preseed.picks or (self.now < self.settled_at and record.picked):
            return record.picked  # picked hosts may be on their way back
        sound = {name for name in members if self._counts(preseed, name, others)}
        picked = [name for name in record.picked if name in sound]
        if self.asks_others and len(picked) < (request.count or 0) and not self._surveyed(preseed):
            return record.picked
        for name in record.picked:
            if name not in sound:
                preseed.lost[name] = preseed.failure(name, self.hosts, others) or Failure(name, "replaced")
        if not request.replicas and len(picked) >= (request.count or 0):
            return tuple(picked)
        free: dict[str, list[str]] = {}
        affinity, pool = self.affinity, self.hosts
        if preseed.candidates is not None:
            affinity, pool = preseed.candidates, AtHome(preseed.candidates.hosts)
        preseed.pool_hosts = 0
        for host in pool.values():
            if host.available and preseed.is_candidate(host):
                preseed.pool_hosts += 1
                candidates = free.setdefault(host.zone, [])
                holder = preseed.holders.get(host.name)
                tried = holder is not None and holder.given_up
                if host.name not in sound and host.name not in preseed.lost and not tried:
                    candidates.append(host.name)
        parts = dict(record.blobs)
        copies = Counter(preseed.zone_of(name, self.hosts, others) for name in sound)
        # Another tracker may have picked hosts a moment ago and not reported them yet: their zones
        # are unknown.
        located = all(name in self.hosts or name in others for name in sound)
        for zone in sorted(free) if located else ():
            lacking = (request.replicas or 0) - copies[zone]
            fresh = affinity.pick(parts, free[zone], lacking, sound)
            picked += fresh
            sound.update(fresh)
            free[zone] = [name for name in free[zone] if name not in sound]
        lacking = (request.count or 0) - len(picked)
        picked += affinity.pick(parts, [name for names in free.values() for name in names], lacking, sound)
        return tuple(picked)

    def _surveyed(self, preseed: Preseed) -> bool:
        """Whether it is known what hosts all trackers have; else the others are asked."""
        if preseed.candidates is not None:
            return True
        if self.now - preseed.asked_at >= CANDIDATES_AGAIN_S:
            preseed.asked_at = self.now
            self.out.append(AskCandidates(preseed.record.id, preseed.record.blobs))
        preseed.wake_at = min(preseed.wake_at, preseed.asked_at + CANDIDATES_AGAIN_S)
        return False

    def _counts(self, preseed: Preseed, name: str, others: Mapping[str, HostReport]) -> bool:
        """Whether a member holds the package or can be expected to."""
        host = self.hosts.get(name)
        if host is not None and host.available:
            holder = preseed.holders.get(name)
            return holder is None or not holder.given_up
        if name in others:
            return others[name].state != "failed"
        if preseed.candidates is not None:
            there = preseed.candidates.hosts.get(name)
            if there is not None and there.available:
                return True  # its tracker has not told yet how far it is
        gone_at = max(self.left_at.get(name, 0.0), self.settled_at) + REPLACE_S
        if self.now < gone_at:
            preseed.wake_at = min(preseed.wake_at, gone_at)
        return self.now < gone_at
