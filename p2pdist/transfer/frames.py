"""The form of a stripe stream (see StreamRequest in model/messages.py), shared by both ends."""

from __future__ import annotations

import struct

STREAM_PATH = "/v1/streams"
STREAM_TYPE = "application/vnd.p2pdist.stream"

FRAME = struct.Struct(">II")
"""Head of a frame: piece number, length in bytes."""
