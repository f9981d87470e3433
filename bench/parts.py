"""The benchmarks that are programs of their own (they take --json), each read into lines of figure,
bound, ratio and goal.

A ratio is always measured time over the least possible time, so 1.00 is perfect and smaller is
better.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.processes import ProgramFailed, run, undisturbed
from bench.table import figure, render

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 900.0
"""A program that takes longer is given up: each should need a few minutes at the most."""

SIMULATED_GOAL = 1.05
PLANNED_GOAL_S, SILENT_GOAL_S, SHARE_GOAL = 5.0, 1.0, 0.5
"""Of a tracker: until all hosts that join at once have their parents, the longest that it left
/healthz unanswered, and the part of one core that steady reports take."""


@dataclass(frozen=True)
class Line:
    """One figure. `measured` and `bound` are written with their units; `goal` is the text of a
    goal, `met` None without one."""

    what: str
    measured: str
    bound: str
    ratio: float | None
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Part:
    """A program: its title, what starts it, its file (or nothing when it is part of the product),
    and how its document is read."""

    title: str
    words: tuple[str, ...]
    read: Callable[[dict[str, Any]], list[Line]]
    file: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    title: str
    lines: list[Line]
    document: dict[str, Any]
    error: str = ""

    def table(self) -> str:
        """For people."""
        heads = ("figure", "measured", "bound", "ratio", "goal", "")
        rows = [
            [
                line.what,
                line.measured,
                line.bound,
                figure(line.ratio),
                line.goal or "-",
                "MISSED" if line.met is False else "",
            ]
            for line in self.lines
        ]
        notes = [f"FAILED: {self.error}"] if self.error else []
        return render(self.title, heads, rows, notes)


def parts(*, quick: bool, full: bool) -> dict[str, list[Part]]:
    """What there is, by the name that it is asked for."""
    loopback, tracker, blob = HERE / "loopback.py", HERE / "tracker_load.py", HERE / "small_blob.py"
    small = ("--size-mib", "128", "--rounds", "1") if quick else ()
    few = ("--hosts", "500", "--seconds", "5") if quick else ()
    some = ("--hosts", "20", "--repeat", "1") if quick else ()
    simulated = [300, 2600] if full else [50 if quick else 300]
    return {
        "loopback": [
            Part("One agent's streams to another on loopback", _program(loopback, *small), loopback_lines, loopback)
        ],
        "tracker": [Part("One tracker and its sessions on loopback", _program(tracker, *few), tracker_lines, tracker)],
        "small": [Part("A small blob to many hosts at once, on loopback", _program(blob, *some), small_lines, blob)],
        "simulate": [
            Part(f"{hosts:,} hosts, 3 GB at 300 MB/s, simulated", _simulate(hosts), simulated_lines)
            for hosts in simulated
        ],
    }


def _program(file: Path, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"{file.parent.name}.{file.stem}", "--json", *options)


def _simulate(hosts: int) -> tuple[str, ...]:
    p2pdist = str(Path(sys.executable).parent / "p2pdist")
    return (p2pdist, "simulate", "--json", "--size", "3GB", "--nic", "300MB/s", "--seed", "1", "--hosts", str(hosts))


def measure(part: Part) -> Outcome:
    """Run a part to its end. A program that is not there, fails, or says what cannot be read is an
    outcome with an error."""
    if part.file is not None and not part.file.exists():
        return Outcome(part.title, [], {}, f"{part.file.name} is missing from {part.file.parent.name}/")
    # Programs put their files into a directory of ours, which goes even when one of them has to be
    # killed.
    directory = tempfile.mkdtemp(prefix="p2pdist-bench-")
    Path(directory).chmod(0o755)  # nginx reads as another user
    try:
        ended = run(part.words, timeout_s=TIMEOUT_S, env={"TMPDIR": directory})
        if ended.code:
            raise ProgramFailed(f"exit code {ended.code}: {ended.tail()}")
        document = json.loads(ended.output)
    except ProgramFailed as failed:
        return Outcome(part.title, [], {}, str(failed))
    except ValueError as error:
        return Outcome(part.title, [], {}, f"its output is not one JSON document: {error}")
    finally:
        with undisturbed():
            shutil.rmtree(directory, ignore_errors=True)
    try:
        return Outcome(part.title, part.read(document), document)
    except (KeyError, TypeError, StopIteration) as error:
        return Outcome(part.title, [], document, f"its document lacks what is read from it: {error!r}")


# -- reading the documents


def loopback_lines(document: dict[str, Any]) -> list[Line]:
    """Throughput of streams, plain and over TLS; the bound is nginx to curl the same way in the
    same run, the better of its figures. The goals are the program's own."""
    return [line for name in ("rows", "tls_rows") for line in _streams(document.get(name, []))]


def _streams(rows: list[dict[str, Any]]) -> list[Line]:
    plain = [row for row in rows if row["path"].startswith("nginx")]
    best = max(plain, key=lambda row: float(row["gb_s"]), default=None)
    bound = f"{best['gb_s']:.2f} GB/s" if best else "no nginx or curl"
    lines = [Line(best["path"], bound, bound, 1.0)] if best else []
    for row in rows:
        if row in plain:
            continue
        cpu_s = row["rx_cpu_s_per_gib"] + row["tx_cpu_s_per_gib"]
        ratio = best["gb_s"] / row["gb_s"] if best else None
        goal = "loopback.py's" if "met" in row else ""
        lines.append(
            Line(row["path"], f"{row['gb_s']:.2f} GB/s, {cpu_s:.2f} CPU-s/GiB", bound, ratio, goal, row.get("met"))
        )
    return lines


def tracker_lines(document: dict[str, Any]) -> list[Line]:
    """Sessions and joins, whose bound is the tracker's one core, never idle; and steady reports,
    whose bound is that core, wholly busy."""
    lines: list[Line] = []
    hosts = document["hosts"]
    for name in ("at-once", "connecting"):
        if name not in document:
            continue
        found = document[name]
        connect = found["connect"]
        lines.append(_busy(f"{hosts:,} sessions accepted", connect["accept_s"], connect["tracker_cpu_s"]))
        join = found.get("join", connect)
        joined = _busy(f"all have parents, joining {name}", join["planned_s"], join["tracker_cpu_s"])
        if name == "at-once":
            joined = _goal(
                joined.what, joined.measured, joined.bound, joined.ratio, join["planned_s"], PLANNED_GOAL_S, "s"
            )
        lines.append(joined)
        lines.append(
            _goal(
                "  /healthz unanswered for",
                f"{join['silent_s']:.2f} s",
                "-",
                None,
                join["silent_s"],
                SILENT_GOAL_S,
                "s",
            )
        )
        if "steady" in found:
            lines.append(_steady(found["steady"]))
    return lines


def _busy(what: str, seconds: float, cpu_s: float) -> Line:
    return Line(what, f"{seconds:.2f} s", f"{cpu_s:.2f} CPU-s", seconds / cpu_s if cpu_s else None)


def _steady(steady: dict[str, Any]) -> Line:
    rate, share = steady["reports"] / steady["wall_s"], steady["tracker_share"]
    each = steady["microseconds_per_report"]
    measured = f"{share:.0%} of a core, {each:.0f} us each"
    bound = f"{1e6 / each:,.0f}/s" if each else "-"
    return _goal(f"  {rate:,.0f} reports/s", measured, bound, share, share, SHARE_GOAL, "of a core")


def small_lines(document: dict[str, Any]) -> list[Line]:
    """A small blob; the bound is the CPU time of agents and tracker on the machine's cores."""
    last_s, bound_s = document["last_s"], document["cpu_s"] / (os.cpu_count() or 1)
    what = f"{document['size'] >> 10} KiB to {document['hosts']} hosts"
    ratio = last_s / bound_s if bound_s else None
    return [_goal(what, f"{last_s:.3f} s", f"{bound_s:.3f} s", ratio, last_s, document["goal_s"], "s")]


def simulated_lines(document: dict[str, Any]) -> list[Line]:
    """Makespan on a virtual clock."""
    ratio = document["ratio"]
    measured, bound = f"{document['makespan_s']:.3f} s", f"{document['bound_s']:.3f} s"
    return [
        _goal("last host complete", measured, bound, ratio, ratio, SIMULATED_GOAL, "x"),
        Line("copies from the origin", f"{document['origin_ratio']:.3f}", "1", document["origin_ratio"]),
    ]


def _goal(
    what: str, measured: str, bound: str, ratio: float | None, value: float | None, most: float, unit: str
) -> Line:
    """A line whose `value` must be at most `most`."""
    return Line(what, measured, bound, ratio, f"at most {most:g} {unit}", None if value is None else value <= most)


def tables(outcomes: Sequence[Outcome]) -> str:
    """All of them."""
    return "\n".join(outcome.table() for outcome in outcomes)
