"""The extents of a file on Btrfs, made of the blocks of chunks, wherever in the file these begin.

An extent begins at a sector, and ends at one unless the file ends there. Contents that are cut have
chunks that begin and end anywhere, and so do their blocks. What a block has behind its last whole
sector is held until the next one comes, and put before that one's frame as it is (see frame.py):
then the frame decodes from the beginning of the sector on. What it decodes to behind the extent's
last sector is on the disk but not used. Where the bytes before a block were not written just
before, others stand for them, and the extent begins with the next sector. Every sector is written
once.
"""

from __future__ import annotations

from p2pdist.model.catalog import BLOCK_SIZE, chunk_blocks, one_frame
from p2pdist.store.disk import pwrite_all
from p2pdist.store.encoded import EncodedWriter, Extent, address, addressable, decodable
from p2pdist.store.frame import beginning, blocks_of


def write_content(writer: EncodedWriter, fd: int, stored: bytes | memoryview, data: bytes | memoryview) -> None:
    """Write `data`, which is what `stored` decodes to and was verified, to an empty file; raises
    OSError. A `stored` that may be written to is not copied, nor are bytes."""
    size = len(data)
    if not writer.works or len(stored) == size:
        pwrite_all(fd, data, 0)
    elif not one_frame(stored, size):
        Extents(writer, fd, size).write(0, stored, data)
    elif not (writer.takes(stored, size) and writer.write_frame(fd, stored, size)):
        pwrite_all(fd, data, 0)


class Extents:
    """Writes the chunks of one file of `size` bytes, best in order. What is behind the last whole
    sector is written by the next call, or by `flush`. Not thread-safe. Methods raise OSError, and
    may be called again with the same."""

    def __init__(self, writer: EncodedWriter, fd: int, size: int) -> None:
        self._writer, self._fd, self._size = writer, fd, size
        self._held, self._end = b"", 0
        """What is not written of the last chunks, and where it ends: there the chunk begins that is
        being written."""
        self._data = memoryview(b"")
        """This chunk."""
        self._done = 0
        """Up to here all is written of what is held and of this chunk."""

    def write(self, offset: int, stored: bytes | memoryview, data: bytes | memoryview) -> None:
        """Write `data`, which is what `stored` decodes to and was verified, at `offset`. A `stored`
        that may be written to is not copied, nor are bytes."""
        if offset != self._end or not self._writer.works:
            self.flush()
            self._end = offset
        if not self._writer.works:
            pwrite_all(self._fd, data, offset)
            return
        self._data, self._done = memoryview(data), offset - len(self._held)
        if len(stored) < len(data):
            self._write_frames(addressable(stored))
        self._write_until(self._whole(offset + len(data)))
        left = bytes(self._data[max(0, self._done - offset) :])
        self._held = left if self._done >= offset else self._held + left
        self._end, self._data = offset + len(data), memoryview(b"")

    def flush(self) -> None:
        """Write what is held."""
        if self._held:
            pwrite_all(self._fd, self._held, self._end - len(self._held))
            self._held = b""

    def _whole(self, end: int) -> int:
        """Where an extent ends that would end there."""
        return end if end == self._size else end - end % self._writer.sector

    def _write_frames(self, stored: bytes | memoryview) -> None:
        blocks = list(chunk_blocks(memoryview(stored), len(self._data)))
        place = address(stored) + len(stored) - sum(len(block) for block, _ in blocks)
        at = self._end
        for block, length in blocks:
            if len(block) < length:
                self._write_frame(block, place, at, length)
            place += len(block)
            at += length

    def _write_frame(self, frame: bytes | memoryview, place: int, at: int, length: int) -> None:
        """Write a frame in memory at `place`, which decodes to the `length` bytes at `at` of the
        file, where that is worth it."""
        writer = self._writer
        before = at % writer.sector
        begin, stop, skipped = at - before, self._whole(at + length), 0
        if begin < self._done:
            begin, skipped = begin + writer.sector, writer.sector
        if before + length > BLOCK_SIZE or begin >= stop:
            return
        first, start, end = b"", 0, len(frame)
        if before:
            start, end = blocks_of(frame)
            first = beginning(bytes(before) if skipped else self._between(at - before, at), length)
        elif not decodable(frame):
            return
        extent = Extent(begin, stop - begin, before + length, skipped)
        if (
            start < end
            and writer.saves(len(first) + end - start, stop - begin)
            and writer.write(self._fd, extent, place + start, end - start, first)
        ):
            self._write_until(begin)
            self._done = stop

    def _between(self, begin: int, end: int) -> bytes:
        """Bytes of what is held and the chunk behind it."""
        if begin >= self._end:
            return bytes(self._data[begin - self._end : end - self._end])
        return self._held[begin - self._end :] + bytes(self._data[: end - self._end])

    def _write_until(self, end: int) -> None:
        """Write what is not written yet up to there, decompressed. What is held ends before, unless
        there is nothing to write."""
        if self._done >= end:
            return
        if self._done < self._end:
            pwrite_all(self._fd, self._held, self._done)
            self._done = self._end
        pwrite_all(self._fd, self._data[self._done - self._end : end - self._end], self._done)
        self._done = end
