"""Keepers: the hosts of a zone that the others turn to while no tracker answers, and the only ones that then read the origin
(p2pdist/core/candidates.py).

Up to KEEPERS of a zone's members, chosen by rendezvous hashing on the blob (p2pdist/model/rendezvous.py), so that a tracker which knows
nothing yet names the same hosts as the one before it. Those that serve nobody (budget 0) or receive slowly are passed over. Choosing
takes a look at every member of the zone, so it is done again only once a keeper is gone or no longer fit, or the zone has grown
by a quarter.
"""

from __future__ import annotations

from p2pdist.model.rendezvous import ranked
from tracker.core.swarm import Swarm

KEEPERS = 8
GROWTH = 1.25
ZONES_MAX = 1000
"""Zones of a swarm whose keepers are remembered."""


def keepers(swarm: Swarm, zone: str) -> tuple[str, ...]:
    """The keepers of a zone; absent ones may be among them. O(racks) where the choice stands."""
    racks = [hosts for rack, hosts in swarm.racks.items() if rack.startswith(f"{zone} ")]
    members = sum(map(len, racks))
    names, among = swarm.keepers.get(zone, ((), 0))
    if members >= GROWTH * among or not all(_fit(swarm, name, zone) for name in names):
        fit = (name for hosts in racks for name in hosts if _fit(swarm, name, zone))
        names = tuple(ranked(swarm.blob.encode(), fit, KEEPERS))
        if len(swarm.keepers) >= ZONES_MAX:
            swarm.keepers.clear()
        swarm.keepers[zone] = names, members
    return names


def _fit(swarm: Swarm, name: str, zone: str) -> bool:
    member = swarm.members.get(name)
    return member is not None and member.zone == zone and member.budget > 0 and not member.light
