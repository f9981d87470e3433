"""Holes: which bytes of a content are written to a new file, so that its blocks of zeros take no
space.

What a tree states of a file does not say where its holes were: equal contents are equal however
they were stored. So every whole block of zeros becomes one.
"""

from __future__ import annotations

from collections.abc import Iterator

HOLE = 4096
"""Bytes of zeros, at a multiple of it, that become a hole."""

_ZEROS = bytes(HOLE)


def filled(offset: int, data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Ranges (begin, end) of `data`, which belongs at `offset` of a new file, that must be written.
    Zeros at the ends, in blocks that neighbours share, need not be either: or a hole of many chunks
    would have a block at every seam."""
    view = memoryview(data)
    first = min(-offset % HOLE, len(view))
    last = max(first, len(view) - (offset + len(view)) % HOLE)
    begin = 0 if any(view[:first]) else first
    end = len(view) if any(view[last:]) else last
    for at in _holes(offset, data):
        if begin < at:
            yield begin, at
        begin = at + HOLE
    if begin < end:
        yield begin, end


def has_hole(offset: int, data: bytes | memoryview) -> bool:
    """Whether a whole block of the file is zeros."""
    return next(_holes(offset, data), None) is not None


def _holes(offset: int, data: bytes | memoryview) -> Iterator[int]:
    """Where in `data` whole blocks of the file are zeros. The first byte of most blocks tells."""
    start = -offset % HOLE
    for number, byte in enumerate(data[start::HOLE]):
        at = start + number * HOLE
        if byte == 0 and bytes(data[at : at + HOLE]) == _ZEROS:
            yield at
