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
SAMPLE_BUSY_MIN_S = 0.4
"""Measurements are added up until data was waiting for so long: shorter ones say little."""

HOSTS_MEASURED_MIN = 4
FORGIVEN_AFTER_S = 300.0
ROUND_UP = 0.5
"""A seat that a slow uplink can fill by half is kept: the measure is rough, and too few seats cost everybody."""

SEATS_ALONE = 2
"""Seats of a host where a blob has but one stripe: with one seat each, the hosts of a small blob would form one long chain."""


@dataclass(slots=True)
class _Uplink:
    rate_bytes_s: float | None = None
    below: int = 0
    slow_since: float | None = None
    sent_bytes: int = 0
    busy_s: float = 0.0
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
        if busy_s <= 0 or sent_bytes < 0:
            return False
        uplink = self._uplinks.setdefault(host, _Uplink())
        uplink.sent_bytes += sent_bytes
        uplink.busy_s += busy_s
        if uplink.busy_s < SAMPLE_BUSY_MIN_S:
            return False
        rate = uplink.sent_bytes / uplink.busy_s
        uplink.sent_bytes, uplink.busy_s = 0, 0.0
        old = uplink.rate_bytes_s
        uplink.rate_bytes_s = rate if old is None else old + 0.5 * (rate - old)
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
        uplink = self._uplinks.setdefault(host, _Uplink())
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
        share = uplink.share if uplink.share is not None else (uplink.rate_bytes_s or 0.0) / max(self._typical(), 1.0)
        return min(seats - 1, int(seats * share + ROUND_UP))

    def light(self, host: str) -> bool:
        """Whether the host's downlink is so slow that it takes next to nothing of its parents' uplinks."""
        uplink = self._uplinks.get(host)
        return uplink is not None and uplink.light

    def acquit(self, host: str) -> None:
        """The host keeps up with others: its downlink is not slow after all."""
        self._uplinks[host].light = False

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
            rates = [uplink.rate_bytes_s for uplink in self._uplinks.values() if uplink.rate_bytes_s is not None]
            self._median = median(rates) if rates else 0.0
            self._stale = len(self._uplinks) // 8
        return self._median
