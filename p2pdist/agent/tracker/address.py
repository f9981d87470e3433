"""The address that an agent gives to other hosts when it listens on all of its own."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import ifaddr

from p2pdist.model.address import IPAddress, parse_address, without_mapping


def wildcard(address: str) -> tuple[str, int] | None:
    """Host and port of `address` (host:port) where the host is 0.0.0.0 or ::, else None."""
    try:
        host, port = parse_address(address)
    except ValueError:
        return None
    return (host, port) if host in ("0.0.0.0", "::") else None


def address_of(entry: ifaddr.IP) -> tuple[IPAddress, int]:
    """An address of an interface and the length of its prefix in bits."""
    return ip_address(entry.ip if isinstance(entry.ip, str) else entry.ip[0]), entry.network_prefix


def address_for_others(local: str, listens: str) -> str:
    """The address at which other hosts reach this one. The agent listens on `listens` (0.0.0.0 or
    ::), and `local` is its own end of the session with the tracker. That is the answer, unless it
    means something else at other hosts (loopback, link-local of IPv6) or the agent does not listen
    on it (IPv6 where it listens on IPv4 alone): then the address of the default route, else that of
    the first interface, else `local`."""
    here = without_mapping(ip_address(local.partition("%")[0]))
    versions = (4,) if listens == "0.0.0.0" else (here.version, 10 - here.version)
    if here.version in versions and _means_one_host(here):
        return str(here)
    routed = (_on_default_route(version) for version in versions)
    configured = [address_of(entry)[0] for adapter in ifaddr.get_adapters() for entry in adapter.ips]
    others = [*routed, *(address for version in versions for address in configured if address.version == version)]
    return next((str(address) for address in others if address is not None and _means_one_host(address)), str(here))


def _means_one_host(address: IPAddress) -> bool:
    """Whether an address stands for the same host everywhere on the network. A link-local address
    of IPv6 needs an interface as well, which has another name at each host."""
    return not (address.is_loopback or address.is_unspecified or (address.version == 6 and address.is_link_local))


def _on_default_route(version: int) -> IPAddress | None:
    """The address from which this host reaches distant hosts; None without a default route. No
    packet is sent."""
    family, far = (socket.AF_INET, "192.0.2.1") if version == 4 else (socket.AF_INET6, "2001:db8::1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None
