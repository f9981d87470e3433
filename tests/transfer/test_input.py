"""What connections have sent of requests that are not whole: how much of it a server keeps, and
that others get through."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, TCPConnector, web
from authority import Authority
from waits import until

from p2pdist.transfer.connections import CONNECTIONS, ConnectionBook, LimitedSite
from p2pdist.transfer.input import HEAD_BYTES_MAX, READ_BYTES, SLACK_BYTES, Input, InputBook, count_request, input_of
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.tls import Tls

KIB = 1 << 10
TOTAL = 512 * KIB


class Transport(asyncio.Transport):
    """A connection that says whether it was ended."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


def connected(book: InputBook, *addresses: str) -> Iterator[tuple[Input, Transport]]:
    for address in addresses:
        source, transport = Input(asyncio.Protocol(), address, book), Transport()
        source.connection_made(transport)
        yield source, transport


def test_of_the_address_with_most_the_one_that_waits_longest_goes_first() -> None:
    book = InputBook(100 * KIB)
    pairs = list(connected(book, "a", "b", "b", "b", "a"))
    for source, _ in pairs:
        source.data_received(bytes(20 * KIB))
    assert [transport.aborted for _, transport in pairs] == [False, True, False, False, False]
    pairs[2][0].taken(20 * KIB)
    pairs[4][0].data_received(bytes(10 * KIB))
    assert [transport.aborted for _, transport in pairs] == [False, True, False, False, False]
    pairs[4][0].data_received(bytes(40 * KIB))
    assert [transport.aborted for _, transport in pairs] == [True, True, False, False, False], "75 KiB an address"
    assert book.total == 90 * KIB + 4 * READ_BYTES


def test_what_is_whole_counts_no_longer_and_what_follows_begins_to_wait() -> None:
    book = InputBook(100 * KIB)
    (first, ended), (second, waiting) = connected(book, "a", "a")
    first.data_received(bytes(10 * KIB))
    second.data_received(bytes(10 * KIB))
    first.taken(10 * KIB - SLACK_BYTES)  # so much of another one has come
    assert book.total == 10 * KIB + SLACK_BYTES + 2 * READ_BYTES
    second.data_received(bytes(70 * KIB))
    assert waiting.aborted and not ended.aborted
    first.taken(1)
    assert book.total == 0
    first.data_received(b"x")
    first.connection_lost(None)
    assert book.total == 0


def test_the_coding_of_a_body_in_many_small_chunks_is_no_beginning_of_another() -> None:
    """Its end is seen while the last read is served; only what came with that can follow it."""
    book = InputBook(1 << 20)

    class Server(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            if data.endswith(b"."):
                source.taken(10_000)

    source = Input(Server(), "a", book)
    source.connection_made(Transport())
    for data in (bytes(30_000), b"end."):
        source.data_received(data)
    assert book.total == 0


def test_all_control_frames_of_a_read_are_taken_out() -> None:
    book = InputBook(1 << 20)
    ((source, _),) = connected(book, "a")
    for _ in range(100):
        source.data_received(bytes(3 * 16))
        for _ in range(3):
            source.control_taken(10)
    assert book.total == 0


def test_a_control_frame_between_the_parts_of_a_message_takes_no_more_than_itself() -> None:
    book = InputBook(100 * KIB)
    [(source, _)] = connected(book, "a")
    source.data_received(bytes(6))
    source.control_taken(0)
    assert book.total == 0, "a pong alone leaves nothing"
    for _ in range(10):
        source.data_received(bytes(1000))
        for _ in range(100):
            source.control_taken(0)
    assert book.total == 10 * (1000 - 600 + READ_BYTES)
    source.data_received(bytes(60))
    for _ in range(100):  # more than came with it: those before were taken together with a message
        source.control_taken(0)
    assert book.total == 10 * (1000 - 600 + READ_BYTES) + READ_BYTES


class CountsAtOnce(InputBook):
    """The same decisions the slow way: what each connection keeps is looked at after each change,
    by address."""

    def __init__(self, total_max: int) -> None:
        super().__init__(total_max)
        self.kept: dict[Input, int] = {}

    def of(self, address: str) -> list[Input]:
        """The connections of an address, the one first that has waited longest."""
        return [each for each in self.kept if each.address == address]

    def changed(self, connection: Input, size: int, before: int) -> None:
        self.total += size - before
        if size:
            self.kept[connection] = size
        else:
            self.kept.pop(connection, None)
        if size <= before:
            return
        mine = connection.address
        while self.sum(mine) > self._address_max and self.of(mine):
            self.of(mine)[0].close()
        if self.total > self._total_max:
            for address in sorted({each.address for each in self.kept}, key=self.sum, reverse=True):
                while self.total > self._total_max * 7 // 8 and self.of(address):
                    self.of(address)[0].close()

    def sum(self, address: str) -> int:
        return sum(self.kept[each] for each in self.of(address))


@pytest.mark.parametrize("seed", range(8))
def test_the_same_connections_end_as_if_all_were_counted_by_address_at_once(seed: int) -> None:
    chance = random.Random(seed)
    books = InputBook(100 * KIB), CountsAtOnce(100 * KIB)
    addresses = [f"{chance.randrange(3)}" for _ in range(12)]
    pairs = [list(connected(book, *addresses)) for book in books]
    ended = 0
    for _ in range(600):
        number, size = chance.randrange(len(addresses)), chance.randrange(1, 20 * KIB)  # no two addresses have as much
        whole = chance.random() < 0.45
        for each in pairs:
            source, transport = each[number]
            if transport.aborted:
                ((source, transport),) = connected(books[pairs.index(each)], addresses[number])
                each[number] = source, transport
            if whole:
                source.taken(1 << 30)
            else:
                source.data_received(bytes(size))
        aborted = [[transport.aborted for _, transport in each] for each in pairs]
        assert aborted[0] == aborted[1]
        assert books[0].total == books[1].total
        ended += sum(aborted[0])
    assert ended


@asynccontextmanager
async def serving(
    inputs: int = TOTAL, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, int, ConnectionBook, asyncio.Event]]:
    """A server whose connections end for nothing but their input; /slow never answers, and sets the
    event."""

    async def take(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    async def slow(request: web.Request) -> web.Response:
        await request.read()
        answering.set()
        await asyncio.Event().wait()
        return web.Response()

    answering = asyncio.Event()
    book = ConnectionBook(1000, input_bytes_max=inputs)
    app = web.Application(middlewares=[count_request], client_max_size=256 * KIB)
    app[CONNECTIONS] = book
    app.router.add_post("/", take)
    app.router.add_post("/slow", slow)
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=0.1, keepalive_timeout=3600.0, handler_cancellation=True
    )
    await runner.setup()
    site = LimitedSite(runner, "127.0.0.1", 0, book, tls=tls)
    await site.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{site.port}", site.port, book, answering
    finally:
        await runner.cleanup()


def of_heads(size: int) -> bytes:
    fields = b"".join(b"x%d: %s\r\n" % (number, b"y" * 4000) for number in range(size // 4000))
    return b"POST / HTTP/1.1\r\nHost: a\r\n" + fields


HALVES = {
    "a head": of_heads(60_000),
    "a body": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n" + bytes(60_000),
    "a body in parts": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nea60\r\n" + bytes(60_000),
    "what follows a whole request": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx" + of_heads(60_000),
    "a body that says it is small": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 9999\r\n\r\n"
    + gzip.compress(bytes(200 * KIB))[:-8],
}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES.keys())
async def test_halves_of_strangers_leave_others_room(half: bytes) -> None:
    async with serving() as (url, port, book, _), contextlib.AsyncExitStack() as stack:
        lost = []

        async def stranger(number: int) -> None:
            address = ("127.0.0.2", 0) if number % 3 else ("127.0.0.3", 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=address)
            stack.callback(writer.close)
            with contextlib.suppress(ConnectionError):
                writer.write(half)
                await writer.drain()
                while await reader.read(KIB):
                    pass
            lost.append(number)

        tasks = [asyncio.create_task(stranger(number)) for number in range(30)]
        await until(lambda: len(lost) >= 20)
        assert book.inputs.total <= TOTAL
        async with ClientSession() as session:
            for size in (0, 10, 200 * KIB):
                async with session.post(url, data=bytes(size)) as answer:
                    assert (answer.status, await answer.text()) == (200, str(size))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: book.inputs.total == 0)


async def test_requests_one_after_the_other_add_up_to_nothing() -> None:
    async with serving() as (url, _, book, _), ClientSession(connector=TCPConnector(limit=1)) as session:
        for size in (0, 1, 5000, 100_000, 0):
            for coding in ({}, {"Content-Encoding": "gzip"}):
                data = gzip.compress(bytes(size)) if coding else bytes(size)
                async with session.post(url, data=data, headers={"X": "y" * 1000, **coding}) as answer:
                    assert await answer.text() == str(size)
                assert book.inputs.total == 0


async def test_what_comes_over_tls_counts_as_well(tmp_path: Path) -> None:
    tls = Tls(Authority(tmp_path).issue())
    async with serving(tls=ServerContext(tls)) as (url, port, book, _), ClientSession() as session:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls.client)
        writer.write(HALVES["a head"])
        await until(lambda: book.inputs.total >= 60_000)
        async with session.post(url, data=bytes(5000), ssl=tls.client) as answer:
            assert await answer.text() == "5000"
        assert 60_000 <= book.inputs.total < 65_000
        writer.close()
        await until(lambda: book.inputs.total == 0)


async def test_a_request_that_is_being_answered_stays_for_all_halves() -> None:
    async with serving() as (_, port, _, answering), contextlib.AsyncExitStack() as stack:
        opened: list[Any] = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in opened:
            stack.callback(writer.close)
        slow, slower = opened[0]
        slower.write(b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 50000\r\n\r\n" + bytes(50_000))
        await answering.wait()
        for _, writer in opened[1:]:
            writer.write(HALVES["a head"])
        ends = [asyncio.create_task(reader.read()) for reader, _ in opened[1:]]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert not slow.at_eof()
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_a_long_head_is_refused() -> None:
    async with serving() as (url, _, book, _), ClientSession() as session:
        fields = {f"X-{number}": "y" * 4000 for number in range(HEAD_BYTES_MAX // 4000 + 1)}
        async with session.post(url, headers=fields) as answer:
            assert answer.status == 400
            assert str(HEAD_BYTES_MAX) in (await answer.json(content_type=None))["detail"]
        assert book.inputs.total == 0


async def test_a_connection_over_tls_that_ends_has_no_input(tmp_path: Path) -> None:
    """What is closed twice, as where the client ends while the server closes, has no protocol."""
    seen: list[Input | None] = []

    async def ends(request: web.Request) -> web.Response:
        seen.append(input_of(request))
        assert request.transport is not None
        request.transport.close()
        request.transport.close()
        seen.append(input_of(request))
        return web.Response()

    tls = Tls(Authority(tmp_path).issue())
    app = web.Application()
    app[CONNECTIONS] = book = ConnectionBook(1000)
    app.router.add_get("/", ends)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = LimitedSite(runner, "127.0.0.1", 0, book, tls=ServerContext(tls))
        await site.start()
        async with ClientSession() as session:
            with contextlib.suppress(ClientError):
                await session.get(f"https://127.0.0.1:{site.port}/", ssl=tls.client)
    finally:
        await runner.cleanup()
    assert isinstance(seen[0], Input) and seen[1] is None
