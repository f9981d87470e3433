"""Zstd frames that begin earlier: with bytes put before what they decode to, and nothing
decompressed.

A frame is a header, blocks and perhaps a checksum (RFC 8878). The bytes come first, as a raw block
behind a new header, which states the sum of the lengths. The other blocks are as good there as they
were: what they repeat lies so many bytes back, and never before the first byte of their frame, or
it would not have decompressed. A raw block changes neither the offsets that are repeated nor any
table, so the first compressed block finds what it finds at the beginning of a frame. A checksum,
which is that of the whole content, goes.
"""

from __future__ import annotations

import struct

import zstandard

_HEADER = struct.Struct("<IBI")
_SINGLE_SEGMENT = 2 << 6 | 1 << 5
"""Frame_Header_Descriptor: Frame_Content_Size has four bytes, and the window is as long as the
content; no dictionary, no checksum."""
_CHECKSUM_BYTES = 4


def blocks_of(frame: bytes | memoryview) -> tuple[int, int]:
    """Where in a frame, which decompresses, its blocks begin and end; nowhere when it needs a
    dictionary. Raises ZstdError."""
    found = zstandard.get_frame_parameters(frame)
    if found.dict_id:
        return 0, 0
    return zstandard.frame_header_size(frame), len(frame) - (_CHECKSUM_BYTES if found.has_checksum else 0)


def beginning(head: bytes, length: int) -> bytes:
    """What comes before the blocks of a frame that decodes to `length` bytes, for one that decodes
    to `head` and these. Both together have at most 128 KiB."""
    raw_block = len(head) << 3  # not the last one, of type 0
    return (
        _HEADER.pack(zstandard.MAGIC_NUMBER, _SINGLE_SEGMENT, len(head) + length)
        + raw_block.to_bytes(3, "little")
        + head
    )
