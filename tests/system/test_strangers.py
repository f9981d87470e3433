"""Whole processes: strangers hold connections, streams and the store of an agent, and those that
work with it notice nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
from site_rig import Agent, Site, until

MIB = 1 << 20
HALF = b"GET /healthz HTTP/1.1\r\nHost: agent\r\nX-Half: "


@contextlib.contextmanager
def connections(agent: Agent, count: int, begin: bytes, port: int = 0) -> Iterator[list[socket.socket]]:
    """Connections to an agent that begin to say something, and stay."""
    opened = []
    try:
        for _ in range(count):
            with contextlib.suppress(ConnectionRefusedError):  # the BitTorrent port, while its session starts
                opened.append(socket.create_connection(("127.0.0.1", port or agent.port), timeout=30))
        for connection in opened:
            with contextlib.suppress(ConnectionError):  # those that the agent has closed already
                connection.sendall(begin)
        yield opened
    finally:
        for connection in opened:
            connection.close()


def descriptors(agent: Agent) -> int:
    assert agent.process is not None
    return len(os.listdir(f"/proc/{agent.process.pid}/fd"))


@pytest.mark.parametrize("begin", [b"", HALF, b"POST /v1/streams HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n{"])
def test_half_requests_leave_the_socket_free(site: Site, begin: bytes) -> None:
    """400 connections from one address, where the process may have 256 files open."""
    digest = site.publish(2 * MIB)
    agent = Agent(site, "h0")
    agent.descriptors = 256
    agent.start()
    with connections(agent, 400, begin), connections(agent, 100, b"", agent.port + 1):
        output = site.directory / "output"
        code, _, errors = site.command("blob", "pull", digest, "-o", str(output), "--socket", str(agent.socket))
        assert code == 0, errors
        assert output.stat().st_size == 2 * MIB
        until(lambda: descriptors(agent) < 256 - 64)
        assert agent.metric("p2pdist_agent_received_bytes_total") == 2 * MIB
