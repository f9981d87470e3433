"""What GET /v1/swarms says of a swarm, compared with the fleet and with /metrics."""

from __future__ import annotations

import aiohttp
from fleet_rig import fleet_of, join_all, tracker_of

LEASES = "p2pdist_tracker_origin_leases "


async def leases_reported(url: str) -> tuple[int, int]:
    """The origin leases of all swarms: by /v1/swarms and by /metrics."""
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/v1/swarms") as answer:
            swarms = await answer.json()
        async with http.get(f"{url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
    (metric,) = [line.removeprefix(LEASES) for line in lines if line.startswith(LEASES)]
    return sum(swarm["origin_leases"] for swarm in swarms), int(float(metric))


async def test_superpeers_that_read_parts_of_a_blob_count_as_leases() -> None:
    """All hosts receive by BitTorrent, so superpeers share the reading, and no stripe has as many
    roots."""
    hosts = fleet_of(6, zones=1)
    for name in hosts.sessions:
        hosts.hold(name, swarm=True)
    hosts.pass_time(1.0)
    (swarm,) = hosts.fleet.swarms.values()
    assert swarm.leases() == 6 != sum(map(len, swarm.edges.roots))
    async with tracker_of(hosts) as (_, url):
        assert await leases_reported(url) == (6, 6)


async def test_roots_of_stripes_count_as_leases() -> None:
    """All hosts receive by trees: one root for each of the two stripes."""
    hosts = fleet_of(6, zones=1)
    join_all(hosts)
    async with tracker_of(hosts) as (_, url):
        assert await leases_reported(url) == (2, 2)
