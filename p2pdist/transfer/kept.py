"""Connections to other agents that have done their work and wait for more.

A package of hundreds of small blobs would otherwise cost a connection for each, with its handshake
and, with TLS, its certificates. Only a stream that came to its end leaves a connection in order;
and the other side may close it at any time while it waits, which whoever takes it finds out.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections import deque

IDLE_S = 10.0
"""Far less than a server waits for a request, so that hardly ever both decide at the same
moment."""

KEPT_MAX = 64
PER_PEER_MAX = 16


class KeptConnections:
    """Thread-safe. Up to PER_PEER_MAX connections for each address, KEPT_MAX in all, each for
    IDLE_S; who owns this calls `expire` now and then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, deque[tuple[float, socket.socket]]] = {}
        self._count = 0
        self._closed = False

    def take(self, address: str) -> socket.socket | None:
        """A connection to `address`, the one that was used last; the caller's from now on."""
        with self._lock:
            waiting = self._kept.get(address)
            while waiting:
                since, connection = waiting.pop()
                self._count -= 1
                if time.monotonic() - since < IDLE_S and _quiet(connection):
                    return connection
                connection.close()
        return None

    def give(self, address: str, connection: socket.socket) -> None:
        """Keep a connection, or close it where there are enough."""
        with self._lock:
            waiting = self._kept.setdefault(address, deque())
            if self._closed or len(waiting) >= PER_PEER_MAX or self._count >= KEPT_MAX:
                connection.close()
            else:
                waiting.append((time.monotonic(), connection))
                self._count += 1

    def expire(self) -> bool:
        """Close what has waited too long; returns whether something still waits."""
        oldest = time.monotonic() - IDLE_S
        with self._lock:
            for address, waiting in list(self._kept.items()):
                while waiting and waiting[0][0] <= oldest:
                    waiting.popleft()[1].close()
                    self._count -= 1
                if not waiting:
                    del self._kept[address]
            return self._count > 0

    def close(self) -> None:
        """Close all of them, and whatever is given from now on."""
        with self._lock:
            self._closed = True
            for waiting in self._kept.values():
                for _, connection in waiting:
                    connection.close()
            self._kept.clear()
            self._count = 0


def _quiet(connection: socket.socket) -> bool:
    """Whether the other side has neither closed the connection nor said what nobody asked for."""
    if isinstance(connection, ssl.SSLSocket) and connection.pending():
        return False
    try:
        # Not the method of an SSLSocket, which does not take these flags.
        socket.socket.recv(connection, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
