"""The bound of a broadcast: the time that no distribution can beat.

N hosts that each lack F bytes need at least max(F / U_origin, F / min d, N F / (U_origin + sum u)),
where U_origin is what the origin gives, and d and u are the hosts' downlinks and uplinks (Kumar and
Ross, "Peer-assisted file distribution: the minimum distribution time", 2006). Here hosts may lack
different amounts, and hosts with a copy may be there from the beginning.

A term whose rates are not known is left out and named: what remains is still a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Links:
    """What is known of rates, in bytes/s."""

    origin_bytes_s: float
    """What all hosts together may read of the origin; 0 where that is not known."""
    downlinks: Sequence[tuple[int, float]]
    """Of each host with a known downlink: the bytes that it lacked, and the rate."""
    uplinks_unknown: int
    """Hosts whose uplink was never measured nor declared."""
    uplinks_bytes_s: float
    """Sum of the known uplinks."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`seconds` is None where no term is known; `unknown` says which terms are not."""

    seconds: float | None
    unknown: tuple[str, ...]


def bound(origin_bytes: int, wanted_bytes: int, hosts: int, links: Links) -> Bound:
    """The bound for `hosts` hosts that lack `wanted_bytes` together, of which `origin_bytes` no
    host held at the beginning."""
    terms: list[float] = []
    unknown: list[str] = []
    if origin_bytes and not links.origin_bytes_s:
        unknown.append("the rate of the origin")
    elif origin_bytes:
        terms.append(origin_bytes / links.origin_bytes_s)
    terms += [wanted / rate for wanted, rate in links.downlinks]
    if len(links.downlinks) < hosts:
        unknown.append(f"the downlinks of {hosts - len(links.downlinks)} hosts")
    if links.uplinks_unknown:
        unknown.append(f"the uplinks of {links.uplinks_unknown} hosts")
    together = links.origin_bytes_s + links.uplinks_bytes_s
    if not links.uplinks_unknown and together and (links.origin_bytes_s or not origin_bytes):
        terms.append(wanted_bytes / together)
    return Bound(max(terms) if terms else None, tuple(unknown))
