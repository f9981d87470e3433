"""Says where the pieces of a stream are taken: in a thread of its own, or on the event loop.

Theory. A thread that waits for a piece, stores it and tells the loop costs two switches of threads
a piece, and the two wait for each other at the interpreter's lock. On slow links, where pieces come
one by one, that is more than hashing and storing take. So the loop takes the pieces itself, and
hands them on in the same wake-up, where this fills little of its time. Where pieces come fast, or
storing is slow, a thread takes them: the loop is free for others meanwhile. So it does for a store
on a disk, always: any write to it may hang, such as while the file system is frozen for a snapshot,
no call tells beforehand (ext4 knows no RWF_NOWAIT for writes, which waits for a frozen file system
all the same), and with the loop all of the agent would hang. A second thread that writes for the
loop, which waits for it 50 ms at most, was tried, and takes as much of the processor as a thread
for each stream.

What counts is the share of the time that goes by in storing, over a window of pieces; or one piece
that takes very long, since then the store makes writers wait. Who has left the loop comes back
after a longer window each time. Many streams that each take little may take all of the loop's time
together, and then nothing tells them so: each of them gets fewer pieces. So their shares are added
up, and who finds no room stays with its thread.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

PIECE_MAX = 256 << 10
"""Larger pieces are taken while they arrive, by a thread."""

SHARE_MAX = 0.05
SHARE_LOW = 0.02
"""A stream leaves the loop when it takes more than this share of its time, and comes to it when it
would take less than the second."""

LOOP_SHARE_MAX = 0.25
"""All streams of a loop together take no more than about this share of its time."""

STALL_S = 0.05
WINDOW = 8
WINDOW_MAX = 1024

Letter_contra = TypeVar("Letter_contra", contravariant=True)


class Inbox(Protocol[Letter_contra]):
    """A loop that may take the pieces of streams, in `context`, and who hears of it (see
    Mailbox)."""

    loop: asyncio.AbstractEventLoop
    context: contextvars.Context

    def deliver(self, letter: Letter_contra) -> None: ...


_taken: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()
"""The sum of the shares of those that are on a loop; it belongs to the thread of that loop."""


class Share:
    """How much of the time one stream takes for storing. Times are in seconds; `now` may start
    anywhere and only grows."""

    def __init__(self) -> None:
        self.low = self.high = False
        self._share = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._window = WINDOW
        self._pieces = 0
        self._since: float | None = None
        self._busy_s = 0.0

    def spent(self, took_s: float, now: float) -> None:
        """A piece was stored, which took so long. `low` and `high` say then whether the loop should
        take the next, or a thread."""
        if self._since is None:
            self._since = now  # the first piece is the beginning of the window
            return
        self._busy_s += took_s
        self._pieces += 1
        if took_s >= STALL_S:
            self.low, self.high = False, True
        elif self._pieces >= self._window:
            share = self._busy_s / max(now - self._since, 1e-9)
            full = False
            if self._loop is not None:
                taken = _taken[self._loop] = _taken[self._loop] + share - self._share
                full = taken > LOOP_SHARE_MAX
            self.low, self.high, self._share = share < SHARE_LOW, share > SHARE_MAX or full, share
            self._since, self._busy_s, self._pieces = now, 0.0, 0

    def begin(self) -> None:
        """Count anew: the stream has paused, or goes on elsewhere."""
        self.low = self.high = False
        self._since, self._busy_s, self._pieces = None, 0.0, 0

    def enter(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Go to the loop, called there; False when others leave too little of its time."""
        taken = _taken.get(loop, 0.0) + self._share
        if taken > LOOP_SHARE_MAX:
            return False
        _taken[loop], self._loop = taken, loop
        return True

    def leave(self) -> None:
        """Leave the loop, called there; as often as one likes."""
        if self._loop is not None:
            _taken[self._loop] -= self._share
            self._loop = None

    def left_loop(self) -> None:
        """It was too much for the loop."""
        self._window = min(WINDOW_MAX, 2 * self._window)
        self.begin()
