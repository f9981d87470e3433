"""Whether agents can be reached at the addresses that they give out: a tracker, real agents and
other listeners on loopback."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from ports import free_port
from waits import until

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.server import make_apps
from p2pdist.agent.tracker import reachability
from p2pdist.cli import diagnosis
from p2pdist.cli.daemon import listen, listen_unix
from p2pdist.model.errors import NotFound, Unavailable
from p2pdist.model.messages import PROTOCOL_VERSION, Hello
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.places import Places
from p2pdist.transfer.tls import TlsFiles
from tracker import reach as module
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.service import Service

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))
from authority import Authority


@pytest.fixture
def service() -> Service:
    return Service(Fleet(0.0), Content(None))


@asynccontextmanager
async def agent(
    directory: Path, name: str, tls: TlsFiles | None = None, *trackers: str
) -> AsyncIterator[tuple[Agent, str]]:
    """An agent that answers its peers, and its address."""
    address = ("127.0.0.1", free_port())
    made = Agent(AgentSettings(trackers, name, f"127.0.0.1:{address[1]}", directory / name, tls=tls))
    public, local = make_apps(made)
    runners = [await listen(public, address, tls=ServerContext(made.tls) if made.tls else None)]
    runners.append(await listen_unix(local, directory / f"{name}.sock"))
    try:
        yield made, f"127.0.0.1:{address[1]}"
    finally:
        for runner in runners:
            await runner.cleanup()
        await made.stop()


def said(service: Service, host: str, address: str, *, tls: bool = False) -> None:
    known = service.fleet.hosts.get(host)
    replaces = known.session if known is not None else None
    service.open_session(Hello(PROTOCOL_VERSION, host, address, tls=tls), replaces=replaces)


async def problem(service: Service, host: str, seen_from: str = "127.0.0.1") -> str:
    return (await service.reach.look(host, seen_from)).problem


async def test_an_agent_is_reached_and_another_in_its_place_is_not_taken_for_it(
    tmp_path: Path, service: Service
) -> None:
    async with agent(tmp_path, "h1") as (_, address):
        said(service, "h1", address)
        said(service, "h2", address)
        assert await problem(service, "h1") == ""
        assert await problem(service, "h2") == "the agent of another host answers there, h1"
        assert service.reach.unreachable() == 1


async def test_a_port_where_nobody_or_something_else_listens(tmp_path: Path, service: Service) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-other\r\n")
        writer.close()

    other = await asyncio.start_server(speak, "127.0.0.1", 0)
    said(service, "nobody", f"127.0.0.1:{free_port()}")
    said(service, "other", f"127.0.0.1:{other.sockets[0].getsockname()[1]}")
    said(service, "web", "127.0.0.1:1")
    async with other:
        assert await problem(service, "nobody") == "connection refused"
        assert "is no agent" in await problem(service, "other")
    with pytest.raises(NotFound):
        await problem(service, "unknown")


async def test_a_stranger_sends_the_tracker_nowhere_and_is_not_repeated(service: Service) -> None:
    """Whoever opens a session names an address: it opens no way into the tracker's network, and no
    answer makes a look fail."""
    visits = []

    async def visit(request: web.Request) -> web.Response:
        visits.append(request.path)
        return web.json_response({"status": "ok"})

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop())
        writer.close()

    inner = web.Application()
    inner.router.add_get("/{path:.*}", visit)
    runner = web.AppRunner(inner)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    inside = runner.addresses[0][1]
    body = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    deep, odd, clear = b"[" * 4096, b'{"status": "ok", "host": "\\ud800"}', b'{"status": "ok", "host": "\\u001b[2Jx"}'
    answers = [
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/secret\r\nContent-Length: 0\r\n\r\n" % inside,
        b"SSH-2.0-other\r\n",
        *(body % len(each) + each for each in (deep, odd, clear)),
    ]
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    found = []
    async with server:
        for number in range(len(answers)):
            said(service, f"h{number}", f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            found.append(await problem(service, f"h{number}"))
    for name, address in (("all", f"0.0.0.0:{inside}"), ("mapped", f"[::ffff:127.0.0.1]:{inside}")):
        said(service, name, address)
        assert "another machine for each" in await problem(service, name, "10.0.0.1")
    await runner.cleanup()
    assert not answers and not visits
    assert all("agent" in each and each.isprintable() and "SSH" not in each for each in found)


async def test_a_connection_that_does_not_come_about_in_time(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_S", 0.05)
    with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for waiting in (first, second):  # the queue is full now, and further packets are dropped
            waiting.setblocking(False)
            waiting.connect_ex(deaf.getsockname())
        said(service, "deaf", f"127.0.0.1:{deaf.getsockname()[1]}")
        assert "no answer within" in await problem(service, "deaf")


async def test_loopback_is_no_address_for_hosts_elsewhere(tmp_path: Path, service: Service) -> None:
    async with agent(tmp_path, "h1") as (_, address):
        said(service, "h1", address)
        assert await problem(service, "h1") == ""
        service.reach._looks.clear()
        assert "each" in await problem(service, "h1", "10.0.0.1"), "a remote agent that listens on loopback"
        said(service, "h2", "10.0.0.2:7071")
        service.reach._looks.clear()
        service.fleet.hosts["h1"].address = f"localhost:{address.rpartition(':')[2]}"
        assert "localhost stands for" in await problem(service, "h1"), "one beside the tracker, while others are remote"


async def test_an_agent_that_speaks_tls_is_reached_without_a_certificate(tmp_path: Path, service: Service) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("h1")
    async with agent(tmp_path, "h1", files) as (_, address), agent(tmp_path, "h2") as (_, plain):
        said(service, "h1", address, tls=True)
        said(service, "h2", plain, tls=True)
        assert await problem(service, "h1") == ""
        assert "no TLS" in await problem(service, "h2")


async def test_what_several_others_met_counts_and_looks_are_bounded(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with agent(tmp_path, "h1") as (_, address):
        said(service, "h1", address)
        for by in ("a", "b"):
            service.fleet.hosts["h1"].penalise(by, "refused", now=0.0)
        assert await problem(service, "h1") == "2 hosts could not connect to it"
        said(service, "h1", address)
        service.reach._places = Places(2, 1)
        with service.reach._places.place("127.0.0.1"):
            with pytest.raises(Unavailable):
                await problem(service, "h1")
            assert "each" in await problem(service, "h1", "10.0.0.1"), "another address has places of its own"


async def test_looks_at_hosts_that_are_gone_are_forgotten_where_no_metrics_are_read(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOKS_MAX", 8)
    for number in range(30):
        session, _ = service.open_session(Hello(PROTOCOL_VERSION, f"h{number}", "127.0.0.1:1"))
        assert await problem(service, f"h{number}") == "connection refused"
        service.close_session(session)
        del service.fleet.hosts[f"h{number}"]
        assert len(service.reach._looks) <= 12


async def test_an_agent_hears_that_it_cannot_be_reached_and_says_so(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In its log, to `pull`, as a metric and in `doctor`; and that it can be, once it can."""
    monkeypatch.setattr(reachability, "FIRST_S", 0.0)
    caplog.set_level(logging.INFO)
    runner = web.AppRunner(make_app(service), shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with agent(tmp_path, "h1", None, url) as (made, address):
            wrong = f"127.0.0.1:{free_port()}"
            made.session._hello = Hello(PROTOCOL_VERSION, "h1", wrong)
            await made.start()
            await until(lambda: made.reachability.problem)
            assert "other hosts cannot reach this agent at" in caplog.text and "connection refused" in caplog.text
            assert "cannot reach this agent" in made.reachability.warning()
            (found,) = await diagnosis.reachability(tmp_path / "h1.sock", [url])
            assert found.state == "failed" and f"cannot reach h1 at {wrong}: connection refused" in found.detail
            service.fleet.hosts["h1"].address = address
            service.reach._looks.clear()
            made.reachability.connected()
            await until(lambda: not made.reachability.problem)
            assert f"other hosts can reach this agent at {address}" in caplog.text
            (found,) = await diagnosis.reachability(tmp_path / "h1.sock", [url])
            assert found.state == "ok"
    finally:
        await runner.cleanup()


async def test_a_name_leads_the_tracker_to_itself_for_nobody_from_elsewhere(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when the agent's name is looked up nor, should it mean something else by then, when
    it is connected to."""
    visits = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    real = socket.getaddrinfo

    def look_up(host: str, *rest: Any, **more: Any) -> Any:
        return real("127.0.0.1" if host == "rebound.example" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as inner:
        address = f"rebound.example:{inner.sockets[0].getsockname()[1]}"
        with pytest.raises(aiohttp.ClientConnectorError):
            await module.ask_health(address, tls=False, timeout_s=5.0, seen_from="10.0.0.1")
        assert not visits
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await module.ask_health(address, tls=False, timeout_s=5.0, seen_from="127.0.0.1")
        assert visits
