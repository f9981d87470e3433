"""Counts: what a tracker learns when a member of a swarm says how many pieces it holds."""

from __future__ import annotations

from dataclasses import dataclass
from operator import eq, lt

from tracker.core.history.broadcasts import Broadcasts
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.membership import Membership
from tracker.core.monitor.progress import note_rates
from tracker.core.planning.schedule import JOIN_BATCH_S, Schedule
from tracker.core.rebalance.tail import Tail
from tracker.core.repair.claims import Claims
from tracker.core.repair.lease_turnover import LeaseTurnover
from tracker.core.repair.remedies import release_leases
from tracker.core.swarm import Swarm
from tracker.core.wan.imports import Imports


@dataclass(frozen=True, slots=True)
class Counts:
    """Takes new piece counts, and lets the parts of the fleet hear of them that they concern."""

    membership: Membership
    """Holds the fleet's hosts; hears which of them still receive."""
    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    claims: Claims
    """Hears which hosts advance."""
    turnover: LeaseTurnover
    """Hears how the holders of leases advance."""
    tail: Tail
    """Hears of finished stripes."""
    broadcasts: Broadcasts
    """Hears how members advance."""
    imports: Imports
    """Hears what came to sites with a budget."""

    def take(
        self,
        swarm: Swarm,
        member: Member,
        counts: tuple[int, ...],
        origin_bytes: int | None = None,
        *,
        judge: bool,
        now: float,
    ) -> None:
        """A member has other piece counts than before, maybe smaller ones. `origin_bytes`: what its
        pull has read of the origin so far, None where it does not say. `judge`: the tracker has run
        for long enough to judge claims."""
        host, before = self.membership.hosts[member.host], member.counts
        if any(map(lt, counts, before)):
            swarm.forget_pieces(member.host, counts)
            self.membership.sort(host, swarm)
            self.schedule.ask(swarm.key, "lost pieces", now + JOIN_BATCH_S)
            return
        self.broadcasts.advance(swarm, member, counts, origin_bytes, now=now)
        self.imports.advanced(swarm, member, counts, now=now)
        note_rates(swarm, member, counts, now=now)
        self.claims.progressed(swarm, member, counts, judge=judge, now=now)
        if FROM_ORIGIN in member.parents:
            self.turnover.progressed(member, counts, now=now)
        if host.wanted_in_vain and any(counts):
            host.got(swarm.blob)
        complete = swarm.advance(member.host, counts, now=now)
        ended = any(map(eq, member.counts, swarm.totals))
        if ended and any(
            new == total != old for new, total, old in zip(member.counts, swarm.totals, before, strict=True)
        ):
            self.tail.note(swarm.key)
        self.membership.sort(host, swarm)
        if release_leases(swarm, member.host):
            self.schedule.ask(swarm.key, "whole copy", now)
        if complete:
            swarm.record(now, f"{member.host} is complete")
            self.schedule.ask(swarm.key, "complete", now + JOIN_BATCH_S)
