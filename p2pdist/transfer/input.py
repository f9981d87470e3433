"""What clients have sent of requests and messages that are not whole, and how much of it a service
keeps.

Theory. Half a message costs its client nothing more, and the service memory for as long as the
connection stays: up to 4 MiB for that of a session, 1 MiB for a head or a body. What connections
may be that many is bounded by descriptors (connections.py), but their number times such a size is
more than a machine has. So the bytes are counted on their way from the socket to the HTTP server,
by address. Where those of one address, or of all, are too many, connections with something half
end: those of the address with most bytes, and of these the one first that began to wait longest for
its rest. Whole messages come within moments, so that is not the one of a client that goes on to
send. A connection whose request is whole is never closed for another one, and a head may have
HEAD_BYTES_MAX.

Nearly all messages are whole at once, and while all connections together have no more than one
address may, none has too much. So bytes are counted by address only from there on.

Invariants: the sum of all is that of the connections that are open, and so are the sums by address
while all have more than one address may; what is counted of a connection is at least what the
server keeps of its input, up to SLACK_BYTES.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import WSMessage, WSMsgType, web
from aiohttp.http import WSMessageTextBytes

from p2pdist.model.errors import UsageError
from p2pdist.transfer.problems import problem_response

INPUT_BYTES_MAX = 64 << 20
ADDRESS_SHARE = 3 / 4
"""One address has no more than that of all, so that others find room."""

FREED_PART = 8
"""Where all bytes are too many, one of so many parts is freed at once."""

READ_BYTES = 64
"""What each read from a socket costs beside its bytes: they may come one by one."""

SLACK_BYTES = 4096
"""What is left after a whole message counts from there on: less is the coding of the message that
was taken."""

HEAD_BYTES_MAX = 16384
"""Of the target and the header fields of a request, which are kept until it is answered; a session
is one."""

MASK_BYTES = 4
CONTROL_HEAD_BYTES = MASK_BYTES + 2
"""Of a client's frame before its payload (RFC 6455, 5.2)."""

WARN_S = 60.0

MESSAGES = WSMsgType.TEXT, WSMsgType.BINARY

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
logger = logging.getLogger(__name__)


class InputBook:
    """What all connections of a service together have sent and is not done with, up to `total_max`
    bytes. On the event loop."""

    def __init__(self, total_max: int = INPUT_BYTES_MAX) -> None:
        self._total_max, self._address_max = total_max, int(total_max * ADDRESS_SHARE)
        self.total = 0
        self._fresh: dict[Input, int] = {}
        """Bytes of connections with something half that are not counted by address, the one first
        that has waited longest; none while all have more than one address may."""
        self._bytes: dict[str, int] = {}
        """By address, of the other connections; of no address that has none."""
        self._halves: dict[str, dict[Input, None]] = {}
        """By address the connections with something half, the one first that has waited longest."""
        self._warned_at = -WARN_S

    def changed(self, connection: Input, size: int, before: int) -> None:
        """A connection keeps `size` bytes, and kept `before`: with any, it waits for the rest of
        something."""
        self.total += size - before
        fresh = self._fresh
        if self.total > self._address_max:
            for each, count in fresh.items():
                self._count(each, count, half=True)
            fresh.clear()
        elif not before or connection in fresh:  # as with nearly all messages: no address can have too many
            if size:
                fresh[connection] = size
            else:
                fresh.pop(connection, None)
            return
        address = connection.address
        count = self._count(connection, size - before, half=size > 0)
        if size > before and (count > self._address_max or self.total > self._total_max):
            while self._bytes.get(address, 0) > self._address_max and self._close_first(address):
                pass
            if self.total > self._total_max:
                self._free()

    def _count(self, connection: Input, by: int, *, half: bool) -> int:
        """Count so many bytes more of a connection, or fewer; returns those of its address."""
        address, halves = connection.address, self._halves.get(connection.address)
        count = self._bytes.get(address, 0) + by
        if count:
            self._bytes[address] = count
        else:
            self._bytes.pop(address, None)
        if half:
            if halves is None:
                self._halves[address] = {connection: None}
            else:
                halves.setdefault(connection)
        elif halves is not None:
            halves.pop(connection, None)
            if not halves:
                del self._halves[address]
        return count

    def _free(self) -> None:
        enough = self._total_max - self._total_max // FREED_PART
        for address in sorted(self._halves, key=lambda each: self._bytes.get(each, 0), reverse=True):
            while self.total > enough and self._close_first(address):
                pass

    def _close_first(self, address: str) -> bool:
        connection = next(iter(self._halves.get(address, ())), None)
        if connection is None:
            return False
        if time.monotonic() - self._warned_at >= WARN_S:
            self._warned_at = time.monotonic()
            logger.warning(
                "%s and others have sent %d bytes of requests that are not whole: connections with such are closed",
                address,
                self.total,
            )
        connection.close()
        return True


class Input(asyncio.Protocol):
    """One connection between its socket and the protocol that serves it, which hears all that
    happens. `address` is that of the client (`connections.address_key`)."""

    def __init__(self, served: asyncio.Protocol, address: str, book: InputBook) -> None:
        self._served, self.address, self._book = served, address, book
        self._half = 0
        """Bytes of what is not whole."""
        self._reads = 0
        """How many reads they came in."""
        self._counted = 0
        """What the book has of this connection."""
        self._last = 0
        """Bytes of the last read, without those of control frames that were taken out of it."""
        self._reading = False
        """Whether the last read is being served."""
        self._transport: asyncio.Transport | None = None
        """None before the connection is made, and once the book has closed it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._served.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._recount()
        self._served.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        size = self._last = len(data)
        self._half += size
        self._reads += 1
        before = self._counted
        self._counted = before + size + READ_BYTES
        self._book.changed(self, self._counted, before)
        if self._transport is not None:  # else the book has closed it
            self._reading = True
            self._served.data_received(data)
            self._reading = False

    def eof_received(self) -> bool | None:
        return self._served.eof_received()

    def pause_writing(self) -> None:
        self._served.pause_writing()

    def resume_writing(self) -> None:
        self._served.resume_writing()

    def close(self) -> None:
        """End the connection now."""
        transport, self._transport = self._transport, None
        self._recount()
        if transport is not None:
            transport.abort()

    def taken(self, size: int) -> None:
        """A head, body or message that took so many bytes is whole."""
        rest, reads = self._half - size, self._reads
        if self._reading:  # what follows came with the last read; more than that is the coding of a body in chunks
            rest = min(rest, self._last)
        self._half = self._reads = 0
        before, self._counted = self._counted, 0
        self._book.changed(self, 0, before)
        if rest >= SLACK_BYTES:  # of what follows, which begins to wait now
            self._half, self._reads = rest, reads
            self._recount()

    def expands(self, size: int) -> None:
        """What has come of a body may take so many bytes more than it did on the wire."""
        self._half += size
        self._recount()

    def control_taken(self, size: int) -> None:
        """A control frame with so many bytes of payload is answered. It may have come between the
        parts of a message, which stay."""
        taken = min(self._last, size + CONTROL_HEAD_BYTES, self._half)
        self._half -= taken
        self._last -= taken
        if not self._half:
            self._reads = 0
        self._recount()

    def _recount(self) -> None:
        if self._transport is None:
            self._half = self._reads = 0
        before, self._counted = self._counted, self._half + READ_BYTES * self._reads
        self._book.changed(self, self._counted, before)


def input_of(request: web.BaseRequest) -> Input | None:
    """What counts the input of the connection of a request; None where it is closed, or a Unix
    socket."""
    transport = request.transport
    if transport is None or transport.is_closing():  # TLS that is closed knows its protocol no more
        return None
    protocol = transport.get_protocol()
    return protocol if isinstance(protocol, Input) else None


@web.middleware
async def count_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that says what of a connection's input is a whole request, and refuses long
    heads."""
    head = len(request.path_qs) + sum(len(name) + len(value) for name, value in request.raw_headers)
    source, body = input_of(request), request.content
    if source is not None:
        source.taken(head)
        more = request.client_max_size if "Content-Encoding" in request.headers and not body.is_eof() else 0
        source.expands(more)
        body.on_eof(lambda: source.taken(body.total_bytes + more))
    if head > HEAD_BYTES_MAX:
        what = f"the head of this request has {head} bytes, and the limit is {HEAD_BYTES_MAX}"
        return problem_response(UsageError(what, remedy="Send shorter header fields"))
    return await handler(request)


def message_taken(source: Input, message: WSMessage | WSMessageTextBytes) -> None:
    """A WebSocket's message of a client was taken from its connection."""
    kind = message.type
    if kind in MESSAGES:
        size = len(message.data)
        source.taken(size + (MASK_BYTES + 2 if size < 126 else MASK_BYTES + 4 if size < 1 << 16 else MASK_BYTES + 10))
    elif kind is WSMsgType.PING or kind is WSMsgType.PONG:
        source.control_taken(len(message.data))
