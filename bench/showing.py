"""How long a package of one tree takes to be mounted from a warm store, by each mount method, and
to be walked.

    sudo python -m bench.showing --tree generated --how erofs hardlink
    sudo python -m bench.showing --tree environment --on here btrfs --json

One agent has pulled the package. For each method the agent mounts it at one directory after the
other, and find(1) walks it. The first time counts apart, since it may make files that later times
find, such as the EROFS image; of the later times the median counts. Mounted views are removed after
all measurements: ext4 without a journal skips the inodes of recently removed files whenever it
makes one (recently_deleted in Linux, fs/ext4/ialloc.c), which would be measured instead. Copies are
removed at once, for want of room.

The views lie beside the agent's store: where TMPDIR points (`here`), or on a Btrfs of its own in
memory (`btrfs`). A method that a filesystem does not have is reported. Needs root, and btrfs-progs
for `btrfs`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import trees
from bench.btrfs import Btrfs, device_image
from bench.installation import STARTED, Installation
from bench.packers import call
from bench.place import NoRoom, available_memory, place
from bench.processes import ProgramFailed
from bench.table import figure, render
from p2pdist.store.disk import sync_filesystem

PROGRAM = str(Path(sys.executable).parent / "p2pdist")
MIB = 1 << 20
WAYS = ("erofs", "reflink", "hardlink", "copy")
SHOWN_GOALS_S = {"erofs": 0.1}
FILE_GOALS_US = {"hardlink": 15.0}
WALK_GOAL_S = 0.5
"""For 100,000 files and directories."""
ENVIRONMENT_BYTES, ENVIRONMENT_FILES = 1500 * MIB, 60_000
FILE_BYTES = 6000
"""What a file takes of the disk beside its bytes: as a file of the source, of the store and of a
copy."""


class Refused(Exception):
    """A way cannot be taken here; the text says why."""


@dataclass(frozen=True)
class Look:
    """A package shown once: by which way, seconds until it was there and until find(1) had walked
    it, and how much that found."""

    how: str
    shown_s: float
    walk_s: float
    entries: int


@dataclass(frozen=True)
class Row:
    """One way on one filesystem; seconds, `walk_s` and `shown_s` medians without the first time.
    `refused` says why there are none."""

    tree: str
    on: str
    how: str
    files: int
    entries: int = 0
    first_s: float | None = None
    shown_s: float | None = None
    walk_s: float | None = None
    refused: str = ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(site: Installation, reference: str, how: str, target: Path) -> Look:
    """Show a package by the first agent, and walk it. Raises Refused."""
    path = str(site.sockets[0])
    words = ["curl", "-s", "--unix-socket", path, "http://agent/v1/mounts", "-w", "\n%{time_total}"]
    body = json.dumps({"package": reference, "path": str(target), "how": how})
    answer, _, seconds = call(*words, "-d", body).rpartition("\n")
    told = json.loads(answer)
    if "how" not in told:
        raise Refused(told.get("detail") or answer)
    started = time.monotonic()
    entries = len(call("find", str(target)).splitlines())
    return Look(told["how"], float(seconds), time.monotonic() - started, entries)


def take_down(site: Installation, target: Path) -> None:
    call(site.program, "umount", str(target), "--socket", str(site.sockets[0]))


def looks(site: Installation, reference: str, count: int, how: str = "") -> list[Look]:
    """Show a package `count` times, by the best way unless one is given. Raises Refused."""
    found: list[Look] = []
    targets = [site.place / f"shown-{number}" for number in range(count)]
    for target in targets:
        sync_filesystem(site.place)  # the writing back of what was pulled or shown before is not measured
        found.append(show(site, reference, how, target))
        if how == "copy":
            take_down(site, target)
    if how != "copy":
        for target in targets:
            take_down(site, target)
    return found


def measure(site: Installation, tree: str, on: str, files: int, ways: Sequence[str], repeat: int) -> Iterator[Row]:
    for way in ways:
        try:
            first, *others = looks(site, "app:v1", 1 + repeat, way)
        except Refused as error:
            say(f"    {way}: {error}")
            yield Row(tree, on, way, files, refused=str(error))
            continue
        shown_s = statistics.median(look.shown_s for look in others)
        walk_s = statistics.median(look.walk_s for look in others)
        say(f"    {way}: {shown_s:.3f} s, walked in {walk_s:.2f} s")
        yield Row(tree, on, way, files, first.entries, first.shown_s, shown_s, walk_s)


def table(rows: Sequence[Row]) -> str:
    heads = ("tree, filesystem", "way", "files", "first", "shown", "goal", "a file", "goal", "find, 100,000", "note")
    cells = []
    for row in rows:
        per_file = None if row.shown_s is None else row.shown_s * 1e6 / row.files
        walk = None if row.walk_s is None else row.walk_s * 100_000 / row.entries
        cells.append(
            [
                f"{row.tree}, {row.on}",
                row.how,
                f"{row.files:,}",
                figure(row.first_s, 3, " s"),
                figure(row.shown_s, 3, " s"),
                figure(SHOWN_GOALS_S.get(row.how), 3, " s"),
                figure(per_file, 1, " us"),
                figure(FILE_GOALS_US.get(row.how), 1, " us"),
                figure(walk, 2, " s"),
                row.refused,
            ]
        )
    notes = [f"first: the first time this way is taken. The goal for find is {WALK_GOAL_S:g} s per 100,000."]
    return render("A package shown from a warm store", heads, cells, notes)


@contextlib.contextmanager
def filesystem(where: Path, on: str) -> Iterator[Path]:
    """A directory on a filesystem."""
    if on == "here":
        directory = where / "site"
        directory.mkdir()
        yield directory
    else:
        with device_image(where, "memory") as image, Btrfs(where / "btrfs", image, "zstd") as disk:
            yield disk.directory


def run(where: Path, source: Path, on: str, chosen: argparse.Namespace) -> list[Row]:
    """Pack a tree, have one agent pull it, and look at each way."""
    files, size = trees.files_and_bytes(source)
    say(f"{source.name} on {on}: {files:,} files, {size / MIB:,.0f} MiB")
    with filesystem(where, on) as directory:
        layout, origin = directory / "layout", f"file://{directory / 'origin'}"
        tag, entrypoint = ("-t", "app:v1"), ("--entrypoint", json.dumps(["/bin/echo", STARTED]))
        call(PROGRAM, "pack", str(source), *tag, "--format", "tree", "--layout", str(layout), *entrypoint)
        call(PROGRAM, "push", "app:v1", "--layout", str(layout), "--origin", origin)
        with Installation(directory, PROGRAM, 1) as site:
            site.everywhere("pull", "app:v1", "--json")
            return list(measure(site, source.name, on, files, chosen.how, chosen.repeat))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.showing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", nargs="+", choices=trees.NAMES, default=list(trees.NAMES))
    trees.add_size_options(parser)
    parser.add_argument("--on", nargs="+", choices=("here", "btrfs"), default=["here"], help="filesystems [here]")
    parser.add_argument("--how", nargs="+", choices=WAYS, default=list(WAYS), help="[all]")
    parser.add_argument("--repeat", type=int, default=3, help="times after the first [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(words)


def check_room(size: int, files: int, on: Sequence[str]) -> int:
    """Bytes that are needed below TMPDIR for a source of `size` bytes and what is made of it.
    Raises NoRoom where a Btrfs in memory would take more than there is."""
    packs, stored = (
        3 * size // 3,
        size,
    )  # in layout, origin and store, each about a third of the files; the contents as files
    site = packs + stored + size + 2 * FILE_BYTES * files  # and once more where a way copies them
    if "btrfs" in on and available_memory() < site:
        raise NoRoom(f"a Btrfs in memory takes up to {site / 1e9:.0f} GB, which there are not: choose a smaller tree")
    return size + FILE_BYTES * files + (site if "here" in on else 0)


def main() -> int:
    chosen = arguments()
    if os.geteuid() != 0:
        say("showing every way needs root")
        return 1
    size = max(chosen.size_mib * MIB if "generated" in chosen.tree else 0, ENVIRONMENT_BYTES)
    files = max(chosen.files if "generated" in chosen.tree else 0, ENVIRONMENT_FILES)
    rows: list[Row] = []
    try:
        with place("p2pdist-showing-", needed=check_room(size, files, chosen.on)) as where:
            for source in trees.made(where, chosen):
                for on in chosen.on:
                    rows += run(where, source, on, chosen)
                    call("rm", "-rf", str(where / "site"))
                call("rm", "-rf", str(source))
    except (NoRoom, ProgramFailed, subprocess.CalledProcessError) as error:
        say(str(error))
        return 1
    print(json.dumps({"rows": [asdict(row) for row in rows]}) if chosen.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
