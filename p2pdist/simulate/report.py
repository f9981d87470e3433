"""What a simulation comes to: makespan against the bound, percentiles, bytes.

A picture of one run: the share of hosts that are complete over time, and the bound.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Container, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.simulate.bound import own_bounds
from p2pdist.simulate.faults import Crash, Leave, Slow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from p2pdist.simulate.host import Host
    from p2pdist.simulate.simulation import Simulation


MARKS = (0.5, 0.99, 0.999)
FORMATS = frozenset([".png", ".svg", ".pdf"])


def check_plot(path: Path) -> None:
    """Raise UsageError or P2PDistError when no picture could be written there, before hours have
    gone into what it shows."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path} is not the name of a picture", remedy="Let it end in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {path.absolute().parent}", remedy="Make it, or name another")
    if importlib.util.find_spec("matplotlib") is None:
        raise P2PDistError(
            "a picture needs matplotlib, which is not installed",
            remedy="Install p2pdist with the extra `plot`: pip install 'p2pdist[plot]'",
        )


def draw(report: Report, path: Path) -> None:
    """Write the picture; see check_plot. Raises P2PDistError when the file cannot be written."""
    try:
        picture(report).savefig(path)
    except OSError as error:
        raise P2PDistError(f"{path} could not be written: {error.strerror}", remedy="Name another file") from error


def picture(report: Report) -> Figure:
    """The curve, the bound as a vertical line, and the times at which so many of the complete were
    complete as MARKS says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends, wanted = report.completions, max(1, report.wanted)
    last = max(report.bound_s, report.makespan_s) * 1.05 or 1.0
    shares = [number / wanted for number in range(len(ends) + 1)]
    axes.plot([0.0, *ends, last], [*shares, shares[-1]], drawstyle="steps-post", label="hosts complete")
    axes.axvline(report.bound_s, color="grey", linestyle="--", label=f"bound {report.bound_s:.3f} s")
    for share in MARKS:
        if ends:
            time = percentile(ends, share)
            label = f"p{share * 100:g} {time:.3f} s"
            axes.plot([time], [share * len(ends) / wanted], marker="o", linestyle="none", label=label)
    axes.set(xlabel="seconds", ylabel="share of hosts complete", xlim=(0, last), ylim=(0, 1.03))
    axes.set_title(
        f"{report.hosts} hosts, {report.size / 1e9:g} GB, {report.ratio:.3f} x the bound (seed {report.seed})"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center left")
    return figure


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one run.

    Times are in seconds since a host's own start, except the makespan and the `completions`, which
    count from the start of the run. `bound_s` is what no distribution to those that were not lost
    can beat, `healthy_bound_s` to those that neither crash nor are slow (bound.py). The percentiles
    `healthy_*` are of these hosts; `own_ratio_max` is the worst of their own times over what it
    needs at least. `rack_rx_ratio_*` are the bytes that came into a rack from outside over the
    blob's size F, 0 without racks; `zone_origin_ratios` what the origin sent into each zone over F.
    `wanted` is how many pulls there were, a host and a blob each. `duplicates` are pieces received
    by a host that held them; `duplicate_ratio` is all bytes that came for nothing over those that
    were taken. `moved` are pulls that left a way for the other, `swarm_ratio` the share of what was
    taken that came by BitTorrent. `fingerprint` differs when anything that a host or the origin did
    differs."""

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
    healthy: int
    healthy_bound_s: float
    healthy_p50_s: float
    healthy_p99_s: float
    healthy_p999_s: float
    own_ratio_max: float
    origin_ratio: float
    host_sent_ratio_mean: float
    host_sent_ratio_max: float
    rack_rx_ratio_max: float
    rack_rx_ratio_mean: float
    zone_origin_ratios: dict[str, float]
    wanted: int
    complete: int
    failed: int
    lost: int
    duplicates: int
    duplicate_ratio: float
    rejected: int
    moved: int
    swarm_ratio: float
    reports: int
    events: int
    fingerprint: str
    completions: tuple[float, ...]

    def curve(self) -> list[float | None]:
        """When 1 %, 2 %, to 100 % of the pulls were complete, in seconds from the start of the run;
        None for what was not reached."""
        needed = [ceil(percent * self.wanted / 100) for percent in range(1, 101)]
        return [self.completions[each - 1] if each <= len(self.completions) else None for each in needed]

    @classmethod
    def of(cls, simulation: Simulation) -> Report:
        """Take the figures of a simulation that has run."""
        scenario = simulation.scenario
        pulls = [(host, pull) for host in simulation.hosts.values() for pull in host.pulls.values()]
        wanted = scenario.size * scenario.blobs
        blob = simulation.blobs[0]
        sent = [host.sent_bytes / wanted for host in simulation.hosts.values()]
        imported = [rack.bytes_in / wanted for rack in simulation.racks]
        zones = sorted((zone, count) for zone, count in simulation.origin.bytes_by_zone.items() if zone)
        delivered = sum(pull.bytes_origin + pull.bytes_peers for _, pull in pulls)
        again = sum(pull.bytes_again for _, pull in pulls)
        return cls(
            hosts=scenario.hosts,
            size=wanted,
            pieces=blob.layout.count,
            piece_size=blob.layout.piece_size,
            stripes=blob.stripes,
            seed=scenario.seed,
            **_times(simulation),
            origin_ratio=simulation.origin.bytes_sent / wanted,
            host_sent_ratio_mean=sum(sent) / len(sent),
            host_sent_ratio_max=max(sent),
            rack_rx_ratio_max=max(imported, default=0.0),
            rack_rx_ratio_mean=sum(imported) / len(imported) if imported else 0.0,
            zone_origin_ratios={zone: count / wanted for zone, count in zones},
            wanted=len(pulls),
            complete=sum(1 for _, pull in pulls if pull.completed_at is not None),
            failed=sum(1 for _, pull in pulls if pull.error is not None),
            lost=len(simulation.lost),
            duplicates=sum(pull.duplicates for _, pull in pulls),
            duplicate_ratio=again / max(1, delivered),
            rejected=sum(pull.rejected for _, pull in pulls),
            moved=sum(pull.moves > 0 for _, pull in pulls),
            swarm_ratio=sum(pull.bytes_swarm for _, pull in pulls) / max(1, delivered),
            reports=simulation.tracker.messages,
            events=simulation.world.events,
            fingerprint=_fingerprint(simulation),
        )


class _Times(TypedDict):
    """Those figures of a report that are times or follow from them."""

    makespan_s: float
    bound_s: float
    ratio: float
    p50_s: float
    p99_s: float
    p999_s: float
    healthy: int
    healthy_bound_s: float
    healthy_p50_s: float
    healthy_p99_s: float
    healthy_p999_s: float
    own_ratio_max: float
    completions: tuple[float, ...]


def _times(simulation: Simulation) -> _Times:
    scenario, parties = simulation.scenario, simulation.parties
    ill = {fault.host for fault in scenario.faults if isinstance(fault, Crash | Leave | Slow)}
    alone = own_bounds(scenario.size * scenario.blobs, parties, scenario.origin_bytes_s, scenario.rack_bytes_s)
    ends, times, healthy, ratios = [], [], [], []
    for host, least_s in zip(simulation.hosts.values(), alone, strict=True):
        for pull in host.pulls.values():
            if pull.completed_at is None or pull.joined_at is None:
                continue
            own_s = pull.completed_at - pull.joined_at
            ends.append(pull.completed_at)
            times.append(own_s)
            if host.name not in ill:
                healthy.append(own_s)
                ratios.append(own_s / least_s)
    ends.sort()
    times.sort()
    healthy.sort()
    bound_s = _bound_without(simulation, [name for name, host in simulation.hosts.items() if _lost(simulation, host)])
    return _Times(
        makespan_s=ends[-1] if ends else 0.0,
        bound_s=bound_s,
        ratio=ends[-1] / bound_s if ends and bound_s else 0.0,
        p50_s=percentile(times, 0.5),
        p99_s=percentile(times, 0.99),
        p999_s=percentile(times, 0.999),
        healthy=scenario.hosts - len(ill),
        healthy_bound_s=_bound_without(simulation, ill),
        healthy_p50_s=percentile(healthy, 0.5),
        healthy_p99_s=percentile(healthy, 0.99),
        healthy_p999_s=percentile(healthy, 0.999),
        own_ratio_max=max(ratios, default=0.0),
        completions=tuple(ends),
    )


def _bound_without(simulation: Simulation, names: Container[str]) -> float:
    hosts = zip(simulation.hosts, simulation.parties, strict=True)
    return simulation.scenario.bound_s([party._replace(counts=name not in names) for name, party in hosts])


def _lost(simulation: Simulation, host: Host) -> bool:
    """Whether a host was lost before it had everything."""
    return host.name in simulation.lost and any(pull.completed_at is None for pull in host.pulls.values())


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not pass (nearest rank); 0 without
    values."""
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
