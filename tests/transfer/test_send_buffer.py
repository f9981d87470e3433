"""The send buffer of a stream: small at first, grown with the rate, never shrunk."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from p2pdist.transfer.stream import sendfile
from p2pdist.transfer.stream.sendfile import CHECK_BYTES, COVER_MAX, SEND_BUFFER_MAX, SEND_BUFFER_MIN, SendBuffer


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


def granted(connection: socket.socket) -> int:
    """What the kernel gave; it doubles what it was asked for (socket(7))."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2


def test_a_stream_begins_small_and_a_slow_one_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sendfile, "CHECK_BYTES", 64 << 10)
    client, server = connected()
    with client, server:
        buffer = SendBuffer(client)
        assert granted(client) == SEND_BUFFER_MIN
        time.sleep(0.3)
        buffer.sent(64 << 10)
        assert buffer.size == SEND_BUFFER_MIN == granted(client)


def test_a_stream_that_is_neither_covers_the_pauses_of_its_host_and_no_more() -> None:
    client, server = connected()
    with client, server:
        buffer = SendBuffer(client)
        time.sleep(0.3)
        buffer.sent(CHECK_BYTES)
        assert buffer.size == COVER_MAX == granted(client)


def test_a_fast_stream_gets_more_and_keeps_it() -> None:
    client, server = connected()
    with client, server:
        reader = threading.Thread(target=lambda: all(iter(lambda: server.recv(1 << 20), b"")))
        reader.start()
        buffer = SendBuffer(client)
        block = b"x" * (256 << 10)
        for _ in range(64):
            client.sendall(block)
            buffer.sent(len(block))
        grown = buffer.size
        assert SEND_BUFFER_MIN < grown <= SEND_BUFFER_MAX
        assert granted(client) > SEND_BUFFER_MIN
        time.sleep(0.5)
        buffer.sent(CHECK_BYTES)
        assert buffer.size == grown
        client.shutdown(socket.SHUT_WR)
        reader.join(10)
