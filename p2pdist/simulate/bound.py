"""What no distribution can beat: the time that the links alone ask for.

Every host needs the whole blob through its own downlink, one copy must leave the origin and enter
each rack, and all that is received must be sent: max(F/U_origin, F/min d, F/rack rate, N
F/(U_origin + sum u)) when all hosts begin at once (Mundinger, Weber and Weiss, Journal of
Scheduling 2008, for fluid and without racks). A host that starts later counts from its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Party(NamedTuple):
    """A host as the bound sees it: when it starts in seconds, its rates in bytes/s, its rack (-1:
    none), and whether it must complete."""

    starts_at: float
    up_bytes_s: float
    down_bytes_s: float
    rack: int = -1
    counts: bool = True


def bound(size: int, parties: Sequence[Party], origin_bytes_s: float, rack_bytes_s: float = 0.0) -> float:
    """The time in seconds at which the last host that counts can be complete at the earliest; 0
    when none counts."""
    counted = [party for party in parties if party.counts]
    alone = own_bounds(size, parties, origin_bytes_s, rack_bytes_s)
    ends = [party.starts_at + own_s for party, own_s in zip(parties, alone, strict=True) if party.counts]
    return max(*ends, _sent_by(len(counted) * size, parties, origin_bytes_s)) if ends else 0.0


def own_bounds(size: int, parties: Sequence[Party], origin_bytes_s: float, rack_bytes_s: float = 0.0) -> list[float]:
    """For each host the seconds that it needs at least from its own start, however fast the other
    hosts send."""
    first = min((party.starts_at for party in parties), default=0.0)
    first_in: dict[int, float] = {}
    for party in parties:
        first_in[party.rack] = min(first_in.get(party.rack, party.starts_at), party.starts_at)
    bounds = []
    for starts_at, _, down_bytes_s, rack, _ in parties:
        own_s = max(size / down_bytes_s, first + size / origin_bytes_s - starts_at)
        if rack >= 0 and rack_bytes_s:
            own_s = max(own_s, first_in[rack] + size / rack_bytes_s - starts_at)
        bounds.append(own_s)
    return bounds


def _sent_by(amount: int, parties: Sequence[Party], origin_bytes_s: float) -> float:
    """When the origin and the hosts, each from its start on, can have sent `amount` bytes."""
    starts = sorted((party.starts_at, party.up_bytes_s) for party in parties)
    now, rate, left = starts[0][0], origin_bytes_s, float(amount)
    for starts_at, up_bytes_s in starts:
        if left <= rate * (starts_at - now):
            break
        left -= rate * (starts_at - now)
        now, rate = starts_at, rate + up_bytes_s
    return now + left / rate
