"""`p2pdist agent` with certificates, as a process: peers over TLS only, the Unix socket as ever,
certificates renewed by SIGHUP."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
from ports import free_port

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))
from authority import Authority

from p2pdist.transfer.tls import Tls


def ask(connection: socket.socket) -> bytes:
    connection.settimeout(60)
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")
    answer = b""
    while part := connection.recv(4096):
        answer += part
    return answer


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tls-") as name:
        yield Path(name)


def test_an_agent_with_certificates(place: Path) -> None:
    authority = Authority(place)
    files, port, path = authority.issue("agent"), free_port(), place / "agent.sock"
    peer = Tls(authority.issue("peer"))
    words = ["--listen", f"127.0.0.1:{port}", "--store", place / "store", "--socket", path]
    words += ["--tls-cert", files.certificate, "--tls-key", files.key, "--tls-ca", files.authority]
    words += ["--upload-limit", "1Gbit/s", "--download-limit", "100MB/s", "--preseed-limit", "10MB/s"]
    agent = programs.start("agent", *words, stderr=subprocess.PIPE, text=True)
    assert agent.stderr is not None
    try:
        while "listening" not in (line := agent.stderr.readline()):
            assert line, "the agent has ended"

        def shown() -> bytes | None:
            plain = socket.create_connection(("127.0.0.1", port), 10)
            with peer.client.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
                assert b"200 OK" in ask(connection)
                return connection.getpeercert(binary_form=True)

        before = shown()
        with socket.create_connection(("127.0.0.1", port), 10) as plain:
            try:
                answer = ask(plain)
            except ConnectionError:
                answer = b""
            assert b"HTTP" not in answer
        with socket.socket(socket.AF_UNIX) as local:
            local.connect(str(path))
            assert b"200 OK" in ask(local), "the Unix socket is plain"
        stranger = ssl.create_default_context(cafile=str(authority.path))
        plain = socket.create_connection(("127.0.0.1", port), 10)
        with pytest.raises(OSError), stranger.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            if not ask(connection):
                raise ConnectionError("closed without an answer")

        renewed = authority.issue("renewed")
        shutil.copy(renewed.certificate, files.certificate)
        shutil.copy(renewed.key, files.key)
        os.kill(agent.pid, signal.SIGHUP)
        deadline = time.monotonic() + 60
        while shown() == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        agent.terminate()
        try:
            agent.wait(60)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
        agent.stderr.close()
    assert agent.returncode == 0


def test_an_agent_says_that_there_is_no_workload_api(place: Path) -> None:
    words = ["--listen", f"127.0.0.1:{free_port()}", "--store", str(place / "store"), "--socket", str(place / "s")]
    environment = {**os.environ, "SPIFFE_ENDPOINT_SOCKET": f"unix://{place}/none.sock"}
    ended = programs.run("agent", "--spiffe", *words, env=environment)
    assert ended.returncode == 5 and f"no Workload API at {place}/none.sock" in ended.stderr, ended.stderr
    assert "Start its agent before this one" in ended.stderr
    assert not (place / "store" / "lock").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tls-cert", "a.pem"], "--tls-key"),
        (["--tls-cert", "a.pem", "--tls-key", "b.pem", "--tls-ca", "c.pem"], "cannot be used"),
        (["--spiffe", "unix:///run/x.sock", "--tls-cert", "a.pem", "--tls-key", "b.pem"], "only --tls-ca goes with"),
        (["--spiffe", "unix:///run/x.sock", "--join-file", "a"], "only --tls-ca goes with"),
        (["--spiffe", "http://spire"], "no address of a Workload API"),
        (["--spiffe"], "SPIFFE_ENDPOINT_SOCKET, which is not set"),
        (["--trust-domain", "prod"], "goes with --spiffe"),
        (["--upload-limit", "fast"], "no rate"),
        (["--preseed-limit", "0MB/s"], "no rate"),
    ],
)
def test_settings_that_cannot_be_used_are_told(place: Path, words: list[str], told: str) -> None:
    words += ["--listen", f"127.0.0.1:{free_port()}", "--store", str(place / "store"), "--socket", str(place / "s")]
    ended = programs.run("agent", *words, cwd=place)
    assert ended.returncode == 2 and told in ended.stderr
    assert not (place / "store" / "lock").exists()
