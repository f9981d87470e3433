"""`p2pdist report`: how a package reached its hosts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from p2pdist.cli import output
from p2pdist.cli.services import tracker_option
from p2pdist.cli.verbs.events import read
from p2pdist.model.errors import NotFound, P2PDistError, UsageError
from p2pdist.model.history import Broadcast, HistoryRecord, short_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_WIDTH, PLOT_HEIGHT = 60, 10
BROADCASTS_MAX = 100
FAILURES_SHOWN_MAX = 20
FILE = click.Path(path_type=Path, dir_okay=False)


class Report(msgspec.Struct, frozen=True):
    """Broadcasts of one package, as each tracker that planned a part of it reports them, and the
    pulls of it that failed meanwhile."""

    broadcasts: list[HistoryRecord]
    failures: list[HistoryRecord]


@click.command("report")
@click.argument("package", metavar="PACKAGE")
@tracker_option
@click.option(
    "--last", default=1, show_default=True, type=click.IntRange(1, BROADCASTS_MAX), help="The last so many broadcasts."
)
@click.option("--plot", type=FILE, help="Draw the hosts complete over time into this picture (.png, .svg, .pdf).")
@output.json_option
def command(package: str, tracker: str, last: int, plot: Path | None, as_json: bool) -> None:
    """Print how PACKAGE reached its hosts when it was last broadcast: how long that took, against
    the bound where rates are known, what was read of the origin, and which hosts were late and why.
    PACKAGE is a reference, a name for all its tags, or a digest or its first digits.

    \b
    Examples:
      p2pdist report team/trainer:v3
      p2pdist report team/trainer:v3 --plot trainer.svg
      p2pdist report 02bf9a81c64d --last 5 --json
    """
    if not package:
        raise UsageError("the package is empty", remedy="Name one, such as team/trainer:v3")
    if plot is not None:
        from p2pdist.simulate.report import check_plot

        check_plot(plot)
    found = asyncio.run(_report(tracker, package, last))
    if plot is not None:
        _draw(found.broadcasts[-1], plot)
    if as_json:
        output.print_json(found)
        return
    for record in found.broadcasts:
        _show(record)
    _show_failures(found.failures)


async def _report(tracker: str, package: str, last: int) -> Report:
    """Raises NotFound where no broadcast of the package is remembered, Unavailable."""
    named = {"package": package}
    broadcasts = await read(tracker, named | {"kind": "broadcast"}, last)
    if not broadcasts:
        raise NotFound(
            f"no broadcast of {package} is remembered: none has ended with two hosts or more",
            remedy="p2pdist events --kind broadcast names those that are; p2pdist top shows what runs",
        )
    begin = min(record.since for record in broadcasts)
    failed = await read(tracker, named | {"kind": "pull-failed", "since": f"{begin:.3f}"}, 1000)
    end = max(record.at for record in broadcasts)
    return Report(broadcasts, [record for record in failed if record.at <= end])


# -- the terminal


def _show(record: HistoryRecord) -> None:
    report, event = record.event.broadcast, record.event
    if report is None:
        return
    digits = event.digest.partition(":")[2][:12]
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.since))
    name = short_name(event.package, event.digest)
    output.say(name if digits in name else f"{name}  {digits}")
    where = f", planned by {record.tracker}" if record.tracker else ""
    output.say(f"  began            {began}{where}")
    output.say(f"  hosts            {report.complete} of {report.hosts} complete after {_seconds(report.seconds)}")
    output.say(f"  size             {output.amount(report.bytes)} in {output.counted(report.blobs, 'blob')}")
    shares = (("50 %", report.to_50_s), ("99 %", report.to_99_s), ("100 %", report.to_100_s))
    reached = ", ".join(f"{share} {_seconds(moment)}" for share, moment in shares)
    output.say(f"  reached          {reached}")
    output.say(f"  a host's own     half within {_seconds(report.own_p50_s)}, 99 % within {_seconds(report.own_p99_s)}")
    copies = f"{report.origin_copies:.2f} copies" if report.origin_copies is not None else "unknown"
    output.say(f"  from the origin  {copies}")
    output.say(f"  bound            {_bound(report)}")
    if report.resumed:
        hosts = output.counted(report.resumed, "host")
        output.say(f"  note             {hosts} came with a part of it: it may have begun earlier")
    output.say("")
    for row in plot_rows(report):
        output.say(f"  {row}")
    _show_stragglers(report)


def _bound(report: Broadcast) -> str:
    unknown = f"; not known: {', '.join(report.unknown)}" if report.unknown else ""
    if report.bound_s is None:
        return f"unknown{unknown}"
    times = f", {report.ratio:.2f} times that" if report.ratio is not None else ""
    return f"{_seconds(report.bound_s)}{times}{unknown}"


def _show_stragglers(report: Broadcast) -> None:
    if not report.stragglers:
        return
    output.say("")
    output.say("stragglers")
    for each in report.stragglers:
        took = f"after {_seconds(each.seconds)}" if each.seconds is not None else "never complete"
        late = f", joined {_seconds(each.joined_s)} late" if each.joined_s >= 1.0 else ""
        output.say(f"  {each.host:24} {took:16} {each.reason}{late}")
    if report.stragglers_more:
        output.say(f"  and {report.stragglers_more} more")


def _show_failures(failures: list[HistoryRecord]) -> None:
    if not failures:
        return
    output.say("")
    output.say("pulls that failed meanwhile")
    for record in failures[-FAILURES_SHOWN_MAX:]:
        output.say(f"  {record.event.host:24} {record.event.reason}")
    if len(failures) > FAILURES_SHOWN_MAX:
        output.say(f"  and {len(failures) - FAILURES_SHOWN_MAX} more")


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plot_rows(report: Broadcast, width: int = PLOT_WIDTH, height: int = PLOT_HEIGHT) -> list[str]:
    """The share of hosts that are complete over time, as rows of text: a column is a part of the
    time, a mark a part of the hosts."""
    if not report.curve or not report.hosts:
        return ["no host was complete"]
    last_s = max(report.curve[-1][0], 1e-9)
    done = [0] * width
    for moment, count in report.curve:
        done[min(width - 1, int(moment / last_s * (width - 1)))] = count
    for column in range(1, width):
        done[column] = max(done[column], done[column - 1])
    rows = []
    for row in range(height, 0, -1):
        marks = "".join("#" if count * height >= row * report.hosts else " " for count in done)
        label = f"{100 * row // height:3d} %" if row in (height, height // 2) else "     "
        rows.append(f"{label} |{marks}".rstrip())
    rows.append(f"  0 % +{'-' * width}")
    end = _seconds(report.curve[-1][0])
    rows.append(f"       0{end:>{width - 1}}")
    return rows


# -- the picture


def _draw(record: HistoryRecord, path: Path) -> None:
    """Write the picture of a broadcast into a file. Raises P2PDistError."""
    try:
        picture(record).savefig(path)
    except OSError as error:
        raise P2PDistError(f"{path} could not be written: {error.strerror}", remedy="Name another file") from error


def picture(record: HistoryRecord) -> Figure:
    """The share of hosts that are complete over time, and the bound as a vertical line where it is
    known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    report = record.event.broadcast
    assert report is not None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    last = max(report.seconds, report.bound_s or 0.0) * 1.05 or 1.0
    moments = [moment for moment, _ in report.curve]
    shares = [count / max(1, report.hosts) for _, count in report.curve]
    axes.plot(
        [0.0, *moments, last], [0.0, *shares, shares[-1] if shares else 0.0], drawstyle="steps-post", label="complete"
    )
    if report.bound_s is not None:
        axes.axvline(report.bound_s, color="grey", linestyle="--", label=f"bound {report.bound_s:.3f} s")
    axes.set(xlabel="seconds", ylabel="share of hosts complete", xlim=(0, last), ylim=(0, 1.03))
    # Names come from the network: a dollar sign would begin a formula.
    name = short_name(record.event.package, record.event.digest).replace("$", r"\$")
    axes.set_title(f"{name}: {report.complete} of {report.hosts} hosts in {report.seconds:.1f} s")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left")
    return figure
