"""What to simulate: hosts with their links and starts, blobs, and faults, among them faults of a
share of the hosts that the seed chooses.

What no distribution can beat: the time that the links alone ask for.

Every host needs the whole blob through its own downlink, one copy must leave the origin and enter
each rack, and all that is received must be sent: max(F/U_origin, F/min d, F/rack rate, N
F/(U_origin + sum u)) when all hosts begin at once (Mundinger, Weber and Weiss, Journal of
Scheduling 2008, for fluid and without racks). A host that starts later counts from its start.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from random import Random
from typing import NamedTuple

from p2pdist.core.transport import Policy
from p2pdist.model.pieces import piece_size_for
from p2pdist.model.vouched_list import vouched_layout
from p2pdist.simulate.faults import Crash, Fault, Late, Partition, Slow
from p2pdist.simulate.network import Cut
from tracker.core.policy.budget import HOUR_S, SiteBudget
from tracker.core.report_rate import report_interval_s


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


KINDS = ("burst", "uniform", "poisson", "ramp")


def start_times(kind: str, span_s: float, hosts: int, seed: int) -> list[float]:
    """The start of each host in seconds, drawn from the seed; the first starts at 0. `kind` is one
    of KINDS.

    burst: all at 0. uniform: independently, evenly over `span_s`. poisson: with exponential gaps
    that add up to `span_s` on average. ramp: ever more of them until `span_s`, the rate growing
    from nothing in proportion to the time.
    """
    if kind == "burst" or not span_s:
        return [0.0] * hosts
    random = Random(f"arrivals {seed}")
    times: list[float] = []
    for _ in range(hosts):
        match kind:
            case "uniform":
                times.append(random.uniform(0, span_s))
            case "poisson":
                times.append((times[-1] if times else 0.0) + random.expovariate(hosts / span_s))
            case "ramp":
                times.append(span_s * sqrt(random.random()))
            case _:
                raise ValueError(f"there are no arrivals of the kind {kind!r}")
    first = min(times)
    random.shuffle(times)
    return [time - first for time in times]


def slow_share(
    scenario: Scenario, share: float, factor: float, *, both: bool = False, up: bool = True
) -> tuple[Slow, ...]:
    """A share of the hosts has an uplink (with `both` also a downlink, without `up` a downlink
    alone) of `factor` times its rate, from the start on."""
    names = _some(scenario, share, Random(f"slow {scenario.seed}"))
    return tuple(Slow(name, 0.0, factor, both, up) for name in names)


def crash_share(scenario: Scenario, share: float) -> tuple[Crash, ...]:
    """A share of the hosts dies for good, each at a time between its start and the bound. Of every
    other one only the process dies, and the kernel tells its peers; the rest lose their power, of
    which their peers learn nothing."""
    scenario = scenario.filled()
    random = Random(f"crash {scenario.seed}")
    parties = scenario.parties()
    end_s = scenario.bound_s(parties)
    starts = dict(zip(scenario.host_names(), (party.starts_at for party in parties), strict=True))
    return tuple(
        Crash(name, random.uniform(starts[name], max(end_s, starts[name])), None, bool(number % 2))
        for number, name in enumerate(_some(scenario, share, random))
    )


def cut_half(scenario: Scenario, at_s: float, for_s: float | None) -> Partition:
    """Half of the hosts are cut off from the others and from the tracker for a while, or for
    good."""
    group = _some(scenario, 0.5, Random(f"half {scenario.seed}"))
    return Partition(Cut(frozenset(group), peers=True, tracker=True), at_s, for_s)


def _some(scenario: Scenario, share: float, random: Random) -> list[str]:
    """A share of the hosts, by chance; at least one unless the share is 0."""
    count = min(scenario.hosts, max(1, round(share * scenario.hosts))) if share else 0
    return random.sample(scenario.host_names(), count)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sizes are in bytes, rates in bytes/s, times in seconds."""

    hosts: int
    #: Of each blob.
    size: int
    #: Each host's uplink and downlink.
    nic_bytes_s: float
    seed: int = 1
    #: The origin's uplink; 0: twice a host's.
    origin_bytes_s: float = 0.0
    #: Hosts are assigned to racks in blocks; what crosses a rack's boundary shares `rack_bytes_s`
    #: in each direction, 0 for no limit.
    racks: int = 0
    rack_bytes_s: float = 0.0
    #: Racks (hosts, where there are no racks) are assigned to zones in blocks.
    zones: int = 0
    #: Other rates than `nic_bytes_s`, each with the share of the hosts that has it.
    other_nics: tuple[tuple[float, float], ...] = ()
    #: How the hosts' starts are spread, and over how long (start_times).
    arrivals: str = "burst"
    arrivals_s: float = 0.0
    #: Of each path, one way.
    latency_s: float = 0.0002
    #: 0: what the size asks for.
    piece_size: int = 0
    #: The last `preseeds` of the blobs are pulled as preseeds; the others by the first `starters`
    #: hosts alone, 0 for all.
    blobs: int = 1
    preseeds: int = 0
    starters: int = 0
    blocks_per_piece: int = 1
    #: 0: what a tracker asks of so many hosts.
    report_interval_s: float = 0.0
    #: The cap on leases, over all swarms.
    origin_streams_max: int = 64
    #: How long a download without a source goes on before it gives up.
    patience_s: float = 120.0
    #: When the run ends as one that waits forever; 0: a multiple of the bound.
    time_limit_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    #: How blobs come to hosts (core/transport.py), but to `tree_hosts`, where they come by trees.
    transport: Policy = "trees"
    tree_hosts: frozenset[str] = frozenset()
    #: Nobody has made a piece list: hosts vouch for what they read (model/vouched_list.py).
    vouched: bool = False
    #: How many trackers share the blobs.
    trackers: int = 1
    #: Zones (racks or hosts, where there are no zones) are at sites, in blocks. What leaves or
    #: enters a site shares `wan_bytes_s` in each direction, 0 for no limit, and takes `wan_s`
    #: longer, one way. Only hosts at `origin_sites` read the origin, none: at all sites.
    sites: int = 0
    wan_bytes_s: float = 0.0
    wan_s: float = 0.0
    origin_sites: frozenset[str] = frozenset()
    #: What may come to sites over their WAN; reads of the origin are not held to it.
    budgets: tuple[SiteBudget, ...] = ()

    def host_names(self) -> list[str]:
        return [f"h{number:05d}" for number in range(self.hosts)]

    def transport_of(self, host: str) -> Policy:
        """How blobs come to a host."""
        return "trees" if host in self.tree_hosts else self.transport

    def rack_of(self, host: int) -> int:
        """The number of a host's rack, -1 without racks."""
        return host * self.racks // self.hosts if self.racks else -1

    def zone_of(self, host: int) -> int:
        """The number of a host's zone, -1 without zones."""
        if not self.zones:
            return -1
        return self.rack_of(host) * self.zones // self.racks if self.racks else host * self.zones // self.hosts

    def site_of(self, host: int) -> int:
        """The number of a host's site, -1 without sites."""
        if not self.sites:
            return -1
        places = ((self.zone_of(host), self.zones), (self.rack_of(host), self.racks), (host, self.hosts))
        place, count = next((place, count) for place, count in places if count)
        return place * self.sites // count

    def rates(self) -> list[float]:
        """Each host's rate, the same up and down."""
        rates = [self.nic_bytes_s] * self.hosts
        left = list(range(self.hosts))
        random = Random(f"nics {self.seed}")
        for rate_bytes_s, share in self.other_nics:
            chosen = random.sample(left, min(len(left), round(share * self.hosts)))
            for host in chosen:
                rates[host] = rate_bytes_s
            left = [host for host in left if rates[host] == self.nic_bytes_s]
        return rates

    def parties(self, *, without: Container[str] = ()) -> list[Party]:
        """The hosts as the bound sees them; the hosts `without` need not complete. A link that is
        slow from the start has that rate."""
        shares: dict[str, tuple[float, float]] = {}
        late: dict[str, float] = {}
        for fault in self.faults:
            if isinstance(fault, Slow) and fault.at_s <= 0:
                shares[fault.host] = (
                    fault.share if fault.up else 1.0,
                    fault.share if fault.both or not fault.up else 1.0,
                )
            elif isinstance(fault, Late):
                late[fault.host] = fault.at_s
        starts = start_times(self.arrivals, self.arrivals_s, self.hosts, self.seed)
        parties = []
        for number, (name, rate_bytes_s) in enumerate(zip(self.host_names(), self.rates(), strict=True)):
            up, down = shares.get(name, (1.0, 1.0))
            starts_at = late.get(name, starts[number])
            parties.append(
                Party(starts_at, rate_bytes_s * up, rate_bytes_s * down, self.rack_of(number), name not in without)
            )
        return parties

    def bound_s(self, parties: list[Party]) -> float:
        """The time at which the last of the hosts that count can be complete at the earliest: all
        of it must enter each site once, within its budget."""
        size = self.size * self.blobs
        entered_s = size / self.wan_bytes_s if self.sites and self.wan_bytes_s else 0.0
        for budget in self.budgets:
            hours = (size - 1) // budget.hourly_bytes if budget.hourly_bytes else 0
            entered_s = max(entered_s, hours * HOUR_S, size / budget.rate_bytes_s if budget.rate_bytes_s else 0.0)
        return max(entered_s, bound(size, parties, self.origin_bytes_s, self.rack_bytes_s))

    def filled(self) -> Scenario:
        """This scenario with every default worked out. The time limit is generous: a run that
        reaches it has a host that waits forever."""
        usual = vouched_layout(self.size).piece_size if self.vouched else piece_size_for(self.size)
        filled = replace(
            self,
            origin_bytes_s=self.origin_bytes_s or 2 * self.nic_bytes_s,
            piece_size=self.piece_size or usual,
            report_interval_s=self.report_interval_s or report_interval_s(self.hosts),
        )
        limit = self.time_limit_s or 300 + 20 * filled.bound_s(filled.parties())
        return replace(filled, time_limit_s=limit)
