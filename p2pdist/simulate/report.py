"""What a simulation comes to: makespan against the bound, percentiles, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2pdist.simulate.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one run. Times are in seconds since a host's own start, except the makespan, which is when the last host was complete.
    `bound_s` is what no distribution can beat: max(F/U_origin, F/min d, N F/(U_origin + sum u), F/rack rate). `rack_rx_ratio_*` are the
    bytes that came into a rack from outside over F, 0 without racks; `zone_origin_ratios` what the origin sent into each zone over F.
    `fingerprint` differs when anything that a host or the origin did differs."""

    hosts: int
    size: int
    pieces: int
    piece_size: int
    stripes: int
    seed: int
    makespan_s: float
    bound_s: float
    ratio: float
    p50_s: float
    p99_s: float
    p999_s: float
    origin_ratio: float
    host_sent_ratio_mean: float
    host_sent_ratio_max: float
    rack_rx_ratio_max: float
    rack_rx_ratio_mean: float
    zone_origin_ratios: dict[str, float]
    complete: int
    failed: int
    lost: int
    duplicates: int
    rejected: int
    reports: int
    events: int
    fingerprint: str

    @classmethod
    def of(cls, simulation: Simulation) -> Report:
        """Take the figures of a simulation that has run."""
        scenario = simulation.scenario
        pulls = [(host, pull) for host in simulation.hosts.values() for pull in host.pulls.values()]
        done = [pull for _, pull in pulls if pull.completed_at is not None]
        ends = [pull.completed_at or 0.0 for pull in done]
        times = sorted((pull.completed_at or 0.0) - (pull.joined_at or 0.0) for pull in done)
        makespan_s = max(ends, default=0.0)
        wanted = scenario.size * scenario.blobs
        bound_s = bound(wanted, scenario.hosts, scenario.nic_bytes_s, scenario.origin_bytes_s)
        if scenario.racks and scenario.rack_bytes_s:
            bound_s = max(bound_s, wanted / scenario.rack_bytes_s)
        imported = [rack.bytes_in / wanted for rack in simulation.racks]
        blob = simulation.blobs[0]
        return cls(
            hosts=scenario.hosts,
            size=wanted,
            pieces=blob.layout.count,
            piece_size=blob.layout.piece_size,
            stripes=blob.stripes,
            seed=scenario.seed,
            makespan_s=makespan_s,
            bound_s=bound_s,
            ratio=makespan_s / bound_s,
            p50_s=percentile(times, 0.5),
            p99_s=percentile(times, 0.99),
            p999_s=percentile(times, 0.999),
            origin_ratio=simulation.origin.bytes_sent / wanted,
            host_sent_ratio_mean=sum(host.sent_bytes for host in simulation.hosts.values()) / wanted / scenario.hosts,
            host_sent_ratio_max=max(host.sent_bytes for host in simulation.hosts.values()) / wanted,
            rack_rx_ratio_max=max(imported, default=0.0),
            rack_rx_ratio_mean=sum(imported) / len(imported) if imported else 0.0,
            zone_origin_ratios={
                zone: sent / wanted for zone, sent in sorted(simulation.origin.bytes_by_zone.items()) if zone
            },
            complete=len(done),
            failed=sum(1 for _, pull in pulls if pull.error is not None),
            lost=len(simulation.lost),
            duplicates=sum(pull.duplicates for _, pull in pulls),
            rejected=sum(pull.rejected for _, pull in pulls),
            reports=simulation.tracker.messages,
            events=simulation.world.events,
            fingerprint=_fingerprint(simulation),
        )


def bound(size: int, hosts: int, nic_bytes_s: float, origin_bytes_s: float) -> float:
    """Seconds that a broadcast of `size` bytes takes at least (Mundinger, Weber and Weiss, Journal of Scheduling 2008, for fluid)."""
    return max(size / origin_bytes_s, size / nic_bytes_s, hosts * size / (origin_bytes_s + hosts * nic_bytes_s))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not pass (nearest rank); 0 without values."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _fingerprint(simulation: Simulation) -> str:
    parts = [f"{simulation.world.events} {simulation.origin.bytes_sent}"]
    for host in simulation.hosts.values():
        for pull in host.pulls.values():
            parts.append(
                f"{host.name} {pull.completed_at!r} {pull.bytes_origin} {pull.bytes_peers} {pull.duplicates} "
                f"{type(pull.error).__name__} {host.sent_bytes}"
            )
    return sha256("\n".join(parts).encode()).hexdigest()[:16]
