"""Addresses of hosts: `host:port` as text, where the host is a name or an IP address in numbers.

An IPv6 address is in brackets where a port follows it. IPv4 addresses that a socket of IPv6 shows
in its notation (::ffff:192.0.2.1) count as what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

IPAddress = IPv4Address | IPv6Address


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, `192.0.2.1:7071` or `[2001:db8::1]:7071`; raises ValueError."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address[:100]!r} is not host:port; an IPv6 address stands in brackets")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{address[:100]!r} is not host:port")
    return host, int(port)


def address_text(host: str, port: int) -> str:
    """host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_part(address: str) -> str:
    """The host of `host:port`, an IPv6 address without brackets; empty for any other text."""
    return address.rpartition(":")[0].strip("[]")


def ip_of(host: str) -> IPAddress | None:
    """The IP address that `host` is in numbers, without its interface; None for a name and any
    other text."""
    try:
        return without_mapping(ip_address(host.partition("%")[0]))
    except ValueError:
        return None


def without_mapping(ip: IPAddress) -> IPAddress:
    """An IPv4 address in the notation of IPv6 as such; any other address as it is."""
    return (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip


def by_name(address: str) -> bool:
    """Whether `host:port` gives its host by a name, which must be looked up, and not in numbers."""
    host = host_part(address)
    return bool(host) and ip_of(host) is None


def on_this_machine(host: str) -> bool:
    """Whether only processes of this machine reach a service that listens on `host`."""
    ip = ip_of(host)
    return host == "localhost" or (ip is not None and ip.is_loopback)


def is_loopback(host: str) -> bool:
    """Whether a host, if it is given in numbers, means the machine itself."""
    ip = ip_of(host)
    return ip is not None and (ip.is_loopback or ip.is_unspecified)


@dataclass(frozen=True, slots=True)
class Vicinity:
    """From where a process connects to addresses that others announced. A loopback address means
    another machine for each that uses it, and a link-local one is good on one link, so only a
    process that is there itself may connect to them: else what others announce would lead it to its
    own services. What is judged is the address that is connected to, since the owner of a name may
    have it mean something else each time (DNS rebinding)."""

    announced: str
    """The host at which others reach this process: a name or an IP address in numbers."""
    session: str = ""
    """This process's end of its connection with the tracker, which believes loopback and link-local
    addresses of agents that connect to it from there; empty without one."""
    machine: str = ""
    """The name of this machine, as the kernel has it: its other agents may announce it, and it
    often stands for a loopback address here (127.0.1.1)."""

    def problem(self, host: str, address: str) -> str:
        """Why `address`, which is `host` or which its name stands for, may not be connected to;
        empty where it may."""
        ip, named = ip_of(address), ip_of(host) is None and not _is_localhost(host)
        if ip is None or not (ip.is_loopback or ip.is_unspecified or ip.is_link_local or ip.is_multicast):
            return ""
        ends = (self.announced,) if named else (self.announced, self.session)
        if ip.is_multicast:
            allowed = False
        elif ip.is_link_local:
            allowed = any((end := ip_of(text)) is not None and end.is_link_local for text in ends)
        else:
            allowed = any(is_loopback(text) or _is_localhost(text) for text in ends)
        if allowed or (named and host.lower() in (self.announced.lower(), self.machine.lower())):
            return ""
        which = f"{host[:255]} stands for {address}" if named else address
        return f"{which}, which is another machine, or nothing, for each that asks"


def _is_localhost(host: str) -> bool:
    return host.rstrip(".").rpartition(".")[2].lower() == "localhost"


NETWORK_BITS = {4: 24, 6: 64}
"""By version of IP the length of a prefix that mostly belongs to one operator."""


def network_of(host: str) -> str:
    """The network of an IP address in numbers: the /24 of IPv4, the /64 of IPv6; any other text as
    it is."""
    ip = ip_of(host)
    return host if ip is None else str(ip_network((ip, NETWORK_BITS[ip.version]), strict=False))
