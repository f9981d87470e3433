"""Files that lie in cells of a device: what the kernel reads of them, with nothing that waits."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pdist.model.device import ARRANGEMENT, BLOCK_BYTES, CELL_BYTES, HEAD, OWN_CELLS_BYTES, Cells, DeviceLayout
from p2pdist.model.tree import File, content_hash
from p2pdist.mount import kernel
from p2pdist.mount.erofs.writer import Device, mount_image, write_image
from p2pdist.mount.supervisor import process

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")

SIZES = (
    *(1, 4000, BLOCK_BYTES, BLOCK_BYTES + 1, CELL_BYTES - 1, CELL_BYTES, 3 * CELL_BYTES + 17, 5),
    *(18 * CELL_BYTES, 20 * CELL_BYTES - 1, 7),  # with cells of their own
    *(18 * CELL_BYTES + BLOCK_BYTES + 1, 9, 18 * CELL_BYTES + 2 * BLOCK_BYTES, 20 * CELL_BYTES + 11 * BLOCK_BYTES + 5),
    *(OWN_CELLS_BYTES, 18 * CELL_BYTES + 1, 3),  # too small a rest for that
)
CELLS = Cells(headed=True)
MISSING = errno.EUCLEAN
"""What the kernel says of compressed data that is none."""


class Shown:
    """Files with contents of these sizes, over a device of which nothing is filled."""

    def __init__(self, directory: Path, *, whole: bool = False, arrangement: int = ARRANGEMENT) -> None:
        drawn = random.Random(3)
        self.contents = [drawn.randbytes(size) for size in SIZES]
        names = [content_hash(data) for data in self.contents]
        self.layout = DeviceLayout(dict(zip(names, SIZES, strict=True)), {}, arrangement)
        firsts = self.layout.first_blocks()
        self.places = [firsts[name] * BLOCK_BYTES for name in names]
        self.file, self.point = directory / "device", directory / "shown"
        with self.file.open("wb") as file:
            file.truncate(CELLS.file_size(self.layout.size))
        entries = [
            File(b"%02d" % number, 0o644, 0, size, name)
            for number, (name, size) in enumerate(zip(names, SIZES, strict=True))
        ]
        write_image(entries, directory / "image", Device(self.layout.size, firsts, CELLS, whole))
        self.point.mkdir()
        mount_image(directory / "image", self.point, self.file)

    def write(self, numbers: range) -> None:
        """Write these contents, and no head."""
        with self.file.open("r+b") as file:
            for number in numbers:
                data = self.contents[number]
                for offset, begin, end in CELLS.places(self.places[number], len(data)):
                    os.pwrite(file.fileno(), data[begin:end], offset)

    def finish(self, cells: range) -> None:
        with self.file.open("r+b") as file:
            for cell in cells:
                offset, head = CELLS.head(cell)
                os.pwrite(file.fileno(), head, offset)

    def read(self, number: int) -> bytes | int:
        """What the file has, or the error that its reader gets."""
        try:
            return (self.point / f"{number:02}").read_bytes()
        except OSError as error:
            return error.errno or 0

    def cells_of(self, number: int) -> range:
        return CELLS.holding(self.places[number], SIZES[number])


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    made = Shown(tmp_path)
    yield made
    kernel.unmount(made.point, lazily=True)


def test_what_nothing_has_filled_is_an_error_and_never_zeros(shown: Shown) -> None:
    for number in range(len(SIZES)):
        assert shown.read(number) == MISSING
    shown.write(range(len(SIZES)))
    for number in range(len(SIZES)):
        assert shown.read(number) == MISSING, "a cell without its head was read"


def test_a_cell_can_be_read_once_it_has_its_head_though_it_was_tried_before(shown: Shown) -> None:
    shown.write(range(len(SIZES)))
    for cell in reversed(CELLS.holding(0, shown.layout.size)):
        for number in range(len(SIZES)):
            filled = all(other > cell for other in shown.cells_of(number))
            assert shown.read(number) == (shown.contents[number] if filled else MISSING)
        shown.finish(range(cell, cell + 1))
    for number, data in enumerate(shown.contents):
        assert shown.read(number) == data


@pytest.mark.parametrize("arrangement", [1, ARRANGEMENT])
def test_a_plain_image_has_all_contents_of_the_same_device(tmp_path: Path, arrangement: int) -> None:
    shown = Shown(tmp_path, whole=True, arrangement=arrangement)
    try:
        shown.write(range(len(SIZES)))
        for number, data in enumerate(shown.contents):
            assert shown.read(number) == data
    finally:
        kernel.unmount(shown.point, lazily=True)


def test_the_supervisor_looks_where_the_heads_are() -> None:
    assert (CELLS.file_bytes, len(HEAD)) == (process.CELL_FILE_BYTES, process.HEAD_BYTES)
    assert CELLS.head(3) == (3 * process.CELL_FILE_BYTES + process.HEAD_END - process.HEAD_BYTES, HEAD)
