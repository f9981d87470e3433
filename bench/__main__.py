"""Every benchmark, one table after the other, each with its bound and the ratio to it: `make
bench`, or `python -m bench`.

Broadcasts over rate-limited network namespaces need root and the yardstick, a program of its own:
name its swarm.py with --yardstick or the variable YARDSTICK. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from bench import broadcast, compare
from bench.broadcast import Run, Yardstick
from bench.cases import NAMES, SIMULATED, Case, Links, cases
from bench.methods import METHODS, OURS, USUAL, Method
from bench.parts import Outcome, measure, parts
from p2pdist.simulate.invariants import InvariantBroken

PARTS = ("loopback", "tracker", "small", "simulate", "broadcast", "compare")
QUICK = Links(hosts=8, size_mib=16)
INTERRUPTED = 130


def say(text: str) -> None:
    """Progress; the tables alone go to standard output."""
    print(text, file=sys.stderr, flush=True)


class Bench:
    """One call of `make bench`: what was chosen, and what has been found so far."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.links = Links(chosen.hosts, chosen.size_mib, chosen.rate_mbit, chosen.origin_mbit)
        self.outcomes: list[Outcome] = []
        self.runs: list[Run] = []
        self.comparisons: list[compare.Comparison] = []
        self.failed: list[str] = []

    # -- parts

    def programs(self, name: str) -> None:
        """A benchmark that is a program of its own."""
        for part in parts(quick=self.chosen.quick, full=self.chosen.full)[name]:
            say(f"{part.title} ...")
            outcome = measure(part)
            self.outcomes.append(outcome)
            if outcome.error:
                self.failed.append(outcome.title)
            print(outcome.table(), flush=True)

    def broadcasts(self, yardstick: Yardstick) -> None:
        """The cases that were asked for: uniform with every method, the others with ours."""
        names = NAMES if "all" in self.chosen.case else tuple(dict.fromkeys(self.chosen.case))
        methods = [method for method in METHODS if method.name in self.chosen.method]
        absent = {method.name: lack for method in methods if (lack := method.missing(sys.executable))}
        if OURS in absent:
            self.fail(f"broadcast: this machine lacks {absent[OURS]}")
            return
        if "uniform" in names:
            [uniform] = cases("uniform", self.links)
            self.take(
                yardstick, [method for method in methods if method.name not in absent], [uniform], self.chosen.repeat
            )
            print(broadcast.side_by_side(uniform, methods, self.runs, absent), flush=True)
        others = [case for name in names if name != "uniform" for case in cases(name, self.links)]
        if others:
            self.take(yardstick, ours(), others, self.chosen.repeat)
            print(broadcast.of_ours(others, self.runs), flush=True)

    def compared(self, yardstick: Yardstick) -> None:
        """Simulated beside real. Cases that have not been run for their own sake are run once."""
        wanted = [case for name in SIMULATED for case in cases(name, self.links)]
        lacking = [case for case in wanted if not any(run.method == OURS and run.case == case for run in self.runs)]
        self.take(yardstick, ours(), lacking, 1)
        for case in wanted:
            try:
                self.comparisons.append(compare.compare(case, self.runs))
            except InvariantBroken as error:
                self.fail(f"{case.label}, simulated: {error}")
        print(compare.table(self.comparisons), flush=True)

    def take(self, yardstick: Yardstick, methods: Sequence[Method], chosen: Sequence[Case], repeat: int) -> None:
        """Run methods and cases in turn."""
        for turn in broadcast.turns(methods, chosen, repeat):
            say(f"{turn} of {1 if turn.method.once else repeat} ...")
            run = yardstick.run(turn.method, turn.case, turn.number)
            self.runs.append(run)
            if run.error:
                self.fail(f"{turn}: {run.error}")
            else:
                say(f"    {run.seconds:.2f} s, {run.ratio:.3f} x the bound, {run.figures.get('idle_pct')} % idle")

    def fail(self, what: str) -> None:
        """A benchmark could not be run."""
        self.failed.append(what)
        say(f"FAILED: {what}")

    # -- the whole

    def run(self) -> None:
        """All chosen parts."""
        for name in ("loopback", "tracker", "small", "simulate"):
            if name in self.chosen.part:
                self.programs(name)
        wanted = [name for name in ("broadcast", "compare") if name in self.chosen.part]
        if not wanted:
            return
        program = self.chosen.yardstick
        if program is None:
            print(f"\n{' and '.join(wanted)}: skipped, no yardstick (name its swarm.py with --yardstick or YARDSTICK)")
        elif not program.is_file():
            self.fail(f"{' and '.join(wanted)}: there is no file {program}")
        elif os.geteuid():
            self.fail(f"{' and '.join(wanted)}: network namespaces need root")
        else:
            yardstick = Yardstick(program.resolve(), self.chosen.wait_idle)
            if "broadcast" in wanted:
                self.broadcasts(yardstick)
            if "compare" in wanted:
                self.compared(yardstick)

    def document(self) -> dict[str, Any]:
        """Everything that was found, every single run too."""
        return {
            "options": {
                name: value if isinstance(value, int | float) else str(value)
                for name, value in vars(self.chosen).items()
            },
            "processors": os.cpu_count(),
            "written": time.time(),
            "programs": [
                {"title": outcome.title, "error": outcome.error, "document": outcome.document}
                for outcome in self.outcomes
            ],
            "runs": [run.document() for run in self.runs],
            "comparison": [comparison.document() for comparison in self.comparisons],
            "failed": self.failed,
        }


def ours() -> list[Method]:
    """This system alone."""
    return [method for method in METHODS if method.name == OURS]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the variable YARDSTICK; --quick stands for what is not given."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--yardstick", type=Path, default=os.environ.get("YARDSTICK") or None, help="its swarm.py [YARDSTICK]"
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    parser.add_argument("--case", nargs="+", choices=[*NAMES, "all"], default=["uniform"], help="broadcasts [uniform]")
    parser.add_argument(
        "--method", nargs="+", choices=[method.name for method in METHODS], default=list(USUAL), help="of uniform"
    )
    parser.add_argument("--hosts", type=int, help=f"of a broadcast [{Links.hosts}]")
    parser.add_argument("--size-mib", type=int, help=f"of the blob [{Links.size_mib}]")
    parser.add_argument("--rate-mbit", type=float, default=Links.rate_mbit, help="of each host, each way [%(default)g]")
    parser.add_argument("--origin-mbit", type=float, default=Links.origin_mbit, help="of the origin [%(default)g]")
    parser.add_argument("--repeat", type=int, help="runs of each method and case [3]")
    parser.add_argument(
        "--wait-idle",
        type=float,
        default=0.0,
        metavar="PERCENT",
        help="start runs when the machine is so idle, after 120 s at the latest",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, once: does everything run?")
    parser.add_argument("--full", action="store_true", help="also simulate 2,600 hosts (minutes)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all single runs into this file")
    chosen = parser.parse_args(words)
    usual = QUICK if chosen.quick else Links()
    chosen.hosts = usual.hosts if chosen.hosts is None else chosen.hosts
    chosen.size_mib = usual.size_mib if chosen.size_mib is None else chosen.size_mib
    chosen.repeat = (1 if chosen.quick else 3) if chosen.repeat is None else chosen.repeat
    if chosen.hosts < 2 or chosen.size_mib < 1 or chosen.repeat < 1 or min(chosen.rate_mbit, chosen.origin_mbit) <= 0:
        parser.error("a broadcast needs at least two hosts, one MiB, one run, and links with a rate")
    return chosen


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    chosen = arguments()
    signal.signal(signal.SIGTERM, _stop)
    bench = Bench(chosen)
    interrupted = False
    try:
        bench.run()
    except KeyboardInterrupt:
        interrupted = True
        say("Interrupted; nothing is left running")
    if chosen.json:
        chosen.json.write_text(json.dumps(bench.document(), indent=1) + "\n")
    if interrupted:
        return INTERRUPTED
    for what in bench.failed:
        print(f"FAILED: {what}")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
