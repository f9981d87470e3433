"""One stripe stream received from another agent: by a thread with blocking sockets, or on the event
loop while its pieces come slowly.

Theory: a thread that receives a whole piece in one call (MSG_WAITALL), hashes and writes it costs
the least per byte and keeps the event loop free. At low rates its wake-ups cost more than the bytes
do, so the loop receives the pieces then (loop_receiver.py): the thread ends, and another one begins
when they come fast again. `close` and `finish_piece_and_close` shut the socket down, which wakes
whichever driver waits for it. Nothing here decides on stalls: the pull that listens to the events
does, and closes the stream.

Invariants: one driver at a time, thread or loop, uses the stream; exactly one StreamClosed is
posted, as the last event.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

from p2pdist.model.address import Vicinity
from p2pdist.model.errors import Unavailable
from p2pdist.model.messages import STREAM_END, StreamRequest
from p2pdist.model.pieces import PieceLayout
from p2pdist.model.plan import Source
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream.connections import ConnectionPool, Unreachable, connect, secure
from p2pdist.transfer.stream.events import Ended, StreamEvent
from p2pdist.transfer.stream.loop_receiver import PIECE_MAX, Inbox, LoopReceiver, Share
from p2pdist.transfer.stream.protocol import StripeStream
from p2pdist.transfer.stream.response import EndOfConnection, MalformedResponse
from p2pdist.transfer.tls import Tls, TlsError

CONNECT_TIMEOUT_S = 2.0
DEAD_AFTER_S = 10.0
"""The kernel drops the connection to a peer that has acknowledged nothing for about this long
(TCP_USER_TIMEOUT, tcp(7))."""

END_WAIT_S = 1.0
"""The closing frame comes with the last piece, or the connection is not worth keeping."""

MORE_THREADS = (
    "Raise pids.max of its control group (TasksMax= of its unit), ulimit -u of its user, or ulimit -v, of which each "
    "thread takes some"
)

logger = logging.getLogger(__name__)
_numbers = itertools.count(1)
_NO_FIELDS: Mapping[str, str] = MappingProxyType({})


class IncomingStream:
    """Receives the pieces of one stripe from `source` and hands each to `write`, in the order in
    which they come.

    `write(piece, data)` verifies and stores, and returns False for wrong bytes; it is called in the
    receiver thread and may raise P2PDistError. `data` is valid during the call only. `on_event` is
    called in the receiver thread as well and should be cheap (see Mailbox). With `inbox` pieces may
    be received on its loop; then `inbox.deliver` gets the events, and `write` is called there.
    `number` names the stream in its events; by default it is unique within the process. With `tls`
    the peer must speak it; `pacer` holds the stream back. With `connections` the stream may use a
    connection of that pool, and gives it back when it is done. `fields` are further header fields
    of its request. `vicinity` is that of this host, None for one that may connect anywhere.
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
        fields: Mapping[str, str] = _NO_FIELDS,
        vicinity: Vicinity | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        self.source = source
        self.request = request
        self.number = next(_numbers) if number is None else number
        self._on_event = on_event
        self._tls = tls
        self._pacer = pacer
        self.held_back = False
        """Whether it is read no further for now; written by its thread."""
        self._connections, self._vicinity = connections, vicinity
        self._connect_timeout_s = connect_timeout_s
        self._dead_after_s = dead_after_s
        share = Share() if connections is None and layout.piece_size <= PIECE_MAX and inbox is not None else None
        spent = share.spent if share is not None else None
        self._stream = StripeStream(
            self.number, source, request, layout, write, pacer=pacer, pool=connections, spent=spent, fields=fields
        )
        self._loop_receiver: LoopReceiver | None = None
        if share is not None and inbox is not None:
            self._loop_receiver = LoopReceiver(self._stream, share, inbox, self._start_thread, self._end)
        self._ended = threading.Event()
        """Set once StreamClosed has been posted; written by `_end`."""

    @property
    def receiving(self) -> int | None:
        """The piece under way: its frame has begun, and it is not yet stored."""
        return self._stream.receiving

    @property
    def responded(self) -> bool:
        """Whether the source has begun to respond, and the stream has not ended."""
        return self._stream.responded

    @property
    def responded_s(self) -> float | None:
        """How long the source took to respond, None where it has not."""
        return self._stream.responded_s

    @property
    def connected_s(self) -> float | None:
        """How long it took to connect to the source, None where it has not come to that."""
        return self._stream.connected_s

    @property
    def quiet(self) -> bool:
        """Whether no piece has come."""
        return self._stream.quiet

    @property
    def waits(self) -> bool:
        """Whether the source says that it had no piece to send when it responded."""
        return self._stream.waits

    @property
    def received_bytes(self) -> int:
        """How many bytes have come over the connection."""
        return self._stream.received_bytes

    def limit_unread(self, count: int) -> None:
        """Let the kernel hold no more than about `count` bytes that are not read, from any thread:
        what a stream that is read seldom holds, others cannot know of."""
        self._stream.limit_unread(count)

    def share(self) -> None:
        """Other streams may bring pieces of this one from now on, which it leaves out then; from
        any thread."""
        self._stream.share()

    def start(self) -> None:
        """Connect and receive, in a new thread; once only."""
        try:
            self._start_thread(0.0)
        except Ended as failure:
            self._end(failure, self._on_event)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the stream has ended; False when it has not within `timeout_s`. Not on the
        loop."""
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """Abort now, from any thread: a piece that is not yet whole is dropped."""
        self._stream.close()

    def finish_piece_and_close(self) -> None:
        """Close after the piece that is being received, or now when none is; from any thread."""
        self._stream.finish_piece_and_close()

    # -- the receiver thread

    def _start_thread(self, pause_s: float) -> None:
        """Receive in a new thread, after a pause. Raises Ended where there can be none."""
        name = f"stripe-{self.request.stripe}-{self.source}"
        try:
            threading.Thread(target=self._run, args=(pause_s,), name=name, daemon=True).start()
        except RuntimeError as error:  # as many threads run as this process may have
            failure = Unavailable("this agent may not start another thread", remedy=MORE_THREADS)
            raise Ended("failed", failure.what, failure) from error

    def _run(self, pause_s: float) -> None:
        error: Exception | None = None
        try:
            if self._stream.frames is None:
                self._open()
            self._wait(pause_s)
            if not self._receive_frames():
                return
        except Exception as failure:
            error = failure
        self._end(error, self._on_event)

    def _end(self, error: Exception | None, on_event: Callable[[StreamEvent], None]) -> None:
        """End the stream after its closing frame (None) or after `error`."""
        on_event(self._stream.end(error))
        self._ended.set()

    def _receive_frames(self) -> bool:
        """Receive to the end of the stream: True; or until the loop receives: False."""
        stream, frames, loop_receiver = self._stream, self._stream.frames, self._loop_receiver
        assert frames is not None
        try:
            while True:
                due = stream.state in ("end due", "end optional")
                piece, length = frames.head(stream.shortest(), END_WAIT_S if due else None)
                if piece == STREAM_END:
                    stream.check_end(length)
                    frames.leave()
                    return True
                stream.check_frame(piece, length)
                data = frames.data(length)
                if length > PIECE_MAX:  # others may receive while it is stored
                    frames.rest()
                pause_s = stream.store(piece, data, self._on_event)
                if pause_s:
                    frames.rest()
                    if loop_receiver is not None:
                        loop_receiver.share.begin()
                    self._wait(pause_s)
                elif loop_receiver is not None and loop_receiver.share.low:
                    frames.rest()
                    if loop_receiver.take_over():
                        return False
        except TimeoutError as error:
            if error.errno is not None:  # the kernel's: the peer acknowledges nothing any more
                raise
            raise Ended("short", f"{self.source} sent all and did not end the stream") from None

    def _wait(self, pause_s: float) -> None:
        if self._pacer is not None and pause_s and self._stream.missing_count:
            self.held_back = True
            self._pacer.wait(self.request.priority, pause_s, self._stream.woken)
            self.held_back = False

    # -- the connection

    def _open(self) -> None:
        """Request the stream over a connection of the pool, else over a new one."""
        pool, address = self._connections, self.source.address
        while pool is not None and (connection := pool.take(address)) is not None:
            try:
                self._stream.use(connection)
                self._stream.begin(connection)
                return
            except (EndOfConnection, OSError) as gone:
                logger.debug("stream %d: a kept connection had ended: %r", self.number, gone)
            except MalformedResponse as error:
                raise Ended("protocol", f"{self.source}: {error}") from None
        connection = self._connect()
        connection.settimeout(None)
        try:
            self._stream.begin(connection)
        except EndOfConnection:
            raise Ended("short", self._no_response()) from None
        except TlsError as error:  # in TLS 1.3 the other side judges a certificate after the handshake
            raise Ended("refused", f"{self.source} does not accept this agent's certificate: {error}") from None
        except MalformedResponse as error:
            raise Ended("protocol", f"{self.source}: {error}") from None

    def _connect(self) -> socket.socket:
        timeout_s, use = self._connect_timeout_s, self._stream.use
        try:
            connection = connect(
                self.source, use, timeout_s=timeout_s, dead_after_s=self._dead_after_s, vicinity=self._vicinity
            )
            if self._tls is not None:
                connection = secure(connection, self.source, self._tls, use, timeout_s=timeout_s)
        except Unreachable as error:
            raise Ended("refused", str(error)) from None
        return connection

    def _no_response(self) -> str:
        text = f"{self.source} closed the connection without an answer"
        if self._tls is not None:
            return f"{text}; it may not accept this agent's certificate"
        return f"{text}; if it speaks TLS, this agent needs --join-file or --tls-cert as well"
