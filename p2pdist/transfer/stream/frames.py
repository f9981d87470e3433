"""The frames of a stripe stream (StreamRequest in model/messages.py), and reading them from a
blocking socket into one buffer, with few system calls and few wake-ups.

Theory: a thread that waits in recv is woken by every segment that comes; at low rates these
wake-ups cost more than hashing and storing. So the thread waits in poll, with SO_RCVLOWAT
(socket(7)) at what is certain to come: the head of a frame and the shortest piece that may follow,
then the rest. The kernel wakes it when all of that is there (or when it can hold no more), and one
call takes it. Nothing is taken before, so recv itself never waits: it would count towards the mark
anew from what it has taken already.

What is waited for fills the receive buffer, and a buffer that holds no more than that stops the
sender for a round trip after each frame. The kernel makes room for a mark, and keeps it when the
mark is lowered (tcp_set_rcvlowat in net/ipv4/tcp.c), and unlike SO_RCVBUF that does not end its own
adjusting. So the first mark is ROOM times what will be waited for.

A fast sender should not wait until the thread has woken up and made room. So when frames come
faster than FAST_BYTES_S, what is there is taken at once and recv waits for the rest of the frame.
A single frame says little of the rate: one that lay in the kernel while the thread was late comes
at memory speed over any link, and where several streams share the interpreter one frame is late for
that. So the rate is that of RATE_BYTES, which hold several bursts of a shaped link.

Invariants: a reader never waits for bytes that may not come, and never takes a byte beyond the
frame.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterable

from p2pdist.model.messages import STREAM_END
from p2pdist.model.pieces import PieceLayout
from p2pdist.transfer.tls import RECORD_MAX, TlsConnection

STREAM_PATH = "/v1/streams"
STREAM_TYPE = "application/vnd.p2pdist.stream"
WAITS_FIELD = "P2PDist-Waits"
"""The header field of a response, with the value 1, by which a parent says that it has no piece to
send yet."""


FRAME = struct.Struct(">II")
"""Head of a frame: piece number, length in bytes."""


def stream_length(layout: PieceLayout, pieces: Iterable[int]) -> int:
    """Bytes of a whole stream that carries `pieces`, its closing frame included."""
    return FRAME.size + sum(FRAME.size + layout.length(piece) for piece in pieces)


STEP_BYTES = 256 << 10
"""Most bytes that a reader waits for at once: it takes larger pieces while they arrive."""

ROOM = 4
"""The first mark of a connection is this many times the bytes that will be waited for."""

FAST_BYTES_S, RATE_BYTES = 100e6, 1 << 20
"""From the first rate on, measured over so many bytes at least, a reader takes what is there and
waits in recv."""

TLS_FAST_BYTES_S = 50e6
"""The first of these over TLS, which is taken record by record: being woken within a frame adds
less to that than to a plain stream, and a mark costs as much (docs/measurements.md)."""

_BROKEN = select.POLLERR | select.POLLHUP
_DATA_AT = 64
_HEAD_AT = _DATA_AT - FRAME.size


class Rate:
    """Whether frames come at `fast_bytes_s`. Times are in seconds; `now` may start anywhere and
    only grows."""

    def __init__(self, now: float, fast_bytes_s: float) -> None:
        self._fast_bytes_s = fast_bytes_s
        self.fast = False
        """Whether the last RATE_BYTES came so fast; written by `count`."""
        self._since = now
        self._bytes = 0
        """Bytes that came since."""

    def count(self, length: int, now: float) -> bool:
        """Count a frame of `length` bytes that is done with; returns `fast`."""
        self._bytes += length
        if self._bytes >= RATE_BYTES:
            self.fast = self._bytes > self._fast_bytes_s * (now - self._since)
            self._since, self._bytes = now, 0
        return self.fast


class CutShort(Exception):
    """The connection ended `missing` bytes before the end of what was certain to come."""

    def __init__(self, missing: int) -> None:
        super().__init__(missing)
        self.missing = missing


class _Reader:
    """What readers of frames have in common: the buffer of a frame, the rate, and the mark of the
    connection."""

    def __init__(self, connection: socket.socket, data_max: int, fast_bytes_s: float) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(_DATA_AT + data_max))
        self._lock = threading.Lock()
        self._taken = 0
        """Bytes of the current frame in the buffer; written by what takes them, and by `done`."""
        self._mark = 1
        """SO_RCVLOWAT in bytes, 0 where it may be another; written by `_set_mark` and `shorten`."""
        self._shortened = False
        """Whether any frame may be an empty one; written by `shorten`, under the lock."""
        self._rate = Rate(time.monotonic(), fast_bytes_s)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._set_mark(ROOM * min(FRAME.size + data_max, STEP_BYTES))

    def shorten(self) -> None:
        """Wait for no more than a head from now on, as any frame may be an empty one, whatever
        `head` and `expect` are told; from any thread, while the connection is open."""
        with self._lock:
            self._shortened, self._mark = True, 0
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def broken(self) -> bool:
        """Whether the connection has failed, or ended on both sides; bytes that came before may
        still be there."""
        ready = self._poll.poll(0)
        return bool(ready and ready[0][1] & _BROKEN)

    def done(self) -> None:
        """End the frame: `data` is invalid from now on, and `head` waits for the next one."""
        if self._rate.count(self._taken, time.monotonic()):
            self._set_mark(1)
        self._taken = 0

    def rest(self) -> None:
        """The thread will wait for something else than frames."""

    def leave(self) -> None:
        """Bring the connection to the state in which the reader found it, for other uses."""
        self._set_mark(1)

    def _set_mark(self, count: int) -> None:
        if count != self._mark:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._mark = count


class FrameReader(_Reader):
    """Reads the frames that come over `connection`, with at most `data_max` bytes of data each. For
    one thread, except `receiving` and `shorten`."""

    def __init__(self, connection: socket.socket, data_max: int) -> None:
        super().__init__(connection, data_max, FAST_BYTES_S)

    def head(self, shortest: int, timeout_s: float | None = None) -> tuple[int, int]:
        """Wait for the next frame, which has at least `shortest` bytes of data: its piece and
        length. Raises CutShort and OSError, and TimeoutError when nothing comes for `timeout_s`."""
        waits = not self._rate.fast
        while self._taken < FRAME.size:
            if waits:
                with self._lock:
                    self._set_mark(1 if self._rate.fast else self._certain(shortest))
                self._poll_for(timeout_s)
            with self._lock:
                self._take(min(FRAME.size + shortest, STEP_BYTES), socket.MSG_DONTWAIT)
            waits = True
        piece, length = FRAME.unpack_from(self._buffer, _HEAD_AT)
        return piece, length

    def data(self, length: int) -> memoryview:
        """The data of that frame, valid until `done`. Raises CutShort and OSError."""
        end = FRAME.size + length
        while self._taken < end:
            if self._rate.fast:
                self._set_mark(1)  # or recv would be woken only when as much is there anew
                self._take(end, socket.MSG_WAITALL)
            else:
                step = min(end, self._taken + STEP_BYTES)
                self._set_mark(step - self._taken)
                self._poll_for()
                self._take(step, socket.MSG_DONTWAIT)
        return self._buffer[_DATA_AT : _DATA_AT + length]

    def expect(self, shortest: int) -> None:
        """Make the connection readable when the next frame, or much of it, has come; for an event
        loop, which does not wait in `head`."""
        with self._lock:
            self._set_mark(self._certain(shortest))

    def head_if_there(self, shortest: int) -> tuple[int, int] | None:
        """The next frame's piece and length, without waiting: None while they have not come. Raises
        CutShort and OSError."""
        if self._taken < FRAME.size:
            with self._lock:
                self._take(FRAME.size + shortest, socket.MSG_DONTWAIT)
                if self._taken < FRAME.size:
                    self._set_mark(self._certain(shortest))
                    return None
        piece, length = FRAME.unpack_from(self._buffer, _HEAD_AT)
        return piece, length

    def data_if_there(self, length: int) -> memoryview | None:
        """The data of that frame, without waiting: None while it is not whole. The connection is
        readable when the rest, or much of it, has come. Raises CutShort and OSError."""
        end = FRAME.size + length
        if self._taken < end:
            self._take(end, socket.MSG_DONTWAIT)
            if self._taken < end:
                self._set_mark(min(end - self._taken, STEP_BYTES))
                return None
        return self._buffer[_DATA_AT : _DATA_AT + length]

    @property
    def ready(self) -> bool:
        """Whether bytes are here of which the connection does not tell."""
        return False

    def receiving(self) -> int | None:
        """The piece whose frame has begun to come and is not done; from any thread, while the
        connection is open."""
        with self._lock:
            if self._taken >= FRAME.size:
                head = bytes(self._buffer[_HEAD_AT:_DATA_AT])
            elif self._taken:
                return None
            else:
                try:
                    head = self._connection.recv(FRAME.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                except OSError:
                    return None
        if len(head) < FRAME.size:
            return None
        piece = int(FRAME.unpack(head)[0])
        return None if piece == STREAM_END else piece

    def _certain(self, shortest: int) -> int:
        """How many bytes of the next frame are certain to come, STEP_BYTES at most; the lock is
        held."""
        return min(FRAME.size + (0 if self._shortened else shortest), STEP_BYTES) - self._taken

    def _poll_for(self, timeout_s: float | None = None) -> None:
        if not self._poll.poll(timeout_s * 1000 if timeout_s is not None else None):
            raise TimeoutError(f"nothing came for {timeout_s} s")

    def _take(self, end: int, flags: int) -> None:
        """Take what is there of the frame's first `end` bytes; with MSG_WAITALL wait for all of
        them."""
        view = self._buffer[_HEAD_AT + self._taken : _HEAD_AT + end]
        try:
            count = self._connection.recv_into(view, 0, flags)
        except BlockingIOError:
            return
        if not count:
            raise CutShort(len(view))
        self._taken += count


class TlsFrameReader(_Reader):
    """Reads the frames that come over TLS, with at most `data_max` bytes of data each. TLS hands
    out what it has decrypted: at most one record of 16 KiB at a time.

    While frames come slowly the thread sleeps until much of a frame is there, as FrameReader's
    does: encrypted bytes are never fewer than those that they hold, and what was taken from the
    kernel before and not decrypted counts as pending, so a mark of what a frame still lacks is
    always reached. With a time limit TlsSocket waits for the connection itself, within a record as
    well, and then there is no mark.

    On an event loop the connection does not block, and TLS may have taken the beginning of a record
    whose rest is yet to come: then the mark is lower by a record.
    """

    _connection: TlsConnection

    def __init__(self, connection: TlsConnection, data_max: int) -> None:
        super().__init__(connection, data_max, TLS_FAST_BYTES_S)
        self._there = 0
        """Bytes that the connection held after the last wait and that were not taken since; may be
        negative."""
        self._within = False
        """Whether TLS may have taken a part of a record; written by `_take_if_there`."""

    def head(self, shortest: int, timeout_s: float | None = None) -> tuple[int, int]:
        """Wait for the next frame, which has at least `shortest` bytes of data: its piece and
        length. Raises CutShort and OSError, and TimeoutError when nothing comes for `timeout_s`."""
        if self._within:  # what is left of the record may be less than a mark
            self._within, self._there = False, RECORD_MAX
        self._set_mark(1)
        if timeout_s is not None:
            self.rest()
            self._connection.settimeout(timeout_s)
        while self._taken < FRAME.size:
            self._take(FRAME.size + shortest, FRAME.size)
        piece, length = FRAME.unpack_from(self._buffer, _HEAD_AT)
        return piece, length

    def data(self, length: int) -> memoryview:
        """The data of that frame, valid until `done`. Raises CutShort and OSError."""
        end = FRAME.size + length
        if self._connection.gettimeout() is None:
            while self._taken < end:
                self._take_all(end if self._rate.fast else self._awaited(end))
        while self._taken < end:
            self._take(end, end)
        return self._buffer[_DATA_AT : _DATA_AT + length]

    @property
    def ready(self) -> bool:
        """Whether TLS holds decrypted bytes, of which the connection does not tell."""
        return self._connection.pending() > 0

    def expect(self, shortest: int) -> None:
        """Make the connection readable when the next frame, or much of it, has come; for an event
        loop, which does not wait in `head`."""
        self.rest()
        self._connection.settimeout(0)
        self._mark_missing(FRAME.size + shortest, FRAME.size)

    def head_if_there(self, shortest: int) -> tuple[int, int] | None:
        """The next frame's piece and length, without waiting: None while they have not come. Raises
        CutShort and OSError."""
        if self._taken < FRAME.size and not self._take_if_there(FRAME.size + shortest, FRAME.size):
            return None
        piece, length = FRAME.unpack_from(self._buffer, _HEAD_AT)
        return piece, length

    def data_if_there(self, length: int) -> memoryview | None:
        """The data of that frame, without waiting: None while it is not whole. The connection is
        readable when the rest, or much of it, has come. Raises CutShort and OSError."""
        end = FRAME.size + length
        if self._taken < end and not self._take_if_there(end, end):
            return None
        return self._buffer[_DATA_AT : _DATA_AT + length]

    def done(self) -> None:
        super().done()
        if not self._rate.fast:
            self.rest()

    def rest(self) -> None:
        self._connection.rest()

    def leave(self) -> None:
        super().leave()
        self.rest()
        self._connection.settimeout(None)

    def receiving(self) -> int | None:
        """The piece whose frame's head has been decrypted and that is not done; from any thread."""
        if self._taken < FRAME.size:
            return None
        piece = int(FRAME.unpack_from(self._buffer, _HEAD_AT)[0])
        return None if piece == STREAM_END else piece

    def _take(self, end: int, least: int) -> None:
        """Take one record's part of the frame's first `end` bytes, once much of them is there, or
        its first `least` when the reader was shortened."""
        view = self._buffer[_HEAD_AT + self._taken : _HEAD_AT + end]
        if not self._rate.fast and self._connection.gettimeout() is None:
            self._wait_for(end, least)
        count = self._connection.recv_into(view)
        if not count:
            raise CutShort(len(view))
        self._taken += count
        self._there -= count

    def _wait_for(self, end: int, least: int) -> None:
        """Sleep until much of the frame's first `end` bytes is there, or its first `least` when the
        reader was shortened."""
        if self._there > 0 or self._connection.pending():
            return
        with self._lock:
            missing = (least if self._shortened else end) - self._taken
            self._there = min(missing, STEP_BYTES)
            self._set_mark(self._there)
        self.rest()
        self._poll.poll()
        self._set_mark(1)  # TLS waits for the rest of a record, which is less

    def _awaited(self, end: int) -> int:
        """Sleep until much of the frame's first `end` bytes is there; returns how far that is."""
        self._wait_for(end, end)
        return min(end, self._taken + max(self._there, self._connection.pending()))

    def _take_all(self, end: int) -> None:
        """Take the frame's first `end` bytes as they come, in one call."""
        view = self._buffer[_HEAD_AT + self._taken : _HEAD_AT + end]
        count = self._connection.recv_all_into(view, permit=self._rate.fast)
        self._taken += count
        self._there -= count
        if count < len(view):
            raise CutShort(len(view) - count)

    def _take_if_there(self, end: int, least: int) -> bool:
        """Take what has come of the frame's first `end` bytes; whether that makes `least`."""
        while self._taken < end:
            try:
                count = self._connection.recv_into(self._buffer[_HEAD_AT + self._taken : _HEAD_AT + end])
            except BlockingIOError:
                self._within = True
                break
            if not count:
                raise CutShort(end - self._taken)
            self._taken += count
            self._within = False
        if self._taken < least:
            self._mark_missing(end, least)
            return False
        return True

    def _mark_missing(self, end: int, least: int) -> None:
        """Make the connection readable when the frame's first `end` bytes have come, or many of
        them; or its first `least` when the reader was shortened."""
        with self._lock:
            missing = min((least if self._shortened else end) - self._taken, STEP_BYTES)
            self._set_mark(max(1, missing - RECORD_MAX * self._within))
