"""The guard of an HTTP server over real connections: names of the server while access is off, and
what is in no table of routes while it is on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from p2pdist.model.access import ANONYMOUS, Identity
from p2pdist.transfer.guard import OwnNames, guard
from p2pdist.transfer.openapi import Answer, Route, serve
from p2pdist.transfer.problems import problems


async def _say(request: web.Request) -> web.Response:
    """Answer."""
    return web.Response(text="yes")


ROUTES = (
    Route("GET", "/read", _say, (Answer(media_type="text/plain"),), right="read"),
    Route("POST", "/change", _say, (Answer(media_type="text/plain"),), right="preseed"),
    Route("GET", "/open", _say, (Answer(media_type="text/plain"),), right="open"),
    Route("GET", "/session", _say, (Answer(media_type="text/plain"),), right="agent"),
)


@asynccontextmanager
async def serving(identity: Identity | None = None) -> AsyncIterator[int]:
    async def identify(request: web.Request) -> Identity:
        assert identity is not None
        return identity

    checks = guard(identify if identity is not None else None, names=OwnNames(["given.example", "h1:7071"]))
    app = web.Application(middlewares=[problems, checks])
    serve(app, ROUTES, title="test")
    app.router.add_get("/beside", _say)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def status(port: int, path: str, host: str, method: str = "GET", more: Mapping[str, str] | None = None) -> int:
    """The status of a request whose Host field is as given."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {"Host": host, "Content-Length": "0", **(more or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.readline(), 60)
    writer.close()
    return int(answer.split()[1])


ADDRESSES = ("127.0.0.1", "127.0.0.1:7070", "[::1]:7070", "10.0.0.5:7070", "localhost", "LOCALHOST:1", "a.localhost:80")
OWN = (*ADDRESSES, "tracker:7070", "p2pdist-tracker.jobs.svc:7070", "t.jobs.svc.cluster.local", "t.corp.internal.")
GIVEN = ("given.example:7070", "Given.Example", "given.example.", "h1", "h1:9")
OTHERS = ("evil.example", "evil.example:7070", "127.0.0.1.evil.example", "localhost.evil.example", "given.example.evil")


async def test_without_access_a_page_whose_name_leads_here_reads_nothing() -> None:
    async with serving() as port:
        for host in (*OWN, *GIVEN, socket.gethostname()):
            assert await status(port, "/read", host) == 200, host
        for host in OTHERS:
            assert await status(port, "/read", host) == 403, host
            # A browser says the same of the page, whose host this request is for.
            origin = {"Origin": f"http://{host}"}
            assert await status(port, "/change", host, "POST", origin) == 403, host
            assert await status(port, "/change", host, "POST") == 403, host
            assert await status(port, "/session", host, more=origin | {"Upgrade": "websocket"}) == 403, host
            assert await status(port, "/open", host) == 200, "what is open tells nobody anything"
            assert await status(port, "/nothing", host) == 404


async def test_a_name_by_which_agents_come_is_learnt() -> None:
    async with serving() as port:
        name = "tracker.example:7070"
        assert await status(port, "/read", name) == 403
        # A page cannot ask for a WebSocket without its Origin.
        assert await status(port, "/session", name, more={"Upgrade": "websocket"}) == 200
        assert await status(port, "/read", name) == 200
        assert await status(port, "/change", name, "POST", {"Origin": "http://evil.example"}) == 403
        for number in range(70):
            await status(port, "/session", f"n{number}.example", more={"Upgrade": "websocket"})
        assert await status(port, "/read", name) == 403, "only so many are kept"


@pytest.mark.parametrize("identity", [ANONYMOUS, Identity("token", "t", frozenset({"open", "read"}))], ids=str)
async def test_with_access_what_is_in_no_table_of_routes_is_not_served(identity: Identity) -> None:
    async with serving(identity) as port:
        assert await status(port, "/beside", "127.0.0.1") == 404
        assert await status(port, "/nothing", "127.0.0.1") == 404
        assert await status(port, "/open", "127.0.0.1") == 200
        assert await status(port, "/open", "any.example") == 200, "credentials, not names, decide"
        assert await status(port, "/read", "127.0.0.1") == (401 if identity is ANONYMOUS else 200)
    async with serving() as port:
        assert await status(port, "/beside", "127.0.0.1") == 200
