"""Broadcasts over rate-limited network namespaces, run by the yardstick: this system beside others
on the same links.

The yardstick is a program of its own, `swarm.py`; it builds the namespaces, lets a method
distribute a random file, checks every copy and prints one line of JSON for a run. Methods are
interleaved (A B C A B C), so a machine that changes its speed is fair to all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cases import WIRE_EFFICIENCY, Case
from bench.methods import OURS, Method
from bench.place import available_memory
from bench.processes import ProgramFailed, remove_network, run, undisturbed
from bench.table import figure, median, render

IDLE_LEAST_PERCENT = 40.0
"""A run with less idle time than this, on average, measured the CPU and not the network."""

RATIO_GOAL = 1.10
COPIES_GOAL = 1.10
"""Of this system without faults: the bound and the origin's bytes, headers counted. 1.05 is one
copy."""

MEMORY_SHARE = 0.6
"""Files of a run may take this part of the memory that is free; else they go to a disk."""

SHORT_S = 5.0
"""A broadcast whose bound is shorter shows how it starts, not how it runs."""

FIXED_S = 300.0
BOUNDS_MAX = 25.0
"""A run is given up after FIXED_S and so many times its bound."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run: what the yardstick said of it, and why it failed, if it did."""

    method: str
    case: Case
    number: int
    figures: Figures = field(default_factory=dict)
    error: str = ""

    @property
    def seconds(self) -> float | None:
        """From the first join until the last host that was not lost had everything."""
        return None if self.error else self.figures.get("makespan_s")

    @property
    def ratio(self) -> float | None:
        """`seconds` over the bound of the case, both with headers."""
        return None if self.seconds is None else self.seconds / self.case.bound_s

    def document(self) -> dict[str, Any]:
        """For --json."""
        case = {**asdict(self.case), "bound_s": self.case.bound_s}
        return {
            "method": self.method,
            "case": case,
            "run": self.number,
            "ratio_wire": self.ratio,
            "error": self.error,
            "yardstick": self.figures,
        }


class Yardstick:
    """Runs `swarm.py`. Its namespaces and its directory are named after this process, so several
    runs can share a machine."""

    def __init__(self, program: Path, wait_idle: float = 0.0) -> None:
        self.program, self.wait_idle = program, wait_idle
        self.prefix = f"pb{os.getpid()}-"

    def run(
        self,
        method: Method,
        case: Case,
        number: int,
        more: Mapping[str, str] | None = None,
        look: Callable[[Path], Figures] | None = None,
    ) -> Run:
        """One run; a failure is part of what is returned. Whatever happens, nothing of it is left.
        `more` are variables of run.sh; `look` gets the directory of a run that has ended, and adds
        figures."""
        case = method.adapted(case)
        work = Path(tempfile.mkdtemp(prefix="p2pdist-bench-", dir=room_for((case.links.hosts + 2) * case.links.size)))
        words = method.words(self.program, sys.executable)
        words += [
            *case.options(),
            "--repeat",
            "1",
            "--prefix",
            self.prefix,
            "--work",
            str(work / "run"),
            "--py",
            sys.executable,
        ]
        if self.wait_idle:
            words += ["--wait-idle", f"{self.wait_idle:g}"]
        p2pdist = str(Path(sys.executable).parent / "p2pdist")
        environment = {"P2PDIST": p2pdist, "PYTHON": sys.executable, "WARM_MIB": str(case.warm_mib), **(more or {})}
        words += ["--keep"] if look is not None else []
        try:
            ended = run(words, timeout_s=FIXED_S + BOUNDS_MAX * case.bound_s, env=environment)
            figures = last_line(ended.output)
            if look is not None and figures:
                figures |= look(work / "run")
            error = "" if figures.get("verified") else failure(figures) or ended.tail()
            return Run(method.name, case, number, figures, error)
        except ProgramFailed as failed:
            return Run(method.name, case, number, error=str(failed))
        finally:
            with undisturbed():
                remove_network(self.prefix)
                shutil.rmtree(work, ignore_errors=True)


def last_line(output: str) -> Figures:
    """The last line that is a JSON object; empty without one."""
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def failure(figures: Figures) -> str:
    """Why a run that ended is not valid; nothing when the yardstick did not say."""
    if not figures:
        return ""
    finished, expected = figures.get("finished"), figures.get("expected")
    return (
        "a copy is not what was sent"
        if finished == expected
        else f"{finished} of {expected} hosts were complete in time"
    )


def room_for(size: int) -> str:
    """A directory for so many bytes: in memory where they fit, so that no disk is measured, else on
    a disk."""
    memory, shared = available_memory(), Path("/dev/shm")
    if shared.is_dir() and size < min(memory * MEMORY_SHARE, shutil.disk_usage(shared).free):
        return str(shared)
    return tempfile.gettempdir()


# -- order


@dataclass(frozen=True)
class Turn:
    """Whose turn it is."""

    method: Method
    case: Case
    number: int

    def __str__(self) -> str:
        return f"{self.case.label}: {self.method.title}, run {self.number + 1}"


def turns(methods: Sequence[Method], cases: Sequence[Case], repeat: int) -> Iterator[Turn]:
    """Every method of every case once, then all of them again. What is run once is run in the first
    round."""
    for number in range(repeat):
        for case in cases:
            for method in methods:
                if not (method.once and number):
                    yield Turn(method, case, number)


# -- tables


HEADS = ("seconds", "ratio_wire", "origin_tx_x", "total_tx_x", "CPU-s/GiB", "idle %", "note")


def row(runs: Sequence[Run]) -> list[str]:
    """Medians of the runs of one method and one case, in the order of HEADS."""
    valid = [run for run in runs if not run.error]

    def of(name: str) -> float | None:
        return median(run.figures.get(name) for run in valid)

    return [
        figure(median(run.seconds for run in valid)),
        figure(median(run.ratio for run in valid), 3),
        figure(of("origin_tx_x"), 3),
        figure(of("total_tx_x"), 3),
        figure(of("agents_cpu_s_per_gib"), 1),
        figure(of("idle_pct"), 0),
        "; ".join(notes(runs)),
    ]


def notes(runs: Sequence[Run]) -> list[str]:
    """What must be known to read a row."""
    valid = [run for run in runs if not run.error]
    found = []
    if len(valid) < len(runs):
        found.append(f"{len(runs) - len(valid)} of {len(runs)} runs FAILED")
    busy = sum(1 for run in valid if run.figures.get("idle_pct", 100.0) < IDLE_LEAST_PERCENT)
    if busy:
        found.append(f"{busy} of {len(valid)} runs under {IDLE_LEAST_PERCENT:.0f} % idle: they measured the CPU")
    others = median(run.figures.get("others_ratio_wire") for run in valid)
    if others is not None:
        found.append(f"without the slow host {figure(others, 3)}")
    racks = [max(run.figures["rack_rx_x"]) for run in valid if run.figures.get("rack_rx_x")]
    if racks:
        found.append(f"into a rack at most {figure(median(racks), 2)} copies")
    return found


def goal_notes(runs: Sequence[Run]) -> list[str]:
    """The goals that this system's runs of a case without faults have missed."""
    ratio = median(run.ratio for run in runs)
    copies = median(run.figures.get("origin_tx_x") for run in runs if not run.error)
    found = []
    if ratio is not None and ratio > RATIO_GOAL:
        found.append(f"MISSED: ratio_wire goal {RATIO_GOAL:.2f}")
    if copies is not None and copies > COPIES_GOAL:
        found.append(f"MISSED: origin_tx_x goal {COPIES_GOAL:.2f}")
    return found


def remarks(cases: Sequence[Case]) -> list[str]:
    """What holds for a whole table."""
    if all(case.bound_s >= SHORT_S for case in cases):
        return []
    return [
        f"A bound under {SHORT_S:.0f} s is hardly longer than starting and measuring links takes: such ratios say little."
    ]


def bound_row(case: Case) -> list[str]:
    """What the links allow: one copy from the origin, and each host's copy sent once, with
    headers."""
    once = figure(1 / WIRE_EFFICIENCY, 3)
    return ["the bound", figure(case.bound_s), figure(1.0, 3), once, once, "-", "-", ""]


def side_by_side(case: Case, methods: Sequence[Method], runs: Sequence[Run], absent: dict[str, str]) -> str:
    """The table of all methods on the same links. `absent` says of the methods that could not run
    what they lack."""
    rows = []
    for method in methods:
        if method.name in absent:
            rows.append([method.title, *["-"] * (len(HEADS) - 1), f"skipped, missing: {absent[method.name]}"])
            continue
        own = [run for run in runs if run.method == method.name and run.case.name == case.name]
        said = [method.title, *row(own)]
        extra = goal_notes(own) if method.name == OURS else []
        if method.once:
            adapted = method.adapted(case)
            smaller = adapted.links.size_mib != case.links.size_mib
            extra.append(f"run once{f' with {adapted.links.size_mib} MiB' if smaller else ''}")
        said[-1] = "; ".join(note for note in (*extra, said[-1]) if note)
        rows.append(said)
    repeat = max((run.number + 1 for run in runs), default=0)
    title = f"{case.links}; median of {repeat}"
    return render(title, ("method", *HEADS), [*rows, bound_row(case)], remarks([case]))


def of_ours(cases: Sequence[Case], runs: Sequence[Run]) -> str:
    """The table of this system's cases, each with its own bound."""
    rows = []
    for case in cases:
        own = [run for run in runs if run.case == case and run.method == OURS]
        said = row(own)
        rows.append([case.label, figure(case.bound_s), *said])
    return render("p2pdist, other cases", ("case", "bound s", *HEADS), rows, remarks(cases))
