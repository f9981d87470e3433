"""Keepers: the hosts of a zone that the others turn to while no tracker answers, and the only ones
that then read the origin (p2pdist/core/sources.py).

Up to KEEPERS of a zone's members, chosen by rendezvous hashing on the blob
(p2pdist/model/rendezvous.py), so that a tracker which knows nothing yet names the same hosts as the
one before it. Those that serve nobody (budget 0) or receive slowly are passed over. Choosing takes
a look at every member of the zone, so it is done again only once a keeper is gone or no longer fit,
or the zone has grown by a quarter.

Where a blob goes through a BitTorrent swarm there are up to READERS instead, who read it by parts
(dealing.py): who has something to give is given to, and a few would trade among themselves at
first.

Dealing: where all who receive a blob do so by BitTorrent, the keepers of each zone read it from
the origin, each its part.

Theory. See p2pdist/core/origin_seeding.py for how the parts are dealt: hosts must name the same
keepers, so those to whom a blob is dealt are told at once when its keepers change. The next in the
order reads in the place of one that is away, and goes on when that one is given up: to tell ten
thousand hosts takes the tracker half a second, and so it does this once.

Each keeper counts as a lease. Where there are not leases for all of them, and as soon as somebody
receives by trees, the holders of the stripes' leases read instead. Nor is a blob dealt of which
somebody has the whole and did not get it by BitTorrent: the keepers would read what none of their
peers has, and nobody needs to read any more (repair.py). It comes from that host, who may answer
BitTorrent too, or by trees once the swarm stands still. Who became whole in the swarm is known
there, and ends nothing: else all would be told whenever the first one is done. But nothing is dealt
anew where somebody has the whole: who comes late would read what it has not heard of yet.

Nor is a blob dealt again that a keeper could not read: what becomes of the swarm then is for the
holders of leases to find out (repair.py).
"""

from __future__ import annotations

from p2pdist.model.rendezvous import ranked
from tracker.core.swarm import Swarm


def share_origin(swarm: Swarm, room: int) -> None:
    """Say who reads the parts of the blob, or that nobody does; `room` is how many leases the swarm
    may hold."""
    by_swarm = bool(swarm.swarming) and len(swarm.swarming) == swarm.receivers
    by_keepers = (
        by_swarm
        and not swarm.tree_seeds
        and not swarm.origin.sharing_failed
        and bool(swarm.origin.shares or not _whole(swarm))
    )
    dealt: dict[str, tuple[str, ...]] = {}
    for zone in {swarm.members[host].zone for host in swarm.swarming} if by_keepers else ():
        named = superpeers(swarm, zone, READERS + RESERVES)
        present = tuple(name for name in named if swarm.members[name].present)[:READERS]
        if present:
            dealt[zone] = present
    if sum(map(len, dealt.values())) > room:
        dealt = {}
    if dealt == swarm.origin.shares:
        return
    before = swarm.origin.shares
    swarm.origin.share(dealt)
    for host in swarm.swarming:
        zone = swarm.members[host].zone
        if before.get(zone) != dealt.get(zone):
            for stripe in range(swarm.stripes):
                swarm.edges.notify(host, stripe)


def _whole(swarm: Swarm) -> bool:
    """Whether somebody who is there has the whole blob."""
    seeds = len(swarm.members) > swarm.receivers
    return seeds and any(member.seed and member.present for member in swarm.members.values())


SUPERPEERS = 8
READERS = 32
RESERVES = 8
"""Chosen beside the READERS, of whom some may be away (dealing.py)."""

GROWTH = 1.25


def superpeers(swarm: Swarm, zone: str, count: int = SUPERPEERS) -> tuple[str, ...]:
    """The keepers of a zone; absent ones may be among them. O(count) where the choice stands, else
    O(members of the zone)."""
    members = swarm.zones.get(zone, {})
    key = zone if count == SUPERPEERS else f"{zone} {count}"  # names of zones hold no space
    names, among = swarm.origin.superpeers.get(key, ((), 0))
    if len(members) >= GROWTH * among or not all(_fit(swarm, name, zone) for name in names):
        fit = (name for name in members if _fit(swarm, name, zone))
        names = tuple(ranked(swarm.blob.encode(), fit, count))
        swarm.origin.choose(key, names, len(members))
    return names


def _fit(swarm: Swarm, name: str, zone: str) -> bool:
    member = swarm.members.get(name)
    return member is not None and member.zone == zone and member.slots > 0 and not member.slow_receiver
