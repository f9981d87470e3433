"""What the transfer tests are made of: a blob on disk, a real server over it, streams whose events
can be waited for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from aiohttp import web

from p2pdist.model.digest import Digest
from p2pdist.model.messages import StreamRequest
from p2pdist.model.pieces import PieceLayout, PieceList, PieceSet
from p2pdist.model.plan import Source
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream.client import IncomingStream
from p2pdist.transfer.stream.connections import ConnectionPool
from p2pdist.transfer.stream.events import Mailbox, PieceReceived, StreamClosed, StreamEvent
from p2pdist.transfer.stream.frames import stream_length
from p2pdist.transfer.stream.server import Block, read_stream_request, serve_stream
from p2pdist.transfer.tls import Tls

PIECE = 64 << 10

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StartApp(Protocol):
    def __call__(
        self, method: str, path: str, handler: Handler, tls: ssl.SSLContext | None = None
    ) -> Awaitable[int]: ...


@dataclass
class SampleBlob:
    """Random bytes in a file, cut into 64 KiB pieces, the last one short."""

    path: Path
    data: bytes = field(repr=False)
    """Without it in texts: an event loop makes one of what each fixture has returned."""
    layout: PieceLayout
    pieces: PieceList
    digest: Digest

    def piece(self, number: int) -> bytes:
        return self.data[number * PIECE : number * PIECE + self.layout.length(number)]


@dataclass
class Copy:
    """What a receiver stores: pieces that verify, each at its place in one file."""

    blob: SampleBlob
    path: Path
    have: PieceSet = field(init=False)

    def __post_init__(self) -> None:
        self.path.touch()
        self.descriptor = os.open(self.path, os.O_RDWR)
        self.have = PieceSet(self.blob.layout.count)
        self.lock = threading.Lock()

    def write(self, piece: int, data: memoryview) -> bool:
        if not self.blob.pieces.verify(piece, data):
            return False
        os.pwrite(self.descriptor, data, self.blob.layout.offset(piece))
        with self.lock:
            assert self.have.add(piece)
        return True


class Pieces:
    """An Outgoing: what the request lacks of its stripe, oldest first, in blocks of at most `block`
    bytes, each piece once it is in `available` (a set of numbers; None: all of them)."""

    def __init__(
        self, layout: PieceLayout, wanted: StreamRequest, *, block: int = 32 << 10, available: set[int] | None = None
    ) -> None:
        self.layout = layout
        self.todo = PieceSet(layout.count, wanted.have).missing(wanted.stripe, wanted.stripes)
        self.block = block
        self.available = available
        self.offset = 0
        self.sent = 0
        self.news = asyncio.Event()
        self.cancelled = False

    async def next_block(self) -> Block | None:
        if not self.todo:
            return None
        try:
            while self.available is not None and self.todo[0] not in self.available:
                self.news.clear()
                await self.news.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        piece, offset = self.todo[0], self.offset
        length = min(self.block, self.layout.length(piece) - offset)
        self.offset += length
        if self.offset == self.layout.length(piece):
            self.todo.pop(0)
            self.offset = 0
        return Block(piece, offset, length)

    def block_sent(self, length: int) -> None:
        self.sent += length

    def at_once(self, send: Callable[[Block], bool] | None) -> None:
        """Every block is waited for."""


class Receiver:
    """Streams into one Copy, and their events as they reach the event loop."""

    def __init__(self, blob: SampleBlob, copy: Copy) -> None:
        self.blob = blob
        self.copy = copy
        self.events: list[StreamEvent] = []
        self.news = asyncio.Event()
        self.mailbox: Mailbox[StreamEvent] = Mailbox(asyncio.get_running_loop(), self._deliver)
        self.streams: list[IncomingStream] = []
        self.started: list[IncomingStream] = []

    def _deliver(self, batch: list[StreamEvent]) -> None:
        self.events += batch
        self.news.set()

    def open(
        self,
        port: int,
        *,
        stripe: int = 0,
        stripes: int = 1,
        have: bytes | None = None,
        write: Callable[[int, memoryview], bool] | None = None,
        start: bool = True,
        address: str = "",
        tls: Tls | None = None,
        pacer: Pacer | None = None,
        connections: ConnectionPool | None = None,
    ) -> IncomingStream:
        bits = self.copy.have.to_bytes() if have is None else have
        request = StreamRequest(self.blob.digest, stripe, stripes, bits, "child")
        source = Source("parent", address or f"127.0.0.1:{port}")
        stream = IncomingStream(
            source,
            request,
            self.blob.layout,
            write or self.copy.write,
            self.mailbox.post,
            tls=tls,
            pacer=pacer,
            connections=connections,
            inbox=self.mailbox,
        )
        self.streams.append(stream)
        if start:
            self.started.append(stream)
            stream.start()
        return stream

    async def until(self, holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not holds():
                self.news.clear()
                await self.news.wait()

    async def closed(self, stream: IncomingStream) -> StreamClosed:
        """The last event of a stream, once its thread has ended."""
        await self.until(lambda: any(isinstance(e, StreamClosed) and e.stream == stream.number for e in self.events))
        assert await asyncio.to_thread(stream.join, 30.0)
        await asyncio.sleep(0.01)
        mine = [event for event in self.events if event.stream == stream.number]
        assert [isinstance(event, StreamClosed) for event in mine].count(True) == 1, "exactly one StreamClosed"
        last = mine[-1]
        assert isinstance(last, StreamClosed), "StreamClosed is the last event"
        return last

    def received(self, stream: IncomingStream) -> list[int]:
        return [e.piece for e in self.events if isinstance(e, PieceReceived) and e.stream == stream.number and e.ok]


@dataclass
class Server:
    """A real aiohttp server on a loopback port; `outgoing` are the streams that it has served."""

    blob: SampleBlob
    port: int = 0
    outgoing: list[Pieces] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)
    ended: int = 0
    make: Callable[[PieceLayout, StreamRequest], Pieces] = Pieces

    async def streams(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_stream_request(request)
        outgoing = self.make(self.blob.layout, wanted)
        self.outgoing.append(outgoing)
        self.sockets.append(request.get_extra_info("socket"))
        try:
            with self.blob.path.open("rb") as file:
                kept = request.keep_alive and wanted.stripes == 1
                length = stream_length(self.blob.layout, outgoing.todo) if kept else None
                return await serve_stream(request, outgoing, file, self.blob.layout, length=length)
        finally:
            self.ended += 1


class RawPeer:
    """A listener in a thread that reads one request and then does with the connection whatever
    `behave` says."""

    def __init__(self, behave: Callable[[socket.socket], None], address: str = "127.0.0.1") -> None:
        self.behave = behave
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.create_server((address, 0), family=family)
        self.listener.settimeout(60)
        self.port = int(self.listener.getsockname()[1])
        self.request = b""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(60)
            while b"\r\n\r\n" not in self.request or not self.request.endswith(b"}"):
                part = connection.recv(65536)
                if not part:
                    return
                self.request += part
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.behave(connection)

    def stop(self) -> None:
        self.listener.close()
        self.thread.join(60)
