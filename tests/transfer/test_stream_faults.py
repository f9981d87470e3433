"""What a receiver makes of peers that fail, lie or flood: nothing wrong is stored, and the reason
is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable

import pytest
from aiohttp import web
from ports import free_port
from stream_rig import PIECE, RawPeer, Receiver, SampleBlob

from p2pdist.model.errors import NotFound, P2PDistError, Refused, Unauthenticated, Unavailable
from p2pdist.model.messages import STREAM_END
from p2pdist.model.pieces import PieceSet
from p2pdist.transfer.stream.events import StreamClosed

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.p2pdist.stream\r\nConnection: close\r\n\r\n"
END = struct.pack(">II", STREAM_END, 0)

StartPeer = Callable[[Callable[[socket.socket], None]], RawPeer]


def frame(piece: int, data: bytes) -> bytes:
    return struct.pack(">II", piece, len(data)) + data


async def outcome(receiver: Receiver, peer: RawPeer, **options: int) -> tuple[str, str, list[int]]:
    """Reason, detail and pieces received of one stream from a peer."""
    stream = receiver.open(peer.port, **options)
    closed = await receiver.closed(stream)
    return closed.reason, closed.detail, receiver.received(stream)


@pytest.mark.parametrize(
    ("tail", "pieces"),
    [
        (lambda blob: b"", [0, 1]),
        (lambda blob: frame(2, blob.piece(2))[:5], [0, 1]),
        (lambda blob: frame(2, blob.piece(2))[:8], [0, 1]),
        (lambda blob: frame(2, blob.piece(2))[:-1], [0, 1]),
        (lambda blob: END[:7], [0, 1]),
    ],
    ids=["between frames", "in a frame head", "after a frame head", "in a piece", "in the closing frame"],
)
async def test_an_end_without_the_closing_frame_is_short(
    receiver: Receiver,
    blob: SampleBlob,
    raw_peer: StartPeer,
    tail: Callable[[SampleBlob], bytes],
    pieces: list[int],
) -> None:
    peer = raw_peer(lambda c: c.sendall(HEAD + frame(0, blob.piece(0)) + frame(1, blob.piece(1)) + tail(blob)))
    reason, detail, received = await outcome(receiver, peer)
    assert (reason, received) == ("short", pieces)
    assert "parent" in detail
    assert receiver.copy.path.stat().st_size == 2 * PIECE


async def test_a_stream_that_is_broken_off_is_reset(receiver: Receiver, blob: SampleBlob, raw_peer: StartPeer) -> None:
    def behave(connection: socket.socket) -> None:
        connection.sendall(HEAD + frame(0, blob.piece(0)) + b"abc")
        time.sleep(0.1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    reason, _, received = await outcome(receiver, raw_peer(behave))
    assert (reason, received) == ("reset", [0])


async def test_a_server_process_killed_in_the_middle_of_a_piece(receiver: Receiver, blob: SampleBlob) -> None:
    """kill -9 of the sender: a truncated stream, and only whole pieces stored."""
    script = f"""
import socket, struct, sys, time
listener = socket.create_server(("127.0.0.1", 0)); print(listener.getsockname()[1], flush=True)
c, _ = listener.accept(); c.recv(65536)
data = open({str(blob.path)!r}, "rb").read()
c.sendall({HEAD!r} + struct.pack(">II", 0, {PIECE}) + data[:{PIECE}] + struct.pack(">II", 1, {PIECE}) + data[:1000])
time.sleep(60)
"""
    peer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert peer.stdout is not None
        stream = receiver.open(int(await asyncio.to_thread(peer.stdout.readline)))
        while stream.receiving != 1:
            await asyncio.sleep(0.01)
        os.kill(peer.pid, signal.SIGKILL)
        assert (await receiver.closed(stream)).reason in ("short", "reset")
        assert receiver.received(stream) == [0]
    finally:
        peer.kill()
        peer.wait()
        assert peer.stdout is not None
        peer.stdout.close()


@pytest.mark.parametrize(
    "head",
    [
        (41, PIECE),
        (1 << 31, PIECE),
        (1, PIECE),
        (2, 0xFFFFFFFF),
        (2, PIECE + 1),
        (2, PIECE - 1),
        (2, 0),
        (40, PIECE),
        (0, PIECE),
        (4, PIECE),
        (STREAM_END, 8),
        (STREAM_END, 0),
    ],
    ids=[
        "piece beyond the blob",
        "absurd piece",
        "another stripe",
        "giant length",
        "a byte too many",
        "a byte too few",
        "empty",
        "last piece with full length",
        "a piece again",
        "a piece that have held",
        "closing frame with a length",
        "closing frame too early",
    ],
)
async def test_frames_that_were_not_asked_for_break_the_protocol_in_bounded_memory(
    receiver: Receiver, blob: SampleBlob, raw_peer: StartPeer, head: tuple[int, int]
) -> None:
    def behave(connection: socket.socket) -> None:
        connection.sendall(HEAD + frame(0, blob.piece(0)) + struct.pack(">II", *head))
        for _ in range(200):
            connection.sendall(bytes(PIECE))

    peer = raw_peer(behave)
    receiver.copy.have.add(4)
    tracemalloc.start()
    try:
        reason, detail, received = await outcome(receiver, peer, stripe=0, stripes=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (reason, received) == ("protocol", [0]), detail
    assert receiver.copy.path.stat().st_size == PIECE
    assert peak < 2 << 20


@pytest.mark.parametrize(("named", "expected"), [(1, 1), (3, 3), (0, None), (5, None), (1 << 30, None)])
async def test_a_piece_that_was_not_asked_for_is_none_under_way(
    receiver: Receiver, raw_peer: StartPeer, named: int, expected: int | None
) -> None:
    """Other sources are not asked for what is under way, so a source could keep any piece from this
    host by naming it: one of another stripe (0), one that is here (5)."""
    over = threading.Event()

    def behave(connection: socket.socket) -> None:
        connection.sendall(HEAD + struct.pack(">II", named, PIECE) + b"x")
        over.wait(30)

    have = PieceSet(receiver.blob.layout.count)
    have.add(5)
    stream = receiver.open(raw_peer(behave).port, stripe=1, stripes=2, have=have.to_bytes())
    try:
        while stream.received_bytes < len(HEAD) + 9 or not stream.responded:
            await asyncio.sleep(0.01)
        assert stream.receiving == expected
    finally:
        over.set()
        await receiver.closed(stream)


async def test_a_peer_that_acknowledges_nothing_any_more_is_told_as_such(
    receiver: Receiver, blob: SampleBlob, raw_peer: StartPeer
) -> None:
    """The kernel gives the connection up: the peer may have sent everything or nothing by then.
    Here the peer's window is full, so that what this side sends stays unacknowledged."""
    over = threading.Event()

    def behave(connection: socket.socket) -> None:
        connection.sendall(HEAD + frame(0, blob.piece(0)))
        over.wait(30)

    stream = receiver.open(raw_peer(behave).port)
    try:
        await receiver.until(lambda: receiver.received(stream) == [0])
        connection = stream._stream.connection
        assert connection is not None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 200)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection.send(bytes(1 << 20), socket.MSG_DONTWAIT)
        closed = await receiver.closed(stream)
    finally:
        over.set()
    assert (closed.reason, closed.detail) == ("reset", "parent does not answer any more")


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\n\r\n",
        HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n",
        HEAD[:-2] + b"Content-Length: 7\r\n\r\n",
        HEAD[:-2] + b" folded: line\r\n\r\n",
        HEAD[:-2] + b"no colon\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (64 << 10),
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20000,
    ],
    ids=lambda answer: repr(answer[-20:]),
)
async def test_an_answer_that_is_no_stream_breaks_the_protocol(
    receiver: Receiver, raw_peer: StartPeer, answer: bytes
) -> None:
    reason, detail, received = await outcome(receiver, raw_peer(lambda connection: connection.sendall(answer)))
    assert (reason, received) == ("protocol", [])
    assert len(detail) < 400


async def test_no_answer_at_all_is_short(receiver: Receiver, raw_peer: StartPeer) -> None:
    for part in (b"", b"HTTP/1.1 200 O", HEAD[:-1]):
        reason, _, _ = await outcome(receiver, raw_peer(lambda connection, part=part: connection.sendall(part)))  # type: ignore[misc]
        assert reason == "short"


async def test_an_answer_in_crumbs_loses_no_byte(receiver: Receiver, blob: SampleBlob, raw_peer: StartPeer) -> None:
    """Head and frames cut anywhere, also within the blank line, are put together again."""

    def behave(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = HEAD + frame(40, blob.piece(40)) + END
        for start in range(110):
            connection.sendall(data[start : start + 1])
            time.sleep(0.001)
        connection.sendall(data[110:])

    for piece in range(40):
        receiver.copy.have.add(piece)
    reason, detail, received = await outcome(receiver, raw_peer(behave))
    assert (reason, received) == ("done", [40]), detail
    assert receiver.copy.path.read_bytes()[40 * PIECE :] == blob.piece(40)


@pytest.mark.parametrize(
    ("error", "reason", "kind"),
    [
        (NotFound("blob sha256:0 is not here"), "missing", NotFound),
        (Unavailable("all seats are taken"), "busy", Unavailable),
        (Refused("not for you"), "denied", Refused),
        (Unauthenticated("not without a certificate"), "denied", Refused),
        (P2PDistError("out of luck"), "refused", P2PDistError),
    ],
)
async def test_a_refusal_carries_the_problem(
    receiver: Receiver, start_app, error: P2PDistError, reason: str, kind: type[P2PDistError]
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise error

    closed = await receiver.closed(receiver.open(await start_app("POST", "/v1/streams", handler)))
    assert closed.reason == reason
    assert error.what in closed.detail
    assert isinstance(closed.error, kind)


async def test_too_many_requests_without_a_problem_document_is_busy(receiver: Receiver, raw_peer: StartPeer) -> None:
    for extra in (b"", b"Content-Type: application/problem+json\r\nContent-Length: 99999999\r\n"):
        answer = b"HTTP/1.1 429 Too Many Requests\r\n" + extra + b"\r\n"
        reason, _, _ = await outcome(receiver, raw_peer(lambda connection, answer=answer: connection.sendall(answer)))  # type: ignore[misc]
        assert reason == "busy"


async def test_a_port_where_nobody_listens_refuses(receiver: Receiver) -> None:
    port = free_port()
    closed = await receiver.closed(receiver.open(port))
    assert closed.reason == "refused"
    assert f"127.0.0.1:{port}" in closed.detail


async def test_an_address_that_is_none_refuses(receiver: Receiver) -> None:
    for address in ("nonsense", "::1:80", "name-that-is-not.invalid:80", "a:0"):
        assert (await receiver.closed(receiver.open(0, address=address))).reason == "refused"


async def test_a_stream_that_may_have_no_thread_fails_and_says_so(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was raised instead ended the ticks of the pull that opened the stream, which then waited
    for ever."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stream = receiver.open(1, start=False)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        stream.start()
    await receiver.until(lambda: bool(receiver.events))
    (closed,) = receiver.events
    assert isinstance(closed, StreamClosed) and closed.reason == "failed"
    assert closed.error is not None and "thread" in closed.error.what and "pids.max" in closed.error.remedy
    assert stream.join(0)


@pytest.mark.slow
async def test_a_host_that_does_not_answer_refuses_after_the_timeout_and_close_does_not_wait_for_it(
    receiver: Receiver,
) -> None:
    """A listener whose backlog is full drops connection requests, as a dead host does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        filling = []
        for _ in range(3):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            filling.append(filler)
        await asyncio.sleep(0.05)
        port = listener.getsockname()[1]
        waiting, closing = receiver.open(port, start=False), receiver.open(port, start=False)
        waiting._connect_timeout_s = 2.0
        waiting.start()
        closing.start()
        await asyncio.sleep(0.1)
        closing.close()
        refused = asyncio.create_task(receiver.closed(waiting))
        assert (await receiver.closed(closing)).reason == "closed"
        assert not refused.done(), "it was not waited for"
        assert (await refused).reason == "refused"
        for filler in filling:
            filler.close()


async def test_the_request_is_what_the_protocol_says(receiver: Receiver, raw_peer: StartPeer) -> None:
    peer = raw_peer(lambda connection: connection.sendall(HEAD))
    await outcome(receiver, peer, stripe=1, stripes=4)
    head, _, body = peer.request.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /v1/streams HTTP/1.1"
    assert f"Host: 127.0.0.1:{peer.port}".encode() in head
    assert f"Content-Length: {len(body)}".encode() in head
    wanted = json.loads(body)
    assert (wanted["stripe"], wanted["stripes"], wanted["host"]) == (1, 4, "child")
    assert wanted["blob"] == receiver.blob.digest


async def test_an_ipv6_peer_is_reached(receiver: Receiver, blob: SampleBlob, raw_peer: StartPeer) -> None:
    peer = RawPeer(lambda c: c.sendall(HEAD + frame(0, blob.piece(0))), address="::1")
    try:
        stream = receiver.open(0, address=f"[::1]:{peer.port}")
        assert (await receiver.closed(stream)).reason == "short"
        assert receiver.received(stream) == [0]
    finally:
        peer.stop()
