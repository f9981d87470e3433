"""Broadcasts on rate-limited network namespaces while something happens to the trackers (root, the
yardstick and a PostgreSQL on this machine): does any transfer notice?

    sudo python -m bench.tracker_faults --yardstick path/to/swarm.py \\
        --state postgresql://tracker@/postgres?host=/run/postgresql \\
        [--case early late twice freeze cut database] [--repeat 3] [--json FILE]

Every case is run once, then all of them again, so a machine that changes its speed is fair to all;
the figures are medians. The database is emptied before each run: it must be this benchmark's alone.

`broken` counts streams between hosts, or from the origin, that ended otherwise than as both sides
wanted, by the agents' logs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg

from bench.broadcast import Figures, Run, Yardstick
from bench.cases import Case, Links
from bench.methods import METHODS, OURS
from bench.table import figure, median, render

TRACKERS = 3
RATIO_GOAL, COPIES_GOAL = 1.06, 1.06
CUT_COPIES_GOAL = 1.15
SLOWER = 5.0
"""Links are so many times slower where the database is away for a minute, which is to pass while
the hosts receive."""

BROKEN = re.compile(r"stream from (?P<source>.+), stripe \d+, ended: (?P<reason>\S+)")
"""What an agent logs of each stream that ended otherwise than as both sides wanted."""


@dataclass(frozen=True)
class TrackerCase:
    """What happens to the trackers: `faults` as yardstick/trackers.py takes them."""

    name: str
    title: str
    faults: str
    slower: float = 1.0
    copies_goal: float = COPIES_GOAL
    broken_goal: int | None = 0
    """How many streams may break; None: what is cut off breaks."""
    ratio_goal: float | None = RATIO_GOAL
    """None: it is enough that every host ends with everything."""

    def broadcast(self, links: Links) -> Case:
        """What is broadcast meanwhile."""
        slow = replace(links, rate_mbit=links.rate_mbit / self.slower, origin_mbit=links.origin_mbit / self.slower)
        return Case(self.name, self.title, slow)


CASES = (
    TrackerCase("none", "nothing happens", ""),
    TrackerCase("early", "the owner is killed at 30 %", "kill@0.3"),
    TrackerCase("late", "the owner is killed at 60 %", "kill@0.6"),
    TrackerCase("twice", "the owner at 30 %, its successor at 60 %", "kill@0.3,kill@0.6"),
    TrackerCase("freeze", "the owner stands still for 6 s", "freeze@0.3"),
    TrackerCase(
        "cut", "cut from each other and from half", "cut@0.3", copies_goal=CUT_COPIES_GOAL, broken_goal=None, ratio_goal=None
    ),
    TrackerCase("database", "PostgreSQL is away for a minute", "database@0.1", SLOWER),
)  # fmt: skip


def broken(lines: Iterable[str]) -> dict[str, int]:
    """How many streams broke for which reason, by lines of an agent's log."""
    counts: dict[str, int] = {}
    for line in lines:
        if found := BROKEN.search(line):
            counts[found["reason"]] = counts.get(found["reason"], 0) + 1
    return counts


def look(directory: Path) -> Figures:
    """The figures that are in the logs of a run: streams that broke, and what was brought when."""
    counts: dict[str, int] = {}
    for log in sorted(directory.glob("h*/log")):
        for reason, count in broken(log.read_text(errors="replace").splitlines()).items():
            counts[reason] = counts.get(reason, 0) + count
    said = (directory / "c" / "log").read_text(errors="replace").splitlines()
    return {"broken": counts, "brought": [json.loads(line) for line in said if line.startswith("{")]}


def empty(state: str) -> None:
    """Remove everything from the database."""
    with psycopg.connect(state, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")


HEADS = ("case", "runs", "seconds", "ratio_wire", "origin_tx_x", "broken", "idle %", "note")


def row(case: TrackerCase, runs: Sequence[Run]) -> list[str]:
    """Medians of the runs of a case, in the order of HEADS; of broken streams all."""
    valid = [run for run in runs if not run.error]
    ratio = median(run.ratio for run in valid)
    copies = median(run.figures.get("origin_tx_x") for run in valid)
    counts = [count for run in valid for count in run.figures["broken"].values()]
    notes = [f"{len(runs) - len(valid)} of {len(runs)} runs FAILED"] if len(valid) < len(runs) else []
    if ratio is not None and case.ratio_goal is not None and ratio > case.ratio_goal:
        notes.append(f"MISSED: ratio_wire goal {case.ratio_goal:.2f}")
    if copies is not None and copies > case.copies_goal:
        notes.append(f"MISSED: origin_tx_x goal {case.copies_goal:.2f}")
    if case.broken_goal is not None and sum(counts) > case.broken_goal:
        notes.append("MISSED: no stream breaks")
    unbrought = [run for run in valid if not _brought(case, run)]
    if unbrought:
        notes.append(f"{len(unbrought)} of {len(valid)} runs ended before all had happened")
    return [
        case.title,
        str(len(runs)),
        figure(median(run.seconds for run in valid)),
        figure(ratio, 3),
        figure(copies, 3),
        str(sum(counts)),
        figure(median(run.figures.get("idle_pct") for run in valid), 0),
        "; ".join(notes),
    ]


def _brought(case: TrackerCase, run: Run) -> bool:
    """Whether everything had happened, and was over, when the run ended."""
    over = [entry for entry in run.figures["brought"] if "ended_s" in entry]
    return len(over) == len([fault for fault in case.faults.split(",") if fault])


def table(links: Links, runs: dict[str, list[Run]]) -> str:
    """The table of all cases that were run."""
    rows = [row(case, runs[case.name]) for case in CASES if case.name in runs]
    return render(f"{TRACKERS} trackers; {links}; medians", HEADS, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--yardstick", type=Path, default=os.environ.get("YARDSTICK") or None, help="its swarm.py [YARDSTICK]"
    )
    parser.add_argument("--state", required=True, help="a database of its own, postgresql://...")
    names = [case.name for case in CASES]
    parser.add_argument("--case", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=24)
    parser.add_argument("--size-mib", type=int, default=64)
    parser.add_argument("--rate-mbit", type=float, default=40.0)
    parser.add_argument("--origin-mbit", type=float, default=80.0)
    parser.add_argument("--wait-idle", type=float, default=0.0, help="start runs once so many percent are idle")
    parser.add_argument("--json", type=Path, help="write the single runs into this file")
    chosen = parser.parse_args()
    if chosen.yardstick is None:
        parser.error("name the yardstick's swarm.py with --yardstick or the variable YARDSTICK")
    links = Links(chosen.hosts, chosen.size_mib, chosen.rate_mbit, chosen.origin_mbit)
    yardstick = Yardstick(chosen.yardstick.resolve(), chosen.wait_idle)
    ours = next(method for method in METHODS if method.name == OURS)
    runs: dict[str, list[Run]] = {case.name: [] for case in CASES if case.name in chosen.case}
    try:
        for number in range(chosen.repeat):
            for case in (case for case in CASES if case.name in runs):
                print(f"{case.title}, run {number + 1} of {chosen.repeat} ...", file=sys.stderr, flush=True)
                empty(chosen.state)
                more = {"TRACKERS": str(TRACKERS), "STATE": chosen.state, "FAULTS": case.faults, "LOG_LEVEL": "info"}
                run = yardstick.run(ours, case.broadcast(links), number, more, look)
                runs[case.name].append(run)
                print(f"    {run.error or said(run)}", file=sys.stderr, flush=True)
    finally:
        if chosen.json:
            chosen.json.write_text(json.dumps([run.document() for each in runs.values() for run in each]) + "\n")
    print(table(links, runs))
    return 1 if any(run.error for each in runs.values() for run in each) else 0


def said(run: Run) -> str:
    """A run in a line."""
    figures: dict[str, Any] = run.figures
    return f"{run.ratio:.3f} x the bound, {figures['origin_tx_x']} copies, broken: {figures['broken'] or 'none'}"


if __name__ == "__main__":
    sys.exit(main())
