"""The agent's side of a session, against trackers on real sockets that say what no tracker
should."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import WSMsgType, web
from waits import until

from p2pdist.agent.tracker import connection
from p2pdist.agent.tracker import session as module
from p2pdist.agent.tracker.connection import OUTBOX_MAX, Handlers, heartbeat_s
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.model.address import Vicinity
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Unavailable, UsageError
from p2pdist.model.messages import PROTOCOL_VERSION, Assign, Evict, Hello, Left, Pace, Reject, Report, Welcome, encode
from p2pdist.model.plan import Plan
from tracker.core.report_rate import report_interval_s

BLOB = digest_of(b"blob")
WELCOME = encode(Welcome(PROTOCOL_VERSION, 0.05)).decode()
Script = Callable[[web.WebSocketResponse, int], Awaitable[None]]


class Host:
    """An agent with a session and nothing else."""

    def __init__(self, *urls: str, listens: tuple[str, int] | None = None) -> None:
        self.heard: list[object] = []
        self.reports = 0
        self.fail_reports = 0
        self.news = True
        hello = Hello(PROTOCOL_VERSION, "h1", "127.0.0.1:7071")
        self.session = TrackerSession(urls, hello, listens=listens, searching=not urls)
        self.handlers = Handlers(list, self.report, self.heard.append, lambda present: None)

    def report(self) -> Report | None:
        self.reports += 1
        if self.reports <= self.fail_reports:
            raise RuntimeError("a defect")
        return Report() if self.news else None


hellos: list[str] = []
"""What agents said first, all of them."""


@asynccontextmanager
async def tracker(
    script: Script, *, autoping: bool = True, healthz: Callable[[web.Request], Awaitable[web.Response]] | None = None
) -> AsyncIterator[str]:
    """A WebSocket server that follows `script(socket, number of the session)` after each hello."""
    sessions = 0

    async def session(request: web.Request) -> web.WebSocketResponse:
        nonlocal sessions
        sessions += 1
        socket = web.WebSocketResponse(autoping=autoping)
        await socket.prepare(request)
        hellos.append((await socket.receive()).data)
        await script(socket, sessions)
        return socket

    app = web.Application()
    app.router.add_get("/v1/session", session)
    if healthz is not None:
        app.router.add_get("/healthz", healthz)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def running(host: Host) -> AsyncIterator[Host]:
    task = asyncio.create_task(host.session.run(host.handlers))
    try:
        yield host
        assert not task.done(), "the session goes on whatever it hears"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def stay(socket: web.WebSocketResponse) -> None:
    async for _ in socket:
        continue


GARBAGE = {
    "no JSON": "{",
    "another type": '{"type":"gift"}',
    "an agent's message": '{"type":"left","blob":"' + BLOB + '"}',
    "a hostile problem": '{"type":"reject","problem":{"type":"urn:p2pdist:problem:disk-full","needed":"x","what":1,"self":2}}',
    "another protocol": '{"type":"welcome","protocol":99,"report_interval_s":1}',
    "a list": "[" * 10000,
    "nothing of the kind": "\x00\x01",
}


@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_instead_of_a_welcome_is_told_and_the_next_try_succeeds(text: str) -> None:
    async def script(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(text if number == 1 else WELCOME)
        await stay(socket)

    async with tracker(script) as url, running(Host(url)) as host:
        assert await host.session.wait_connected(60)
        assert host.session.problem == ""


PLAN = '{"type":"assign","plan":{"blob":"%s","stripes":[{"stripe":%s,"parent":%s}]}}'
HOSTILE = {
    "a negative stripe": PLAN % (BLOB, "-9", "null"),
    "a huge stripe": PLAN % (BLOB, "99999999999999999999", "null"),
    "an address with a line break": PLAN % (BLOB, "0", '{"host":"h","address":"a\\r\\nX: y:80"}'),
    "an address of 1 MB": PLAN % (BLOB, "0", '{"host":"h","address":"' + "a" * 1_000_000 + ':80"}'),
    "a name with a line break": PLAN % (BLOB, "0", '{"host":"h\\n2026 level=INFO all is well","address":"a:80"}'),
    "no digest": PLAN % ("../../etc/passwd", "0", "null"),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_plan_that_cannot_be_is_not_acted_on(text: str) -> None:
    good = encode(Assign(Plan(BLOB, ()))).decode()

    async def script(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(WELCOME)
        await socket.send_str(text if number == 1 else good)
        await stay(socket)

    async with tracker(script) as url, running(Host(url)) as host:
        await until(lambda: host.heard)
        assert host.heard == [Assign(Plan(BLOB, ()))]


async def test_a_defect_in_reporting_does_not_leave_a_session_that_never_reports() -> None:
    async def script(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(WELCOME)
        await stay(socket)

    async with tracker(script) as url:
        host = Host(url)
        host.fail_reports = 1
        async with running(host):
            await until(lambda: host.reports > 3)
            assert host.reports > 3 and host.session.connected


async def test_a_tracker_may_change_how_often_a_host_reports() -> None:
    paced = asyncio.Event()

    async def script(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(WELCOME)
        await paced.wait()
        await socket.send_str(encode(Pace(50.0)).decode())
        await stay(socket)

    async with tracker(script) as url, running(Host(url)) as host:
        await until(lambda: host.reports > 3)
        assert host.reports > 3
        paced.set()
        for _ in range(20):  # ten reports are due in each round at the old pace
            before = host.reports
            await asyncio.sleep(0.5)
            if host.reports == before:
                break
        assert host.reports == before and host.session.connected


async def test_a_host_with_nothing_new_says_nothing() -> None:
    said: list[str] = []

    async def script(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(WELCOME)
        async for frame in socket:
            said.append(frame.data)

    async with tracker(script) as url:
        host = Host(url)
        host.news = False
        async with running(host):
            await until(lambda: host.reports > 3)
            assert host.reports > 3 and not said


async def test_a_tracker_that_does_not_read_is_left_and_tried_again() -> None:
    opened = 0

    async def script(socket: web.WebSocketResponse, number: int) -> None:
        nonlocal opened
        opened = number
        await socket.send_str(WELCOME)
        await stay(socket)

    async with tracker(script) as url, running(Host(url)) as host:
        assert await host.session.wait_connected(60)
        for _ in range(3 * OUTBOX_MAX):
            host.session.send(Left(BLOB))
        await until(lambda: opened == 2 and host.session.connected)
        assert opened == 2 and host.session.connected


@pytest.mark.parametrize(
    ("several", "hosts", "pause_s", "patience_s"),
    [(True, 4, 0.75, 2), (True, 2500, 0.75, 2), (True, 5000, 1.5, 2), (True, 30_000, 4, 2), (False, 4, 10, 5)],
)
def test_a_tracker_of_many_hosts_is_pinged_less_often(
    several: bool, hosts: int, pause_s: float, patience_s: float
) -> None:
    """In a small fleet of several trackers one that hangs is noticed within 3 s."""
    assert heartbeat_s(several, report_interval_s(hosts)) == (pause_s, patience_s)


async def test_a_tracker_that_hangs_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the connection, and says nothing."""
    monkeypatch.setattr(connection, "SEVERAL_HEARTBEAT_S_MIN", 0.1)
    monkeypatch.setattr(connection, "SEVERAL_PATIENCE_S", 0.1)
    silent = asyncio.Event()

    async def hanging(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(WELCOME)
        await silent.wait()

    async def other(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(WELCOME)
        await stay(socket)

    async with tracker(hanging) as first, tracker(other) as second, running(Host(first, second)) as host:
        await until(lambda: host.session.connected and host.session.url == second)
        silent.set()


@pytest.mark.slow
async def test_a_tracker_that_answers_late_is_given_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a slow link, where its pong waits behind all that this host has said."""
    monkeypatch.setattr(connection, "SEVERAL_HEARTBEAT_S_MIN", 0.05)
    monkeypatch.setattr(connection, "HEARTBEAT_INTERVALS", 0.0)
    monkeypatch.setattr(connection, "SEVERAL_PATIENCE_S", 0.1)
    answered: Counter[int] = Counter()

    async def script(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(WELCOME)
        async for frame in socket:
            if frame.type == WSMsgType.PING:
                await asyncio.sleep(0.3)
                await socket.pong(frame.data)
                answered[number] += 1

    async with tracker(script, autoping=False) as url:
        host = Host(url, "http://127.0.0.1:1")
        host.news = False
        async with running(host):
            await until(lambda: max(answered.values(), default=0) > 3)
            assert max(answered, key=lambda number: answered[number]) > 1, "the first session was given up"


@pytest.mark.slow
async def test_a_tracker_whose_message_takes_long_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a long list over a slow link: it takes longer than a silent one is given at most."""
    monkeypatch.setattr(connection, "SEVERAL_HEARTBEAT_S_MIN", 0.05)
    monkeypatch.setattr(connection, "HEARTBEAT_INTERVALS", 0.0)
    monkeypatch.setattr(connection, "SEVERAL_PATIENCE_S", 0.1)
    message = encode(Evict("e" * 16, "team/app:v1")).ljust(300)

    async def script(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(WELCOME)
        transport = socket._req.transport if socket._req is not None else None
        assert transport is not None
        for byte in struct.pack(">BBH", 0x81, 126, len(message)) + message:  # one frame, RFC 6455, 5.2
            transport.write(bytes([byte]))
            await asyncio.sleep(0.01)
        await stay(socket)

    async with tracker(script, autoping=False) as url:
        host = Host(url, "http://127.0.0.1:1")
        host.news = False
        async with running(host):
            await until(lambda: bool(host.heard))


async def test_a_connection_that_breaks_is_no_sign_that_its_tracker_lives() -> None:
    """A question whether it lives goes on meanwhile."""
    asked, broken = asyncio.Event(), asyncio.Event()

    async def script(socket: web.WebSocketResponse, number: int) -> None:
        if number > 1:
            return await stay(socket)
        await socket.send_str(WELCOME)
        await broken.wait()

    async def hanging(request: web.Request) -> web.Response:
        asked.set()
        await asyncio.sleep(60)
        return web.Response()

    async with tracker(script, healthz=hanging) as url, running(Host(url)) as host:
        assert await host.session.wait_connected(60)
        host.news = False
        question = asyncio.create_task(host.session.attention.responds())
        await asked.wait()
        broken.set()
        assert not await question


async def test_a_tracker_that_only_answers_pings_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an agent answers those of its tracker."""
    monkeypatch.setattr(connection, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(connection, "PATIENCE_S", 5.0)
    pinged = asyncio.Event()

    async def script(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(WELCOME)
        await socket.ping(b"there?")
        pings = 0
        while pings < 10 or not answered.is_set():
            frame = await socket.receive()
            if frame.type == WSMsgType.PONG:
                assert frame.data == b"there?"
                answered.set()
            if frame.type == WSMsgType.PING:
                pings += 1
                await socket.pong(frame.data)
        pinged.set()
        await stay(socket)

    answered = asyncio.Event()
    async with tracker(script, autoping=False) as url:
        host = Host(url)
        host.news = False
        async with running(host):
            await pinged.wait()
            assert host.session.connected and not host.session.problem


@pytest.mark.slow
async def test_a_session_that_is_ended_at_once_is_tried_ever_later() -> None:
    opened: list[float] = []

    async def script(socket: web.WebSocketResponse, number: int) -> None:
        opened.append(asyncio.get_running_loop().time())
        await socket.send_str(WELCOME)
        await socket.send_str(encode(Reject(Unavailable("go away").problem())).decode())
        await socket.close()

    async with tracker(script) as url, running(Host(url)) as host:
        await asyncio.sleep(2.5)
        assert 2 <= len(opened) <= 8
        assert "go away" in host.session.problem


def test_what_is_no_url_of_a_tracker_is_refused_without_showing_credentials() -> None:
    for url in (
        "",
        "host",
        "host:7070",
        "ftp://host",
        "http://",
        "http://[::1",
        "http://h:x",
        "http://a b",
        "http://h/?q",
    ):
        with pytest.raises(UsageError):
            Host(url)
    with pytest.raises(UsageError) as failure:
        Host("http://user:hidden@host:99999")
    assert "hidden" not in str(failure.value)
    assert Host("http://user:hidden@host:1").session.urls == ["http://host:1"]


@pytest.mark.parametrize(("ahead_s", "words"), [(7200.0, "7200 s ahead of"), (-600.0, "600 s behind"), (0.0, "")])
async def test_a_clock_that_is_wrong_is_measured_and_warned_of(
    ahead_s: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(encode(Welcome(PROTOCOL_VERSION, 0.05, time=time.time() - ahead_s)).decode())
        await stay(socket)

    async with tracker(script) as url, running(Host(url)) as host:
        assert await host.session.wait_connected(60)
        assert host.session.clock_ahead_s == pytest.approx(ahead_s, abs=4)
    assert words in caplog.text and ("the clock of this host" in caplog.text) == bool(words)


async def test_a_tracker_that_tells_no_time_is_compared_with_nothing() -> None:
    async def script(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str('{"type":"welcome","protocol":1,"report_interval_s":0.05}')
        await stay(socket)

    async with tracker(script) as url, running(Host(url)) as host:
        assert await host.session.wait_connected(60)
        assert host.session.clock_ahead_s is None


async def test_an_agent_that_listens_on_all_addresses_gives_the_one_of_its_session() -> None:
    """Its host name, which it gave before, may mean nothing elsewhere, or 127.0.1.1."""

    async def script(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(WELCOME)
        await stay(socket)

    hellos.clear()
    host = Host(listens=("0.0.0.0", 7999))
    async with tracker(script) as url:
        host.session.offer([url])
        async with running(host):
            assert await host.session.wait_connected(60)
    address = msgspec.json.decode(hellos[-1])["address"]
    name, _, port = address.rpartition(":")
    assert port == "7999" and ipaddress.ip_address(name) and host.session.address == address
    assert host.session.vicinity == Vicinity(name, "127.0.0.1", socket.gethostname())


@pytest.mark.parametrize(("status", "told"), [(403, "revoked"), (401, "--join-file"), (502, "502")])
async def test_a_tracker_that_opens_no_session_is_told_in_words(status: int, told: str) -> None:
    """Not as the library shows its objects."""

    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/v1/session", refuse)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host = Host(f"http://127.0.0.1:{runner.addresses[0][1]}")
    running = asyncio.create_task(host.session.run(host.handlers))
    try:
        async with asyncio.timeout(30):
            while not host.session.problem:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await runner.cleanup()
    problem = host.session.problem
    assert told in problem and str(status) in problem and "url=" not in problem


async def test_questions_that_wait_for_a_connection_are_not_taken_for_a_tracker_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of many files of a model, each of which the tracker reads at a slow hub first."""
    monkeypatch.setattr(module, "REQUEST_CONNECT_S", 0.1)
    asked, go = 0, asyncio.Event()

    async def late(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await go.wait()
        return web.Response(body=b"read")

    async def keep(socket: web.WebSocketResponse, number: int) -> None:
        await socket.send_str(WELCOME)
        await stay(socket)

    async with tracker(keep, healthz=late) as url, running(Host(url)) as host:
        assert await host.session.wait_connected(30)
        reads = [asyncio.create_task(host.session.get("/healthz", {})) for _ in range(40)]
        await until(lambda: asked >= 15)
        await asyncio.sleep(0.3)
        go.set()
        assert set(await asyncio.gather(*reads)) == {b"read"} and asked == 40
