"""The device of a lazy view: all contents of its trees, one behind the other in one sparse file.

Each content begins at a block of the file, in the order in which the trees have them, so what is
read one after the other is near each other. A content is one chunk, or several as its chunk list
says; a chunk is what is fetched, verified and written at once. Where a chunk lies follows from the
trees alone: a new agent computes the same layout again.

In the file the contents are cut into cells of CELL_BYTES. Where holes of the file could be read,
each cell has a head: a block before its bytes that ends with the header of a stored DEFLATE block
(RFC 1951, 3.2.4). The images say that the cell is compressed, so a kernel that finds no head, for
nothing has filled the cell, fails to decompress it, and the reader gets an error and no zeros. The
head is written after everything else of the cell.

A large content has cells of its own, from the begin of one to the end of another: the kernel reads
these ahead, and those that contents share one after the other.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from p2pdist.model.errors import TooLarge
from p2pdist.model.tree import ChunkList

BLOCK_BYTES = 4096
CELL_BLOCKS = 15
CELL_BYTES = CELL_BLOCKS * BLOCK_BYTES
"""With its head a cell has as many bytes as the kernel reads at once, 16 pages; a stored DEFLATE
block has at most 65,535."""

HEAD = struct.pack("<BHH", 1, CELL_BYTES, CELL_BYTES ^ 0xFFFF)
"""The last bytes of a head; zeros are before it."""

OWN_CELLS_BYTES = 1 << 20
"""So large is a content at least that has cells of its own; it wastes less than two of them."""

ARRANGEMENT = 2
"""Number of the rule by which contents lie in a device. It changes with the rule: a view outlives
its agent, and what the next one writes must lie where the view's images say. By 1 contents lie one
after the other, none with cells of its own."""

BLOCKS_MAX = 3 << 30
"""What an EROFS image can address of a device, heads included."""


@dataclass(frozen=True, slots=True)
class DeviceChunk:
    """A chunk of a content, the one with this `number`, `length` bytes at `offset` of it, and at
    `at` of all contents."""

    at: int
    content: bytes
    offset: int
    chunk: bytes
    length: int
    number: int = 0


def has_own_cells(size: int) -> bool:
    """Whether a content of `size` bytes shares its cells with no other. One with a single block in
    its last cell cannot: the kernel would take that cell to be one block long."""
    return size >= OWN_CELLS_BYTES and -(-size // BLOCK_BYTES) % CELL_BLOCKS != 1


def _first_blocks(sizes: Iterable[int], arrangement: int) -> Iterator[int]:
    """At which block each content begins, and the end of all."""
    block, shared = 0, True
    for size in sizes:
        own = size >= OWN_CELLS_BYTES and arrangement >= 2 and has_own_cells(size)
        if own or not shared:
            block += -block % CELL_BLOCKS
        yield block
        block, shared = block - -size // BLOCK_BYTES, not own
    yield block


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of a file, with heads or without. Contents are addressed as if there were none."""

    headed: bool

    @property
    def file_bytes(self) -> int:
        """What a cell takes in the file."""
        return CELL_BYTES + self.headed * BLOCK_BYTES

    def file_size(self, size: int) -> int:
        """Bytes of the file with contents of `size` bytes."""
        return -(-size // CELL_BYTES) * self.file_bytes

    def covering(self, offset: int, count: int) -> range:
        """The cells that have bytes in a range of the file."""
        return range(offset // self.file_bytes, -(-(offset + count) // self.file_bytes))

    def holding(self, at: int, length: int) -> range:
        """The cells that have bytes of a range of the contents."""
        return range(at // CELL_BYTES, -(-(at + length) // CELL_BYTES))

    def places(self, at: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Where in the file bytes of the contents lie that begin at `at`: offset, and begin and end
        among these bytes."""
        begin = 0
        while begin < length:
            cell, within = divmod(at + begin, CELL_BYTES)
            end = min(length, begin + CELL_BYTES - within)
            yield cell * self.file_bytes + self.headed * BLOCK_BYTES + within, begin, end
            begin = end

    def file_block(self, block: int) -> int:
        """Which block of the file is this one of the contents."""
        return block + self.headed * (block // CELL_BLOCKS + 1)

    def head(self, cell: int) -> tuple[int, bytes]:
        """Offset and bytes of what says that a cell is filled; no bytes where nothing does."""
        offset = cell * self.file_bytes + BLOCK_BYTES - len(HEAD)
        return (offset, HEAD) if self.headed else (offset, b"")


class DeviceLayout:
    """Where contents lie. `sizes` says in order which contents of how many bytes, `chunk_lists` has
    the encoded chunk list of each that is several chunks, or `cuts` the offsets of these, with the
    end of the content behind them, and their names. Raises TooLarge."""

    def __init__(
        self,
        sizes: Mapping[bytes, int],
        chunk_lists: Mapping[bytes, bytes],
        arrangement: int = ARRANGEMENT,
        cuts: Mapping[bytes, tuple[list[int], list[bytes]]] | None = None,
    ) -> None:
        self._sizes, self._lists, self.arrangement = sizes, chunk_lists, arrangement
        self._contents = tuple(sizes)
        *self._firsts, self.blocks = _first_blocks(sizes.values(), arrangement)
        if self.blocks >= BLOCKS_MAX:
            raise TooLarge(f"contents of {self.size} bytes do not fit into the device of one view")
        self._cut: dict[bytes, tuple[list[int], list[bytes]]] = dict(cuts or {})
        """Offsets and names of the chunks of contents that were asked for."""
        self._begins: dict[bytes, int] | None = None
        """`first_blocks`, once one content was asked for."""

    @property
    def size(self) -> int:
        """Bytes of the contents, and of what is between them."""
        return self.blocks * BLOCK_BYTES

    @property
    def bytes_content(self) -> int:
        """Bytes of all contents."""
        return sum(self._sizes.values())

    @property
    def contents(self) -> tuple[bytes, ...]:
        """The contents, in order."""
        return self._contents

    @property
    def chunk_lists(self) -> Mapping[bytes, bytes]:
        """The encoded chunk lists of those that are several chunks."""
        return self._lists

    @property
    def cuts(self) -> Mapping[bytes, tuple[list[int], list[bytes]]]:
        """Offsets, with the end behind them, and names of the chunks of contents that are several,
        as far as they are known."""
        return self._cut

    def agrees_with(self, stated: DeviceLayout) -> bool:
        """Whether the same contents, cut into the same chunks, lie in the same places there, where
        all may have short names."""
        mine, theirs = (
            (self._firsts, self.blocks, self.arrangement),
            (stated._firsts, stated.blocks, stated.arrangement),
        )
        if mine != theirs or list(self._sizes.values()) != list(stated._sizes.values()):
            return False
        for content, short in zip(self._contents, stated._contents, strict=True):
            if not content.startswith(short):
                return False
            if content in self._lists or short in stated._cut:
                (offsets, names), (others, shorts) = self._divided(content), stated._divided(short)
                if offsets != others or not all(map(bytes.startswith, names, shorts)):
                    return False
        return True

    def first_blocks(self) -> dict[bytes, int]:
        """The block at which each content begins."""
        return dict(zip(self._contents, self._firsts, strict=True))

    def cell_chunks(self, cell: int) -> Iterator[DeviceChunk]:
        """The chunks that have bytes in a cell."""
        return self.chunks(cell * CELL_BYTES, (cell + 1) * CELL_BYTES)

    def chunks(self, begin: int = 0, end: int | None = None) -> Iterator[DeviceChunk]:
        """The chunks that have bytes in the range from `begin` to `end` of the contents, in order;
        without a range all of them. What is between contents belongs to none."""
        end = self.size if end is None else min(end, self.size)
        if begin >= end:
            return
        first = max(0, bisect_right(self._firsts, begin // BLOCK_BYTES) - 1)
        for number in range(first, bisect_left(self._firsts, -(-end // BLOCK_BYTES))):
            content, at = self._contents[number], self._firsts[number] * BLOCK_BYTES
            offsets, names = self._cuts(content)
            low = max(0, bisect_right(offsets, begin - at) - 1)
            for index in range(low, len(names)):
                offset, length = offsets[index], offsets[index + 1] - offsets[index]
                if at + offset >= end:
                    break
                if at + offset + length > begin:
                    yield DeviceChunk(at + offset, content, offset, names[index], length, index)

    def content_chunks(self, content: bytes, first: int, count: int) -> Iterator[DeviceChunk]:
        """Of the chunks of a content those with the numbers from `first` on, up to `count`; none of
        a content that is not here."""
        if not self._sizes.get(content):
            return
        at = self._begin(content) * BLOCK_BYTES
        offsets, names = self._cuts(content)
        for number in range(first, min(first + count, len(names))):
            offset = offsets[number]
            yield DeviceChunk(at + offset, content, offset, names[number], offsets[number + 1] - offset, number)

    def range_chunks(self, content: bytes, begin: int, end: int) -> Iterator[DeviceChunk]:
        """The chunks of a content that have bytes in the range from `begin` to `end` of it, in
        order; none of a content that is not here."""
        if end := min(end, self._sizes.get(content, 0)):
            at = self._begin(content) * BLOCK_BYTES
            yield from self.chunks(at + begin, at + end)

    def _begin(self, content: bytes) -> int:
        if self._begins is None:
            self._begins = self.first_blocks()
        return self._begins[content]

    def _cuts(self, content: bytes) -> tuple[list[int], list[bytes]]:
        """Where the chunks of a content begin, its end behind them, and their names. Those of one
        that is several are kept."""
        if content in self._lists and content not in self._cut:
            self._cut[content] = self._divided(content)
        return self._divided(content)

    def _divided(self, content: bytes) -> tuple[list[int], list[bytes]]:
        """As `_cuts`, and nothing is kept."""
        if content in self._cut:
            return self._cut[content]
        encoded = self._lists.get(content)
        if encoded is None:
            return [0, self._sizes[content]], [content]
        chunks = ChunkList.decode(encoded).chunks
        return list(accumulate((length for _, length in chunks), initial=0)), [chunk for chunk, _ in chunks]
