"""A semaphore for threads that would only wait for each other at the interpreter's lock.

Theory. A thread gives the interpreter's lock away with every call into a library or the kernel, and
gets it back when others give it away. Over TLS a piece of 64 KiB takes about a dozen such calls of
a few microseconds each, and where several threads receive, nearly each of them ends in a switch of
threads, which takes longer than the call. So a thread that receives fast goes on while there is
something to receive, up to HOLD_BYTES; the others sleep, and are woken in the order in which they
came. A thread that has to wait for its peer lets the next one receive, and one that takes very long
over what it received loses its permit: permits spare time, and nobody needs one.

Invariants: no more than `permits` threads hold one; whoever waits gets one after those that came
before. Python's own semaphore does not keep that order: who releases it may have it again at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

HOLD_BYTES = 512 << 10
"""After so many bytes a thread releases its permit where others wait (docs/measurements.md)."""


PATIENCE_S = 0.1
"""A thread that has held a permit for so long loses it where others wait: what it does with the
piece may take any time, such as while a disk hangs."""


class Permit:
    """What one thread holds, until it releases it or loses it."""

    def __init__(self) -> None:
        self.since = time.monotonic()


class FairSemaphore:
    """Lets `permits` threads on at a time, first come, first served."""

    def __init__(self, permits: int) -> None:
        self._lock = threading.Lock()
        self.free = permits
        """Permits that nobody holds; written under the lock."""
        self._held: dict[Permit, None] = {}
        """The one first that has been held longest; written under the lock."""
        self._waiting: deque[threading.Lock] = deque()
        """A lock, held, for each thread that waits; whoever leaves a permit to it releases the
        lock. Written under the lock."""

    def acquire(self) -> Permit:
        """Wait for a permit."""
        with self._lock:
            if self.free:
                self.free -= 1
                return self._hold()
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        while not mine.acquire(timeout=PATIENCE_S):
            with self._lock:
                self._revoke()
        with self._lock:
            return self._hold()

    def release(self, permit: Permit) -> None:
        """Let another thread have a permit, unless it was lost before."""
        with self._lock:
            if permit in self._held:
                self._leave(permit)

    @property
    def waiting(self) -> int:
        """How many threads wait for a permit."""
        return len(self._waiting)

    def _hold(self) -> Permit:
        permit = Permit()
        self._held[permit] = None
        return permit

    def _leave(self, permit: Permit) -> None:
        del self._held[permit]
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self.free += 1

    def _revoke(self) -> None:
        """Take a permit away that has been held for too long."""
        longest = next(iter(self._held), None)
        if longest is not None and time.monotonic() - longest.since >= PATIENCE_S:
            self._leave(longest)


RECEIVING = FairSemaphore(max(1, min(2, (os.cpu_count() or 1) // 4)))
"""Of threads that receive over TLS. Where there are processors for it, a second one stores
meanwhile."""
