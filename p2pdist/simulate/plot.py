"""A picture of one run: the share of hosts that are complete over time, and the bound."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.simulate.report import Report, percentile

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
