"""From an edit to running programs: pack, push, and the program's first line on every agent; and how long a package takes to be shown.

    python -m bench.edit_to_start --tree generated --files 200000 --size-mib 5000 --agents 8

The package is pulled by every agent in its first version; then one file is edited, several times, of which the best and the median count.
Beside the time stands what all processes together took of the processors, which a busy machine changes less. Everything is a process of
its own on this machine, below TMPDIR, and is removed afterwards. Each agent has a store of its own, so 5 GB on 8 agents take 65 GB
there: eight copies and the source as files, and what was packed in the layout, at the origin and at each agent, which gives it to
others. Showing needs root, or is materialized.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import trees
from bench.packers import call
from bench.place import NoRoom, place
from bench.table import render

PROJECT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
READY_S = 60.0
ENDED_WITHIN_S = 30.0
STARTED = "started"
GOAL_S = 3.0
SPARE_BYTES = 128 << 10
"""Beside the changed file so much may move to each host."""

SHOWN_GOAL_S, WALK_GOAL_S, AGAIN_GOAL_S = 0.1, 0.5, 1.0

REAL_FILES, REAL_BYTES = 40_000, 1500 * MIB
"""What a real environment has, about."""

FILE_BYTES, IMAGE_BYTES = 2500, 280
"""What a file takes of the disk beside its bytes, and in the image of each version."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Installation:
    """A tracker and agents; ends what it started."""

    def __init__(self, place: Path, program: str, agents: int) -> None:
        self.place, self.program = place, program
        self.origin = f"file://{place / 'origin'}"
        self.sockets = [place / f"agent{number}.sock" for number in range(agents)]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Installation:
        url = f"127.0.0.1:{free_port()}"
        self._spawn("tracker", "--listen", url, "--origin", self.origin, "--state", str(self.place / "state"))
        for number, path in enumerate(self.sockets):
            address = ("--listen", f"127.0.0.1:{free_port()}", "--name", f"h{number}")
            store = str(self.place / f"store{number}")
            self._spawn("agent", "--tracker", f"http://{url}", *address, "--store", store, "--socket", str(path))
        for path in self.sockets:
            self._wait(path)
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + ENDED_WITHIN_S
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self, *words: str) -> None:
        with (self.place / f"{words[0]}.log").open("ab") as log:
            words = (self.program, *words, "--log-level", "warning")
            self._processes.append(subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True))

    @staticmethod
    def _wait(path: Path) -> None:
        deadline = time.monotonic() + READY_S
        words = ["curl", "-sf", "-o", "/dev/null", "--unix-socket", str(path), "http://agent/readyz"]
        while subprocess.run(words, check=False).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no agent answers on {path}")
            time.sleep(0.1)

    def ask(self, *words: str) -> Any:
        return json.loads(call(self.program, *words, "--json"))

    def start(self, reference: str) -> list[float]:
        """Run a package on every agent at the same time; when the first line of each program came, on the monotonic clock."""
        with ThreadPoolExecutor(len(self.sockets)) as pool:
            return list(pool.map(lambda path: self._first_line(path, reference), self.sockets))

    def _first_line(self, path: Path, reference: str) -> float:
        words = (self.program, "run", "--socket", str(path), reference)
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line, came = process.stdout.readline(), time.monotonic()
            _, told = process.communicate()
        if line.strip() != STARTED or process.returncode:
            raise RuntimeError(f"a program did not start: {line}{told}")
        return came

    def cpu_s(self) -> tuple[float, float]:
        """Seconds that all commands that have ended took of the processors; and tracker and agents."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime, sum(_cpu_s(process.pid) for process in self._processes)

    def everywhere(self, *words: str) -> list[str]:
        """Run a verb with the socket of every agent, at the same time; what each wrote."""
        with ThreadPoolExecutor(len(self.sockets)) as pool:
            return list(
                pool.map(lambda path: call(self.program, words[0], "--socket", str(path), *words[1:]), self.sockets)
            )


def _cpu_s(pid: int) -> float:
    """User and system time of a process (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(source: Path, site: Installation, edits: int) -> dict[str, Any]:
    """One version to all, edits, each next version started everywhere."""
    entrypoint = json.dumps(["/bin/echo", STARTED])
    pack = ("--format", "tree", "--layout", str(site.place / "layout"), "--entrypoint", entrypoint)
    push = ("--layout", str(site.place / "layout"), "--origin", site.origin)
    site.ask("pack", str(source), "-t", "app:v1", *pack)
    site.ask("push", "app:v1", *push)
    started = time.monotonic()
    site.everywhere("pull", "app:v1", "--json")
    first_s = time.monotonic() - started
    time.sleep(1.1)
    site.ask("pack", str(source), "-t", "app:v1", *pack)  # what was new at the first packing is believed from here on
    rounds = [_edit(source, site, f"app:v{number}", pack, push) for number in range(2, 2 + edits)]
    best = min(rounds, key=lambda each: each["edit_to_start_s"])
    median = statistics.median(each["edit_to_start_s"] for each in rounds)
    time.sleep(1.1)
    last = f"app:v{1 + edits}"
    again(source, site, last, pack)  # still reads what was edited last
    repacked = [again(source, site, last, pack) for _ in range(edits)]
    return {
        "first_pull_s": first_s,
        **best,
        "edit_to_start_median_s": median,
        "edits": edits,
        **sorted(repacked, key=lambda each: each["again_s"])[len(repacked) // 2],
        **shown(site, last),
    }


def _edit(source: Path, site: Installation, reference: str, pack: Sequence[str], push: Sequence[str]) -> dict[str, Any]:
    """An edit, and what it takes to start what came of it everywhere."""
    changed = trees.edit(source)
    cpu, started = [site.cpu_s()], time.monotonic()
    packed = site.ask("pack", str(source), "-t", reference, *pack)
    cpu.append(site.cpu_s())
    pushed = site.ask("push", reference, *push)
    pushed_s = time.monotonic() - started
    cpu.append(site.cpu_s())
    started_s = max(site.start(reference)) - started
    cpu.append(site.cpu_s())
    moved = site.ask("pull", "--socket", str(site.sockets[0]), reference)
    commands = [after[0] - before[0] for before, after in pairwise(cpu)]
    return {
        "changed_bytes": changed,
        "sent_bytes": pushed["bytes_sent"],
        "moved_bytes": moved["bytes_total"] - moved["bytes_cached"] or pushed["bytes_sent"],
        "pack_s": packed["seconds"],
        "pushed_s": pushed_s,
        "edit_to_start_s": started_s,
        "pack_cpu_s": commands[0],
        "push_cpu_s": commands[1],
        "run_cpu_s": commands[2],
        "agents_cpu_s": cpu[-1][1] - cpu[0][1],
    }


def again(source: Path, site: Installation, reference: str, pack: Sequence[str]) -> dict[str, Any]:
    """Packing once more what has not changed."""
    before, started = site.cpu_s()[0], time.monotonic()
    site.ask("pack", str(source), "-t", reference, *pack)
    return {"again_s": time.monotonic() - started, "again_cpu_s": site.cpu_s()[0] - before}


def shown(site: Installation, reference: str) -> dict[str, Any]:
    """Mount, walk and unmount by the first agent, warm."""
    target = site.place / "shown"
    path = str(site.sockets[0])
    mounts, walks = [], []
    how, count = "", 0
    for _ in range(3):
        words = ["curl", "-s", "--unix-socket", path, "http://agent/v1/mounts", "-w", "\n%{time_total}"]
        body = json.dumps({"package": reference, "path": str(target)})
        answer, _, seconds = call(*words, "-d", body).rpartition("\n")
        how = json.loads(answer)["how"]
        mounts.append(float(seconds))
        started = time.monotonic()
        count = len(call("find", str(target)).splitlines())
        walks.append(time.monotonic() - started)
        call(site.program, "umount", str(target), "--socket", path)
    return {"how": how, "shown_s": statistics.median(mounts), "walk_s": statistics.median(walks), "entries": count}


def table(found: dict[str, Any]) -> str:
    per_100k = found["walk_s"] * 100_000 / found["entries"]
    rows = [
        ["first version pulled by all", f"{found['first_pull_s']:.2f} s", "-"],
        ["edited: packed", f"{found['pack_s']:.2f} s", "-"],
        ["edited: packed and pushed", f"{found['pushed_s']:.2f} s", "-"],
        ["edited: started everywhere", f"{found['edit_to_start_s']:.2f} s", f"{GOAL_S:g} s"],
        [f"the same, median of {found['edits']}", f"{found['edit_to_start_median_s']:.2f} s", "-"],
        ["processors: pack", f"{found['pack_cpu_s']:.2f} s", "-"],
        ["processors: push", f"{found['push_cpu_s']:.2f} s", "-"],
        [f"processors: run, {found['agents']} times", f"{found['run_cpu_s']:.2f} s", "-"],
        ["processors: tracker and agents", f"{found['agents_cpu_s']:.2f} s", "-"],
        ["packed again, nothing changed", f"{found['again_s']:.2f} s", f"{AGAIN_GOAL_S:g} s"],
        ["processors: packed again", f"{found['again_cpu_s']:.2f} s", "-"],
        ["bytes to each host", f"{found['moved_bytes']:,}", f"{found['changed_bytes'] + SPARE_BYTES:,}"],
        [f"shown ({found['how']})", f"{found['shown_s'] * 1000:.1f} ms", f"{SHOWN_GOAL_S * 1000:g} ms"],
        ["walked by find, per 100,000", f"{per_100k:.2f} s", f"{WALK_GOAL_S:g} s"],
    ]
    return render(f"From an edit to running programs on {found['agents']} agents", ("what", "measured", "goal"), rows)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.edit_to_start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", choices=("real", "generated"), default="generated")
    parser.add_argument("--files", type=int, default=200_000, help="of the generated tree [%(default)s]")
    parser.add_argument("--size-mib", type=int, default=5000, help="of the generated tree [%(default)s]")
    parser.add_argument("--agents", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--edits", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(words)


def needed_bytes(files: int, size: int, agents: int, edits: int) -> int:
    """What a generated tree and all that is made of it take: as files at the source and the agents; as packs, a third of it, in the layout,
    at the origin and at the agents; as an image for each version at each agent."""
    copies = (1 + agents) * (size + FILE_BYTES * files)
    return copies + (2 + agents) * size // 3 + agents * (2 + edits) * IMAGE_BYTES * files


def main() -> int:
    chosen = arguments()
    generated = chosen.tree == "generated"
    files, size = (chosen.files, chosen.size_mib * MIB) if generated else (REAL_FILES, REAL_BYTES)
    try:
        with place("p2pdist-start-", needed=needed_bytes(files, size, chosen.agents, chosen.edits)) as where:
            # As installed programs have them: nothing is compiled at every start.
            os.environ |= {"PYTHONPYCACHEPREFIX": str(where / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}
            if generated:
                source = trees.generated(where / "generated", files=files, size=size)
            else:
                source = trees.environment(where / "environment", PROJECT)
            with Installation(where, str(Path(sys.executable).parent / "p2pdist"), chosen.agents) as site:
                found = {"agents": chosen.agents, **measure(source, site, chosen.edits)}
    except NoRoom as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found) if chosen.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
