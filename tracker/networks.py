"""Which addresses the tracker believes that an agent may be reached at.

Any process may say hello and name an address, to which other agents and the tracker then connect. A
loopback address means another machine for each that uses it, and a link-local one is good on one
link: they are believed of agents whose session comes from there. An operator may narrow all others
to networks (`--networks`). A name is not looked up here: agents look it up when they connect.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from p2pdist.model.errors import Refused, UsageError
from p2pdist.model.messages import Hello
from p2pdist.transfer.stream.connect import parse_address

Network = IPv4Network | IPv6Network
NETWORKS_MAX = 256


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks in CIDR notation, separated by commas. Raises UsageError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        found = tuple(ip_network(part, strict=False) for part in parts)
    except ValueError as error:
        raise UsageError(f"--networks {text[:200]!r}: {error}", remedy="Give networks such as 10.0.0.0/8") from error
    if len(found) > NETWORKS_MAX:
        raise UsageError(f"--networks names more than {NETWORKS_MAX} networks")
    return found


def check_address(hello: Hello, remote: str, networks: Iterable[Network]) -> None:
    """Raises Refused for an address that is not believed of an agent whose session comes from the
    address `remote`; empty where that is not known."""
    try:
        name, _ = parse_address(hello.address)
    except ValueError as error:
        raise UsageError(f"{hello.host} cannot be reached: {error}", remedy="Give --advertise HOST:PORT") from error
    found, seen = _parsed(name), _parsed(remote)
    advice = "Give the agent --advertise with an address at which others reach it"
    last = name.rstrip(".").rpartition(".")[2].lower()
    if found is None and (last.isdigit() or last.startswith("0x")):
        # Resolvers take such a text for an IPv4 address, 127.1 for 127.0.0.1.
        raise Refused(f"{hello.host} gives the address {hello.address}, which is neither IP nor name", remedy=advice)
    if found is None and last == "localhost":
        found = IPv4Address("127.0.0.1")
    if found is None:
        if networks:
            raise Refused(
                f"{hello.host} gives the name {name[:255]}, and this tracker takes addresses of its networks only",
                remedy=advice,
            )
        return
    if (found.is_loopback or found.is_unspecified) and seen is not None and not seen.is_loopback:
        raise Refused(
            f"{hello.host} gives the address {hello.address}, which is another machine for each that asks",
            remedy=advice,
        )
    if found.is_multicast or (found.is_link_local and seen is not None and not (seen.is_link_local or seen == found)):
        raise Refused(f"{hello.host} gives the address {hello.address}, which others cannot use", remedy=advice)
    inside = [network for network in networks if network.version == found.version and found in network]
    if networks and not inside and not found.is_loopback:
        raise Refused(
            f"{hello.host} gives the address {hello.address}, outside the networks of this tracker",
            remedy="Start the tracker with --networks that hold it, or give the agent --advertise",
        )


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    """An address in numbers, an IPv4 address in IPv6 notation as such; None for any other text."""
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found
