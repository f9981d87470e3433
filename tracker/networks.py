"""Which addresses the tracker believes that an agent may be reached at.

An agent names an address, to which other agents and the tracker then connect. A loopback address
means another machine for each that uses it, and a link-local one is good on one link: the tracker
believes them of agents that connect from there. An operator may narrow all others to
networks (`--networks`). While access is on, an agent also has to show that an address is its own:
it is that of its connection, is in the networks of the access file, or is a name that begins with
the host's own. The tracker looks no name up here: agents do when they connect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_network

from p2pdist.model.address import IPAddress, ip_of, parse_address
from p2pdist.model.errors import Refused, UsageError
from p2pdist.model.messages import Hello

Network = IPv4Network | IPv6Network
NETWORKS_MAX = 256


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks in CIDR notation, separated by commas. Raises UsageError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        networks = tuple(ip_network(part, strict=False) for part in parts)
    except ValueError as error:
        raise UsageError(f"--networks {text[:200]!r}: {error}", remedy="Give networks such as 10.0.0.0/8") from error
    if len(networks) > NETWORKS_MAX:
        raise UsageError(f"--networks names more than {NETWORKS_MAX} networks")
    return networks


def check_address(hello: Hello, remote: str, networks: Iterable[Network]) -> None:
    """Raises Refused for an address that the tracker does not believe of any agent with a session
    that comes from the address `remote`; empty where that is not known."""
    try:
        name, _ = parse_address(hello.address)
    except ValueError as error:
        raise UsageError(f"{hello.host} cannot be reached: {error}", remedy="Give --advertise HOST:PORT") from error
    ip, seen = ip_of(name), ip_of(remote)
    advice = "Give the agent --advertise with an address at which others reach it"
    last = name.rstrip(".").rpartition(".")[2].lower()
    if ip is None and (last.isdigit() or last.startswith("0x")):
        # Resolvers take such a text for an IPv4 address, 127.1 for 127.0.0.1.
        raise Refused(f"{hello.host} gives the address {hello.address}, which is neither IP nor name", remedy=advice)
    if ip is None and last == "localhost":
        ip = IPv4Address("127.0.0.1")
    if ip is None:
        if networks:
            raise Refused(
                f"{hello.host} gives the name {name[:255]}, and this tracker takes addresses of its networks only",
                remedy=advice,
            )
        return
    if (ip.is_loopback or ip.is_unspecified) and seen is not None and not seen.is_loopback:
        raise Refused(
            f"{hello.host} gives the address {hello.address}, which is another machine for each that asks",
            remedy=advice,
        )
    if ip.is_multicast or (ip.is_link_local and seen is not None and not (seen.is_link_local or seen == ip)):
        raise Refused(f"{hello.host} gives the address {hello.address}, which others cannot use", remedy=advice)
    if networks and not _within(ip, networks) and not ip.is_loopback:
        raise Refused(
            f"{hello.host} gives the address {hello.address}, outside the networks of this tracker",
            remedy="Start the tracker with --networks that hold it, or give the agent --advertise",
        )


def check_own(
    names: Iterable[str],
    *,
    host: str,
    remote: str,
    networks: Iterable[Network],
    within: Sequence[Network] = (),
    taken: Collection[str] = (),
) -> None:
    """Raises Refused for a name or IP address that is not the host's own while access is on.
    `remote` is where its connection comes from; `networks`, those of the access file, are where it
    may be besides. `within` are the networks of the fleet, none for any; `taken` are names of
    trackers, in lower case, which no host may have: with a certificate for one it could pass for a
    tracker."""
    here, allowed = ip_of(remote), tuple(networks)
    for text in names:
        ip = ip_of(text)
        if ip is None:
            _check_own_name(host, text, taken)
        elif within and not ip.is_loopback and not _within(ip, within):
            raise Refused(
                f"{ip} is not in the networks of this fleet, so {host[:100]} may not be reached there",
                remedy="Add its network to --networks of the tracker, or change --advertise",
            )
        elif not (_same(ip, here) or _within(ip, allowed)):
            raise Refused(
                f"{host[:100]} connects from {remote[:100]} and may not be reached at {ip}",
                remedy="Add its network to networks in the tracker's access file, or change --advertise",
            )


def _check_own_name(host: str, text: str, taken: Collection[str]) -> None:
    own, name = host.lower(), text.lower().rstrip(".")
    if name.rpartition(".")[2] == "localhost" or any(_same_name(name, other) for other in taken):
        raise Refused(
            f"{host[:100]} may not be reached at {text[:100]!r}: a tracker, or each machine, has that name",
            remedy="Name an IP address with --advertise",
        )
    if name != own and not name.startswith(f"{own}."):
        raise Refused(
            f"{host[:100]} may not be reached at {text[:100]!r}: the name does not begin with the host's own",
            remedy="Name an IP address with --advertise, or give the agent that --name",
        )


def _same_name(name: str, other: str) -> bool:
    """Whether two names may be of one machine: one of them is the other with a domain, or both are
    equal."""
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


def _within(ip: IPAddress, networks: Iterable[Network]) -> bool:
    return any(ip in network for network in networks)


def _same(ip: IPAddress, here: IPAddress | None) -> bool:
    return here is not None and (ip == here or (ip.is_loopback and here.is_loopback))
