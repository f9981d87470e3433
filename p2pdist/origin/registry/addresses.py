"""To which addresses a registry may send its readers: by redirects, and for tokens.

A registry that is not ours can name any host, and a name that it chooses can mean any address, at
each look-up another one. So what counts is the address that is connected to. Public ones are free.
Addresses of a private network, of a link and of this machine are those of services that trust
whatever reaches them: a registry may send its readers there only where it is itself, as far as all
addresses show at which it was reached, or where its settings list the host or network. Services
that give credentials to machines of a cloud are reached where they are listed alone.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Literal

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from p2pdist.model.errors import Refused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Kind = Literal["public", "private", "link", "machine"]

HOME_MAX = 64
"""Addresses of a registry that are remembered."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_METADATA = frozenset({"fd00:ec2::254", "100.100.100.200", "169.254.169.254", "metadata.google.internal"})
"""Where clouds give credentials to their machines."""

_NUMBERS = re.compile(r"[0-9a-fx]+(?:\.[0-9a-fx]+){0,3}\Z")
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv4 addresses as a network without IPv4 reaches them (RFC 6052)."""


class AllowedAddresses:
    """Where one registry may send its readers. `host` is its own, `listed` what its settings allow
    besides, hosts and networks; `private`: any private network. On the event loop."""

    def __init__(self, shown: str, host: str, *, listed: Sequence[str] = (), private: bool = False) -> None:
        self._shown, self._private = shown, private
        networks = [_network(text) for text in listed]
        self._networks = [network for network in networks if network is not None]
        self._hosts = {text.lower() for text, network in zip(listed, networks, strict=True) if network is None}
        self._home: dict[Address, None] = {}
        """The addresses of the registry itself, as far as they are known."""
        if (own := _address_of(host)) is not None:
            self._home[own] = None

    def note_home(self, text: str) -> None:
        """The registry itself is looked for at an address."""
        if (address := _address_of(text)) is not None and len(self._home) < HOME_MAX:
            self._home[address] = None

    def require(self, host: str, text: str) -> None:
        """Raises Refused unless the registry may send its readers to `host`, that is at the address
        `text`."""
        address = _address_of(text)
        if address is not None and not self._may(host, address):
            raise Refused(
                f"{self._shown} sends its readers to {host} at {address}, an address of this machine or network",
                remedy=f'If it is meant to, list "{host}" or its network among the redirects of this upstream',
            )

    def require_literal(self, host: str) -> None:
        """Raises Refused for a host that is given as an address where `require` does."""
        if _address_of(host) is not None:
            self.require(host, host)

    def _may(self, host: str, address: Address) -> bool:
        kind = kind_of(address)
        if kind == "public" or host.lower() in self._hosts:
            return True
        if any(address in network for network in self._networks):
            return True
        if str(address) in _METADATA:
            return False
        there = bool(self._home) and all(kind_of(home) == kind for home in self._home)
        return there or (self._private and kind == "private")


class HomeResolver(AbstractResolver):
    """Looks a registry up, and notes where it is."""

    def __init__(self, allowed: AllowedAddresses) -> None:
        self._allowed, self._resolver = allowed, aiohttp.DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        for result in found:
            self._allowed.note_home(result["host"])
        return found

    async def close(self) -> None:
        await self._resolver.close()


class ElsewhereResolver(AbstractResolver):
    """Looks hosts up to which a registry sends its readers. Raises Refused where it may not: what
    is connected to is what was looked up, and not looked up again."""

    def __init__(self, allowed: AllowedAddresses) -> None:
        self._allowed, self._resolver = allowed, aiohttp.DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        for result in found:
            self._allowed.require(host, result["host"])
        return found

    async def close(self) -> None:
        await self._resolver.close()


def kind_of(address: Address) -> Kind:
    """Who may be reached at an address. Of one that holds another, as an IPv6 address may hold one
    of IPv4, the inner one counts."""
    address = _inner(address)
    if address.is_loopback or address.is_unspecified:
        return "machine"
    if address.is_link_local or address.is_multicast:
        return "link"
    return "public" if address.is_global else "private"


def is_loopback(host: str) -> bool:
    """Whether a host's name means the machine itself."""
    return host in _LOOPBACK or (host.startswith("127.") and is_inner(host))


def is_inner(host: str) -> bool:
    """Whether a host's name is an address of this machine or its links alone, however it is
    written, among them those at which clouds give credentials to their machines."""
    name = host.lower().rstrip(".")
    if name in _LOOPBACK or name in _METADATA or name.endswith(".localhost"):
        return True
    address = _address_of(name)
    return address is not None and (kind_of(address) in ("machine", "link") or str(address) in _METADATA)


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _address_of(name: str) -> Address | None:
    """The address that resolvers take a name for; None for any other name. They take IPv4 addresses
    of fewer than four numbers, and hexadecimal and octal ones, too (inet_aton)."""
    text = name.lower().rstrip(".").partition("%")[0]
    try:
        return _inner(ipaddress.ip_address(text))
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(text)) if _NUMBERS.match(text) else None
        except OSError:
            return None


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _TRANSLATED:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
