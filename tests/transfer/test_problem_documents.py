"""Failures of handlers reach clients as problem documents, and tracebacks only the log."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientPayloadError, ClientSession, web

from p2pdist.model.errors import Conflict, DiskFull, P2PDistError, UsageError, from_problem
from p2pdist.transfer.problems import problem_response, problems


async def get(port: int, path: str = "/x", method: str = "GET", **options) -> tuple[int, dict, dict]:  # type: ignore[no-untyped-def, type-arg]
    async with (
        ClientSession() as session,
        session.request(method, f"http://127.0.0.1:{port}{path}", **options) as answer,
    ):
        assert answer.content_type == "application/problem+json"
        return answer.status, json.loads(await answer.read()), dict(answer.headers)


async def test_a_failure_keeps_its_details(start_app) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise DiskFull("/var/store", needed=10, free=3)

    status, problem, _ = await get(await start_app("GET", "/x", handler))
    assert status == 507
    error = from_problem(problem)
    assert isinstance(error, DiskFull)
    assert (error.details["needed"], error.details["free"]) == (10, 3)


async def test_aiohttp_s_own_errors_become_problems(start_app) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response()

    port = await start_app("POST", "/x", handler)
    status, problem, _ = await get(port, "/nowhere")
    assert (status, problem["type"]) == (404, "urn:p2pdist:problem:not-found")
    status, problem, headers = await get(port)
    assert (status, problem["type"]) == (405, "urn:p2pdist:problem:method-not-allowed")
    assert headers["Allow"] == "POST"
    status, problem, _ = await get(port, method="POST", data=bytes(2 << 20))
    assert (status, problem["type"]) == (413, "urn:p2pdist:problem:too-large")


async def test_an_unexpected_exception_is_logged_and_not_shown(start_app, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise KeyError("a secret")

    status, problem, _ = await get(await start_app("GET", "/x", handler))
    assert status == 500
    assert "secret" not in json.dumps(problem)
    assert "Traceback" in caplog.text
    assert "a secret" in caplog.text


async def test_what_a_request_waits_for_may_be_cancelled(start_app, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        shared = asyncio.ensure_future(asyncio.sleep(600))
        asyncio.get_running_loop().call_soon(shared.cancel)
        await asyncio.shield(shared)
        return web.Response()

    status, problem, _ = await get(await start_app("GET", "/x", handler))
    assert (status, problem["type"], problem["retry_after"]) == (503, "urn:p2pdist:problem:unavailable", 1)
    assert "unexpected failure of GET /x" in caplog.text and "in handler" in caplog.text


async def test_a_broken_connection_elsewhere_is_not_the_client_s(start_app, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("the supervisor has gone")

    status, problem, _ = await get(await start_app("GET", "/x", handler))
    assert status == 500 and "client" not in problem["detail"]
    assert "the supervisor has gone" in caplog.text


async def test_a_request_whose_client_goes_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        began.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()
        return web.Response()

    app = web.Application(middlewares=[problems])
    app.router.add_get("/x", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    try:
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        _, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET /x HTTP/1.0\r\n\r\n")
        await began.wait()
        writer.close()
        async with asyncio.timeout(60):
            await ended.wait()
    finally:
        await runner.cleanup()
    assert "unexpected" not in caplog.text


async def test_redirects_pass(start_app) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/elsewhere")

    port = await start_app("GET", "/x", handler)
    async with ClientSession() as session:
        answer = await session.get(f"http://127.0.0.1:{port}/x", allow_redirects=False)
        assert (answer.status, answer.headers["Location"]) == (302, "/elsewhere")


async def test_a_failure_in_the_middle_of_a_body_breaks_the_connection(start_app) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        raise Conflict("too late to say")

    port = await start_app("GET", "/x", handler)
    async with ClientSession() as session:
        answer = await session.get(f"http://127.0.0.1:{port}/x")
        assert answer.status == 200
        with pytest.raises(ClientPayloadError):
            await answer.read()


def test_details_that_json_does_not_know_are_told_as_text() -> None:
    error = P2PDistError("it broke", where=ValueError("x"))
    assert json.loads(problem_response(error).body)["where"] == "x"  # type: ignore[arg-type]


GOOD = gzip.compress(b"{}" * 100)


@pytest.mark.parametrize(
    "body",
    [b"abc", GOOD + b"no gzip", GOOD[:10] + b"abc" + GOOD[10:], b""],
    ids=["garbage", "trailing", "damaged", "empty"],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_not_what_it_is_said_to_be_is_the_client_s_fault(
    start_app,  # type: ignore[no-untyped-def]
    caplog: pytest.LogCaptureFixture,
    body: bytes,
    chunked: bool,
) -> None:
    """Neither 500 nor a traceback in the log, which strangers could fill so."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if await request.read() == b"":
            raise UsageError("nothing came")
        return web.Response(status=500)

    async def chunks() -> AsyncIterator[bytes]:
        yield body

    port = await start_app("POST", "/x", handler)
    headers = {"Content-Encoding": "gzip"}
    status, problem, _ = await get(port, method="POST", data=chunks() if chunked else body, headers=headers)
    assert (status, problem["type"]) == (400, "urn:p2pdist:problem:bad-request")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    "request_head",
    [
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        b"Transfer-Encoding: other\r\n\r\nabc",
        b"Content-Encoding: br\r\nContent-Length: 3\r\n\r\nabc",
        b"Content-Encoding: deflate\r\nContent-Length: 4\r\n\r\nabcd",
        b"Content-Length: -3\r\n\r\nabc",
    ],
)
async def test_a_request_that_breaks_http_is_the_client_s_fault(start_app, request_head: bytes) -> None:  # type: ignore[no-untyped-def]
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response()

    reader, writer = await asyncio.open_connection("127.0.0.1", await start_app("POST", "/x", handler))
    writer.write(b"POST /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + request_head)
    line = await reader.readline()
    assert line.split()[1] == b"400"
    writer.close()
    await writer.wait_closed()


async def test_what_may_happen_to_any_disk_is_named(start_app) -> None:  # type: ignore[no-untyped-def]
    async def handler(request: web.Request) -> web.StreamResponse:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/srv/store/x")

    status, problem, _ = await get(await start_app("GET", "/x", handler))
    assert status == 500
    assert problem["detail"] == "/srv/store/x cannot be used: the file system is read-only"
    assert "dmesg" in problem["remedy"]
