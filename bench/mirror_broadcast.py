"""An image to many hosts at once, through their mirrors and without them, on rate-limited network
namespaces: what one host needs alone, what all need together, and how many copies the registry
sent.

    python -m bench.mirror_broadcast [--hosts 16 --rate-mbit 40 --origin-mbit 80 --size-mib 128]

Needs root, iproute2, docker-registry and skopeo.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.links import Links, Node, links
from bench.processes import idle_s
from bench.shaped import Programs, programs, together
from bench.table import figure, median, render
from p2pdist.model.image import MIRROR_PORT, path_of_upstream

PREFIX = "p2pd-mb-"
ROLLING_SHARE = 0.2
CASES = ("alone", "at once", "four layers", "rolling")
WAYS = ("registry", "mirrors")
REPOSITORY, TAG = "bench/app", "v1"
SKOPEO = ["skopeo", "--insecure-policy", "copy", "--quiet"]


@dataclass(frozen=True)
class Run:
    """One broadcast."""

    case: str
    way: str
    hosts: int
    makespan_s: float
    median_s: float
    copies: float
    """What the registry's host sent, headers of segments included, over the image."""
    ours_cpu_s: float
    """Processor time of agents and tracker between the first request and the last byte."""
    registry_cpu_s: float
    clients_cpu_s: float
    idle: float
    """The share of this machine's processor time that nothing used: at 0 the machine carries no
    more, and the seconds say nothing of the ways."""


def write_layout(directory: Path, layers: int, size: int) -> None:
    """An OCI layout of one image: `layers` layers of random bytes, `size` bytes in all."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    tars = [_tar(f"data{number}", os.urandom(size // layers)) for number in range(layers)]
    diffs = [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]
    config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": diffs}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(json.dumps(config).encode(), "config.v1+json"),
        "layers": [put(gzip.compress(tar, 0), "layer.v1.tar+gzip") for tar in tars],
    }
    entry = put(json.dumps(manifest).encode(), "manifest.v1+json")
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def _tar(name: str, data: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


class Fleet:
    """A registry, a tracker and hosts, with fresh stores."""

    def __init__(self, programs: Programs, net: Links, chosen: argparse.Namespace, hosts: int) -> None:
        self.work, self.chosen, self._programs = programs.work, chosen, programs
        self.registry = net.add("o", chosen.origin_mbit)
        self.tracker = net.add("c", 0)
        self.hosts = [net.add(f"h{number}", chosen.rate_mbit) for number in range(hosts)]
        self.upstream = f"{self.registry.address}:5000"

    def start(self, layers: int, *, mirrors: bool) -> None:
        """Start everything, and fill the registry."""
        (self.work / "config.yml").write_text(
            f"version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {self.work}/registry}}}}\n"
            f"http: {{addr: '0.0.0.0:5000'}}\n"
        )
        self._programs.spawn(self.registry, "docker-registry", "serve", f"{self.work}/config.yml")
        self._programs.answered(self.registry, f"http://{self.upstream}/v2/")
        write_layout(self.work / "layout", layers, self.chosen.size_mib << 20)
        # From inside its own namespace, so that the limit does not count.
        target = f"docker://127.0.0.1:5000/{REPOSITORY}:{TAG}"
        words = [*SKOPEO, "--dest-tls-verify=false", f"oci:{self.work}/layout", target]
        subprocess.run(self.registry.words(*words), check=True, stdin=subprocess.DEVNULL)
        shutil.rmtree(self.work / "layout")
        if mirrors:
            self._start_ours()

    def _start_ours(self) -> None:
        words = ["--upstream", f"{self.upstream}=http://{self.upstream}", "--state", f"{self.work}/state"]
        tracker = self._programs.tracker(self.tracker, *words, *self.chosen.tracker_option)
        for host in self.hosts:
            self._programs.agent(host, tracker, "--mirror", f"127.0.0.1:{MIRROR_PORT}")
        for host in self.hosts:
            self._programs.answered(host, f"http://127.0.0.1:{MIRROR_PORT}/v2/")
        self._programs.ready(self.hosts)

    def pull(self, hosts: Sequence[Node], *, mirrors: bool) -> list[float]:
        """All these at once; returns the seconds that each took."""
        mirror = f"127.0.0.1:{MIRROR_PORT}/{path_of_upstream(self.upstream)}"
        source = f"docker://{mirror if mirrors else self.upstream}/{REPOSITORY}:{TAG}"
        words = [*SKOPEO, "--src-tls-verify=false", source]
        commands = {host.name: host.words(*words, f"dir:{self.work}/out-{host.name}") for host in hosts}
        return list(together(commands, ended=lambda name: shutil.rmtree(self.work / f"out-{name}")).values())

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds so far of the registry, and of tracker and agents."""
        return self._programs.cpu_s([self.registry]), self._programs.cpu_s([self.tracker, *self.hosts])


@contextlib.contextmanager
def fleet(chosen: argparse.Namespace, hosts: int) -> Iterator[Fleet]:
    """A fleet on links of its own; nothing of it is left afterwards."""
    with links(PREFIX) as net, programs(PREFIX, chosen.work) as started:
        yield Fleet(started, net, chosen, hosts)


def measure(chosen: argparse.Namespace, case: str, way: str) -> Run:
    """One broadcast of a case."""
    hosts = 1 if case == "alone" else chosen.hosts
    mirrors = way == "mirrors"
    with fleet(chosen, hosts) as made:
        made.start(4 if case == "four layers" else 1, mirrors=mirrors)
        before, cpu, idle = made.registry.sent_bytes(), made.cpu_s(), idle_s()
        clients = _children_s()
        group = max(1, round(hosts * ROLLING_SHARE)) if case == "rolling" else hosts
        seconds: list[float] = []
        began = time.monotonic()
        for start in range(0, hosts, group):
            seconds += made.pull(made.hosts[start : start + group], mirrors=mirrors)
        makespan = time.monotonic() - began
        copies = (made.registry.sent_bytes() - before) / (chosen.size_mib << 20)
        registry, ours = (after - then for after, then in zip(made.cpu_s(), cpu, strict=True))
        free = (idle_s() - idle) / makespan / (os.cpu_count() or 1)
        clients = _children_s() - clients
    return Run(case, way, hosts, makespan, median(seconds) or 0.0, copies, ours, registry, clients, free)


def _children_s() -> float:
    """Processor seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(runs: Sequence[Run]) -> str:
    """A line for each run. The ratio is to one host alone at the registry."""
    alone = median(run.makespan_s for run in runs if run.case == "alone" and run.way == "registry")
    rows = [
        [
            f"{run.case}, {run.way}",
            str(run.hosts),
            figure(run.makespan_s, 1),
            figure(run.makespan_s / alone if alone else None),
            figure(run.median_s, 1),
            figure(run.copies),
            figure(run.ours_cpu_s, 1),
            figure(run.registry_cpu_s, 1),
            figure(run.clients_cpu_s, 1),
            figure(100 * run.idle, 0, " %"),
        ]
        for run in runs
    ]
    heads = [
        "an image",
        "hosts",
        "seconds",
        "x one alone",
        "median s",
        "copies sent",
        "CPU ours",
        "registry",
        "clients",
        "idle",
    ]
    return render("Container images, each host through skopeo", heads, rows)


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases that are named, print the table; 1 when one could not be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--rate-mbit", type=float, default=40.0)
    parser.add_argument("--origin-mbit", type=float, default=80.0)
    parser.add_argument("--size-mib", type=int, default=128)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--work", default=None, help="where stores and copies are, such as /dev/shm")
    parser.add_argument(
        "--tracker-option", action="append", default=[], metavar="WORD", help="one more word for the tracker"
    )
    parser.add_argument("--json", metavar="FILE", help="all single runs, and the choice")
    chosen = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs: list[Run] = []
    failed = False
    for case in chosen.case or CASES:
        for way in chosen.way or WAYS:
            for number in range(chosen.repeat):
                try:
                    runs.append(measure(chosen, case, way))
                    print(f"{case}, {way} {number + 1}: {runs[-1].makespan_s:.1f} s", file=sys.stderr, flush=True)
                except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                    failed = True
                    print(f"FAILED: {case}, {way}: {error}", file=sys.stderr, flush=True)
    print(report(runs))
    if chosen.json:
        Path(chosen.json).write_text(
            json.dumps({"choice": vars(chosen), "runs": [asdict(run) for run in runs]}, indent=1)
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
