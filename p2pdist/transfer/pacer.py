"""A limit on what all streams of a host receive together: threads that have received too fast sleep, and TCP holds the senders back."""

from __future__ import annotations

import threading
import time

BURST_S = 0.05
"""How much of the limit, unused a moment ago, may be caught up."""


class Pacer:
    """`limit_bytes_s` for everybody who shares this object. Thread-safe."""

    def __init__(self, limit_bytes_s: float) -> None:
        self._limit_bytes_s = limit_bytes_s
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def pause_s(self, length: int) -> float:
        """Seconds to sleep after `length` more bytes, before the next are received."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_S) + length / self._limit_bytes_s
            return max(0.0, self._free_at - now)
