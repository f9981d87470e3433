"""Encoded writes: a tree's objects made on Btrfs from its packs, with the stored blocks as they are
and with what they decompress to.

    sudo python -m bench.encoded_writes --tree generated --files 200000 --size-mib 5000 sudo python
    -m bench.encoded_writes --tree environment --compress zstd --image memory file --json

Each run has a new Btrfs, where the packs lie already, and ends when the filesystem has brought
everything to its device: a loop device whose image is kept in memory, so that the filesystem is
measured and not what lies below it, or with --image file in a sparse file below TMPDIR. A run that
does not count comes first and has the image allotted. Both ways are the store's own code; the
second is what it does where encoded writes are refused. `fill` is all that a pull does with packs:
read, decompress, verify, write. `write` begins with verified frames, which the first way hands to
the filesystem and the second decompresses and writes; what verifying takes is in neither.

With compress=zstd both end with the same compressed extents; without, the second writes as much as
it read. Processor time is that of this process and of all threads of the kernel, so nothing else
may write meanwhile. Needs root and btrfs-progs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import trees
from bench.btrfs import Btrfs, Meter, Spent, device_image
from bench.fills import Packed, fill, load, write
from bench.packers import call
from bench.place import NoRoom, available_memory, place
from bench.processes import ProgramFailed
from bench.table import render
from p2pdist.cli.daemon import COLLECT_AFTER
from p2pdist.store.store import BlobStore

MIB = 1 << 20
GOAL = 3.0
WAYS = ("encoded", "decompressed")
STEPS: dict[str, Callable[[BlobStore, Packed, Meter], None]] = {"fill": fill, "write": write}
ENVIRONMENT_BYTES = 1500 * MIB
PROCESS_BYTES = 2 << 30
"""What this process takes: verified frames that wait to be written, and the index of the store."""
FILE_BYTES = 6000
"""What a file takes beside its bytes, as a file and twice in the tree of a Btrfs."""


@dataclass(frozen=True)
class Row:
    """What one way took for one step, medians of the runs; `image` says where the filesystem lay,
    and `encoded_bytes` of the contents were written as they were stored."""

    tree: str
    image: str
    compress: str
    step: str
    way: str
    seconds: float
    cpu_s: float
    written_bytes: int
    used_bytes: int
    encoded_bytes: int


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def missing() -> str:
    """What this machine lacks, or nothing."""
    if os.geteuid() != 0:
        return "encoded writes and mounts need root"
    lacking = [program for program in ("mkfs.btrfs", "losetup", "mount", "umount") if shutil.which(program) is None]
    return f"{', '.join(lacking)} cannot be found: install btrfs-progs and mount" if lacking else ""


def run_once(where: Path, image: Path, packed: Packed, compress: str, step: str, way: str) -> tuple[Spent, int]:
    """One step on a new Btrfs; what it took, and how many bytes were encoded writes."""
    with Btrfs(where / "btrfs", image, compress) as disk:
        store = BlobStore(disk.directory / "store")
        try:
            load(store, packed)
            store.objects.encoded.works = way == "encoded"
            meter = Meter(disk)
            STEPS[step](store, packed, meter)
            return meter.spent, store.objects.encoded.encoded_bytes
        finally:
            store.close()


def allot(where: Path, image: Path, packed: Packed) -> None:
    """Write to a new image once what takes most of it: the first to write pays for the image's
    pages or extents, and would always be the same way."""
    spent, _ = run_once(where, image, packed, "none", "write", WAYS[1])
    say(f"    to allot the image, not counted: {told(spent)}")


def measure(where: Path, tree: str, packed: Packed, chosen: argparse.Namespace) -> Iterator[Row]:
    for lies in chosen.image:
        with device_image(where, lies) as image:
            allot(where, image, packed)
            for compress in chosen.compress:
                for step in chosen.step:
                    runs: dict[str, list[tuple[Spent, int]]] = {way: [] for way in WAYS}
                    for _ in range(chosen.repeat):
                        for way in WAYS:
                            runs[way].append(run_once(where, image, packed, compress, step, way))
                            spent = runs[way][-1][0]
                            say(f"    image in {lies}, compress={compress}, {step}, {way}: {told(spent)}")
                    for way, found in runs.items():
                        yield row_of((tree, lies, compress, step, way), found)


def told(spent: Spent) -> str:
    return f"{spent.seconds:.2f} s, {spent.cpu_s:.2f} s of CPU"


def row_of(names: tuple[str, str, str, str, str], found: Sequence[tuple[Spent, int]]) -> Row:
    """Medians of runs."""
    return Row(
        *names,
        statistics.median(spent.seconds for spent, _ in found),
        statistics.median(spent.cpu_s for spent, _ in found),
        int(statistics.median(spent.written_bytes for spent, _ in found)),
        int(statistics.median(spent.used_bytes for spent, _ in found)),
        found[-1][1],
    )


def table(rows: Sequence[Row]) -> str:
    heads = (
        "tree, image, mount, step",
        "way",
        "wall",
        "CPU",
        "written",
        "used",
        "encoded",
        "wall x",
        "CPU x",
        "bytes x",
    )
    cells = []
    for row in rows:
        plain = next(
            each
            for each in rows
            if (each.tree, each.image, each.compress, each.step) == (row.tree, row.image, row.compress, row.step)
            and each.way == WAYS[1]
        )
        cells.append(
            [
                f"{row.tree}, {row.image}, compress={row.compress}, {row.step}",
                row.way,
                f"{row.seconds:.2f} s",
                f"{row.cpu_s:.2f} s",
                f"{row.written_bytes / MIB:,.0f} MiB",
                f"{row.used_bytes / MIB:,.0f} MiB",
                f"{row.encoded_bytes / MIB:,.0f} MiB",
                f"{plain.seconds / row.seconds:.2f}",
                f"{plain.cpu_s / row.cpu_s:.2f}",
                f"{plain.written_bytes / row.written_bytes:.2f}",
            ]
        )
    notes = [f"x: how often the decompressed way takes what this one does; the goal for `write` is {GOAL:g}."]
    return render("Objects on Btrfs: stored blocks as they are, and decompressed", heads, cells, notes)


def pack(where: Path, source: Path) -> Packed:
    """A tree packed into a layout of its own."""
    program = str(Path(sys.executable).parent / "p2pdist")
    layout = where / f"layout-{source.name}"
    call(program, "pack", str(source), "-t", "tree:v1", "--format", "tree", "--layout", str(layout), "--json")
    return Packed.of_layout(layout, *trees.files_and_bytes(source))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.encoded_writes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", nargs="+", choices=trees.NAMES, default=list(trees.NAMES))
    trees.add_size_options(parser)
    parser.add_argument(
        "--compress", nargs="+", choices=("zstd", "none"), default=["zstd", "none"], help="of the mount"
    )
    parser.add_argument(
        "--image",
        nargs="+",
        choices=("memory", "file"),
        default=["memory"],
        help="where the filesystem's device lies [%(default)s]",
    )
    parser.add_argument("--step", nargs="+", choices=tuple(STEPS), default=list(STEPS))
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median is told [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(words)


def packed_bytes(size: int, files: int) -> int:
    """At most, of a tree and what is packed of it."""
    return size + size // 2 + FILE_BYTES * files


def filesystem_bytes(size: int, files: int) -> int:
    """At most, of the Btrfs with what is packed and the objects."""
    return size + size // 2 + 2 * FILE_BYTES * files


def check_memory(size: int, files: int) -> None:
    """Raises NoRoom where an image in memory does not fit, which would end with whatever the kernel
    kills."""
    needed, available = filesystem_bytes(size, files) + PROCESS_BYTES, available_memory()
    if available < needed:
        raise NoRoom(
            f"an image in memory takes up to {needed / 1e9:.0f} GB, {available / 1e9:.0f} are available: "
            "choose a smaller tree, or --image file"
        )


def main() -> int:
    chosen = arguments()
    if lack := missing():
        say(lack)
        return 1
    size = max(chosen.size_mib * MIB if "generated" in chosen.tree else 0, ENVIRONMENT_BYTES)
    rows: list[Row] = []
    gc.set_threshold(*COLLECT_AFTER)  # as in an agent
    try:
        if "memory" in chosen.image:
            check_memory(size, chosen.files)
        on_disk = filesystem_bytes(size, chosen.files) if "file" in chosen.image else 0
        with place("p2pdist-encoded-", needed=packed_bytes(size, chosen.files) + on_disk) as where:
            for source in trees.made(where, chosen):
                packed = pack(where, source)
                shutil.rmtree(source)
                say(f"{source.name}: {packed.files:,} files, {packed.bytes_content / MIB:,.0f} MiB")
                rows += measure(where, source.name, packed, chosen)
    except (NoRoom, ProgramFailed, subprocess.CalledProcessError) as error:
        say(str(error))
        return 1
    print(json.dumps({"rows": [asdict(row) for row in rows]}) if chosen.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
