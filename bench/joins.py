"""A tracker with access control while many hosts join: what it spends on certificates and TLS.

    python -m bench.joins [--hosts 10000] [--at-once 32] [--json]

A `p2pdist tracker --access` runs as its own process. This one joins for each host as an agent does:
a TLS connection and POST /v1/join with a signing request, then a connection with the certificate
that came, on which a session is opened and left open. All hosts share one key, which the tracker
cannot know and which saves this process time. Figures are the tracker's processor seconds for
joins and for sessions, and its resident bytes a session.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from bench.load_hosts import raise_file_limit
from bench.processes import cpu_s
from bench.tracker_load import resident
from p2pdist.credentials.authority import TRACKER_DNS, encode_key, make_key, make_request
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Joined, JoinRequest, encode

UPGRADE = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "


@contextlib.contextmanager
def tracker(directory: Path) -> Iterator[tuple[int, int]]:
    """A tracker with access control at an access file below `directory`: its port and pid."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = [sys.executable, "-m", "p2pdist.cli.main", "tracker", "--listen", f"127.0.0.1:{port}", "--no-discovery"]
    words += ["--access", str(directory / "access.toml"), "--audit-log", str(directory / "audit.log")]
    process = subprocess.Popen([*words, "--log-level", "warning"], stdout=subprocess.DEVNULL)
    try:
        for _ in range(400):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


class Hosts:
    """Hosts that join the tracker at `port`."""

    def __init__(self, port: int, directory: Path) -> None:
        self._port, self._directory = port, directory
        self._token = (directory / "join-default.token").read_text().strip()
        self._authority = next(directory.glob("authority-*.pem")).read_text()
        key = make_key()
        self._key, self._request = encode_key(key), make_request(key).decode()
        self._trusting = self._context()
        self.certificates: dict[str, str] = {}
        self.open: list[asyncio.StreamWriter] = []

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self._authority)
        return context

    async def join(self, host: str) -> None:
        reader, writer = await self._connected(self._trusting)
        body = msgspec.json.encode(JoinRequest(self._token, host, self._request, ("127.0.0.1",)))
        writer.write(f"POST /v1/join HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.partition(b"\r\n")[0], head
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        self.certificates[host] = msgspec.json.decode(await reader.readexactly(length), type=Joined).certificate
        writer.close()

    async def connect(self, host: str) -> None:
        """Open the host's session."""
        context = self._context()
        file = self._directory / f"{host}.pem"
        file.write_bytes(self._key + self.certificates[host].encode())
        context.load_cert_chain(file)
        file.unlink()
        reader, writer = await self._connected(context)
        key = base64.b64encode(os.urandom(16)).decode()
        writer.write(f"GET /v1/session HTTP/1.1\r\nHost: t\r\n{UPGRADE}{key}\r\n\r\n".encode())
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        hello = encode(Hello(PROTOCOL_VERSION, host, "127.0.0.1:7071"))
        writer.write(struct.pack("!BBHI", 0x81, 0x80 | 126, len(hello), 0) + hello)
        head = await reader.readexactly(2)
        length = head[1] if head[1] < 126 else struct.unpack("!H", await reader.readexactly(2))[0]
        assert b"welcome" in await reader.readexactly(length)
        self.open.append(writer)

    async def _connected(self, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port, ssl=context, server_hostname=TRACKER_DNS)


async def for_all(count: int, at_once: int, work: Callable[[str], Awaitable[None]]) -> None:
    names = iter([f"h{number}" for number in range(count)])

    async def worker() -> None:
        for name in names:
            await work(name)

    await asyncio.gather(*(worker() for _ in range(at_once)))


async def measure(count: int, at_once: int) -> dict[str, float]:
    figures: dict[str, float] = {"hosts": count}
    with tempfile.TemporaryDirectory() as directory, tracker(Path(directory)) as (port, pid):
        hosts = Hosts(port, Path(directory))
        memory = resident(pid)
        for name, work in (("join", hosts.join), ("session", hosts.connect)):
            before, started = cpu_s(pid), time.monotonic()
            await for_all(count, at_once, work)
            figures[f"{name}_cpu_s"] = cpu_s(pid) - before
            figures[f"{name}_wall_s"] = time.monotonic() - started
        figures["bytes_a_session"] = (resident(pid) - memory) / count
        for writer in hosts.open:
            writer.transport.abort()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    raise_file_limit()
    figures = asyncio.run(measure(chosen.hosts, chosen.at_once))
    if chosen.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:<18}{value:,.2f}")


if __name__ == "__main__":
    main()
