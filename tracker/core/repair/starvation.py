"""Hosts that get nothing: what they say of their parents, when that counts, and what helps them.

Theory. A host without a piece says once, and early, that a parent gives nothing (`Starved` of the
host's core): too early to hold it against the parent, which may be about to get its first piece.
Where it may yet turn out to be overdue the word is kept until then, whatever parents the host gets
meanwhile. A host that is starved reads the origin, or receives from one that does
(planning/rescue.py); where the holder of a lease has read nothing, the lease moves instead. Any
process may say that it starves, so few hosts are rescued, those that read nothing make room, and
nothing counts that no agent would say so soon.

Later a host complains of each parent that gives nothing of what it says that it has. A host that
several failed so is starved, too.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf

from p2pdist.model.digest import Digest
from p2pdist.model.messages import Complaint
from tracker.core.host import Host
from tracker.core.member import FROM_ORIGIN, STARVED_BY, Member
from tracker.core.planning.rescue import below_rescue, is_missing, may_be_rescued, rescuer
from tracker.core.planning.schedule import Schedule
from tracker.core.repair.lease_turnover import PATIENCE, LeaseTurnover
from tracker.core.repair.remedies import (
    AVOID_S,
    DRY_SOON_S,
    GIVES_S,
    SLOW_RECEIVER_COMPLAINTS,
    pass_on_lease,
    source_above,
    top_of,
)
from tracker.core.swarm import Swarm

EARLY_MAX, EARLY_OF_HOST_MAX = 10_000, 64
"""So many words of starved hosts, and of one, are kept until they can be judged."""

STARVED_S = 0.1
"""No agent says sooner that a parent gives it nothing: what does is not waiting for it."""

Early = tuple[float, Digest, str, int, str, bool]
"""When a parent has taken long, the key of the swarm, the child that said that nothing comes from
it, the stripe, the parent, and whether that one waits."""


@dataclass(slots=True)
class StarvedHosts:
    """Hears what starved hosts say, and helps them."""

    hosts: dict[str, Host]
    swarms: dict[Digest, Swarm]
    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    turnover: LeaseTurnover
    """Says how long a first piece takes; finds leases for starved hosts."""
    _early: list[Early] = field(default_factory=list)
    """Heap of words of starved hosts that came too early: a host says so once. `_keep`, `look`."""
    _kept: dict[str, dict[tuple[Digest, int], tuple[float, str]]] = field(default_factory=dict)
    """By child, and there by swarm and stripe, when those come up and of which parents they are; a
    word of the heap that is not here was followed by another one. `_keep`, `look`."""

    def says_so(self, swarm: Swarm, child: Member, parent: Member, stripe: int, *, waits: bool, now: float) -> None:
        """A host without any piece says that a parent gives nothing yet. Where that is so of all
        its parents that should have given, it leaves them where it can be rescued. It is too early
        to hold it against them. A parent that waits itself counts only where it said that it had
        pieces before it became the parent, else it may have got its first one just now, or where
        that takes long. Where it may yet come to that, the word is kept until then."""
        if child.parents[stripe] != parent.host or not was_named(child, parent.host):
            return
        if now - child.attached_at[stripe] < STARVED_S:
            return
        long_at = self._long_at(parent, stripe, waits=waits)
        if now <= long_at < inf:  # of many that wait the origin may be slow for all: they are given longer
            patience_s = (PATIENCE - 1) * self.turnover.overdue_s(waits=True) if waits else 0.0
            self._keep(long_at + patience_s, swarm, child, stripe, waits=waits)
        if waits and not (child.promised >> stripe & 1 or now > long_at):
            return
        if any(child.counts):
            root = top_of(swarm, stripe, child)
            if child.counts[stripe] or root.counts[stripe]:
                self._stands_still(swarm, child, parent, stripe, now)
            else:
                self._unread(swarm, child, root, stripe, now)
            return
        claiming = [
            (number, child.parents[number] or "")
            for number in _stripes_from_peers(child)
            if self._should_give(swarm.members[child.parents[number] or ""], number, waits=waits, now=now)
        ]
        if (stripe, parent.host) not in claiming:
            return
        starvation = child.starve()
        starvation.starve(stripe, parent.host)
        if all(starvation.starved_by.get(number) == host for number, host in claiming):
            self._rescue(swarm, child, [number for number, _ in claiming], now)

    def look(self, *, late: bool, now: float) -> None:
        """Judge what starved hosts said, where time has shown it meanwhile. Called often and
        regularly; `late`: the whole fleet is late with its reports."""
        while not late and self._early and self._early[0][0] < now:
            due, key, host, stripe, source, waits = heapq.heappop(self._early)
            kept = self._kept.get(host, {})
            if kept.get((key, stripe)) != (due, source):
                continue
            del kept[key, stripe]
            if not kept:
                del self._kept[host]
            swarm = self.swarms.get(key)
            child = swarm.members.get(host) if swarm is not None else None
            if swarm is None or child is None or child.counts[stripe]:
                continue
            parent = child.parents[stripe]
            if parent is None or now - child.attached_at[stripe] < STARVED_S:
                self._keep(now + STARVED_S, swarm, child, stripe, waits=waits)
            elif parent:  # of another one than it spoke of nothing is known: it may wait itself
                waits = waits or parent != source
                self.says_so(swarm, child, swarm.members[parent], stripe, waits=waits, now=now)

    def gives_nothing(self, swarm: Swarm, child: Member, parent: Member, complaint: Complaint, now: float) -> None:
        """A parent that says that it has more of a stripe than a host gives it nothing. Once the
        host is starved it leaves the parents of all such stripes for the origin, or for another
        host that was."""
        stripe, claims = complaint.stripe, parent.counts[complaint.stripe] > child.counts[complaint.stripe]
        if not child.counts[stripe]:
            starved = claims and child.starve().fail_by(stripe, parent.host)
        elif complaint.reason in {"stalled", "short"}:
            starvation = child.starve()
            starvation.stand_still(now=now)
            if claims and (not child.slow_receiver or child.complaints[stripe] >= SLOW_RECEIVER_COMPLAINTS):
                starvation.stop_by(stripe, parent.host, gives=self.gives(parent.host, now))
            starved = starvation.stopped_in(stripe, now=now)
        else:
            return
        if not starved:
            return
        swarm.starved[child.host] = None
        swarm.edges.set_now(now)
        for number in _stripes_from_peers(child):
            if is_missing(swarm, number, child.host) and not below_rescue(swarm, number, child.host):
                swarm.edges.detach(number, child.host)
        self.schedule.ask(swarm.key, "starved", now)

    def forsaken(self, swarm: Swarm, child: Member, stripe: int, now: float) -> None:
        """A host that has complained several times since its last piece: where it leaves alone all
        that say that they have more, no complaint of its will come any more, and it is starved."""
        more = [each for each in swarm.members.values() if each.serves and each.counts[stripe] > child.counts[stripe]]
        if len(more) < STARVED_BY or any((child.host, each.host) not in swarm.edges.avoided for each in more):
            return
        swarm.edges.set_now(now)
        if rescuer(swarm, stripe, child.host) or may_be_rescued(swarm, stripe, child.host):
            swarm.starved[child.host] = None
            if child.counts[stripe]:
                child.starve().give_up(stripe)

    def gives(self, source: str, now: float) -> bool:
        """Whether a host has sent something of late."""
        host = self.hosts.get(source)
        return host is not None and now - host.sent_at < GIVES_S

    def _should_give(self, parent: Member, stripe: int, *, waits: bool, now: float) -> bool:
        """Whether a parent says that it has pieces, hoards leases, or takes long."""
        hoards = self.hosts[parent.host].wanted_in_vain > 1
        return bool(parent.counts[stripe]) or hoards or now > self._long_at(parent, stripe, waits=waits)

    def _long_at(self, parent: Member, stripe: int, *, waits: bool) -> float:
        """From when on a parent takes long that never gave a piece, and has none yet although
        others had theirs after so long; infinity for others. It counts for a silent one from when
        it joined, as it may open its session again and again; for one that waits, or was starved
        itself, from when it got its own parent, and the former may take longer, as agents say so at
        once. Any process may want a blob, hold its lease and do nothing."""
        if parent.counts[stripe] or self.hosts[parent.host].gave:
            return inf
        if stripe in parent.rescued and not waits:
            return parent.attached_at[stripe] + self.turnover.unread_s
        return (parent.attached_at[stripe] if waits else parent.joined_at) + self.turnover.overdue_s(waits=waits)

    def _unread(self, swarm: Swarm, child: Member, root: Member, stripe: int, now: float) -> None:
        """A host that gets other stripes has nothing of this one. Where the holder of its lease has
        read nothing either, and never gave a piece, it may never: it hands the lease on."""
        if root.parents[stripe] != FROM_ORIGIN or self.hosts[root.host].gave:
            return
        unread_at = root.attached_at[stripe] + self.turnover.unread_s
        if now <= unread_at:
            self._keep(unread_at, swarm, child, stripe, waits=False)
        elif root.site not in swarm.wan.paced:  # by a budget: its first piece may take long
            swarm.edges.set_now(now)
            self.turnover.hand_on(swarm, stripe, root, anyhow=False, now=now)

    def _keep(self, due: float, swarm: Swarm, child: Member, stripe: int, *, waits: bool) -> None:
        """Look again at `due` at what a host said of its parent, where it is known how long a first
        piece takes: else the origin may be slow for all."""
        source, kept = child.parents[stripe] or "", self._kept.get(child.host, {})
        _, former = kept.get((swarm.key, stripe), (0.0, None))
        room = len(self._early) < EARLY_MAX and len(kept) < EARLY_OF_HOST_MAX
        if self.turnover.measured and former != source and room:
            self._kept.setdefault(child.host, kept)[swarm.key, stripe] = due, source
            heapq.heappush(self._early, (due, swarm.key, child.host, stripe, source, waits))

    def _stands_still(self, swarm: Swarm, child: Member, parent: Member, stripe: int, now: float) -> None:
        """The whole pull of a host that has pieces stands still, in all stripes that it says so of.
        Honest parents pause, and most often wait for their own: so the host is rescued only where
        all its stripes come from, or through, hosts that joined with more than it has, or after
        several parents in turn that had more and gave to no host. Where the holder of a stripe's
        lease has no more either, the lease is passed on."""
        starvation = child.starve()
        starvation.starve(stripe, parent.host)
        above = source_above(swarm, stripe, child.host)
        if above is None:
            if pass_on_lease(swarm, stripe, child.host, now=now, dry_s=DRY_SOON_S):
                self.schedule.ask(swarm.key, "stuck", now)
            return
        starvation.stand_still(now=now)
        if parent is above:
            starvation.stop_by(stripe, parent.host, gives=self.gives(parent.host, now))
        stripes = _stripes_from_peers(child)
        if any(starvation.starved_by.get(number) != child.parents[number] for number in stripes):
            return
        sources = [source_above(swarm, number, child.host) for number in stripes]
        joined = all(source is not None and source.claimed for source in sources)
        if joined or starvation.stopped_soon(now=now):
            self._rescue(swarm, child, stripes, now)

    def _rescue(self, swarm: Swarm, child: Member, stripes: list[int], now: float) -> None:
        """Have a starved host leave its parents in these stripes, where it can be rescued."""
        swarm.edges.set_now(now)
        for stripe in stripes:
            parent = child.parents[stripe] or ""
            avoided = (child.host, parent) in swarm.edges.avoided
            swarm.edges.avoid(child.host, parent, now + AVOID_S)
            self.turnover.make_room(swarm, stripe, now=now)
            if rescuer(swarm, stripe, child.host) or may_be_rescued(swarm, stripe, child.host):
                swarm.starved[child.host] = None
                if child.counts[stripe]:
                    child.starve().give_up(stripe)
                swarm.edges.detach(stripe, child.host)
                self.schedule.ask(swarm.key, "starved", now)
            elif not avoided:
                del swarm.edges.avoided[child.host, parent]


def _stripes_from_peers(member: Member) -> list[int]:
    """The stripes that a host receives from other hosts."""
    return [stripe for stripe, parent in enumerate(member.parents) if parent]


def was_named(child: Member, source: str) -> bool:
    """Whether a plan of late names a host as parent or alternate of another."""
    return bool(source) and source in child.told
