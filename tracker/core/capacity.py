"""Upload capacity of hosts, as the senders measure it, and the seats that follow from it.

The sender knows best: bytes that the kernel took over the time in which data was waiting. What children receive also falls when
the parent itself is starved, and would blame the innocent. Socket buffers hide the truth for about a second, and acting on small or
early differences costs more than it gains, so a host is called slow only after SLOW_SAMPLES samples in a row below SLOW_RATIO of
the median. What the children of a host show (progress.py) says it sooner, and how much its uplink is worth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

SLOW_RATIO = 0.45
SLOW_SAMPLES = 3
SAMPLE_BUSY_MIN_S = 0.1
HOSTS_MEASURED_MIN = 4
FORGIVEN_AFTER_S = 300.0
SEATS_ALONE = 2
"""Seats of a host where a blob has but one stripe: with one seat each, the hosts of a small blob would form one long chain."""


@dataclass(slots=True)
class _Uplink:
    rate_bytes_s: float
    below: int = 0
    slow_since: float | None = None
    share: float | None = None
    light: bool = False


@dataclass(slots=True)
class Capacities:
    """Learned upload rates in bytes/s. They outlive swarms: a host that was slow is planned around from the start."""

    _uplinks: dict[str, _Uplink] = field(default_factory=dict)
    _median: float = 0.0
    _stale: int = 0

    def sample(self, host: str, sent_bytes: int, busy_s: float, *, now: float) -> bool:
        """Take one measurement; returns True when it makes the host slow."""
        if busy_s < SAMPLE_BUSY_MIN_S or sent_bytes < 0:
            return False
        rate = sent_bytes / busy_s
        uplink = self._uplinks.get(host)
        if uplink is None:
            uplink = self._uplinks[host] = _Uplink(rate)
        else:
            uplink.rate_bytes_s += 0.5 * (rate - uplink.rate_bytes_s)
        typical = self._typical()
        if len(self._uplinks) < HOSTS_MEASURED_MIN or rate >= SLOW_RATIO * typical:
            uplink.below = 0
            return False
        uplink.below += 1
        if uplink.below < SLOW_SAMPLES or uplink.slow_since is not None:
            return False
        uplink.slow_since = now
        return True

    def condemn(self, host: str, share: float, *, downlink: bool, now: float) -> bool:
        """A host's children, or its own lagging, show that its uplink, or its downlink, has only this share of what others have; returns
        True when that is news."""
        uplink = self._uplinks.setdefault(host, _Uplink(share * self._typical()))
        if uplink.slow_since is not None and (uplink.light or not downlink):
            return False
        uplink.light = downlink
        uplink.slow_since, uplink.share = now, share
        return True

    def budget(self, host: str, stripes: int, *, now: float) -> int:
        """Seats of a host in a swarm of `stripes` stripes: one for each stripe (SEATS_ALONE for one), fewer when its uplink is slow."""
        seats = stripes if stripes > 1 else SEATS_ALONE
        uplink = self._uplinks.get(host)
        if uplink is None or uplink.slow_since is None:
            return seats
        if now - uplink.slow_since > FORGIVEN_AFTER_S:
            uplink.slow_since, uplink.share, uplink.below, uplink.light = None, None, 0, False
            return seats
        share = uplink.share if uplink.share is not None else uplink.rate_bytes_s / max(self._typical(), 1.0)
        return min(seats - 1, int(seats * share))

    def light(self, host: str) -> bool:
        """Whether the host's downlink is so slow that it takes next to nothing of its parents' uplinks."""
        uplink = self._uplinks.get(host)
        return uplink is not None and uplink.light

    def rate(self, host: str) -> float | None:
        """Learned upload rate in bytes/s, None when never measured."""
        uplink = self._uplinks.get(host)
        return uplink.rate_bytes_s if uplink else None

    def slow_hosts(self) -> list[str]:
        return [host for host, uplink in self._uplinks.items() if uplink.slow_since is not None]

    def _typical(self) -> float:
        """Median rate, computed anew only as often as keeps the cost of a sample constant."""
        self._stale -= 1
        if self._stale <= 0:
            self._median = median(uplink.rate_bytes_s for uplink in self._uplinks.values()) if self._uplinks else 0.0
            self._stale = len(self._uplinks) // 8
        return self._median
