"""Tensors in memory while a broadcast still brings the model: a client of S3 on one host reads
through its agent, on rate-limited network namespaces.

    python -m bench.stream_tensors [--client runai --client boto3] [--hosts 8 --repeat 3]

A package of trees with a model of safetensors files goes from a web server to all hosts at once. On
the first host Run:ai's model streamer, or boto3, which reads a tensor a request, takes all tensors
through the S3 interface. It begins with the broadcast. Prints how much of the model had come to the
host when its first tensor was there (goal: a tenth), and when the last one was over when the
broadcast to the host had ended (goal: 1.10). Tensors are compared. Needs root, iproute2, and boto3
or runai-model-streamer[s3] in this environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.links import Node, links
from bench.processes import idle_s
from bench.shaped import Programs, programs, seconds_on_wire
from bench.table import figure, median, render
from p2pdist.agent.api.client import LocalClient
from p2pdist.cli.verbs.demo.model.weights import write_model
from p2pdist.model.messages import PullRequest

PREFIX = "p2pd-st-"
REFERENCE, BUCKET = "bench/model:v1", "models"
PORT, S3_PORT = 8000, 7074
FIRST_GOAL, LAST_GOAL = 0.10, 1.10
CLIENTS = {"runai": "runai_model_streamer", "boto3": "boto3"}
READER = Path(__file__).with_name("tensor_reader.py")


def start(work: Programs, origin: Node, tracker: Node, hosts: Sequence[Node], chosen: argparse.Namespace) -> int:
    """Publish the model and start everything; returns the model's bytes."""
    place = work.work
    for _ in write_model(place / "model", files=chosen.files, file_bytes=chosen.file_mib << 20, tensors=chosen.tensors):
        pass
    (place / "origin").mkdir()
    layout = ["--layout", str(place / "layout")]
    p2pdist = [sys.executable, "-m", "p2pdist.cli.main"]
    for words in (
        ["pack", str(place / "model"), "-t", REFERENCE, "--format", "tree", *layout],
        ["push", REFERENCE, "--origin", f"file://{place / 'origin'}", *layout],
    ):
        subprocess.run([*p2pdist, *words], check=True, stdout=subprocess.DEVNULL)
    url = f"http://{origin.address}:{PORT}"
    served = ["--directory", str(place / "origin"), "--listen", f"{origin.address}:{PORT}"]
    work.spawn(origin, sys.executable, "-m", "p2pdist.cli.verbs.demo.origin", *served)
    work.answered(origin, f"{url}/-/served")
    fleet = work.tracker(tracker, "--origin", url)
    for number, host in enumerate(hosts):
        s3 = ["--s3", str(S3_PORT), "--bucket", f"{BUCKET}={REFERENCE}"] if not number else []
        work.agent(host, fleet, "--mirror", "off", *s3)
    work.ready(hosts)
    return sum(path.stat().st_size for path in (place / "model").glob("*.safetensors"))


def measure(chosen: argparse.Namespace, client: str) -> dict[str, float]:
    """One broadcast."""
    with links(PREFIX) as net, programs(PREFIX, chosen.work) as work:
        origin, tracker = net.add("o", chosen.origin_mbit), net.add("c", 0)
        hosts = [net.add(f"h{number}", chosen.rate_mbit) for number in range(chosen.hosts)]
        size = start(work, origin, tracker, hosts, chosen)
        words = [sys.executable, str(READER), client, BUCKET, str(S3_PORT), f"http://{hosts[0].address}:7071/metrics"]
        reader = subprocess.Popen(
            hosts[0].words(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "no_proxy": "*"}
        )
        try:
            assert reader.stdin is not None and reader.stdout is not None
            if reader.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{client} could not be started; see what it printed")
            before, idle, began = origin.sent_bytes(), idle_s(), time.monotonic()
            ends: dict[str, float] = {}
            pulls = [threading.Thread(target=_pull, args=(work, host, ends)) for host in hosts]
            for pull in pulls:
                pull.start()
            printed, _ = reader.communicate(b"go\n")
            for pull in pulls:
                pull.join()
        finally:
            reader.kill()
            reader.wait()
        if reader.returncode or len(ends) < len(hosts):
            raise RuntimeError(f"{client} ended with {reader.returncode}, {len(ends)} of {len(hosts)} pulls are done")
        makespan = max(ends.values()) - began
        told: dict[str, Any] = json.loads(printed)
        expected = subprocess.run(
            [sys.executable, str(READER), "files", str(work.work / "model")], check=True, capture_output=True
        )
        if told["tensors"] != json.loads(expected.stdout)["tensors"]:
            raise RuntimeError(f"{client} got other tensors than were published")
        here = ends[hosts[0].namespace] - began
        return {
            "first_s": told["first"] - began,
            "first_share": told["first_bytes"] / size,
            "last_s": told["last"] - began,
            "here_s": here,
            "ratio": (told["last"] - began) / here,
            "makespan_s": makespan,
            "bound_s": seconds_on_wire(size, min(chosen.rate_mbit, chosen.origin_mbit)),
            "copies": (origin.sent_bytes() - before) / size,
            "idle": (idle_s() - idle) / makespan / (os.cpu_count() or 1),
        }


def _pull(work: Programs, host: Node, ends: dict[str, float]) -> None:
    done = LocalClient(work.work / host.namespace / "sock").pull(PullRequest(package=REFERENCE))
    if done.state == "done":
        ends[host.namespace] = time.monotonic()


def report(runs: Sequence[tuple[str, dict[str, float]]]) -> str:
    """A line for each run, and the medians of each client."""
    heads = [
        "tensors by",
        "first s",
        "had come",
        "last s",
        "all here s",
        "last / here",
        "makespan",
        "bound s",
        "copies",
        "idle",
    ]
    rows = [
        [
            client,
            figure(run["first_s"], 1),
            figure(100 * run["first_share"], 1, " %"),
            *(figure(run[name], 1) for name in ("last_s", "here_s")),
            figure(run["ratio"]),
            *(figure(run[name], 1) for name in ("makespan_s", "bound_s")),
            figure(run["copies"]),
            figure(100 * run["idle"], 0, " %"),
        ]
        for client, run in runs
    ]
    notes = []
    for name in dict.fromkeys(client for client, _ in runs):
        share = median(run["first_share"] for client, run in runs if client == name) or 0.0
        ratio = median(run["ratio"] for client, run in runs if client == name) or 0.0
        met = "met" if share < FIRST_GOAL and ratio <= LAST_GOAL else "MISSED"
        notes.append(
            f"{name}, medians: {100 * share:.1f} %, {ratio:.2f}; goal {100 * FIRST_GOAL:.0f} %, {LAST_GOAL}: {met}"
        )
    return render("Tensors in memory while the broadcast brings them", heads, rows, notes)


def main(words: Sequence[str] | None = None) -> int:
    """Run what is named, print the table; 1 when one could not be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", choices=CLIENTS, action="append", help="[default: those that are installed]")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate-mbit", type=float, default=40.0)
    parser.add_argument("--origin-mbit", type=float, default=80.0)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--file-mib", type=int, default=32)
    parser.add_argument("--tensors", type=int, default=8, help="of each file")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--work", default=None, help="where stores are, such as /dev/shm")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    installed = [name for name, module in CLIENTS.items() if importlib.util.find_spec(module) is not None]
    runs: list[tuple[str, dict[str, float]]] = []
    failed = False
    for _ in range(chosen.repeat):
        for client in chosen.client or installed:
            try:
                runs.append((client, measure(chosen, client)))
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                failed = True
                print(f"FAILED: {client}: {error}", file=sys.stderr, flush=True)
    print(json.dumps(runs) if chosen.json else report(runs))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
