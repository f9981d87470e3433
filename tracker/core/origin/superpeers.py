"""Superpeers: the hosts of a site to which the others turn while no tracker answers, and the only
ones that then read the origin (p2pdist/core/sources.py). Where a blob travels by BitTorrent alone
they read it, each its share, with a tracker too.

Up to SUPERPEERS of a site's members are chosen by rendezvous hashing on the blob
(p2pdist/model/rendezvous.py), so that a tracker which knows nothing yet names the same hosts as the
one before it. Hosts without upload slots and slow receivers are passed over. Choosing looks at
every member of the site, so it is done again only once a superpeer is gone or no longer fit, or the
site has grown by a quarter.

Shares. Where all receivers of a blob receive it by BitTorrent, up to READERS superpeers of each
site read it from the origin, each its share (p2pdist/core/origin_seeding.py): a BitTorrent peer
gives to peers that have something to give, and a few superpeers would at first trade among
themselves. Hosts must name the same superpeers, so the tracker tells superpeers that read shares at
once when these change. The next superpeer in the order reads in place of one that is away, and
goes on when that one is given up: telling ten thousand hosts takes the tracker half a second, and
so it does this once.

Each superpeer that reads counts as a lease. Where there are not leases for all of them, and as soon
as a host receives by trees, the holders of the stripes' leases read instead. A blob is not shared
while a host has the whole of it and did not get it by BitTorrent: the superpeers would read what
none of their peers has, and no host needs to read any more (repair/remedies.py). It comes from that
host, which may answer BitTorrent too, or by trees once the swarm stands still. A host that became
whole in the swarm is known there, and ends no sharing: else all hosts would be told whenever the
first one is done. But sharing does not begin while a host has the whole blob: a late host would
read what it has not heard of yet.

A blob is not shared again after a superpeer could not read its share: the holders of leases then
find out what becomes of the swarm.
"""

from __future__ import annotations

from p2pdist.model.rendezvous import ranked
from tracker.core.swarm import Swarm

SUPERPEERS = 8
"""Superpeers of a site that its hosts are told of."""
READERS = 32
"""Superpeers of a site that read shares."""
RESERVES = 8
"""Chosen beside the READERS, of which some may be away."""

GROWTH = 1.25
"""A site that has grown so much since gets its superpeers chosen anew."""


def share_origin(swarm: Swarm, room: int) -> None:
    """Decide which superpeers read the blob, or that the roots do. `room`: leases that the swarm
    may hold."""
    all_by_bittorrent = bool(swarm.swarming) and len(swarm.swarming) == swarm.receivers
    shared = (
        all_by_bittorrent
        and not swarm.tree_seeds
        and not swarm.origin.sharing_failed
        and bool(swarm.origin.shares or not _whole(swarm))
    )
    shares: dict[str, tuple[str, ...]] = {}
    for site in {swarm.members[host].site for host in swarm.swarming} if shared else ():
        names = superpeers(swarm, site, READERS + RESERVES)
        present = tuple(name for name in names if swarm.members[name].present)[:READERS]
        if present:
            shares[site] = present
    if sum(map(len, shares.values())) > room:
        shares = {}
    if shares == swarm.origin.shares:
        return
    before = swarm.origin.shares
    swarm.origin.share(shares)
    for host in swarm.swarming:
        site = swarm.members[host].site
        if before.get(site) != shares.get(site):
            for stripe in range(swarm.stripes):
                swarm.edges.notify(host, stripe)


def _whole(swarm: Swarm) -> bool:
    """Whether a host that is present has the whole blob."""
    seeds = len(swarm.members) > swarm.receivers
    return seeds and any(member.seed and member.serves for member in swarm.members.values())


def superpeers(swarm: Swarm, site: str, count: int = SUPERPEERS) -> tuple[str, ...]:
    """The superpeers of a site; absent ones may be among them. O(count) where the choice stands,
    else O(members of the site)."""
    members = swarm.sites.get(site, {})
    key = site if count == SUPERPEERS else f"{site} {count}"  # names of sites hold no space
    names, among = swarm.origin.superpeers.get(key, ((), 0))
    if len(members) >= GROWTH * among or not all(_fit(swarm, name, site) for name in names):
        fit = (name for name in members if _fit(swarm, name, site))
        names = tuple(ranked(swarm.blob.encode(), fit, count))
        swarm.origin.choose(key, names, len(members))
    return names


def _fit(swarm: Swarm, name: str, site: str) -> bool:
    """Whether a host may be a superpeer of the site."""
    member = swarm.members.get(name)
    if name in swarm.origin.barred:
        return False
    return member is not None and member.site == site and member.slots > 0 and not member.slow_receiver
