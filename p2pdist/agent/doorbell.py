"""The BitTorrent port of an agent before BitTorrent runs: whoever knocks has it started.

Theory. libtorrent costs an agent 20 MB and several threads, and most never need it. So at first
only this listens at the port. At the first connection it gives the port free, has the session
started there, and hands on by relay, from socket to socket, those connections that came before; all
later ones reach the session itself. A peer never notices, but it may see another port at the other
end.

Invariants: at most RELAYS_MAX connections are relayed; each holds RELAY_BYTES at most in either
direction.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from p2pdist.model.errors import Conflict, P2PDistError

RELAYS_MAX = 16
RELAY_BYTES = 64 << 10
CONNECT_S = 5.0

_logger = logging.getLogger(__name__)


class Doorbell:
    """See the module's text. Listens from the beginning; raises Conflict when the address is
    taken."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=RELAYS_MAX)
        except OSError as error:
            raise Conflict(
                f"BitTorrent cannot listen on {host} port {port}: {error.strerror or error}",
                remedy="Give another --bt-listen, or --transport trees",
            ) from error
        self._socket.setblocking(False)
        self.host = host
        self.port = int(self._socket.getsockname()[1])
        self._waiting: asyncio.Task[None] | None = None
        self._relays: set[asyncio.Task[None]] = set()

    def wait(self, start: Callable[[], Awaitable[object]]) -> None:
        """From now on `start` is awaited when somebody knocks; it closes this, and has another
        listen there. It may raise P2PDistError."""
        self._waiting = asyncio.create_task(self._wait(start), name="bittorrent-doorbell")

    def close(self) -> None:
        """Give the port free; relays go on."""
        self._socket.close()
        if self._waiting is not None and self._waiting is not asyncio.current_task():
            self._waiting.cancel()

    async def stop(self) -> None:
        """Give the port free and end the relays."""
        self._socket.close()
        tasks = [*self._relays, *([self._waiting] if self._waiting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, start: Callable[[], Awaitable[object]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            first, _ = await loop.sock_accept(self._socket)
        except OSError:  # closed
            return
        knocking = [first]
        with suppress(OSError):
            while len(knocking) < RELAYS_MAX:
                knocking.append(self._socket.accept()[0])
        try:
            await start()
        except P2PDistError as error:
            _logger.warning("a BitTorrent peer cannot be served: %s", error)
            for connection in knocking:
                connection.close()
            return
        for connection in knocking:
            connection.setblocking(False)
            relay = asyncio.create_task(self._relay(connection))
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)

    async def _relay(self, connection: socket.socket) -> None:
        """Join a connection with one to whoever listens at the port now."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        writers = []
        with suppress(OSError, TimeoutError):
            try:
                outer, to_outer = await asyncio.open_connection(sock=connection, limit=RELAY_BYTES)
                writers.append(to_outer)
                async with asyncio.timeout(CONNECT_S):
                    inner, to_inner = await asyncio.open_connection(host, self.port, limit=RELAY_BYTES)
                writers.append(to_inner)
                pumps = [asyncio.create_task(_pump(outer, to_inner)), asyncio.create_task(_pump(inner, to_outer))]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                for writer in writers:
                    writer.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(RELAY_BYTES):
        target.write(data)
        await target.drain()
