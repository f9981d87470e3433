"""Connections that streams leave in order and others take up: what is saved, and what may be wrong
with one that has waited."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from authority import Authority
from stream_rig import Pieces, RawPeer, Receiver, SampleBlob, Server, StartApp

from p2pdist.model.messages import STREAM_END
from p2pdist.model.pieces import PieceSet
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.stream import client
from p2pdist.transfer.stream import connections as stream_connections
from p2pdist.transfer.stream.connections import ConnectionPool
from p2pdist.transfer.stream.frames import stream_length
from p2pdist.transfer.tls import Tls

END = struct.pack(">II", STREAM_END, 0)

StartPeer = Callable[[Callable[[socket.socket], None]], RawPeer]


@pytest.fixture
def connections() -> Iterator[ConnectionPool]:
    made = ConnectionPool()
    yield made
    made.close()


def all_but(blob: SampleBlob, *pieces: int) -> bytes:
    found = PieceSet.full(blob.layout.count)
    for piece in pieces:
        found.discard(piece)
    return found.to_bytes()


def callers(server: Server) -> int:
    """How many connections streams were asked for over."""
    return len({id(each) for each in server.sockets})


async def test_streams_one_after_the_other_share_a_connection(
    server: Server, receiver: Receiver, blob: SampleBlob, connections: ConnectionPool
) -> None:
    for piece in (3, 1, 40, 7):
        stream = receiver.open(server.port, have=all_but(blob, piece), connections=connections)
        assert (await receiver.closed(stream)).reason == "done"
        assert receiver.received(stream) == [piece]
    assert callers(server) == 1 and server.ended == 4


async def test_streams_of_one_moment_have_a_connection_each(
    server: Server, receiver: Receiver, blob: SampleBlob, connections: ConnectionPool
) -> None:
    for first in (0, 10):
        streams = [receiver.open(server.port, have=all_but(blob, first + n), connections=connections) for n in range(6)]
        assert [(await receiver.closed(stream)).reason for stream in streams] == ["done"] * 6
    assert callers(server) == 6


async def test_over_tls_too(
    receiver: Receiver, blob: SampleBlob, start_app: StartApp, tmp_path: Path, connections: ConnectionPool
) -> None:
    tls, server = Tls(Authority(tmp_path).issue()), Server(blob)
    server.port = await start_app("POST", "/v1/streams", server.streams, ServerContext(tls))
    for piece in range(5):
        stream = receiver.open(server.port, have=all_but(blob, piece, piece + 20), connections=connections, tls=tls)
        closed = await receiver.closed(stream)
        assert closed.reason == "done", closed
    assert callers(server) == 1


async def test_who_needs_nothing_more_still_leaves_the_connection_in_order(
    server: Server, receiver: Receiver, blob: SampleBlob, connections: ConnectionPool
) -> None:
    """The download core closes a stream as soon as the last piece is there, which is before its
    closing frame is."""
    available = {0}
    server.make = lambda layout, wanted: Pieces(layout, wanted, available=available)
    for number in (0, 1, 2):
        available.add(number)
        stream = receiver.open(server.port, have=all_but(blob, number), connections=connections)
        await receiver.until(lambda stream=stream, number=number: receiver.received(stream) == [number])  # type: ignore[misc]
        stream.finish_piece_and_close()
        stream.close()
        await receiver.closed(stream)
    assert callers(server) == 1


async def test_a_stream_that_is_closed_early_takes_its_connection_along(
    server: Server, receiver: Receiver, blob: SampleBlob, connections: ConnectionPool
) -> None:
    server.make = lambda layout, wanted: Pieces(layout, wanted, available={0})
    stream = receiver.open(server.port, have=all_but(blob, 0, 1), connections=connections)
    await receiver.until(lambda: receiver.received(stream) == [0])
    stream.finish_piece_and_close()
    assert (await receiver.closed(stream)).reason == "closed"
    assert connections.take(stream.source.address) is None


async def test_for_a_large_blob_the_end_of_the_connection_ends_the_stream(
    server: Server, receiver: Receiver, connections: ConnectionPool
) -> None:
    stream = receiver.open(server.port, stripe=1, stripes=2, connections=connections)
    assert (await receiver.closed(stream)).reason == "done"
    assert connections.take(stream.source.address) is None


async def test_a_connection_that_ended_while_it_waited_is_replaced(
    server: Server, receiver: Receiver, blob: SampleBlob, connections: ConnectionPool
) -> None:
    first = receiver.open(server.port, have=all_but(blob, 0), connections=connections)
    await receiver.closed(first)
    with server.sockets[0].dup() as theirs:
        theirs.shutdown(socket.SHUT_RDWR)
    await asyncio.sleep(0.05)
    second = receiver.open(server.port, have=all_but(blob, 1), connections=connections)
    assert (await receiver.closed(second)).reason == "done"
    assert callers(server) == 2


async def test_one_that_ends_just_when_it_is_used_is_replaced(
    server: Server, receiver: Receiver, blob: SampleBlob, connections: ConnectionPool
) -> None:
    """It looks alive when it is taken, and what was asked over it is never answered."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    connections.give(f"127.0.0.1:{server.port}", ours)
    stream = receiver.open(server.port, have=all_but(blob, 5), connections=connections)
    assert await asyncio.to_thread(theirs.recv, 10)
    theirs.close()
    listener.close()
    assert (await receiver.closed(stream)).reason == "done"
    assert receiver.received(stream) == [5]


async def test_an_answer_of_another_length_breaks_the_protocol(
    receiver: Receiver, blob: SampleBlob, raw_peer: StartPeer, connections: ConnectionPool
) -> None:
    for length in (stream_length(blob.layout, [4]) + 1, 0, 10**30):
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.p2pdist.stream\r\nContent-Length: {length}\r\n\r\n"
        peer = raw_peer(lambda connection, head=head: connection.sendall(head.encode()))  # type: ignore[misc]
        stream = receiver.open(peer.port, have=all_but(blob, 4), connections=connections)
        assert (await receiver.closed(stream)).reason == "protocol"


@pytest.mark.parametrize("tail", [b"", END[:5]], ids=["nothing", "a part"])
async def test_a_stream_without_its_end_is_not_waited_for(
    receiver: Receiver,
    blob: SampleBlob,
    raw_peer: StartPeer,
    connections: ConnectionPool,
    monkeypatch: pytest.MonkeyPatch,
    tail: bytes,
) -> None:
    """The piece counts at once; the connection is not connect."""
    monkeypatch.setattr(client, "END_WAIT_S", 0.1)
    length = stream_length(blob.layout, [4])
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.p2pdist.stream\r\nContent-Length: {length}\r\n\r\n"
    data = head.encode() + struct.pack(">II", 4, blob.layout.length(4)) + blob.piece(4) + tail

    def behave(connection: socket.socket) -> None:
        connection.sendall(data)
        connection.recv(1)

    peer = raw_peer(behave)
    stream = receiver.open(peer.port, have=all_but(blob, 4), connections=connections)
    await receiver.until(lambda: receiver.received(stream) == [4])
    assert (await receiver.closed(stream)).reason == "short"
    assert connections.take(stream.source.address) is None


def pairs(count: int) -> list[tuple[socket.socket, socket.socket]]:
    return [socket.socketpair() for _ in range(count)]


def is_open(theirs: socket.socket) -> bool:
    theirs.setblocking(False)
    try:
        return theirs.recv(1) != b""
    except BlockingIOError:
        return True


def test_connections_wait_up_to_a_number_and_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_connections, "PER_PEER_MAX", 2)
    monkeypatch.setattr(stream_connections, "CONNECTIONS_MAX", 3)
    made, ends = ConnectionPool(), pairs(5)
    for number, address in enumerate(("a:1", "a:1", "a:1", "b:1", "c:1")):
        made.give(address, ends[number][0])
    assert [is_open(theirs) for _, theirs in ends] == [True, True, False, True, False]
    assert made.take("a:1") is ends[1][0], "the one that was used last"
    assert made.expire(), "two still wait"
    later = time.monotonic() + stream_connections.IDLE_S
    monkeypatch.setattr("p2pdist.transfer.stream.connections.time.monotonic", lambda: later)
    assert not made.expire()
    assert [is_open(theirs) for _, theirs in ends] == [False, True, False, False, False]
    made.give("d:1", ends[1][0])
    made.close()
    assert not is_open(ends[1][1])


def test_one_that_says_what_nobody_asked_for_is_not_used() -> None:
    made, ((ours, theirs),) = ConnectionPool(), pairs(1)
    made.give("a:1", ours)
    theirs.send(b"x")
    assert made.take("a:1") is None
    theirs.close()
