"""An index of addresses: the zone and rack of the agents at each.

BitTorrent clients name no zone and rack, but a client on a host with an agent has those of the
agent. The index does not look names up: an agent that gives a name as its address is not in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from p2pdist.model.address import host_part, ip_of
from tracker.core.host import Host

REFRESH_S = 5.0
"""How long the index is good for. Making it takes about a millisecond for 10,000 hosts."""


@dataclass(slots=True)
class AddressIndex:
    """Zones and racks by packed address, read from the fleet's hosts every REFRESH_S."""

    hosts: dict[str, Host]
    _places: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    _fresh_until: float = -inf

    def find(self, ip: bytes, *, now: float) -> tuple[str, str]:
        """Zone and rack of the agents at a packed address; empty where there are none, or where
        they differ."""
        if now >= self._fresh_until:
            self._places, self._fresh_until = self._look(), now + REFRESH_S
        return self._places.get(ip, ("", ""))

    def _look(self) -> dict[bytes, tuple[str, str]]:
        places: dict[bytes, tuple[str, str]] = {}
        for host in self.hosts.values():
            ip = packed_ip(host.address)
            if ip is None:
                continue
            zone, rack = places.setdefault(ip, (host.zone, host.rack))
            if (zone, rack) != (host.zone, host.rack):
                places[ip] = (zone, "") if zone == host.zone else ("", "")
        return places


@lru_cache(maxsize=1 << 16)
def packed_ip(address: str) -> bytes | None:
    """The IP address in `host:port` or `[IPv6]:port` in 4 or 16 bytes; None for a name."""
    ip = ip_of(host_part(address))
    return ip.packed if ip is not None else None
