"""One stripe stream received in a thread of its own, with blocking sockets.

Theory: a thread that receives a whole piece in one call (MSG_WAITALL), hashes and writes it costs the least per byte and keeps the
event loop free. The thread ends when the stream does; `close` and `finish_piece_and_close` end it from outside by shutting the socket
down, which wakes a blocked receive. Nothing here decides on stalls: who listens to the events does, and closes the stream.

Invariants: one buffer of one piece is all the memory a stream takes, whatever the peer sends; a piece goes to `write` only after its
number and length have been checked, and counts only when `write` has verified it; exactly one StreamClosed is posted, as the last
event; only the closing frame after everything asked for makes a stream "done".
"""

from __future__ import annotations

import itertools
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from p2pdist.model.errors import P2PDistError, Refused
from p2pdist.model.messages import STREAM_END, StreamRequest
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.model.plan import Source
from p2pdist.transfer.answer import EndOfConnection, Head, MalformedAnswer, read_head, read_problem
from p2pdist.transfer.frames import STREAM_PATH, STREAM_TYPE
from p2pdist.transfer.intake import CutShort, Intake, TlsIntake
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.tls import Tls

CONNECT_TIMEOUT_S = 2.0
DEAD_AFTER_S = 10.0
"""A peer whose kernel has answered nothing for about this long is taken for dead (TCP_USER_TIMEOUT, tcp(7))."""

KEEPALIVE_S = 3
PROBLEM_TIMEOUT_S = 2.0

Ending = Literal["done", "closed", "refused", "reset", "short", "corrupt", "missing", "busy", "protocol", "failed"]
"""Why a stream ended: all was received; it was closed from this side; the peer refused, or could not be reached; broke the
connection; ended early; sent wrong bytes; lacks the blob; is over its limits; broke the protocol; this side failed."""

_logger = logging.getLogger(__name__)
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class PieceReceived:
    """A piece has come in whole; `ok` says whether it was verified and stored."""

    stream: int
    piece: int
    ok: bool


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The last event of a stream. `error` is the failure of this side ("failed") or the problem that the peer answered with."""

    stream: int
    reason: Ending
    detail: str = ""
    error: P2PDistError | None = None


StreamEvent = PieceReceived | StreamClosed


class _Ended(Exception):
    """Ends a stream inside the receiver thread."""

    def __init__(self, reason: Ending, detail: str = "", error: P2PDistError | None = None) -> None:
        super().__init__(detail)
        self.reason: Ending = reason
        self.detail = detail
        self.error = error


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, `192.0.2.1:7071` or `[2001:db8::1]:7071`; raises ValueError."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address[:100]!r} is not host:port; an IPv6 address stands in brackets")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{address[:100]!r} is not host:port")
    return host, int(port)


def _why(error: ssl.SSLError) -> str:
    return getattr(error, "verify_message", "") or error.reason or str(error)


class IncomingStream:
    """Receives the pieces of one stripe from `source` and hands each to `write`, in the order in which they come.

    `write(piece, data)` verifies and stores, and returns False for wrong bytes; it is called in the receiver thread and may raise
    P2PDistError. `data` is valid during the call only. `on_event` is called in the receiver thread as well and should be cheap (see
    Mailbox). `number` names the stream in its events; by default it is unique within the process. With `tls` the
    peer must speak it; with `pacer` the stream shares its limit.
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
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        self.source = source
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
        self._lacking = len(self._have.missing(request.stripe, request.stripes))
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._intake: Intake | TlsIntake | None = None
        self._closing = False
        self._finishing = False
        name = f"stripe-{request.stripe}-{source}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def receiving(self) -> int | None:
        """The piece under way: its frame has begun, and it is not yet stored."""
        with self._lock:
            return self._receiving()

    def _receiving(self) -> int | None:
        piece = self._intake.receiving() if self._intake is not None else None
        return piece if piece is not None and piece < self._layout.count else None

    def start(self) -> None:
        """Connect and receive, in a new thread. Once only."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended; False when it has not within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Abort now, from any thread: a piece that is not yet whole is dropped."""
        with self._lock:
            self._closing = True
            self._shut_down()

    def finish_piece_and_close(self) -> None:
        """Close after the piece that is being received, or now when none is."""
        with self._lock:
            self._finishing = True
            if self._receiving() is None:
                self._closing = True
                self._shut_down()

    def _shut_down(self) -> None:
        """Wake the receiver thread wherever it is blocked. The lock is held, so the descriptor is not another's yet."""
        self._woken.set()
        if self._socket is not None:
            try:
                # Not the method of an SSLSocket, which takes the connection for plain from then on.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            except OSError:
                _logger.debug("stream %d: the connection had ended before", self.number)

    # -- receiver thread

    def _run(self) -> None:
        try:
            self._receive()
            closed = StreamClosed(self.number, "done")
        except _Ended as end:
            closed = StreamClosed(self.number, end.reason, end.detail, end.error)
        except OSError as error:
            closed = StreamClosed(
                self.number, "reset", f"{self.source} broke the connection: {error.strerror or error}"
            )
        except Exception as error:
            _logger.exception("stream %d from %s fails", self.number, self.source)
            failure = P2PDistError(
                f"receiving from {self.source} failed: {error!r}", remedy="This is a defect; the log has more"
            )
            closed = StreamClosed(self.number, "failed", failure.what, failure)
        with self._lock:
            connection, self._socket = self._socket, None
            self._intake = None
            if connection is not None:
                connection.close()
            if self._closing and closed.reason in ("reset", "short", "refused"):
                closed = StreamClosed(self.number, "closed")
        self._on_event(closed)

    def _receive(self) -> None:
        connection = self._connect()
        if self._tls is not None:
            connection = self._secure(connection, self._tls)
        connection.settimeout(None)
        try:
            self._ask(connection)
        except EndOfConnection:
            raise _Ended("short", self._unanswered()) from None
        except ssl.SSLError as error:  # in TLS 1.3 the other side judges a certificate after the handshake
            raise _Ended("refused", f"{self.source} does not accept this agent's certificate: {_why(error)}") from None
        except MalformedAnswer as error:
            raise _Ended("protocol", f"{self.source}: {error}") from None
        self._receive_frames(connection)

    def _connect(self) -> socket.socket:
        try:
            host, port = parse_address(self.source.address)
            candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            raise _Ended("refused", f"the address of {self.source} does not resolve: {error}") from None
        deadline = time.monotonic() + self._connect_timeout_s
        last: OSError = TimeoutError(f"no answer within {self._connect_timeout_s:g} s")
        for family, kind, protocol, _, address in candidates:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                connection = self._adopt(socket.socket(family, kind, protocol))
                connection.settimeout(left)
                connection.connect(address)
                self._configure(connection)
                return connection
            except OSError as error:
                last = error
        raise _Ended("refused", f"{self.source} at {self.source.address} cannot be reached: {last}")

    def _secure(self, connection: socket.socket, tls: Tls) -> ssl.SSLSocket:
        """Speak TLS from here on; what is wrong with the peer's certificate is told."""
        host, _ = parse_address(self.source.address)
        name = tls.host_to_check(host)
        try:
            secured = tls.client.wrap_socket(connection, server_hostname=name, do_handshake_on_connect=False)
            self._adopt(secured)
            secured.settimeout(self._connect_timeout_s)
            secured.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise _Ended("refused", f"{self.source} has no valid certificate for {name}: {_why(error)}") from None
        except (OSError, ValueError) as error:
            plain = getattr(error, "reason", None) == "WRONG_VERSION_NUMBER"
            why = "it does not speak TLS, as this agent does" if plain else str(error)
            raise _Ended("refused", f"{self.source} at {self.source.address}: no TLS connection: {why}") from None
        return secured

    def _unanswered(self) -> str:
        text = f"{self.source} closed the connection without an answer"
        if self._tls is not None:
            return f"{text}; it may not accept this agent's certificate"
        return f"{text}; if it speaks TLS, this agent needs --tls-cert as well"

    def _adopt(self, connection: socket.socket) -> socket.socket:
        """Make `connection` the one that `close` shuts down, in place of one that failed or that it wraps."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = connection
            if self._closing or self._finishing:
                raise _Ended("closed")
        return connection

    def _configure(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._dead_after_s * 1000))

    def _ask(self, connection: socket.socket) -> None:
        body = msgspec.json.encode(self.request)
        head = (
            f"POST {STREAM_PATH} HTTP/1.1\r\nHost: {self.source.address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nAccept: {STREAM_TYPE}\r\nConnection: close\r\n\r\n"
        )
        connection.sendall(head.encode("ascii") + body)
        answer = read_head(connection)
        if answer.status != 200:
            self._refused(connection, answer)
        if answer.media_type() != STREAM_TYPE:
            raise MalformedAnswer(f"the answer is {answer.media_type()[:60]!r}, not a stream")
        if (
            "transfer-encoding" in answer.fields
            or "content-length" in answer.fields
            or "content-encoding" in answer.fields
        ):
            raise MalformedAnswer("the answer is framed or encoded by HTTP, which a stream is not")

    def _refused(self, connection: socket.socket, answer: Head) -> None:
        connection.settimeout(PROBLEM_TIMEOUT_S)
        problem = read_problem(connection, answer)
        detail = f"{self.source}: {problem.what[:500]}"
        match answer.status:
            case 404:
                raise _Ended("missing", detail, problem)
            case 429 | 503:
                raise _Ended("busy", detail, problem)
            case status if status >= 400:
                raise _Ended("refused", detail, Refused(detail) if status in (401, 403) else problem)
        raise MalformedAnswer(f"the answer has status {answer.status}")

    def _receive_frames(self, connection: socket.socket) -> None:
        data_max = min(self._layout.piece_size, self._layout.size)
        secured = connection if isinstance(connection, ssl.SSLSocket) else None
        intake = TlsIntake(secured, data_max) if secured is not None else Intake(connection, data_max)
        with self._lock:
            self._intake = intake
        try:
            while True:
                piece, length = intake.head(self._shortest())
                if piece == STREAM_END:
                    self._check_end(length)
                    return
                self._check_frame(piece, length)
                self._store(piece, intake.data(length))
        except CutShort as short:
            raise _Ended("short", f"{self.source} ended the stream {short.missing} bytes too early") from None

    def _shortest(self) -> int:
        """Bytes of the shortest piece that may come next; 0 when only the end may."""
        last = self._layout.count - 1
        if not self._lacking:
            return 0
        if last % self.request.stripes == self.request.stripe and last not in self._have:
            return self._layout.length(last)
        return self._layout.piece_size

    def _store(self, piece: int, data: memoryview) -> None:
        if self._closing:
            raise _Ended("closed")
        try:
            ok = self._write(piece, data)
        except P2PDistError as error:
            raise _Ended("failed", error.what, error) from error
        length = len(data)
        self._have.add(piece)
        self._lacking -= 1
        with self._lock:
            assert self._intake is not None
            self._intake.done()
            finishing = self._finishing
        # The last thing before waiting: it wakes the event loop, which then finds the interpreter free.
        self._on_event(PieceReceived(self.number, piece, ok))
        if not ok:
            raise _Ended("corrupt", f"{self.source} sent wrong bytes for piece {piece}")
        if finishing:
            raise _Ended("closed")
        if self._pacer is not None and self._lacking:
            self._woken.wait(self._pacer.pause_s(length))

    def _check_frame(self, piece: int, length: int) -> None:
        """Before a byte of the piece is received: is it one that was asked for, and of the right length?"""
        stripe, stripes = self.request.stripe, self.request.stripes
        if piece >= self._layout.count or piece % stripes != stripe or piece in self._have:
            raise _Ended("protocol", f"{self.source} sent piece {piece}, which was not asked for or came before")
        if length != self._layout.length(piece):
            expected = self._layout.length(piece)
            raise _Ended("protocol", f"{self.source} sent piece {piece} with {length} bytes instead of {expected}")

    def _check_end(self, length: int) -> None:
        if length or self._lacking:
            raise _Ended("protocol", f"{self.source} ended the stream with {self._lacking} pieces unsent")
