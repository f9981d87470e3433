"""Reads of a lazy view of which nothing is missing any more, beside those of a plain EROFS mount of
the same contents.

    sudo python -m bench.lazy_reads --size-mib 512 --repeat 5

One file of noise is in devices below TMPDIR: in cells, as fanotify fills them, by an image that
names the cells and by the plain one that covers such a view then; and one block behind the other,
under a loop device with direct I/O, which is what FUSE leaves once all is there, and without one,
as a plain image has it. All are mounted through the overlay that a view has. The file is read one
block behind the other, at random in blocks of 4 KiB, and at random through mmap(2): `cached` when
it was read before, `device cached` when the page cache has device and image and nothing of the
file, as after the filling, and `disk` when the page cache is empty. By turns, and each figure is
the median; the ratio is the rate of the lazy view over that of the plain one. The goal is GOAL for
each. Mounts are in a namespace of its own, and so go with it however it ends; files are removed
unless it is killed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import trees
from bench.lazy import end_when_asked, forget_pages
from bench.table import figure, median, render
from p2pdist.model.device import BLOCK_BYTES, CELL_BYTES, Cells, DeviceLayout
from p2pdist.model.tree import File, content_hash
from p2pdist.mount import kernel
from p2pdist.mount.erofs.writer import Device, mount_image, write_image
from p2pdist.mount.lazy.fill_method import FANOTIFY, METHODS
from p2pdist.mount.overlay import merge

MIB = 1 << 20
GOAL = 0.9
PLAIN = "plain"
COVERED = "covered"
KINDS = {way.name: (way.cells, way.looped, False) for way in METHODS} | {
    COVERED: (FANOTIFY.cells, False, True),
    PLAIN: (Cells(headed=False), False, True),
}
"""The cells of each view's device, whether a loop device is over it, and whether the image takes it
to lack nothing."""
LAZY = tuple(kind for kind in KINDS if kind != PLAIN)
CACHED, DEVICE_CACHED, DISK = "cached", "device cached", "disk"
STATES = (CACHED, DEVICE_CACHED, DISK)
AT_ONCE = MIB
NAME = "content"


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of read in one state, of a view that was filled in one way: medians of MiB a
    second."""

    way: str
    kind: str
    state: str
    lazy_mib_s: float
    plain_mib_s: float

    @property
    def ratio(self) -> float:
        """The lazy rate over the plain one."""
        return self.lazy_mib_s / self.plain_mib_s


class View:
    """The file in one device, mounted."""

    def __init__(self, directory: Path, source: Path, name: bytes, cells: Cells, *, looped: bool, whole: bool) -> None:
        size = source.stat().st_size
        layout = DeviceLayout({name: size}, {})
        directory.mkdir()
        self.device, self.point, self._image = directory / "device", directory / "shown", directory / "image"
        with source.open("rb") as content, self.device.open("wb") as device:
            device.truncate(cells.file_size(layout.size))
            for cell in cells.holding(0, layout.size):
                for offset, begin, end in cells.places(cell * CELL_BYTES, CELL_BYTES):
                    os.pwrite(device.fileno(), content.read(end - begin), offset)
                offset, head = cells.head(cell)
                os.pwrite(device.fileno(), head, offset)
            os.fsync(device.fileno())
        entries = [File(os.fsencode(NAME), 0o644, 0, size, name)]
        write_image(entries, self._image, Device(layout.size, layout.first_blocks(), cells, whole))
        for point in (directory / "0", directory / "1", self.point):
            point.mkdir()
        self.path = self.point / NAME
        with ExitStack() as mounted:
            over = kernel.loop_device(self.device, direct=True) if looped else nullcontext(self.device)
            with over as device:
                mount_image(self._image, directory / "1", Path(device), looped=looped)
            mounted.callback(kernel.unmount, directory / "1", lazily=True)
            merge(directory, 2, self.point, source="p2pdist-bench", uppers=None)
            mounted.callback(kernel.unmount, self.point, lazily=True)
            self.close = mounted.pop_all().close

    def bring(self, state: str) -> None:
        """Bring the page cache into a state."""
        forget_pages()
        if state != DISK:
            _in_order(self._image)
            _in_order(self.path if state == CACHED else self.device)


def _in_order(path: Path) -> int:
    buffer, count = bytearray(AT_ONCE), 0
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(buffer):
            count += read
    return count


def _places(path: Path, bytes_max: int) -> list[int]:
    blocks = path.stat().st_size // BLOCK_BYTES
    numbers = random.Random(blocks).sample(range(blocks), min(blocks, bytes_max // BLOCK_BYTES))
    return [number * BLOCK_BYTES for number in numbers]


def _at_random(path: Path, bytes_max: int) -> int:
    places = _places(path, bytes_max)
    with path.open("rb", buffering=0) as file:
        for place in places:
            os.pread(file.fileno(), BLOCK_BYTES, place)
    return len(places) * BLOCK_BYTES


def _mapped(path: Path, bytes_max: int) -> int:
    places = _places(path, bytes_max)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for place in places:
            mapped[place]
    return len(places) * BLOCK_BYTES


def reads(bytes_random: int) -> dict[str, Callable[[Path], int]]:
    """The kinds of reads: each reads a path and says how many bytes it has read."""
    return {
        "sequential": _in_order,
        "random 4 KiB": lambda path: _at_random(path, bytes_random),
        "mmap": lambda path: _mapped(path, bytes_random),
    }


@contextmanager
def views(place: Path, size: int) -> Iterator[dict[str, View]]:
    """The same file in all devices. Raises OSError, Corrupt where there are no such mounts."""
    source = trees.large(place / "source", size)
    name = content_hash(source.read_bytes())
    with ExitStack() as mounted:
        made = {}
        for kind, (cells, looped, whole) in KINDS.items():
            made[kind] = View(place / kind, source, name, cells, looped=looped, whole=whole)
            mounted.callback(made[kind].close)
        yield made


def measured(made: dict[str, View], repeat: int, bytes_random: int) -> Iterator[Row]:
    """Every kind of read in every state."""
    for kind, read in reads(bytes_random).items():
        for state in STATES:
            rates: dict[str, list[float]] = {name: [] for name in made}
            for _ in range(repeat):
                for name, view in made.items():
                    view.bring(state)
                    began = time.perf_counter()
                    count = read(view.path)
                    rates[name].append(count / MIB / (time.perf_counter() - began))
            for name in LAZY:
                lazy, plain = median(rates[name]), median(rates[PLAIN])
                assert lazy is not None and plain is not None
                yield Row(name, kind, state, lazy, plain)


def table(rows: Sequence[Row]) -> str:
    """The rates and their ratios."""
    cells = [
        (
            f"{row.way}: {row.kind}, {row.state}",
            figure(row.lazy_mib_s, 0),
            figure(row.plain_mib_s, 0),
            figure(row.ratio),
            "" if row.ratio >= GOAL else f"MISSED: {GOAL}",
        )
        for row in rows
    ]
    return render("Reads of what is all there", ("read", "lazy MiB/s", "plain MiB/s", "ratio", ""), cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lazy_reads", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-mib", type=int, default=512, help="of the file [%(default)s]")
    parser.add_argument("--random-mib", type=int, default=64, help="that are read at random [%(default)s]")
    parser.add_argument("--repeat", type=int, default=5, help="runs, of which the median is told [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    chosen = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("mounts need root")
    end_when_asked()
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    place = Path(tempfile.mkdtemp(prefix="p2pdist-reads-"))
    try:
        with views(place, chosen.size_mib * MIB) as made:
            rows = list(measured(made, chosen.repeat, chosen.random_mib * MIB))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(json.dumps({"rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}) if chosen.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
