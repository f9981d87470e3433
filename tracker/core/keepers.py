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
"""

from __future__ import annotations

from p2pdist.model.rendezvous import ranked
from tracker.core.swarm import Swarm

KEEPERS = 8
READERS = 32
SPARES = 8
"""Chosen beside the READERS, of whom some may be away (dealing.py)."""

GROWTH = 1.25
ZONES_MAX = 1000
"""Zones of a swarm whose keepers are remembered."""


def keepers(swarm: Swarm, zone: str, count: int = KEEPERS) -> tuple[str, ...]:
    """The keepers of a zone; absent ones may be among them. O(count) where the choice stands, else
    O(members of the zone)."""
    members = swarm.zones.get(zone, {})
    key = zone if count == KEEPERS else f"{zone} {count}"  # names of zones hold no space
    names, among = swarm.keepers.get(key, ((), 0))
    if len(members) >= GROWTH * among or not all(_fit(swarm, name, zone) for name in names):
        fit = (name for name in members if _fit(swarm, name, zone))
        names = tuple(ranked(swarm.blob.encode(), fit, count))
        if len(swarm.keepers) >= ZONES_MAX:
            swarm.keepers.clear()
        swarm.keepers[key] = names, len(members)
    return names


def _fit(swarm: Swarm, name: str, zone: str) -> bool:
    member = swarm.members.get(name)
    return member is not None and member.zone == zone and member.budget > 0 and not member.light
