"""Connections that are no sessions: one address may hold a share of the file descriptors.

A connection costs a descriptor from its first packet on, long before a request shows what it is
for. So those of one address are counted until they become a session, and closed at once over the
limit. The limit is a share of what the process may open: a fleet of ten thousand agents behind one
address stays far below it.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from typing import Any

from aiohttp import web

SHARE = 4
"""One address may hold one of so many parts of the descriptors."""

logger = logging.getLogger(__name__)


class Connections:
    """Counts the connections of a server by address, and closes what is over `limit`."""

    def __init__(self, server: web.Server, limit: int) -> None:
        self.limit = limit
        self.held: Counter[str] = Counter()
        """Connections that are no sessions, by address."""
        self._addresses: dict[Any, str] = {}
        """Addresses of the counted connections, by protocol."""
        self._made, self._lost = server.connection_made, server.connection_lost
        server.connection_made = self._connection_made  # type: ignore[method-assign]
        server.connection_lost = self._connection_lost  # type: ignore[method-assign]

    def _connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        self._made(handler, transport)
        peer = transport.get_extra_info("peername")
        if not isinstance(peer, tuple):
            return
        address = self._addresses[handler] = str(peer[0])
        self.held[address] += 1
        if self.held[address] > self.limit:
            logger.warning("%s has %d connections open: another one is closed", address, self.limit)
            transport.abort()

    def _connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        self._lost(handler, exc)
        self.exempt(handler)

    def exempt(self, handler: Any) -> None:
        """A connection has become a session, or is gone: it counts no longer."""
        address = self._addresses.pop(handler, None)
        if address is None:
            return
        self.held[address] -= 1
        if not self.held[address]:
            del self.held[address]


CONNECTIONS: web.AppKey[list[Connections]] = web.AppKey("connections", list)


def limit_connections(app: web.Application, runner: web.AppRunner, descriptors: int = 0) -> None:
    """Let no address hold more than its share of `descriptors`, 0 for those of this process, with
    connections to `runner`, which serves `app`."""
    descriptors = descriptors or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if runner.server is not None:
        app[CONNECTIONS].append(Connections(runner.server, max(1, descriptors // SHARE)))
