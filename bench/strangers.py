"""What strangers can cost a host without access control: a good host pulls 8 MiB beside sessions
that mean harm, and alone, in turn.

    python -m bench.strangers                                    # all kinds: a quarter of an hour
    python -m bench.strangers --count 20 --addresses one --kind waits drips

A real origin directory, tracker and agents; the strangers share one process of their own, and each
has a session, and a listener at an address that the tracker may name to others. With `--addresses
many` each comes from another address of 127.0.0.0/8. Prints a row a case: the median time of the
pull beside that of pulls without strangers in the same run, and the ratio, against the goal of 2. A
case that fails is a row as well; the exit code is 1 where one failed or missed the goal.

Where there is a seed, a second good host has the blob before the strangers come.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from bench.small_blob import P2PDIST, PORTS_FROM, free_port
from p2pdist.agent.api.client import LocalClient
from p2pdist.model.digest import Digest
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Assign,
    Complaint,
    Hello,
    Holding,
    Left,
    Message,
    PullRequest,
    Report,
    StreamRequest,
    decode_from_tracker,
)
from p2pdist.model.pieces import PieceLayout, PieceSet, piece_size_for

MIB = 1 << 20
SIZE = 8 * MIB
GOAL = 2.0
READY_S = 300.0
INVENTED = 10
"""Blobs that each hoarder wants."""

STEP_S = 0.1
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.p2pdist.stream\r\nConnection: close\r\n"

KINDS = {
    "silent": "claims all pieces, accepts connections and says nothing",
    "progress": "reports pieces that it does not have, and says nothing",
    "waits": "claims all pieces and responds that it has none yet, for ever",
    "drips": "claims all pieces, responds, and sends a byte a second",
    "half": "claims all pieces and gives half of each stripe",
    "wrong": "claims all pieces and sends wrong bytes",
    "complains": "complains of every host that has pieces",
    "flaps": "joins with a claim and leaves, in a loop",
    "idles": "wants this blob alone, takes its lease and reads nothing",
    "starves": "says at once that each parent gives it nothing, and reads nothing",
    "hoards": "wants this blob and invented ones, takes leases and reads nothing",
}
EMPTY = ("progress", "hoards", "complains", "idles", "starves")
"""Kinds that claim nothing."""

SEEDED = ("complains",)
"""Kinds that need a good seed to mean harm."""


@dataclass(frozen=True)
class Task:
    """What strangers do: how many of them, where, with which blob. `content` is what the blob
    holds, for those that give some of it."""

    kind: str
    count: int
    many_addresses: bool
    url: str
    blob: Digest
    content: str


class Stranger:
    """One session that means harm, and the listener at its address."""

    def __init__(self, task: Task, number: int) -> None:
        self._task, self._name = task, f"bad-{task.blob[-8:]}-{number}"
        self._ip = f"127.0.{1 + number // 200}.{1 + number % 200}" if task.many_addresses else "127.0.0.1"
        self._layout = PieceLayout(SIZE, piece_size_for(SIZE))
        self._full = tuple(PieceSet.full(self._layout.count).stripe_counts(self._layout.stripes))
        self._content = Path(task.content)
        self.joined = asyncio.Event()

    async def run(self) -> None:
        server = await asyncio.start_server(self._serve, self._ip, 0, backlog=256)
        address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
        connector = aiohttp.TCPConnector(local_addr=(self._ip, 0))
        async with server, aiohttp.ClientSession(connector=connector) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                    async with session.ws_connect(f"{self._task.url}/v1/session") as peer:
                        await self._harm(peer, Hello(PROTOCOL_VERSION, self._name, address))
                self.joined.set()  # a tracker that lets it in no more is what the good host gets on beside
                await asyncio.sleep(STEP_S)

    async def _harm(self, peer: aiohttp.ClientWebSocketResponse, hello: Hello) -> None:
        """What one session says, until it is closed."""
        kind, blob = self._task.kind, self._task.blob
        counts = (0,) * self._layout.stripes if kind in EMPTY else self._full
        await _say(peer, hello)
        await peer.receive()
        await _say(peer, Holding(blob, SIZE, self._layout.piece_size, counts))
        if kind == "flaps":
            self.joined.set()
            await asyncio.sleep(STEP_S)
            await _say(peer, Left(blob))
            return
        if kind == "hoards":
            for _ in range(INVENTED):
                invented = Digest(f"sha256:{os.urandom(32).hex()}")
                await _say(peer, Holding(invented, SIZE, self._layout.piece_size, counts))
        self.joined.set()
        if kind == "progress":
            for step in range(1, max(self._full)):
                counts = tuple(min(step, most - 1) for most in self._full)
                await _say(peer, Report((Advance(blob, counts),)))
                await asyncio.sleep(STEP_S)
        async for frame in peer:
            if kind in ("complains", "starves"):
                await self._complain(peer, frame.data, starved=kind == "starves")

    async def _complain(self, peer: aiohttp.ClientWebSocketResponse, text: str, *, starved: bool) -> None:
        """Complain of every host that a plan names: of its bytes, or (`starved`) that it gives
        none."""
        message = decode_from_tracker(text)
        if not isinstance(message, Assign):
            return
        for choice in message.plan.stripes:
            for source in (choice.parent, *choice.alternates):
                if source is not None and not source.is_origin:
                    about = self._task.blob, choice.stripe, source.host
                    if starved:
                        await _say(peer, Complaint(*about, "slow", starved=True))
                        continue
                    for reason in ("corrupt", "stalled", "refused"):
                        await _say(peer, Complaint(*about, reason))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, msgspec.DecodeError):
            await self._respond(reader, writer)
        writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request for a stream."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if not head.startswith("post "):
            return
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        request = msgspec.json.decode(await reader.readexactly(length), type=StreamRequest)
        match self._task.kind:
            case "waits":
                writer.write(RESPONSE + b"P2PDist-Waits: 1\r\n\r\n")
            case "drips":
                writer.write(RESPONSE + b"\r\n" + struct.pack(">II", request.stripe, self._layout.piece_size))
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(1.0)
            case "half" | "wrong":
                writer.write(RESPONSE + b"\r\n")
                for piece in self._pieces(request):
                    data = os.urandom(self._layout.piece_size) if self._task.kind == "wrong" else self._read(piece)
                    writer.write(struct.pack(">II", piece, len(data)) + data)
        await writer.drain()
        await asyncio.Event().wait()

    def _pieces(self, request: StreamRequest) -> list[int]:
        """The first half of a stripe."""
        pieces = range(request.stripe, self._layout.count, request.stripes)
        return list(pieces)[: len(pieces) // 2]

    def _read(self, piece: int) -> bytes:
        with self._content.open("rb") as content:
            content.seek(piece * self._layout.piece_size)
            return content.read(self._layout.length(piece))


async def _say(peer: aiohttp.ClientWebSocketResponse, message: Message) -> None:
    await peer.send_str(msgspec.json.encode(message).decode())


def be_strangers(task: Task, pipe: multiprocessing.connection.Connection) -> None:
    """The process of the strangers, until it is killed: they take leave of nobody."""
    asyncio.run(_be(task, pipe))


async def _be(task: Task, pipe: multiprocessing.connection.Connection) -> None:
    strangers = [Stranger(task, number) for number in range(task.count)]
    running = [asyncio.create_task(stranger.run()) for stranger in strangers]
    joined: list[Awaitable[object]] = [stranger.joined.wait() for stranger in strangers]
    await asyncio.wait_for(asyncio.gather(*joined), READY_S)
    pipe.send("ready")
    await asyncio.gather(*running)


@contextlib.contextmanager
def strangers(task: Task) -> Iterator[None]:
    """Strangers that have joined, and are gone in the end."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=be_strangers, args=(task, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not pipe.poll(READY_S):
            raise RuntimeError(f"the strangers ({task.kind}) have not joined within {READY_S:g} s")
        pipe.recv()
        yield
    finally:
        pipe.close()
        process.kill()
        process.join()


class Site:
    """A tracker, an agent that pulls and one that may be a seed, with an origin below a
    directory."""

    def __init__(self, work: Path, stack: contextlib.ExitStack) -> None:
        self._work, self._stack = work, stack
        self.origin = f"file://{work}/layout"
        port = free_port(PORTS_FROM)
        self.url = f"http://127.0.0.1:{port}"
        words = ["tracker", "--listen", f"127.0.0.1:{port}", "--origin", self.origin, "--state", str(work / "state")]
        self._start("tracker", words, self.url)
        self.puller, self.seed = (self._agent(name, port + 10 * step) for step, name in ((1, "puller"), (2, "seed")))

    def _agent(self, name: str, first_port: int) -> LocalClient:
        port = free_port(first_port)
        unix = self._work / f"{name}.sock"
        words = ["agent", "--listen", f"127.0.0.1:{port}", "--store", str(self._work / name), "--socket", str(unix)]
        words += ["--tracker", self.url, "--name", name, "--transport", "trees"]
        self._start(name, words, f"http://127.0.0.1:{port}")
        return LocalClient(unix)

    def _start(self, name: str, words: list[str], url: str) -> None:
        with (self._work / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([str(P2PDIST), *words], stdout=log, stderr=log)
        self._stack.callback(_end, process)
        until_s = time.monotonic() + READY_S
        while True:
            with (
                contextlib.suppress(OSError, urllib.error.URLError),
                urllib.request.urlopen(f"{url}/readyz", timeout=2),
            ):
                return
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{name} does not start: {(self._work / f'{name}.log').read_text()[-2000:]}")
            time.sleep(0.02)

    def publish(self) -> Digest:
        """Push a random blob; its content stays at `content`."""
        self.content.write_bytes(os.urandom(SIZE))
        words = [str(P2PDIST), "blob", "push", str(self.content), "--origin", self.origin, "--json"]
        pushed = subprocess.run(words, check=True, capture_output=True)
        return Digest(json.loads(pushed.stdout)["digest"])

    @property
    def content(self) -> Path:
        return self._work / "content"

    def pull_s(self, blob: Digest) -> float:
        """How long the good host takes."""
        began = time.monotonic()
        self.puller.pull(PullRequest(blob=blob))
        return time.monotonic() - began


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure(kind: str, count: int, *, many: bool, seeded: bool, repeat: int) -> dict[str, object]:
    """Pull beside strangers of a kind, and alone, in turn; medians, and the ratio of these."""
    alone, beside = [], []
    with tempfile.TemporaryDirectory(prefix="p2pdist-strangers-") as directory, contextlib.ExitStack() as stack:
        site = Site(Path(directory), stack)
        site.pull_s(site.publish())  # the first pull of a process loads what later ones have
        for _ in range(repeat):
            for disturbed, times in ((False, alone), (True, beside)):
                blob = site.publish()
                if seeded:
                    site.seed.pull(PullRequest(blob=blob))
                task = Task(kind, count, many, site.url, blob, str(site.content))
                with strangers(task) if disturbed else contextlib.nullcontext():
                    times.append(site.pull_s(blob))
    figures: dict[str, object] = {"kind": kind, "count": count, "addresses": "many" if many else "one"}
    figures |= {"seed": seeded, "alone_s": statistics.median(alone), "beside_s": statistics.median(beside)}
    figures |= {
        "ratio": statistics.median(beside) / statistics.median(alone),
        "runs": {"alone": alone, "beside": beside},
    }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--count", nargs="+", type=int, default=[20, 120])
    parser.add_argument("--addresses", nargs="+", choices=["one", "many"], default=["one", "many"])
    parser.add_argument("--seed", action="store_true", help="a good host has the blob, whatever the kind")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="a line of JSON a case, with single runs")
    chosen = parser.parse_args()
    cases = [(kind, count, where) for kind in chosen.kind for count in chosen.count for where in chosen.addresses]
    missed = 0
    if not chosen.json:
        print(_row("kind", "count", "addresses", "alone s", "beside s", "ratio", "goal", "met"))
    for kind, count, where in cases:
        begin: dict[str, object] = {"kind": kind, "count": count, "addresses": where}
        try:
            figures = measure(
                kind, count, many=where == "many", seeded=chosen.seed or kind in SEEDED, repeat=chosen.repeat
            )
        except Exception as error:  # the other cases are worth knowing
            figures = {**begin, "error": " ".join(str(error).split())[:300] or repr(error)}
        missed += not _met(figures)
        print(json.dumps(figures) if chosen.json else _line(figures), flush=True)
    if not chosen.json:
        print(f"{len(cases) - missed} of {len(cases)} cases within {GOAL:g} times the usual time")
    return bool(missed)


def _met(figures: dict[str, object]) -> bool:
    ratio = figures.get("ratio")
    return isinstance(ratio, float) and ratio <= GOAL


def _row(*cells: str) -> str:
    return "{:<10}{:>6}  {:<10}{:>8}{:>10}{:>7}{:>6}  {}".format(*cells)


def _line(figures: dict[str, object]) -> str:
    kind, count, where = (str(figures[name]) for name in ("kind", "count", "addresses"))
    if "error" in figures:
        return _row(kind, count, where, "-", "-", "-", f"{GOAL:g}", f"FAILED: {figures['error']}")
    times = (f"{figures[name]:.2f}" for name in ("alone_s", "beside_s", "ratio"))
    return _row(kind, count, where, *times, f"{GOAL:g}", "yes" if _met(figures) else "NO")


if __name__ == "__main__":
    sys.exit(main())
