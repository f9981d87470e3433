"""`p2pdist simulate`: a broadcast to many hosts on a virtual clock, with the cores that decide for real hosts."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from p2pdist.cli import output
from p2pdist.cli.sizes import parse_size
from p2pdist.model.errors import P2PDistError, UsageError

if TYPE_CHECKING:
    from p2pdist.simulate.report import Report
    from p2pdist.simulate.simulation import Progress, Scenario

HOSTS_MAX = 200_000
RUNS_MAX = 100_000


@click.command("simulate")
@click.option(
    "--hosts", default=200, show_default=True, type=click.IntRange(1, HOSTS_MAX), help="Hosts that want the blob."
)
@click.option("--size", default="1GB", show_default=True, metavar="SIZE", help="Size of the blob, such as 3GB or 4GiB.")
@click.option("--nic", default="300MB/s", show_default=True, metavar="RATE", help="Each host's uplink and downlink.")
@click.option("--origin-rate", default="", metavar="RATE", help="Uplink of central storage [default: twice --nic].")
@click.option("--racks", default=0, type=click.IntRange(0, HOSTS_MAX), help="So many racks, filled in blocks.")
@click.option(
    "--rack-rate", default="", metavar="RATE", help="Each rack's uplink and downlink for what crosses its boundary."
)
@click.option("--oversubscription", default="", metavar="N:1", help="The same as the hosts' rates together over N.")
@click.option("--zones", default=0, type=click.IntRange(0, HOSTS_MAX), help="So many zones: racks or hosts in blocks.")
@click.option("--latency", default="0.2ms", show_default=True, metavar="TIME", help="Each path, one way.")
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
    "--faults",
    default="",
    metavar="KIND[,KIND]",
    help="Let things go wrong: crash, slow, partition, wrong, silent, tracker, origin, origin-wrong, late; or `any`.",
)
@output.json_option
def command(
    hosts: int,
    size: str,
    nic: str,
    origin_rate: str,
    racks: int,
    rack_rate: str,
    oversubscription: str,
    zones: int,
    latency: str,
    seed: int,
    runs: int,
    piece_size: str,
    faults: str,
    as_json: bool,
) -> None:
    """Simulate a broadcast from central storage to many hosts, and check the invariants after every event.

    The time that nothing can beat (the bound) is max(F/U_origin, F/d, N F/(U_origin + N u)) for a blob of F bytes and N hosts. With several
    runs the figures are those of the slowest.

    \b
    Example:
      p2pdist simulate --hosts 2600 --size 3GB --nic 300MB/s --seed 1
      p2pdist simulate --hosts 60 --size 6MiB --nic 1MB/s --faults any --runs 20
    """
    from p2pdist.simulate.faults import KINDS, schedule
    from p2pdist.simulate.simulation import Scenario

    base = Scenario(
        hosts,
        _size(size),
        _rate(nic),
        seed=seed,
        origin_bytes_s=_rate(origin_rate) if origin_rate else 0.0,
        racks=racks,
        rack_bytes_s=_rack_rate(rack_rate, oversubscription, hosts, racks, _rate(nic)),
        zones=zones,
        latency_s=_time(latency),
        piece_size=_piece_size(piece_size),
    ).filled()
    kinds = tuple(kind for kind in faults.split(",") if kind and kind != "any")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise UsageError(f"there is no fault {unknown[0]!r}", remedy=f"Choose among {', '.join(KINDS)}, any")
    reports = []
    began = time.perf_counter()
    with _bars(quiet=as_json) as bars:
        for number in range(seed, seed + runs):
            scenario = replace(base, seed=number)
            if faults:
                pieces = -(-base.size // base.piece_size)
                names = scenario.host_names()
                drawn = schedule(number, names, pieces=pieces, duration_s=base.size / base.nic_bytes_s, kinds=kinds)
                scenario = replace(scenario, faults=drawn)
            reports.append(_run(scenario, bars))
    _show(reports, time.perf_counter() - began, base.origin_bytes_s, as_json=as_json)


def _run(scenario: Scenario, progress: Progress | None) -> Report:
    from p2pdist.simulate.invariants import InvariantBroken
    from p2pdist.simulate.simulation import Simulation

    try:
        return Simulation(scenario).run(progress)
    except InvariantBroken as error:
        raise P2PDistError(
            f"an invariant does not hold: {error}", remedy="This is a defect; the seed shows it again"
        ) from error


def _show(reports: list[Report], seconds: float, origin_bytes_s: float, *, as_json: bool) -> None:
    worst = max(reports, key=lambda report: report.ratio)
    if as_json:
        body: dict[str, Any] = {**asdict(worst), "runs": len(reports), "seconds": round(seconds, 3)}
        if len(reports) > 1:
            body["each"] = [asdict(report) for report in reports]
        output.print_json(body)
        return
    runs = f" (the slowest of {len(reports)} runs, seed {worst.seed})" if len(reports) > 1 else f" (seed {worst.seed})"
    lines = [
        ("hosts", f"{worst.hosts}: {worst.complete} complete, {worst.failed} failed, {worst.lost} lost{runs}"),
        ("blob", f"{output.amount(worst.size)} in {worst.pieces} pieces of {output.amount(worst.piece_size)}, {worst.stripes} stripes"),
        ("bound", f"{worst.bound_s:.3f} s, with an origin of {output.amount(origin_bytes_s)}/s"),
        ("makespan", f"{worst.makespan_s:.3f} s, {worst.ratio:.3f} x the bound"),
        ("host done", f"p50 {worst.p50_s:.3f} s, p99 {worst.p99_s:.3f} s, p99.9 {worst.p999_s:.3f} s"),
        ("origin sent", f"{worst.origin_ratio:.3f} x the blob"),
        ("host sent", f"{worst.host_sent_ratio_mean:.3f} x the blob on average, {worst.host_sent_ratio_max:.3f} x at most"),
        *_places(worst),
        ("received twice", f"{worst.duplicates} pieces; {worst.rejected} with wrong bytes"),
        ("simulated in", f"{seconds:.1f} s, {worst.events} events{' in that run' if len(reports) > 1 else ''}"),
    ]  # fmt: skip
    for name, value in lines:
        click.echo(f"{name:<15} {value}")


def _places(report: Report) -> list[tuple[str, str]]:
    lines = []
    if report.rack_rx_ratio_max:
        lines.append(
            (
                "rack received",
                f"{report.rack_rx_ratio_mean:.3f} x the blob on average, {report.rack_rx_ratio_max:.3f} x at most",
            )
        )
    if report.zone_origin_ratios:
        shares = ", ".join(f"{zone} {ratio:.3f}" for zone, ratio in report.zone_origin_ratios.items())
        lines.append(("origin to zones", f"{shares} x the blob"))
    return lines


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


def _rack_rate(rate: str, oversubscription: str, hosts: int, racks: int, nic_bytes_s: float) -> float:
    """Bytes per second that may cross a rack's boundary each way; 0 for no limit."""
    if not rate and not oversubscription:
        return 0.0
    if not racks:
        raise UsageError("a limit on what leaves a rack needs racks", remedy="Say how many with --racks")
    if rate and oversubscription:
        raise UsageError("--rack-rate and --oversubscription say the same thing", remedy="Give one of them")
    if rate:
        return _rate(rate)
    found = _SHARE.match(oversubscription.strip())
    if not found or float(found[1]) <= 0:
        raise UsageError(f"{oversubscription!r} is no oversubscription", remedy="Write two numbers, such as 4:1")
    return -(-hosts // racks) * nic_bytes_s * float(found[2] or 1) / float(found[1])


_SHARE = re.compile(r"([0-9.]+)(?::([0-9.]+))?\Z")
_RATE = re.compile(r"([0-9.]+) ?([KMGT]?)bit/s\Z", re.IGNORECASE)
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(us|ms|s)\Z")


def _rate(text: str) -> float:
    """Bytes per second of a rate such as 300MB/s, 1GiB/s or 25Gbit/s."""
    bits = _RATE.match(text.strip())
    size = f"{bits[1]}{bits[2].upper()}B" if bits else text.strip().removesuffix("/s")
    rate = parse_size(size) / (8 if bits else 1)
    if rate <= 0:
        raise UsageError(f"{text!r} is no rate", remedy="Write a number and a unit, such as 300MB/s or 10Gbit/s")
    return rate


def _time(text: str) -> float:
    """Seconds of a time such as 0.2ms."""
    found = _TIME.match(text.strip())
    if not found:
        raise UsageError(f"{text!r} is not a time", remedy="Write a number and a unit, such as 0.2ms")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]
