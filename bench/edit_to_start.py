"""From an edit to running programs: pack, push, and the program's first line on every agent; and
how long a package takes to be shown.

    python -m bench.edit_to_start --tree generated --files 200000 --size-mib 5000 --agents 8

The package is pulled by every agent in its first version; then one file is edited, several times,
of which the best and the median count. Beside the time stands what all processes together took of
the processors, which a busy machine changes less. Everything is a process of its own on this
machine, below TMPDIR, and is removed afterwards. Each agent has a store of its own, so 5 GB on 8
agents take 65 GB there: eight copies and the source as files, and what was packed in the layout, at
the origin and at each agent, which gives it to others. Showing needs root, or is materialized.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import trees
from bench.installation import STARTED, Installation
from bench.place import NoRoom, place
from bench.processes import ProgramFailed
from bench.showing import looks
from bench.table import render

MIB = 1 << 20
GOAL_S = 3.0
SPARE_BYTES = 128 << 10
"""Beside the changed file so much may move to each host."""

SHOWN_GOAL_S, WALK_GOAL_S, AGAIN_GOAL_S = 0.1, 0.5, 1.0

REAL_FILES, REAL_BYTES = 40_000, 1500 * MIB
"""What a real environment has, about."""

FILE_BYTES, IMAGE_BYTES = 2500, 280
"""What a file takes of the disk beside its bytes, and in the image of each version."""


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
    median = statistics.median(round_["edit_to_start_s"] for round_ in rounds)
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
    found = looks(site, reference, 3)
    return {
        "how": found[-1].how,
        "shown_s": statistics.median(look.shown_s for look in found),
        "walk_s": statistics.median(look.walk_s for look in found),
        "entries": found[-1].entries,
    }


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
    parser.add_argument("--tree", choices=trees.NAMES, default="generated")
    trees.add_size_options(parser)
    parser.add_argument("--agents", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--edits", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(words)


def needed_bytes(files: int, size: int, agents: int, edits: int) -> int:
    """What a generated tree and all that is made of it take: as files at the source and the agents;
    as packs, a third of it, in the layout, at the origin and at the agents; as an image for each
    version at each agent."""
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
            source = next(trees.made(where, chosen))
            with Installation(where, str(Path(sys.executable).parent / "p2pdist"), chosen.agents) as site:
                found = {"agents": chosen.agents, **measure(source, site, chosen.edits)}
    except (NoRoom, ProgramFailed) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found) if chosen.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
