"""Chunks in packs in the order in which a start reads them, as a trace tells (p2pdist/model/trace).

A start reads some chunks of a large library and none of those between them, and a host fetches
packs by pieces of many chunks. So the chunks that a trace names lie first in the packs, one behind
the other, whichever files they are of. The other chunks of these files follow.

Where the chunks of a file end is known once it was read. So the chunks of the files of a trace wait
on the disk until all of these files are read.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from p2pdist.model.device import CELL_BYTES
from p2pdist.model.errors import P2PDistError
from p2pdist.model.trace import Part
from p2pdist.package.tree.packfile import PackWriter, write_failure


class FileChunks:
    """The chunks of a file, by their names and lengths. A file of several has cells of its own
    (p2pdist/model/device)."""

    def __init__(self, chunks: Sequence[tuple[bytes, int]]) -> None:
        self._names = [name for name, _ in chunks]
        self._ends = list(accumulate(length for _, length in chunks))

    def brought_by(self, part: Part) -> Sequence[bytes]:
        """The names of the chunks that a host fetches for a part of the file: also those with which
        it shares cells, which are filled as a whole."""
        ends, last = self._ends, min(part.first + part.chunks, len(self._ends))
        if part.first >= last:
            return ()
        begin = (ends[part.first - 1] if part.first else 0) // CELL_BYTES * CELL_BYTES
        end = -(-ends[last - 1] // CELL_BYTES) * CELL_BYTES
        first, stop = bisect_right(ends, begin), bisect_left(ends, end) + 1
        return self._names[min(first, part.first) : max(stop, last)]


class WaitingChunks:
    """Chunks that wait in a file in `directory` until `write` adds them to packs. Raises DiskFull
    and P2PDistError."""

    def __init__(self, directory: Path) -> None:
        self.chunks: dict[bytes, tuple[int, int, int]] = {}
        """By name: length, and where the stored form begins and ends in the file."""
        self._directory, self._size = directory, 0
        try:
            # Without a buffer: what a full disk did not take would be written once more by `close`.
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 # until `close`
        except OSError as error:
            raise write_failure(directory, error, needed=0) from error

    def add(self, chunk: bytes, length: int, stored: bytes) -> None:
        """Have the stored form of a chunk of `length` bytes wait."""
        end = self._size + len(stored)
        try:
            with memoryview(stored) as rest:
                done = 0
                while done < len(rest):
                    done += os.pwrite(self._file.fileno(), rest[done:], self._size + done)
        except OSError as error:
            raise write_failure(self._directory, error, needed=end) from error
        self.chunks[chunk] = (length, self._size, end)
        self._size = end

    def write(self, writer: PackWriter, first: Iterable[bytes]) -> None:
        """Add them all to the packs: those with the names `first` in this order, then the others as
        they came. Other names count for nothing."""
        for chunk in dict.fromkeys((*(name for name in first if name in self.chunks), *self.chunks)):
            length, begin, end = self.chunks[chunk]
            writer.add(chunk, length, self._read(begin, end))

    def _read(self, begin: int, end: int) -> bytes:
        data = bytearray()
        try:
            while part := os.pread(self._file.fileno(), end - begin - len(data), begin + len(data)):
                data += part
        except OSError as error:
            raise write_failure(self._directory, error, needed=self._size) from error
        if len(data) != end - begin:
            raise P2PDistError(f"{self._directory} has lost what was written there", remedy="See dmesg for the disk")
        return bytes(data)

    def close(self) -> None:
        """Forget what waits."""
        self._file.close()
