"""Membership: which hosts are in which swarms.

A host is in one swarm of a blob at most. Hosts that say the same of how a blob is cut form a
swarm: the one of the layout that a manifest gives has the blob's digest as its key; without a
manifest, the one of the layout that was said first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from p2pdist.model.digest import Digest
from p2pdist.model.errors import UsageError
from p2pdist.model.messages import Holding
from p2pdist.model.pieces import PieceLayout
from tracker.core.host import Host
from tracker.core.member import Member
from tracker.core.monitor.presence import Presence
from tracker.core.planning.schedule import Schedule
from tracker.core.repair.reputation import Reputation
from tracker.core.swarm import Swarm, key_of, layout_of

HOSTS_MAX = 200_000
SWARMS_MAX = 100_000
"""Swarms in all; half of them are kept for blobs that a manifest read here names."""

FOUNDED_MAX = SWARMS_MAX // 4
"""Swarms that one host may found of blobs that no manifest read here names."""

VAIN_MAX = 256
"""Those of them of which it may want pieces without having got any: an agent pulls 20 blobs of a
package at once, of several packages, and says so again to a tracker that starts anew."""


@dataclass(slots=True)
class Membership:
    """Adds hosts to swarms and takes them out; `hosts` and `swarms` are the fleet's."""

    hosts: dict[str, Host]
    swarms: dict[Digest, Swarm]
    """Swarms by key; none is empty."""
    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    reputation: Reputation
    """Says how many upload slots a host has."""
    presence: Presence
    """Hears of hosts that other hosts name."""
    leaves: Callable[[Swarm, str, str, float], None] = lambda swarm, host, reason, now: None
    """Hears of hosts that are about to leave a swarm, why, and when."""
    renamed: Callable[[Digest, Digest], None] = lambda old, key: None
    """Hears of swarms that have another key: the old one and the new one."""
    rests: Callable[[Host], None] = lambda host: None
    """Hears of hosts that may have nothing left to receive."""
    _layouts: dict[Digest, PieceLayout] = field(default_factory=dict)
    """How blobs are cut, as manifests say. `describe`."""

    def described(self, blob: Digest) -> bool:
        """Whether a manifest that was read here names the blob."""
        return blob in self._layouts

    def founds(self, holding: Holding) -> bool:
        """Whether a holding that is taken makes a swarm of a blob that no manifest read here
        names."""
        return holding.blob not in self.swarms and holding.blob not in self._layouts

    def swarm_of(self, host: Host, holding: Holding) -> Swarm:
        """The swarm of the hosts that say the same of how the blob is cut, maybe a new one. Raises
        UsageError when the blob cannot be cut like that, or there are too many swarms."""
        layout, blob = layout_of(holding), holding.blob
        first, other = self.swarms.get(blob), key_of(blob, layout)
        if first is not None and first.layout == layout:
            return first
        if other in self.swarms:
            return self.swarms[other]
        described = blob in self._layouts
        if len(self.swarms) >= (SWARMS_MAX if described else SWARMS_MAX // 2):
            raise UsageError("this tracker has too many swarms")
        if not described:
            self._check_founder(host, blob, wants=not any(holding.counts))
        main = first is None and self._layouts.get(blob, layout) == layout
        return Swarm(blob, layout, key=blob if main else other)

    def _check_founder(self, host: Host, blob: Digest, *, wants: bool) -> None:
        """Raises UsageError when a host makes more swarms than it may of blobs that no manifest
        read here names."""
        if len(host.founded) >= FOUNDED_MAX:
            raise UsageError(f"{host.name} speaks of more than {FOUNDED_MAX} blobs that no package here has")
        if wants and host.wanted_in_vain >= VAIN_MAX:
            raise UsageError(
                f"{host.name} waits for {VAIN_MAX} blobs that no package here has, and for {blob}",
                remedy="Pull fewer blobs at once, or packages from this tracker's origin",
            )

    def describe(self, blob: Digest, layout: PieceLayout, *, now: float) -> None:
        """A manifest says how a blob is cut. The first one counts."""
        if blob in self._layouts:
            return
        while len(self._layouts) >= SWARMS_MAX:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[blob] = layout
        claimed = self.swarms.get(blob)
        if claimed is not None and claimed.layout != layout:
            self._rename(claimed, key_of(blob, claimed.layout), now=now)
        if (right := self.swarms.get(key_of(blob, layout))) is not None:
            self._rename(right, blob, now=now)

    def enter(self, host: Host, swarm: Swarm, *, now: float) -> None:
        """The host speaks of a blob in this swarm: it leaves another swarm of the blob."""
        other = host.key(swarm.blob)
        if other != swarm.key and other in host.swarms:
            self.leave(host, self.swarms[other], "it says that the blob is cut differently", now=now)
        self.swarms[swarm.key] = swarm

    def join(self, host: Host, swarm: Swarm, counts: tuple[int, ...], *, now: float) -> Member:
        """Add a host to a swarm, with the upload slots that it has."""
        if not swarm.members and not self.described(swarm.blob):
            host.found(swarm.blob, wants=not any(counts))
        member = swarm.add(
            host.name,
            counts,
            slots=self.reputation.slots(host, swarm, now=now),
            now=now,
            zone=host.location,
            rack=host.rack,
            slow_receiver=self.reputation.capacities.slow_receiver(host.name),
        )
        host.enter(swarm.blob, swarm.key)
        return member

    def add_absent(self, swarm: Swarm, name: str, *, now: float) -> bool:
        """Add a host to a swarm because another host receives from it; it is absent until it speaks
        itself. Returns whether it was added."""
        host = self.hosts.get(name)
        if host is None:
            if len(self.hosts) >= HOSTS_MAX // 2:
                return False  # the other half is for hosts that speak for themselves
            host = self.hosts[name] = Host(name, absent_since=now, drained=name in self.reputation.drained)
        if host.leaving or host.key(swarm.blob) in host.swarms:  # in a swarm of the blob it speaks for itself
            return False
        self.join(host, swarm, (0,) * swarm.stripes, now=now)
        self.presence.named(host, swarm, now)
        return True

    def sort(self, host: Host, swarm: Swarm) -> None:
        """Note whether the host still receives the blob."""
        seed = swarm.members[host.name].seed
        host.set_receiving(swarm.key, not seed)
        if seed:
            self.rests(host)

    def leave(self, host: Host, swarm: Swarm, reason: str, *, now: float) -> None:
        """Take a host out of a swarm; its children are planned anew."""
        self.leaves(swarm, host.name, reason, now)
        swarm.remove(host.name)
        swarm.record(now, f"{host.name} is gone: {reason}")
        host.leave(swarm.blob, swarm.key)
        self.rests(host)
        if not swarm.members:
            del self.swarms[swarm.key]
            self.schedule.gone(swarm.key)
        else:
            self.schedule.ask(swarm.key, reason, now)

    def dissolve(self, swarm: Swarm, *, now: float) -> None:
        """Forget a swarm, which another tracker owns; its hosts know."""
        for name in swarm.members:
            self.leaves(swarm, name, "another tracker", now)
            self.hosts[name].leave(swarm.blob, swarm.key)
            self.rests(self.hosts[name])
        del self.swarms[swarm.key]
        self.schedule.gone(swarm.key)

    def drain(self, host: Host, *, now: float) -> None:
        """The host is about to end: it leaves all its swarms at once, with its leases, and nothing
        new is asked of it. Its children are planned anew together, because it fetches nothing more
        and each of them would run dry; until they change their parents it goes on serving them."""
        host.drain()
        for key in list(host.swarms):
            self.leave(host, self.swarms[key], "leaving", now=now)

    def _rename(self, swarm: Swarm, key: Digest, *, now: float) -> None:
        """Let a swarm have another key."""
        old = swarm.rename(key)
        self.swarms[key] = self.swarms.pop(old)
        self.schedule.gone(old)
        self.renamed(old, key)
        for name in swarm.members:
            host = self.hosts[name]
            host.leave(swarm.blob, old)
            host.enter(swarm.blob, key)
            self.sort(host, swarm)
        self.schedule.ask(key, "layout", now)
