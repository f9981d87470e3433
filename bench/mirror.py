"""A container runtime reads a blob through an agent's mirror: how soon it begins, what it costs.

    python bench/mirror.py --size-mib 512

A tracker and an agent in processes of their own, and a registry in this one. Cold: from the moment
in which the registry has sent the bytes of the first piece until the client has the first byte of
its body, over several blobs (goal: 100 ms). Warm: CPU seconds of the agent for each GiB through the
mirror's port on loopback, and for the same blob by digest at the agent's own port, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from bench.processes import cpu_s
from p2pdist.model.vouched_list import vouched_layout

P2PDIST = Path(sys.executable).parent / "p2pdist"
GOAL_S = 0.1
COLD_BYTES = 64 << 20
RATE_BYTES_S = 100e6
READY_S = 60.0
READ_BYTES = 1 << 20
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


class Registry:
    """A registry whose blobs come at RATE_BYTES_S a request; notes when it had sent the first piece
    of each."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.first_at: dict[str, float] = {}

    def add(self, size: int) -> str:
        data = os.urandom(size)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return digest

    def manifest(self) -> bytes:
        entries = [
            {"mediaType": "application/octet-stream", "digest": digest, "size": len(data)}
            for digest, data in self.blobs.items()
        ]
        return json.dumps(
            {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": entries[0], "layers": entries}
        ).encode()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        kind, _, target = request.path.rpartition("/")
        if kind.endswith("manifests"):
            data = self.manifest()
            headers = {"Docker-Content-Digest": f"sha256:{hashlib.sha256(data).hexdigest()}"}
            return web.Response(body=data, headers={"Content-Type": MANIFEST_TYPE, **headers})
        data = self.blobs[target]
        wanted = request.http_range
        start, end = wanted.start or 0, min(wanted.stop or len(data), len(data))
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"} if request.headers.get("Range") else {}
        response = web.StreamResponse(status=206 if headers else 200, headers=headers)
        response.content_length = end - start
        await response.prepare(request)
        if request.method == "GET":
            await self._send(response, target, start, end)
        return response

    async def _send(self, response: web.StreamResponse, digest: str, start: int, end: int) -> None:
        data, first = self.blobs[digest], vouched_layout(len(self.blobs[digest])).piece_size
        for position in range(start, end, READ_BYTES):
            part = data[position : min(end, position + READ_BYTES)]
            await asyncio.sleep(len(part) / RATE_BYTES_S)
            await response.write(part)
            if position <= first <= position + len(part):
                self.first_at.setdefault(digest, time.monotonic())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([P2PDIST, *words, "--log-level", "warning"])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


async def ready(url: str) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=2).close())
            return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"{url} does not answer")


async def read(http: aiohttp.ClientSession, url: str) -> tuple[float, float, int]:
    """When the first byte of a body and its last one came, and how many there were."""
    async with http.get(url) as answer:
        answer.raise_for_status()
        first, count = 0.0, 0
        async for chunk in answer.content.iter_chunked(READ_BYTES):
            first = first or time.monotonic()
            count += len(chunk)
        return first, time.monotonic(), count


async def measure(directory: Path, size: int, colds: int, turns: int) -> dict[str, Any]:
    registry, app = Registry(), web.Application()
    app.router.add_route("*", "/{path:.*}", registry.serve)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream = f"127.0.0.1:{runner.addresses[0][1]}"
    cold, warm = [registry.add(COLD_BYTES) for _ in range(colds)], registry.add(size)
    tracker, port, mirror = free_port(), free_port(), free_port()
    agent_words = {
        "--tracker": f"http://127.0.0.1:{tracker}",
        "--listen": f"127.0.0.1:{port}",
        "--mirror": str(mirror),
        "--store": str(directory / "store"),
        "--socket": str(directory / "agent.sock"),
        "--transport": "trees",
    }
    words = [word for option in agent_words.items() for word in option]
    try:
        with (
            running("tracker", "--listen", f"127.0.0.1:{tracker}", "--upstream", upstream),
            running("agent", *words) as agent,
        ):
            await ready(f"http://127.0.0.1:{port}/readyz")
            through, by_digest = (
                f"http://127.0.0.1:{mirror}/v2/{upstream}/a",
                f"http://127.0.0.1:{port}/v1/blobs/{warm}",
            )
            async with aiohttp.ClientSession() as http:
                async with http.get(f"{through}/manifests/v1") as answer:
                    answer.raise_for_status()
                firsts = []
                for digest in cold:
                    first, _, count = await read(http, f"{through}/blobs/{digest}")
                    assert count == COLD_BYTES
                    firsts.append(first - registry.first_at[digest])
                await read(http, f"{through}/blobs/{warm}")
                costs: dict[str, list[float]] = {"mirror": [], "digest": []}
                for turn in range(2 * turns):
                    name = ("mirror", "digest")[turn % 2]
                    before = cpu_s(agent.pid)
                    _, _, count = await read(http, f"{through}/blobs/{warm}" if name == "mirror" else by_digest)
                    assert count == size
                    costs[name].append((cpu_s(agent.pid) - before) * (1 << 30) / size)
    finally:
        await runner.cleanup()
    return {
        "first_byte_s": round(statistics.median(firsts), 4),
        "first_byte_max_s": round(max(firsts), 4),
        "goal_s": GOAL_S,
        "cpu_s_gib": {name: round(statistics.median(values), 3) for name, values in costs.items()},
        "size": size,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=512, help="of the blob whose cost is measured")
    parser.add_argument("--cold", type=int, default=5, help="blobs whose first byte is timed")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = asyncio.run(measure(Path(directory), chosen.size_mib << 20, chosen.cold, chosen.turns))
    figures["met"] = figures["first_byte_s"] <= GOAL_S
    if chosen.json:
        print(json.dumps(figures))
    else:
        cost = figures["cpu_s_gib"]
        print(
            f"first byte {figures['first_byte_s'] * 1000:.0f} ms after the first piece left the registry (at most "
            f"{figures['first_byte_max_s'] * 1000:.0f} ms; goal {GOAL_S * 1000:.0f} ms "
            f"{'met' if figures['met'] else 'MISSED'}); CPU {cost['mirror']} s/GiB through the mirror, "
            f"{cost['digest']} s/GiB by digest"
        )
    return 0 if figures["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
