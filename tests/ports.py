"""Ports for the processes of tests: none of those that the kernel gives to outgoing connections,
which could take a port between its choice and its use, and none that another test has just chosen,
in whichever process: a port is claimed by a socket in the abstract namespace of its number
(unix(7)), which ends with the process that chose it."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import deque

CLAIMS_MAX = 256
"""Claims of this process that are kept; by then its earlier ports are bound, or used no more."""

_claims: deque[socket.socket] = deque()


def free_port() -> int:
    """A free port of loopback."""
    while True:
        port = random.randrange(10000, 20000)
        if _claim(port):
            return port


def free_pair() -> int:
    """A port that is free together with the next one, where an agent's BitTorrent peers connect."""
    return free_ports(2)


def free_ports(count: int) -> int:
    """The first of so many free ports, one after the other."""
    while True:
        first = random.randrange(20000, 32000)
        if all(_claim(port) for port in range(first, first + count)):
            return first


def _claim(port: int) -> bool:
    """Whether the port is free, and no other test's from now on."""
    claim = socket.socket(socket.AF_UNIX)
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        claim.bind(f"\0p2pdist-test-port-{port}")
        _claims.append(claim)
        if len(_claims) > CLAIMS_MAX:
            _claims.popleft().close()
        return True
    claim.close()
    return False
