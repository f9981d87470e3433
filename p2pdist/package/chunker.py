"""Cutting the content of a large file into chunks by what is in it, so that an insertion changes
the chunks around it alone.

FastCDC (Xia et al., "The Design of Fast Content-Defined Chunking for Data Deduplication Based
Storage Systems", TPDS 2020) as the library pyfastcdc implements it. A cut depends on at most
CUT_MAX bytes from the start of its chunk, so a file is cut through a window that moves along:
memory does not grow with the file, and a file that is cut short by somebody else ends in an error,
not in a signal as with mmap(2).

A hole is not read. The chunks that lie in it are those that as many zeros would give, so how a file
is stored leaves no mark.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator

from pyfastcdc import FastCDC

CUT_AVERAGE = 128 << 10
CUT_MIN = 32 << 10
CUT_MAX = 512 << 10
WINDOW_BYTES = 8 << 20

Chunk = bytes | memoryview


class Truncated(Exception):
    """The file ended before its stated size."""


def cut_file(handle: int, size: int) -> Iterator[list[Chunk]]:
    """The chunks of the first `size` bytes of an open file in order, some at a time: what a window
    holds, or a run of zeros in a hole, which is one object again and again. Raises Truncated and
    OSError."""
    at, hole = 0, (0, 0)
    while at < size:
        if at >= hole[1]:
            hole = _next_hole(handle, at, size)
        if hole[0] <= at and hole[1] - at >= CUT_MAX:
            zeros = _zero_chunk()
            count = min((hole[1] - at - CUT_MAX) // len(zeros) + 1, WINDOW_BYTES // len(zeros))
            yield [zeros] * count
            at += count * len(zeros)
            continue
        # The window may reach into a hole far enough for the last cut before it, no further.
        end = min(at + WINDOW_BYTES, size, hole[0] + CUT_MAX if hole[0] > at else size)
        chunks = _cut(_read(handle, at, end - at), last=end == size)
        yield chunks
        at += sum(map(len, chunks))


def _cut(window: bytes, *, last: bool) -> list[Chunk]:
    """The chunks of a window; the last CUT_MAX bytes are left to the next one unless the content
    ends here."""
    chunks: list[Chunk] = []
    left = len(window)
    cuts = _cutter().cut_buf(window)
    while left and (last or left >= CUT_MAX):
        data = next(cuts).data
        chunks.append(data)
        left -= len(data)
    return chunks


def _cutter() -> FastCDC:
    return FastCDC(CUT_AVERAGE, min_size=CUT_MIN, max_size=CUT_MAX)


@functools.cache
def _zero_chunk() -> bytes:
    return bytes(_cut(bytes(2 * CUT_MAX), last=False)[0])


def _next_hole(handle: int, at: int, size: int) -> tuple[int, int]:
    """Start and end of the first hole that ends behind `at`; an empty one at `size` when there is
    none."""
    try:
        start = os.lseek(handle, at, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise Truncated from error
        raise
    if start >= size:
        return size, size
    try:
        end = os.lseek(handle, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        end = size
    return start, min(end, size)


def _read(handle: int, at: int, length: int) -> bytes:
    data = os.pread(handle, length, at)
    while len(data) < length:
        more = os.pread(handle, length - len(data), at + len(data))
        if not more:
            raise Truncated
        data += more
    return data
