"""The send buffer of a stream: small at first, grown with the rate, never shrunk; and how a stream
over a long path begins."""

from __future__ import annotations

import logging
import socket
import threading
import time

import pytest

from p2pdist.transfer.stream import sendfile
from p2pdist.transfer.stream.sendfile import (
    CHECK_BYTES,
    COVER_MAX,
    SEND_BUFFER_MAX,
    SEND_BUFFER_MIN,
    SendBuffer,
    Start,
    first_size,
    size_for,
)


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
        reader.join(60)


def test_a_long_path_is_filled_from_the_start_and_a_short_one_begins_small() -> None:
    """A window that holds less than rate times round trip would hold the rate down."""
    assert first_size(0.0) == first_size(0.005) == SEND_BUFFER_MIN
    for round_trip_s in (0.02, 0.08, 0.2):
        assert first_size(round_trip_s) >= 12.5e6 * round_trip_s
    assert first_size(10.0) == SEND_BUFFER_MAX


@pytest.mark.parametrize("round_trip_s", [0.0, 0.001, 0.02, 0.08, 0.3])
def test_no_buffer_is_smaller_than_what_the_rate_fills_in_a_round_trip(round_trip_s: float) -> None:
    sizes = [size_for(rate_bytes_s, round_trip_s) for rate_bytes_s in (0.0, 1e4, 1e6, 12.5e6, 100e6)]
    assert sizes == sorted(sizes) and sizes[0] == first_size(round_trip_s)
    for rate_bytes_s, size in zip((0.0, 1e4, 1e6, 12.5e6, 100e6), sizes, strict=True):
        assert size >= min(SEND_BUFFER_MAX, rate_bytes_s * round_trip_s)


class _Far(SendBuffer):
    """A real connection whose round trips take what a test says: loopback has none that is long."""

    round_trip_s = 0.08

    def _round_trip_s(self) -> float:
        return self.round_trip_s


def test_a_stream_over_a_long_path_begins_with_room_and_loses_it_once_the_path_is_short() -> None:
    client, server = connected()
    with client, server:
        buffer = _Far(client)
        assert buffer.size == first_size(0.08)
        assert granted(client) > SEND_BUFFER_MIN  # as much as net.core.wmem_max allows to other users than root
        time.sleep(0.3)
        buffer.sent(CHECK_BYTES)
        assert buffer.size == first_size(0.08)
        buffer.round_trip_s = 0.001
        time.sleep(0.3)
        buffer.sent(CHECK_BYTES)
        assert buffer.size == granted(client) < first_size(0.08)


def control(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.fixture
def reno(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """As START_CONTROL: every kernel has it and allows it to every user, which is not so of BBR."""
    monkeypatch.setattr(sendfile, "START_CONTROL", b"reno")
    return b"reno"


def test_a_long_path_begins_with_a_control_that_fills_it_and_goes_on_with_that_of_the_host(
    reno: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = connected()
    with client, server:
        usual = control(client)
        monkeypatch.setattr(sendfile, "START_S", 3600.0)
        buffer = _Far(client)
        buffer.sent(1)
        assert control(client) == reno
        buffer.end_start()
        assert control(client) == usual
        monkeypatch.setattr(sendfile, "START_S", 0.0)
        buffer = _Far(client)
        assert control(client) == reno
        buffer.sent(1)
        assert control(client) == usual


def test_a_path_that_turns_out_short_has_the_control_of_the_host(reno: bytes) -> None:
    client, server = connected()
    with client, server:
        usual = control(client)
        SendBuffer(client)
        assert control(client) == usual
        buffer = _Far(client)
        assert control(client) == reno
        buffer.round_trip_s = 0.001
        buffer.sent(CHECK_BYTES)
        assert control(client) == usual


def test_a_kernel_that_refuses_it_is_named_once_and_the_stream_begins_as_others_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sendfile, "START_CONTROL", b"nonesuch")
    monkeypatch.setattr(Start, "_refused", False)
    client, server = connected()
    with client, server, caplog.at_level(logging.INFO):
        usual = control(client)
        _Far(client).end_start()
        buffer = _Far(client)
        buffer.sent(CHECK_BYTES)
        buffer.end_start()
        assert control(client) == usual
    assert sum("nonesuch" in record.getMessage() for record in caplog.records) == 1
