"""From `p2pdist run` to the program's first line over a link, on a cold host: eager, lazy, and lazy
with the trace of a start on another host.

    sudo python -m bench.lazy --rate-mbit 400 --repeat 3

The package is a directory of installed wheels, this project's environment unless `--source` names
another, and the program imports some of it. Origin, tracker and a seed are in one network
namespace, the host that runs the program in another, behind a link of the given rate (tbf). Every
run has an agent with an empty store and begins with an empty page cache. Traces are kept by the
package's name, so each lazy start has a name of its own, and those with a trace share one. Beside
the time stand the bytes that came over the link before the first line. Everything lies below TMPDIR
and is removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.table import render

MIB = 1 << 20
NEAR, FAR = "p2plazy-a", "p2plazy-b"
NEAR_ADDRESS, FAR_ADDRESS = "10.77.0.1", "10.77.0.2"
PROGRAM = "import os, sys; sys.path.insert(0, os.environ['P2PDIST_ROOT']); import {modules}; print('ready', flush=True)"
READY_S = 30.0
P2PDIST = (sys.executable, "-m", "p2pdist.cli.main")


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


@contextmanager
def link(rate_mbit: float) -> Iterator[None]:
    """Two namespaces with a link between them."""
    try:
        for space in (NEAR, FAR):
            ip(f"netns add {space}")
            ip(f"-n {space} link set lo up")
        ip(f"link add near netns {NEAR} type veth peer name far netns {FAR}")
        for space, name, address in ((NEAR, "near", NEAR_ADDRESS), (FAR, "far", FAR_ADDRESS)):
            ip(f"-n {space} addr add {address}/24 dev {name}")
            ip(f"-n {space} link set {name} up")
            shape = f"tc -n {space} qdisc add dev {name} root tbf rate {rate_mbit}mbit burst 256kb latency 50ms"
            subprocess.run(shape.split(), check=True)
        yield
    finally:
        for space in (NEAR, FAR):
            subprocess.run(["ip", "netns", "del", space], check=False)


def within(space: str, words: Sequence[str]) -> list[str]:
    """A command in a namespace; `ip netns exec` would give it mounts of its own as well."""
    return ["nsenter", f"--net=/run/netns/{space}", *words]


def received_bytes() -> int:
    """Bytes that came over the link."""
    shown = subprocess.run(
        ["ip", "-n", FAR, "-j", "-s", "link", "show", "dev", "far"], capture_output=True, text=True, check=True
    )
    return int(json.loads(shown.stdout)[0]["stats64"]["rx"]["bytes"])


@contextmanager
def daemon(space: str, log: Path, *words: str, socket: Path | None = None) -> Iterator[None]:
    """A tracker or an agent; with `socket` it is awaited there."""
    with log.open("ab") as output:
        process = subprocess.Popen(within(space, [*P2PDIST, *words]), stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + READY_S
        while socket is not None and not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        yield
    finally:
        process.terminate()
        process.wait()


def first_line(place: Path, number: int, *options: str, package: str = "app") -> tuple[float, int]:
    """Seconds from the command to the first line on a cold host, and bytes that came meanwhile."""
    socket, store = place / f"cold{number}.sock", place / f"cold{number}"
    words = ("agent", "--tracker", f"http://{NEAR_ADDRESS}:7070", "--listen", f"{FAR_ADDRESS}:7071")
    words += ("--store", str(store), "--socket", str(socket), "--name", f"cold{number}", "--drain-seconds", "0")
    with daemon(FAR, place / "cold.log", *words, socket=socket):
        Path("/proc/sys/vm/drop_caches").write_text("3")
        before, started = received_bytes(), time.monotonic()
        run = [*P2PDIST, "run", *options, "--socket", str(socket), f"{package}:v1"]
        with subprocess.Popen(within(FAR, run), stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            line = program.stdout.readline()
            took_s, moved = time.monotonic() - started, received_bytes() - before
        if line != "ready\n" or program.returncode:
            raise SystemExit(f"the program ended with {program.returncode}: {(place / 'cold.log').read_text()[-2000:]}")
        time.sleep(1.0)  # a lazy view goes before its agent
    shutil.rmtree(store)
    return took_s, moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(sysconfig.get_path("purelib")))
    parser.add_argument("--modules", default="numpy, aiohttp, zstandard")
    parser.add_argument("--rate-mbit", type=float, default=400.0)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("namespaces and mounts need root")
    # Not below a deep TMPDIR: a Unix socket's path may have 107 bytes.
    place = Path(tempfile.mkdtemp(prefix="p2plazy-"))
    layout = ("--layout", str(place / "layout"))
    entrypoint = json.dumps([sys.executable, "-I", "-S", "-c", PROGRAM.format(modules=args.modules)])
    try:
        packing = [*P2PDIST, "pack", str(args.source), "-t", "app:v1", "--format", "tree", "--entrypoint", entrypoint]
        subprocess.run([*packing, *layout], check=True, stdout=subprocess.DEVNULL)
        origin = f"file://{place / 'origin'}"
        names = ["app", "traced", *(f"app{number}" for number in range(args.repeat))]
        for name in names:  # the same package each
            if name != "app":
                subprocess.run([*P2PDIST, "tag", "app:v1", f"{name}:v1", *layout], check=True)
            subprocess.run([*P2PDIST, "push", f"{name}:v1", "--origin", origin, *layout], check=True)
        seed = ("agent", "--tracker", f"http://{NEAR_ADDRESS}:7070", "--listen", f"{NEAR_ADDRESS}:7071")
        seed += ("--store", str(place / "seed"), "--socket", str(place / "seed.sock"), "--name", "seed")
        tracker = ("tracker", "--listen", f"{NEAR_ADDRESS}:7070", "--origin", origin)
        found: dict[str, list[tuple[float, int]]] = {"eager": [], "lazy": [], "lazy, second host with trace": []}
        with (
            link(args.rate_mbit),
            daemon(NEAR, place / "tracker.log", *tracker, "--state", str(place / "state")),
            daemon(NEAR, place / "seed.log", *seed, socket=place / "seed.sock"),
        ):
            subprocess.run([*P2PDIST, "pull", "app:v1", "--socket", str(place / "seed.sock")], check=True)
            first_line(place, 0, "--lazy", package="traced")
            for number in range(args.repeat):  # by turns: a machine that changes its speed is fair to all
                found["eager"].append(first_line(place, 3 * number + 1))
                found["lazy"].append(first_line(place, 3 * number + 2, "--lazy", package=f"app{number}"))
                found["lazy, second host with trace"].append(
                    first_line(place, 3 * number + 3, "--lazy", package="traced")
                )
        rows = [
            (
                name,
                f"{statistics.median(seconds for seconds, _ in runs):.2f}",
                f"{min(seconds for seconds, _ in runs):.2f}",
                f"{statistics.median(moved for _, moved in runs) / MIB:.1f}",
            )
            for name, runs in found.items()
        ]
        print(render(f"{args.rate_mbit:g} Mbit/s", ("way", "first line s", "best s", "MiB before it"), rows))
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
