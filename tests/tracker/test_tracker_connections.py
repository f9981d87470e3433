"""Connections that are no sessions, counted by address on real sockets."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
from aiohttp import web

from p2pdist.model.messages import PROTOCOL_VERSION, Hello, encode
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.http.connections import CONNECTIONS, SHARE, limit_connections
from tracker.service import Service


async def test_one_address_holds_a_share_of_the_connections_and_sessions_do_not_count() -> None:
    service = Service(Fleet(0.0), Content(None))
    app = make_app(service)
    runner = web.AppRunner(app, shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    limit_connections(app, runner, 5 * SHARE)
    (connections,) = app[CONNECTIONS]
    port = runner.addresses[0][1]
    sockets = []
    async with aiohttp.ClientSession() as http:
        for number in range(8):  # more than the limit, and all of them stay
            socket = await http.ws_connect(f"http://127.0.0.1:{port}/v1/session")
            await socket.send_str(encode(Hello(PROTOCOL_VERSION, f"h{number}", f"127.0.0.1:{number + 1}")).decode())
            assert (await socket.receive(timeout=5)).type is aiohttp.WSMsgType.TEXT
            sockets.append(socket)
        assert connections.held["127.0.0.1"] == 0
        half = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for _, writer in half:
            writer.write(b"GET /healthz HTTP/1.1\r\n")
        over, _ = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(over.read(), 10) == b""
        assert service.sessions == 8
        for _, writer in half:
            writer.close()
        while connections.held:
            await asyncio.sleep(0.01)
        async with http.get(f"http://127.0.0.1:{port}/healthz") as answer:
            assert answer.status == 200
        for socket in sockets:
            await socket.close()
    await runner.cleanup()
