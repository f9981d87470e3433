"""Connections that clients hold open: which ones go when there are too many, and that others get
through."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, TCPConnector, UnixConnector, web
from authority import Authority

from p2pdist.cli.daemon import listen_unix
from p2pdist.transfer.connections import (
    ADDRESS_SHARE,
    CONNECTIONS,
    CONNECTIONS_MAX,
    ConnectionBook,
    LimitedSite,
    address_key,
    connections_max,
    in_use,
)
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.tls import Tls

SILENT = 24


class Fake:
    """What the book sees of a connection."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.closed = False

    def fileno(self) -> int:
        return -1 if self.closed else self.descriptor

    def close(self) -> None:
        assert not self.closed
        self.closed = True


def take(book: ConnectionBook, host: str, *descriptors: int) -> list[Fake]:
    connections = [Fake(descriptor) for descriptor in descriptors]
    for connection in connections:
        assert book.take(host, connection)
    return connections


def test_the_one_that_was_idle_longest_goes_first() -> None:
    book = ConnectionBook(8)
    first, *others = take(book, "10.0.0.1", 10, 11, 12, 13)
    with book.in_use(10):
        pass  # its request was answered: it is idle from now on
    take(book, "10.0.0.1", 14)
    assert [connection.closed for connection in (first, *others)] == [False, True, False, False]
    assert len(book) == 4


def test_an_address_cannot_take_the_room_of_others() -> None:
    """Though it uses all its connections: others have their part, and it gets no more."""
    book = ConnectionBook(8)
    with contextlib.ExitStack() as uses:
        for descriptor in range(int(8 * ADDRESS_SHARE)):
            take(book, "10.0.0.1", descriptor)
            uses.enter_context(book.in_use(descriptor))
        assert not book.take("10.0.0.1", Fake(50))
        other = take(book, "10.0.0.2", 60, 61)
        assert not any(connection.closed for connection in other)
    take(book, "10.0.0.1", 50)


def test_when_all_is_taken_the_address_with_most_idle_ones_loses_one() -> None:
    book = ConnectionBook(8)
    single = take(book, "10.0.0.9", 1)
    many = take(book, "10.0.0.1", 10, 11, 12, 13)
    some = take(book, "10.0.0.2", 20, 21, 22)
    new = take(book, "10.0.0.3", 30)
    assert [connection.closed for connection in many] == [True, False, False, False]
    assert not any(connection.closed for connection in single + some + new)


def test_closed_connections_do_not_count() -> None:
    book = ConnectionBook(8)
    old = take(book, "10.0.0.1", 10, 11, 12, 13)
    for connection in old[:3]:
        connection.closed = True
    take(book, "10.0.0.1", 20, 21, 22)
    assert not old[3].closed
    assert len(book) == 4
    take(book, "10.0.0.1", 22)  # the same descriptor again: the connection before it was closed
    assert len(book) == 4


def test_descriptors_bound_connections() -> None:
    assert connections_max(1 << 20) == CONNECTIONS_MAX
    for descriptors in (128, 256, 1024, 4096):
        assert 2 * connections_max(descriptors) < descriptors


def test_an_ipv6_host_is_one_address() -> None:
    assert address_key("2001:db8:1:2::1") == address_key("2001:db8:1:2:ffff::9") != address_key("2001:db8:1:3::1")
    assert address_key("::ffff:192.0.2.1") == address_key("192.0.2.1") != address_key("192.0.2.2")
    assert address_key("fe80::1%eth0") == address_key("fe80::1")


@asynccontextmanager
async def serving(total_max: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, ConnectionBook]]:
    """A server over a real port: /slow never answers. No connection ends there for taking long: the
    book alone ends them."""

    async def quick(_: web.Request) -> web.Response:
        return web.Response(text="here")

    async def slow(request: web.Request) -> web.Response:
        with in_use(request):
            await asyncio.Event().wait()
        return web.Response()

    book = ConnectionBook(total_max)
    app = web.Application()
    app[CONNECTIONS] = book
    app.router.add_get("/", quick)
    app.router.add_get("/slow", slow)
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=0.1, keepalive_timeout=3600.0, handler_cancellation=True
    )
    await runner.setup()
    site = LimitedSite(runner, "127.0.0.1", 0, book, tls=tls, handshake_s=3600.0)
    await site.start()
    try:
        yield site.port, book
    finally:
        await runner.cleanup()


Connections = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


@asynccontextmanager
async def clients(port: int, count: int, begin: bytes) -> AsyncIterator[Connections]:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    try:
        for _, writer in opened:
            writer.write(begin)
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def ended(connections: Connections, count: int) -> None:
    """Wait until the server has closed `count` of the connections."""

    async def end(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1024):
                pass

    waiting = {asyncio.create_task(end(reader)) for reader, _ in connections}
    done: set[asyncio.Task[None]] = set()
    async with asyncio.timeout(60):
        while len(done) < count:
            now, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= now
    for task in waiting:
        task.cancel()


@pytest.mark.parametrize(
    "begin", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"]
)
async def test_idle_and_half_requests_give_way(begin: bytes) -> None:
    async with serving(16) as (port, book), clients(port, SILENT, begin) as silent:
        await ended(silent, SILENT - 8)
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/") as answer:
            assert answer.status == 200
        assert len(book) <= 16


async def test_a_response_under_way_is_not_broken() -> None:
    async with serving(16) as (port, _), clients(port, 1, b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n") as slow:
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/") as answer:
            assert answer.status == 200  # what came before it is being answered
        async with clients(port, SILENT, b"GET / HT") as silent:
            await ended(silent, SILENT - 8)
            assert not slow[0][0].at_eof()


@pytest.mark.parametrize("own", [True, False], ids=["own context", "ssl module"])
async def test_half_handshakes_give_way(tmp_path: Path, own: bool) -> None:
    """With TLS a connection that shows no certificate is idle from its first moment."""
    files = Authority(tmp_path).issue()
    tls = Tls(files)
    context = ServerContext(tls) if own else ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if not own:
        context.load_cert_chain(files.certificate, files.key)
    async with serving(16, context) as (port, _), clients(port, SILENT, b"\x16\x03\x01") as silent:
        await ended(silent, SILENT - 8)
        connector = TCPConnector(ssl=tls.client)
        async with ClientSession(connector=connector) as session, session.get(f"https://127.0.0.1:{port}/") as answer:
            assert answer.status == 200


async def test_no_user_of_a_host_takes_all_of_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is open at the Unix socket are descriptors as well, that peers and the store lack."""
    monkeypatch.setattr("p2pdist.cli.daemon.local_connections_max", lambda: 16)
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        asked.set()
        await go_on.wait()
        return web.Response(text="slow")

    app, path = web.Application(), tmp_path / "socket"
    app.router.add_get("/slow", slow)
    runner = await listen_unix(app, path)
    try:
        async with ClientSession(connector=UnixConnector(str(path))) as session:
            waiting = asyncio.create_task(session.get("http://agent/slow"))
            await asked.wait()
            silent = [await asyncio.open_unix_connection(path) for _ in range(SILENT)]
            await ended(silent, SILENT - 11)
            assert app[CONNECTIONS]._counts.keys() == {f"user {os.getuid()}"}
            async with session.get("http://agent/") as answer:
                assert answer.status == 404
            assert not waiting.done(), "what is being answered stays"
            go_on.set()
            assert await (await waiting).text() == "slow"
            for _, writer in silent:
                writer.close()
    finally:
        await runner.cleanup()


async def test_commands_of_a_user_that_begin_at_once_are_all_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has connected before any has sent its request, as on a host with many processors."""
    monkeypatch.setattr("p2pdist.cli.daemon.local_connections_max", lambda: 16)
    app, path, count = web.Application(), tmp_path / "socket", int(16 * ADDRESS_SHARE)
    runner = await listen_unix(app, path)
    try:
        async with asyncio.timeout(60):
            begun = [await asyncio.open_unix_connection(path) for _ in range(count)]
            while len(app[CONNECTIONS]) < count:
                await asyncio.sleep(0.01)
            for _, writer in begun:
                writer.write(b"GET / HTTP/1.0\r\nHost: agent\r\n\r\n")
            heads = [await reader.readline() for reader, _ in begun]
        assert heads == [b"HTTP/1.0 404 Not Found\r\n"] * count
        for _, writer in begun:
            writer.close()
    finally:
        await runner.cleanup()
