"""Dealing: where all who receive a blob do so by BitTorrent, the keepers of each zone read it from
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

from tracker.core.keepers import READERS, SPARES, keepers
from tracker.core.swarm import Swarm


def deal(swarm: Swarm, room: int) -> None:
    """Say who reads the parts of the blob, or that nobody does; `room` is how many leases the swarm
    may hold."""
    by_swarm = bool(swarm.swarming) and len(swarm.swarming) == swarm.receivers
    by_keepers = by_swarm and not swarm.tree_seeds and not swarm.undealt and bool(swarm.dealt or not _whole(swarm))
    dealt: dict[str, tuple[str, ...]] = {}
    for zone in {swarm.members[host].zone for host in swarm.swarming} if by_keepers else ():
        named = keepers(swarm, zone, READERS + SPARES)
        present = tuple(name for name in named if swarm.members[name].present)[:READERS]
        if present:
            dealt[zone] = present
    if sum(map(len, dealt.values())) > room:
        dealt = {}
    if dealt == swarm.dealt:
        return
    before, swarm.dealt = swarm.dealt, dealt
    for host in swarm.swarming:
        zone = swarm.members[host].zone
        if before.get(zone) != dealt.get(zone):
            swarm.changed.update(((host, stripe), None) for stripe in range(swarm.stripes))


def _whole(swarm: Swarm) -> bool:
    """Whether somebody who is there has the whole blob."""
    seeds = len(swarm.members) > swarm.receivers
    return seeds and any(member.seed and member.present for member in swarm.members.values())
