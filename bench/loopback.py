"""Piece streams between two processes on loopback, beside nginx -> curl in the same run; plain, and
over TLS on both.

    python -m bench.loopback [--size-mib 1024] [--rounds 3] [--json]

One process serves a blob with p2pdist.transfer.stream.server, another receives it in 4 stripes,
verifies each piece (BLAKE3) and writes it with pwrite over a file that exists already: the first
touch of fresh memory is slow and not what is measured. curl writes over the same file, without
truncating it and without verifying anything. Every figure is the median of the rounds; the ratio is
to the better of two runs of nginx -> curl, one before and one after; CPU-seconds are user and
system time of the receiving (rx) and sending (tx) process per GiB; memory is the most that either
process had resident (VmHWM).

All senders use the congestion control named in the output (default cubic): it is set on the
listening sockets (TCP_CONGESTION), from which accepted ones inherit it, and nginx is handed such a
socket too. On the receiving side it decides nothing. TLS is 1.3 with certificates on both sides,
for both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from bench.children import answer, child, tell
from p2pdist.model.digest import Digest
from p2pdist.model.messages import StreamRequest
from p2pdist.model.pieces import PieceLayout, PieceList, PieceSet
from p2pdist.model.plan import Source
from p2pdist.transfer.connections import ConnectionBook, LimitedSite, connections_max
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.stream.client import IncomingStream
from p2pdist.transfer.stream.events import Mailbox, PieceReceived, StreamClosed, StreamEvent
from p2pdist.transfer.stream.server import UNSENT_BYTES, Block, read_stream_request, serve_stream
from p2pdist.transfer.tls import Tls, TlsFiles

RATIO_GOAL, RX_GOAL, TX_GOAL, RSS_GOAL_MB, TLS_GOAL_GB_S = 0.6, 0.6, 0.2, 300, 1.0
"""Throughput to that of nginx -> curl; CPU-seconds per GiB; memory. Over TLS either the ratio or
the GB/s will do."""

GIB = 1 << 30
DIGEST = Digest("sha256:" + "0" * 64)
CHUNK = 64 << 10
"""Files are filled in writes no larger than the smallest piece. Larger ones make ext4 keep larger
folios, and every small write that overwrites part of a large folio is then slower: curl fell from
4.1 to 2.1 GB/s over a file that had been filled 8 MiB at a time."""


def cpu_s(usage_of: int = resource.RUSAGE_SELF) -> float:
    usage = resource.getrusage(usage_of)
    return usage.ru_utime + usage.ru_stime


def rss_mb() -> float:
    """The most memory that this process has had resident (proc(5), status)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def tls_of(options: argparse.Namespace) -> Tls | None:
    """With the files that `make_certificate` made, one certificate being its own authority."""
    if not options.certificates:
        return None
    directory = Path(options.certificates)
    return Tls(TlsFiles(directory / "cert.pem", directory / "key.pem", directory / "cert.pem"))


def listener(congestion: str) -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    return server


class AlwaysNext:
    """An Outgoing without turns: the next block of the stripe, at once."""

    def __init__(self, layout: PieceLayout, wanted: StreamRequest, block: int) -> None:
        self._pieces = iter(PieceSet(layout.count, wanted.have).missing(wanted.stripe, wanted.stripes))
        self._layout, self._block = layout, block
        self._piece, self._offset, self._length = -1, 0, 0

    async def next_block(self) -> Block | None:
        if self._offset == self._length:
            self._piece = next(self._pieces, -1)
            if self._piece < 0:
                return None
            self._offset, self._length = 0, self._layout.length(self._piece)
        offset, length = self._offset, min(self._block or self._length, self._length - self._offset)
        self._offset += length
        return Block(self._piece, offset, length)

    def at_once(self, send: Callable[[Block], bool] | None) -> None:
        """A block is never sent within the turn of another stream."""

    def block_sent(self, length: int) -> None:
        pass


# -- the two processes


async def serve(options: argparse.Namespace) -> None:
    """Serve until standard input ends; each line that comes is answered with the CPU-seconds used
    so far."""
    descriptor = os.open(options.source, os.O_RDONLY)
    layout = PieceLayout(os.fstat(descriptor).st_size, options.piece)

    async def streams(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, options.congestion.encode())
        outgoing = AlwaysNext(layout, await read_stream_request(request), options.block)
        return await serve_stream(request, outgoing, descriptor, layout, unsent_max=options.unsent)

    app = web.Application()
    app.router.add_post("/v1/streams", streams)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    tls = tls_of(options)
    context = ServerContext(tls) if tls else None
    site = LimitedSite(runner, "127.0.0.1", 0, ConnectionBook(connections_max()), tls=context)
    await site.start()
    print(site.port, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps([cpu_s(), rss_mb()]), flush=True)
    await runner.cleanup()


async def fetch(options: argparse.Namespace) -> None:
    """Receive the blob once for each round; print seconds and CPU-seconds of each."""
    with open(options.source, "rb") as file:
        pieces = await asyncio.to_thread(piece_list, file.fileno(), options.piece)
    layout = pieces.layout
    descriptor = os.open(options.destination, os.O_RDWR)
    tls = tls_of(options)

    def write(piece: int, data: memoryview) -> bool:
        if not pieces.verify(piece, data):
            return False
        os.pwrite(descriptor, data, layout.offset(piece))
        return True

    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        done = asyncio.Event()
        closed: list[StreamClosed] = []
        received = 0

        def deliver(batch: list[StreamEvent], done: asyncio.Event = done, closed: list[StreamClosed] = closed) -> None:
            nonlocal received
            received += sum(isinstance(event, PieceReceived) for event in batch)
            closed += [event for event in batch if isinstance(event, StreamClosed)]
            if len(closed) == options.stripes:
                done.set()

        mailbox: Mailbox[StreamEvent] = Mailbox(asyncio.get_running_loop(), deliver)
        used, began = cpu_s(), time.perf_counter()
        for stripe in range(options.stripes):
            request = StreamRequest(DIGEST, stripe, options.stripes, PieceSet(layout.count).to_bytes())
            source = Source("sender", f"127.0.0.1:{options.port}")
            IncomingStream(source, request, layout, write, mailbox.post, tls=tls).start()
        await done.wait()
        took, used = time.perf_counter() - began, cpu_s() - used
        assert [end.reason for end in closed] == ["done"] * options.stripes, closed
        assert received == layout.count
        print(json.dumps([took, used, rss_mb()]), flush=True)


def piece_list(descriptor: int, piece_size: int) -> PieceList:
    """The piece list of a file with a piece size of our choice."""
    from blake3 import blake3

    layout = PieceLayout(os.fstat(descriptor).st_size, piece_size)
    hashes = bytearray()
    for piece in range(layout.count):
        hashes += blake3(os.pread(descriptor, layout.length(piece), layout.offset(piece))).digest()
    return PieceList(layout, bytes(hashes))


# -- the run


def streams(
    options: argparse.Namespace, piece: int, source: Path, destination: Path, certificates: Path | None
) -> dict[str, Any]:
    words = ["--source", source, "--destination", destination, "--piece", piece, "--stripes", options.stripes]
    words += ["--block", options.block, "--unsent", options.unsent, "--certificates", certificates or ""]
    role, common = [sys.executable, "-m", "bench.loopback", "--role"], [str(word) for word in words]
    with child([*role, "serve", "--congestion", options.congestion, *common]) as sender:
        port = int(answer(sender))
        with child([*role, "fetch", "--port", str(port), *common]) as receiver:
            answer(receiver)
            rounds, memory = [], []
            for _ in range(options.rounds + 1):
                before, _ = json.loads(tell(sender))
                took, rx, received_in = json.loads(tell(receiver))
                after, sent_from = json.loads(tell(sender))
                rounds.append((took, rx, after - before))
                memory += [received_in, sent_from]
    name = f"{'TLS ' if certificates else ''}streams, {piece >> 10} KiB pieces"
    return {**figures(name, source, rounds[1:]), "rss_mb": round(max(memory))}


NGINX = """
daemon off; worker_processes 1; pid {run}/nginx.pid; error_log {run}/error.log;
events {{ worker_connections 64; }}
http {{ access_log off; sendfile on; client_body_temp_path {run}/b; proxy_temp_path {run}/p; fastcgi_temp_path {run}/f;
  uwsgi_temp_path {run}/u; scgi_temp_path {run}/s;
  server {{ listen 127.0.0.1:{port} {tls}; root {root}; }} }}
"""
NGINX_TLS = """ssl; ssl_protocols TLSv1.3; ssl_certificate {0}/cert.pem; ssl_certificate_key {0}/key.pem;
  ssl_verify_client on; ssl_client_certificate {0}/cert.pem"""


def nginx_to_curl(
    options: argparse.Namespace, source: Path, destination: Path, run: Path, certificates: Path | None
) -> dict[str, Any] | None:
    """One connection, nothing verified. nginx adopts our listening socket, as in its change of
    binaries, and so its options."""
    if not shutil.which("nginx") or not shutil.which("curl"):
        return None
    run.mkdir(exist_ok=True)
    with listener(options.congestion) as server:
        port = server.getsockname()[1]
        tls = NGINX_TLS.format(certificates) if certificates else ""
        (run / "nginx.conf").write_text(NGINX.format(run=run, port=port, root=source.parent, tls=tls))
        nginx = subprocess.Popen(
            ["nginx", "-p", run, "-c", run / "nginx.conf", "-e", run / "error.log"],
            env={**os.environ, "NGINX": f"{server.fileno()};"},
            pass_fds=[server.fileno()],
        )
    curl = ["curl", "-sS", "--fail", f"{'https' if certificates else 'http'}://127.0.0.1:{port}/{source.name}"]
    if certificates:
        words = (("--cacert", "cert"), ("--cert", "cert"), ("--key", "key"))
        curl += [word for option, file in words for word in (option, f"{certificates}/{file}.pem")]
    try:
        rounds = []
        for _ in range(options.rounds + 1):
            sent, used, began = process_cpu_s(nginx.pid), cpu_s(resource.RUSAGE_CHILDREN), time.perf_counter()
            with open(destination, "r+b") as output:
                subprocess.run(curl, stdout=output, check=True)
                assert output.tell() == source.stat().st_size, "curl shares our offset, which is now at the end"
            took, used = time.perf_counter() - began, cpu_s(resource.RUSAGE_CHILDREN) - used
            rounds.append((took, used, process_cpu_s(nginx.pid) - sent))
    finally:
        nginx.terminate()
        nginx.wait()
    return figures(f"nginx -> curl{' over TLS' if certificates else ''}, nothing verified", source, rounds[1:])


def make_certificate(directory: Path) -> Path | None:
    """A certificate for 127.0.0.1 that is its own authority; None without openssl."""
    if not shutil.which("openssl"):
        return None
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=bench"
    files = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files += ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run([*words.split(), *files], check=True, capture_output=True)
    return directory


def process_cpu_s(pid: int) -> float:
    """User and system time of a process and its children that run (proc(5), stat; in ticks of 10
    ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(process_cpu_s(int(child)) for child in children)


def figures(name: str, source: Path, rounds: list[tuple[float, float, float]]) -> dict[str, Any]:
    size = source.stat().st_size
    took, rx, tx = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {
        "path": name,
        "gb_s": round(size / took / 1e9, 2),
        "rx_cpu_s_per_gib": round(rx * GIB / size, 3),
        "tx_cpu_s_per_gib": round(tx * GIB / size, 3),
        "rounds": [round(size / each[0] / 1e9, 2) for each in rounds],
    }


def fill(path: Path, size: int) -> None:
    """Write every byte, so that no page is touched for the first time while measuring."""
    chunk = os.urandom(CHUNK)
    with path.open("wb") as file:
        for start in range(0, size, CHUNK):
            file.write(chunk[: size - start])


def compare(options: argparse.Namespace, directory: Path, certificates: Path | None) -> list[dict[str, Any]]:
    """All rows, plain or over TLS, each stream with its ratio to nginx -> curl and whether it meets
    the goals."""
    source, destination, run = directory / "source", directory / "destination", directory / "run"
    plain = [nginx_to_curl(options, source, destination, run, certificates)]
    rows = [streams(options, piece << 10, source, destination, certificates) for piece in options.pieces_kib]
    plain.append(nginx_to_curl(options, source, destination, run, certificates))
    bounds = [row for row in plain if row]
    best = max((row["gb_s"] for row in bounds), default=None)
    for row in rows:
        row["ratio"] = round(row["gb_s"] / best, 2) if best else None
        fast = best is None or row["ratio"] >= RATIO_GOAL
        if certificates:
            row["met"] = fast or row["gb_s"] >= TLS_GOAL_GB_S
        else:
            cheap = row["rx_cpu_s_per_gib"] <= RX_GOAL and row["tx_cpu_s_per_gib"] <= TX_GOAL
            row["met"] = fast and cheap and row["rss_mb"] <= RSS_GOAL_MB
    return bounds[:1] + rows + bounds[1:]


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="loopback-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        for file in ("source", "destination"):
            fill(directory / file, options.size_mib << 20)
        plain = compare(options, directory, None)
        certificates = make_certificate(directory) if options.tls else None
        secured = compare(options, directory, certificates) if certificates else []
    names = ("congestion", "size_mib", "stripes", "block", "unsent")
    if options.json:
        print(json.dumps({**{name: getattr(options, name) for name in names}, "rows": plain, "tls_rows": secured}))
        return
    print(
        f"{options.size_mib} MiB in {options.directory}, {options.congestion}, {options.stripes} stripes, blocks of "
        f"{f'{options.block >> 10} KiB' if options.block else 'a piece'}, at most {options.unsent >> 10} KiB unsent a stream; "
        f"median of {options.rounds}"
    )
    print(f"{'path':38} {'GB/s':>6} {'ratio':>6} {'rx s/GiB':>9} {'tx s/GiB':>9} {'MB':>5}   rounds")
    for row in plain + secured:
        ratio, memory = row.get("ratio") or "-", row.get("rss_mb") or "-"
        cpu = f"{row['rx_cpu_s_per_gib']:9.3f} {row['tx_cpu_s_per_gib']:9.3f}"
        missed = "" if row.get("met", True) else "  MISSED"
        print(f"{row['path']:38} {row['gb_s']:6.2f} {ratio:>6} {cpu} {memory:>5}   {row['rounds']}{missed}")
    print(
        f"goals: ratio {RATIO_GOAL}, rx {RX_GOAL}, tx {TX_GOAL}, {RSS_GOAL_MB} MB; over TLS {TLS_GOAL_GB_S} GB/s or the ratio"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pieces-kib", type=int, nargs="*", default=[64, 1024, 4096])
    parser.add_argument("--stripes", type=int, default=4)
    parser.add_argument(
        "--block", type=int, default=0, help="bytes sent in one turn [default: a piece, as the agent does]"
    )
    parser.add_argument("--unsent", type=int, default=UNSENT_BYTES, help="TCP_NOTSENT_LOWAT in bytes")
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-tls", dest="tls", action="store_false", help="measure plain streams only")
    for hidden in ("--role", "--source", "--destination", "--certificates"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    for hidden in ("--port", "--piece"):
        parser.add_argument(hidden, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.role:
        case "serve":
            uvloop.run(serve(options))
        case "fetch":
            uvloop.run(fetch(options))
        case _:
            run(options)


if __name__ == "__main__":
    main()
