"""What commands say of an address that is no tracker's, and of names that cannot be sent to one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import programs
import pytest
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from p2pdist.client import pulse, tracker
from p2pdist.client.tracker import Tracker
from p2pdist.credentials import exchange
from p2pdist.credentials.exchange import in_words
from p2pdist.model.errors import Conflict, unreached
from p2pdist.model.preseed import PreseedRequest
from p2pdist.transfer.problems import problems

NOT_TEXT = "caf\udce9"
"""`café` in ISO-8859-1, as an argument of Python."""


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """The URL of a server on loopback."""
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def answering(data: bytes) -> AsyncIterator[str]:
    """The URL of what answers anything with the same bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n")
        writer.write(data)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def run(words: str, url: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(programs.run, *words.split(), "--tracker", url)
    return done.returncode, done.stdout, done.stderr


ASKING = [
    "hosts",
    "hosts drain h1",
    "hosts fill h1",
    "trackers",
    "trackers drain t1",
    "status",
    "trace ls",
    "trace show a:v1",
    "rank a:v1",
    "preseed --list",
    "events",
]


@pytest.mark.parametrize("words", ASKING)
async def test_what_answers_otherwise_is_no_tracker_and_nothing_was_done(words: str) -> None:
    """As a web server does that answers everything with 200."""

    async def anything(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", anything)
    async with served(app) as url:
        code, out, errors = await run(words, url)
    assert (code, out) == (5, "")
    assert "tracker" in errors and "unexpected" not in errors and errors.count("\n") == 1


@pytest.mark.parametrize("words", [*ASKING, "top --once", "events --follow"])
async def test_an_agent_is_not_taken_for_a_tracker(words: str) -> None:
    """It has none of a tracker's routes; the next of several addresses is asked."""
    async with served(web.Application(middlewares=[problems])) as url:
        code, out, errors = await run(words, url)
        both = await run("hosts", f"{url},http://127.0.0.1:1")
    assert (code, out) == (5, "")
    assert f"{url} is no tracker" in errors and "an agent has another port" in errors
    assert both[0] == 5 and "http://127.0.0.1:1 does not answer" in both[2]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what answers there speaks no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n[]", "it broke the connection"),
    ],
)
async def test_what_breaks_the_protocol_is_said_in_plain_words(data: bytes, reason: str) -> None:
    async with answering(data) as url:
        code, _, errors = await run("hosts", url)
    assert code == 5 and f"does not answer: {reason}. " in errors


@pytest.mark.parametrize(("status", "words"), [(404, "it is no tracker, as an agent is none"), (401, "--join-file")])
def test_an_agent_says_why_it_gets_no_session(status: int, words: str) -> None:
    request = aiohttp.RequestInfo(URL("http://h/"), "GET", CIMultiDictProxy(CIMultiDict()), URL("http://h/"))
    error = aiohttp.WSServerHandshakeError(request, (), status=status)
    assert words in in_words(error)


async def no_hosts(request: web.Request) -> web.Response:
    return web.json_response([])


async def test_of_several_trackers_one_that_hangs_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections, and answers nothing; so do two."""
    monkeypatch.setattr(pulse, "LATE_S", 0.05)
    monkeypatch.setattr(pulse, "LIVES_S_MAX", 0.05)
    app = web.Application()
    app.router.add_get("/v1/hosts", no_hosts)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        async with served(app) as live, Tracker([url, url.replace("127.0.0.1", "localhost"), live]) as client:
            assert await client.hosts() == []
            assert client.answered == live


async def test_many_questions_that_wait_leave_room_for_the_one_whether_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than a client has connections."""
    monkeypatch.setattr(pulse, "LATE_S", 0.05)
    monkeypatch.setattr(pulse, "LIVES_S_MAX", 60.0)
    waiting, go = 0, asyncio.Event()

    async def lives(request: web.Request) -> web.Response:
        go.set()
        return web.json_response({"status": "ok"})

    async def late(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting <= 100:
            await go.wait()
        return await no_hosts(request)

    app = web.Application()
    app.router.add_get("/v1/hosts", late)
    app.router.add_get("/healthz", lives)
    async with served(app) as url, Tracker([url, "http://127.0.0.1:1"]) as client:
        assert await asyncio.gather(*(client.hosts() for _ in range(120))) == [[]] * 120
        assert client.answered == url


@pytest.mark.parametrize("token", ["", f"p2pt1.{'0' * 64}.a.b.c"])
async def test_one_that_hangs_before_it_speaks_tls_is_asked_last_from_then_on(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No question can be put to it, and it fails before it is known whether the tracker lives."""
    for where in (tracker, exchange):
        monkeypatch.setattr(where, "CONNECT_S_MAX", 0.06)
    monkeypatch.setattr(pulse, "LATE_S", 0.05)
    monkeypatch.setattr(pulse, "LIVES_S_MAX", 0.3)
    connections = 0

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read()
        writer.close()

    app = web.Application()
    app.router.add_get("/v1/hosts", no_hosts)
    async with await asyncio.start_server(hang, "127.0.0.1", 0) as hanging, served(app) as live:
        url = f"https://127.0.0.1:{hanging.sockets[0].getsockname()[1]}"
        async with Tracker([url, live], token=token) as client:
            assert await client.hosts() == []
            before = connections
            assert await client.hosts() == [] and client.answered == live
            assert 0 < before == connections


async def test_whether_a_tracker_lives_is_known_in_time_where_its_authority_is_to_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a token has it that pins one: a tracker that hangs says nothing of that either."""
    monkeypatch.setattr(exchange, "CONNECT_S_MAX", 3600.0)
    monkeypatch.setattr(exchange, "REQUEST_S_MAX", 3600.0)
    monkeypatch.setattr(pulse, "LATE_S", 0.05)
    monkeypatch.setattr(pulse, "LIVES_S_MAX", 0.05)
    app = web.Application()
    app.router.add_get("/v1/hosts", no_hosts)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"https://127.0.0.1:{hanging.getsockname()[1]}"
        async with (
            served(app) as live,
            Tracker([url, live], token=f"p2pt1.{'0' * 64}.a.b.c") as client,
            asyncio.timeout(30),
        ):
            assert await client.hosts() == [] and client.answered == live


async def test_an_order_that_two_trackers_take_is_one() -> None:
    """One that breaks off may have taken it, or takes it later, as one does that hung."""
    taken: list[dict[str, Any]] = []

    async def break_off(request: web.Request) -> web.Response:
        taken.append(await request.json())
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def refuse(request: web.Request) -> web.Response:
        taken.append(await request.json())
        raise Conflict("no more preseeds")

    first, second = web.Application(), web.Application(middlewares=[problems])
    first.router.add_post("/v1/preseeds", break_off)
    second.router.add_post("/v1/preseeds", refuse)
    async with served(first) as one, served(second) as two, Tracker([one, two]) as client:
        for order in (
            PreseedRequest("a:v1", count=3),
            PreseedRequest("a:v1", count=3),
            PreseedRequest("a:v1", "p1", count=3),
        ):
            with pytest.raises(Conflict):
                await client.preseed(order)
    ids = [order["id"] for order in taken]
    assert ids[::2] == ids[1::2] and len(set(ids)) == 3 and ids[-1] == "p1"


async def test_an_answer_that_comes_after_all_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for has been done: it is not asked of another tracker as well."""
    monkeypatch.setattr(pulse, "LATE_S", 0.05)
    monkeypatch.setattr(pulse, "LIVES_S_MAX", 60.0)
    asked, answered = asyncio.Event(), asyncio.Event()

    async def lives(request: web.Request) -> web.Response:
        asked.set()
        await answered.wait()
        await asyncio.sleep(0.2)
        return web.Response(status=503)

    async def late(request: web.Request) -> web.Response:
        await asked.wait()
        answered.set()
        return await no_hosts(request)

    app = web.Application()
    app.router.add_get("/v1/hosts", late)
    app.router.add_get("/healthz", lives)
    async with served(app) as url, Tracker([url, "http://127.0.0.1:1"]) as client:
        assert await client.hosts() == []


async def test_of_several_trackers_one_that_is_late_and_lives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "LATE_S", 0.05)
    monkeypatch.setattr(pulse, "LIVES_S_MAX", 60.0)
    asked = asyncio.Queue[None]()

    async def lives(request: web.Request) -> web.Response:
        asked.put_nowait(None)
        return web.json_response({"status": "ok"})

    async def late(request: web.Request) -> web.Response:
        for _ in range(3):
            await asked.get()
        return await no_hosts(request)

    app = web.Application()
    app.router.add_get("/v1/hosts", late)
    app.router.add_get("/healthz", lives)
    async with served(app) as url, Tracker([url, "http://127.0.0.1:1"]) as client:
        assert await client.hosts() == []
        assert client.answered == url


async def test_a_tracker_without_tls_is_said_once() -> None:
    async with served(web.Application()) as url:
        code, _, errors = await run("hosts", url.replace("http:", "https:"))
    assert code == 5 and "does not answer: it speaks no TLS. Write http:// in --tracker" in errors


@pytest.mark.parametrize(
    "words",
    [
        ("hosts", "show", NOT_TEXT),
        ("report", NOT_TEXT),
        ("evict", "a:v1", "--host", NOT_TEXT),
        ("preseed", "a:v1", "--host", NOT_TEXT),
        ("trackers", "drain", NOT_TEXT),
    ],
)
def test_a_name_that_is_no_text_is_wrong_usage(words: tuple[str, ...]) -> None:
    done = programs.run(*words, "--tracker", "http://127.0.0.1:1")
    assert (done.returncode, done.stderr) == (2, "p2pdist: 'caf\\xe9' is not UTF-8. Write this name in UTF-8\n")


async def test_what_ends_a_connection_at_its_beginning_broke_it() -> None:
    """As the port of a BitTorrent client does, whether it was still being written to or not."""

    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for words in ("rank a:v1", "preseed a:v1 --count 1", "hosts"):
            code, _, errors = await run(words, url)
            assert (code, "it broke the connection" in errors) == (5, True), errors


def test_a_body_that_cannot_be_written_is_a_broken_connection() -> None:
    error = aiohttp.ClientOSError(None, "Can not write request body for http://tracker:7070/v1/rank")
    error.__cause__ = aiohttp.ClientConnectionResetError("Cannot write to closing transport")
    assert unreached(error) == unreached(error.__cause__) == "it broke the connection"
