"""The serving end of a stripe stream: it stops when the child does, keeps little unsent, and leaks
nothing."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
import time

import msgspec
import pytest
from aiohttp import ClientSession, web
from stream_rig import Pieces, Receiver, SampleBlob, Server
from waits import until

from p2pdist.model.errors import Unavailable
from p2pdist.model.messages import StreamRequest
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.transfer.stream import sendfile
from p2pdist.transfer.stream.connections import ConnectionPool
from p2pdist.transfer.stream.server import REQUEST_BYTES_MAX, UNSENT_BYTES, Block, serve_stream

SIOCOUTQNSD = 0x894B
"""ioctl: bytes in the send queue that have not been sent yet (linux/sockios.h)."""

SEGMENT_BYTES = 64 << 10


def ask(server: Server, *, receive_buffer: int | None = None) -> socket.socket:
    """A plain connection that has asked for everything."""
    blob = server.blob
    body = msgspec.json.encode(StreamRequest(blob.digest, 0, 1, PieceSet(blob.layout.count).to_bytes()))
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/streams HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    return connection


@pytest.mark.parametrize("abruptly", [False, True])
async def test_a_child_that_goes_away_while_waiting_for_its_turn_is_noticed(
    server: Server, caplog: pytest.LogCaptureFixture, abruptly: bool
) -> None:
    server.make = lambda layout, wanted: Pieces(layout, wanted, available={0})
    with ask(server) as connection:
        await until(lambda: server.outgoing and server.outgoing[0].sent == 64 << 10)
        await asyncio.sleep(0.02)
        assert server.ended == 0
        if abruptly:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await until(lambda: server.ended == 1)
    assert server.outgoing[0].cancelled
    assert caplog.records == []


async def test_a_cancellation_from_outside_is_not_taken_for_the_child_s_going(blob: SampleBlob, start_app) -> None:
    """Both may happen at once; then the handler still ends as cancelled."""
    endings: list[str] = []

    class Cancelled(Pieces):
        async def next_block(self) -> Block | None:
            try:
                return await super().next_block()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                raise

    async def handler(request: web.Request) -> web.StreamResponse:
        wanted = StreamRequest(blob.digest, 0, 1, PieceSet(blob.layout.count).to_bytes())
        try:
            with blob.path.open("rb") as file:
                return await serve_stream(request, Cancelled(blob.layout, wanted, available={0}), file, blob.layout)
        except asyncio.CancelledError:
            endings.append("cancelled")
            raise

    with ask(Server(blob, await start_app("POST", "/v1/streams", handler))):
        await asyncio.sleep(0.05)
    await until(lambda: endings == ["cancelled"])


async def test_a_child_that_reads_nothing_holds_little_and_goes_quietly(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """It neither lets bytes pile up in the kernel nor keeps the event loop busy, and its end is
    noticed."""
    with ask(server, receive_buffer=16 << 10):
        await until(lambda: server.outgoing and server.outgoing[0].sent)
        await asyncio.sleep(0.2)
        (unsent,) = struct.unpack("i", fcntl.ioctl(server.sockets[0].fileno(), SIOCOUTQNSD, bytes(4)))
        assert unsent <= UNSENT_BYTES + SEGMENT_BYTES, "no more than TCP_NOTSENT_LOWAT and the segment that passes it"
        sent, used, started = server.outgoing[0].sent, time.process_time(), time.monotonic()
        await asyncio.sleep(0.2)
        assert server.outgoing[0].sent == sent < 1 << 20
        assert time.process_time() - used < (time.monotonic() - started) / 2, "it waits, and does not spin"
    await until(lambda: server.ended == 1)
    assert caplog.records == []


async def test_a_child_that_takes_nothing_for_too_long_is_dropped(
    blob: SampleBlob, start_app, caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        wanted = StreamRequest(blob.digest, 0, 1, PieceSet(blob.layout.count).to_bytes())
        with blob.path.open("rb") as file:
            response = await serve_stream(request, Pieces(blob.layout, wanted), file, blob.layout, dead_after_s=0.3)
        ended.set()
        return response

    server = Server(blob, await start_app("POST", "/v1/streams", handler))
    with ask(server, receive_buffer=16 << 10):
        async with asyncio.timeout(60):
            await ended.wait()
    assert caplog.records == []


async def test_streams_leave_no_descriptor_behind(server: Server, receiver: Receiver) -> None:
    server.make = lambda layout, wanted: Pieces(layout, wanted, available={0, 1, 2})
    with ask(server):  # the first one may open what the event loop keeps
        await asyncio.sleep(0.005)
    await until(lambda: server.ended == 1)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with ask(server):
            await asyncio.sleep(0.005)
    await until(lambda: server.ended == 21)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_a_known_failure_of_the_sender_is_seen_as_truncated(
    server: Server, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Pieces):
        async def next_block(self) -> Block | None:
            if self.todo[0] == 2:
                raise Unavailable("the blob is being removed")
            return await super().next_block()

    caplog.set_level(logging.INFO)
    server.make = Failing
    stream = receiver.open(server.port)
    assert (await receiver.closed(stream)).reason == "short"
    assert receiver.received(stream) == [0, 1]
    assert "the blob is being removed" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_defect_of_the_sender_is_logged_and_seen_as_truncated(
    server: Server, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Pieces):
        async def next_block(self) -> Block | None:
            if self.todo[0] == 2:
                raise ZeroDivisionError
            return await super().next_block()

    server.make = Broken
    stream = receiver.open(server.port)
    assert (await receiver.closed(stream)).reason in ("short", "reset")
    assert "ZeroDivisionError" in caplog.text


async def test_a_file_that_is_too_short_is_seen_as_truncated(
    server: Server, receiver: Receiver, blob: SampleBlob, caplog: pytest.LogCaptureFixture
) -> None:
    blob.path.write_bytes(blob.data[: 3 * (64 << 10) + 5])
    stream = receiver.open(server.port)
    assert (await receiver.closed(stream)).reason == "short"
    assert receiver.received(stream) == [0, 1, 2]


async def test_a_child_that_says_more_than_its_request_is_cut_off(server: Server) -> None:
    server.make = lambda layout, wanted: Pieces(layout, wanted, available=set())
    with ask(server) as connection:
        await until(lambda: server.outgoing)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: server.ended == 1)


async def test_a_fast_child_does_not_starve_the_event_loop(server: Server, tmp_path) -> None:
    """The sender lets others run even when neither the kernel nor the uplink ever makes it wait."""
    blob = server.blob
    size = 256 << 20
    layout = server.blob.layout = PieceLayout(size, 4 << 20)
    with blob.path.open("r+b") as file:
        file.truncate(size)
    wanted = StreamRequest(blob.digest, 0, 1, PieceSet(layout.count).to_bytes())
    server.make = lambda _, request: Pieces(layout, wanted, block=4 << 20)

    def drain() -> None:
        buffer = bytearray(1 << 20)
        with ask(server) as connection:
            while connection.recv_into(buffer):
                pass

    ticks, most, last = 0, 0, 0
    task = asyncio.create_task(asyncio.to_thread(drain))
    while not task.done():
        await asyncio.sleep(0)
        sent = server.outgoing[0].sent if server.outgoing else 0
        ticks, most, last = ticks + 1, max(most, sent - last), sent
    await task
    assert server.outgoing[0].sent == size
    assert ticks > 20
    assert most <= size // 4, "others run in between"


async def test_a_server_that_stops_does_not_wait_for_its_streams(blob: SampleBlob, receiver: Receiver) -> None:
    server = Server(blob, make=lambda layout, wanted: Pieces(layout, wanted, available={0}))
    runner = web.AppRunner(app := web.Application(), access_log=None, shutdown_timeout=0.1)
    app.router.add_post("/v1/streams", server.streams)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    stream = receiver.open(listener.getsockname()[1])
    await receiver.until(lambda: receiver.received(stream) == [0])
    async with asyncio.timeout(30):
        await runner.cleanup()
    assert (await receiver.closed(stream)).reason in ("short", "reset")
    assert server.outgoing[0].cancelled
    assert server.ended == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'{"blob":"sha256:x","stripe":0,"stripes":1,"have":""}', 400),
        (b'{"blob":"../../etc/passwd","stripe":0,"stripes":1,"have":""}', 400),
        (b'{"blob":"sha256:%s","stripe":4,"stripes":4,"have":""}' % (b"0" * 64), 400),
        (b'{"blob":"sha256:%s","stripe":-1,"stripes":4,"have":""}' % (b"0" * 64), 400),
        (b'{"blob":"sha256:%s","stripe":0,"stripes":0,"have":""}' % (b"0" * 64), 400),
        (b'{"blob":"sha256:%s","stripe":0,"stripes":99999,"have":""}' % (b"0" * 64), 400),
        (b'{"blob":"sha256:%s","stripe":0,"stripes":1,"have":"!"}' % (b"0" * 64), 400),
        (b" " * (REQUEST_BYTES_MAX + 1), 413),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_malformed_requests_get_problem_documents(server: Server, body: bytes, status: int) -> None:
    async with ClientSession() as session:
        answer = await session.post(f"http://127.0.0.1:{server.port}/v1/streams", data=body)
        assert answer.status == status
        assert answer.content_type == "application/problem+json"
        problem = await answer.json(content_type=None)
    assert problem["status"] == status
    assert problem["type"].startswith("urn:p2pdist:problem:")
    assert server.outgoing == []


def control(connection: socket.socket) -> bytes:
    """Its congestion control."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


async def test_a_stream_that_ends_while_it_begins_leaves_its_connection_as_it_was(
    server: Server, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next stream over it would take the control of a beginning for that of the host."""
    connections, controls = [], []

    class Seen(sendfile.Start):
        def __init__(self, connection: socket.socket) -> None:
            controls.append(control(connection))
            super().__init__(connection)
            controls.append(control(connection))
            connections.append(connection.dup())

    monkeypatch.setattr(sendfile, "Start", Seen)
    monkeypatch.setattr(sendfile, "LONG_ROUND_TRIP_S", 0.0)
    monkeypatch.setattr(sendfile, "START_CONTROL", b"reno")
    monkeypatch.setattr(sendfile, "START_S", 3600.0)
    pool = ConnectionPool()
    stream = receiver.open(server.port, connections=pool)
    assert (await receiver.closed(stream)).reason == "done"
    (connection,), (usual, first) = connections, controls
    with connection:
        assert first == b"reno"
        await until(lambda: control(connection) == usual)
    pool.close()
