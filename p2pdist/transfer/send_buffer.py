"""The send buffer of one stream: small where the path is slow, grown where it is fast or long.

What a socket's buffer holds is out of the sender's hands: turns among a host's children mean
nothing beyond it, and on a slow path it only lengthens the queue in front of the receiver, where
that host's own acknowledgements wait too. So a stream begins with SEND_BUFFER_MIN and gets twice
what its rate fills in a round trip (plus SLACK_S for this process to be scheduled), never less than
before.

Round trips are short in a data centre, but bytes also wait before the receiver's link, where those
of its other streams are; while all of a stream's bytes do, none of them is left for this host's own
link. So a stream that is quick enough gets what it fills in COVER_S, up to COVER_MAX. A slow one
does not: its bytes would fill the queue before this host's link, and acknowledgements wait behind
them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

SEND_BUFFER_MIN = 64 << 10
SEND_BUFFER_MAX = 8 << 20
SLACK_S = 0.002
COVER_S, COVER_MAX = 0.1, 128 << 10
CHECK_BYTES = 1 << 20

_SO_SNDBUFFORCE = 32  # socket(7): beyond net.core.wmem_max, with CAP_NET_ADMIN
_MIN_RTT = struct.Struct("=148xI")  # struct tcp_info, tcpi_min_rtt in microseconds (linux/tcp.h)


class SendBuffer:
    """Sizes the buffer of `connection` from what `sent` hears."""

    def __init__(self, connection: socket.socket, size: int = SEND_BUFFER_MIN) -> None:
        self._connection = connection
        self.size = size
        self._bytes = 0
        self._since = time.monotonic()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    def sent(self, length: int) -> None:
        """The kernel has taken `length` more bytes."""
        self._bytes += length
        if self._bytes < CHECK_BYTES or self.size >= SEND_BUFFER_MAX:
            return
        now = time.monotonic()
        rate_bytes_s = self._bytes / max(now - self._since, 1e-6)
        self._bytes, self._since = 0, now
        wanted = int(2 * rate_bytes_s * (self._round_trip_s() + SLACK_S))
        wanted = max(wanted, min(COVER_MAX, int(COVER_S * rate_bytes_s)))
        if wanted > self.size * 5 // 4:
            self.size = min(wanted, SEND_BUFFER_MAX)
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
