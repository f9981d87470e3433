"""Images that `run` reads through the agent's socket without root."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from p2pdist.mount.lazy import remote
from p2pdist.mount.squashfs import RemoteImage

CONTENT = bytes(range(256)) * 64
IMAGE = RemoteImage(f"sha256:{'0' * 64}", len(CONTENT))
HALF = len(CONTENT) // 2


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """The socket of an agent that answers the first request of its connection, and then no more;
    its second connection gets an answer in bits."""
    path, connections, bits = tmp_path / "sock", list[socket.socket](), list[threading.Thread]()

    def answer() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connections.append(connection)
            connection.recv(1 << 16)
            if len(connections) == 1:
                head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {HALF}\r\n\r\n"
                connection.sendall(head.encode() + CONTENT[:HALF])
            else:
                bits.append(threading.Thread(target=answer_in_bits, args=(connection,)))
                bits[-1].start()

    def answer_in_bits(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.sendall(f"HTTP/1.1 206 Partial Content\r\nContent-Length: {HALF}\r\n\r\n".encode())
            for number in range(HALF):
                connection.sendall(CONTENT[number : number + 1])
                time.sleep(0.01)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield path
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    for sender in bits:
        sender.join(100)
    for connection in connections:
        connection.close()


def test_an_answer_that_comes_in_bits_waits_no_longer(agent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bit of it would have begun the limit anew."""
    files = remote._Files(str(agent), [IMAGE])
    assert files.read("/1", HALF, 0, None) == CONTENT[:HALF]
    while not files._kept.empty():
        files._kept.get_nowait().close()
    monkeypatch.setattr(remote, "LIMIT_S", 0.5)
    with pytest.raises(OSError, match="has not come"):
        files.read("/1", HALF, HALF, None)


def test_a_read_waits_no_longer_than_its_limit(agent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = remote._Files(str(agent), [IMAGE])
    assert files.read("/1", HALF, 0, None) == CONTENT[:HALF]
    monkeypatch.setattr(remote, "LIMIT_S", 0.5)
    began = time.monotonic()
    with pytest.raises(OSError, match="has not come") as raised:  # over the connection that was kept
        files.read("/1", HALF, HALF, None)
    assert raised.value.errno == errno.EIO
    assert time.monotonic() - began < 30, "each request waited for a whole limit"


def test_connections_that_the_agent_has_ended_cost_one_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()
    monkeypatch.setattr(remote, "PAUSE_S", 0.0)
    monkeypatch.setattr(time, "sleep", pauses.append)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "sock"))
        server.listen()
        files = remote._Files(str(tmp_path / "sock"), [IMAGE])
        for _ in range(5):
            idle = remote._Connection(str(tmp_path / "sock"))
            idle.limit(10)
            idle.connect()
            server.accept()[0].close()
            files._kept.put_nowait(idle)

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(1 << 16)
                head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {HALF}\r\n\r\n"
                connection.sendall(head.encode() + CONTENT[:HALF])

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert files.read("/1", HALF, 0, None) == CONTENT[:HALF]
        thread.join(10)
    assert len(pauses) == 1
