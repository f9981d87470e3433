"""Connections of a tracker that are no sessions, counted on real sockets."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
from aiohttp import web

from p2pdist.model.messages import PROTOCOL_VERSION, Hello, encode
from p2pdist.transfer.connections import CONNECTIONS, LimitedSite
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.http.sessions import CONNECTIONS_MAX, CONNECTIONS_PART, connection_book
from tracker.service import Service

LIMIT = 8
"""Connections that are no sessions: half of them may be idle ones of one address."""


async def test_connections_give_way_and_sessions_do_not_count() -> None:
    service = Service(Fleet(0.0), Content(None))
    app = make_app(service)
    app[CONNECTIONS] = book = connection_book(LIMIT * CONNECTIONS_PART)
    runner = web.AppRunner(app, shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    site = LimitedSite(runner, "127.0.0.1", 0, book)
    await site.start()
    url = f"http://127.0.0.1:{site.port}"
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/events") as following:
        await following.content.readuntil(b"\n\n")
        sockets = []
        for number in range(2 * LIMIT):  # more than the limit, and all of them stay
            socket = await http.ws_connect(f"{url}/v1/session")
            await socket.send_str(encode(Hello(PROTOCOL_VERSION, f"h{number}", f"127.0.0.1:{number + 1}")).decode())
            assert (await socket.receive(timeout=60)).type is aiohttp.WSMsgType.TEXT
            sockets.append(socket)
        assert len(book) == 1, "the health page's"
        half = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(LIMIT)]
        for _, writer in half:
            writer.write(b"GET /healthz HTTP/1.1\r\n")
        for reader, _ in half[: LIMIT // 2]:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
        async with http.get(f"{url}/healthz") as answer:
            assert answer.status == 200
        assert service.sessions == 2 * LIMIT and not any(socket.closed for socket in sockets)
        await following.content.readuntil(b"\n\n")
        for _, writer in half:
            writer.close()
        for socket in sockets:
            await socket.close()
    await runner.cleanup()


def test_ten_thousand_agents_behind_one_address_connect_at_one_moment() -> None:
    class Connection:
        """One that stays open."""

        def __init__(self, descriptor: int) -> None:
            self.fileno = lambda: descriptor

        def close(self) -> None:
            raise AssertionError("closed for another one")

    book = connection_book(1 << 20)
    assert all(book.take("192.0.2.1", Connection(number)) for number in range(10_000))
    for number in range(10_000):
        book.release(number)
    assert len(book) == 0
    book = connection_book(4 * CONNECTIONS_MAX)
    assert all(book.take("192.0.2.1", Connection(number)) for number in range(CONNECTIONS_MAX // 2))
