"""Which addresses an agent may say that it has: that of its connection, those in the networks of
the access file, and names that begin with its host's own."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

from p2pdist.model.errors import Refused
from tracker.access.file import Network

IPAddress = IPv4Address | IPv6Address


def check_addresses(addresses: Iterable[str], *, host: str, remote: str, networks: Iterable[Network]) -> None:
    """Raises Refused for an address that the host may not have. `remote` is where its connection
    comes from."""
    here, allowed = _ip(remote), tuple(networks)
    for address in addresses:
        ip = _ip(address)
        if ip is None:
            own, name = host.lower(), address.lower()
            if name != own and not name.startswith(f"{own}."):
                raise Refused(
                    f"{host[:100]} may not be reached at {address[:100]!r}: the name does not begin with the host's own",
                    remedy="Name an IP address with --advertise, or give the agent that --name",
                )
        elif not (_same(ip, here) or any(ip in network for network in allowed)):
            raise Refused(
                f"{host[:100]} connects from {remote[:100]} and may not be reached at {ip}",
                remedy="Add its network to networks in the tracker's access file, or change --advertise",
            )


def _same(ip: IPAddress, here: IPAddress | None) -> bool:
    return here is not None and (ip == here or (ip.is_loopback and here.is_loopback))


def _ip(text: str) -> IPAddress | None:
    try:
        ip = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return mapped or ip
