"""Standing: what each host may carry, by what it showed and by what others say of it.

A host's budget of seats follows its uplink (capacity.py), and where a blob has but one stripe the
number of hosts (fanout.py). A host that several others found sending wrong bytes or refusing to
serve is shunned for a while and has none.

A host that is about to end leaves all its swarms at once, with its leases: nothing new is asked of
it. Its children are planned anew, all of them together, because it fetches nothing more and each of
them would run dry; until they change their parents it goes on serving them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from p2pdist.model.digest import Digest
from tracker.core.capacity import Capacities, fanout
from tracker.core.host import Host
from tracker.core.monitor.progress import keeps_up
from tracker.core.planning.schedule import Schedule
from tracker.core.planning.slow_receivers import become
from tracker.core.repair.repair import relieve
from tracker.core.swarm import Member, Swarm

RECOVERY_S = 3.0
"""How long after the last start preseeds are not judged yet: they take up their pace again, and old
lags are made up."""


@dataclass(slots=True)
class Standing:
    """Shares the fleet's hosts, swarms and schedule."""

    hosts: dict[str, Host]
    swarms: dict[Digest, Swarm]
    schedule: Schedule
    capacities: Capacities
    _blamed: dict[str, None] = field(default_factory=dict)
    _start_at: float = -inf

    def budget(self, host: Host, swarm: Swarm, *, now: float) -> int:
        """Seats of a host in a swarm."""
        return 0 if host.shunned else self.capacities.budget(host.name, swarm.fanout, now=now)

    def join(self, host: Host, swarm: Swarm, counts: list[int], *, now: float) -> Member:
        """Take a host into a swarm, with the budget and the weight that it has."""
        budget = self.budget(host, swarm, now=now)
        member = swarm.add(host.name, counts, budget=budget, now=now, zone=host.zone, rack=host.rack)
        member.light = self.capacities.light(host.name)
        host.enter(swarm.blob, swarm.key)
        return member

    def sort(self, host: Host, swarm: Swarm) -> None:
        """Note whether the host still receives the blob."""
        if swarm.members[host.name].seed:
            host.receiving.pop(swarm.key, None)
        else:
            host.receiving[swarm.key] = None

    def leave(self, host: Host, swarm: Swarm, reason: str, *, now: float) -> None:
        """Take a host out of a swarm; its children are planned anew."""
        swarm.remove(host.name)
        swarm.tell(now, f"{host.name} is gone: {reason}")
        host.leave(swarm.blob, swarm.key)
        if not swarm.members:
            del self.swarms[swarm.key]
            self.schedule.forget(swarm.key)
        else:
            self.schedule.ask(swarm.key, reason, now)

    def rename(self, swarm: Swarm, key: Digest, *, now: float) -> None:
        """Let a swarm have another key."""
        old, swarm.key = swarm.key, key
        self.swarms[key] = self.swarms.pop(old)
        self.schedule.forget(old)
        for name in swarm.members:
            host = self.hosts[name]
            host.leave(swarm.blob, old)
            host.enter(swarm.blob, key)
            self.sort(host, swarm)
        self.schedule.ask(key, "layout", now)

    def depart(self, host: Host, *, now: float) -> None:
        """The host is about to end."""
        host.leaving = True
        for blob in list(host.swarms):
            self.leave(host, self.swarms[blob], "leaving", now=now)

    def fan_out(self, swarm: Swarm, *, now: float) -> None:
        """Before a swarm is planned: where a blob has but one stripe, let its hosts have as many
        seats as their number asks for. All of them are for that stripe, and a host keeps the
        children that it has."""
        if swarm.stripes > 1 or not swarm.unplanned:
            return
        seats = fanout(len(swarm.members), swarm.layout, self.capacities.typical())
        changed, swarm.fanout = seats != swarm.fanout, seats
        for member in swarm.members.values():
            if changed:
                kept = min(member.budget, member.load)
                member.budget = max(kept, self.budget(self.hosts[member.host], swarm, now=now))
            member.seats[0] = member.budget

    def relieve(self, host: Host, reason: str, *, now: float) -> None:
        """Fit a host's children to its budget. Its best child takes its place, and it becomes a
        leaf."""
        for blob in host.swarms:
            swarm = self.swarms[blob]
            member = swarm.members[host.name]
            relieve(swarm, member, self.budget(host, swarm, now=now), now=now)
            become(swarm, member, light=self.capacities.light(host.name))
            swarm.tell(now, f"{host.name} keeps {member.budget} seats: {reason}")
            self.schedule.ask(blob, reason, now)

    def retry(self, swarm: Swarm, *, now: float) -> None:
        """Seats are short in a swarm: give hosts theirs back that were called slow a while ago and
        keep up themselves."""
        for member in swarm.members.values():
            if member.budget < swarm.fanout and (member.seed or keeps_up(swarm, member)):
                host = self.hosts[member.host]
                if self.capacities.retry(member.host, now=now):
                    member.budget = max(member.budget, self.budget(host, swarm, now=now))
                    swarm.tell(now, f"{member.host} is tried again with {member.budget} seats")

    def excused(self, swarm: Swarm, *, now: float) -> bool:
        """Whether hosts may be slow in a swarm because others come first: it is a preseed, and a
        job's start is under way somewhere, or was until a moment ago."""
        return now - self._start_at < RECOVERY_S and swarm.priority == "preseed"

    def acquit(self, host: Host, *, now: float) -> None:
        """Its downlink is not slow after all."""
        self.capacities.acquit(host.name)
        for blob in host.swarms:
            become(self.swarms[blob], self.swarms[blob].members[host.name], light=False)
            self.schedule.ask(blob, "not slow after all", now)

    def blame(self, host: Host, by: str, reason: str, *, now: float) -> None:
        """Another host met a failure at this one."""
        self._blamed[host.name] = None
        if host.blame(by, reason, now=now):
            self.relieve(host, "blamed", now=now)

    def pardon(self, *, now: float) -> None:
        """Forget old blame; hosts that are shunned no longer get their seats back. Called often and
        regularly."""
        if any(swarm.starting for swarm in self.swarms.values()):
            self._start_at = now
        for name in list(self._blamed):
            host = self.hosts.get(name)
            shunned = host is not None and host.shunned
            if host is not None:
                host.forgive(now=now)
            if host is None or not host.blamed:
                del self._blamed[name]
            if host is not None and shunned and not host.shunned:
                for blob in host.swarms:
                    swarm = self.swarms[blob]
                    swarm.members[name].budget = self.budget(host, swarm, now=now)
