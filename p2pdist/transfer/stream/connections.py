"""Connections to other agents: opening one, with TLS or without, and a pool of idle ones.

A connection is opened within one time limit for the look-up of its name, one for TCP and one for
TLS. The pool spares a package of hundreds of small blobs a connection, and a handshake, for each.
Only a stream that came to its end leaves its connection fit for the next; and the peer may close an
idle connection at any time, which the next stream finds out when it sends its request.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from p2pdist.model.address import Vicinity, parse_address
from p2pdist.model.errors import Refused
from p2pdist.model.plan import Source
from p2pdist.transfer.names import NAMES, require_near
from p2pdist.transfer.tls import Credentials, Tls, TlsConnection, TlsError

IDLE_S = 10.0
"""An idle connection is closed after so long: far less than a server waits for a request, so that
both ends seldom decide at the same moment."""

CONNECTIONS_MAX = 64
PER_PEER_MAX = 16


class ConnectionPool:
    """Idle connections, up to PER_PEER_MAX for each address and CONNECTIONS_MAX in all.
    Thread-safe. The owner calls `expire` now and then, which closes a connection after IDLE_S."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[float, socket.socket]]] = {}
        """By address: since when each has been idle (time.monotonic), oldest first."""
        self._count = 0
        """Of all idle connections."""
        self._closed = False

    def take(self, address: str) -> socket.socket | None:
        """Remove the connection to `address` that was used last from the pool, and return it; None
        when there is none that is still open."""
        with self._lock:
            waiting = self._waiting.get(address)
            while waiting:
                since, connection = waiting.pop()
                self._count -= 1
                if time.monotonic() - since < IDLE_S and _quiet(connection):
                    return connection
                connection.close()
        return None

    def give(self, address: str, connection: socket.socket) -> None:
        """Add a connection to the pool, or close it when the pool is full or closed."""
        with self._lock:
            waiting = self._waiting.setdefault(address, deque())
            if self._closed or len(waiting) >= PER_PEER_MAX or self._count >= CONNECTIONS_MAX:
                connection.close()
            else:
                waiting.append((time.monotonic(), connection))
                self._count += 1

    def expire(self) -> bool:
        """Close the connections that have been idle for IDLE_S; returns whether any is left."""
        oldest = time.monotonic() - IDLE_S
        with self._lock:
            for address, waiting in list(self._waiting.items()):
                while waiting and waiting[0][0] <= oldest:
                    waiting.popleft()[1].close()
                    self._count -= 1
                if not waiting:
                    del self._waiting[address]
            return self._count > 0

    def close(self) -> None:
        """Close all connections, and every one that is given from now on."""
        self._closed = True
        self.clear()

    def clear(self) -> None:
        """Close all connections that are idle now."""
        with self._lock:
            for waiting in self._waiting.values():
                for _, connection in waiting:
                    connection.close()
            self._waiting.clear()
            self._count = 0


def _quiet(connection: socket.socket) -> bool:
    """Whether the peer has neither closed the connection nor sent anything without a request."""
    if isinstance(connection, TlsConnection) and connection.pending():
        return False
    try:
        # Not the method of a TlsConnection, which does not take these flags.
        socket.socket.recv(connection, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


KEEPALIVE_S = 3
"""The kernel probes a connection on which nothing came for so long, and then as often."""

UseSocket = Callable[[socket.socket], None]
"""Called with each socket before a thread waits for it, so that another thread can shut it down;
may raise."""


class Unreachable(Exception):
    """No connection could be opened; the text says why."""


def connect(
    source: Source, use: UseSocket, *, timeout_s: float, dead_after_s: float, vicinity: Vicinity | None = None
) -> socket.socket:
    """Open a connection to `source` within `timeout_s`, to no address that a process with this
    `vicinity` may not connect to (None: to any). The kernel drops it when the peer acknowledges
    nothing for `dead_after_s`. Raises Unreachable, and what `use` raises."""
    try:
        host, port = parse_address(source.address)
        candidates = NAMES.find(host)
        if vicinity is not None:
            candidates = require_near(host, candidates, vicinity)
    except (OSError, ValueError) as error:
        raise Unreachable(f"{source} at {source.address} cannot be reached: {error}") from None
    deadline = time.monotonic() + timeout_s
    failure: OSError = TimeoutError(f"no answer within {timeout_s:g} s")
    for family, address in candidates:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
            use(connection)
            connection.settimeout(left)
            connection.connect((address, port))
            _configure(connection, dead_after_s)
            return connection
        except OSError as error:
            failure = error
    raise Unreachable(f"{source} at {source.address} cannot be reached: {failure.strerror or failure}")


def prepare(tls: Tls) -> None:
    """Load what both ends of streams need and make their contexts, now and for all certificates and
    authorities to come, so that the first streams do not wait for them: where many begin at once,
    these 16 ms of each make hosts look slow. Raises UsageError for certificates that pyOpenSSL
    cannot use."""
    from p2pdist.transfer.openssl.contexts import client_context, server_context

    def make(credentials: Credentials) -> None:
        client_context(credentials)
        server_context(credentials)

    tls.prepare_by(make)


def secure(connection: socket.socket, source: Source, tls: Tls, use: UseSocket, *, timeout_s: float) -> TlsConnection:
    """Start TLS on `connection`, and check the peer's certificate. Raises Unreachable, which says
    what is wrong with it, and what `use` raises."""
    from p2pdist.transfer.openssl.client import TlsSocket

    host, _ = parse_address(source.address)
    name = tls.peer_name(source.host, host)
    host_in = tls.host_in
    try:
        secured = TlsSocket(connection, tls.credentials, name, compared=host_in is None)
        use(secured)
        secured.handshake(timeout_s)
        found = host_in(secured.certificate()) if host_in is not None else source.host
    except TlsError as error:
        if error.unverified:
            raise Unreachable(f"{source} has no valid certificate for {name}: {error}") from None
        reason = "it does not speak TLS, as this agent does" if error.plain else str(error)
        raise Unreachable(f"{source} at {source.address}: no TLS connection: {reason}") from None
    except (OSError, ValueError) as error:
        raise Unreachable(f"{source} at {source.address}: no TLS connection: {error}") from None
    except Refused as error:
        raise Unreachable(f"{source} at {source.address}: {error.what}") from None
    if found != source.host:
        raise Unreachable(f"{source} at {source.address} shows a certificate of {found or 'no host'}")
    return secured


_BYTES_RECEIVED = struct.Struct("=128xQ")  # struct tcp_info, tcpi_bytes_received (linux/tcp.h)


def bytes_received(connection: socket.socket) -> int:
    """How many bytes have come over a connection, those that nothing has read included; 0 where
    the kernel does not tell."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        return int(_BYTES_RECEIVED.unpack(info)[0])
    except (OSError, struct.error):
        return 0


def _configure(connection: socket.socket, dead_after_s: float) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(dead_after_s * 1000))
