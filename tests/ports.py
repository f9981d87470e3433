"""Ports for the processes of tests: none of those that the kernel gives to outgoing connections,
which could take a port between its choice and its use."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A free port of loopback."""
    while True:
        port = random.randrange(10000, 20000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def free_pair() -> int:
    """A port that is free together with the next one, where an agent's BitTorrent peers connect."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


def free_ports(count: int) -> int:
    """The first of so many free ports, one after the other."""
    while True:
        first = random.randrange(20000, 32000)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
