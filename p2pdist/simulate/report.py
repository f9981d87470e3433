"""What a simulation comes to: its figures (makespan against the bound, percentiles, bytes), and a
picture of the share of hosts that are complete over time."""

from __future__ import annotations

import importlib.util
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.pieces import PieceLayout
from p2pdist.simulate.bound import own_bounds
from p2pdist.simulate.faults import Crash, Leave, Slow
from p2pdist.simulate.host import Host
from p2pdist.simulate.network import Rack
from p2pdist.simulate.origin import Origin
from p2pdist.simulate.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    def of(
        cls,
        scenario: Scenario,
        hosts: Mapping[str, Host],
        racks: Sequence[Rack],
        origin: Origin,
        *,
        lost: Container[str],
        messages: int,
        events: int,
    ) -> Report:
        """The figures of a scenario (Scenario.filled) that was run: its hosts by name, those that
        were lost, the messages that the tracker got, and the events of the clock."""
        size, layout = scenario.size * scenario.blobs, PieceLayout(scenario.size, scenario.piece_size)
        pulls = [pull for host in hosts.values() for pull in host.pulls.values()]
        delivered = max(1, sum(pull.bytes_origin + pull.bytes_peers for pull in pulls))
        sent = [host.server.sent_bytes / size for host in hosts.values()]
        imported = [rack.bytes_in / size for rack in racks]
        disturbed = {fault.host for fault in scenario.faults if isinstance(fault, Crash | Leave | Slow)}
        times = _Times.of(scenario, hosts, disturbed)
        bound_s = _bound_without(scenario, [name for name, host in hosts.items() if name in lost and _lacks(host)])
        return cls(
            hosts=scenario.hosts,
            size=size,
            pieces=layout.count,
            piece_size=layout.piece_size,
            stripes=layout.stripes,
            seed=scenario.seed,
            makespan_s=max(times.ends, default=0.0),
            bound_s=bound_s,
            ratio=times.ends[-1] / bound_s if times.ends and bound_s else 0.0,
            p50_s=percentile(times.own, 0.5),
            p99_s=percentile(times.own, 0.99),
            p999_s=percentile(times.own, 0.999),
            healthy=scenario.hosts - len(disturbed),
            healthy_bound_s=_bound_without(scenario, disturbed),
            healthy_p50_s=percentile(times.healthy, 0.5),
            healthy_p99_s=percentile(times.healthy, 0.99),
            healthy_p999_s=percentile(times.healthy, 0.999),
            own_ratio_max=max(times.healthy_ratios, default=0.0),
            origin_ratio=origin.bytes_sent / size,
            host_sent_ratio_mean=sum(sent) / len(sent),
            host_sent_ratio_max=max(sent),
            rack_rx_ratio_max=max(imported, default=0.0),
            rack_rx_ratio_mean=sum(imported) / len(imported) if imported else 0.0,
            zone_origin_ratios={zone: count / size for zone, count in sorted(origin.bytes_by_zone.items()) if zone},
            wanted=len(pulls),
            complete=sum(pull.completed_at is not None for pull in pulls),
            failed=sum(pull.error is not None for pull in pulls),
            lost=sum(name in lost for name in hosts),
            duplicates=sum(pull.duplicates for pull in pulls),
            duplicate_ratio=sum(pull.bytes_again for pull in pulls) / delivered,
            rejected=sum(pull.rejected for pull in pulls),
            moved=sum(pull.moves > 0 for pull in pulls),
            swarm_ratio=sum(pull.bytes_swarm for pull in pulls) / delivered,
            reports=messages,
            events=events,
            fingerprint=_fingerprint(hosts, origin, events),
            completions=tuple(times.ends),
        )


class _Times(NamedTuple):
    """Times of the pulls that are complete, in seconds, sorted: when they ended, what each took from
    its host's start, the same of healthy hosts alone, and that over each host's own bound."""

    ends: list[float]
    own: list[float]
    healthy: list[float]
    healthy_ratios: list[float]

    @classmethod
    def of(cls, scenario: Scenario, hosts: Mapping[str, Host], disturbed: Container[str]) -> _Times:
        size, parties = scenario.size * scenario.blobs, scenario.parties()
        bounds = own_bounds(size, parties, scenario.origin_bytes_s, scenario.rack_bytes_s)
        times = cls([], [], [], [])
        for host, least_s in zip(hosts.values(), bounds, strict=True):
            for pull in host.pulls.values():
                if pull.completed_at is None or pull.joined_at is None:
                    continue
                own_s = pull.completed_at - pull.joined_at
                times.ends.append(pull.completed_at)
                times.own.append(own_s)
                if host.name not in disturbed:
                    times.healthy.append(own_s)
                    times.healthy_ratios.append(own_s / least_s)
        for column in times:
            column.sort()
        return times


def _bound_without(scenario: Scenario, names: Container[str]) -> float:
    return scenario.bound_s(scenario.parties(without=names))


def _lacks(host: Host) -> bool:
    return any(pull.completed_at is None for pull in host.pulls.values())


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not pass (nearest rank); 0 without
    values."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _fingerprint(hosts: Mapping[str, Host], origin: Origin, events: int) -> str:
    parts = [f"{events} {origin.bytes_sent}"]
    for host in hosts.values():
        for pull in host.pulls.values():
            parts.append(
                f"{host.name} {pull.completed_at!r} {pull.bytes_origin} {pull.bytes_peers} {pull.duplicates} "
                f"{type(pull.error).__name__} {host.server.sent_bytes}"
            )
    return sha256("\n".join(parts).encode()).hexdigest()[:16]
