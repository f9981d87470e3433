"""A blob to two sites with a thin, slow link between them: rate-limited network namespaces on two
bridges, and between these a link that delays every frame (wan.py).

    python -m bench.far_sites [--hosts 8 --size-mib 256 --wan-mbit 100 --rtt-ms 80]

The origin is at the first site. Prints the time of the last host of each site over the bound, and
how many copies went over the link. Needs root, iproute2, nginx and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from bench.links import Links, Node, links
from bench.processes import idle_s
from bench.shaped import P2PDIST, PULL_S, answers, seconds_on_wire, until
from bench.table import figure, render
from bench.wan import DEVICE

PREFIXES = ("p2pd-fa-", "p2pd-fb-")
HOSTS_MAX = 100
HERE = Path(__file__).parent


class Sites:
    """An origin and a tracker at the first site, agents at both."""

    def __init__(self, work: Path, sites: tuple[Links, Links], chosen: argparse.Namespace) -> None:
        self._work, self._chosen, self._processes = work, chosen, list[subprocess.Popen[bytes]]()
        near, _ = self._sites = sites
        self._origin, self._tracker = near.add("o", chosen.origin_mbit), near.add("c", 0)
        self.hosts = [[site.add(f"h{number}", chosen.rate_mbit) for number in range(chosen.hosts)] for site in sites]
        self._digest = ""

    def start(self) -> None:
        """Return when every agent is ready and its pull waits for the word."""
        bridges = [site.bridge for site in self._sites]
        words = ["--mbit", str(self._chosen.wan_mbit), "--delay-ms", str(self._chosen.rtt_ms / 2)]
        wan = subprocess.Popen([sys.executable, "-m", "bench.wan", *bridges, *words], stdout=subprocess.PIPE)
        self._processes.append(wan)
        assert wan.stdout is not None
        if wan.stdout.readline() != b"ready\n":
            raise RuntimeError("the link between the sites could not be made; see what it printed")
        blob, origin = self._work / "blob", self._work / "o"
        blob.write_bytes(os.urandom(self._chosen.size_mib << 20))
        words = [str(HERE / "yardstick" / "origin.sh"), str(Path(sys.executable).parent / "p2pdist"), str(blob)]
        self._spawn(self._origin, *words, str(origin), self._origin.address, "0", "-")
        until("the blob is pushed", lambda: bool(_digest(origin / "pushed.json")))
        self._digest = _digest(origin / "pushed.json")
        tracker = f"http://{self._tracker.address}:7070"
        words = ["tracker", "--listen", f"{self._tracker.address}:7070", "--origin", f"http://{self._origin.address}"]
        self._spawn(self._tracker, *P2PDIST, *words, "--no-discovery", "--origin-site", "near", *self._log())
        until("the tracker answers", lambda: answers(self._tracker, f"{tracker}/healthz"))
        for name, hosts in zip(("near", "far"), self.hosts, strict=True):
            for host in hosts:
                self._start_agent(host, name, tracker)
        for host in [*self.hosts[0], *self.hosts[1]]:
            until(f"{host.namespace} is ready", partial(answers, host, f"http://{host.address}:7071/readyz"))
            place = self._work / host.namespace
            words = [str(HERE / "yardstick" / "pull.py"), str(place), self._digest.removeprefix("sha256:")]
            self._spawn(host, sys.executable, *words, str(place / "out"), str(place / "done"), "wait")
        until("pulls wait", lambda: all((self._work / host.namespace / "READY").exists() for host in self._all()))

    def _all(self) -> list[Node]:
        return [*self.hosts[0], *self.hosts[1]]

    def _log(self) -> list[str]:
        return ["--log-level", "warning"]

    def _start_agent(self, host: Node, site: str, tracker: str) -> None:
        place = self._work / host.namespace
        place.mkdir()
        words = ["agent", "--tracker", tracker, "--listen", f"{host.address}:7071", "--store", str(place / "store")]
        words += ["--socket", str(place / "sock"), "--name", host.namespace, "--site", site, "--zone", site]
        self._spawn(host, *P2PDIST, *words, "--no-discovery", *self._log())

    def _spawn(self, node: Node, *words: str) -> None:
        with (self._work / f"{node.namespace}.log").open("ab") as log:
            process = subprocess.Popen(node.words(*words), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._processes.append(process)

    def crossed_bytes(self) -> int:
        """What has gone from the first site into the link between the sites."""
        words = ["ip", "-n", self._sites[0].bridge, "-s", "-j", "link", "show", "dev", DEVICE]
        found = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
        return int(found[0]["stats64"]["tx"]["bytes"])

    def origin_bytes(self) -> int:
        return self._origin.sent_bytes()

    def broadcast(self) -> list[list[float]]:
        """The seconds of each host at each site."""
        began = time.time()
        for host in self._all():
            (self._work / host.namespace / "GO").touch()
            (self._work / host.namespace / "go").write_bytes(b"")
        ends = [self._work / host.namespace / "done" for host in self._all()]
        until("all hosts have the blob", lambda: all(end.exists() for end in ends), PULL_S)
        times = [
            [(self._work / host.namespace / "done").stat().st_mtime - began for host in hosts] for hosts in self.hosts
        ]
        for host in self._all():
            words = ["cmp", str(self._work / "blob"), str(self._work / host.namespace / "out")]
            subprocess.run(words, check=True)
        return times

    def stop(self) -> None:
        """End what was started."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _digest(pushed: Path) -> str:
    """What `p2pdist blob push --json` printed; "" while it has not."""
    try:
        return str(json.loads(pushed.read_bytes())["digest"])
    except (OSError, ValueError):
        return ""


@contextlib.contextmanager
def sites(chosen: argparse.Namespace) -> Iterator[Sites]:
    """Sites on links of their own; nothing of them is left afterwards."""
    work = Path(tempfile.mkdtemp(prefix="p2pd-sites-", dir=chosen.work))
    try:
        with links(PREFIXES[0]) as near, links(PREFIXES[1], first=HOSTS_MAX + 3) as far:
            made = Sites(work, (near, far), chosen)
            try:
                yield made
            finally:
                made.stop()
    finally:
        shutil.rmtree(work, ignore_errors=True)


def measure(chosen: argparse.Namespace) -> dict[str, float]:
    """One broadcast."""
    size = chosen.size_mib << 20
    with sites(chosen) as made:
        made.start()
        crossed, origin, idle = made.crossed_bytes(), made.origin_bytes(), idle_s()
        near, far = made.broadcast()
        makespan = max(*near, *far)
        free = (idle_s() - idle) / makespan / (os.cpu_count() or 1)
        crossed, origin = made.crossed_bytes() - crossed, made.origin_bytes() - origin
    bound = seconds_on_wire(size, min(chosen.origin_mbit, chosen.rate_mbit, chosen.wan_mbit))
    return {
        "bound_s": bound,
        "near_s": max(near),
        "far_s": max(far),
        "ratio": makespan / bound,
        "copies_over_the_link": crossed / size,
        "copies_from_the_origin": origin / size,
        "idle": free,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Print the table; 1 when it could not be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8, help=f"at each site, at most {HOSTS_MAX}")
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--rate-mbit", type=float, default=100.0, help="of each host, each way")
    parser.add_argument("--origin-mbit", type=float, default=200.0)
    parser.add_argument("--wan-mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=80.0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--work", default=None, help="where stores and copies are, such as /dev/shm")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not 1 <= chosen.hosts <= HOSTS_MAX:
        parser.error(f"--hosts is from 1 to {HOSTS_MAX}")
    try:
        runs = [measure(chosen) for _ in range(chosen.repeat)]
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps(runs))
        return 0
    heads = ["two sites", "near s", "far s", "bound s", "x bound", "copies over the link", "from the origin", "idle"]
    rows = [
        [
            f"{chosen.hosts} + {chosen.hosts} hosts",
            *(figure(run[name], 1) for name in ("near_s", "far_s", "bound_s")),
            *(figure(run[name]) for name in ("ratio", "copies_over_the_link", "copies_from_the_origin")),
            figure(100 * run["idle"], 0, " %"),
        ]
        for run in runs
    ]
    print(render(f"{chosen.size_mib} MiB, {chosen.wan_mbit:g} Mbit/s and {chosen.rtt_ms:g} ms between", heads, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
