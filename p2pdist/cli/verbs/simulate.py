"""`p2pdist simulate`: a broadcast to many hosts on a virtual clock, with the cores that decide for
real hosts."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from p2pdist.cli import output
from p2pdist.cli.options import OutputFile, parse_rate, parse_ratio, parse_share, parse_time
from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.units import parse_size

if TYPE_CHECKING:
    from p2pdist.simulate.faults import Fault
    from p2pdist.simulate.report import Report
    from p2pdist.simulate.scenario import Scenario
    from p2pdist.simulate.simulation import Progress
    from tracker.core.policy.budget import SiteBudget

HOSTS_MAX = 200_000
RUNS_MAX = 100_000
TRACKERS_MAX = 32
TRACKER_AWAY_S = 1.0
LATENCY_S_MAX, RTT_S_MAX = 0.2, 1.0
"""Over paths that take a few times as long hosts and trackers take each other for silent."""

FILE = OutputFile()
GARBAGE_THRESHOLD = 500_000
"""A run makes little garbage that counting references does not free, and looking for it among
millions of objects takes long."""


@click.command("simulate")
@click.option(
    "--hosts", default=200, show_default=True, type=click.IntRange(1, HOSTS_MAX), help="Hosts that want the blob."
)
@click.option("--size", default="1GB", show_default=True, metavar="SIZE", help="Size of the blob, such as 3GB or 4GiB.")
@click.option(
    "--nic",
    default="300MB/s",
    show_default=True,
    metavar="RATE[,RATE:SHARE]",
    help="Each host's uplink and downlink; other rates for a share of the hosts, such as 300MB/s,100MB/s:10%.",
)
@click.option("--origin-rate", default="", metavar="RATE", help="Uplink of central storage [default: twice --nic].")
@click.option("--racks", default=0, type=click.IntRange(0, HOSTS_MAX), help="So many racks, filled in blocks.")
@click.option(
    "--rack-rate", default="", metavar="RATE", help="Each rack's uplink and downlink, for what leaves or enters it."
)
@click.option(
    "--oversubscription", default="", metavar="N:1", help="The same as what the hosts of a rack have together over N."
)
@click.option(
    "--zones", default=0, type=click.IntRange(0, HOSTS_MAX), help="So many zones: racks, or hosts, in blocks."
)
@click.option(
    "--sites", default=0, type=click.IntRange(0, HOSTS_MAX), help="So many sites: zones, racks, or hosts, in blocks."
)
@click.option(
    "--wan-rate", default="", metavar="RATE", help="Each site's uplink and downlink to the other sites and the origin."
)
@click.option(
    "--rtt", default="", metavar="TIME", help="What a round trip between two sites, or to the origin, takes longer."
)
@click.option(
    "--origin-sites",
    default="",
    metavar="NAME[,NAME]",
    help="Only hosts at these sites read the origin, such as s0,s1.",
)
@click.option(
    "--wan-budget",
    default="",
    metavar="RATE",
    help="What may come over its WAN to each site that does not read the origin; the tracker keeps to it.",
)
@click.option("--wan-hourly", default="", metavar="SIZE", help="The same within any hour.")
@click.option("--latency", default="0.2ms", show_default=True, metavar="TIME", help="Each path, one way.")
@click.option(
    "--arrivals",
    default="burst",
    show_default=True,
    metavar="KIND[:SECONDS]",
    help="When hosts start: burst (all at once), or over so many seconds uniform, poisson, or ramp (ever more of them).",
)
@click.option(
    "--slow", default="", metavar="SHARE:FACTOR", help="Slow hosts: 5%:0.1 is a tenth of the uplink for 5 % of them."
)
@click.option("--slow-both", is_flag=True, help="Their downlinks are slow, too.")
@click.option("--slow-downlinks", is_flag=True, help="Only their downlinks are slow.")
@click.option(
    "--crash",
    default="0%",
    metavar="SHARE",
    help="That share of the hosts dies for good, at random times within the bound.",
)
@click.option(
    "--kill-tracker-every", default="", metavar="TIME", help="The tracker dies so often; another starts a second later."
)
@click.option(
    "--lose-tracker", default="", metavar="AT[:FOR]", help="The tracker is lost at a time, for so long or for good."
)
@click.option(
    "--trackers",
    default=1,
    show_default=True,
    type=click.IntRange(1, TRACKERS_MAX),
    help="So many trackers share the blobs. The owner of the blob is the one that dies or is lost.",
)
@click.option(
    "--kill-tracker",
    default="",
    metavar="AT[:FOR]",
    help="The same as --lose-tracker: the tracker, or the owner, dies.",
)
@click.option("--freeze-tracker", default="", metavar="AT:FOR", help="With --trackers: the owner stands still.")
@click.option(
    "--cut-tracker",
    default="",
    metavar="AT[:FOR]",
    help="With --trackers: the owner is cut off from the database and from half of the hosts.",
)
@click.option(
    "--lose-database", default="", metavar="AT[:FOR]", help="With --trackers: their database does not answer."
)
@click.option(
    "--roll-trackers", default="", metavar="AT", help="With --trackers: all are restarted, one after the other."
)
@click.option(
    "--cut-half",
    default="",
    metavar="AT[:FOR]",
    help="Half of the hosts are cut off from the others and the tracker, for so long or for good.",
)
@click.option(
    "--transport",
    default="trees",
    show_default=True,
    type=click.Choice(["trees", "swarm", "auto"]),
    help="How the blob comes: by trees, a BitTorrent swarm, or trees and a swarm where these fail.",
)
@click.option(
    "--vouched", is_flag=True, help="There is no piece list: the hosts that read the blob vouch for its pieces."
)
@click.option(
    "--faults",
    default="",
    metavar="KIND[,KIND]",
    help="Let things go wrong: crash, slow, partition, wrong, silent, tracker, origin, origin-wrong, late, busy, with"
    " --vouched also lie, change, stall, break, whole, with --trackers also owner, freeze, isolate, database, roll;"
    " or `any`.",
)
@click.option("--seed", default=1, show_default=True, help="The same seed gives the same run.")
@click.option(
    "--runs",
    default=1,
    show_default=True,
    type=click.IntRange(1, RUNS_MAX),
    help="So many runs, with the seeds that follow.",
)
@click.option(
    "--piece-size", default="", metavar="SIZE", help="Size of a piece [default: what the blob's size asks for]."
)
@click.option(
    "--plot", type=FILE, help="Draw the hosts complete over time, and the bound, into this picture (.png, .svg, .pdf)."
)
@click.option("--report", type=FILE, help="Write the JSON document into this file.")
@output.json_option
def command(seed: int, runs: int, plot: Path | None, report: Path | None, as_json: bool, **wishes: Any) -> None:
    """Simulate a broadcast from central storage to many hosts, and check the invariants after every
    event.

    The time that nothing can beat (the bound) is max(F/U_origin, F/min d, F/rack rate, N
    F/(U_origin + sum u)) for a blob of F bytes and N hosts. With several runs the figures are the
    ones of the slowest.

    \b
    Example:
      p2pdist simulate --hosts 2600 --size 3GB --nic 300MB/s --seed 1
      p2pdist simulate --hosts 640 --racks 16 --oversubscription 4:1 --slow 5%:0.1 --crash 1%
      p2pdist simulate --hosts 200 --arrivals ramp:30 --kill-tracker-every 5s --plot out.png
      p2pdist simulate --hosts 60 --size 6MiB --nic 1MB/s --faults any --runs 20
      p2pdist simulate --hosts 60 --size 6MiB --nic 1MB/s --lose-tracker 2s:60s --crash 10%
      p2pdist simulate --hosts 16 --size 128MiB --nic 40Mbit/s --vouched --faults lie
    """
    base = _scenario(wishes)
    if plot:
        from p2pdist.simulate.report import check_plot

        check_plot(plot)
    reports = []
    began = time.perf_counter()
    with _bars(quiet=as_json) as bars:
        for number in range(seed, seed + runs):
            scenario = replace(base, seed=number)
            reports.append(_run(replace(scenario, faults=_faults(scenario, wishes)), bars))
    worst = max(reports, key=lambda each: each.ratio)
    body = _json(worst, reports, time.perf_counter() - began)
    if report:
        _write(report, msgspec.json.encode(body) + b"\n")
    if plot:
        from p2pdist.simulate.report import draw

        draw(worst, plot)
    if as_json:
        output.print_json(body)
    else:
        _show(worst, runs, body["seconds"], base.origin_bytes_s)


def _scenario(wishes: dict[str, Any]) -> Scenario:
    """What to simulate, but for seed and faults."""
    from p2pdist.simulate.scenario import Scenario

    hosts, racks, zones, sites = wishes["hosts"], wishes["racks"], wishes["zones"], wishes["sites"]
    if max(racks, zones, sites) > hosts or (racks and max(zones, sites) > racks) or (zones and sites > zones):
        raise UsageError(
            "there are more racks, zones or sites than can be filled", remedy="Ask for fewer, or for more --hosts"
        )
    nic_bytes_s, other_nics = _nics(wishes["nic"])
    arrivals, arrivals_s = _arrivals(wishes["arrivals"])
    filled = Scenario(
        hosts,
        _size(wishes["size"]),
        nic_bytes_s,
        origin_bytes_s=parse_rate(wishes["origin_rate"]) if wishes["origin_rate"] else 0.0,
        racks=racks,
        rack_bytes_s=_rack_rate(wishes, nic_bytes_s),
        zones=zones,
        other_nics=other_nics,
        arrivals=arrivals,
        arrivals_s=arrivals_s,
        latency_s=_path_time(wishes["latency"], "latency", LATENCY_S_MAX),
        piece_size=_piece_size(wishes["piece_size"]),
        transport=wishes["transport"],
        vouched=wishes["vouched"],
        trackers=wishes["trackers"],
        sites=sites,
        wan_bytes_s=parse_rate(wishes["wan_rate"]) if wishes["wan_rate"] else 0.0,
        wan_s=_path_time(wishes["rtt"], "rtt", RTT_S_MAX) / 2 if wishes["rtt"] else 0.0,
        origin_sites=_origin_sites(wishes["origin_sites"], sites),
        budgets=_budgets(wishes["wan_budget"], wishes["wan_hourly"], wishes["origin_sites"], sites),
    ).filled()
    if filled.trackers > 1 and filled.transport != "trees":
        raise UsageError(
            "several trackers are simulated where the blob comes by trees", remedy="Leave out --transport or --trackers"
        )
    if wishes["vouched"]:
        _check_vouched(filled)
    return replace(filled, time_limit_s=0.0)  # it depends on the faults


def _path_time(text: str, option: str, most_s: float) -> float:
    seconds = parse_time(text)
    if seconds > most_s:
        raise UsageError(
            f"--{option} {text} is over the limit of {most_s:g}s",
            remedy="Give less: hosts and trackers take each other for silent over longer paths",
        )
    return seconds


def _budgets(rate: str, hourly: str, origin_sites: str, sites: int) -> tuple[SiteBudget, ...]:
    """The budgets of the sites that import."""
    if not rate and not hourly:
        return ()
    names = _origin_sites(origin_sites, sites)
    if not names:
        raise UsageError("no site imports: each reads the origin", remedy="Say which read it: --origin-sites s0")
    from tracker.core.policy.budget import SiteBudget

    limits = parse_rate(rate) if rate else None, _size(hourly) if hourly else None
    return tuple(SiteBudget(name, *limits) for name in (f"s{number}" for number in range(sites)) if name not in names)


def _origin_sites(text: str, sites: int) -> frozenset[str]:
    """The names of the sites that may read the origin."""
    names = frozenset(filter(None, text.split(",")))
    unknown = sorted(names - {f"s{number}" for number in range(sites)})
    if unknown:
        raise UsageError(f"there is no site {unknown[0]!r}", remedy="With --sites 8 they are s0 to s7")
    return names


def _check_vouched(scenario: Scenario) -> None:
    """Raises UsageError for what a vouched list cannot be of."""
    from p2pdist.model.vouched_list import vouched_layout

    if scenario.piece_size != vouched_layout(scenario.size).piece_size:
        raise UsageError(
            "a vouched list has the pieces that the size asks for", remedy="Leave out --piece-size or --vouched"
        )
    if scenario.transport != "trees":
        raise UsageError("a blob with a vouched list comes by trees alone", remedy="Leave out --transport")


def _faults(scenario: Scenario, wishes: dict[str, Any]) -> tuple[Fault, ...]:
    """What goes wrong in a scenario with this seed."""
    from p2pdist.simulate.faults import CLUSTER_KINDS, KINDS, VOUCHED_KINDS, TrackerLoss, TrackerLosses, schedule
    from p2pdist.simulate.scenario import crash_share, cut_half, slow_share

    drawn: list[Fault] = []
    if wishes["faults"]:
        kinds = tuple(kind for kind in wishes["faults"].split(",") if kind and kind != "any")
        known = (*KINDS, *VOUCHED_KINDS) if scenario.vouched else KINDS
        known = (*known, *CLUSTER_KINDS) if scenario.trackers > 1 else known
        unknown = [kind for kind in kinds if kind not in known]
        if unknown:
            raise UsageError(f"there is no fault {unknown[0]!r}", remedy=f"Choose among {', '.join(known)}, any")
        pieces, duration_s = -(-scenario.size // scenario.piece_size), scenario.size / scenario.nic_bytes_s
        drawn += schedule(
            scenario.seed,
            scenario.host_names(),
            pieces=pieces,
            duration_s=duration_s,
            kinds=kinds,
            trackers=scenario.trackers,
        )
    if wishes["slow"]:
        share, _, factor = wishes["slow"].partition(":")
        if not factor or not parse_share(factor):
            raise UsageError("a slow host needs some rate", remedy="Write a share and a factor, such as 5%:0.1")
        up = not wishes["slow_downlinks"]
        drawn += slow_share(scenario, parse_share(share), parse_share(factor), both=wishes["slow_both"], up=up)
    elif wishes["slow_both"] or wishes["slow_downlinks"]:
        option = "--slow-both" if wishes["slow_both"] else "--slow-downlinks"
        raise UsageError(f"{option} says more about --slow", remedy="Say how many hosts are slow: --slow 5%:0.1")
    drawn += crash_share(replace(scenario, faults=tuple(drawn)), parse_share(wishes["crash"]))
    if wishes["kill_tracker_every"]:
        every_s = parse_time(wishes["kill_tracker_every"])
        if every_s <= 0:
            raise UsageError("the tracker cannot die all the time", remedy="Give it some seconds, such as 5s")
        drawn.append(TrackerLosses(every_s, min(TRACKER_AWAY_S, every_s / 2)))
    drawn += [TrackerLoss(*_span(wishes[option])) for option in ("lose_tracker", "kill_tracker") if wishes[option]]
    drawn += _among_trackers(scenario, wishes)
    if wishes["cut_half"]:
        drawn.append(cut_half(scenario, *_span(wishes["cut_half"])))
    return tuple(drawn)


def _among_trackers(scenario: Scenario, wishes: dict[str, Any]) -> Iterator[Fault]:
    """What goes wrong with one of several trackers, or with what they share."""
    from p2pdist.simulate.faults import DatabaseLoss, RollingRestart, TrackerCut, TrackerFreeze
    from p2pdist.simulate.scenario import cut_half

    options = ("freeze_tracker", "cut_tracker", "lose_database", "roll_trackers")
    if scenario.trackers == 1 and any(wishes[option] for option in options):
        option = next(option for option in options if wishes[option]).replace("_", "-")
        raise UsageError(f"--{option} is about one of several trackers", remedy="Say how many with --trackers")
    if wishes["freeze_tracker"]:
        at_s, for_s = _span(wishes["freeze_tracker"])
        if for_s is None:
            raise UsageError(
                "a tracker is frozen for some time", remedy="Write --freeze-tracker AT:FOR, such as 2s:10s"
            )
        yield TrackerFreeze(at_s, for_s)
    if wishes["cut_tracker"]:
        at_s, for_s = _span(wishes["cut_tracker"])
        yield TrackerCut(at_s, for_s, cut_half(scenario, 0.0, None).cut.group)
    if wishes["lose_database"]:
        yield DatabaseLoss(*_span(wishes["lose_database"]))
    if wishes["roll_trackers"]:
        yield RollingRestart(parse_time(wishes["roll_trackers"]))


def _span(text: str) -> tuple[float, float | None]:
    """From when on, and for how long; None for good."""
    at, _, length = text.partition(":")
    return parse_time(at), parse_time(length) if length else None


def _run(scenario: Scenario, progress: Progress | None) -> Report:
    from p2pdist.simulate.invariants import GaveUp, InvariantBroken
    from p2pdist.simulate.simulation import Simulation

    usual = gc.get_threshold()
    gc.set_threshold(GARBAGE_THRESHOLD, *usual[1:])
    try:
        return Simulation(scenario).run(progress)
    except InvariantBroken as error:
        if isinstance(error, GaveUp) and _outlasts_pulls(scenario):
            raise P2PDistError(
                f"{error.host} gave up (seed {scenario.seed}): {error.failure.what}",
                remedy="Pulls give up in an outage that lasts: say when it ends, such as --lose-tracker 2s:60s",
            ) from error
        raise P2PDistError(
            f"an invariant does not hold: {error}", remedy="This is a defect; the seed shows it again"
        ) from error
    finally:
        gc.set_threshold(*usual)


def _outlasts_pulls(scenario: Scenario) -> bool:
    """Whether hosts may be without any tracker for about as long as a pull waits, or longer: they
    try to connect to one that is back after pauses that grow."""
    from p2pdist.simulate.faults import Partition, TrackerLoss

    for fault in scenario.faults:
        match fault:
            case TrackerLoss(_, length_s, _) if scenario.trackers == 1:
                pass
            case Partition(cut, _, length_s) if cut.tracker:
                pass
            case _:
                continue
        if length_s is None or length_s > scenario.patience_s / 2:
            return True
    return False


def _json(worst: Report, reports: list[Report], seconds: float) -> dict[str, Any]:
    body = {**_fields(worst), "curve_s": worst.curve(), "runs": len(reports), "seconds": round(seconds, 3)}
    if len(reports) > 1:
        body["each"] = [_fields(each) for each in reports]
    return body


def _fields(report: Report) -> dict[str, Any]:
    fields = asdict(report)
    del fields["completions"]
    return fields


def _show(worst: Report, runs: int, seconds: float, origin_bytes_s: float) -> None:
    which = f" (the slowest of {runs} runs, seed {worst.seed})" if runs > 1 else f" (seed {worst.seed})"
    lines = [
        ("hosts", f"{worst.hosts}: {worst.complete} complete, {worst.failed} failed, {worst.lost} lost{which}"),
        ("blob", f"{output.amount(worst.size)} in {worst.pieces} pieces of {output.amount(worst.piece_size)}, {worst.stripes} stripes"),
        ("bound", f"{worst.bound_s:.3f} s, with an origin of {output.amount(origin_bytes_s)}/s"),
        ("makespan", f"{worst.makespan_s:.3f} s, {worst.ratio:.3f} x the bound"),
        ("host done", f"p50 {worst.p50_s:.3f} s, p99 {worst.p99_s:.3f} s, p99.9 {worst.p999_s:.3f} s"),
        *_healthy(worst),
        *_late(worst),
        ("own time", f"{worst.own_ratio_max:.3f} x what a host alone would need, at worst"),
        ("origin sent", f"{worst.origin_ratio:.3f} x the blob"),
        ("host sent", f"{worst.host_sent_ratio_mean:.3f} x the blob on average, {worst.host_sent_ratio_max:.3f} x at most"),
        *_places(worst),
        ("received twice", f"{worst.duplicates} pieces; {worst.rejected} corrupt; {worst.duplicate_ratio:.2%} of all bytes in vain"),
        *_ways(worst),
        *_lists(worst),
        *_slow(worst),
        ("simulated in", f"{seconds:.1f} s, {worst.events} events{' in that run' if runs > 1 else ''}"),
    ]  # fmt: skip
    for name, value in lines:
        click.echo(f"{name:<15} {value}")


def _late(report: Report) -> list[tuple[str, str]]:
    """The last host, and why it was the last: how deep it is in its trees, and what happened to
    it."""
    if not report.late:
        return []
    last = report.late[0]
    levels = " and ".join(map(str, last.levels))
    where = f"{last.host}{f' at {last.site}' if last.site else ''}"
    return [("last host", f"{where}: {levels} hosts below the origin's readers, by {last.streams} streams")]


def _healthy(report: Report) -> list[tuple[str, str]]:
    if report.healthy == report.hosts:
        return []
    times = f"p50 {report.healthy_p50_s:.3f} s, p99 {report.healthy_p99_s:.3f} s, p99.9 {report.healthy_p999_s:.3f} s"
    return [("healthy hosts", f"{report.healthy}: {times}, bound {report.healthy_bound_s:.3f} s")]


def _places(report: Report) -> list[tuple[str, str]]:
    lines = []
    if report.rack_rx_ratio_max:
        mean, most = report.rack_rx_ratio_mean, report.rack_rx_ratio_max
        lines.append(("rack received", f"{mean:.3f} x the blob on average, {most:.3f} x at most"))
    if entered := report.site_rx_ratios:
        mean, most = sum(entered) / len(entered), max(entered)
        lines.append(("site received", f"{mean:.3f} x the blob on average, {most:.3f} x at most, over the WAN"))
    if report.zone_origin_ratios:
        shares = ", ".join(f"{zone} {ratio:.3f}" for zone, ratio in report.zone_origin_ratios.items())
        lines.append(("origin to zones", f"{shares} x the blob"))
    return lines


def _ways(report: Report) -> list[tuple[str, str]]:
    if not report.moved and not report.swarm_ratio:
        return []
    return [("by BitTorrent", f"{report.swarm_ratio:.1%} of all bytes; {report.moved} pulls changed their way")]


def _lists(report: Report) -> list[tuple[str, str]]:
    if not report.rounds and not report.blamed:
        return []
    return [("vouched list", f"{report.rounds + 1} rounds; blamed: {', '.join(report.blamed) or 'no host'}")]


def _slow(report: Report) -> list[tuple[str, str]]:
    """What an operator would have been told."""
    return [("slow uplinks", f"told of {', '.join(report.slow_uplinks)}")] if report.slow_uplinks else []


def _write(path: Path, body: bytes) -> None:
    try:
        path.write_bytes(body)
    except OSError as error:
        raise P2PDistError(f"{path} could not be written: {error.strerror}", remedy="Name another file") from error


@contextmanager
def _bars(*, quiet: bool) -> Iterator[Progress | None]:
    """Shows how many pieces have been delivered: a bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("pieces delivered"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("")
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _size(text: str) -> int:
    size = parse_size(text)
    if size < 1:
        raise UsageError(f"{text!r} is no size to send", remedy="Write a number and a unit, such as 3GB")
    return size


def _piece_size(text: str) -> int:
    from p2pdist.model.pieces import PIECE_SIZE_MAX, PIECE_SIZE_MIN

    size = parse_size(text) if text else 0
    if size and (size & (size - 1) or not PIECE_SIZE_MIN <= size <= PIECE_SIZE_MAX):
        raise UsageError(f"{text!r} is not a piece size", remedy="It is a power of two from 64KiB to 16MiB")
    return size


def _nics(text: str) -> tuple[float, tuple[tuple[float, float], ...]]:
    """The rate of most hosts, and the others with their shares."""
    usual, *others = text.split(",")
    parted = [other.partition(":") for other in others]
    if any(not share for _, _, share in parted):
        raise UsageError(
            f"{text!r} does not say how many hosts have the other rate", remedy="Write 300MB/s,100MB/s:10%"
        )
    return parse_rate(usual), tuple((parse_rate(rate), parse_share(share)) for rate, _, share in parted)


def _arrivals(text: str) -> tuple[str, float]:
    from p2pdist.simulate.scenario import KINDS

    kind, _, span = text.strip().partition(":")
    if kind not in KINDS or bool(span) == (kind == "burst"):
        raise UsageError(
            f"{text!r} does not say when hosts start",
            remedy="Write burst, or uniform, poisson or ramp with seconds: ramp:30",
        )
    return kind, parse_time(span, bare=True) if span else 0.0


def _rack_rate(wishes: dict[str, Any], nic_bytes_s: float) -> float:
    """Bytes per second that may cross a rack's boundary each way; 0 for no limit."""
    rate, oversubscription = wishes["rack_rate"], wishes["oversubscription"]
    if not rate and not oversubscription:
        return 0.0
    if not wishes["racks"]:
        raise UsageError("a limit on what leaves a rack needs racks", remedy="Say how many with --racks")
    if rate and oversubscription:
        raise UsageError("--rack-rate and --oversubscription say the same thing", remedy="Give one of them")
    if rate:
        return parse_rate(rate)
    return float(-(-wishes["hosts"] // wishes["racks"]) * nic_bytes_s / parse_ratio(oversubscription))
