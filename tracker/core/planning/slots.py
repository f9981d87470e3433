"""Upload slots: the stripes to which hosts' slots are allotted.

Theory. In each stripe a rack with n receivers has one importer, which receives from outside, and
needs n - 1 slots for the others; the swarm needs one more for every rack except those that have a
root. All hosts together have just enough slots, so these are allotted exactly. Hosts that name no
rack form one rack, and then the exact slots of a flat tree remain.

Within a rack each stripe first gets a slot that can be reached (of a host that receives the stripe
already), or its newcomers would have to overload a host. Then roots serve the stripe that they
read. Then the rest goes stripe after stripe, so that a host forwards in one stripe or, at a
boundary, in two. A rack has about as many slots over as a host has, and these are its exports: seen
from outside a rack is like a host and forwards mainly in one stripe. Where some hosts receive by
trees and others by BitTorrent, one of the latter gets a slot in each stripe that no host reads yet,
to be its root (planner.py), and the first rack of such hosts exports them all.

Hosts that join in small batches form deep trees, and every level costs the time of a piece. The
trees of a young swarm are therefore drawn anew each time it has grown by GROWTH, which costs O(1)
for each host. But an early host may then get a later one as its parent and wait until that one has
as many pieces. Within one rack trees are drawn anew only while no host has more of a stripe than
there are levels to save. Between racks it is otherwise: a rack that has exported its last slots has
none for its next host, and only trees drawn anew bring those back.
"""

from __future__ import annotations

from tracker.core.host import SITE_END
from tracker.core.member import FROM_ORIGIN, Member
from tracker.core.swarm import Swarm

GROWTH = 1.25
STRAINED_GROWTH = 1.03
STRAINED_MAX = 300
"""Where a host is overloaded, trees of up to so many hosts are drawn anew sooner; in larger ones
that would cost too much, and the load is spread edge by edge (rebalance/overload.py)."""
YOUNG = 0.08
"""A swarm is young while no host has this share of a stripe."""
ABSENT_SHARE = 0.01
"""In a large swarm some host or other has always just died."""

PIECES_MIN = 64
"""A blob of fewer pieces, unless these are large, is complete before its trees could be drawn
anew."""


def allot(swarm: Swarm) -> None:
    """Allot slots that belong to no stripe to the stripes that lack some."""
    unallotted: dict[str, list[Member]] = {}
    for member in swarm.members.values():
        if member.unallotted > 0 and member.present:
            unallotted.setdefault(member.rack, []).append(member)
    if not unallotted:
        return
    exports: dict[str, list[int]] = {}
    chained: dict[str, None] = {}  # sites, each of which is to feed another one
    sources: dict[str, list[bool]] = {}
    for rack, names in swarm.racks.items():
        members = [swarm.members[name] for name in names]
        site = members[0].site
        whole = [any(each.counts[stripe] == total for each in members) for stripe, total in enumerate(swarm.totals)]
        lacking = _lacking(swarm, members, whole)
        if rack in unallotted:
            _allot_inside(swarm, rack, unallotted[rack], lacking)
        if SITE_END in members[0].zone:
            chained[site] = None
        counts = exports.setdefault(site, [0] * swarm.stripes)
        has_source = sources.setdefault(site, [False] * swarm.stripes)
        for stripe, roots in enumerate(swarm.edges.roots):
            root = any(host in names for host in roots)
            counts[stripe] += (not whole[stripe] and not root) + min(0, lacking[stripe])
            has_source[stripe] = has_source[stripe] or whole[stripe] or root
    if len(swarm.racks) > 1:
        for site, counts in exports.items():
            # Where no host has the stripe yet, the first rack of the site will read it from the
            # origin, or import it from another site.
            needed = [
                count - (not has_source) + (site in chained and _lacks_source(sources, stripe, site))
                for stripe, (count, has_source) in enumerate(zip(counts, sources[site], strict=True))
            ]
            _allot_exports(
                swarm, {rack: unallotted[rack] for rack in unallotted if unallotted[rack][0].site == site}, needed
            )


def _lacks_source(sources: dict[str, list[bool]], stripe: int, site: str) -> bool:
    """Whether another site has no source of a stripe yet."""
    return any(not has_source[stripe] for other, has_source in sources.items() if other != site)


def _lacking(swarm: Swarm, members: list[Member], whole: list[bool]) -> list[int]:
    """Per stripe the slots that a rack lacks for its own hosts; below zero those that it has over.
    A rack that has the whole of a stripe needs no importer."""
    lacking = [whole[stripe] - 1 for stripe in range(swarm.stripes)]
    for stripe, total in enumerate(swarm.totals):
        for member in members:
            lacking[stripe] += (member.counts[stripe] < total and not member.slow_receiver) - member.allotted[stripe]
    return lacking


def _allot_inside(swarm: Swarm, rack: str, unallotted: list[Member], lacking: list[int]) -> None:
    """Allot slots of a rack to what the rack itself lacks; `unallotted` are its hosts that have
    some."""
    present = [member for member in (swarm.members[name] for name in swarm.racks[rack]) if member.present]
    for stripe in range(swarm.stripes):
        if lacking[stripe] > 0 and not any(
            each.free(stripe) > 0 and _attached(swarm, each, stripe) for each in present
        ):
            candidates = [each for each in unallotted if each.unallotted > 0 and _attached(swarm, each, stripe)]
            best = max(
                candidates, key=lambda each: (each.host in swarm.edges.roots[stripe], each.unallotted), default=None
            )
            if best is not None:
                _allot(best, stripe, lacking, 1)
    if swarm.mixed:
        _allot_readers(swarm, unallotted, lacking)
    for stripe, holders in enumerate(swarm.edges.roots):
        for host in holders:
            if swarm.members[host].rack == rack:
                _allot(swarm.members[host], stripe, lacking, swarm.members[host].unallotted)
    # Taken from the end: members that serve a stripe already, then those with the most slots.
    pool = [member for member in unallotted if member.unallotted > 0]
    pool.sort(key=lambda member: (any(member.allotted), member.slots, member.order))
    for stripe in sorted(range(swarm.stripes), key=lambda stripe: -lacking[stripe]):
        while lacking[stripe] > 0 and pool:
            _allot(pool[-1], stripe, lacking, pool[-1].unallotted)
            if not pool[-1].unallotted:
                pool.pop()


def _allot_readers(swarm: Swarm, unallotted: list[Member], lacking: list[int]) -> None:
    """Allot a slot of a host that receives by BitTorrent in each stripe without a root, of another
    host each time if possible."""
    pool = [member for member in unallotted if member.host in swarm.swarming]
    for stripe, holders in enumerate(swarm.edges.roots):
        if not holders and pool:
            _allot(max(pool, key=lambda each: (each.unallotted, each.order)), stripe, lacking, 1)


def _allot_exports(swarm: Swarm, unallotted: dict[str, list[Member]], lacking: list[int]) -> None:
    """Allot the slots that racks have over to the stripes that still have to reach other racks, in
    each stripe first those of the rack that has its root or shall have it."""
    racks = sorted(unallotted, key=lambda rack: min(member.order for member in unallotted[rack]))
    mixed = (
        [rack for rack in racks if any(each.host in swarm.swarming for each in unallotted[rack])] if swarm.mixed else []
    )
    homes = [{swarm.members[root].rack for root in roots} or set(mixed[:1]) for roots in swarm.edges.roots]
    for slots in (1, swarm.stripes):
        for stripe in range(swarm.stripes):
            for rack in racks:
                if rack in homes[stripe]:
                    member = max(unallotted[rack], key=lambda each: each.unallotted)
                    _allot(member, stripe, lacking, slots)
    stripes = sorted(range(swarm.stripes), key=lambda stripe: -lacking[stripe])
    for rack in racks:
        for member in sorted(unallotted[rack], key=lambda each: -each.order):
            while member.unallotted > 0 and stripes:
                if lacking[stripes[0]] > 0:
                    _allot(member, stripes[0], lacking, member.unallotted)
                else:
                    stripes.pop(0)


def outgrown(swarm: Swarm) -> bool:
    """Whether a young swarm has grown so much since its trees were drawn, or got hosts for which
    there were no slots, that drawing them anew pays. Looking at all trees costs as much as a plan,
    so it is done again only once the swarm has grown (Passes.kept_for)."""
    if (
        swarm.receivers <= swarm.passes.drawn_for
        or not swarm.passes.drawn_for
        or swarm.passes.begun
        or (swarm.layout.count < PIECES_MIN and not swarm.layout.large)
    ):
        return False
    if swarm.receivers != len(swarm.members) or swarm.receivers < STRAINED_GROWTH * swarm.passes.kept_for:
        return False
    if (
        swarm.receivers
        < (STRAINED_GROWTH if swarm.passes.strained and swarm.receivers <= STRAINED_MAX else GROWTH)
        * swarm.passes.drawn_for
    ):
        return False
    ahead = max(max(member.counts) for member in swarm.members.values())
    absent = sum(not each.present for each in swarm.members.values())
    if ahead >= YOUNG * swarm.layout.count / swarm.stripes or absent > ABSENT_SHARE * len(swarm.members):
        return False
    if len(swarm.racks) > 1 or ahead <= max(0, _levels(swarm) - _levels_anew(swarm)):
        return True
    if not swarm.edges.unplanned:  # a host that waits may make trees deeper
        swarm.passes.keep(swarm.receivers)
    return False


def _levels(swarm: Swarm) -> int:
    """Hosts on the longest path down a tree."""
    deepest = 0
    for stripe in range(swarm.stripes):
        depths: dict[str | None, int] = {None: 0, FROM_ORIGIN: 0}
        for host, member in swarm.members.items():
            path, current = [host], member.parents[stripe]
            while current not in depths:
                path.append(current or "")
                current = swarm.members[current or ""].parents[stripe]
            for name in reversed(path):
                depths[name] = depths[current] + 1
                current = name
        deepest = max(deepest, *depths.values())
    return deepest


def _levels_anew(swarm: Swarm) -> int:
    """Hosts on the longest path down if all were attached together: the hosts that forward the
    stripe at the top, the others below them."""
    fanout = max(2, swarm.fanout)
    levels = inner = width = 1
    while inner * fanout < swarm.receivers:
        width *= fanout
        inner += width
        levels += 1
    return levels + 1


def clear(swarm: Swarm) -> dict[str, tuple[str | None, ...]]:
    """Take all slots from the stripes and detach all hosts but the roots; return the former parents
    of the hosts that know them, by stripe."""
    parents: dict[str, tuple[str | None, ...]] = {}
    for host, member in swarm.members.items():
        member.clear_slots()
        untold = swarm.edges.changed.get(host, ())
        known = tuple(parent if stripe not in untold else None for stripe, parent in enumerate(member.parents))
        if any(known):
            parents[host] = known
        for stripe, parent in enumerate(member.parents):
            if parent:
                swarm.edges.detach(stripe, host)
    return parents


def _attached(swarm: Swarm, member: Member, stripe: int) -> bool:
    """Whether others can receive the stripe from the host now."""
    return member.parents[stripe] is not None or member.counts[stripe] == swarm.totals[stripe]


def _allot(member: Member, stripe: int, lacking: list[int], slots: int) -> None:
    """Allot up to `slots` of the member's unallotted slots to a stripe, no more than it lacks."""
    taken = min(slots, member.unallotted, lacking[stripe])
    if taken > 0:
        member.allot(stripe, taken)
        lacking[stripe] -= taken
