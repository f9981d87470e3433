"""Reputation: how many upload slots each host has, by what it showed and by what others report of
it.

A host's slots follow its uplink (capacity.py), and where a blob has but one stripe the number of
hosts. A host that several others found sending wrong bytes or refusing to serve is banned for a
while and has none. Nor has a host that an operator drains: it goes on to receive, gives only what
no other host has, and reads the origin only where no other host could.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from p2pdist.model.digest import Digest
from tracker.core.capacity import Capacities, fanout
from tracker.core.host import Host
from tracker.core.monitor.progress import keeps_up
from tracker.core.monitor.testimony import Testimony
from tracker.core.planning.schedule import Schedule
from tracker.core.planning.slow_receivers import reclassify
from tracker.core.repair.remedies import demote
from tracker.core.swarm import Swarm

DRAINED_MAX = 20_000
RECOVERY_S = 3.0
"""How long after the last start preseeds are not judged yet: they return to their rates, and old
lags are made up."""


@dataclass(slots=True)
class Reputation:
    """Sets upload slots of members, and bans hosts."""

    hosts: dict[str, Host]
    swarms: dict[Digest, Swarm]
    schedule: Schedule
    """Hears which swarms are to be planned anew."""
    capacities: Capacities
    """Remembers uplinks and downlinks."""
    drained: dict[str, None] = field(default_factory=dict)
    """Names of hosts that an operator drains, at most DRAINED_MAX, also of hosts that are away.
    `drain`."""
    testimony: Testimony = field(default_factory=Testimony)
    """What children say of uplinks."""
    _penalised: dict[str, None] = field(default_factory=dict)
    """Hosts with penalties. `penalise`, `expire`."""
    _start_at: float = -inf
    """Time at which a job's start was last under way. `expire`."""

    def slots(self, host: Host, swarm: Swarm, *, now: float) -> int:
        """Upload slots of a host in a swarm."""
        member = swarm.members.get(host.name)
        doubted = member is not None and member.doubted_until
        return 0 if host.banned or host.drained or doubted else self.capacities.slots(host.name, swarm.fanout, now=now)

    def set_fanout(self, swarm: Swarm, *, now: float) -> None:
        """Before a swarm is planned: where a blob has but one stripe, its hosts get as many slots
        as their number asks for. All of them are for that stripe, and a host keeps the children
        that it has."""
        if swarm.stripes > 1 or not swarm.edges.unplanned:
            return
        slots = fanout(len(swarm.members), swarm.layout, self.capacities.typical())
        changed = slots != swarm.fanout
        swarm.set_fanout(slots)
        for member in swarm.members.values():
            if changed:
                kept = min(member.slots, member.load)
                member.set_slots(max(kept, self.slots(self.hosts[member.host], swarm, now=now)))
            member.allot_all()

    def fit_children(self, host: Host, reason: str, *, now: float) -> None:
        """Fit a host's children to its slots. Its best child takes its position, and it becomes a
        leaf."""
        for blob in host.swarms:
            swarm = self.swarms[blob]
            member = swarm.members[host.name]
            demote(swarm, member, self.slots(host, swarm, now=now), now=now)
            reclassify(swarm, member, slow_receiver=self.capacities.slow_receiver(host.name))
            swarm.record(now, f"{host.name} keeps {member.slots} upload slots: {reason}")
            self.schedule.ask(blob, reason, now)

    def retry(self, swarm: Swarm, *, now: float) -> None:
        """Slots are short in a swarm: give hosts theirs back that were called slow a while ago and
        keep up themselves."""
        for member in swarm.members.values():
            if member.slots < swarm.fanout and (member.seed or keeps_up(swarm, member)):
                host = self.hosts[member.host]
                if self.capacities.retry(member.host, now=now):
                    member.set_slots(max(member.slots, self.slots(host, swarm, now=now)))
                    swarm.record(now, f"{member.host} is tried again with {member.slots} upload slots")

    def excused(self, swarm: Swarm, *, now: float) -> bool:
        """Whether hosts may be slow in a swarm because others come first: it is a preseed, and a
        job's start is under way somewhere, or was until a moment ago."""
        return now - self._start_at < RECOVERY_S and swarm.priority == "preseed"

    def clear_slow_receiver(self, host: Host, *, now: float) -> None:
        """The host's downlink is not slow after all."""
        self.capacities.clear_slow_receiver(host.name)
        for blob in host.swarms:
            reclassify(self.swarms[blob], self.swarms[blob].members[host.name], slow_receiver=False)
            self.schedule.ask(blob, "not slow after all", now)

    def penalise(self, host: Host, by: str, reason: str, *, now: float) -> None:
        """Another host met a failure at this one."""
        self._penalised[host.name] = None
        self._vouch(host, now)
        if host.penalise(by, reason, now=now):
            self.fit_children(host, "blamed", now=now)

    def forgive(self, host: Host, by: str, *, now: float) -> None:
        """A complaint of wrong bytes is withdrawn."""
        banned = host.banned
        if host.penalties.get(by, ("", 0.0))[0] == "corrupt":
            del host.penalties[by]
        if banned and not host.banned:
            self._give_back(host, now)

    def drain(self, name: str, *, drained: bool, now: float) -> None:
        """An operator drains a host, or ends that."""
        host = self.hosts.get(name)
        if drained and len(self.drained) < DRAINED_MAX:
            self.drained[name] = None
        else:
            self.drained.pop(name, None)
        if host is None or host.drained == (name in self.drained):
            return
        host.drained = name in self.drained
        if host.drained:
            self.fit_children(host, "drained", now=now)
        else:
            self._give_back(host, now)

    def _give_back(self, host: Host, now: float) -> None:
        """A host that is neither banned nor drained any more has its upload slots again."""
        for blob in host.swarms:
            swarm = self.swarms[blob]
            swarm.members[host.name].set_slots(self.slots(host, swarm, now=now))

    def _vouch(self, host: Host, now: float) -> None:
        """The children that have been getting pieces from a host speak for it, however long ago the
        first one came."""
        for key in host.swarms:
            swarm = self.swarms[key]
            for stripe, children in enumerate(swarm.members[host.name].children):
                for child in map(swarm.members.__getitem__, children):
                    moved_at = child.moved_at[stripe]
                    if moved_at != child.attached_at[stripe] and now - moved_at < RECOVERY_S:
                        host.vouch(self.hosts[child.host].voter, now=now)

    def expire(self, *, now: float) -> None:
        """Forget old penalties; hosts that are no longer banned get their slots back. Called often
        and regularly."""
        if any(swarm.starting for swarm in self.swarms.values()):
            self._start_at = now
        self.testimony.expire(now=now)
        self.capacities.expire(now=now)
        for name in list(self._penalised):
            host = self.hosts.get(name)
            banned = host is not None and host.banned
            if host is not None:
                host.expire_penalties(now=now)
            if host is None or not host.penalties:
                del self._penalised[name]
            if host is not None and host.banned and not banned:
                self.fit_children(host, "blamed", now=now)
            if host is not None and banned and not host.banned:
                self._give_back(host, now)
