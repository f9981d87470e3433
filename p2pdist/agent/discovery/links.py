"""The links on which a process can be discovered: one for each interface with an address.

A module of its own, since loading multicast DNS (mdns.py) takes a tenth of a second, which only a
process that discovers others should pay; settings are read by every daemon.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network

import ifaddr

from p2pdist.agent.tracker.address import address_of
from p2pdist.model.errors import UsageError

LINKS_MAX = 16


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """How a process finds others, and is found by them."""

    listen: tuple[str, int]
    """The address and port on which the service listens."""
    network: str = "default"
    """Announcements for other networks are ignored."""
    interfaces: tuple[str, ...] = ()
    """Names or addresses of interfaces; none means those on which the service listens, without
    loopback."""
    trackers: bool = True
    """Whether this process looks for trackers."""


@dataclass(frozen=True, slots=True)
class Link:
    """An address of an interface, and the range that is reached through it."""

    interface: str
    address: str
    range: IPv4Network | IPv6Network


def find_links(interfaces: Iterable[str], listens: frozenset[str]) -> list[Link]:
    """The links to use now: `interfaces` (names or addresses) where some are named, else the
    interfaces with an address in `listens`, else all but loopback. Each interface gives one link:
    its first IPv4 address, else its first IPv6 address that is not link-local."""
    named = set(interfaces)
    links = []
    for adapter in ifaddr.get_adapters():
        addresses = [address_of(entry) for entry in adapter.ips]
        usable = [pair for pair in addresses if not pair[0].is_link_local and (named or not pair[0].is_loopback)]
        if named and adapter.nice_name not in named:
            usable = [pair for pair in usable if str(pair[0]) in named]
        elif not named and listens:
            usable = [pair for pair in usable if str(pair[0]) in listens]
        usable.sort(key=lambda pair: pair[0].version)
        if usable:
            address, prefix = usable[0]
            links.append(Link(adapter.nice_name, str(address), ip_network(f"{address}/{prefix}", strict=False)))
    return links[:LINKS_MAX]


def check_interfaces(interfaces: Iterable[str]) -> None:
    """Raises UsageError for a name or address that no interface of this host has."""
    adapters = list(ifaddr.get_adapters())
    names = {adapter.nice_name for adapter in adapters}
    usable = names | {str(address_of(entry)[0]) for adapter in adapters for entry in adapter.ips}
    for name in interfaces:
        if name not in usable:
            raise UsageError(
                f"there is no network interface {name[:100]!r}",
                remedy=f"Give --discovery-interface one of {', '.join(sorted(names))}, or the address of one",
            )


def addresses_of(host: str) -> frozenset[str]:
    """The addresses on which a service listens that was told to listen on `host`; an empty set
    means all of them."""
    if host in ("0.0.0.0", "::", ""):
        return frozenset()
    try:
        return frozenset(str(entry[4][0]) for entry in socket.getaddrinfo(host, None))
    except OSError:
        return frozenset([host])
