"""The receiving end of one stripe stream: its request, the response, the frames, and how it ends.

Theory. Two drivers receive the same stream by turns: a thread (client.py), and the event loop
(loop_receiver.py). Both read frames, and ask StripeStream what a frame means. Other threads close
the stream meanwhile. What the stream may still do is one State, and TRANSITIONS is the only place
that says how it changes.

Invariants: one buffer of one piece, over TLS with what is not decrypted yet (TAKEN_MAX in
openssl/client.py), is all the memory that a stream takes, whatever the peer sends; a piece goes to
`write` only after its number and length have been checked, and counts only when `write` has
verified it; a stream is "done" only after the closing frame that follows the last piece, and only
then another stream may use its connection.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from p2pdist.model.errors import P2PDistError
from p2pdist.model.messages import StreamRequest
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import Source
from p2pdist.model.request_id import passed_on
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream.connections import ConnectionPool, bytes_received
from p2pdist.transfer.stream.events import Ended, PieceReceived, StreamClosed, StreamEvent, refusal
from p2pdist.transfer.stream.frames import (
    STREAM_PATH,
    STREAM_TYPE,
    WAITS_FIELD,
    CutShort,
    FrameReader,
    TlsFrameReader,
    stream_length,
)
from p2pdist.transfer.stream.response import MalformedResponse, read_head
from p2pdist.transfer.tls import TlsConnection

State = Literal["opening", "receiving", "last piece", "end due", "end optional", "closing", "ended"]
"""opening: no response has come. receiving: pieces come. last piece: the stream closes after the
piece under way. end due: all pieces are stored, and the closing frame leaves the connection fit for
another stream. end optional: as "end due", but the stream was closed from this side, so that a
missing frame is no failure. closing: closed from this side; the socket is shut down. ended:
StreamClosed is or will be posted; the socket is closed, or in the pool."""

Cause = Literal["responded", "piece stored", "all stored", "finish after piece", "finish now", "close", "end"]
"""piece stored: a piece that is not the last, or after which the connection closes. all stored: the
last piece, over a connection that serves other streams after it. finish after piece, finish now:
the caller ends the stream after the piece under way; there is one, or there is none."""

TRANSITIONS: Mapping[tuple[State, Cause], State] = {
    ("opening", "responded"): "receiving",
    ("opening", "finish now"): "closing",
    ("opening", "close"): "closing",
    ("opening", "end"): "ended",
    ("receiving", "all stored"): "end due",
    ("receiving", "finish after piece"): "last piece",
    ("receiving", "finish now"): "closing",
    ("receiving", "close"): "closing",
    ("receiving", "end"): "ended",
    ("last piece", "piece stored"): "closing",
    ("last piece", "all stored"): "end due",
    ("last piece", "finish now"): "closing",
    ("last piece", "close"): "closing",
    ("last piece", "end"): "ended",
    ("end due", "close"): "end optional",
    ("end due", "end"): "ended",
    ("end optional", "end"): "ended",
    ("closing", "end"): "ended",
}
"""A pair that is not here changes nothing."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Response:
    """What the head of a response says: whether the connection serves other streams after this one,
    and whether the source has no piece to send yet."""

    reusable: bool
    waits: bool


def request_stream(
    connection: socket.socket, source: Source, request: StreamRequest, fields: Mapping[str, str], length: int | None
) -> Response:
    """Send a request with the header `fields`, and read the head of the response. `length` is how
    many bytes the stream has, None for a connection that serves this stream alone. Raises Ended
    when `source` refuses, MalformedResponse, EndOfConnection and OSError."""
    body = msgspec.json.encode(request)
    head = (
        f"POST {STREAM_PATH} HTTP/1.1\r\nHost: {source.address}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nAccept: {STREAM_TYPE}\r\n"
        + "".join(f"{key}: {value}\r\n" for key, value in fields.items())
    )
    head += "Connection: close\r\n\r\n" if length is None else "\r\n"
    connection.sendall(head.encode("ascii") + body)
    response = read_head(connection)
    if response.status != 200:
        raise refusal(connection, response, source)
    if response.media_type() != STREAM_TYPE:
        raise MalformedResponse(f"the answer is {response.media_type()[:60]!r}, not a stream")
    stated = response.fields.get("content-length")
    if "transfer-encoding" in response.fields or "content-encoding" in response.fields:
        raise MalformedResponse("the answer is framed or encoded by HTTP, which a stream is not")
    if stated is not None and (length is None or stated != str(length)):
        raise MalformedResponse(f"the answer is to have {stated[:20]} bytes, and the stream has {length or 0}")
    reusable = stated is not None and response.fields.get("connection", "").lower() != "close"
    return Response(reusable, waits=response.fields.get(WAITS_FIELD.lower()) == "1")


class StripeStream:
    """One stream of the pieces of one stripe, whose driver reads from `frames`. One driver at a
    time calls the methods; `close`, `finish_piece_and_close` and the properties are for any thread.

    `write(piece, data)` verifies and stores, and returns False for wrong bytes; it may raise
    P2PDistError. `spent(seconds, now)` hears how long each write took. `fields` are further header
    fields of the request. The stream gives its connection to `pool` when it is done.
    """

    def __init__(
        self,
        number: int,
        source: Source,
        request: StreamRequest,
        layout: PieceLayout,
        write: Callable[[int, memoryview], bool],
        *,
        pacer: Pacer | None,
        pool: ConnectionPool | None,
        spent: Callable[[float, float], None] | None,
        fields: Mapping[str, str],
    ) -> None:
        self.number = number
        self.source = source
        self.request = request
        self.state: State = "opening"
        """Written by `_move` alone, under the lock."""
        self.connection: socket.socket | None = None
        """The socket that `close` shuts down; written by `use` and `end`, under the lock."""
        self.frames: FrameReader | TlsFrameReader | None = None
        """Written by `begin` and `end`."""
        self.woken = threading.Event()
        """Set when the stream is closed, or is to close after a piece: ends a driver's pause."""
        self.waits = False
        """Whether the source said that it has no piece to send yet; written by `begin`."""
        self.connected_s: float | None = None
        """How long it took to connect, None before; written by `begin`."""
        self.responded_s: float | None = None
        """How long the response took, None before it; written by `begin`."""
        self._unread_max = 0
        self._opened_at = time.monotonic()
        self._have = PieceSet(layout.count, request.have)
        missing = self._have.missing(request.stripe, request.stripes)
        self.missing_count = self._missing_first = len(missing)
        """How many pieces are still to come; written by `store`."""
        self._length = stream_length(layout, missing) if pool is not None else None
        self._reusable = False
        """Whether the peer keeps the connection open after the stream; written by `begin`."""
        self._shared = request.rides or request.prefetch
        """Whether other streams may bring pieces of this one, which it leaves out then; written by
        `share`, under the lock."""
        last = layout.count - 1
        self._last = last if missing and missing[-1] == last else None
        """The last piece of the blob, which may be shorter, while it is to come; written by
        `store`."""
        self._header_fields = {**passed_on(), **fields}
        self._layout = layout
        self._write = write
        self._pacer = pacer
        self._pool = pool
        self._spent = spent
        self._lock = threading.Lock()

    def _move(self, cause: Cause) -> None:
        self.state = TRANSITIONS.get((self.state, cause), self.state)

    # -- from any thread

    @property
    def receiving(self) -> int | None:
        """The piece under way: its frame has begun, and it is not yet stored. Other sources are not
        asked for it, so a source must not name a piece that this stream did not request."""
        with self._lock:
            return self._receiving()

    @property
    def responded(self) -> bool:
        """Whether the source has begun to respond, and the stream has not ended."""
        return self.frames is not None

    @property
    def quiet(self) -> bool:
        """Whether no piece has been stored."""
        return self.missing_count == self._missing_first

    @property
    def received_bytes(self) -> int:
        """How many bytes have come over the connection, those that nothing has read included."""
        with self._lock:
            return bytes_received(self.connection) if self.connection is not None else 0

    def _receiving(self) -> int | None:
        piece = self.frames.receiving() if self.frames is not None else None
        return piece if piece is not None and self._lacks(piece) else None

    def _lacks(self, piece: int) -> bool:
        """Whether a piece was requested and has not come."""
        stripe, stripes = self.request.stripe, self.request.stripes
        return piece < self._layout.count and piece % stripes == stripe and piece not in self._have

    def close(self) -> None:
        """Abort now: a piece that is not yet whole is dropped."""
        with self._lock:
            self._move("close")
            self._shut_down_if_closing()

    def finish_piece_and_close(self) -> None:
        """Close after the piece that is being received, or now when none is."""
        with self._lock:
            self.woken.set()
            self._move("finish now" if self._receiving() is None else "finish after piece")
            self._shut_down_if_closing()

    def _shut_down_if_closing(self) -> None:
        """Wake a driver that is blocked in the socket. The lock is held, so the descriptor belongs
        to this stream."""
        if self.state != "closing":
            return
        self.woken.set()
        if self.connection is not None:
            try:
                self.connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                logger.debug("stream %d: the connection had ended before", self.number)

    # -- the beginning

    def use(self, connection: socket.socket) -> None:
        """Make `connection` the socket that `close` shuts down, in place of one that failed or that
        it wraps. Raises Ended when the stream was closed."""
        with self._lock:
            if self.connection is not None:
                self.connection.close()
            self.connection = connection
            if self.state == "closing":
                raise Ended("closed")
            self._limit_unread()

    def limit_unread(self, count: int) -> None:
        """From any thread: let the kernel hold no more than about `count` bytes that are not read,
        however much it holds for other streams."""
        with self._lock:
            self._unread_max = count
            if self.state in ("opening", "receiving"):
                self._limit_unread()

    def share(self) -> None:
        """From any thread: other streams may bring pieces of this one from now on, which it leaves
        out then."""
        with self._lock:
            self._shared = True
            if self.frames is not None:
                self.frames.shorten()

    def _limit_unread(self) -> None:
        if self._unread_max and self.connection is not None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._unread_max)

    def begin(self, connection: socket.socket) -> None:
        """Request the stream over `connection`, which `use` was called with, and read the head of
        the response; frames follow. Raises what `request_stream` raises."""
        self.connected_s = time.monotonic() - self._opened_at
        response = request_stream(connection, self.source, self.request, self._header_fields, self._length)
        self._reusable, self.waits = response.reusable, response.waits
        self.responded_s = time.monotonic() - self._opened_at
        data_max = min(self._layout.piece_size, self._layout.size)
        secured = connection if isinstance(connection, TlsConnection) else None
        frames = TlsFrameReader(secured, data_max) if secured is not None else FrameReader(connection, data_max)
        with self._lock:
            self.frames = frames
            self._move("responded")

    # -- frames

    def shortest(self) -> int:
        """Bytes of the shortest piece that may come next; 0 when the closing frame may."""
        if not self.missing_count or self._shared:
            return 0
        return self._layout.piece_size if self._last is None else self._layout.length(self._last)

    def check_frame(self, piece: int, length: int) -> None:
        """Check a frame's head before a byte of the piece is received: the piece was requested, has
        not come before, and has `length` bytes. Raises Ended."""
        if not self._lacks(piece):
            raise Ended("protocol", f"{self.source} sent piece {piece}, which was not asked for or came before")
        if length != self._layout.length(piece):
            expected = self._layout.length(piece)
            raise Ended("protocol", f"{self.source} sent piece {piece} with {length} bytes instead of {expected}")

    def check_end(self, length: int) -> None:
        """Check the closing frame: it is empty, and no piece is missing that no other stream
        brings. Raises Ended."""
        if length or (self.missing_count and not self._shared):
            raise Ended("protocol", f"{self.source} ended the stream with {self.missing_count} pieces unsent")

    def store(self, piece: int, data: memoryview, on_event: Callable[[StreamEvent], None]) -> float:
        """Store a piece, report it to `on_event`, and return for how many seconds to pause then.
        Raises Ended for wrong bytes, when storing fails, and when the stream is to close."""
        state = self.state
        if state == "closing":
            raise Ended("closed")
        began = time.monotonic()
        try:
            ok = self._write(piece, data)
        except P2PDistError as error:
            raise Ended("failed", error.what, error) from error
        if self._spent is not None:
            now = time.monotonic()
            self._spent(now - began, now)
        pause_s = self._pacer.received(self.request.priority, len(data)) if self._pacer is not None else 0.0
        self._have.add(piece)
        self.missing_count -= 1
        if piece == self._last:
            self._last = None
        with self._lock:
            assert self.frames is not None
            self.frames.done()
            if self._reusable and not self.missing_count:
                self._move("all stored")
            elif self.state != "receiving":
                self._move("piece stored")
            closing = self.state == "closing"
        # The last thing before waiting: it wakes the event loop, which then finds the interpreter
        # free.
        on_event(PieceReceived(self.number, piece, ok))
        if not ok:
            raise Ended("corrupt", f"{self.source} sent wrong bytes for piece {piece}")
        if closing:
            raise Ended("closed")
        return pause_s

    # -- the end

    def end(self, error: Exception | None) -> StreamClosed:
        """End the stream after the closing frame (None) or `error`, and return its last event. The
        connection goes back to the pool, or is closed."""
        closed = self._outcome(error)
        with self._lock:
            state = self.state
            self._move("end")
            connection, self.connection = self.connection, None
            self.frames = None
            if connection is not None:
                if self._pool is not None and self._reusable and closed.reason == "done":
                    self._pool.give(self.source.address, connection)
                else:
                    connection.close()
        if state in ("closing", "end optional") and closed.reason in ("reset", "short", "refused"):
            return StreamClosed(self.number, "closed")
        return closed

    def _outcome(self, error: Exception | None) -> StreamClosed:
        match error:
            case None:
                return StreamClosed(self.number, "done")
            case Ended():
                return StreamClosed(self.number, error.reason, error.detail, error.error)
            case CutShort():
                detail = f"{self.source} ended the stream {error.missing} bytes too early"
                return StreamClosed(self.number, "short", detail)
            case TimeoutError():
                return StreamClosed(self.number, "reset", f"{self.source} does not answer any more")
            case OSError():
                detail = f"{self.source} broke the connection: {error.strerror or error}"
                return StreamClosed(self.number, "reset", detail)
        logger.error("stream %d from %s fails", self.number, self.source, exc_info=error)
        failure = P2PDistError(
            f"receiving from {self.source} failed: {error!r}", remedy="This is a defect; the log has more"
        )
        return StreamClosed(self.number, "failed", failure.what, failure)
