"""The hosts of tracker_load.py: a process that holds one session per host and speaks for all of
them.

It speaks just enough of RFC 6455 (frames masked with zeros) to cost a fraction of what the tracker
takes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import random
import resource
import struct
import time
from multiprocessing.connection import Connection

import msgspec

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Assign,
    Hello,
    Holding,
    Reject,
    Report,
    Vouched,
    decode_from_tracker,
    encode,
)
from p2pdist.model.pieces import PieceLayout

BLOB = digest_of(b"the blob that all hosts want")
PIECE_BYTES = 1 << 20
CONNECTING_MAX = 256
RACK_HOSTS = 40
WELCOME_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 300.0
QUIET_S, QUIET_WITHIN_S = 2.0, 10.0
"""QUIET_S without an Assign, and the plan has settled; a tracker that still moves hosts
QUIET_WITHIN_S after the plan was whole is not waited for."""

REPORT_SLOT_S = 0.01
VOUCH_SLOT_S = 0.02
"""A reader states what it has read in this time together."""

LISTED_START = b'{"type":"listed"'
UPLOAD_BYTES_S = 40e6
TEXT, CLOSE, PING, PONG = 1, 8, 9, 10


def layout_of(pieces: int) -> PieceLayout:
    """How the blob is cut."""
    return PieceLayout(pieces * PIECE_BYTES, PIECE_BYTES)


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """A client's frame, masked with zeros, which leaves the payload as it is."""
    length = len(payload)
    size = struct.pack(">B", 0x80 | length) if length < 126 else struct.pack(">BH", 0xFE, length)
    return bytes((0x80 | opcode,)) + size + b"\0\0\0\0" + payload


class Host(asyncio.Protocol):
    """One session. `load` is told what happens."""

    def __init__(self, load: Load, number: int) -> None:
        self.load, self.number = load, number
        self.transport: asyncio.Transport | None = None
        self.buffer = b""
        self.upgraded = False
        self.lacking = set(range(load.stripes))
        self.welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        key = base64.b64encode(self.number.to_bytes(16, "big")).decode()
        self.transport.write(  # type: ignore[union-attr]
            f"GET /v1/session HTTP/1.1\r\nHost: tracker\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def send(self, message: msgspec.Struct) -> None:
        assert self.transport is not None
        self.transport.write(frame(encode(message)))

    def join(self) -> None:
        load = self.load
        counts = (0,) * load.stripes
        self.send(Holding(BLOB, load.pieces * PIECE_BYTES, PIECE_BYTES, counts, vouched=load.vouched))

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data
        if not self.upgraded:
            head, separator, data = data.partition(b"\r\n\r\n")
            if not separator:
                self.buffer = head
                return
            if b" 101 " not in head.split(b"\r\n", 1)[0]:
                self.load.fail(f"the tracker answered {head[:100]!r}")
                return
            self.upgraded = True
            number = self.number
            address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:7071"
            self.send(Hello(PROTOCOL_VERSION, f"host-{number}", address, "z1", f"r{number // RACK_HOSTS}"))
        self.buffer = self._frames(data)

    def _frames(self, data: bytes) -> bytes:
        """Take all whole frames; returns the rest."""
        at = 0
        while len(data) - at >= 2:
            opcode, length, body = data[at] & 0x0F, data[at + 1] & 0x7F, at + 2
            if length == 126:
                length, body = int.from_bytes(data[at + 2 : at + 4], "big"), at + 4
            elif length == 127:
                length, body = int.from_bytes(data[at + 2 : at + 10], "big"), at + 10
            if len(data) < body + length:
                break
            at = body + length
            self._frame(opcode, data[body:at])
        return data[at:]

    def _frame(self, opcode: int, payload: bytes) -> None:
        if opcode == PING:
            assert self.transport is not None
            self.transport.write(frame(payload, PONG))
        elif opcode == CLOSE:
            self.load.fail("the tracker closed a session")
        elif opcode == TEXT and payload.startswith(LISTED_START):
            self.load.listed += 1
            self.load.listed_bytes += len(payload)
        elif opcode == TEXT:
            message = decode_from_tracker(payload)
            if isinstance(message, Assign):
                self.lacking.difference_update(each.stripe for each in message.plan.stripes if each.parent is not None)
                for each in message.plan.stripes:
                    if each.parent is not None and each.parent.is_origin:
                        self.load.roots[each.stripe] = self
                self.load.assigned(self)
            elif isinstance(message, Reject):
                self.load.fail(str(message.problem))
            elif not self.welcomed.done():
                self.welcomed.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.load.fail(f"the session of host-{self.number} was lost: {error}")
        if not self.welcomed.done():
            self.welcomed.set_exception(ConnectionError("it was closed before the welcome"))


# -- all hosts, in a process of their own


class Load:
    """The hosts and what was measured of them."""

    def __init__(self, port: int, chosen: argparse.Namespace) -> None:
        self.port, self.count = port, chosen.hosts
        self.pieces, self.stripes = chosen.pieces, layout_of(chosen.pieces).stripes
        self.vouched: bool = chosen.vouched
        self.roots: dict[int, Host] = {}
        self.listed = self.listed_bytes = 0
        self.hosts: list[Host] = []
        self.waiting: set[int] = set()
        self.planned = asyncio.Event()
        self.assigns = 0
        self.assigned_at = 0.0
        self.planned_at = 0.0
        self.failure = ""

    def fail(self, why: str) -> None:
        self.failure = self.failure or why
        self.planned.set()

    def assigned(self, host: Host) -> None:
        self.assigns += 1
        self.assigned_at = time.monotonic()
        if not host.lacking and host.number in self.waiting:
            self.waiting.remove(host.number)
            if not self.waiting:
                self.planned_at = self.assigned_at
                self.planned.set()

    async def connect(self, *, join: bool) -> dict[str, float]:
        """Open all sessions; with `join` each host joins as soon as it is welcomed."""
        started = time.monotonic()
        slots = asyncio.Semaphore(CONNECTING_MAX)
        loop = asyncio.get_running_loop()
        self.waiting = set(range(self.count))

        async def open_one(number: int) -> None:
            async with slots:
                if self.failure:
                    return
                host = Host(self, number)
                try:
                    async with asyncio.timeout(WELCOME_TIMEOUT_S):
                        await loop.create_connection(lambda: host, "127.0.0.1", self.port)
                        await host.welcomed
                except (OSError, TimeoutError) as error:
                    self.fail(f"host-{number} got no session: {error!r}")
                    return
            self.hosts.append(host)
            if join:
                host.join()

        async with asyncio.TaskGroup() as group:
            for number in range(self.count):
                group.create_task(open_one(number))
        accepted = time.monotonic()
        return {"accept_s": accepted - started} | (await self._planned(started) if join else {})

    async def join(self) -> dict[str, float]:
        """All hosts join at once."""
        started = time.monotonic()
        for host in self.hosts:
            host.join()
        return await self._planned(started)

    async def _planned(self, started: float) -> dict[str, float]:
        try:
            await asyncio.wait_for(self.planned.wait(), JOIN_TIMEOUT_S)
        except TimeoutError:
            self.fail(f"{len(self.waiting)} hosts have no parent in some stripe after {JOIN_TIMEOUT_S:.0f} s")
        planned_assigns = self.assigns
        while not self.failure and (now := time.monotonic()) - self.assigned_at < QUIET_S:
            if now - self.planned_at > QUIET_WITHIN_S:
                break
            await asyncio.sleep(0.1)
        return {
            "planned_s": self.planned_at - started,
            "moved_after": float(self.assigns - planned_assigns),
            "settled_s": self.assigned_at - started,
            "assigns": float(self.assigns),
        }

    async def report(self, seconds: float, interval_s: float) -> dict[str, float]:
        """Every host reports once in each interval, evenly spread."""
        order = list(self.hosts)
        random.Random(1).shuffle(order)
        end = [len(range(stripe, self.pieces, self.stripes)) for stripe in range(self.stripes)]
        step = max(1, int(min(end) * 0.9 * interval_s / max(seconds, interval_s)))
        started = time.monotonic()
        sent = 0
        while (passed := time.monotonic() - started) < seconds and not self.failure:
            due = int(passed / interval_s * len(order))
            for number in range(sent, due):
                turn, at = divmod(number, len(order))
                counts = tuple(min(total - 1, (turn + 1) * step) for total in end)
                busy_s = min(interval_s, 1.0)
                sent_bytes = int(busy_s * UPLOAD_BYTES_S * random.uniform(0.9, 1.1))
                order[at].send(Report((Advance(BLOB, counts),), sent_bytes, busy_s))
            sent = due
            await asyncio.sleep(REPORT_SLOT_S)
        return {"reports": float(sent), "seconds": time.monotonic() - started, "assigns": float(self.assigns)}

    async def vouch(self, seconds: float) -> dict[str, float]:
        """The roots state the hashes of all pieces, evenly over so many seconds."""
        started, sent = time.monotonic(), 0
        while sent < self.pieces and not self.failure:
            due = min(self.pieces, int((time.monotonic() - started) / seconds * self.pieces) + 1)
            for stripe, root in self.roots.items():
                pieces = tuple(piece for piece in range(sent, due) if piece % self.stripes == stripe)
                if pieces:
                    root.send(Vouched(BLOB, 0, pieces, os.urandom(32) * len(pieces)))
            sent = due
            await asyncio.sleep(VOUCH_SLOT_S)
        while not self.failure and time.monotonic() - started < 2 * seconds + JOIN_TIMEOUT_S:
            before = self.listed
            await asyncio.sleep(QUIET_S)
            if before == self.listed:
                break
        return {
            "listed": float(self.listed),
            "listed_bytes": float(self.listed_bytes),
            "messages_per_host": self.listed / self.count,
        }


def clients(commands: Connection, port: int, chosen: argparse.Namespace) -> None:
    """The client process: does what it is told, one command after the other, and answers with
    figures."""
    raise_file_limit()

    async def work() -> None:
        load = Load(port, chosen)
        while True:
            name, *words = await asyncio.to_thread(commands.recv)
            if name == "stop":
                os._exit(0)
            before = time.process_time()
            match name:
                case "connect":
                    answer = await load.connect(join=words[0])
                case "join":
                    answer = await load.join()
                case "vouch":
                    answer = await load.vouch(*words)
                case _:
                    answer = await load.report(*words)
            commands.send((load.failure, answer | {"clients_cpu_s": time.process_time() - before}))

    asyncio.run(work())
