"""Packages: packing, packing again, moving an edit, mounting; beside casync and restic on the same
directories.

    python -m bench.packages --tree generated --repeat 3
    python -m bench.packages --tree environment generated large --json

Everything lies below TMPDIR and is removed afterwards. Page caches are warm: a directory is read
once before it is packed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from bench import trees
from bench.packers import Casync, P2PDist, Packer, Packing, Restic
from bench.table import render

MIB = 1 << 20
SHARE_CHANGED = 0.01
INSERTED_BYTES = 4096
WHY_MORE = {
    "stored_bytes": "each file up to 4 MiB is compressed by itself, so that it can be fetched, verified and shown by itself; "
    "others compress runs of files, and cut small files by content too",
    "edited_bytes": "with a file goes the list of its directory, so that the new version is shown without reading all of the old one",
}
"""Why this system may take more than another tool."""

COMPARED = {
    "first_s": "pack",
    "stored_bytes": "stored",
    "again_s": "again",
    "again_bytes": "adds",
    "edited_s": "edited",
    "edited_bytes": "moves",
}


@dataclass(frozen=True)
class Row:
    """What one tool did with one directory: seconds to pack it, to pack it again unchanged and
    after an edit; bytes that lie in its place after the first, and that each of the others
    added."""

    tree: str
    tool: str
    first_s: float
    stored_bytes: int
    again_s: float
    again_bytes: int
    edited_s: float
    edited_bytes: int


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(
    tree: str, source: Path, make: Callable[[Path], Packer], place: Path, edit: Callable[[], object], repeat: int
) -> Row:
    """Pack `source` into new places, then again without and with an edit; medians."""
    runs: list[tuple[Packing, Packing, Packing]] = []
    for number in range(repeat):
        packer = make(place / f"{tree}-{number}")
        first = packer.pack(source, 1)
        if isinstance(packer, P2PDist):
            time.sleep(1.1)  # what changed in the last second before a packing is read again by the next
            packer.pack(source, 2)
        again = packer.pack(source, 3)
        edit()
        edited = packer.pack(source, 4)
        runs.append((first, again, edited))
        shutil.rmtree(packer.place)
        say(f"    {packer.name}: first {first}, again {again}, edited {edited}")
    seconds = [statistics.median(run[column].seconds for run in runs) for column in range(3)]
    moved = [int(statistics.median(run[column].bytes_moved for run in runs)) for column in range(3)]
    return Row(tree, packer.name, seconds[0], moved[0], seconds[1], moved[1], seconds[2], moved[2])


def table(rows: Sequence[Row]) -> str:
    heads = ("tree, tool", *COMPARED.values())
    cells = [
        [
            f"{row.tree}, {row.tool}",
            f"{row.first_s:.2f} s",
            f"{row.stored_bytes / MIB:,.1f} MiB",
            f"{row.again_s:.2f} s",
            f"{row.again_bytes:,} B",
            f"{row.edited_s:.2f} s",
            f"{row.edited_bytes:,} B",
        ]
        for row in rows
    ]
    return render("Packing: the first time, unchanged, and after an edit", heads, cells, list(_behind(rows)))


def _behind(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each figure in which another tool takes less than this system, with the reason."""
    for own, other in product(rows, rows):
        if own.tool == P2PDist.name != other.tool and own.tree == other.tree:
            for name, head in COMPARED.items():
                if getattr(own, name) > getattr(other, name):
                    why = WHY_MORE.get(name, "no reason is known")
                    yield f"{own.tree}, {head}: {other.tool} takes less: {why}."


def tools(program: str, chosen: Sequence[str]) -> list[Callable[[Path], Packer]]:
    """The cases to compare; prints the ones whose programs are missing here."""
    found: list[Callable[[Path], Packer]] = [lambda place: P2PDist(place, program)]
    for tool in (Casync, Restic):
        if tool.name in chosen:
            if lack := tool.missing():
                say(f"{tool.name} is left out: this machine lacks {lack}")
            else:
                found.append(tool)
    return found


def sources(chosen: argparse.Namespace, place: Path) -> list[tuple[str, Path, Callable[[], object]]]:
    """The directories to pack, each with its edit."""
    found: list[tuple[str, Path, Callable[[], object]]] = []
    for tree in trees.made(place, chosen):
        found.append((tree.name, tree, lambda tree=tree: trees.edit(tree)))  # type: ignore[misc]
    if "large" in chosen.tree:
        say("making a large file ...")
        for name, change in (("changed", _change), ("inserted", _insert)):
            directory = place / f"large-{name}"
            directory.mkdir()
            weights = trees.large(directory / "weights.bin", chosen.large_mib * MIB)
            found.append((f"large, {name}", directory, lambda weights=weights, change=change: change(weights)))  # type: ignore[misc]
    return found


def _change(path: Path) -> None:
    trees.change_in_place(path, SHARE_CHANGED)


def _insert(path: Path) -> None:
    trees.insert(path, INSERTED_BYTES)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.packages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", nargs="+", choices=(*trees.NAMES, "large"), default=["generated"])
    parser.add_argument(
        "--tool", nargs="*", choices=("casync", "restic"), default=["casync", "restic"], help="beside p2pdist"
    )
    trees.add_size_options(parser)
    parser.add_argument("--large-mib", type=int, default=2000, help="of the large file [%(default)s]")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median is told [%(default)s]")
    parser.add_argument("--place", type=Path, help="a directory for all files [a new one below TMPDIR]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(words)


def main() -> int:
    chosen = arguments()
    program = str(Path(sys.executable).parent / "p2pdist")
    place = Path(tempfile.mkdtemp(prefix="p2pdist-packages-", dir=chosen.place))
    rows: list[Row] = []
    try:
        for tree, source, edit in sources(chosen, place):
            count, size = trees.files_and_bytes(source)
            say(f"{tree}: {count:,} files, {size / MIB:,.0f} MiB")
            for make in tools(program, chosen.tool):
                rows.append(measure(tree, source, make, place / "places", edit, chosen.repeat))
            shutil.rmtree(source)
    except subprocess.CalledProcessError as error:
        say(f"the environment cannot be made: {error}")
        return 1
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(json.dumps({"rows": [asdict(row) for row in rows]}) if chosen.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
