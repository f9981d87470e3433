"""Whole processes: strangers hold connections, streams and the store of an agent, and those that
work with it notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from site_rig import Agent, Site, free_port, running_site, until

from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Assign,
    Hello,
    Holding,
    Holdings,
    Report,
    StreamRequest,
    Welcome,
    decode_from_agent,
    decode_from_tracker,
    encode,
)
from p2pdist.model.pieces import PieceLayout, PieceSet, piece_size_for
from p2pdist.model.plan import ORIGIN, Plan, Source, StripePlan

pytestmark = pytest.mark.slow

MIB = 1 << 20
HALF = b"GET /healthz HTTP/1.1\r\nHost: agent\r\nX-Half: "


@contextlib.contextmanager
def connections(agent: Agent, count: int, begin: bytes, port: int = 0) -> Iterator[list[socket.socket]]:
    """Connections to an agent that begin to say something, and stay."""
    opened = []
    try:
        for _ in range(count):
            with contextlib.suppress(ConnectionRefusedError):  # the BitTorrent port, while its session starts
                opened.append(socket.create_connection(("127.0.0.1", port or agent.port), timeout=30))
        for connection in opened:
            with contextlib.suppress(ConnectionError):  # those that the agent has closed already
                connection.sendall(begin)
        yield opened
    finally:
        for connection in opened:
            connection.close()


def descriptors(agent: Agent) -> int:
    assert agent.process is not None
    return len(os.listdir(f"/proc/{agent.process.pid}/fd"))


@pytest.mark.parametrize("begin", [b"", HALF, b"POST /v1/streams HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n{"])
def test_half_requests_leave_the_socket_free(site: Site, begin: bytes) -> None:
    """400 connections from one address, where the process may have 256 files open."""
    digest = site.publish(2 * MIB)
    agent = Agent(site, "h0")
    agent.descriptors = 256
    agent.start()
    with connections(agent, 400, begin), connections(agent, 100, b"", agent.port + 1):
        output = site.directory / "output"
        code, _, errors = site.command("blob", "pull", digest, "-o", str(output), "--socket", str(agent.socket))
        assert code == 0, errors
        assert output.stat().st_size == 2 * MIB
        until(lambda: descriptors(agent) < 256 - 64)
        assert agent.metric("p2pdist_agent_received_bytes_total") == 2 * MIB


RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.p2pdist.stream\r\nConnection: close\r\n\r\n"
SILENT_SEEDS = 20


class BadSeeds:
    """Sessions with a tracker that claim a whole blob, at an address that answers with `words`,
    then a byte a second where it drips."""

    def __init__(self, words: bytes, *, drips: bool = False) -> None:
        self._words, self._drips = words, drips
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: list[asyncio.Task[None]] = []
        self.asked = 0

    def join(self, url: str, holding: Holding) -> None:
        """Have all sessions claim the blob."""
        self.listen()
        asyncio.run_coroutine_threadsafe(self._join(url, holding), self._loop).result(30)

    def listen(self) -> None:
        """Answer at the address."""
        self._listening.setblocking(False)
        self._loop.call_soon_threadsafe(lambda: self._tasks.append(self._loop.create_task(self._serve())))

    async def _join(self, url: str, holding: Holding) -> None:
        joined = [asyncio.Event() for _ in range(SILENT_SEEDS)]
        for number, event in enumerate(joined):
            self._tasks.append(asyncio.create_task(self._claim(url, f"bad{number}", holding, event)))
        await asyncio.gather(*(event.wait() for event in joined))

    async def _claim(self, url: str, name: str, holding: Holding, joined: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/session") as socket:
            for message in (Hello(PROTOCOL_VERSION, name, self.address), holding):
                await socket.send_str(msgspec.json.encode(message).decode())
            assert isinstance(decode_from_tracker(await socket.receive_str()), Welcome)
            joined.set()
            while any(count == 0 for count in holding.counts):  # it says how it gets on
                holding = msgspec.structs.replace(holding, counts=tuple(count + 1 for count in holding.counts))
                report = Report((Advance(holding.blob, holding.counts),))
                await socket.send_str(msgspec.json.encode(report).decode())
            async for _ in socket:
                pass

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listening)
            self.asked += 1
            self._tasks.append(asyncio.create_task(self._respond(connection)))

    async def _respond(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            await loop.sock_recv(connection, 1 << 16)
            await loop.sock_sendall(connection, self._words)
            while self._drips:
                await asyncio.sleep(1.0)
                await loop.sock_sendall(connection, b"x")
            await asyncio.Event().wait()

    def close(self) -> None:
        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listening.close()


class Planner:
    """A tracker that goes by what the test says: `plan` gives the plan of a host that lacks pieces.
    It moves no host away from a source that gives nothing, as a tracker does."""

    def __init__(self, plan: Callable[[str, Holding], Plan]) -> None:
        self._plan = plan
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/session", self._session)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        return runner

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        peer = web.WebSocketResponse()
        await peer.prepare(request)
        hello = decode_from_agent(await peer.receive_str())
        assert isinstance(hello, Hello)
        await peer.send_str(encode(Welcome(PROTOCOL_VERSION, 0.1)).decode())
        async for frame in peer:
            message = decode_from_agent(frame.data)
            for holding in message.blobs if isinstance(message, Holdings) else (message,):
                if isinstance(holding, Holding):
                    await peer.send_str(encode(Assign(self._plan(hello.host, holding))).decode())
        return peer

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def local_origin(tmp_path: Path) -> Iterator[Site]:
    with running_site(tmp_path, tracker=False) as site:
        yield site


@pytest.mark.parametrize("how", ["silent", "head", "half a piece", "drips"])
def test_silent_seeds_do_not_hold_up_a_pull(local_origin: Site, how: str) -> None:
    """The plan names twenty hosts at one address that give nothing, and one more that gives: the
    address is asked a few times, not once for each of its names."""
    site, size = local_origin, 8 * MIB
    digest = site.publish(size)
    layout = PieceLayout(size, piece_size_for(size))
    frame = struct.pack(">II", 0, layout.piece_size)
    words = {"silent": b"", "head": RESPONSE, "half a piece": RESPONSE + frame + bytes(1000), "drips": RESPONSE + frame}
    bad = BadSeeds(words[how], drips=how == "drips")
    bad.listen()
    silent = [Source(f"bad{number}", bad.address) for number in range(SILENT_SEEDS)]

    def plan(host: str, holding: Holding) -> Plan:
        parent, *alternates = [ORIGIN] if host == "h0" else [*silent, Source("h0", f"127.0.0.1:{seed.port}")]
        return Plan(digest, tuple(StripePlan(each, parent, tuple(alternates)) for each in range(layout.stripes)))

    planner = Planner(plan)
    try:
        origin = f"file://{site.layout}"
        options = {"tracker": planner.url, "origin": origin, "transport": "trees"}
        seed, puller = (Agent(site, name, **options).start() for name in ("h0", "h1"))
        seed.pull(blob=digest, wait=True)
        status = puller.start_pull(blob=digest, wait=True).result()
        assert (status.state, status.bytes_peers) == ("done", size)
        assert layout.stripes <= bad.asked < SILENT_SEEDS
    finally:
        planner.close()
        bad.close()


@pytest.mark.parametrize("claim", ["all", "progress"])
def test_a_fleet_gets_on_beside_hosts_that_give_nothing(site: Site, claim: str) -> None:
    """Twenty hosts claim a blob, or that they get on, and the tracker believes them at first. The
    puller says that it starves before any of them has been silent for long, and all comes from the
    origin."""
    size = 8 * MIB
    digest = site.publish(size)
    layout = PieceLayout(size, piece_size_for(size))
    (puller,) = site.agents(1, transport="trees")
    bad = BadSeeds(b"")
    try:
        full = tuple(PieceSet.full(layout.count).stripe_counts(layout.stripes))
        counts = full if claim == "all" else (0,) * layout.stripes
        bad.join(site.tracker_url, Holding(digest, size, layout.piece_size, counts))

        def claimed() -> int:
            """How many hosts have pieces, as the tracker hears."""
            with urllib.request.urlopen(f"{site.tracker_url}/v1/swarms/{digest}", timeout=60) as answer:
                return sum(any(member["counts"]) for member in msgspec.json.decode(answer.read())["members"])

        until(lambda: claimed() == SILENT_SEEDS)
        status = puller.start_pull(blob=digest, wait=True).result()
        assert (status.state, status.bytes_origin) == ("done", size) and puller.received() == size
        assert bad.asked, "the tracker named one of them"
        words = puller.log.read_text()
        assert "gives nothing yet" in words
        assert words.index("gives nothing yet") < (words + "reason=stalled").index("reason=stalled")
    finally:
        bad.close()


def test_unread_streams_leave_slots_for_children(local_origin: Site) -> None:
    """One address opens 256 streams and reads none. A child of another one is served by the seed,
    and so is one of the same address, once its streams are stuck: the plan names no other
    source."""
    site, size = local_origin, 8 * MIB
    digest = site.publish(size)
    layout = PieceLayout(size, piece_size_for(size))

    def plan(host: str, holding: Holding) -> Plan:
        parent = ORIGIN if host == "h0" else Source("h0", f"127.0.0.1:{seed.port}")
        return Plan(digest, tuple(StripePlan(stripe, parent) for stripe in range(layout.stripes)))

    planner = Planner(plan)
    options = {"tracker": planner.url, "origin": f"file://{site.layout}", "transport": "trees"}
    seed, child = (Agent(site, name, log_level="debug", **options).start() for name in ("h0", "h1"))
    seed.pull(blob=digest, wait=True)
    body = msgspec.json.encode(
        StreamRequest(digest, 0, layout.stripes, PieceSet(layout.count).to_bytes(), "x", "start")
    )
    head = f"POST /v1/streams HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    with connections(seed, 256, head.encode() + body) as opened:
        until(lambda: seed.metric("p2pdist_agent_streams") >= 192)
        other = socket.create_connection(("127.0.0.1", seed.port), timeout=30, source_address=("127.0.0.2", 0))
        with other:
            other.sendall(head.encode() + body)
            assert other.recv(15) == b"HTTP/1.1 200 OK"
        status = child.start_pull(blob=digest, wait=True).result()
        assert (status.state, status.bytes_peers) == ("done", size)
        assert "is not read and ends" in seed.log.read_text(), "the kernel gives them up after 30 s, too"
        assert opened
    planner.close()


def test_reading_evicts_nothing_that_was_pulled(site: Site) -> None:
    """A stranger reads blob after blob through an agent whose store is small. The blob that a user
    pulled stays, and what came for readers gives way to what comes for readers."""
    kept = site.publish(12 * MIB)
    others = [site.publish(12 * MIB) for _ in range(4)]
    agent = Agent(site, "h0", capacity="40MiB").start()
    agent.pull(blob=kept, wait=True)
    for digest in others:
        with urllib.request.urlopen(f"{agent.url}/v1/blobs/{digest}", timeout=60) as answer:
            assert "sha256:" + hashlib.sha256(answer.read()).hexdigest() == digest
    assert agent.pull(blob=kept, wait=True).bytes_cached == 12 * MIB
    too_large = site.publish(30 * MIB)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{agent.url}/v1/blobs/{too_large}", timeout=60)
    assert refused.value.code == 503 and b"no room" in refused.value.read()
    assert agent.pull(blob=kept, wait=True).bytes_cached == 12 * MIB
    with urllib.request.urlopen(f"{agent.url}/v1/blobs/{others[-1]}", timeout=60) as answer:
        answer.read()  # later than the user's own was used
    own = site.publish(20 * MIB)
    agent.pull(blob=own, wait=True)
    assert agent.pull(blob=kept, wait=True).bytes_cached == 12 * MIB, "what came for readers goes first"
