"""The device of a lazy view: all contents of its trees, one behind the other in one sparse file.

Each content begins at a block of the file, in the order in which the trees have them, so what is
read one after the other is near each other. A content is one chunk, or several as its chunk list
says; a chunk is what is fetched, verified and written at once. Where a chunk lies follows from the
trees alone: a new agent computes the same layout again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from p2pdist.model.errors import TooLarge
from p2pdist.model.tree import ChunkList

BLOCK_BYTES = 4096
BLOCKS_MAX = 1 << 32
"""What an EROFS image can address of a device."""


@dataclass(frozen=True, slots=True)
class DeviceChunk:
    """A chunk of a content, the one with this `number`, `length` bytes at `offset` of it, which lies
    at `at` in the device."""

    at: int
    content: bytes
    offset: int
    chunk: bytes
    length: int
    number: int = 0


class DeviceLayout:
    """Where contents lie. `sizes` says in order which contents of how many bytes, `chunk_lists` has
    the encoded chunk list of each that is several chunks. Raises TooLarge."""

    def __init__(self, sizes: Mapping[bytes, int], chunk_lists: Mapping[bytes, bytes]) -> None:
        self._sizes, self._lists = sizes, chunk_lists
        self._contents = tuple(sizes)
        counts = (-(-size // BLOCK_BYTES) for size in sizes.values())
        *self._firsts, self.blocks = accumulate(counts, initial=0)
        if self.blocks >= BLOCKS_MAX:
            raise TooLarge(f"contents of {self.size} bytes do not fit into the device of one view")
        self._cut: dict[bytes, tuple[list[int], list[bytes]]] = {}
        """Offsets and names of the chunks of contents that were asked for."""
        self._begins: dict[bytes, int] | None = None
        """`first_blocks`, once one content was asked for."""

    @property
    def size(self) -> int:
        """Bytes of the device."""
        return self.blocks * BLOCK_BYTES

    @property
    def bytes_content(self) -> int:
        """Bytes of all contents."""
        return sum(self._sizes.values())

    def first_blocks(self) -> dict[bytes, int]:
        """The block at which each content begins."""
        return dict(zip(self._contents, self._firsts, strict=True))

    def chunks(self, begin: int = 0, end: int | None = None) -> Iterator[DeviceChunk]:
        """The chunks that have bytes in the range from `begin` to `end` of the device, in order;
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

    def _begin(self, content: bytes) -> int:
        if self._begins is None:
            self._begins = self.first_blocks()
        return self._begins[content]

    def _cuts(self, content: bytes) -> tuple[list[int], list[bytes]]:
        """Where the chunks of a content begin, its end behind them, and their names."""
        encoded = self._lists.get(content)
        if encoded is None:
            return [0, self._sizes[content]], [content]
        if content not in self._cut:
            chunks = ChunkList.decode(encoded).chunks
            offsets = list(accumulate((length for _, length in chunks), initial=0))
            self._cut[content] = offsets, [chunk for chunk, _ in chunks]
        return self._cut[content]
