"""Connections of a tracker that are no sessions, counted on real sockets."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest
from aiohttp import web
from waits import until

from p2pdist.cli.daemon import listen
from p2pdist.model.digest import Digest
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Left, encode
from p2pdist.transfer.connections import CONNECTIONS, LimitedSite
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http import sessions
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


HEAD = (
    "GET /v1/session HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MTIzNDU2Nzg5MDEyMzQ1Ng==\r\n\r\n"
)


def frame(data: bytes, *, code: int = 1, end: bool = True, length: int | None = None) -> bytes:
    """A frame of a client; with `length` it is said to be that long."""
    length = len(data) if length is None else length
    head = bytes([(0x80 if end else 0) | code])
    if length < 126:
        return head + bytes([0x80 | length]) + bytes(4) + data
    return head + b"\xff" + length.to_bytes(8, "big") + bytes(4) + data


PART = 100_000
HALVES = {
    "a frame": frame(bytes(PART), length=1 << 20),
    "a frame after pings": frame(b"", code=9) * 20 + frame(bytes(PART), length=1 << 20),
    "parts with pings between": b"".join(
        frame(b" " * 1000, code=int(number == 0), end=False) + frame(b"", code=9) * 20 for number in range(PART // 1000)
    ),
}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES.keys())
@pytest.mark.parametrize("welcomed", [True, False])
async def test_half_messages_of_strangers_leave_sessions_alone(
    half: bytes, welcomed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message may have 4 MiB: some hundred sessions that said half of one, and then answered
    pings for ever, had all memory of a tracker."""
    monkeypatch.setattr(sessions, "INPUT_BYTES_MAX", 4 * PART * 2)
    service = Service(Fleet(0.0), Content(None))
    book = connection_book()
    runner = await listen(make_app(service), ("127.0.0.1", 0), connections=book)
    [port] = [site.port for site in runner.sites if isinstance(site, LimitedSite)]
    async with aiohttp.ClientSession() as http:
        good = await http.ws_connect(f"http://127.0.0.1:{port}/v1/session")
        await good.send_str(encode(Hello(PROTOCOL_VERSION, "good", "127.0.0.1:7071")).decode())
        assert (await good.receive(timeout=60)).type is aiohttp.WSMsgType.TEXT
        ended: list[int] = []

        async def stranger(number: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            hello = encode(Hello(PROTOCOL_VERSION, f"bad{number}", f"127.0.0.2:{number + 1}"))
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                writer.write(HEAD.encode() + (frame(hello) if welcomed else b"") + half)
                while await reader.read(1 << 16):
                    pass
            ended.append(number)

        strangers = [asyncio.create_task(stranger(number)) for number in range(20)]
        await until(lambda: len(ended) >= 12)
        assert 0 < book.inputs.total <= 4 * PART * 2
        await good.ping()
        await good.send_str(encode(Left(Digest("sha256:" + "ab" * 32))).decode())
        for stranger_task in strangers:
            stranger_task.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        await until(lambda: book.inputs.total == 0)
        assert not good.closed and service.fleet.hosts["good"].session is not None
        await good.close()
    await runner.cleanup()
