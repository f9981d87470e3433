"""A model to many hosts at once, each by huggingface_hub's snapshot_download through its agent, on
rate-limited network namespaces: time against the bound, copies that the hub sent, and HEADs.

    python -m bench.model_broadcast [--hosts 16 --rate-mbit 40 --origin-mbit 80 --repeat 3]
    python -m bench.model_broadcast --way agents --way hub      # and each host from the hub itself

The hub is a program of this project, p2pdist.cli.verbs.demo.model.hub. The bound is the larger of
the model over one host's link and over the hub's. Every host's files are compared. Clients have
imported what they need when the time begins. Needs root, iproute2, and huggingface_hub in an
environment of its own (make setup-all), or in that of --python.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.links import Links, Node, links
from bench.processes import idle_s
from bench.shaped import Programs, programs, seconds_on_wire, together
from bench.table import figure, median, render
from p2pdist.cli.verbs.demo.model.weights import write_model

PREFIX = "p2pd-ml-"
WAYS = ("agents", "hub")
REPOSITORY, HUB_PORT = "bench/model", 8000
RATIO_GOAL, COPIES_GOAL = 1.25, 1.05
HUB_CLIENT = Path(sys.prefix) / "hub-clients" / "2.4.0" / "bin" / "python"
CLIENT = """
import os, sys
from huggingface_hub import snapshot_download
print("ready", flush=True)
sys.stdin.readline()
os.symlink(snapshot_download(sys.argv[1]), sys.argv[2])
os._exit(0)
"""
"""It ends without taking its interpreter apart, while other hosts are at their last pieces."""


@dataclass(frozen=True)
class Run:
    """One broadcast."""

    way: str
    hosts: int
    bound_s: float
    makespan_s: float
    median_s: float
    copies: float
    """What the hub handed out of the large files, over their size."""
    wire_copies: float
    """What the hub's host sent, headers of segments included, over the model."""
    heads_most: int
    """HEADs of the file for which most came."""
    cpu_s: float
    """Processor time of tracker and agents."""
    idle: float
    """The share of this machine's processor time that nothing used."""

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s


class ModelFleet:
    """A hub with a model, a tracker and hosts, with fresh stores."""

    def __init__(self, programs: Programs, net: Links, chosen: argparse.Namespace) -> None:
        self.work, self.programs, self._chosen = programs.work, programs, chosen
        self.hub = net.add("o", chosen.origin_mbit)
        self.tracker = net.add("c", 0)
        self.hosts = [net.add(f"h{number}", chosen.rate_mbit) for number in range(chosen.hosts)]
        self.url = self.endpoint = f"http://{self.hub.address}:{HUB_PORT}"
        """Of the hub, and what clients have as HF_ENDPOINT."""
        self.model = self.work / "model"

    @property
    def size(self) -> int:
        """Bytes of the large files."""
        return sum(path.stat().st_size for path in self.model.glob("*.safetensors"))

    def start(self, *, agents: bool, options: Sequence[str] = ()) -> None:
        """Make the model, and start everything; `options` are for each agent."""
        chosen = self._chosen
        for _ in write_model(self.model, files=chosen.files, file_bytes=chosen.file_mib << 20, tensors=8):
            pass
        words = ["--directory", str(self.model), "--repository", REPOSITORY]
        hub = [sys.executable, "-m", "p2pdist.cli.verbs.demo.model.hub"]
        self.programs.spawn(self.hub, *hub, *words, "--listen", f"{self.hub.address}:{HUB_PORT}")
        self.programs.answered(self.hub, f"{self.url}/-/served")
        if agents:
            state = ["--state", str(self.work / "state")]
            tracker = self.programs.tracker(self.tracker, "--hub", self.url, *state, *chosen.tracker_option)
            for host in self.hosts:
                self.programs.agent(host, tracker, *options, *chosen.agent_option)
            self.programs.ready(self.hosts)
            self.endpoint = "http://127.0.0.1:7073/hf"

    def snapshots(self, hosts: Sequence[Node], *, client: str = CLIENT, call: int = 1) -> dict[str, float]:
        """snapshot_download on these hosts at once, each call with an empty cache; returns the
        seconds of each, by name."""
        env = {host.name: self._environment(self.work / f"home-{host.name}-{call}") for host in hosts}
        python = str(self._chosen.python)
        commands = {
            host.name: host.words(python, "-c", client, REPOSITORY, str(self._snapshot(host, call))) for host in hosts
        }
        return together(commands, env=env, waits=True)

    def _snapshot(self, host: Node, call: int) -> Path:
        return self.work / f"snapshot-{host.name}-{call}"

    def _environment(self, home: Path) -> Mapping[str, str]:
        home.mkdir()
        fixed = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_ETAG_TIMEOUT": "60"}
        # As many hosts at one hub as there are make it slow, which is no failure.
        return {
            **fixed,
            "HF_HUB_DOWNLOAD_TIMEOUT": "300",
            "HF_HUB_VERBOSITY": "critical",
            "HF_HOME": str(home),
            "HF_ENDPOINT": self.endpoint,
            "no_proxy": "*",
        }

    def compare(self, hosts: Sequence[Node], *, call: int = 1) -> None:
        """Raises RuntimeError where a host has other files than the hub."""
        names = [path.name for path in self.model.iterdir()]
        for host in hosts:
            _, different, absent = filecmp.cmpfiles(self.model, self._snapshot(host, call), names, shallow=False)
            if different or absent:
                raise RuntimeError(f"{host.name} has other files: {', '.join(different + absent)}")

    def served(self) -> dict[str, Any]:
        """What the hub has counted."""
        words = self.hub.words("curl", "-sf", f"{self.url}/-/served")
        counted: dict[str, Any] = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
        return counted

    def copies(self) -> float:
        """How often the hub has sent the large files, on average."""
        sent = self.served()["sent"]
        return sum(length for path, length in sent.items() if path.endswith(".safetensors")) / self.size


@contextlib.contextmanager
def model_fleet(chosen: argparse.Namespace, prefix: str = PREFIX) -> Iterator[ModelFleet]:
    """A fleet on links of its own; nothing of it is left afterwards."""
    with links(prefix) as net, programs(prefix, chosen.work) as started:
        yield ModelFleet(started, net, chosen)


def measure(chosen: argparse.Namespace, way: str) -> Run:
    """One broadcast."""
    agents = way == "agents"
    with model_fleet(chosen) as fleet:
        fleet.start(agents=agents)
        ours = [fleet.tracker, *fleet.hosts]
        before, cpu, idle = fleet.hub.sent_bytes(), fleet.programs.cpu_s(ours), idle_s()
        seconds = fleet.snapshots(fleet.hosts)
        makespan = max(seconds.values())
        free = (idle_s() - idle) / makespan / (os.cpu_count() or 1)
        cpu, sent = fleet.programs.cpu_s(ours) - cpu, fleet.hub.sent_bytes() - before
        fleet.compare(fleet.hosts)
        heads = fleet.served()["heads"]
        return Run(
            way=way,
            hosts=len(fleet.hosts),
            bound_s=seconds_on_wire(fleet.size, min(chosen.rate_mbit, chosen.origin_mbit)),
            makespan_s=makespan,
            median_s=median(seconds.values()) or 0.0,
            copies=fleet.copies(),
            wire_copies=sent / fleet.size,
            heads_most=max(heads.values(), default=0),
            cpu_s=cpu,
            idle=free,
        )


def report(runs: Sequence[Run]) -> str:
    """A line for each run, and the medians of each way."""
    heads = [
        "a model",
        "hosts",
        "seconds",
        "bound s",
        "x bound",
        "median s",
        "copies",
        "on the wire",
        "HEADs",
        "CPU ours",
        "idle",
    ]
    rows = [
        [
            run.way,
            str(run.hosts),
            figure(run.makespan_s, 1),
            figure(run.bound_s, 1),
            figure(run.ratio),
            figure(run.median_s, 1),
            figure(run.copies, 3),
            figure(run.wire_copies, 3),
            str(run.heads_most),
            figure(run.cpu_s, 1),
            figure(100 * run.idle, 0, " %"),
        ]
        for run in runs
    ]
    notes = []
    for way in dict.fromkeys(run.way for run in runs):
        ratio = median(run.ratio for run in runs if run.way == way) or 0.0
        copies = median(run.copies for run in runs if run.way == way) or 0.0
        met = "met" if ratio <= RATIO_GOAL and copies <= COPIES_GOAL else "MISSED"
        goal = f"; goal {RATIO_GOAL} and {COPIES_GOAL}: {met}" if way == "agents" else ""
        notes.append(f"{way}, medians: {ratio:.2f} x the bound, {copies:.3f} copies{goal}")
    return render("A model by snapshot_download on each host at once", heads, rows, notes)


def options(description: str | None) -> argparse.ArgumentParser:
    """What benchmarks of a model's broadcast may be told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--rate-mbit", type=float, default=40.0)
    parser.add_argument("--origin-mbit", type=float, default=80.0)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--file-mib", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--python", type=Path, default=HUB_CLIENT, help="an environment with huggingface_hub")
    parser.add_argument("--work", default=None, help="where stores and copies are, such as /dev/shm")
    parser.add_argument("--tracker-option", action="append", default=[], metavar="WORD", help="for the tracker")
    parser.add_argument("--agent-option", action="append", default=[], metavar="WORD", help="for each agent")
    parser.add_argument("--json", metavar="FILE", help="all single runs, and the choice")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run what is named, print the table; 1 when one could not be run."""
    parser = options(__doc__)
    parser.add_argument("--way", choices=WAYS, action="append", help="[default: agents]")
    chosen = parser.parse_args(words)
    if not chosen.python.exists():
        parser.error(f"there is no {chosen.python}: make setup-all, or name a --python with huggingface_hub")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs: list[Run] = []
    failed = False
    for number in range(chosen.repeat):
        for way in chosen.way or WAYS[:1]:
            try:
                runs.append(measure(chosen, way))
                print(f"{way} {number + 1}: {runs[-1].makespan_s:.1f} s", file=sys.stderr, flush=True)
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                failed = True
                print(f"FAILED: {way}: {error}", file=sys.stderr, flush=True)
    print(report(runs))
    if chosen.json:
        choice = {name: str(value) for name, value in vars(chosen).items()}
        Path(chosen.json).write_text(json.dumps({"choice": choice, "runs": [asdict(run) for run in runs]}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
