"""CPU time per piece of agents in a chain on rate-limited links: one sends, one receives and
forwards, one receives.

    python -m bench.chain [--rate-mbit 40] [--size-mib 64] [--rounds 3] [--json]

It needs root, and makes three network namespaces.

Every host is a process with a real store, uplink and download core, in a namespace of its own
behind links of the given rate (tbf), as in a broadcast, but without a tracker. CPU-seconds are user
and system time of each process (getrusage) from the first to the last piece. Shaped links matter:
data then arrives packet by packet, and not a whole piece at a time as on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web

from bench.children import answer, child, tell
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.uplink import Uplink
from p2pdist.core.downlink import Downlink
from p2pdist.core.fair_queue import TokenBucket
from p2pdist.core.sources import Sources
from p2pdist.model.address import Vicinity
from p2pdist.model.digest import Digest
from p2pdist.model.messages import Complaint
from p2pdist.model.pieces import PieceLayout, PieceList, PieceSet
from p2pdist.model.plan import Plan, Source, StripePlan
from p2pdist.origin.contract import Origin
from p2pdist.store.store import BlobStore
from p2pdist.transfer.pacer import Pacer
from p2pdist.transfer.stream.connections import ConnectionPool
from p2pdist.transfer.stream.server import read_stream_request, serve_stream
from p2pdist.transfer.tls import Tls

DIGEST = Digest("sha256:" + "0" * 64)
NAMES = ("sends", "forwards", "receives")
PORT = 7071


class Host:
    """What a BlobPull needs of an agent."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.uplink = Uplink()
        self.sources = Sources()
        self.tls: Tls | None = None
        self.pacer = Pacer(Downlink())
        self.origin_share = TokenBucket(None)
        self.connections = ConnectionPool()
        self.swarming = None
        self.peer_wait_s = 3600.0
        self.writers: Counter[Digest] = Counter()

    @property
    def vicinity(self) -> Vicinity:
        return Vicinity("10.99.0.1")

    def is_revoked(self, host: str) -> bool:
        return False

    def proof(self, blob: Digest) -> tuple[str, None]:
        return "", None

    def ask_ticket(self, blob: Digest, holding: object, *, refused: bool = False) -> None:
        pass

    def pacer_of(self, blob: Digest) -> Pacer:
        return self.pacer

    def origin(self) -> Origin:
        raise AssertionError("no host reads an origin here")

    def send_to_tracker(self, message: object) -> None:
        if isinstance(message, Complaint):
            print(message, file=sys.stderr)

    def count_received(self, source: str, length: int) -> None:
        pass

    def count_rejected(self, reason: str) -> None:
        pass


async def serve(options: argparse.Namespace) -> None:
    """Fetch from --parent, if there is one, and serve; answers a line on standard input with the
    CPU-seconds used so far."""
    encoded = await asyncio.to_thread(Path(options.pieces).read_bytes)
    pieces = PieceList.decode(encoded)
    stripes = pieces.layout.stripes
    store = BlobStore(Path(options.store))
    store.put_document(encoded)
    blob = store.begin(DIGEST, pieces)
    host = Host(options.role)

    async def streams(request: web.Request) -> web.StreamResponse:
        wanted = await read_stream_request(request)
        turn = host.uplink.open(DIGEST, wanted.stripe, PieceSet(blob.layout.count, wanted.have))
        try:
            with blob.held():
                return await serve_stream(request, turn, blob.fileno(), blob.layout)
        finally:
            turn.close()

    app = web.Application()
    app.router.add_post("/v1/streams", streams)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", PORT).start()
    if options.parent:
        parent = Source("parent", f"{options.parent}:{PORT}")
        pull = BlobPull(blob, host, tracker_present=True)
        pull.start()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(cpu_s(), flush=True)
        pull.planned(Plan(DIGEST, tuple(StripePlan(stripe, parent) for stripe in range(stripes))))
        await pull.done
    else:
        with open(options.source, "rb") as source:
            for piece in range(blob.layout.count):
                assert blob.write(piece, source.read(blob.layout.length(piece)))
        host.uplink.held(DIGEST, blob.layout, stripes, blob.have)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(cpu_s(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(cpu_s(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await runner.cleanup()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# -- the run


@contextlib.contextmanager
def links(rate_mbit: int) -> Iterator[list[str]]:
    """Three namespaces in a row; the middle one has a link to each neighbour. Yields their
    names."""
    spaces = [f"chain{os.getpid()}-{number}" for number in range(3)]
    shape = f"root tbf rate {rate_mbit}mbit burst 64kb latency 50ms"
    try:
        for space in spaces:
            ip(f"netns add {space}")
            ip(f"-n {space} link set lo up")
        for left in (0, 1):
            ip(f"link add v{left} netns {spaces[left]} type veth peer name w{left} netns {spaces[left + 1]}")
            for end, space, host in (("v", spaces[left], 1), ("w", spaces[left + 1], 2)):
                ip(f"-n {space} addr add 10.99.{left}.{host}/24 dev {end}{left}")
                ip(f"-n {space} link set {end}{left} up")
                subprocess.run(["tc", "-n", space, *f"qdisc add dev {end}{left} {shape}".split()], check=True)
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def broadcast(options: argparse.Namespace, spaces: list[str], directory: Path, layout: PieceLayout) -> list[float]:
    """One run; CPU-seconds of each process."""
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory(dir=directory) as stores:
        hosts = []
        for number, (space, name) in enumerate(zip(spaces, NAMES, strict=True)):
            words = ["--role", name, "--store", f"{stores}/{name}", "--pieces", directory / "pieces"]
            words += ["--source", directory / "source", "--parent", f"10.99.{number - 1}.1" if number else ""]
            words += ["--loop", options.loop]
            command = ["ip", "netns", "exec", space, sys.executable, "-m", "bench.chain", *map(str, words)]
            hosts.append(stack.enter_context(child(command)))
        before = [0.0] * 3
        for host in hosts:
            answer(host)
        for number in (0, 1, 2):
            before[number] = float(tell(hosts[number]))
        tell(hosts[2], wait=False)  # answered when it has everything, as is the next one by then
        after = [0.0] * 3
        after[2] = float(answer(hosts[2]))
        for number in (0, 1):
            after[number] = float(tell(hosts[number]))
        return [end - begin for begin, end in zip(before, after, strict=True)]


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="chain-") as name, links(options.rate_mbit) as spaces:
        directory = Path(name)
        with (directory / "source").open("wb") as file:
            for _ in range(options.size_mib):
                file.write(os.urandom(1 << 20))
            file.write(b"and a short last piece")
        with (directory / "source").open("rb") as source:
            pieces = PieceList.of_stream(source, os.fstat(source.fileno()).st_size)
        (directory / "pieces").write_bytes(pieces.encode())
        runs = [broadcast(options, spaces, directory, pieces.layout) for _ in range(options.rounds)]
    count = pieces.layout.count
    per_piece = {
        name: [round(used / count * 1e6) for used in column]
        for name, column in zip(NAMES, zip(*runs, strict=True), strict=True)
    }
    if options.json:
        print(json.dumps({"rate_mbit": options.rate_mbit, "piece_size": pieces.layout.piece_size, "us": per_piece}))
        return
    print(f"{count} pieces of {pieces.layout.piece_size >> 10} KiB at {options.rate_mbit} Mbit/s; CPU per piece:")
    for name, column in per_piece.items():
        print(f"{name:10} {statistics.median(column):6.0f} us   rounds {column}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=int, default=40)
    parser.add_argument("--size-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--loop", default="uvloop", choices=["asyncio", "uvloop"], help=argparse.SUPPRESS)
    for hidden in ("--role", "--source", "--store", "--pieces", "--parent"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.role:
        run(options)
    elif options.loop == "uvloop":
        import uvloop

        uvloop.run(serve(options))
    else:
        asyncio.run(serve(options))


if __name__ == "__main__":
    main()
