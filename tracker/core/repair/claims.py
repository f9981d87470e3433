"""Claims: hosts that joined a swarm with pieces which no other host has seen.

Theory. What a host says that it holds is believed until it matters: a host that joins with pieces
makes a claim, and the claim is proved when a child gets a piece from that host, in whatever swarm.
The first child's first piece has a deadline. A host that lets it pass, or of which a child
complains that nothing came, is doubted for DOUBT_S: it keeps its parents, gets no children, and
spares the origin for no host. Where DOUBTS_MAX claims in one swarm turned out like that, and few
were proved, the others there are doubted as well, for DISBELIEF_S: it is better to read the origin,
or to ask hosts that have proved something, than to try one silent host after the other.

While the tracker has just started, or taken the swarm over, all hosts come again at once, and are
late: then no deadline is set, and a host is doubted only when a child complains of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2pdist.model.digest import Digest
from tracker.core.edges import changes
from tracker.core.host import Host
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.monitor.progress import imports
from tracker.core.planning.schedule import Schedule
from tracker.core.repair.reputation import Reputation
from tracker.core.swarm import Swarm

FIRST_PIECE_S = 1.0
"""A first piece takes at most so long, with one interval of reports and the time to send it."""

SLOW_BYTES_S = 1 << 20
"""Rate at which a claimed seed is taken to serve its children, all together. A child whose parent
is silent complains long before; a piece of 16 MiB takes its time on an honest uplink."""

DOUBT_S, DISBELIEF_S = 120.0, 30.0
DOUBTS_MAX = 2
PROVED_PER_DOUBT = 16
"""Where more claims were proved for each that was not, the others are believed: among very many
hosts some die at any time."""

CLAIMED_PER_DOUBT = 64
"""So they are while a tracker has just started and more hosts claim pieces for each that gave
none."""

Edge = tuple[float, Digest, str, int, str]
"""When a child must have got a piece, the key of its swarm, the child, the stripe, the parent."""


@dataclass(slots=True)
class Claims:
    """Watches the first children of hosts that claim pieces."""

    hosts: dict[str, Host]
    swarms: dict[Digest, Swarm]
    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    reputation: Reputation
    """Says how many upload slots a host has."""
    _watched: list[Edge] = field(default_factory=list)
    """Heap of edges to claiming parents. `planned`, `look`."""
    _ends: list[tuple[float, Digest, str]] = field(default_factory=list)
    """Heap of doubts by their end: key of the swarm, host. `_doubt`, `look`."""

    def entered(self, host: Host, swarm: Swarm, counts: tuple[int, ...], *, timed: bool, now: float) -> None:
        """A host has joined a swarm, with pieces or without."""
        if any(counts):
            swarm.passes.begin()
            self.joined(host, swarm, timed=timed, now=now)
        else:
            self._returned(host, swarm, now)

    def joined(self, host: Host, swarm: Swarm, *, timed: bool, now: float) -> None:
        """A host says that it has pieces which it did not get from a parent here. `timed`: its
        first child has a deadline. One that has all pieces waits for no parent, so what it says is
        a claim even where all hosts come again at once."""
        member = swarm.members[host.name]
        member.claimed = member.claimed or timed or member.seed
        if host.proved:
            return
        swarm.claims[host.name] = timed
        self._returned(host, swarm, now)

    def _returned(self, host: Host, swarm: Swarm, now: float) -> None:
        """A doubt of a host that has joined a swarm goes on."""
        if host.doubted_until > now:
            self._doubt(swarm, swarm.members[host.name], host.doubted_until)

    def left(self, host: Host, swarm: Swarm, *, now: float) -> None:
        """A host leaves a swarm by itself. Where hosts receive from it, and it never gave one a
        piece, it is doubted for a while: else it could come and go, and hold up all that it is
        given."""
        member = swarm.members[host.name]
        if not host.gave and any(member.children):
            host.doubt(max(host.doubted_until, now + DISBELIEF_S))

    def planned(self, swarm: Swarm, *, interval_s: float, now: float) -> None:
        """A swarm was planned: watch the children that claiming hosts got. Hosts report every
        `interval_s`."""
        if not swarm.claims:
            return
        for child, stripe in changes(swarm.edges):
            parent = swarm.members[child].parents[stripe]
            if parent and swarm.claims.get(parent):
                served = sum(map(len, swarm.members[parent].children))
                wait_s = FIRST_PIECE_S + interval_s + served * swarm.layout.piece_size / SLOW_BYTES_S
                heapq.heappush(self._watched, (now + wait_s, swarm.key, child, stripe, parent))

    def progressed(self, swarm: Swarm, member: Member, counts: tuple[int, ...], *, judge: bool, now: float) -> None:
        """A member reports these counts, which it is still to be given: parents of stripes with new
        pieces have proved what they claim, and pieces without a parent are a claim where the
        tracker may `judge`."""
        before = member.counts
        for stripe, parent in enumerate(member.parents):
            if counts[stripe] <= before[stripe]:
                continue
            if parent and member.moved_at[stripe] == member.attached_at[stripe]:  # its first piece from there
                self.hosts[parent].give(self.hosts[member.host], now=now)
            if judge and parent is None and member.host not in swarm.swarming:
                self.joined(self.hosts[member.host], swarm, timed=True, now=now)
            elif parent in swarm.claims:
                self._prove(self.hosts[parent], now)

    def complained(self, swarm: Swarm, child: Member, stripe: int, parent: str, *, now: float) -> None:
        """A child complains that nothing came from its parent. Where that claims no more than the
        child has, it may wait for pieces itself, as all do below a root that is lost, and proves
        nothing."""
        claims = parent in swarm.claims and swarm.members[parent].counts[stripe] > child.counts[stripe]
        if claims and _testifies(swarm, child, stripe):
            self._fail(swarm, parent, now)

    def look(self, *, late: bool, now: float) -> None:
        """Doubt hosts that gave their children nothing in time, unless the whole fleet is late with
        its reports; end doubts. Called often and regularly."""
        while self._watched and self._watched[0][0] <= now:
            _, key, child, stripe, parent = heapq.heappop(self._watched)
            swarm = self.swarms.get(key)
            member = swarm.members.get(child) if swarm is not None else None
            if swarm is None or member is None or late or parent not in swarm.claims:
                continue
            waits = member.present and member.parents[stripe] == parent and _untouched(member, stripe)
            claims = waits and swarm.members[parent].counts[stripe] > member.counts[stripe]
            if claims and _testifies(swarm, member, stripe):
                self._fail(swarm, parent, now)
        while self._ends and self._ends[0][0] <= now:
            _, key, name = heapq.heappop(self._ends)
            swarm = self.swarms.get(key)
            member = swarm.members.get(name) if swarm is not None else None
            if swarm is not None and member is not None and member.doubted_until <= now:
                self._trust(swarm, member, now)

    # -- inner

    def _fail(self, swarm: Swarm, parent: str, now: float) -> None:
        """A claiming host gives nothing: doubt it everywhere, and free its children."""
        host = self.hosts[parent]
        if swarm.members[parent].doubted_until > now + DOUBT_S / 2:
            return
        host.doubt(now + DOUBT_S)
        for key in host.swarms:
            if parent in self.swarms[key].claims:
                self._doubt(self.swarms[key], self.swarms[key].members[parent], now + DOUBT_S)
                self.schedule.ask(key, "doubted", now)
        swarm.record(now, f"{parent} claims pieces and gives none")
        believed = swarm.claims_proved / PROVED_PER_DOUBT
        if not swarm.claims.get(parent):  # all have just come again, and none could prove anything yet
            believed = max(believed, len(swarm.claims) / CLAIMED_PER_DOUBT)
        if len(swarm.claims_doubted) >= max(DOUBTS_MAX, believed):
            self._disbelieve(swarm, swarm.claims, now)

    def _disbelieve(self, swarm: Swarm, names: Iterable[str], now: float) -> None:
        """Doubt the other claims of a swarm."""
        for name in list(names):
            if swarm.members[name].doubted_until <= now:
                self._doubt(swarm, swarm.members[name], now + DISBELIEF_S)

    def _doubt(self, swarm: Swarm, member: Member, until: float) -> None:
        member.doubt(until)
        if member.host in swarm.claims:
            swarm.claims_doubted[member.host] = None
        heapq.heappush(self._ends, (until, swarm.key, member.host))
        for stripe in range(swarm.stripes):
            for child in list(member.children[stripe]):
                if _untouched(swarm.members[child], stripe):
                    swarm.edges.detach(stripe, child)

    def _prove(self, host: Host, now: float) -> None:
        """A child got a piece from a host: it is believed everywhere."""
        host.prove()
        for key in host.swarms:
            swarm = self.swarms[key]
            if host.name in swarm.claims:
                del swarm.claims[host.name]
                swarm.claims_doubted.pop(host.name, None)
                swarm.claims_proved += 1
                if swarm.members[host.name].doubted_until:
                    self._trust(swarm, swarm.members[host.name], now)

    def _trust(self, swarm: Swarm, member: Member, now: float) -> None:
        """A doubt is over. Another host of the site may have been granted a lease meanwhile, as
        that of a doubted host counts for nothing: one of the two is enough."""
        member.doubt(0.0)
        swarm.claims_doubted.pop(member.host, None)
        for stripe, parent in enumerate(member.parents):
            if parent == FROM_ORIGIN and stripe not in member.rescued and _reads_beside(swarm, stripe, member):
                swarm.edges.detach(stripe, member.host)
                self.schedule.ask(swarm.key, "trusted", now)
        member.set_slots(max(member.slots, self.reputation.slots(self.hosts[member.host], swarm, now=now)))


def _testifies(swarm: Swarm, child: Member, stripe: int) -> bool:
    """Whether it says something of its parent that a child gets nothing of a stripe: it has nothing
    at all, or other stripes come to it still, or it has no others to compare with. Where nothing
    comes to a host that has pieces, from whichever parent, its own link may be cut, or that of its
    rack or site. A WAN may be cut, too."""
    if not any(child.counts):
        return True
    if imports(swarm, child, stripe):
        return False
    others = [other for other, total in enumerate(swarm.totals) if other != stripe and child.counts[other] < total]
    since = child.moved_at[stripe]
    return not others or any(not _untouched(child, other) and child.moved_at[other] > since for other in others)


def _reads_beside(swarm: Swarm, stripe: int, member: Member) -> bool:
    """Whether another host at a member's site, which nobody doubts, has a lease of the stripe."""
    holders = (swarm.members[name] for name in swarm.edges.roots[stripe] if name != member.host)
    return any(each.site == member.site and not each.doubted_until and stripe not in each.rescued for each in holders)


def _untouched(member: Member, stripe: int) -> bool:
    """Whether no piece of a stripe came since the member has its parent."""
    return member.moved_at[stripe] == member.attached_at[stripe]
