"""Report rate: how often agents are to report.

Reports are most of what a tracker hears, and the sooner they come the sooner it sees which hosts
hold others up. So a small fleet reports often, and a large one as often as half a core can take;
hosts that are probed report often in any fleet (monitor/probing.py). A tracker that has other
things to do, or a slower core, asks for fewer: being late with a plan costs more than hearing late
of what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST_S = 0.25
REPORTS_PER_S = 10_000
"""At about 50 us each."""

BUSY_SHARE, IDLE_SHARE = 0.8, 0.35
"""Of one core. Where more than the first is taken agents are asked to report half as often; below
the second as often as before: half of what is busy must not be idle, or the rate would go up and
down."""

IDLE_LOOKS = 5
"""So often in a row the tracker must be idle: one that is busy now and then would tell all agents a
new rate each time."""

SLACK_MAX = 8.0


def report_interval_s(hosts: int, shortest_s: float = SHORTEST_S) -> float:
    """Seconds between two reports of a host in a fleet of so many: up to 2,500 `shortest_s` of
    0.25, at ten thousand 1."""
    return max(shortest_s, hosts / REPORTS_PER_S)


@dataclass(slots=True)
class ReportRate:
    """The report rate of one tracker's agents."""

    shortest_s: float = SHORTEST_S
    """Shortest interval in seconds."""
    slack: float = 1.0
    """How many times as long as usual agents take between two reports. `loaded`."""
    _idle: int = 0
    """Looks in a row that found the tracker idle. `loaded`."""

    def interval_s(self, hosts: int) -> float:
        """Seconds between two reports of a host in a fleet of so many."""
        return max(self.shortest_s, self.slack * report_interval_s(hosts, 0.0))

    def loaded(self, share: float) -> bool:
        """The tracker has lately taken this share of a core; return whether that changes the
        rate."""
        old = self.slack
        self._idle = self._idle + 1 if share < IDLE_SHARE else 0
        if share > BUSY_SHARE:
            self.slack = min(SLACK_MAX, 2 * old)
        elif self._idle >= IDLE_LOOKS:
            self.slack, self._idle = max(1.0, old / 2), 0
        return self.slack != old
