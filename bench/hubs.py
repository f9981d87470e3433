"""A model to many hosts at once by snapshot_download, on rate-limited network namespaces: from the
hub itself, through olah (a caching mirror of hubs, the rival), and through an agent on each host.

    python -m bench.hubs [--hosts 16 --rate-mbit 40 --origin-mbit 80 --repeat 1]
    python -m bench.hubs --way olah --way agents

olah runs as its users run it: one for all hosts, in the middle, whose address they have as
HF_ENDPOINT. Its host has a link like the hub's (`olah`), or one without a limit (`olah-free`). It
is installed from PyPI into an environment of its own, which the first run makes.

Of each way: the time of all hosts and its ratio to the bound, which is that of
bench.model_broadcast; copies that the hub sent; HEADs of the file for which most came; processor
time of what is between hub and clients; and the seconds and copies of one more call, on the first
host alone, with an empty cache. Then the same again with what is between killed when the hub has
sent half of the model, and started again after five seconds: olah, or the tracker and the agent of
the first host. Clients whose call fails begin it anew after a second, as a scheduler would have
them; these failures are counted. Every host's files are compared.

Needs root, iproute2, and huggingface_hub in an environment of its own (make setup-all).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.links import Node, links
from bench.model_broadcast import HUB_PORT, ModelFleet, options
from bench.processes import idle_s
from bench.shaped import programs, seconds_on_wire
from bench.table import figure, median, render

PREFIX = "p2pd-hb-"
WAYS = ("hub", "olah", "olah-free", "agents")
OLAH = "olah==0.5.4"
OLAH_PORT = 8090
AWAY_S = 5.0
"""How long what was killed stays away."""

CLIENT = """
import json, os, sys, time
from huggingface_hub import snapshot_download
print("ready", flush=True)
sys.stdin.readline()
failures = []
while True:
    try:
        found = snapshot_download(sys.argv[1])
        break
    except Exception as error:
        failures.append(f"{type(error).__name__}: {error}"[:300])
        if len(failures) > 100:
            raise
        time.sleep(1)
os.symlink(found, sys.argv[2])
open(sys.argv[2] + ".failures", "w").write(json.dumps(failures))
os._exit(0)
"""


@dataclass(frozen=True)
class Call:
    """A call of snapshot_download by some hosts at once."""

    seconds: float
    """Until the last host had the model."""
    median_s: float
    copies: float
    """Of the large files, handed out by the hub meanwhile."""
    failures: tuple[str, ...]
    """Of calls that were begun anew: why they failed."""


@dataclass(frozen=True)
class Run:
    """One way's calls: all hosts, the first host once more, and all hosts with a kill half-way;
    None where there is nothing to kill."""

    way: str
    bound_s: float
    all: Call
    again: Call
    killed: Call | None
    heads_most: int
    cpu_s: float
    """Processor time between hub and clients, of the call of all hosts."""
    idle: float
    """The share of this machine's processor time that nothing used in that call."""


class HubFleet(ModelFleet):
    """A hub with a model, hosts, and what is between them: nothing, olah, or tracker and agents."""

    middle: list[Node]
    """Where the programs between hub and clients run."""
    fragile: list[Node]
    """Those of them that are killed."""

    def begin(self, way: str, mirror: Node | None) -> None:
        """Make the model and start everything; olah on `mirror`."""
        self.start(agents=way == "agents")
        self.middle = self.fragile = []
        if way == "agents":
            self.middle, self.fragile = [self.tracker, *self.hosts], [self.tracker, self.hosts[0]]
        if mirror is not None:
            self.middle = self.fragile = [mirror]
            self._start_olah(mirror)

    def _start_olah(self, node: Node) -> None:
        hub, own = f"{self.hub.address}:{HUB_PORT}", f"{node.address}:{OLAH_PORT}"
        settings = {
            "host": node.address, "port": OLAH_PORT, "repos-path": str(self.work / "repos"),
            "hf-scheme": "http", "hf-netloc": hub, "hf-lfs-netloc": hub,
            "mirror-scheme": "http", "mirror-netloc": own, "mirror-lfs-netloc": own,
        }  # fmt: skip
        path = self.work / "olah.toml"
        path.write_text("[basic]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        program = ["env", "-C", str(self.work), str(olah_program()), "-c", str(path)]
        self.programs.spawn(node, *program)
        self.endpoint = f"http://{own}"
        self.programs.answered(node, f"{self.endpoint}/openapi.json")  # its page fails with newer libraries

    def call(self, hosts: Sequence[Node], number: int) -> Call:
        """Have these hosts download the model at once, with empty caches."""
        before = self.copies()
        seconds = self.snapshots(hosts, client=CLIENT, call=number)
        self.compare(hosts, call=number)
        told = [json.loads(path.read_text()) for path in sorted(self.work.glob(f"snapshot-*-{number}.failures"))]
        failures = tuple(why for each in told for why in each)
        return Call(max(seconds.values()), median(seconds.values()) or 0.0, self.copies() - before, failures)

    def kill_half_way(self) -> threading.Thread:
        """Kill what can be killed once the hub has sent half of the model, in a thread."""

        def work() -> None:
            while self.copies() < 0.5:
                time.sleep(0.1)
            away = [threading.Thread(target=self.programs.restart, args=(node, AWAY_S)) for node in self.fragile]
            for thread in away:
                thread.start()
            for thread in away:
                thread.join()

        killer = threading.Thread(target=work, daemon=True)
        killer.start()
        return killer


def olah_program() -> Path:
    """olah's server, in an environment of its own; made if it is not there."""
    place = Path(sys.prefix) / "rivals" / OLAH.replace("==", "-")
    if not (place / "bin" / "olah-cli").exists():
        print(f"installing {OLAH} into {place}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, OLAH], check=True)
    return place / "bin" / "olah-cli"


@contextlib.contextmanager
def hub_fleet(chosen: argparse.Namespace, way: str) -> Iterator[HubFleet]:
    """A fleet on links of its own, all of it started; nothing of it is left afterwards."""
    with links(PREFIX) as net, programs(PREFIX, chosen.work) as started:
        fleet = HubFleet(started, net, chosen)
        mirror = net.add("m", chosen.origin_mbit if way == "olah" else 0) if way.startswith("olah") else None
        fleet.begin(way, mirror)
        yield fleet


def measure(chosen: argparse.Namespace, way: str) -> Run:
    """The calls of one way."""
    with hub_fleet(chosen, way) as fleet:
        cpu, idle, began = fleet.programs.cpu_s(fleet.middle), idle_s(), time.monotonic()
        everywhere = fleet.call(fleet.hosts, 1)
        took = time.monotonic() - began
        cpu, free = fleet.programs.cpu_s(fleet.middle) - cpu, (idle_s() - idle) / took / (os.cpu_count() or 1)
        heads = max(fleet.served()["heads"].values(), default=0)
        again = fleet.call(fleet.hosts[:1], 2)
        bound_s = seconds_on_wire(fleet.size, min(chosen.rate_mbit, chosen.origin_mbit))
        breakable = bool(fleet.fragile)
    killed = None
    if breakable and not chosen.no_kill:
        with hub_fleet(chosen, way) as fleet:
            killer = fleet.kill_half_way()
            killed = fleet.call(fleet.hosts, 1)
            killer.join(AWAY_S + 60)
    return Run(way, bound_s, everywhere, again, killed, heads, cpu, free)


def report(runs: Sequence[Run], chosen: argparse.Namespace) -> str:
    """A line for each run."""
    heads = ["a model by", "seconds", "x bound", "median s", "copies", "HEADs", "CPU between", "idle"]
    heads += ["again s", "copies", "killed: s", "copies", "failures"]
    rows = [
        [
            run.way,
            figure(run.all.seconds, 1),
            figure(run.all.seconds / run.bound_s),
            figure(run.all.median_s, 1),
            figure(run.all.copies, 3),
            str(run.heads_most),
            figure(run.cpu_s, 1),
            figure(100 * run.idle, 0, " %"),
            figure(run.again.seconds, 1),
            figure(run.again.copies),
            figure(run.killed and run.killed.seconds, 1),
            figure(run.killed and run.killed.copies),
            str(len(run.killed.failures)) if run.killed else "-",
        ]
        for run in runs
    ]
    links = f"{chosen.hosts} hosts at {chosen.rate_mbit:g} Mbit/s, the hub at {chosen.origin_mbit:g}"
    notes = [f"{links}; the bound is {runs[0].bound_s:.1f} s"] if runs else []
    return render(f"{chosen.files} files of {chosen.file_mib} MiB by snapshot_download", heads, rows, notes)


def main(words: Sequence[str] | None = None) -> int:
    """Run what is named, print the table; 1 when one could not be run."""
    parser = options(__doc__)
    parser.add_argument("--way", choices=WAYS, action="append", help="[default: all, in turn]")
    parser.add_argument("--no-kill", action="store_true", help="without the calls in which something is killed")
    chosen = parser.parse_args(words)
    if not chosen.python.exists():
        parser.error(f"there is no {chosen.python}: make setup-all, or name a --python with huggingface_hub")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs: list[Run] = []
    failed = False
    for number in range(chosen.repeat):
        for way in chosen.way or WAYS:
            try:
                runs.append(measure(chosen, way))
                print(f"{way} {number + 1}: {runs[-1].all.seconds:.1f} s", file=sys.stderr, flush=True)
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                failed = True
                print(f"FAILED: {way}: {error}", file=sys.stderr, flush=True)
    print(report(runs, chosen))
    if chosen.json:
        choice = {name: str(value) for name, value in vars(chosen).items()}
        Path(chosen.json).write_text(json.dumps({"choice": choice, "runs": [asdict(run) for run in runs]}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
