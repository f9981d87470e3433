"""How many connections a service takes over TCP, and which one goes when there are too many.

Theory. Each connection is a descriptor, and a process has only so many; what it does not have left
over, its Unix socket, its store and its own requests lack. So a service takes connections up to a
part of its descriptors (`connections_max`). A connection is in use while a response is being sent
to it; else it is idle: between two requests, within half a request, or within half a TLS handshake.
An idle connection costs its client nothing, so it has no claim: where an address has too many, or
all addresses together have, the connection that has been idle longest is closed, of the address
with most of them. What is in use is never closed for another connection. An address has no more
than ADDRESS_SHARE of all, so the others always find room. A client that had its pooled connection
closed opens another one.

A connection that has become something else with a limit of its own, such as the session of an
agent at a tracker, is released and counts no longer.

A listener that takes its connections itself sees them before TLS does. The kernel gives a new
connection the lowest free descriptor, so an entry whose descriptor comes again was closed.

Invariants: closing is asked for once a connection; where a limit is met, connections whose socket
is closed are looked for and forgotten, at the latest when an eighth of the entries is new.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Iterator
from ipaddress import IPv6Address
from typing import Any, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from p2pdist.model.address import ip_of
from p2pdist.transfer.input import INPUT_BYTES_MAX, Input, InputBook
from p2pdist.transfer.tls import ServingContext

CONNECTIONS_MAX = 4096
IDLE_OF_ADDRESS_MAX = 512
"""Idle connections of one address, unless a book says otherwise: two dozen agents of a machine keep
up to 16 each."""

ADDRESS_SHARE, IDLE_SHARE = 3 / 4, 1 / 2
"""The parts of all connections that one address may have, and have idle."""

DESCRIPTORS_KEPT = 64
DESCRIPTORS_A_CONNECTION = 4
"""The connection, the copy through which files are sent, the file, and one for everything else."""

LOCAL_PART = 8
"""One of so many parts of the descriptors is for connections to a Unix socket, where idle ones are
one each."""

HANDSHAKE_S_MAX = 10.0
SHUTDOWN_S_MAX = 2.0
"""How long a connection over TLS that ends waits for the peer's word of it: who receives a stream
may sleep until the connection itself has ended."""

ACCEPTS_MAX = 16
"""Connections taken before the event loop runs other tasks."""

FULL_PAUSE_S = 0.1
"""How long a listener rests when the process has no descriptor left."""

CLOSED_WHEN_FULL = 8
SWEEP_PART = 8
"""Closed connections are looked for once one of so many parts of the entries is new: to look at all
for each would let a client that opens many take the processor."""

WARN_S = 60.0

logger = logging.getLogger(__name__)


def connections_max(descriptors: int | None = None) -> int:
    """The connections that a process with so many descriptors takes; None for as many as this one
    may have."""
    descriptors = _descriptors() if descriptors is None else descriptors
    return max(8, min(CONNECTIONS_MAX, (descriptors - DESCRIPTORS_KEPT) // DESCRIPTORS_A_CONNECTION))


def local_connections_max() -> int:
    """The connections that this process takes at its Unix socket."""
    return max(8, min(CONNECTIONS_MAX, _descriptors() // LOCAL_PART))


def local_book(total_max: int) -> ConnectionBook:
    """The connections to a Unix socket, by user. As many commands of a user as may be served at
    once may also begin at once: a connection is idle until its first request has come."""
    return ConnectionBook(total_max, idle_max=total_max, idle_share=ADDRESS_SHARE)


def _descriptors() -> int:
    """How many this process may have; where there is no limit, enough for CONNECTIONS_MAX."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if descriptors == resource.RLIM_INFINITY else descriptors


def address_key(host: str) -> str:
    """What counts as one address: an IPv4 address, or the 64 bits that an IPv6 host chooses none
    of. Other text stands for itself."""
    ip = ip_of(host)
    if isinstance(ip, IPv6Address):
        ip = IPv6Address(int(ip) >> 64 << 64)
    return host if ip is None else str(ip)


class Closable(Protocol):
    """A connection that can be closed, and says by its descriptor (-1) that it is."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


class ConnectionBook:
    """The connections of a service, by address. Nothing here waits or asks for the time: the order
    in which connections became idle is enough."""

    def __init__(
        self,
        total_max: int,
        *,
        idle_max: int = IDLE_OF_ADDRESS_MAX,
        idle_share: float = IDLE_SHARE,
        input_bytes_max: int = INPUT_BYTES_MAX,
    ) -> None:
        self.inputs = InputBook(input_bytes_max)
        """What they have sent that is not whole."""
        self._total_max = total_max
        self._address_max = max(1, int(total_max * ADDRESS_SHARE))
        self._idle_max = max(1, min(idle_max, int(total_max * idle_share)))
        self._unswept = 0
        """Connections taken since closed ones were looked for."""
        self._open: dict[int, tuple[str, Closable]] = {}
        """Address and connection, by descriptor."""
        self._counts: Counter[str] = Counter()
        """Connections of each address."""
        self._idle: dict[str, dict[int, None]] = {}
        """Descriptors of each address's idle connections; the one that has been idle longest comes
        first."""

    def __len__(self) -> int:
        return len(self._open)

    def take(self, host: str, connection: Closable) -> bool:
        """Count a new connection, and close others for it where need be. False: it finds no room,
        and the caller closes it."""
        address, descriptor = address_key(host), connection.fileno()
        self.release(descriptor)
        self._unswept += 1
        if self._over(address) and self._unswept * SWEEP_PART >= len(self._open):
            self._sweep()
        if self._counts[address] >= self._address_max or len(self._idle.get(address, ())) >= self._idle_max:
            room = self._close_idle(address)
        elif len(self._open) >= self._total_max:
            room = self.close_idle(1) == 1
        else:
            room = True
        if room:
            self._open[descriptor] = address, connection
            self._counts[address] += 1
            self._idle.setdefault(address, {})[descriptor] = None
        return room

    def close_idle(self, count: int) -> int:
        """Close up to `count` idle connections of the addresses with most of them; returns how
        many there were."""
        closed = 0
        while closed < count and self._idle:
            closed += self._close_idle(max(self._idle, key=lambda address: len(self._idle[address])))
        return closed

    @contextlib.contextmanager
    def in_use(self, descriptor: int) -> Iterator[None]:
        """Within it a connection is not idle."""
        entry = self._open.get(descriptor)
        if entry is not None:
            self._drop_idle(entry[0], descriptor)
        try:
            yield
        finally:
            if entry is not None and self._open.get(descriptor) is entry:
                self._idle.setdefault(entry[0], {})[descriptor] = None

    def _over(self, address: str) -> bool:
        return (
            self._counts[address] >= self._address_max
            or len(self._idle.get(address, ())) >= self._idle_max
            or len(self._open) >= self._total_max
        )

    def _sweep(self) -> None:
        """Forget the connections that have been closed meanwhile."""
        self._unswept = 0
        for descriptor, (_, connection) in list(self._open.items()):
            if connection.fileno() != descriptor:
                self.release(descriptor)

    def _close_idle(self, address: str) -> bool:
        """Close the connection of an address that has been idle longest; False when it has none."""
        idle = self._idle.get(address)
        if not idle:
            return False
        descriptor = next(iter(idle))
        _, connection = self._open[descriptor]
        self.release(descriptor)
        connection.close()
        return True

    def release(self, descriptor: int) -> None:
        """Count a connection no longer: it is closed, or has become something else."""
        entry = self._open.pop(descriptor, None)
        if entry is None:
            return
        address, _ = entry
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]
        self._drop_idle(address, descriptor)

    def _drop_idle(self, address: str, descriptor: int) -> None:
        idle = self._idle.get(address)
        if idle is not None:
            idle.pop(descriptor, None)
            if not idle:
                del self._idle[address]


_UCRED = struct.Struct("=iII")
"""Process, user and group of the other end of a Unix socket (unix(7))."""

CONNECTIONS: web.AppKey[ConnectionBook] = web.AppKey("connections", ConnectionBook)


def in_use(request: web.Request) -> contextlib.AbstractContextManager[None]:
    """Within it the connection of a request is not idle, since a response is being sent to it."""
    book = request.app.get(CONNECTIONS)
    return book.in_use(_descriptor(request)) if book is not None else contextlib.nullcontext()


@web.middleware
async def in_use_while_answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware for requests each of which is in use until it is answered."""
    with in_use(request):
        return await handler(request)


def release(request: web.Request) -> None:
    """The connection of a request counts no longer."""
    book = request.app.get(CONNECTIONS)
    if book is not None:
        book.release(_descriptor(request))


def _descriptor(request: web.Request) -> int:
    """That of the connection of a request; -1 where it is closed."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    return connection.fileno() if connection is not None else -1


class _Accepted:
    """A connection from the moment in which it is taken."""

    def __init__(self, connection: socket.socket, address: str, inputs: InputBook) -> None:
        self._connection, self._address, self._inputs = connection, address, inputs
        self._transport: asyncio.BaseTransport | None = None
        self._serving: asyncio.Task[None] | None = None

    def fileno(self) -> int:
        return self._connection.fileno()

    def serve(self, server: web.Server, tls: ssl.SSLContext | None, handshake_s: float) -> asyncio.Task[None]:
        """Hand the connection to `server`, after the handshake where there is `tls`."""
        seconds = handshake_s if tls is not None else None
        self._serving = serving = asyncio.get_running_loop().create_task(self._serve(server, tls, seconds))
        serving.add_done_callback(self._served)
        return serving

    async def _serve(self, server: web.Server, tls: ssl.SSLContext | None, seconds: float | None) -> None:
        loop, served = asyncio.get_running_loop(), Input(server(), self._address, self._inputs)
        try:
            if isinstance(tls, ServingContext):
                assert seconds is not None
                verified = loop.create_future()
                between = tls.tls_protocol(served, verified, handshake_s=seconds, shutdown_s=SHUTDOWN_S_MAX)
                self._transport, _ = await loop.connect_accepted_socket(lambda: between, self._connection)
                try:
                    await verified
                except asyncio.CancelledError:
                    self._transport.abort()
                    raise
            else:
                self._transport, _ = await loop.connect_accepted_socket(
                    lambda: served,
                    self._connection,
                    ssl=tls,
                    ssl_handshake_timeout=seconds,
                    ssl_shutdown_timeout=SHUTDOWN_S_MAX if tls is not None else None,
                )
        except OSError as error:
            logger.debug("a connection ends before its first request: %r", error)

    def _served(self, _: asyncio.Task[None]) -> None:
        if self._transport is None:
            self._connection.close()

    def close(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()  # type: ignore[attr-defined]
        elif self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(OSError):  # whichever part of the handshake holds the socket sees its end
                self._connection.shutdown(socket.SHUT_RDWR)


class LimitedSite(web.BaseSite):
    """Listens at an address for a runner's application, and keeps connections within the limits of
    a book. Raises OSError when the address is taken."""

    def __init__(
        self,
        runner: web.BaseRunner,
        host: str,
        port: int,
        book: ConnectionBook,
        *,
        tls: ssl.SSLContext | None = None,
        handshake_s: float = HANDSHAKE_S_MAX,
        backlog: int = 1024,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=backlog)
        self._address = host, port
        self._book = book
        self._handshake_s = handshake_s
        self._listening: list[socket.socket] = []
        self._serving: set[asyncio.Task[None]] = set()
        """Handshakes under way."""
        self._warned_at = -WARN_S

    @property
    def name(self) -> str:
        """The URL of the site."""
        host, port = self._address
        return f"{'https' if self._ssl_context else 'http'}://{host}:{port}"

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._listening[0].getsockname()[1]) if self._listening else self._address[1]

    async def start(self) -> None:
        """Begin to listen."""
        await super().start()
        loop = asyncio.get_running_loop()
        try:
            await self._bind()
        except OSError:
            self._stop_listening()
            raise
        for listening in self._listening:
            loop.add_reader(listening, self._accept, listening)

    async def stop(self) -> None:
        """Take no new connections; open ones stay."""
        self._stop_listening()
        await super().stop()

    async def _bind(self) -> None:
        host, port = self._address
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            self._listen(family, address)

    def _source(self, connection: socket.socket, peer: Any) -> str:
        """What counts as the address of a connection."""
        return str(peer[0])

    def _listen(
        self, family: int, address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes] | str
    ) -> None:
        listening = socket.socket(family, socket.SOCK_STREAM)
        self._listening.append(listening)
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
        listening.listen(self._backlog)

    def _stop_listening(self) -> None:
        loop = asyncio.get_running_loop()
        for listening in self._listening:
            loop.remove_reader(listening)
            listening.close()
        self._listening = []

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                connection, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory is left
                self._full(listening, error)
                return
            self._take(connection, self._source(connection, peer))

    def _take(self, connection: socket.socket, host: str) -> None:
        connection.setblocking(False)
        accepted, server = _Accepted(connection, address_key(host), self._book.inputs), self._runner.server
        if server is None or not self._book.take(host, accepted):
            self._warn("a connection from %s is refused: it or all together have as many as they may, all in use", host)
            connection.close()
            return
        serving = accepted.serve(server, self._ssl_context, self._handshake_s)
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    def _full(self, listening: socket.socket, error: OSError) -> None:
        """The process cannot take a connection: close some that are idle, and go on later."""
        self._warn("no connection can be taken: %s; idle ones are closed", error.strerror or error)
        self._book.close_idle(CLOSED_WHEN_FULL)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        loop.call_later(FULL_PAUSE_S, self._go_on, listening)

    def _go_on(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _warn(self, text: str, *words: object) -> None:
        """Log that connections are too many, once in WARN_S."""
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= WARN_S:
            self._warned_at = now
            logger.warning(text, *words)


class LimitedUnixSite(LimitedSite):
    """Listens at a path for processes of this host; each user of it is an address. Raises OSError
    where it cannot."""

    def __init__(self, runner: web.BaseRunner, path: str, book: ConnectionBook) -> None:
        super().__init__(runner, path, 0, book)

    @property
    def name(self) -> str:
        """The URL of the site."""
        return f"http://unix:{self._address[0]}:"

    async def _bind(self) -> None:
        self._listen(socket.AF_UNIX, self._address[0])

    def _source(self, connection: socket.socket, peer: Any) -> str:
        _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return f"user {uid}"
