"""Links: the networks that a process can be discovered on, one for each interface with an address;
how discovery is set up; and the address that this host gives to others."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import ifaddr

from p2pdist.model.errors import UsageError

LINKS_MAX = 16


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """`network`: those of other networks are not heard. `interfaces`: names or addresses of
    interfaces; none means those that the service listens on, loopback left out. `trackers`: whether
    trackers are looked for."""

    listen: tuple[str, int]
    network: str = "default"
    interfaces: tuple[str, ...] = ()
    trackers: bool = True


@dataclass(frozen=True, slots=True)
class Link:
    """An address of an interface, and the range that is reached through it."""

    interface: str
    address: str
    range: IPv4Network | IPv6Network


def find_links(interfaces: Iterable[str], listens: frozenset[str]) -> list[Link]:
    """The links to use now: of `interfaces` (names or addresses) where some are named, else those
    with one of the addresses in `listens`, of all but loopback when that is empty. One for each
    interface: its first IPv4 address, else its first IPv6 address that is not link-local."""
    named = set(interfaces)
    found = []
    for adapter in ifaddr.get_adapters():
        places = [_place(each) for each in adapter.ips]
        usable = [each for each in places if not each[0].is_link_local and (named or not each[0].is_loopback)]
        if named and adapter.nice_name not in named:
            usable = [each for each in usable if str(each[0]) in named]
        elif not named and listens:
            usable = [each for each in usable if str(each[0]) in listens]
        usable.sort(key=lambda each: each[0].version)
        if usable:
            address, prefix = usable[0]
            found.append(Link(adapter.nice_name, str(address), ip_network(f"{address}/{prefix}", strict=False)))
    return found[:LINKS_MAX]


def _place(each: ifaddr.IP) -> tuple[IPv4Address | IPv6Address, int]:
    return ip_address(each.ip if isinstance(each.ip, str) else each.ip[0]), each.network_prefix


def check_interfaces(interfaces: Iterable[str]) -> None:
    """Raises UsageError for one that is none."""
    adapters = list(ifaddr.get_adapters())
    names = {adapter.nice_name for adapter in adapters}
    known = names | {str(_place(each)[0]) for adapter in adapters for each in adapter.ips}
    for name in interfaces:
        if name not in known:
            raise UsageError(
                f"there is no network interface {name[:100]!r}",
                remedy=f"Give --discovery-interface one of {', '.join(sorted(names))}, or the address of one",
            )


def address_for_others(local: str, listens: str) -> str:
    """The address at which others reach this host, which listens on `listens` (0.0.0.0 or ::) and
    has the address `local` in its session with the tracker. That is `local` itself, unless it means
    something else elsewhere (loopback, link-local of IPv6) or nobody listens on it (IPv6 where IPv4
    alone is listened on): then that of the default route, or else of the first interface. `local`
    where there is no better one."""
    here = ip_address(local.partition("%")[0])
    here = (here.ipv4_mapped or here) if isinstance(here, IPv6Address) else here
    versions = (4,) if listens == "0.0.0.0" else (here.version, 10 - here.version)
    if here.version in versions and _means_one_host(here):
        return str(here)
    routed = (_on_default_route(version) for version in versions)
    every = [_place(each)[0] for adapter in ifaddr.get_adapters() for each in adapter.ips]
    others = [*routed, *(each for version in versions for each in every if each.version == version)]
    return next((str(each) for each in others if each is not None and _means_one_host(each)), str(here))


def _means_one_host(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address stands for the same host elsewhere on the network. Those of IPv6 that are
    link-local need an interface as well, which has another name at each host."""
    return not (address.is_loopback or address.is_unspecified or (address.version == 6 and address.is_link_local))


def _on_default_route(version: int) -> IPv4Address | IPv6Address | None:
    """The address from which this host reaches far ones; None without such a route. No packet is
    sent."""
    family, far = (socket.AF_INET, "192.0.2.1") if version == 4 else (socket.AF_INET6, "2001:db8::1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def addresses_of(host: str) -> frozenset[str]:
    """The addresses that listening on `host` means; none stands for all."""
    if host in ("0.0.0.0", "::", ""):
        return frozenset()
    try:
        return frozenset(str(found[4][0]) for found in socket.getaddrinfo(host, None))
    except OSError:
        return frozenset([host])
