"""Presence: hosts that lost their sessions, or fall silent, and what they lose.

A host without a session is absent in its swarms until it has said again what it holds; what it
does not confirm within ABSENCE_S is taken from it. For START_GRACE_S after the tracker's start no
host is given up, since many may still be reconnecting.

A host that ended without saying so and has nothing left is forgotten by all that plans. For LOST_S
it stays among the lost ones, which only people and metrics look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from p2pdist.model.digest import Digest
from tracker.core.host import Host
from tracker.core.swarm import Swarm

ABSENCE_S = 2.5
START_GRACE_S = 3.5
"""How long after its start a tracker gives no host up."""
LOST_S = 3600.0
LOST_MAX = 20_000
"""How many hosts are remembered that ended without saying so."""


@dataclass(slots=True)
class Presence:
    """Marks members absent and present, and forgets hosts that have nothing left."""

    hosts: dict[str, Host]
    """The fleet's hosts by name; `overdue` removes forgotten ones."""
    swarms: dict[Digest, Swarm]
    started_at: float
    hear_lost: Callable[[Host, float], None] = lambda host, now: None
    """Hears of each host that is lost, and when that is found."""
    hear_back: Callable[[Host, float], None] = lambda host, now: None
    """Hears of each lost host that is back, before it has its new session."""
    gone: dict[str, Host] = field(default_factory=dict)  # the lost ones, in the order in which they were forgotten
    """The lost hosts by name, in the order in which they were forgotten. `found`, `overdue`,
    `expire`."""
    _absent: dict[str, None] = field(default_factory=dict)
    """Names of hosts that are absent in a swarm, as silent ones are, or have no session."""

    def found(self, host: Host, now: float) -> None:
        """A lost host is back."""
        if (lost := self.gone.pop(host.name, None)) is not None:
            self.hear_back(lost, now)

    def lost(self, host: Host, now: float) -> None:
        """The host has no session, or a new one in which it has not yet said what it holds."""
        self._absent[host.name] = None
        for blob in host.swarms:
            member = self.swarms[blob].members[host.name]
            member.mark_absent(now)

    def named(self, host: Host, swarm: Swarm, now: float) -> None:
        """Another host receives from this one, which has not spoken itself."""
        self._absent[host.name] = None
        swarm.members[host.name].mark_hearsay(now)

    def silent(self, host: Host, now: float) -> None:
        """The host has a session and does not report: its children and its parents are free for
        others."""
        self._absent[host.name] = None
        for blob in host.swarms:
            swarm = self.swarms[blob]
            member = swarm.members[host.name]
            if not member.present:
                continue
            swarm.record(now, f"{host.name} is silent")
            member.mark_absent(now, silent=True)
            for stripe in range(swarm.stripes):
                for child in list(member.children[stripe]):
                    swarm.edges.detach(stripe, child)
                if member.parents[stripe] is not None:
                    swarm.edges.detach(stripe, host.name)

    def heard(self, host: Host) -> list[Digest]:
        """A host reports; where it was silent returns the swarms in which it is to be planned
        anew."""
        back: list[Digest] = []
        if host.name not in self._absent:
            return back
        for blob in host.swarms:
            member = self.swarms[blob].members[host.name]
            if member.silent:
                member.mark_present()
                back.append(blob)
        return back

    def overdue(self, now: float) -> Iterator[tuple[Host, Digest]]:
        """The hosts and swarms to be parted now: hosts that were absent for long, and what hosts
        that reconnected have not confirmed."""
        for name in list(self._absent):
            host = self.hosts[name]
            waits = host.session is None
            if waits and host.absent_since is not None and not self._over(host.absent_since, now):
                continue  # nor is it over in any of its swarms: thousands may be lost at once
            for blob in list(host.swarms):
                since = self.swarms[blob].members[name].absent_since
                if since is not None and self._over(since, now):
                    yield host, blob
                elif since is not None:
                    waits = True
            if (
                host.session is None
                and host.absent_since is not None
                and self._over(host.absent_since, now)
                and not host.swarms
            ):
                self._forget(host, now)
                waits = False
            if not waits:
                del self._absent[name]

    def _forget(self, host: Host, now: float) -> None:
        del self.hosts[host.name]
        if host.leaving or not host.address or host.partial:  # it said so; never spoke for itself; or is elsewhere
            return
        self.gone[host.name] = host
        self.hear_lost(host, now)
        if len(self.gone) > LOST_MAX:
            del self.gone[next(iter(self.gone))]

    def expire(self, now: float) -> None:
        """Forget the lost hosts for good in time."""
        for name, host in list(self.gone.items()):
            if host.absent_since is not None and now - host.absent_since < LOST_S:
                return
            del self.gone[name]

    def _over(self, absent_since: float, now: float) -> bool:
        return now - absent_since >= ABSENCE_S and now - self.started_at >= START_GRACE_S
