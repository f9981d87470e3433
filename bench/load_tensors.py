"""Weights into the memory of several processes of a host: p2pdist.load beside safetensors' own, of
a file that is complete and in the page cache.

    python -m bench.load_tensors [--processes 4 --size-mib 512 --rounds 5]

Each process loads all tensors and reads every value, all at once. Memory is the sum over the
processes of what their proportional set size (PSS) grew by, over the size of the file: 1.00 is one
copy for all. The time is that of the slowest process, the median of rounds that the two take in
turns. The goal is one copy, and 1.1 times safetensors. Needs torch (make setup-all).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from p2pdist.cli.verbs.demo.model.weights import write_model

LOADERS = ("p2pdist", "safetensors")
TIME_GOAL, MEMORY_GOAL = 1.1, 1.05


def child(loader: str, path: str) -> None:
    """Load at a line, report, and hold everything until the next one."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    torch.set_num_threads(1)
    if loader == "p2pdist":
        from p2pdist.load import safetensors

        def load() -> dict[str, Any]:
            return dict(safetensors(path))
    else:
        from safetensors.torch import load_file  # type: ignore[import-not-found, unused-ignore]

        def load() -> dict[str, Any]:
            return load_file(path)

    int(torch.ones(1 << 10, dtype=torch.int32).sum())
    print("ready", flush=True)
    sys.stdin.readline()
    before, began = pss_kib(), time.monotonic()
    tensors = load()
    total = sum(int(tensor.sum()) for tensor in tensors.values())
    took = time.monotonic() - began
    print("read", flush=True)
    sys.stdin.readline()
    print(json.dumps({"seconds": took, "sum": total, "kib": pss_kib() - before}), flush=True)
    sys.stdin.readline()


def pss_kib() -> int:
    """The proportional set size of this process (proc_pid_smaps(5))."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def together(loader: str, path: Path, count: int) -> list[dict[str, Any]]:
    """What so many processes report that load at once."""
    words = [sys.executable, "-m", "bench.load_tensors", "--child", loader, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(words, text=True, **pipes) for _ in range(count)]
    try:
        for told in ("ready", "read"):  # each says so before any is told to go on
            for process in processes:
                assert process.stdout is not None
                if process.stdout.readline() != f"{told}\n":
                    raise RuntimeError(f"a process that loads by {loader} failed; see what it printed")
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in processes if process.stdout is not None]
    finally:
        for process in processes:
            process.communicate("end\n")


def measure(size: int, count: int, rounds: int, directory: Path) -> dict[str, Any]:
    """The figures of both loaders."""
    for _ in write_model(directory, files=1, file_bytes=size, tensors=32):
        pass
    (path,) = directory.glob("*.safetensors")
    path.read_bytes()
    seconds: dict[str, list[float]] = {name: [] for name in LOADERS}
    copies: dict[str, list[float]] = {name: [] for name in LOADERS}
    sums = set()
    for _ in range(rounds):
        for name in LOADERS:
            told = together(name, path, count)
            seconds[name].append(max(one["seconds"] for one in told))
            copies[name].append(sum(one["kib"] for one in told) * 1024 / size)
            sums |= {one["sum"] for one in told}
    if len(sums) != 1:
        raise RuntimeError("the loaders do not read the same values")
    return {
        "seconds": {name: round(statistics.median(took), 3) for name, took in seconds.items()},
        "copies": {name: round(statistics.median(each), 3) for name, each in copies.items()},
        "ratio": round(statistics.median(seconds["p2pdist"]) / statistics.median(seconds["safetensors"]), 3),
    }


def main() -> int:
    """Measure and print; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", default=None, help="where the file is made [default: the temporary directory]")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("LOADER", "FILE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(*chosen.child)
        return 0
    with tempfile.TemporaryDirectory(dir=chosen.work, prefix="load-") as directory:
        figures = measure(chosen.size_mib << 20, chosen.processes, chosen.rounds, Path(directory))
    met = figures["ratio"] <= TIME_GOAL and figures["copies"]["p2pdist"] <= MEMORY_GOAL
    if chosen.json:
        print(json.dumps({**figures, "met": met}))
    else:
        for name in LOADERS:
            print(f"{name:12} {figures['seconds'][name]:7.3f} s  {figures['copies'][name]:5.2f} copies in memory")
        print(
            f"time {figures['ratio']:.2f} x safetensors; goal {TIME_GOAL} and {MEMORY_GOAL}: {'met' if met else 'MISSED'}"
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
