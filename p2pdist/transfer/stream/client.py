"""One stripe stream received in a thread of its own, with blocking sockets, or on the event loop
while its pieces come slowly.

Theory: a thread that receives a whole piece in one call (MSG_WAITALL), hashes and writes it costs
the least per byte and keeps the event loop free. At low rates its wake-ups cost more than the bytes
do, so the loop takes the pieces then (attended.py): the thread ends, and another one begins when
they come fast again. `close` and `finish_piece_and_close` end it from outside by shutting the
socket down, which wakes a blocked receive, and the loop. Nothing here decides on stalls: who
listens to the events does, and closes the stream.

Invariants: one buffer of one piece is all the memory a stream takes, whatever the peer sends; a
piece goes to `write` only after its number and length have been checked, and counts only when
`write` has verified it; exactly one StreamClosed is posted, as the last event; only the closing
frame after everything asked for makes a stream "done", and its connection fit for another.

Asks another agent for a stream, over a connection that is open.
"""

from __future__ import annotations

import itertools
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from p2pdist.model.errors import P2PDistError
from p2pdist.model.messages import STREAM_END, StreamRequest
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import Source
from p2pdist.model.request_id import passed_on
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream.connect import ConnectionPool, Unreachable, connect, secure, why
from p2pdist.transfer.stream.events import Ended, PieceReceived, StreamClosed, StreamEvent, refusal
from p2pdist.transfer.stream.frames import (
    STREAM_PATH,
    STREAM_TYPE,
    CutShort,
    FrameReader,
    TlsFrameReader,
    stream_length,
)
from p2pdist.transfer.stream.loop_receiver import PIECE_MAX, Inbox, Share
from p2pdist.transfer.stream.response import EndOfConnection, MalformedResponse, read_head
from p2pdist.transfer.tls import Tls


def ask(
    connection: socket.socket, source: Source, request: StreamRequest, fields: Mapping[str, str], length: int | None
) -> bool:
    """Send a request with these header fields and read the answer's head. With the `length` that
    the stream will have the connection may serve others after it; returns whether it does. Raises
    Ended when `source` refuses, MalformedResponse, EndOfConnection and OSError."""
    body = msgspec.json.encode(request)
    head = (
        f"POST {STREAM_PATH} HTTP/1.1\r\nHost: {source.address}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nAccept: {STREAM_TYPE}\r\n"
        + "".join(f"{key}: {value}\r\n" for key, value in fields.items())
    )
    head += "Connection: close\r\n\r\n" if length is None else "\r\n"
    connection.sendall(head.encode("ascii") + body)
    answer = read_head(connection)
    if answer.status != 200:
        raise refusal(connection, answer, source)
    if answer.media_type() != STREAM_TYPE:
        raise MalformedResponse(f"the answer is {answer.media_type()[:60]!r}, not a stream")
    stated = answer.fields.get("content-length")
    if "transfer-encoding" in answer.fields or "content-encoding" in answer.fields:
        raise MalformedResponse("the answer is framed or encoded by HTTP, which a stream is not")
    if stated is not None and (length is None or stated != str(length)):
        raise MalformedResponse(f"the answer is to have {stated[:20]} bytes, and the stream has {length or 0}")
    return stated is not None and answer.fields.get("connection", "").lower() != "close"


CONNECT_TIMEOUT_S = 2.0
DEAD_AFTER_S = 10.0
"""A peer whose kernel has responded nothing for about this long is taken for dead (TCP_USER_TIMEOUT,
tcp(7))."""

END_WAIT_S = 1.0
"""The closing frame comes with the last piece, or the connection is not worth keeping."""

logger = logging.getLogger(__name__)
_numbers = itertools.count(1)


class IncomingStream:
    """Receives the pieces of one stripe from `source` and hands each to `write`, in the order in
    which they come.

    `write(piece, data)` verifies and stores, and returns False for wrong bytes; it is called in the
    receiver thread and may raise P2PDistError. `data` is valid during the call only. `on_event` is
    called in the receiver thread as well and should be cheap (see Mailbox). With `attended` pieces
    may be written on its loop, whose `deliver` hears of them then. `number` names the stream in its
    events; by default it is unique within the process. With `tls` the peer must speak it; `pacer`
    holds it back. With `kept` the connection may be one that another stream has left in order, and
    is left so when this one comes to its end.
    """

    def __init__(
        self,
        source: Source,
        request: StreamRequest,
        layout: PieceLayout,
        write: Callable[[int, memoryview], bool],
        on_event: Callable[[StreamEvent], None],
        *,
        number: int | None = None,
        tls: Tls | None = None,
        pacer: Pacer | None = None,
        connections: ConnectionPool | None = None,
        inbox: Inbox[StreamEvent] | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        self.source = source
        self._named = passed_on()
        self.request = request
        self.number = next(_numbers) if number is None else number
        self._layout = layout
        self._write = write
        self._on_event = on_event
        self._tls = tls
        self._pacer = pacer
        self._woken = threading.Event()
        self._connect_timeout_s = connect_timeout_s
        self._dead_after_s = dead_after_s
        self._have = PieceSet(layout.count, request.have)
        missing = self._have.missing(request.stripe, request.stripes)
        self._lacking = len(missing)
        self._connections = connections
        self._inbox = inbox if connections is None and tls is None and layout.piece_size <= PIECE_MAX else None
        self._share = Share()
        self._pause_s = 0.0
        self._attended_fd = -1
        self._length = stream_length(layout, missing) if connections is not None else 0
        self._reusable = False
        self._ending = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._frames: FrameReader | TlsFrameReader | None = None
        self._closing = False
        self._finishing = False
        self._ended = threading.Event()

    @property
    def receiving(self) -> int | None:
        """The piece under way: its frame has begun, and it is not yet stored."""
        with self._lock:
            return self._receiving()

    @property
    def responded(self) -> bool:
        """Whether the source was reached and has begun to answer."""
        return self._frames is not None

    def _receiving(self) -> int | None:
        piece = self._frames.receiving() if self._frames is not None else None
        return piece if piece is not None and piece < self._layout.count else None

    def start(self) -> None:
        """Connect and receive, in a new thread. Once only from outside."""
        name = f"stripe-{self.request.stripe}-{self.source}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the stream has ended; False when it has not within `timeout_s`. Not on the
        loop."""
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """Abort now, from any thread: a piece that is not yet whole is dropped."""
        with self._lock:
            self._closing = True
            if not self._ending:
                self._shut_down()

    def finish_piece_and_close(self) -> None:
        """Close after the piece that is being received, or now when none is."""
        with self._lock:
            self._finishing = True
            self._woken.set()
            if self._receiving() is None and not self._ending:
                self._closing = True
                self._shut_down()

    def _shut_down(self) -> None:
        """Wake the receiver thread wherever it is blocked. The lock is held, so the descriptor is
        not another's yet."""
        self._woken.set()
        if self._socket is not None:
            try:
                # Not the method of an SSLSocket, which takes the connection for plain from then on.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            except OSError:
                logger.debug("stream %d: the connection had ended before", self.number)

    # -- receiver thread

    def _run(self) -> None:
        self._go_on(self._receive, self._on_event)

    def _go_on(self, receive: Callable[[], bool], on_event: Callable[[StreamEvent], None]) -> None:
        """Receive until the stream has ended, which `receive` answers with True; False when it goes
        on elsewhere, or later."""
        try:
            if not receive():
                return
            closed = StreamClosed(self.number, "done")
        except Ended as end:
            closed = StreamClosed(self.number, end.reason, end.detail, end.error)
        except OSError as error:
            closed = StreamClosed(
                self.number, "reset", f"{self.source} broke the connection: {error.strerror or error}"
            )
        except Exception as error:
            logger.exception("stream %d from %s fails", self.number, self.source)
            failure = P2PDistError(
                f"receiving from {self.source} failed: {error!r}", remedy="This is a defect; the log has more"
            )
            closed = StreamClosed(self.number, "failed", failure.what, failure)
        self._leave_loop()
        with self._lock:
            connection, self._socket = self._socket, None
            self._frames = None
            if connection is not None:
                if self._connections is not None and self._reusable and closed.reason == "done":
                    self._connections.give(self.source.address, connection)
                else:
                    connection.close()
            if self._closing and closed.reason in ("reset", "short", "refused"):
                closed = StreamClosed(self.number, "closed")
        on_event(closed)
        self._ended.set()

    def _receive(self) -> bool:
        if self._frames is None:
            self._begin_frames(self._answering())
        return self._receive_frames()

    def _answering(self) -> socket.socket:
        """A connection over which the source has begun to answer: a kept one, else a new one."""
        while (
            connection := self._connections.take(self.source.address) if self._connections is not None else None
        ) is not None:
            try:
                self._adopt(connection)
                self._ask(connection)
                return connection
            except (EndOfConnection, OSError) as gone:
                logger.debug("stream %d: a kept connection had ended: %r", self.number, gone)
            except MalformedResponse as error:
                raise Ended("protocol", f"{self.source}: {error}") from None
        connection = self._connect()
        connection.settimeout(None)
        try:
            self._ask(connection)
        except EndOfConnection:
            raise Ended("short", self._unanswered()) from None
        except ssl.SSLError as error:  # in TLS 1.3 the other side judges a certificate after the handshake
            raise Ended("refused", f"{self.source} does not accept this agent's certificate: {why(error)}") from None
        except MalformedResponse as error:
            raise Ended("protocol", f"{self.source}: {error}") from None
        return connection

    def _connect(self) -> socket.socket:
        timeout_s = self._connect_timeout_s
        try:
            connection = connect(self.source, self._adopt, timeout_s=timeout_s, dead_after_s=self._dead_after_s)
            if self._tls is not None:
                connection = secure(connection, self.source, self._tls, self._adopt, timeout_s=timeout_s)
        except Unreachable as error:
            raise Ended("refused", str(error)) from None
        return connection

    def _unanswered(self) -> str:
        text = f"{self.source} closed the connection without an answer"
        if self._tls is not None:
            return f"{text}; it may not accept this agent's certificate"
        return f"{text}; if it speaks TLS, this agent needs --tls-cert as well"

    def _adopt(self, connection: socket.socket) -> None:
        """Make `connection` the one that `close` shuts down, in place of one that failed or that it
        wraps."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = connection
            if self._closing or self._finishing:
                raise Ended("closed")

    def _ask(self, connection: socket.socket) -> None:
        length = self._length if self._connections is not None else None
        self._reusable = ask(connection, self.source, self.request, self._named, length)

    def _begin_frames(self, connection: socket.socket) -> None:
        data_max = min(self._layout.piece_size, self._layout.size)
        secured = connection if isinstance(connection, ssl.SSLSocket) else None
        frames = TlsFrameReader(secured, data_max) if secured is not None else FrameReader(connection, data_max)
        with self._lock:
            self._frames = frames

    def _receive_frames(self) -> bool:
        frames = self._frames
        assert frames is not None
        pause_s, self._pause_s = self._pause_s, 0.0
        self._wait(pause_s)
        try:
            while True:
                piece, length = frames.head(self._shortest(), END_WAIT_S if self._ending else None)
                if piece == STREAM_END:
                    self._check_end(length)
                    frames.leave()
                    return True
                self._check_frame(piece, length)
                pause_s = self._store(piece, frames.data(length), self._on_event)
                if pause_s:
                    self._share.begin()
                    self._wait(pause_s)
                elif self._share.low and self._go_to_loop():
                    return False
        except TimeoutError:
            raise Ended("short", f"{self.source} sent all and did not end the stream") from None
        except CutShort as short:
            raise self._cut_short(short) from None

    def _wait(self, pause_s: float) -> None:
        if self._pacer is not None and pause_s and self._lacking:
            self._pacer.wait(self.request.priority, pause_s, self._woken)

    def _cut_short(self, short: CutShort) -> Ended:
        return Ended("short", f"{self.source} ended the stream {short.missing} bytes too early")

    def _shortest(self) -> int:
        """Bytes of the shortest piece that may come next; 0 when only the end may."""
        last = self._layout.count - 1
        if not self._lacking:
            return 0
        if last % self.request.stripes == self.request.stripe and last not in self._have:
            return self._layout.length(last)
        return self._layout.piece_size

    def _store(self, piece: int, data: memoryview, on_event: Callable[[StreamEvent], None]) -> float:
        """Store a piece and tell of it; returns for how long to pause then."""
        if self._closing:
            raise Ended("closed")
        began = time.monotonic()
        try:
            ok = self._write(piece, data)
        except P2PDistError as error:
            raise Ended("failed", error.what, error) from error
        if self._inbox is not None:
            now = time.monotonic()
            self._share.spent(now - began, now)
        pause_s = self._pacer.received(self.request.priority, len(data)) if self._pacer is not None else 0.0
        self._have.add(piece)
        self._lacking -= 1
        with self._lock:
            assert self._frames is not None
            self._frames.done()
            # Nobody needs this stream any more, but its end is due now, and leaves the connection
            # in order.
            self._ending = self._reusable and not self._lacking
            finishing = self._finishing and not self._ending
        # The last thing before waiting: it wakes the event loop, which then finds the interpreter
        # free.
        on_event(PieceReceived(self.number, piece, ok))
        if not ok:
            raise Ended("corrupt", f"{self.source} sent wrong bytes for piece {piece}")
        if finishing:
            raise Ended("closed")
        return pause_s

    # -- on the loop

    def _go_to_loop(self) -> bool:
        """Let the loop take what comes from now on; False when it takes nothing."""
        to = self._inbox
        assert to is not None
        self._share.begin()
        try:
            to.loop.call_soon_threadsafe(self._go_on, self._attend, to.deliver, context=to.context)
        except RuntimeError:  # it is closed
            return False
        return True

    def _attend(self) -> bool:
        assert self._inbox is not None and self._socket is not None and isinstance(self._frames, FrameReader)
        if not self._share.enter(self._inbox.loop):
            return self._go_to_thread(too_much=True)
        self._frames.expect(self._shortest())
        self._attended_fd = self._socket.fileno()
        self._inbox.loop.add_reader(self._attended_fd, self._go_on, self._take, self._inbox.deliver)
        return False

    def _take(self) -> bool:
        """Take what has come, and leave the rest to a thread if it is more than the loop should
        take."""
        assert isinstance(self._frames, FrameReader)
        if self._take_frame(self._frames):
            return True
        if self._pause_s or self._share.high:
            return self._go_to_thread(too_much=True)
        # libuv tells of an error once, even if there is more to be taken before it, and then
        # watches no longer.
        return self._go_to_thread(too_much=False) if self._frames.broken() else False

    def _take_frame(self, frames: FrameReader) -> bool:
        """Take the whole piece if it is there; True at the end of the stream."""
        assert self._inbox is not None
        try:
            head = frames.head_if_there(self._shortest())
            if head is None:
                return False
            piece, length = head
            if piece == STREAM_END:
                self._check_end(length)
                return True
            self._check_frame(piece, length)
            data = frames.data_if_there(length)
        except CutShort as short:
            raise self._cut_short(short) from None
        if data is not None:
            self._pause_s = self._store(piece, data, self._inbox.deliver)
            frames.expect(self._shortest())
        return False

    def _go_to_thread(self, *, too_much: bool) -> bool:
        """Let a thread go on, and perhaps the loop not so soon again; False, as the stream has not
        ended."""
        self._leave_loop()
        (self._share.left_loop if too_much else self._share.begin)()
        assert self._socket is not None
        self._socket.settimeout(None)  # libuv makes what it watches non-blocking, and a thread is to wait in recv
        self.start()
        return False

    def _leave_loop(self) -> None:
        self._share.leave()
        if self._attended_fd >= 0:
            assert self._inbox is not None
            self._inbox.loop.remove_reader(self._attended_fd)
            self._attended_fd = -1

    def _check_frame(self, piece: int, length: int) -> None:
        """Before a byte of the piece is received: is it one that was asked for, and of the right
        length?"""
        stripe, stripes = self.request.stripe, self.request.stripes
        if piece >= self._layout.count or piece % stripes != stripe or piece in self._have:
            raise Ended("protocol", f"{self.source} sent piece {piece}, which was not asked for or came before")
        if length != self._layout.length(piece):
            expected = self._layout.length(piece)
            raise Ended("protocol", f"{self.source} sent piece {piece} with {length} bytes instead of {expected}")

    def _check_end(self, length: int) -> None:
        if length or self._lacking:
            raise Ended("protocol", f"{self.source} ended the stream with {self._lacking} pieces unsent")
