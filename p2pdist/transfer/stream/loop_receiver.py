"""Receives the pieces of a stream on the event loop, as long as that takes little of its time.

Theory. A thread that waits for a piece, stores it and tells the loop costs two switches of threads
a piece, and the two wait for each other at the interpreter's lock. On slow links, where pieces come
one by one, that is more than hashing and storing take. So the loop receives the pieces itself, and
hands their events on in the same wake-up, where this fills little of its time. Where pieces come
fast, or storing is slow, a thread receives them, and the loop is free for other work. A store on a
disk always has a thread: any write to a disk may hang, such as while the file system is frozen for
a snapshot, no call tells beforehand (ext4 has no RWF_NOWAIT for writes, which waits for a frozen
file system all the same), and the whole agent would hang with the loop. A second thread that writes
for the loop, which waits for it 50 ms at most, takes as much of the processor as a thread for each
stream.

What counts is the share of the time that goes by in storing, over a window of pieces; or one piece
that takes very long, since then the store makes writers wait. A stream that has left the loop comes
back after a longer window each time. Many streams that each take little may take all of the loop's
time together without any of them seeing it: each gets fewer pieces. So their shares are added up,
and a stream for which the loop has no room stays with its thread.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from p2pdist.model.messages import STREAM_END
from p2pdist.transfer.stream.events import StreamEvent
from p2pdist.transfer.stream.frames import FrameReader, TlsFrameReader
from p2pdist.transfer.stream.protocol import StripeStream

PIECE_MAX = 256 << 10
"""Bytes; a thread receives larger pieces, while they arrive."""

SHARE_MAX = 0.05
SHARE_LOW = 0.02
"""A stream leaves the loop when it takes more than SHARE_MAX of the loop's time, and comes to it
when it would take less than SHARE_LOW."""

LOOP_SHARE_MAX = 0.25
"""All streams of a loop together take no more than about this share of its time."""

STALL_S = 0.05
"""A piece that takes longer to store sends its stream back to a thread."""

WINDOW = 8
WINDOW_MAX = 1024
"""Pieces over which a share is measured: at first, and at most after a stream has left the loop."""

Letter_contra = TypeVar("Letter_contra", contravariant=True)


class Inbox(Protocol[Letter_contra]):
    """An event loop that may receive the pieces of streams, in `context`, and takes their events
    (see Mailbox)."""

    loop: asyncio.AbstractEventLoop
    context: contextvars.Context

    def deliver(self, letter: Letter_contra) -> None: ...


_taken: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()
"""The sum of the shares of the streams on a loop; only the thread of that loop uses it."""


class Share:
    """How much of the time one stream takes for storing. Times are in seconds; `now` may start
    anywhere and only grows."""

    def __init__(self) -> None:
        self.low = self.high = False
        """Whether the loop should receive the next piece (low), or a thread (high); written by
        `spent` and `begin`."""
        self._share = 0.0
        """Of the last window; 0 to 1."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that counts this share; written by `enter` and `leave`."""
        self._window = WINDOW
        self._pieces = 0
        self._since: float | None = None
        self._busy_s = 0.0

    def spent(self, took_s: float, now: float) -> None:
        """Count a piece that was stored in `took_s`, and decide `low` and `high`."""
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
        """Count the stream in, in the loop's thread; False when other streams leave too little of
        the loop's time."""
        taken = _taken.get(loop, 0.0) + self._share
        if taken > LOOP_SHARE_MAX:
            return False
        _taken[loop], self._loop = taken, loop
        return True

    def leave(self) -> None:
        """Count the stream out, in the loop's thread. Idempotent."""
        if self._loop is not None:
            _taken[self._loop] -= self._share
            self._loop = None

    def left_loop(self) -> None:
        """Make the next window longer: the stream took too much of the loop's time."""
        self._window = min(WINDOW_MAX, 2 * self._window)
        self.begin()


class LoopReceiver:
    """Receives a stream on the loop of `inbox`, between two receiver threads.

    `to_thread(pause_s)` starts a thread that goes on with the stream after a pause; `end` hears the
    end of the stream, with the error that ended it. `share` measures every piece, on the loop and
    in threads.
    """

    def __init__(
        self,
        stream: StripeStream,
        share: Share,
        inbox: Inbox[StreamEvent],
        to_thread: Callable[[float], None],
        end: Callable[[Exception | None, Callable[[StreamEvent], None]], None],
    ) -> None:
        self.share = share
        self._stream = stream
        self._inbox = inbox
        self._to_thread = to_thread
        self._end = end
        self._pause_s = 0.0
        """How long the stream must pause after its last piece; written by `_take`."""
        self._fd = -1
        """The descriptor that the loop watches, -1 for none; written by `_begin` and `_leave`."""

    def take_over(self) -> bool:
        """Let the loop receive from now on; called in the receiver thread, which ends then. False
        when the loop is closed."""
        self.share.begin()
        try:
            self._inbox.loop.call_soon_threadsafe(self._run, self._begin, context=self._inbox.context)
        except RuntimeError:
            return False
        return True

    # -- on the loop

    def _run(self, step: Callable[[], bool]) -> None:
        """Take a step, which returns True at the end of the stream."""
        error: Exception | None = None
        try:
            if not step():
                return
        except Exception as failure:
            error = failure
        self._leave()
        self._end(error, self._inbox.deliver)

    def _begin(self) -> bool:
        stream, frames = self._stream, self._stream.frames
        assert stream.connection is not None and frames is not None
        if not self.share.enter(self._inbox.loop):
            return self._hand_back(too_much=True)
        frames.expect(stream.shortest())
        self._fd = stream.connection.fileno()
        self._inbox.loop.add_reader(self._fd, self._run, self._take)
        return self._take() if frames.ready else False

    def _take(self) -> bool:
        """Take the frame that has come, and hand the stream back if that is more than the loop
        should do."""
        frames = self._stream.frames
        assert frames is not None
        if self._take_frame(frames):
            return True
        while frames.ready and not (self._pause_s or self.share.high):
            if self._take_frame(frames):
                return True
        if self._pause_s or self.share.high:
            return self._hand_back(too_much=True)
        # libuv tells of an error once, even if there is more to be taken before it, and then
        # watches no longer.
        return self._hand_back(too_much=False) if frames.broken() else False

    def _take_frame(self, frames: FrameReader | TlsFrameReader) -> bool:
        """Store the piece if it has come whole; True at the end of the stream."""
        stream = self._stream
        head = frames.head_if_there(stream.shortest())
        if head is None:
            return False
        piece, length = head
        if piece == STREAM_END:
            stream.check_end(length)
            return True
        stream.check_frame(piece, length)
        data = frames.data_if_there(length)
        if data is not None:
            self._pause_s = stream.store(piece, data, self._inbox.deliver)
            frames.expect(stream.shortest())
        return False

    def _hand_back(self, *, too_much: bool) -> bool:
        """Let a thread go on; after `too_much` the stream comes back after a longer window. Returns
        False, as the stream has not ended."""
        self._leave()
        (self.share.left_loop if too_much else self.share.begin)()
        assert self._stream.connection is not None
        self._stream.connection.settimeout(None)  # libuv makes it non-blocking, and a thread waits in recv
        pause_s, self._pause_s = self._pause_s, 0.0
        self._to_thread(pause_s)
        return False

    def _leave(self) -> None:
        self.share.leave()
        if self._fd >= 0:
            self._inbox.loop.remove_reader(self._fd)
            self._fd = -1
