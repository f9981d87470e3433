"""Lateness: whether the fleet as a whole reports less often than it was asked to, so that no host
can be judged.

Theory. A host is called silent, stalled or slow by comparison with the clock and with other hosts.
Where a machine is busy or paused, and with it many agents or the tracker itself, all of them stand
still at once: every host complains of its parent, and none of the parents is at fault. Acting on
that moves leases, and what a reader had not passed on yet is read from the origin again. A dead
root or a cut in the network stops pieces as well, but the hosts below go on reporting in time. So
reports are counted beside those that were due, both with weights that fall by e in the time of a
few reports. While fewer than LATE_SHARE of them came, and for a while after, complaints of standing
still are ignored, and so is silence.

Hosts that lose power together look the same. Then their sessions end, or after HELD_MAX_S the rest
is judged all the same.

A host that lacks nothing reports no more, and its silence says nothing. Its last report counts, or
a fleet would seem late after short pulls. Once the last host lacks nothing the weights are
forgotten: both fall alike, and a fleet without pulls would stay as late as it was.

Invariants: a host counts from its first report on, while it has a session and lacks something,
until the next count at least; from its first report on again once it lacks something anew; in a
fleet that reports in time nothing is held back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf

from tracker.core.host import Host

WINDOW_MIN_S = 0.6
WINDOW_INTERVALS = 2.5
LATE_SHARE = 0.4
"""Of two hosts one may fall silent, and is judged."""

HELD_MAX_S = 6.0
COUNT_S, COUNT_PART = 0.25, 4
"""How often the hosts are counted that are to report: as long as they report once in several
seconds, in each such part of them."""


@dataclass(slots=True)
class Lateness:
    """Counts the reports of the fleet, and those that were due."""

    _due: float = 0.0
    """Weight of the reports that were due."""
    _heard: float = 0.0
    """Weight of the reports that came."""
    _at: float = 0.0
    """Time of both weights."""
    _counted_at: float = -inf
    """Time at which the reporters were last counted."""
    _reporters: dict[str, Host] = field(default_factory=dict)
    """Hosts that are expected to report, by name. `reported`, `count`."""
    _rested: dict[str, Host] = field(default_factory=dict)
    """Hosts that lost their session since they were counted last. `rests`, `count`."""
    _done: dict[str, Host] = field(default_factory=dict)
    """Hosts that lacked nothing at some moment since then, and have not reported since that they
    lack something. `rests`, `reported`, `count`."""
    _since: float | None = None
    """Time at which the fleet began to be late. `late`."""
    _until: float = -inf
    """Time until which judging is held back. `late`."""

    def reported(self, host: Host, *, interval_s: float, now: float) -> None:
        """A host has reported, perhaps that it lacks nothing any more."""
        if host.receiving or self._reporters.get(host.name) is host:
            self._advance(interval_s, now)
            self._heard += 1.0
        if host.receiving:
            self._reporters[host.name] = host
            self._done.pop(host.name, None)

    def rests(self, host: Host) -> None:
        """A host has no session any more, or lacks nothing of one of its blobs, or has left it."""
        if not host.receiving:
            self._done[host.name] = host
        elif host.session is None:
            self._rested[host.name] = host

    @property
    def expected(self) -> int:
        """How many hosts are expected to report."""
        return len(self._reporters)

    def count(self, *, interval_s: float, now: float) -> None:
        """Expect no reports of hosts that rest. Called often and regularly."""
        if now - self._counted_at >= max(COUNT_S, interval_s / COUNT_PART):
            self._advance(interval_s, now)
            self._counted_at = now
            for name, host in self._rested.items():
                if self._reporters.get(name) is host and host.session is None:
                    del self._reporters[name]
            done = [name for name, host in self._done.items() if self._reporters.get(name) is host]
            for name in done:
                del self._reporters[name]
            if done and not self._reporters:
                self._due = self._heard = 0.0
            self._rested.clear()
            self._done.clear()

    def late(self, *, interval_s: float, now: float) -> bool:
        """Whether the fleet is late, or was until a moment ago: no host is to be judged now."""
        self._advance(interval_s, now)
        if self._heard < LATE_SHARE * self._due:
            if now >= self._until:
                self._since = now
            self._until = now + _window_s(interval_s)
        return now < self._until and self._since is not None and now - self._since < HELD_MAX_S

    def _advance(self, interval_s: float, now: float) -> None:
        """Bring what was due and heard up to now; more of the former with every moment."""
        if now == self._at:
            return
        window_s = _window_s(interval_s)
        left = exp(-max(0.0, now - self._at) / window_s)
        self._at = now
        self._heard *= left
        self._due = self._due * left + len(self._reporters) * window_s / interval_s * (1 - left)


def _window_s(interval_s: float) -> float:
    return max(WINDOW_MIN_S, WINDOW_INTERVALS * interval_s)
