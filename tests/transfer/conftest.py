"""Fixtures of the transfer tests; every server, thread and descriptor is gone when a test has
ended."""

from __future__ import annotations

import asyncio
import io
import math
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from aiohttp import web
from authority import Authority
from stream_rig import PIECE, Copy, Handler, RawPeer, Receiver, SampleBlob, Server, StartApp

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.pieces import PieceLayout, PieceList
from p2pdist.transfer.connections import ConnectionBook, LimitedSite
from p2pdist.transfer.problems import problems
from p2pdist.transfer.stream import loop_receiver
from p2pdist.transfer.tls import Tls


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The agent runs on uvloop; nothing here depends on it."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture
async def start_app() -> AsyncIterator[StartApp]:
    """Start a server with one route (method, path, handler); returns its port."""
    runners: list[web.AppRunner] = []

    async def start(method: str, path: str, handler: Handler, tls: ssl.SSLContext | None = None) -> int:
        app = web.Application(middlewares=[problems])
        app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        runners.append(runner)
        await runner.setup()
        site = LimitedSite(runner, "127.0.0.1", 0, ConnectionBook(1000), tls=tls)
        await site.start()
        return site.port

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture(scope="session")
def content() -> tuple[bytes, PieceList, Digest]:
    """The same bytes in every test, hashed once."""
    data = random.Random(1).randbytes(40 * PIECE + 1234)
    return data, PieceList.of_stream(io.BytesIO(data), len(data)), digest_of(data)


@pytest.fixture
def blob(tmp_path: Path, content: tuple[bytes, PieceList, Digest]) -> SampleBlob:
    data, pieces, digest = content
    path = tmp_path / "blob"
    path.write_bytes(data)
    return SampleBlob(path, data, PieceLayout(len(data), PIECE), pieces, digest)


@pytest.fixture
async def server(blob: SampleBlob, start_app: StartApp) -> Server:
    server = Server(blob)
    server.port = await start_app("POST", "/v1/streams", server.streams)
    return server


@pytest.fixture(params=["thread", "loop"])
async def receiver(
    blob: SampleBlob, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Receiver]:
    """Streams stay in their threads, or go to the loop as soon as they can and stay there."""
    on_loop = request.param == "loop"
    monkeypatch.setattr(loop_receiver, "WINDOW", 1 if on_loop else 1 << 30)
    for limit in ("SHARE_LOW", "SHARE_MAX", "LOOP_SHARE_MAX", "STALL_S"):
        monkeypatch.setattr(loop_receiver, limit, math.inf)
    receiver = Receiver(blob, Copy(blob, tmp_path / "copy"))
    yield receiver
    for stream in receiver.streams:
        stream.close()
    for stream in receiver.streams:
        if stream in receiver.started:
            assert await asyncio.to_thread(stream.join, 5.0), "a receiver thread is left behind"
    os.close(receiver.copy.descriptor)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls(authority: Authority) -> Tls:
    return Tls(authority.issue())


@pytest.fixture
def raw_peer() -> Iterator[Callable[[Callable[[socket.socket], None]], RawPeer]]:
    peers: list[RawPeer] = []

    def start(behave: Callable[[socket.socket], None]) -> RawPeer:
        peers.append(RawPeer(behave))
        return peers[-1]

    yield start
    for peer in peers:
        peer.stop()
