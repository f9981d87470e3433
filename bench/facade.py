"""A program reads an object through an agent's S3 interface on loopback, beside nginx -> curl in
the same run.

    python -m bench.facade [--size-mib 512] [--rounds 5] [--json]

A tracker and an agent in processes of their own, over a directory as the origin. The object is a
file of a package of trees, and a blob; curl reads it whole, over the same file each time, as it
does from nginx. Everything is in the store and in the page cache. Each row is the median of the
rounds, which the three take in turns; the goal is a ratio of 0.8 to nginx.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.loopback import NGINX, fill, process_cpu_s
from bench.mirror import P2PDIST, free_port, running

GOAL = 0.8
READY_S = 60.0
GIB = 1 << 30


def command(*words: object) -> dict[str, Any]:
    done = subprocess.run([P2PDIST, *map(str, words), "--json"], check=True, capture_output=True, text=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def ready(url: str) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{url} does not answer")


def curl(url: str, destination: Path, size: int) -> float:
    """Seconds in which curl reads a URL over a file."""
    with destination.open("r+b") as output:
        began = time.perf_counter()
        subprocess.run(["curl", "-sS", "--fail", url], stdout=output, check=True)
        took = time.perf_counter() - began
        assert output.tell() == size, "curl shares our offset, which is now at the end"
    return took


def measure(directory: Path, size: int, rounds: int) -> dict[str, Any]:
    source, origin, layout = directory / "source", f"file://{directory / 'origin'}", directory / "layout"
    for made in (source, directory / "origin", directory / "run"):
        made.mkdir()
    fill(source / "object", size)
    fill(directory / "destination", size)
    command("pack", source, "-t", "bench:v1", "--format", "tree", "--layout", layout)
    command("push", "bench:v1", "--origin", origin, "--layout", layout)
    digest = command("blob", "push", source / "object", "--origin", origin)["digest"]
    settings = directory / "s3.toml"
    settings.write_text(f'[[bucket]]\nname = "blobs"\nblobs = {{ "object" = "{digest}" }}\n')
    tracker, port, s3, web = (free_port() for _ in range(4))
    (directory / "run" / "nginx.conf").write_text(NGINX.format(run=directory / "run", port=web, root=source, tls=""))
    agent_words = {
        "--tracker": f"http://127.0.0.1:{tracker}",
        "--listen": f"127.0.0.1:{port}",
        "--mirror": "off",
        "--store": directory / "store",
        "--socket": directory / "agent.sock",
        "--transport": "trees",
        "--s3": s3,
        "--bucket": "files=bench:v1",
        "--s3-settings": settings,
    }
    with ExitStack() as stack:
        state = directory / "state"
        stack.enter_context(
            running("tracker", "--listen", f"127.0.0.1:{tracker}", "--origin", origin, "--state", str(state))
        )
        agent = stack.enter_context(running("agent", *(str(word) for pair in agent_words.items() for word in pair)))
        nginx = subprocess.Popen(
            [
                "nginx",
                "-p",
                directory / "run",
                "-c",
                directory / "run" / "nginx.conf",
                "-e",
                directory / "run" / "error.log",
            ]
        )
        stack.callback(nginx.wait)
        stack.callback(nginx.terminate)
        ready(f"http://127.0.0.1:{port}/readyz")
        ready(f"http://127.0.0.1:{web}/object")
        urls = {
            "nginx": (f"http://127.0.0.1:{web}/object", nginx.pid),
            "file": (f"http://127.0.0.1:{s3}/files/object", agent.pid),
            "blob": (f"http://127.0.0.1:{s3}/blobs/object", agent.pid),
        }
        command("pull", "bench:v1", "--socket", directory / "agent.sock")
        took: dict[str, list[float]] = {name: [] for name in urls}
        used: dict[str, list[float]] = {name: [] for name in urls}
        for turn in range(rounds + 1):
            for name, (url, pid) in urls.items():
                before = process_cpu_s(pid)
                seconds = curl(url, directory / "destination", size)
                if turn:  # the first one fetches what is missing
                    took[name].append(seconds)
                    used[name].append((process_cpu_s(pid) - before) * GIB / size)
        assert (directory / "destination").read_bytes() == (source / "object").read_bytes()
    speeds = {name: size / statistics.median(each) for name, each in took.items()}
    return {
        "gb_s": {name: round(speed / 1e9, 2) for name, speed in speeds.items()},
        "cpu_s_gib": {name: round(statistics.median(each), 3) for name, each in used.items()},
        "ratio": {name: round(speeds[name] / speeds["nginx"], 2) for name in ("file", "blob")},
        "goal": GOAL,
        "size": size,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where files are made [default: the temporary directory]")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.directory, prefix="facade-") as directory:
        Path(directory).chmod(0o755)
        figures = measure(Path(directory), chosen.size_mib << 20, chosen.rounds)
    figures["met"] = min(figures["ratio"].values()) >= GOAL
    if chosen.json:
        print(json.dumps(figures))
    else:
        for name, speed in figures["gb_s"].items():
            print(f"{name:6} {speed:6.2f} GB/s, sender {figures['cpu_s_gib'][name]:.3f} CPU s/GiB")
        print(f"to nginx: {figures['ratio']} (goal {GOAL} {'met' if figures['met'] else 'MISSED'})")
    return 0 if figures["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
