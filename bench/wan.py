"""A link between the bridges of two namespaces that delays every frame, for benchmarks of sites far
apart where the kernel has no netem.

    python -m bench.wan NAMESPACE NAMESPACE --mbit 100 --delay-ms 40

A TAP device on each bridge; this process reads a frame at one and writes it at the other DELAY_MS
later. A token bucket at each device limits what goes into the link. It prints `ready` once frames
pass, and runs until it is ended. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque

DEVICE = "wan0"
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES_MAX = 65_600
BURST_KIB, QUEUE_S = 256, 0.1  # the burst: as in links.py
CLONE_NEWNET = 0x40000000
BATCH = 64


def open_device(namespace: str, mbit: float) -> int:
    """A TAP device on the bridge br0 of a namespace; the descriptor with its frames."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _setns(there)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TAP | IFF_NO_PI))
    finally:
        _setns(home)
        os.close(there)
        os.close(home)
    limit = str(max(int(mbit * 1e6 / 8 * QUEUE_S), 256 << 10))
    shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", f"{BURST_KIB}kb", "limit", limit]
    subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", DEVICE, *shape], check=True)
    subprocess.run(["ip", "-n", namespace, "link", "set", DEVICE, "master", "br0", "up"], check=True)
    return device


def _setns(descriptor: int) -> None:
    import ctypes  # os.setns comes with Python 3.12

    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Direction:
    """Frames on their way from one device to the other."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self._source, self._target, self._delay_s = source, target, delay_s
        self._frames: deque[tuple[float, bytes]] = deque()

    def read(self, now: float) -> None:
        """Take what has come."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(BATCH):
                self._frames.append((now + self._delay_s, os.read(self._source, FRAME_BYTES_MAX)))

    def write(self, now: float) -> None:
        """Hand on what is due. What the other side has no room for is lost, as on any link."""
        while self._frames and self._frames[0][0] <= now:
            _, frame = self._frames.popleft()
            with contextlib.suppress(BlockingIOError):
                os.write(self._target, frame)

    def due(self) -> float:
        return self._frames[0][0] if self._frames else float("inf")


def relay(devices: tuple[int, int], delay_s: float) -> None:
    """Until the process ends."""
    first, second = devices
    ways = {first: Direction(first, second, delay_s), second: Direction(second, first, delay_s)}
    poll = select.epoll()
    for device in devices:
        poll.register(device, select.EPOLLIN)
    while True:
        pause_s = min(way.due() for way in ways.values()) - time.monotonic()
        for device, _ in poll.poll(max(0.0, min(pause_s, 1.0))):
            ways[device].read(time.monotonic())
        for way in ways.values():
            way.write(time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--delay-ms", type=float, default=40.0, help="each way")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    first, second = (open_device(namespace, chosen.mbit) for namespace in chosen.namespaces)
    print("ready", flush=True)
    relay((first, second), chosen.delay_ms / 1e3)


if __name__ == "__main__":
    main()
