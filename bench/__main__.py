"""`python -m bench`: every benchmark that runs on this machine, one after the other, each with the bound and the ratio to it.

The broadcast over rate-limited network namespaces needs root and the yardstick's swarm.py: give its path with --yardstick.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
P2PDIST = Path(sys.executable).parent / "p2pdist"


def run(title: str, words: list[str]) -> bool:
    """Run one benchmark; returns whether it succeeded."""
    print(f"\n== {title}\n   {' '.join(words)}", flush=True)
    return subprocess.run(words, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--yardstick", type=Path, help="swarm.py of the yardstick, for the broadcast (root)")
    parser.add_argument("--repeat", default="3", help="runs of each broadcast")
    parser.add_argument("--full", action="store_true", help="also simulate 2,600 hosts (minutes)")
    chosen = parser.parse_args()
    simulate = [str(P2PDIST), "simulate", "--size", "3GB", "--nic", "300MB/s", "--seed", "1", "--hosts"]
    done = [
        run("one agent's stream to another on loopback", [sys.executable, str(HERE / "loopback.py")]),
        run("300 hosts, 3 GB at 300 MB/s, simulated", [*simulate, "300"]),
    ]
    if chosen.full:
        done.append(run("2,600 hosts, 3 GB at 300 MB/s, simulated", [*simulate, "2600"]))
    if chosen.yardstick:
        links = [
            "--hosts",
            "24",
            "--size-mib",
            "64",
            "--rate-mbit",
            "40",
            "--origin-mbit",
            "80",
            "--repeat",
            chosen.repeat,
        ]
        done.append(
            run("24 hosts, 64 MiB, 40 Mbit/s links", [str(HERE / "yardstick/run.sh"), str(chosen.yardstick), *links])
        )
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
