"""What to simulate."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from random import Random

from p2pdist.core.transport import Policy
from p2pdist.model.pieces import piece_size_for
from p2pdist.simulate.arrivals import start_times
from p2pdist.simulate.bound import Party, bound
from p2pdist.simulate.faults import Fault, Late, Slow
from tracker.core.pace import report_interval_s


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate: sizes in bytes, rates in bytes/s, times in seconds. `origin_bytes_s` 0
    stands for twice a host's rate; `piece_size` 0 for what the size asks for, `report_interval_s` 0
    for what a tracker asks of so many hosts. Hosts are dealt into `racks` in blocks, and racks
    (hosts without racks) into `zones`; what crosses a rack's boundary shares `rack_bytes_s` in each
    direction, 0 for no limit. `other_nics` are (rate, share of the hosts) of those that have
    another rate than `nic_bytes_s`. `arrivals` and `arrivals_s` say how the hosts' starts are
    spread (arrivals.py). The last `preseeds` of the `blobs` are pulled as preseeds; the others by
    the first `starters` hosts alone, 0 for all. `transport` says how blobs come
    (core/transport.py); to `tree_hosts` they come by trees."""

    hosts: int
    size: int
    nic_bytes_s: float
    seed: int = 1
    origin_bytes_s: float = 0.0
    racks: int = 0
    rack_bytes_s: float = 0.0
    zones: int = 0
    other_nics: tuple[tuple[float, float], ...] = ()
    arrivals: str = "burst"
    arrivals_s: float = 0.0
    latency_s: float = 0.0002
    piece_size: int = 0
    blobs: int = 1
    preseeds: int = 0
    starters: int = 0
    blocks_per_piece: int = 1
    report_interval_s: float = 0.0
    origin_streams_max: int = 64
    patience_s: float = 120.0
    time_limit_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    transport: Policy = "trees"
    tree_hosts: frozenset[str] = frozenset()

    def host_names(self) -> list[str]:
        return [f"h{number:05d}" for number in range(self.hosts)]

    def transport_of(self, host: str) -> Policy:
        """How blobs come to a host."""
        return "trees" if host in self.tree_hosts else self.transport

    def rack_of(self, host: int) -> int:
        """The rack that host number `host` stands in, -1 without racks."""
        return host * self.racks // self.hosts if self.racks else -1

    def zone_of(self, host: int) -> int:
        """The zone that host number `host` stands in, -1 without zones."""
        if not self.zones:
            return -1
        return self.rack_of(host) * self.zones // self.racks if self.racks else host * self.zones // self.hosts

    def rates(self) -> list[float]:
        """Each host's rate, the same up and down."""
        found = [self.nic_bytes_s] * self.hosts
        left = list(range(self.hosts))
        random = Random(f"nics {self.seed}")
        for rate_bytes_s, share in self.other_nics:
            chosen = random.sample(left, min(len(left), round(share * self.hosts)))
            for host in chosen:
                found[host] = rate_bytes_s
            left = [host for host in left if found[host] == self.nic_bytes_s]
        return found

    def parties(self, *, without: Container[str] = ()) -> list[Party]:
        """The hosts as the bound sees them; those `without` need not complete. A link that is slow
        from the start has that rate."""
        shares: dict[str, tuple[float, float]] = {}
        late: dict[str, float] = {}
        for fault in self.faults:
            if isinstance(fault, Slow) and fault.at <= 0:
                shares[fault.host] = fault.share, fault.share if fault.both else 1.0
            elif isinstance(fault, Late):
                late[fault.host] = fault.at
        starts = start_times(self.arrivals, self.arrivals_s, self.hosts, self.seed)
        found = []
        for number, (name, rate_bytes_s) in enumerate(zip(self.host_names(), self.rates(), strict=True)):
            up, down = shares.get(name, (1.0, 1.0))
            starts_at = late.get(name, starts[number])
            found.append(
                Party(starts_at, rate_bytes_s * up, rate_bytes_s * down, self.rack_of(number), name not in without)
            )
        return found

    def bound_s(self, parties: list[Party]) -> float:
        """The time at which the last of those that count can be complete at the earliest."""
        return bound(self.size * self.blobs, parties, self.origin_bytes_s, self.rack_bytes_s)

    def filled(self) -> Scenario:
        """The same with every default worked out. The time limit is generous: reaching it means
        that somebody waits forever."""
        filled = replace(
            self,
            origin_bytes_s=self.origin_bytes_s or 2 * self.nic_bytes_s,
            piece_size=self.piece_size or piece_size_for(self.size),
            report_interval_s=self.report_interval_s or report_interval_s(self.hosts),
        )
        limit = self.time_limit_s or 300 + 20 * filled.bound_s(filled.parties())
        return replace(filled, time_limit_s=limit)
