"""Writes the body of an aiohttp response with sendfile, past the transport, and sizes the socket's
send buffer; with TLS it encrypts what it reads, past the transport where that can be told apart.

Theory: asyncio's own `loop.sendfile` pauses reading, waits for writability after every block even
when the kernel took all of it, and moves the file's position: several system calls a block. A
duplicate of the socket's descriptor lets Connection call sendfile itself and wait only when the
kernel is full. The transport goes on reading, so both notice the end of the connection. Sendfile
cannot encrypt, so with TLS a block is read and encrypted, and the kernel gets it at once where the
server's end is a ServedTls; else it goes through the transport, and so does what the kernel does
not take. Blocks, limits and waking are the same for both.

What a socket's send buffer holds is out of the sender's hands: the uplink's schedule means nothing
beyond it, and on a slow path it only lengthens the queue in front of the receiver, where that
host's own acknowledgements wait too. So a stream begins with SEND_BUFFER_MIN and gets twice what
its rate fills in a round trip (plus SLACK_S for this process to be scheduled), never less than
before. Round trips are short in a data centre, but bytes also wait before the receiver's link,
behind the bytes of its other streams; while all of a stream's bytes do, none is left for this
host's own link. So a fast stream gets what it fills in COVER_S, up to COVER_MAX. A slow one does
not: its bytes would fill the queue before this host's link, and acknowledgements wait behind them.

Between sites round trips are long. There a buffer that follows the rate holds the rate down: the
stream can send no more in a round trip than its buffer takes, and TCP doubles its own window in
each until the path is full. So a stream whose round trips take LONG_ROUND_TRIP_S or more begins
with what a path of LONG_PATH_BYTES_S holds, and leaves the rest to TCP. Its handshake may only have
waited in a queue: if a later round trip is short, the stream goes on as others do.

The usual congestion control (CUBIC) ends its slow start when round trips get longer. Beside a
stream to a near host they do at once, since both wait before this host's link, and the window then
grows for ten seconds before it fills a long path. BBR (Cardwell et al., ACM Queue 2016) goes by the
rate that arrives, and fills the path in a second. So a stream over a long path begins with it, and
after START_S goes on with what the host has chosen, from a window that fits: BBR would give the
window up every ten seconds, to measure round trips, and CUBIC streams of others get less than their
share beside it. Where the kernel has no BBR, or this user may not choose it, the log says so once,
and the stream begins as others do.

Invariants: while a plain Connection is open nothing writes through the transport, except the head
of the response before `flushed`; the duplicate is closed on leaving, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Literal

from aiohttp import web

from p2pdist.model.errors import Corrupt
from p2pdist.transfer.tls import ServedTls

logger = logging.getLogger(__name__)

SEND_BUFFER_MIN = 64 << 10
SEND_BUFFER_MAX = 8 << 20
SLACK_S = 0.002
COVER_S, COVER_MAX = 0.1, 128 << 10
LONG_ROUND_TRIP_S, LONG_PATH_BYTES_S = 0.02, 12.5e6
START_CONTROL, START_S = b"bbr", 3.0
CHECK_BYTES = 1 << 20
"""Bytes after which the size of a send buffer is computed again."""

_SO_SNDBUFFORCE = 32  # socket(7): beyond net.core.wmem_max, with CAP_NET_ADMIN
_MIN_RTT = struct.Struct("=148xI")  # struct tcp_info, tcpi_min_rtt in microseconds (linux/tcp.h)


def first_size(round_trip_s: float) -> int:
    """Bytes of a send buffer before a rate is known, for a path with this round trip."""
    if round_trip_s < LONG_ROUND_TRIP_S:
        return SEND_BUFFER_MIN
    return min(SEND_BUFFER_MAX, int(2 * LONG_PATH_BYTES_S * round_trip_s))


def size_for(rate_bytes_s: float, round_trip_s: float) -> int:
    """Bytes of a send buffer that neither holds this rate down nor has more than it needs."""
    size = max(2 * rate_bytes_s * (round_trip_s + SLACK_S), min(COVER_MAX, COVER_S * rate_bytes_s))
    return min(SEND_BUFFER_MAX, max(first_size(round_trip_s), int(size)))


class Start:
    """The beginning of a stream over a long path: `connection` has START_CONTROL as its congestion
    control until `end`, which is due once START_S have passed."""

    _refused = False
    """Whether the log says already that the kernel refuses it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.ends_at = time.monotonic() + START_S
        try:
            self._usual = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, START_CONTROL)
        except OSError as error:
            self._usual = b""
            if not Start._refused:
                Start._refused = True
                logger.info(
                    "streams to other sites begin slowly: the kernel refuses the congestion control %s (%s); load "
                    "tcp_%s, and allow it in net.ipv4.tcp_allowed_congestion_control",
                    START_CONTROL.decode(),
                    error.strerror,
                    START_CONTROL.decode(),
                )

    def end(self) -> None:
        """Go on with the congestion control that the connection had before."""
        if self._usual:
            with contextlib.suppress(OSError):  # the connection is broken, and the next send says so
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._usual)


class SendBuffer:
    """Sizes the send buffer of `connection`, in bytes, from the rate at which the kernel takes
    bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        round_trip_s = self._round_trip_s()
        self.size = first_size(round_trip_s)
        self._long = round_trip_s >= LONG_ROUND_TRIP_S
        """Whether all round trips were long so far."""
        self._bytes = 0
        self._since = time.monotonic()
        self._start = Start(connection) if self._long else None
        """None for a short path, and once it is over (`end_start`)."""
        self._apply()

    def end_start(self) -> None:
        """The stream has begun, or is over and leaves the connection to another one."""
        if self._start is not None:
            self._start.end()
            self._start = None

    def sent(self, length: int) -> None:
        """The kernel has taken `length` more bytes."""
        self._bytes += length
        if self._start is not None and time.monotonic() >= self._start.ends_at:
            self.end_start()
        if self._bytes < CHECK_BYTES or self.size >= SEND_BUFFER_MAX:
            return
        now = time.monotonic()
        rate_bytes_s = self._bytes / max(now - self._since, 1e-6)
        self._bytes, self._since = 0, now
        round_trip_s = self._round_trip_s()
        size = size_for(rate_bytes_s, round_trip_s)
        shortened = self._long and round_trip_s < LONG_ROUND_TRIP_S
        self._long = self._long and not shortened
        if shortened:
            self.end_start()
        if size > self.size * 5 // 4 or shortened:
            self.size = size
            self._apply()

    def _round_trip_s(self) -> float:
        if self._connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0.0
        with contextlib.suppress(OSError, struct.error):
            info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
            return float(_MIN_RTT.unpack(info)[0]) / 1e6
        return 0.0

    def _apply(self) -> None:
        try:
            self._connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, self.size)
        except OSError:  # not allowed to this user: as far as net.core.wmem_max goes
            with contextlib.suppress(OSError):  # the connection is broken, and the next send says so
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.size)


TURN_BYTES = 1 << 20
"""Bytes after which a connection that never had to wait lets the event loop run other tasks."""

TLS_BLOCK_BYTES = 256 << 10
"""Most that is read and encrypted in one go; the event loop does nothing else meanwhile."""

LOOK_AGAIN_S = 0.1
"""After so long the end of a TLS connection is looked for again, once the transport has had time to
read a record."""

_readers = ThreadPoolExecutor(8, thread_name_prefix="disk-read")
"""Threads that wait for the disk. A pool of their own: a disk that hangs blocks no other work."""

_BYTE = (bytearray(1),)
"""Receives the byte that `_in_page_cache` reads; its value does not matter."""

_BROKEN = {
    errno.EPIPE,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
}


class Connection:
    """A context manager around the body of a response. When the client goes away, it wakes the task
    that entered, wherever that waits inside, and leaves the context quietly with `gone` true.

    `unsent_max` (bytes) bounds what the kernel holds unsent (TCP_NOTSENT_LOWAT, tcp(7)); with
    `small_buffer` so does a send buffer that grows with the rate (see SendBuffer); the kernel drops
    a client that acknowledges nothing for `dead_after_s` (TCP_USER_TIMEOUT), and one that takes
    nothing for `idle_s` counts as gone. With `strict`, bytes that the client sends meanwhile break
    a plain connection. Without `disk` the files that are sent lie in memory, and reading them never
    waits.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        *,
        unsent_max: int | None = None,
        small_buffer: bool = False,
        dead_after_s: float = 30.0,
        idle_s: float | None = None,
        strict: bool = False,
        disk: bool = True,
    ) -> None:
        self.gone = False
        context = request.get_extra_info("sslcontext")
        self._tls = context is not None
        self._direct = context if isinstance(context, ServedTls) else None
        """Encrypts past the transport; None where the event loop alone speaks TLS."""
        self._unwritten = b""
        """What `send` holds back for the next write through the transport (TLS)."""
        self._block = memoryview(b"")
        """Memory for a frame's head and a block, while the transport holds nothing (TLS)."""
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._options = (unsent_max, dead_after_s)
        self._idle_s = idle_s
        self._small_buffer = small_buffer
        self._buffer: SendBuffer | None = None
        self._strict = strict
        self._disk = disk
        self._since_wait = 0
        """Bytes sent since the loop last ran other tasks."""
        self._watching: asyncio.TimerHandle | None = None
        """Looks for the end of a TLS connection again; written by `_readable` and `_watch`."""
        self._socket: socket.socket | None = None

    def __enter__(self) -> Connection:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has closed the connection")
        self._socket = transport.get_extra_info("socket").dup()
        self._fd = self._socket.fileno()
        try:
            self._configure(self._socket)
        except OSError:
            self._socket.close()
            raise
        self._watch()
        return self

    def _watch(self) -> None:
        self._watching = None
        self._loop.add_reader(self._fd, self._readable)

    def _configure(self, connection: socket.socket) -> None:
        unsent_max, dead_after_s = self._options
        if self._small_buffer:
            self._buffer = SendBuffer(connection)
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(dead_after_s * 1000))
        if unsent_max is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_max)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False] | bool:
        assert self._socket is not None
        if self._watching is not None:
            self._watching.cancel()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        if self._buffer is not None:
            self._buffer.end_start()
        self._socket.close()
        if isinstance(error, ConnectionError):
            self.gone = True
            return True
        if not self.gone:
            return False
        # As asyncio.timeout does: only our own cancellation is taken back, one from outside still
        # counts.
        return self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)

    def _readable(self) -> None:
        """The client sent something or went away. Looking does not take bytes from the
        transport."""
        assert self._socket is not None
        try:
            seen = self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            seen = b""
        self._loop.remove_reader(self._fd)
        if seen and self._tls:  # a record for the transport, not to be judged here; look again when it has been taken
            self._watching = self._loop.call_later(LOOK_AGAIN_S, self._watch)
        elif not seen or self._strict:
            self.gone = True
            self._task.cancel()

    def abort(self) -> None:
        """Break the connection, so that the client sees what it has as truncated."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def flushed(self) -> None:
        """Wait until the transport holds nothing, so that `send` and `send_file` follow its own
        writes."""
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has closed the connection")
        if transport.get_write_buffer_size() or self._tls:
            transport.set_write_buffer_limits(1)  # 0 would pause TLS for good
            await self.drained()

    def send_now(self, data: bytes | memoryview, *, more: bool = False) -> int:
        """How many bytes of `data` the kernel takes without waiting; none with TLS. Raises
        ConnectionError when the client is gone."""
        assert self._socket is not None
        if self._tls:
            return 0
        try:
            return self._socket.send(data, socket.MSG_MORE if more else 0)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _as_connection_error(error) from error

    def send_file_now(self, file: int, offset: int, count: int) -> int:
        """How many bytes of a file descriptor the kernel takes without waiting for the client or
        the disk; none with TLS. Raises what `send_file` raises."""
        if self._tls or (self._disk and not _in_page_cache(file, offset, count)):
            return 0
        return self._send_file_now(file, offset, count)

    def _send_file_now(self, file: int, offset: int, count: int) -> int:
        try:
            sent = os.sendfile(self._fd, file, offset, count)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _as_connection_error(error) from error
        if not sent:
            raise Corrupt(f"a file in the store ends {count} bytes early, at byte {offset}")
        if self._buffer is not None:
            self._buffer.sent(sent)
        return sent

    def encrypt_now(self, head: bytes, file: int, offset: int, count: int) -> Literal["no", "some", "all"]:
        """With TLS, encrypt what `send` held back, `head` and `count` bytes of a file descriptor,
        and hand them to the kernel: "no" where that would wait for the client or the disk, the file
        is too short, or this is no TLS; "some" where the kernel has not taken all, for which
        `drained` waits. Only a transport that holds nothing is written to, so the memory of the
        last block is free."""
        transport = self._request.transport
        if not self._tls or count > TLS_BLOCK_BYTES or transport is None or transport.is_closing():
            return "no"
        if transport.get_write_buffer_size():
            return "no"
        head = self._unwritten + head
        length = len(head) + count
        if len(self._block) < length:
            self._block = memoryview(bytearray(length))
        block = self._block[:length]
        block[: len(head)] = head
        if not _read_now(file, block[len(head) :], offset, disk=self._disk):
            return "no"
        taken: Literal["no", "some", "all"]
        if self._direct is not None:
            assert self._socket is not None
            taken = self._direct.send_now(block, self._socket)
        else:
            transport.write(block)
            taken = "some" if transport.get_write_buffer_size() else "all"
        if taken != "no":
            self._unwritten = b""
            if self._buffer is not None:
                self._buffer.sent(count)
        return taken

    async def drained(self) -> None:
        """Wait until the transport has handed what it holds to the kernel."""
        await self._request.writer.drain()
        if self._direct is not None:
            await self._direct.emptied()

    async def send(self, data: bytes | memoryview, *, more: bool = False) -> None:
        """Hand `data` to the kernel; with `more` it may wait there to share a packet with what
        follows (MSG_MORE, send(2))."""
        if self._tls:
            self._unwritten += data
            if not more:
                await self._write(b"")
            return
        while data := data[self.send_now(data, more=more) :]:
            await self._writable()

    async def send_block(self, head: bytes, file: int, offset: int, count: int) -> None:
        """Hand `head` and `count` bytes of a file descriptor to the kernel. Raises what `send_file`
        raises."""
        if self._tls and (taken := self.encrypt_now(head, file, offset, count)) != "no":
            self._since_wait += count
            if taken == "some" or self._since_wait >= TURN_BYTES:
                await self._written(0)
            return
        if head:
            await self.send(head, more=True)
        await self.send_file(file, offset, count)

    async def send_file(self, file: int, offset: int, count: int) -> None:
        """Hand `count` bytes of a file descriptor, from `offset`, to the kernel. Raises
        ConnectionError when the client is gone, Corrupt when the file is too short, and OSError
        when it cannot be read."""
        if self._tls:
            await self._encrypt_file(file, offset, count)
            return
        while count:
            ready = await _brought(file, offset, count, disk=self._disk)
            sent = self._send_file_now(file, offset, ready)
            offset += sent
            count -= sent
            self._since_wait += sent
            if sent < ready:
                await self._writable()  # it took a part, so it is full: asking again at once would only be refused
            elif self._since_wait >= TURN_BYTES:
                self._since_wait = 0
                await asyncio.sleep(0)

    async def _encrypt_file(self, file: int, offset: int, count: int) -> None:
        while count:
            length = min(count, TLS_BLOCK_BYTES)
            if self.encrypt_now(b"", file, offset, length) != "no":
                await self._written(length)
            else:
                data = os.pread(file, await _brought(file, offset, length, disk=self._disk), offset)
                if not data:
                    raise Corrupt(f"a file in the store ends {count} bytes early, at byte {offset}")
                await self._write(data)
                length = len(data)
                if self._buffer is not None:
                    self._buffer.sent(length)
            offset += length
            count -= length

    async def _write(self, data: bytes) -> None:
        """Write through the transport, after what `send` held back, and wait until the kernel has
        taken it."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has closed the connection")
        data, self._unwritten = self._unwritten + data, b""
        transport.write(data)
        await self._written(len(data))

    async def _written(self, length: int) -> None:
        """Wait until the kernel has taken what was written, and let other tasks run once in
        TURN_BYTES."""
        self._since_wait += length
        await self._in_time(self.drained())
        if self._since_wait >= TURN_BYTES:
            self._since_wait = 0
            await asyncio.sleep(0)

    async def _writable(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._since_wait = 0
        self._loop.add_writer(self._fd, _wake, waiter)
        try:
            await self._in_time(waiter)
        finally:
            self._loop.remove_writer(self._fd)

    async def _in_time(self, taken: Awaitable[None]) -> None:
        """Wait until the client has taken something. Raises ConnectionError where it does not."""
        if self._idle_s is None:
            await taken
            return
        try:
            async with asyncio.timeout(self._idle_s):
                await taken
        except TimeoutError as error:
            raise ConnectionAbortedError(f"the client has taken nothing for {self._idle_s:g} s") from error


async def _brought(file: int, offset: int, count: int, *, disk: bool) -> int:
    """Bring bytes of a file to memory, in a thread where the disk must be read: it may hang, and
    the loop must not hang with it. Returns how many of `count` are in memory. Raises OSError."""
    if not disk or _in_page_cache(file, offset, count):
        return count
    count = min(count, TURN_BYTES)
    await asyncio.get_running_loop().run_in_executor(_readers, os.pread, file, count, offset)
    return count


def _in_page_cache(file: int, offset: int, count: int) -> bool:
    """Whether these bytes can be read without waiting for the disk: both ends are in memory, with
    which the bytes between were read. False where the file system does not say (preadv2(2),
    RWF_NOWAIT), as FUSE, NFS and overlays do not."""
    try:
        for position in (offset + count - 1, offset):
            os.preadv(file, _BYTE, position, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno != errno.EOPNOTSUPP  # any other one the read itself meets as well, and tells
    return True


def _read_now(file: int, place: memoryview, offset: int, *, disk: bool) -> bool:
    """Fill `place` from a file, without waiting for the disk. False where not all of it is in
    memory, the file ends before, it cannot be read, or the file system does not say (preadv2(2),
    RWF_NOWAIT)."""
    try:
        return os.preadv(file, (place,), offset, os.RWF_NOWAIT if disk else 0) == len(place)
    except OSError:
        return False  # what a read that may wait meets as well, and tells


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _as_connection_error(error: OSError) -> OSError:
    """An error by which the kernel says that the client is gone, as a ConnectionError; any other
    error, such as of a failing disk, as it is."""
    if error.errno in _BROKEN and not isinstance(error, ConnectionError):
        return ConnectionResetError(error.errno, error.strerror)
    return error
