"""`p2pdist agent --transport`: what is said of settings that cannot be used, and of a port that is
taken."""

from __future__ import annotations

import re
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
from ports import free_pair, free_port

TLS = ["--tls-cert", "a.pem", "--tls-key", "b.pem", "--tls-ca", "c.pem"]


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="transport-") as name:
        yield Path(name)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens at; the one before it is free."""
    with socket.create_server(("127.0.0.1", free_pair() + 1)) as listener:
        yield int(listener.getsockname()[1])


def words(place: Path, *more: str, port: int = 0) -> list[str]:
    if not port:
        port = free_port()
    places = ["--listen", f"127.0.0.1:{port}", "--store", str(place / "store"), "--socket", str(place / "s")]
    return ["agent", "--no-discovery", *places, *more]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([*TLS, "--transport", "swarm"], "BitTorrent peers show no certificates"),
        ([*TLS, "--transport", "auto"], "BitTorrent peers show no certificates"),
        (["--transport", "trees", "--bt-listen", "127.0.0.1:7072"], "--bt-listen is of no use"),
        (["--bt-listen", "7072"], "BitTorrent cannot listen on 7072"),
        (["--bt-listen", "no.such.host.invalid:7072"], "BitTorrent cannot listen on no.such.host.invalid:7072"),
        (["--transport", "pigeons"], "pigeons"),
    ],
)
def test_settings_that_cannot_be_used_are_told(place: Path, more: list[str], told: str) -> None:
    ended = programs.run(*words(place, *more), cwd=place)
    assert ended.returncode == 2, ended.stderr
    assert told in ended.stderr
    assert not (place / "store").exists()


def test_a_port_that_was_named_and_is_taken_ends_the_agent(place: Path, taken: int) -> None:
    more = ("--bt-listen", f"127.0.0.1:{taken}")
    ended = programs.run(*words(place, *more))
    assert ended.returncode == 1
    assert f"BitTorrent cannot listen on 127.0.0.1 port {taken}" in ended.stderr
    assert "--bt-listen" in ended.stderr


def test_without_the_next_port_an_agent_takes_a_free_one(place: Path, taken: int) -> None:
    """Nobody named it."""
    log = place / "log"
    with log.open("wb") as output:
        agent = programs.start(*words(place, port=taken - 1), stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 60
        while "host=" not in log.read_text():
            assert agent.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        said = re.search(
            rf"BitTorrent listens on port (\d+) of 127.0.0.1, since port {taken} is taken", log.read_text()
        )
        assert said is not None, log.read_text()
        with socket.create_connection(("127.0.0.1", int(said[1])), timeout=60):
            pass
    finally:
        agent.terminate()
        assert agent.wait(60) == 0, log.read_text()


def test_an_agent_whose_socket_is_taken_makes_no_store(place: Path) -> None:
    """Another one answers there."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place / "taken.sock"))
        other.listen(1)
        ended = programs.run(*words(place, "--socket", str(place / "taken.sock")))
    assert ended.returncode == 1 and "another agent answers on" in ended.stderr
    assert not (place / "store").exists()
