"""Which addresses an agent may say that it has: that of its connection, those in the networks of
the access file, and names that begin with its host's own. None is a name by which clients reach a
tracker or the machine that they are on: with a certificate for it a host could pass for that
server."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from p2pdist.model.errors import Refused
from tracker.access.file import Network

IPAddress = IPv4Address | IPv6Address


def check_addresses(
    addresses: Iterable[str],
    *,
    host: str,
    remote: str,
    networks: Iterable[Network],
    within: Sequence[Network] = (),
    taken: Collection[str] = (),
) -> None:
    """Raises Refused for an address that the host may not have. `remote` is where its connection
    comes from; `networks` are those in which it may be besides. `within` are the networks of the
    fleet, none for any; `taken` are names of trackers, in lower case, which no host may have."""
    here, allowed = _ip(remote), tuple(networks)
    for address in addresses:
        ip = _ip(address)
        if ip is not None and within and not ip.is_loopback and not any(ip in network for network in within):
            raise Refused(
                f"{ip} is not in the networks of this fleet, so {host[:100]} may not be reached there",
                remedy="Add its network to --networks of the tracker, or change --advertise",
            )
        if ip is None:
            own, name = host.lower(), address.lower().rstrip(".")
            if name.rpartition(".")[2] == "localhost" or any(_same_name(name, other) for other in taken):
                raise Refused(
                    f"{host[:100]} may not be reached at {address[:100]!r}: a tracker, or each machine, has that name",
                    remedy="Name an IP address with --advertise",
                )
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


def is_ip(text: str) -> bool:
    """Whether a text is an IP address."""
    return _ip(text) is not None


def _same_name(name: str, other: str) -> bool:
    """Whether two names may be of one machine: one of them is the other with a domain, or both are
    equal."""
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


def _same(ip: IPAddress, here: IPAddress | None) -> bool:
    return here is not None and (ip == here or (ip.is_loopback and here.is_loopback))


def _ip(text: str) -> IPAddress | None:
    try:
        ip = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return mapped or ip
