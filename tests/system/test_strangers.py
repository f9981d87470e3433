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
from collections.abc import Iterator

import aiohttp
import msgspec
import pytest
from site_rig import Agent, Site, until

from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Holding, StreamRequest
from p2pdist.model.pieces import PieceLayout, PieceSet, piece_size_for

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
        asyncio.run_coroutine_threadsafe(self._join(url, holding), self._loop).result(30)

    async def _join(self, url: str, holding: Holding) -> None:
        self._listening.setblocking(False)
        self._tasks.append(asyncio.create_task(self._serve()))
        joined = [asyncio.Event() for _ in range(SILENT_SEEDS)]
        for number, event in enumerate(joined):
            self._tasks.append(asyncio.create_task(self._claim(url, f"bad{number}", holding, event)))
        await asyncio.gather(*(event.wait() for event in joined))

    async def _claim(self, url: str, name: str, holding: Holding, joined: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/session") as socket:
            for message in (Hello(PROTOCOL_VERSION, name, self.address), holding):
                await socket.send_str(msgspec.json.encode(message).decode())
            assert '"welcome"' in await socket.receive_str()
            joined.set()
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


@pytest.mark.parametrize("how", ["silent", "head", "half a piece", "drips"])
def test_silent_seeds_do_not_hold_up_a_pull(site: Site, how: str) -> None:
    """Twenty hosts at one address claim the blob and give nothing. The pull ends by trees, and the
    address is asked a few times, not once for each of its names."""
    size = 8 * MIB
    digest = site.publish(size)
    layout = PieceLayout(size, piece_size_for(size))
    frame = struct.pack(">II", 0, layout.piece_size)
    words = {"silent": b"", "head": RESPONSE, "half a piece": RESPONSE + frame + bytes(1000), "drips": RESPONSE + frame}
    (puller,) = site.agents(1, transport="trees")
    bad = BadSeeds(words[how], drips=how == "drips")
    try:
        counts = tuple(PieceSet.full(layout.count).stripe_counts(layout.stripes))
        bad.join(site.tracker_url, Holding(digest, size, layout.piece_size, counts))  # type: ignore[arg-type]
        status = puller.start_pull(blob=digest, wait=True).result()
        assert status.state == "done"
        assert puller.received() == size
        assert bad.asked <= 3 * layout.stripes, "each stripe tries an address that was silent again and again"
    finally:
        bad.close()


def test_unread_streams_leave_slots_for_children(site: Site) -> None:
    """One address opens 256 streams and reads none. A child of another one is served by the seed,
    and so is one of the same address, once its streams are stuck."""
    size = 8 * MIB
    digest = site.publish(size)
    seed, child = site.agents(2, transport="trees")
    seed.pull(blob=digest, wait=True)
    layout = PieceLayout(size, piece_size_for(size))
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
        child.pull(blob=digest, wait=True)
        assert child.received() == size
        assert opened


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
    own = site.publish(20 * MIB)
    agent.pull(blob=own, wait=True)
    assert agent.pull(blob=kept, wait=True).bytes_cached == 12 * MIB, "what came for readers goes first"
