"""Repair: takes apart what does not work, so that the planner can put it together anew, and takes
over streams that run already.

Theory. A host that stands still complains of its parent. Where the parent has more of the stripe
than the host has, the edge between them is at fault. Where it has no more, a host higher up is held
up, and moving this host would help no host: the complaint is followed up to the edge that blocks
(Edges.blocked). The host below that edge complains as well. Once it has done so STUCK_COMPLAINTS
times without getting a piece, it may be cut off from all others, and its children are freed.

A lease of a holder that cannot read the origin, or passes on nothing good of what it reads, goes to
one of its children. The origin itself may be away, so leases move with growing pauses, from
LEASE_MOVE_S, unless the holder says that the content is wrong. Where agents bring along a lease for
a stripe that has one, as when the tracker restarted and a newcomer spoke first, the holder with the
most pieces keeps it: the others would read again what it has read. Once a host has the whole of a
stripe, no host reads that from the origin any more. A holder may also stop after a while. Its
children have all that it has then, and one that complained keeps waiting: after DRY_S the lease
goes to the one with the most pieces, and nothing is read again.

Reattaching. After a restart of the tracker, or a break of its session, an agent says from which
hosts it receives. Such a stream becomes an edge and runs on, unless it would close a cycle, or
reads from the origin what another host of its site reads or any host has. While no tracker
answered, a superpeer may have begun to read (p2pdist/core/sources.py): it gets the lease now, or a
parent.
"""

from __future__ import annotations

from collections.abc import Callable

from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.swarm import Swarm

AVOID_S = 5.0
AVOID_CORRUPT_S = 600.0
"""As long as the host that met wrong bytes leaves their source alone (p2pdist/core/sources.py)."""

STUCK_COMPLAINTS = 2
"""So often a host must have complained, with no piece in between, before its parent is taken for
stuck, or a lease moves on its account: what a reader has not passed on is read again."""

GIVES_S = 3.0
GIVING_COMPLAINTS = 5
"""A parent that has sent something within GIVES_S is not stuck: the path from it may be slow. With
pauses that double, so many complaints take 18 s. Until then the planner takes it again rather than
the origin, though rather any other parent."""

SLOW_RECEIVER_COMPLAINTS = 3
"""Over a slow downlink a piece takes long from any parent, and what came of it is lost with every
change: only once the host has complained so often since it last got a piece is its parent at
fault."""

DRY_S, DRY_PIECES = 5.0, 8.0
"""A holder of a lease has stopped that got no piece for so long, and for so many times as long as
its pieces took so far."""

DRY_SOON_S = 0.5
"""The same where the whole pull of the host that waits stands still, longer than its own pieces
explain: the holder's reports may be old by the interval between two."""

LEFT_S, AHEAD_PIECES = 0.5, 2.0
"""A host that left its parent for an alternate goes back after so long at the earliest, when it
takes that source again (p2pdist/core/sources.py), and with so many pieces at most that the parent
lacks."""

UNDER_WAY_TURNS = 3.0
"""A parent that gets a large piece has passed it on after one turn (PieceLayout.turn_s), as a
rule."""


def reattach(swarm: Swarm, member: Member, stripe: int, parent: str | None, add_absent: Callable[[str], bool]) -> None:
    """Take over a stream that runs already. A host without one is told its parent again, or waits
    for another when that is away. `add_absent` adds an unknown parent to the swarm and says whether
    it could."""
    host, known = member.host, member.parents[stripe]
    member.set_superpeers(())  # its agent may have started anew
    if member.counts[stripe] == swarm.totals[stripe] or parent == known:
        return
    if known is not None:
        swarm.edges.notify(host, stripe)
        if parent is None and known != FROM_ORIGIN and not swarm.members[known].present:
            swarm.edges.detach(stripe, host)
    if parent == FROM_ORIGIN and host in swarm.origin.barred:
        return
    if parent is None or (parent == FROM_ORIGIN and (_is_whole(swarm, stripe) or not yield_lease(swarm, stripe, host))):
        return
    if parent != FROM_ORIGIN:
        if parent not in swarm.members and not add_absent(parent):
            return
        if swarm.edges.receives_through(stripe, parent, host):
            return
        upper = swarm.members[parent]
        if upper.free(stripe) <= 0:
            upper.grant_slot(stripe)
        parent = upper.host  # not the string of the message, of which each child would keep its own
    swarm.edges.attach(stripe, host, parent)
    swarm.passes.begin()


def _is_whole(swarm: Swarm, stripe: int) -> bool:
    """Whether a host that is present has the whole stripe."""
    return any(each.serves and each.counts[stripe] == swarm.totals[stripe] for each in swarm.members.values())


def avoid_s(member: Member, stripe: int, reason: str) -> float:
    """For how long a host is not given a source again that failed it: the longer, the more often it
    complained since it last got a piece, so that a host that several fail in a row tries the others
    first."""
    return AVOID_CORRUPT_S if reason == "corrupt" else AVOID_S * 2.0 ** min(4, member.complaints[stripe] - 1)


def at_fault(swarm: Swarm, child: Member, stripe: int) -> bool:
    """Whether a host stands still in a stripe because of its parent, or the edge to it."""
    parent = swarm.members.get(child.parents[stripe] or "")
    reads = parent is not None and parent.parents[stripe] == FROM_ORIGIN
    if child.complaints[stripe] < (
        SLOW_RECEIVER_COMPLAINTS if child.slow_receiver else STUCK_COMPLAINTS if reads else 1
    ):
        return False
    return swarm.edges.blocked(stripe, child.host) == child.host


def in_flight(swarm: Swarm, child: Member, stripe: int, rate_bytes_s: float, *, now: float) -> bool:
    """Whether the piece that a host waits for may still be on its way, as its parent has had it for
    a few turns only. Where pieces are large and the parent stood still itself, its children
    complain when that is just over. `rate_bytes_s`: of a typical uplink, 0 while not known."""
    parent = swarm.members.get(child.parents[stripe] or "")
    if parent is None or parent.counts[stripe] != child.counts[stripe] + 1:
        return False
    since = max(parent.moved_at[stripe], child.attached_at[stripe])
    return now - since < UNDER_WAY_TURNS * swarm.layout.turn_s(rate_bytes_s)


def call_back(swarm: Swarm, child: Member, *, now: float) -> bool:
    """Tell a host its parents again that it left as they stood still, where these go on and have
    about as much as it has; return whether it is to be told. An alternate has no upload slot for
    it, and serves it at the cost of its own children. A parent that stands still again is judged by
    what it has then."""
    told = False
    for stripe, name in enumerate(child.parents):
        since, parent = swarm.edges.left.get((stripe, child.host)), swarm.members.get(name or "")
        if since is None or now - since < LEFT_S or parent is None or not parent.serves:
            continue
        has = parent.counts[stripe] + parent.rates[stripe] * (now - parent.heard_at)
        if parent.moved_at[stripe] > since and has >= child.counts[stripe] - AHEAD_PIECES:
            swarm.record(now, f"{child.host} goes back to {parent.host} in stripe {stripe}")
            swarm.edges.notify(child.host, stripe)
            told = True
    return told


def free_blocked(swarm: Swarm, stripe: int, child: str, *, now: float) -> bool:
    """A host above `child` is held up: free its children if it is stuck; return whether it is."""
    host = swarm.edges.blocked(stripe, child)
    if host is None or host == child:
        return False
    member = swarm.members[host]
    if member.complaints[stripe] < STUCK_COMPLAINTS or not member.children[stripe]:
        return False
    swarm.record(now, f"{host} is stuck in stripe {stripe} and loses its children there")
    for each in list(member.children[stripe]):
        swarm.edges.avoid(each, host, now + AVOID_S)
        swarm.edges.detach(stripe, each)
    swarm.edges.detach(stripe, host)
    return True


def move_lease(swarm: Swarm, stripe: int, host: str, *, now: float, at_once: bool) -> bool:
    """Take a stripe's lease from its holder; its children may get it, the one with the most pieces
    first. Return whether it moved."""
    member = swarm.members[host]
    if member.parents[stripe] != FROM_ORIGIN:
        return False
    if not at_once and swarm.origin.lease_rests(stripe, now=now):
        return False
    if not any(_lacks(other, swarm, stripe) for other in swarm.members.values() if other is not member):
        return False
    swarm.origin.lease_moved(stripe, now=now)
    swarm.edges.avoid(host, FROM_ORIGIN, now + AVOID_S)
    for child in list(member.children[stripe]):
        swarm.edges.detach(stripe, child)
    swarm.edges.detach(stripe, host)
    return True


def top_of(swarm: Swarm, stripe: int, child: Member) -> Member:
    """The nearest host above `child` that says that it has more of a stripe, else the last one."""
    top = child
    for _ in range(len(swarm.members)):
        if not top.parents[stripe] or top.counts[stripe] > child.counts[stripe]:
            break
        top = swarm.members[top.parents[stripe] or ""]
    return top


def source_above(swarm: Swarm, stripe: int, child: str) -> Member | None:
    """The nearest host above `child` that says that it has more of a stripe; None where none
    does."""
    top = top_of(swarm, stripe, swarm.members[child])
    return top if top.counts[stripe] > swarm.members[child].counts[stripe] else None


def pass_on_lease(swarm: Swarm, stripe: int, child: str, *, now: float, dry_s: float = DRY_S) -> bool:
    """Take a stripe's lease from its holder, which has stopped for `dry_s`, where a host that
    receives through it waits for the next piece; return whether it moved. The planner gives it to
    the host with the most pieces of those that lose their parents here."""
    waiting = swarm.members[child]
    root = top_of(swarm, stripe, waiting)
    count = root.counts[stripe]
    if root.parents[stripe] != FROM_ORIGIN or root is waiting or not 0 < count <= waiting.counts[stripe]:
        return False
    complains = dry_s < DRY_S or waiting.complaints[stripe] >= STUCK_COMPLAINTS
    if not root.present or root.host in swarm.swarming or not complains:
        return False
    since = root.moved_at[stripe]
    if now - since < max(dry_s, DRY_PIECES * (since - root.joined_at) / count):
        return False
    if not move_lease(swarm, stripe, root.host, now=now, at_once=False):
        return False
    swarm.record(now, f"{root.host} loses the lease of stripe {stripe}: it has stopped reading")
    swarm.edges.detach(stripe, child)
    return True


def _lacks(member: Member, swarm: Swarm, stripe: int) -> bool:
    """Whether a member is present and lacks pieces of the stripe."""
    return member.present and member.counts[stripe] < swarm.totals[stripe]


def yield_lease(swarm: Swarm, stripe: int, host: str) -> bool:
    """Whether a host that reads a stripe from the origin may go on: it has more of it than the
    holders of its site's lease, which then lose it."""
    count, site = swarm.members[host].counts[stripe], swarm.members[host].site
    holders = [
        holder
        for holder in swarm.edges.roots[stripe]
        if swarm.members[holder].site == site and stripe not in swarm.members[holder].rescued
    ]
    if any(swarm.members[holder].counts[stripe] >= count for holder in holders):
        return False
    for holder in holders:
        swarm.edges.detach(stripe, holder)
    return True


def release_leases(swarm: Swarm, host: str) -> bool:
    """Where a host has the whole of a stripe, take the lease from the hosts that still hold one;
    return whether any did."""
    member, found = swarm.members[host], False
    counts, totals = member.counts, swarm.totals
    for stripe, holders in enumerate(swarm.edges.roots):
        if counts[stripe] == totals[stripe] and holders and member.serves:
            found = True
            for holder in list(holders):
                if stripe not in swarm.members[holder].rescued:
                    swarm.edges.detach(stripe, holder)
    return found


def demote(swarm: Swarm, member: Member, slots: int, *, now: float) -> None:
    """Reduce a host's upload slots. Its children wait for other parents, and it does too where it
    had any: its best child takes its position, and it becomes a leaf; as a root it makes room for
    another. Slow receivers stay until there is a better parent (planning/slow_receivers.py)."""
    member.reduce_slots(slots, now=now)
    for stripe in range(swarm.stripes):
        if member.children[stripe] and not member.seed:
            if member.parents[stripe] == FROM_ORIGIN:
                swarm.edges.avoid(member.host, FROM_ORIGIN, now + AVOID_S)
            swarm.edges.detach(stripe, member.host)
        for child in list(member.children[stripe]):
            if not swarm.members[child].slow_receiver:
                swarm.edges.detach(stripe, child)
