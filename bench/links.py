"""Hosts as network namespaces on one bridge, each with a limit on what it sends and receives: for
benchmarks that start programs of their own. Needs root, iproute2 and veth."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.processes import remove_network, undisturbed

BURST_KIB, QUEUE_MS, QUEUE_BYTES_MIN = 256, 50, 256 << 10
"""A token bucket cuts every segment that is larger than its burst, and one of 64 KiB counts with
the headers of all its frames: a burst of 64 KiB cost two thirds of the processors. The rate is the
same (95.7 and 96.0 of 100 Mbit/s over one TCP stream)."""


@dataclass
class Node:
    """One namespace."""

    name: str
    address: str
    namespace: str
    mbit: float
    """What it sends and receives at most; 0 for no limit."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def words(self, *words: str) -> list[str]:
        """A command that runs in there."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def sent_bytes(self) -> int:
        """Since the namespace was made, with the headers of segments, which may be larger than
        frames."""
        done = _ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth0")
        return int(json.loads(done)[0]["stats64"]["tx"]["bytes"])


class Links:
    """A bridge, and the nodes on it."""

    def __init__(self, prefix: str, network: str = "10.78", first: int = 1) -> None:
        """`first`: the number of the first node, for bridges that are joined."""
        self.prefix, self._network, self._first = prefix, network, first
        self.nodes: list[Node] = []
        self.bridge = f"{prefix}sw"
        """The namespace with the bridge."""

    def add(self, name: str, mbit: float) -> Node:
        """Make a node."""
        number = len(self.nodes) + self._first
        node = Node(name, f"{self._network}.{number // 250}.{number % 250 + 1}", f"{self.prefix}{name}", mbit)
        _ip("netns", "add", node.namespace)
        port = f"p{number}"
        _ip("link", "add", "eth0", "netns", node.namespace, "type", "veth", "peer", "name", port, "netns", self.bridge)
        _ip("-n", self.bridge, "link", "set", port, "master", "br0", "up")
        for words in (
            ["addr", "add", f"{node.address}/16", "dev", "eth0"],
            ["link", "set", "lo", "up"],
            ["link", "set", "eth0", "up"],
        ):
            _ip("-n", node.namespace, *words)
        for namespace, device in ((node.namespace, "eth0"), (self.bridge, port)) if mbit else ():
            limit = max(int(mbit * 1e6 / 8 * QUEUE_MS / 1e3), QUEUE_BYTES_MIN)
            shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", f"{BURST_KIB}kb", "limit", str(limit)]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *shape)
        # Per route, since a namespace may not choose any other algorithm for itself.
        _ip(
            "-n",
            node.namespace,
            "route",
            "replace",
            f"{self._network}.0.0/16",
            "dev",
            "eth0",
            "src",
            node.address,
            "congctl",
            "cubic",
        )
        self.nodes.append(node)
        return node

    def make(self) -> None:
        """The bridge, without nodes."""
        _ip("netns", "add", self.bridge)
        _ip("-n", self.bridge, "link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
        _ip("-n", self.bridge, "link", "set", "br0", "up")


@contextlib.contextmanager
def links(prefix: str, first: int = 1) -> Iterator[Links]:
    """Links whose namespaces begin with `prefix`; afterwards nothing of them is left, nor of what
    ran in them."""
    made = Links(prefix, first=first)
    try:
        with undisturbed():
            remove_network(prefix)
            made.make()
        yield made
    finally:
        with undisturbed():
            remove_network(prefix)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str | Sequence[str]) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout
