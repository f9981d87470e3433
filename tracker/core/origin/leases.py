"""Leases: how many origin leases are out, and how many more a swarm may be granted.

All swarms together hold at most `leases_max`, and starved hosts RESCUES_BEYOND more. Swarms that
are only preseeded hold at most half of these, and at least one, so that a job's start always finds
some. Swarms of packages whose policy limits readers (policy/rules.py) hold together no more than
that. Which host gets a lease is the planner's to decide (planning/planner.py, `_may_read`).

Where the rate is limited at which all hosts read the origin, each lease is an equal part of it.
Holders are told when that changes; a new one may read before the others have heard of it, for the
time of a message. A host that has given its last lease back keeps the rate: it goes by it where no
tracker answers. But of several trackers each takes its part back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from p2pdist.model.messages import OriginShare
from tracker.core.events import Send
from tracker.core.host import Host
from tracker.core.ownership.handover import Handover
from tracker.core.policy.book import PolicyBook
from tracker.core.swarm import Swarm

RESCUES_BEYOND = 4


class Leases:
    """The leases of all swarms, counted once for several plans since that looks at every swarm;
    `granted` keeps the count true between the plans."""

    __slots__ = ("_by_policy", "_max", "_policies", "_preseed_max", "_preseeds", "_total")

    def __init__(self, swarms: Iterable[Swarm], leases_max: int, policies: PolicyBook | None = None) -> None:
        self._policies, self._by_policy = policies or PolicyBook(), Counter[str]()
        self._max, self._preseed_max = leases_max, max(1, leases_max // 2)
        self._total = self._preseeds = 0
        for swarm in swarms:
            if held := swarm.leases():
                self.granted(swarm, held)

    def granted(self, swarm: Swarm, count: int) -> None:
        """A swarm holds `count` leases more, fewer if negative."""
        self._total += count
        if swarm.priority == "preseed":
            self._preseeds += count
        if (limit := self._policies.readers(swarm.blob)) is not None:
            self._by_policy[limit[0]] += count

    @property
    def left(self) -> int:
        """Leases that are not out; below zero where agents brought more along."""
        return self._max - self._total

    def free(self, swarm: Swarm) -> int:
        """How many more leases a swarm may be granted now."""
        members = swarm.members
        read = all(any(not members[root].doubted_until for root in holders) for holders in swarm.edges.roots)
        return 0 if read and not swarm.starved else self._left(swarm)

    def rescues(self, swarm: Swarm) -> int:
        """How many more may be granted to starved hosts of a swarm now: a few beyond the cap, as
        strangers may hold all others."""
        return self._left(swarm, beyond=RESCUES_BEYOND) if swarm.starved else self.free(swarm)

    def room(self, swarm: Swarm, held: int) -> int:
        """How many leases a swarm may hold in all; it held `held` when the count was told."""
        return self._left(swarm) + held

    def _left(self, swarm: Swarm, *, beyond: int = 0) -> int:
        left = self._max + beyond - self._total
        if swarm.priority == "preseed":
            left = min(left, self._preseed_max - self._preseeds)
        if (limit := self._policies.readers(swarm.blob)) is not None:
            left = min(left, limit[1] - self._by_policy[limit[0]])
        return max(0, left)


@dataclass(slots=True)
class OriginRates:
    """How fast the holders of leases may read, as they were told."""

    _told: dict[str, None] = field(default_factory=dict)
    """Hosts that were told a rate and not that they hold no lease any more. `take`."""

    def take(
        self, swarms: Iterable[Swarm], hosts: Mapping[str, Host], limit_bytes_s: float, handover: Handover
    ) -> list[Send]:
        """The messages that tell holders of leases how fast they may read; none without a limit
        (bytes/s, of all trackers together; 0). Of several trackers each lets a host read at a rate,
        and a host reads at the sum: one that holds no lease of this tracker any more hears of that,
        too."""
        limit_bytes_s, several = limit_bytes_s * handover.fraction(), handover.ownership is not None
        if not limit_bytes_s:
            return []
        held = Counter(host for swarm in swarms for host in swarm.readers() if host in hosts)
        messages = []
        for name, leases in held.items():
            host, share = hosts[name], limit_bytes_s * leases / held.total()
            if host.session is not None and host.origin_limit_bytes_s != share:
                host.limit_origin(share)
                messages.append(Send(host.session, OriginShare(share)))
                self._told[name] = None
        for name in [name for name in self._told if name not in held]:
            del self._told[name]
            former = hosts.get(name)
            if several and former is not None and former.session is not None and former.origin_limit_bytes_s:
                messages.append(Send(former.session, OriginShare(former.origin_limit_bytes_s, ended=True)))
                former.limit_origin(0.0)
        return messages
