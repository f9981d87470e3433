"""The form of a stripe stream (see StreamRequest in model/messages.py), shared by both ends."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from p2pdist.model.pieces import PieceLayout

STREAM_PATH = "/v1/streams"
STREAM_TYPE = "application/vnd.p2pdist.stream"

FRAME = struct.Struct(">II")
"""Head of a frame: piece number, length in bytes."""


def stream_length(layout: PieceLayout, pieces: Iterable[int]) -> int:
    """Bytes of a whole stream that carries `pieces`, its closing frame included."""
    return FRAME.size + sum(FRAME.size + layout.length(piece) for piece in pieces)
