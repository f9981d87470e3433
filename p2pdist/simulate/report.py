"""What a simulation comes to: its figures (makespan against the bound, percentiles, bytes), and a
picture of the share of hosts that are complete over time."""

from __future__ import annotations

import importlib.util
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from heapq import nlargest
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.pieces import PieceLayout
from p2pdist.simulate.faults import Crash, Leave, Slow
from p2pdist.simulate.host import Host
from p2pdist.simulate.network import Rack
from p2pdist.simulate.origin import Origin
from p2pdist.simulate.scenario import Scenario, own_bounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = (0.5, 0.99, 0.999)
LATE_HOSTS = 10
FORMATS = frozenset([".png", ".svg", ".pdf"])


def check_plot(path: Path) -> None:
    """Check, before a run that may take hours, that a picture of it can be written. Raises
    UsageError for a path that cannot be one, P2PDistError without matplotlib."""
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
    """Write the picture of a run into a file that check_plot has accepted. Raises P2PDistError when
    the file cannot be written."""
    try:
        picture(report).savefig(path)
    except OSError as error:
        raise P2PDistError(f"{path} could not be written: {error.strerror}", remedy="Name another file") from error


def picture(report: Report) -> Figure:
    """The share of pulls that are complete over time, the bound as a vertical line, and a mark at
    each share in MARKS of the pulls that completed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends, pulls = report.completions, max(1, report.wanted)
    last = max(report.bound_s, report.makespan_s) * 1.05 or 1.0
    shares = [number / pulls for number in range(len(ends) + 1)]
    axes.plot([0.0, *ends, last], [*shares, shares[-1]], drawstyle="steps-post", label="hosts complete")
    axes.axvline(report.bound_s, color="grey", linestyle="--", label=f"bound {report.bound_s:.3f} s")
    for share in MARKS:
        if ends:
            time = percentile(ends, share)
            label = f"p{share * 100:g} {time:.3f} s"
            axes.plot([time], [share * len(ends) / pulls], marker="o", linestyle="none", label=label)
    axes.set(xlabel="seconds", ylabel="share of hosts complete", xlim=(0, last), ylim=(0, 1.03))
    axes.set_title(
        f"{report.hosts} hosts, {report.size / 1e9:g} GB, {report.ratio:.3f} x the bound (seed {report.seed})"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center left")
    return figure


@dataclass(frozen=True, slots=True)
class LateHost:
    """A host that completed among the last, and how far below the origin it was in the end."""

    host: str
    #: The name of its site, "" without sites.
    site: str
    #: When its pull completed, in seconds from the start of the run.
    completed_s: float
    #: Of each stripe, how many edges lead to it from the host that reads the origin, by the parents
    #: that hosts had last.
    levels: tuple[int, ...]
    #: How many of these edges cross the WAN.
    crossings: tuple[int, ...]
    #: How many streams it opened; one for each stripe where nothing happened.
    streams: int


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one run. A pull is one blob at one host; times are in seconds."""

    hosts: int
    #: Bytes of all blobs.
    size: int
    #: Of each blob.
    pieces: int
    piece_size: int
    stripes: int
    seed: int
    #: When the last pull completed, from the start of the run.
    makespan_s: float
    #: What no distribution to the hosts that were not lost can beat (bound.py), and how many times
    #: that the makespan is.
    bound_s: float
    ratio: float
    #: Percentiles of the pulls' times, each from its host's start.
    p50_s: float
    p99_s: float
    p999_s: float
    #: The hosts that neither crash nor leave nor are slow, with their own bound and percentiles.
    healthy: int
    healthy_bound_s: float
    healthy_p50_s: float
    healthy_p99_s: float
    healthy_p999_s: float
    #: The worst of their times over what the host would need alone.
    own_ratio_max: float
    #: What the origin and each host sent, over the size.
    origin_ratio: float
    host_sent_ratio_mean: float
    host_sent_ratio_max: float
    #: What came into a rack from outside, over the size; 0 without racks.
    rack_rx_ratio_max: float
    rack_rx_ratio_mean: float
    #: What the origin sent into each site or zone, over the size.
    zone_origin_ratios: dict[str, float]
    #: How many pulls there were, completed and gave up; and how many hosts were lost.
    wanted: int
    complete: int
    failed: int
    lost: int
    #: Pieces that a host received and held already.
    duplicates: int
    #: Bytes that came for nothing over the bytes that were taken.
    duplicate_ratio: float
    #: Pieces with wrong bytes.
    rejected: int
    #: Pulls that left one transport for another, and the share of the bytes taken that came by
    #: BitTorrent.
    moved: int
    swarm_ratio: float
    #: Messages that the tracker handled, and events of the clock.
    reports: int
    events: int
    #: Differs when anything that a host or the origin did differs.
    fingerprint: str
    #: When each pull completed, from the start of the run, in order.
    completions: tuple[float, ...]
    #: Of vouched piece lists, the rounds beyond the first, and the hosts that were blamed.
    rounds: int = 0
    blamed: tuple[str, ...] = ()
    #: The hosts of which the trackers told people that they have a slow uplink.
    slow_uplinks: tuple[str, ...] = ()
    #: What came into each site over the WAN, over the size; none without sites.
    site_rx_ratios: tuple[float, ...] = ()
    #: The LATE_HOSTS that completed last, the last one first.
    late: tuple[LateHost, ...] = ()

    def curve(self) -> list[float | None]:
        """When 1 %, 2 %, to 100 % of the pulls were complete, in seconds from the start of the run;
        None for a share that was not reached."""
        counts = [ceil(percent * self.wanted / 100) for percent in range(1, 101)]
        return [self.completions[count - 1] if count <= len(self.completions) else None for count in counts]

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
        were lost, the messages that the tracker handled, and the clock's events."""
        size, layout = scenario.size * scenario.blobs, PieceLayout(scenario.size, scenario.piece_size)
        pulls = [pull for host in hosts.values() for pull in host.pulls.values()]
        delivered = max(1, sum(pull.bytes_origin + pull.bytes_peers for pull in pulls))
        sent = [host.server.sent_bytes / size for host in hosts.values()]
        imported = [each.bytes_in / size for each in racks] or [0.0]
        times = _Times.of(scenario, hosts, disturbed := _disturbed(scenario))
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
            rack_rx_ratio_max=max(imported),
            rack_rx_ratio_mean=mean(imported),
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
            late=_late_hosts(scenario, hosts),
        )


class _Times(NamedTuple):
    """Of the pulls that are complete, sorted: when each ended and how long it took from its host's
    start, in seconds; of healthy hosts alone how long, and that over the host's own bound."""

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


def _late_hosts(scenario: Scenario, hosts: Mapping[str, Host]) -> tuple[LateHost, ...]:
    ends = [
        (pull.completed_at, host.name, digest)
        for host in hosts.values()
        for digest, pull in host.pulls.items()
        if pull.completed_at is not None
    ]
    sites = {name: scenario.site_of(number) for number, name in enumerate(hosts)}
    late = []
    for completed_s, name, digest in nlargest(LATE_HOSTS, ends):
        pull = hosts[name].pulls[digest]
        paths = [_path(hosts, digest, stripe, name) for stripe in range(pull.blob.stripes)]
        crossings = (sum(sites[one] != sites[other] for one, other in pairwise(path)) for path in paths)
        site = f"s{sites[name]}" if scenario.sites else ""
        levels = tuple(len(path) - 1 for path in paths)
        late.append(LateHost(name, site, completed_s, levels, tuple(crossings), pull.streams))
    return tuple(late)


def _path(hosts: Mapping[str, Host], digest: Digest, stripe: int, name: str) -> list[str]:
    """The hosts by which a stripe came to a host, itself first, by the parents that they had
    last."""
    path = [name]
    while (source := hosts[path[-1]].pulls[digest].sources[stripe]) and source not in path:
        path.append(source)
    return path


def _bound_without(scenario: Scenario, names: Container[str]) -> float:
    return scenario.bound_s(scenario.parties(without=names))


def _disturbed(scenario: Scenario) -> set[str]:
    return {fault.host for fault in scenario.faults if isinstance(fault, Crash | Leave | Slow)}


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
