"""Sessions as the tracker serves them, on real sockets: names that clash, and agents that say what
no agent should."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from waits import until

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.messages import (
    BLOBS_PER_MESSAGE_MAX,
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    Assign,
    FromAgent,
    Hello,
    Holding,
    Holdings,
    Left,
    Pace,
    Reject,
    Report,
    Welcome,
    decode_from_tracker,
    encode,
)
from tracker import founding, service
from tracker.content import Content
from tracker.core import report_rate
from tracker.core.fleet import Fleet
from tracker.core.report_rate import ReportRate, report_interval_s
from tracker.founding import ADDRESS_SHARE, FOUNDED_BURST
from tracker.http import sessions
from tracker.http.app import make_app
from tracker.service import OUTBOX_MAX, Outbox, Service

BLOB = digest_of(b"blob")
PIECE = 64 << 10


class Site:
    """A tracker on loopback and a client of it."""

    def __init__(self, service: Service, url: str, http: aiohttp.ClientSession) -> None:
        self.service, self.url, self.http = service, url, http

    async def connect(self, text: str = "") -> aiohttp.ClientWebSocketResponse:
        socket = await self.http.ws_connect(self.url + "/v1/session")
        if text:
            await socket.send_str(text)
        return socket

    async def join(self, host: str, address: str) -> aiohttp.ClientWebSocketResponse:
        return await self.connect(say(Hello(PROTOCOL_VERSION, host, address)))

    async def settled(self, count: int) -> None:
        """Wait until so many sessions are open."""
        await until(lambda: self.service.sessions == count, f"{count} open sessions")


def say(message: FromAgent) -> str:
    return encode(message).decode()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as found:
        yield found


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    loop = asyncio.get_running_loop()
    service = Service(Fleet(started_at=loop.time()), Content(None))
    runner = web.AppRunner(make_app(service), shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Site(service, f"http://127.0.0.1:{runner.addresses[0][1]}", http)
    finally:
        await runner.cleanup()


async def heard(socket: aiohttp.ClientWebSocketResponse) -> object:
    """The next message; what the tracker's clock says is looked at here and left out."""
    message = decode_from_tracker((await socket.receive(timeout=60)).data)
    if isinstance(message, Welcome):
        assert abs(message.time - time.time()) < 60
        return msgspec.structs.replace(message, time=0.0)
    return message


async def test_a_second_agent_of_a_name_is_told_and_the_first_one_stays(site: Site) -> None:
    first = await site.join("h1", "10.0.0.1:7071")
    assert isinstance(await heard(first), Welcome)
    second = await site.join("h1", "10.0.0.2:7071")
    answer = await heard(second)
    assert isinstance(answer, Reject) and answer.problem["type"].endswith(":conflict")
    assert "h1" in answer.problem["detail"] and "10.0.0.1:7071" in answer.problem["detail"]
    assert (await second.receive(timeout=60)).type is aiohttp.WSMsgType.CLOSE
    await site.settled(1)
    await first.close()
    await site.settled(0)
    assert isinstance(await heard(await site.join("h1", "10.0.0.2:7071")), Welcome)


async def test_an_agent_that_was_restarted_takes_over_its_half_open_session(site: Site) -> None:
    old = await site.join("h1", "10.0.0.1:7071")
    assert isinstance(await heard(old), Welcome)
    new = await site.join("h1", "10.0.0.1:7071")
    assert isinstance(await heard(new), Welcome)
    assert isinstance(await heard(old), Reject), "if somebody still reads there, he is told"
    await old.close()
    await site.settled(1)
    assert site.service.fleet.hosts["h1"].session is not None


async def test_a_small_blob_is_planned_when_its_batch_is_due(site: Site) -> None:
    """No tick comes here at all."""
    sockets = [await site.join(f"h{number}", f"10.0.0.{number}:7071") for number in range(3)]
    for socket in sockets:
        assert isinstance(await heard(socket), Welcome)
    for _ in range(2):  # and again for the next blob
        for socket in sockets:
            await socket.send_str(say(Holding(BLOB, PIECE, PIECE, (0,))))
        plans = [await heard(socket) for socket in sockets]
        assert all(isinstance(plan, Assign) for plan in plans)
        for socket in sockets:
            await socket.send_str(say(Left(BLOB)))


HOLDING = '{"type":"holding","blob":"%s","size":%s,"piece_size":%s,"counts":%s}'
COMPLAINT = '{{"type":"complaint","blob":"' + BLOB + '","stripe":0,"source":"{}","reason":"{}"}}'
MESSAGES = {
    "no JSON": "{",
    "a second hello's form": '{"type":"hello","protocol":1}',
    "a tracker's message": '{"type":"welcome","protocol":1,"report_interval_s":1}',
    "a blob that is no digest": HOLDING % ("x" * 100_000, PIECE, PIECE, "[0]"),
    "a negative size": HOLDING % (BLOB, -1, PIECE, "[0]"),
    "a size of 300 digits": HOLDING % (BLOB, "9" * 300, PIECE, "[0]"),
    "a negative count": HOLDING % (BLOB, PIECE, PIECE, "[-1]"),
    "too many counts": HOLDING % (BLOB, PIECE, PIECE, "[" + "0," * 5000 + "0]"),
    "bytes of 300 digits": '{"type":"report","sent_bytes":' + "9" * 300 + ',"busy_s":1}',
    "negative bytes": '{"type":"report","sent_bytes":-1,"busy_s":1}',
    "infinity": '{"type":"report","sent_bytes":1,"busy_s":1e999}',
    "no number": '{"type":"report","sent_bytes":1,"busy_s":NaN}',
    "negative time": '{"type":"report","sent_bytes":1,"busy_s":-1}',
    "a complaint of a page": COMPLAINT.format("x" * 10_000, "reset"),
    "a complaint for a reason of its own": COMPLAINT.format("h", "x\\ny"),
    "more holdings than a message may have": say(
        Holdings((Holding(BLOB, PIECE, PIECE, (0,)),) * (BLOBS_PER_MESSAGE_MAX + 1))
    ),
    "a frame over the limit": "x" * (MESSAGE_BYTES_MAX + 1),
}


@pytest.mark.parametrize("text", MESSAGES.values(), ids=MESSAGES.keys())
async def test_what_no_agent_says_ends_its_session_and_hurts_no_other(
    site: Site, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = await site.join("good", "10.0.0.1:1"), await site.join("bad", "10.0.0.2:1")
    assert isinstance(await heard(good), Welcome) and isinstance(await heard(bad), Welcome)
    with contextlib.suppress(ConnectionError):  # a large frame is refused while it is being sent
        await bad.send_str(text)
    await site.settled(1)
    await good.send_str(say(Holding(BLOB, PIECE, PIECE, (1,))))
    await good.send_str(say(Report()))
    async with site.http.get(site.url + "/v1/hosts/good") as answer:
        assert (await answer.json())["blobs"] == 1
    assert "Traceback" not in caplog.text
    assert all(len(record.getMessage()) < 1000 and "\n" not in record.getMessage() for record in caplog.records)


HELLO = '{"type":"hello","protocol":1,"host":%s,"address":%s}'
HELLOS = {
    "no name": HELLO % ('""', '"a:1"'),
    "a long name": HELLO % ('"' + "x" * 256 + '"', '"a:1"'),
    "a name with a line break": HELLO % ('"a\\nb"', '"a:1"'),
    "a name with a zero": HELLO % ('"a\\u0000b"', '"a:1"'),
    "no address": HELLO % ('"h"', '""'),
    "an address without a port": HELLO % ('"h"', '"a"'),
    "an address with a line break": HELLO % ('"h"', '"a\\r\\nX: y:80"'),
    "an address that is no ASCII": HELLO % ('"h"', '"h\\u00e4user:80"'),
    "a report first": say(Report()),
    "no JSON": "hello",
}


@pytest.mark.parametrize("text", HELLOS.values(), ids=HELLOS.keys())
async def test_a_hello_that_cannot_be_is_rejected(site: Site, text: str) -> None:
    answer = await heard(await site.connect(text))
    assert isinstance(answer, Reject) and answer.problem["type"].endswith(":bad-request")
    assert not site.service.fleet.hosts and site.service.sessions == 0


async def test_sockets_without_a_hello_are_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HELLO_TIMEOUT_S", 0.3)
    silent = [await site.connect() for _ in range(20)]
    transports = [socket._response.connection.transport for socket in silent[10:]]  # type: ignore[union-attr]
    while not all(transport is None or transport.is_closing() for transport in transports):
        await asyncio.sleep(0.05)  # those who do not even read the rejection
    silent = silent[:10]
    assert all([isinstance(await heard(socket), Reject) for socket in silent])
    assert all([(await socket.receive(timeout=60)).type is aiohttp.WSMsgType.CLOSE for socket in silent])


async def test_those_who_leave_before_or_during_their_hello_leave_nothing(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("", '{"type":"hello"', say(Hello(PROTOCOL_VERSION, "h", "a:1"))):
        socket = await site.connect(text)
        await socket.close()
        raw = await site.connect(text)
        transport = raw.get_extra_info("socket")
        assert transport is not None
        raw._response.connection.transport.abort()  # type: ignore[union-attr]
    async with site.http.get(site.url + "/v1/session") as answer:
        assert answer.status == 400
    await site.settled(0)
    assert "Traceback" not in caplog.text


async def test_an_agent_that_does_not_read_is_ended_when_too_much_waits_for_it() -> None:
    outbox = Outbox()
    for _ in range(2 * OUTBOX_MAX):
        outbox.put(Welcome(PROTOCOL_VERSION, 1.0))
    waiting = await outbox.take()
    assert outbox.ended and len(waiting) == OUTBOX_MAX + 1 and waiting[-1] is None


async def test_an_outbox_gives_everything_in_order_to_one_who_waits() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    sent = [Pace(float(number)) for number in range(5)]
    for message in sent[:3]:
        outbox.put(message)
    assert await taking == sent[:3]
    for message in sent[3:]:
        outbox.put(message)
    assert await asyncio.wait_for(outbox.take(), 60) == sent[3:]
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    outbox.put(None)
    assert await asyncio.wait_for(outbox.take(), 60) == [None], "a reader that left takes nothing with it"


def test_the_more_agents_the_less_often_each_reports() -> None:
    intervals = {hosts: report_interval_s(hosts, 0.25) for hosts in (1, 150, 300, 1000, 2600, 10_000, 100_000)}
    assert intervals == {1: 0.25, 150: 0.25, 300: 0.25, 1000: 0.25, 2600: 0.26, 10_000: 1.0, 100_000: 10.0}
    assert report_interval_s(1, 2.0) == report_interval_s(20_000, 2.0) == 2.0 and report_interval_s(40_000, 2.0) == 4.0
    steps = [report_interval_s(hosts, 0.05) for hosts in range(20_000)]
    assert steps == sorted(steps)


async def test_agents_are_told_when_the_fleet_has_doubled_and_when_it_has_halved(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_rate, "REPORTS_PER_S", 2)
    monkeypatch.setattr(report_rate, "BUSY_SHARE", 100.0)
    sockets = [await site.join(f"h{number}", f"10.0.0.{number}:1") for number in range(8)]
    rates = {2: 1.0, 4: 2.0, 8: 4.0}
    for number, socket in enumerate(sockets, start=1):
        welcome = max((interval for at, interval in rates.items() if at <= number), default=0.25)
        assert await heard(socket) == Welcome(PROTOCOL_VERSION, welcome, failures=True, conditions=True)
        for interval in (interval for at, interval in rates.items() if at > number):
            assert await heard(socket) == Pace(interval)
    for socket in sockets[:4]:
        await socket.close()
    await site.settled(4)
    assert await heard(sockets[-1]) == Pace(2.0)
    assert await heard(await site.join("h9", "10.0.0.9:1")) == Welcome(
        PROTOCOL_VERSION, 2.0, failures=True, conditions=True
    )


def test_a_busy_tracker_asks_for_fewer_reports_until_it_has_time_again() -> None:
    """Not for fewer than an eighth, and a small fleet goes on as it was."""
    pacing = ReportRate()
    assert not pacing.loaded(0.5)
    assert [(pacing.loaded(0.9), pacing.interval_s(10_000)) for _ in range(4)] == [
        (True, 2.0),
        (True, 4.0),
        (True, 8.0),
        (False, 8.0),
    ]
    assert pacing.interval_s(100) == 0.25
    assert not pacing.loaded(0.5)
    assert not any(pacing.loaded(share) for share in (0.1, 0.1, 0.1, 0.1, 0.5)), "not idle for long enough"
    changes = [pacing.loaded(0.1) for _ in range(4 * report_rate.IDLE_LOOKS)]
    assert changes == ([False] * (report_rate.IDLE_LOOKS - 1) + [True]) * 3 + [False] * report_rate.IDLE_LOOKS
    assert pacing.interval_s(10_000) == 1.0


async def test_agents_are_told_when_the_tracker_becomes_busy(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_rate, "REPORTS_PER_S", 2)
    monkeypatch.setattr(service, "LOAD_S", 0.2)
    monkeypatch.setattr(report_rate, "BUSY_SHARE", 100.0)
    monkeypatch.setattr(report_rate, "IDLE_SHARE", 0.0)
    ticking = asyncio.create_task(site.service.run())
    try:
        sockets = [await site.join(f"h{number}", f"10.0.0.{number}:1") for number in range(2)]
        assert await heard(sockets[1]) == Welcome(PROTOCOL_VERSION, 1.0, failures=True, conditions=True)
        monkeypatch.setattr(report_rate, "BUSY_SHARE", 0.0)
        assert await heard(sockets[1]) == Pace(2.0)
        monkeypatch.setattr(report_rate, "BUSY_SHARE", 100.0)
        monkeypatch.setattr(report_rate, "IDLE_SHARE", 100.0)
        while await heard(sockets[1]) != Pace(1.0):
            pass
    finally:
        ticking.cancel()


async def test_a_watched_host_keeps_its_pace_and_who_is_to_report_more_often_has_time_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_rate, "REPORTS_PER_S", 2)
    monkeypatch.setattr(report_rate, "IDLE_LOOKS", 1)
    monkeypatch.setattr(service, "LOAD_S", 0.0)
    tracker = Service(Fleet(0.0), Content(None))
    boxes = [tracker.open_session(Hello(PROTOCOL_VERSION, f"h{number}", f"10.0.0.{number}:1"))[1] for number in (0, 1)]
    tracker.fleet.probing.probe(["h0"], now=0.0)
    for box in boxes:
        await box.take()
    monkeypatch.setattr(report_rate, "BUSY_SHARE", -1.0)
    tracker._rates.adjust(1e9)
    boxes[0].put(Pace(0.5))
    assert await boxes[0].take() == [Pace(0.5)]
    assert await boxes[1].take() == [Pace(2.0)]
    monkeypatch.setattr(report_rate, "BUSY_SHARE", 100.0)
    monkeypatch.setattr(report_rate, "IDLE_SHARE", 100.0)
    tracker._rates.adjust(1e9 + 1)
    assert (tracker.fleet.report_interval_s, tracker.fleet.patience_s) == (1.0, 2.0)


async def test_what_operators_ask_of_a_fleet_is_json(site: Site) -> None:
    socket = await site.join("h1", "10.0.0.1:7071")
    await socket.send_str(say(Holding(BLOB, PIECE, PIECE, (1,))))
    await until(lambda: site.service.fleet.swarms)
    for path in ("hosts", "hosts/h1", "swarms", f"swarms/{BLOB}", f"swarms/{BLOB}/story"):
        async with site.http.get(f"{site.url}/v1/{path}") as answer:
            assert answer.status == 200 and answer.content_type == "application/json"
            assert await answer.json()


async def test_an_agent_whose_address_changed_takes_over_its_session(site: Site) -> None:
    """Its link went and came back with another address, before the heartbeat of the old session was
    missed."""
    old = await site.connect(say(Hello(PROTOCOL_VERSION, "h1", "10.0.0.1:7071", instance="a")))
    assert isinstance(await heard(old), Welcome)
    stranger = await site.connect(say(Hello(PROTOCOL_VERSION, "h1", "10.0.0.2:7071", instance="b")))
    assert isinstance(await heard(stranger), Reject)
    new = await site.connect(say(Hello(PROTOCOL_VERSION, "h1", "10.0.0.2:7071", instance="a")))
    assert isinstance(await heard(new), Welcome)
    assert site.service.fleet.hosts["h1"].address == "10.0.0.2:7071"


async def test_sessions_of_one_address_found_swarms_together(site: Site) -> None:
    """More sessions give an address no more of them; and to end one is no new beginning."""
    service, waits = site.service, list[float]()
    for number in range(3 * ADDRESS_SHARE):
        session, _ = service.open_session(Hello(PROTOCOL_VERSION, f"h{number}", "10.0.0.1:7071"), source="10.9.9.9")
        for start in range(0, FOUNDED_BURST, 1000):
            names = (f"{number:032x}{start + each:032x}" for each in range(1000))
            founded = tuple(Holding(Digest(f"sha256:{name}"), 1, 1, (1,)) for name in names)
            waits.append(service.held_back_s(session, Holdings(founded)))
        service.close_session(session)
    few = ADDRESS_SHARE * FOUNDED_BURST // 1000
    assert max(waits[:few]) == 0.0 < min(waits[few + 1 :])
    session, _ = service.open_session(Hello(PROTOCOL_VERSION, "other", "10.0.0.2:7071"), source="10.9.9.8")
    assert service.held_back_s(session, Holding(Digest("sha256:" + "ab" * 32), 1, 1, (1,))) == 0.0


async def test_an_agent_that_is_held_back_hears_that_the_tracker_lives(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own ping waits behind what it said."""
    monkeypatch.setattr(founding, "FOUNDED_BURST", 10)
    session = await site.http.ws_connect(site.url + "/v1/session", autoping=False)
    await session.send_str(say(Hello(PROTOCOL_VERSION, "h1", "10.0.0.1:7071")))
    assert isinstance(await heard(session), Welcome)
    names = (f"sha256:{number:064x}" for number in range(1000))
    await session.send_str(say(Holdings(tuple(Holding(Digest(name), 1, 1, (1,)) for name in names))))
    assert (await session.receive(timeout=60)).type is aiohttp.WSMsgType.PONG
    await session.close()


async def test_nothing_is_kept_of_a_connection_that_ended_before_its_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came of a message, up to its 4 MiB, goes with the connection, not with the heartbeat
    that was to follow."""
    monkeypatch.setattr(sessions, "HEARTBEAT_S", 3600.0)
    opened: list[weakref.ref[web.WebSocketResponse]] = []

    class Noted(web.WebSocketResponse):
        async def prepare(self, request: web.BaseRequest) -> Any:
            opened.append(weakref.ref(self))
            return await super().prepare(request)

    monkeypatch.setattr(sessions.web, "WebSocketResponse", Noted)
    app = make_app(Service(Fleet(started_at=0.0), Content(None)))
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)  # as the service has it
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    _, writer = await asyncio.open_connection(*runner.addresses[0])
    key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MTIzNDU2Nzg5MDEyMzQ1Ng=="
    head = f"GET /v1/session HTTP/1.1\r\nHost: t\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}\r\n\r\n"
    frame = b"\x81\xff" + (MESSAGE_BYTES_MAX - 1).to_bytes(8, "big") + bytes(4)
    writer.write(head.encode() + frame + b"x" * 100_000)
    await until(lambda: opened)
    writer.close()

    def gone() -> bool:
        gc.collect()
        return opened[0]() is None

    await until(gone)
    await runner.cleanup()
