"""What tests of BitTorrent need: blobs with torrents, a peer that does as it is told, aria2c."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from formats_rig import torrent_info
from ports import free_port
from waits import wait_until

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.pieces import PieceList
from p2pdist.model.torrent import Torrent, decode_torrent
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore
from p2pdist.transfer.stream.events import PieceReceived, StreamClosed, StreamEvent
from p2pdist.transfer.torrent.seeds import Seed
from p2pdist.transfer.torrent.swarm import Swarm
from p2pdist.transfer.torrent.transfer import TorrentTransfer

PIECE = 64 << 10
WAIT_S = 20.0
NAME = "content"


@dataclass(frozen=True)
class Sample:
    """A blob as its publisher has it."""

    data: bytes
    pieces: PieceList
    digest: Digest
    torrent: Torrent

    def piece(self, number: int) -> bytes:
        return self.data[number * PIECE : (number + 1) * PIECE]


def torrent_of(data: bytes) -> Torrent:
    return decode_torrent(torrent_info(io.BytesIO(data), len(data), NAME))


def sample(seed: int, pieces: int, *, short: int = 1000) -> Sample:
    """A blob of so many pieces, the last one shorter by `short` bytes."""
    data = random.Random(seed).randbytes(pieces * PIECE - short)
    made = PieceList.of_stream(io.BytesIO(data), len(data))
    assert made.layout.piece_size == PIECE
    return Sample(data, made, digest_of(data), torrent_of(data))


def stopped(transfer: TorrentTransfer) -> bool:
    """Close a transfer and wait until libtorrent has closed its file; False when it has not."""
    transfer.close()
    return transfer.join(5.0)


def stored(store: BlobStore, found: Sample) -> Blob:
    """The blob, complete, in a store."""
    blob = store.begin(found.digest, found.pieces)
    for piece in range(blob.layout.count):
        assert blob.write(piece, found.piece(piece))
    blob.finish()
    return blob


def seed_of(blob: Blob, torrent: Torrent, last_used: float = 0.0, swarm: Swarm | None = None) -> Seed:
    return Seed(blob.digest, blob.path, torrent, last_used, swarm or Swarm())


def open_files(path: Path) -> int:
    """How many descriptors of this process are open on a file, removed or not."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{name}").removesuffix(" (deleted)") == str(path)
    return found


class Events:
    """What a transfer tells, in order."""

    def __init__(self) -> None:
        self.all: list[StreamEvent] = []

    def __call__(self, event: StreamEvent) -> None:
        self.all.append(event)

    @property
    def pieces(self) -> list[int]:
        return [event.piece for event in self.all if isinstance(event, PieceReceived) and event.ok]

    def closed(self) -> StreamClosed:
        """Wait for the end, which comes once and last."""
        wait_until(lambda: any(isinstance(event, StreamClosed) for event in self.all), "the end of the transfer")
        time.sleep(0.02)
        last = self.all[-1]
        assert isinstance(last, StreamClosed)
        assert sum(isinstance(event, StreamClosed) for event in self.all) == 1
        return last


_REQUEST = struct.Struct(">III")


@dataclass
class Peer:
    """A seed that speaks BitTorrent version 1 (BEP 3). It gives `data`, right or wrong, as long as
    no more than `pieces_max` pieces were asked for, and remembers the blocks it sent."""

    torrent: Torrent
    data: bytes
    host: str = "127.0.0.1"
    pieces_max: int = 1 << 30
    sent: list[tuple[int, int]] = field(default_factory=list)
    connections: int = 0

    def __post_init__(self) -> None:
        self._listener = socket.create_server((self.host, 0))
        self.address = (self.host, int(self._listener.getsockname()[1]))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def pieces(self) -> set[int]:
        return {piece for piece, _ in self.sent}

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            hello = _exactly(connection, 68)
            assert hello[28:48] == self.torrent.info_hash_v1
            connection.sendall(hello[:20] + bytes(8) + hello[28:48] + b"-XX0001-" + random.randbytes(12))
            count = -(-len(self.data) // PIECE)
            bits = int("1" * count + "0" * (-count % 8), 2).to_bytes((count + 7) // 8, "big")
            connection.sendall(struct.pack(">IB", 1 + len(bits), 5) + bits + struct.pack(">IB", 1, 1))
            while True:
                body = _exactly(connection, int.from_bytes(_exactly(connection, 4), "big"))
                if body[:1] == b"\x06":
                    self._answer(connection, *_REQUEST.unpack(body[1:]))

    def _answer(self, connection: socket.socket, piece: int, start: int, length: int) -> None:
        if piece not in self.pieces and len(self.pieces) >= self.pieces_max:
            return
        self.sent.append((piece, start))
        block = self.data[piece * PIECE + start : piece * PIECE + start + length]
        connection.sendall(struct.pack(">IBII", 9 + len(block), 7, piece, start) + block)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


class Aria:
    """aria2c with one torrent in a directory of its own; seeds when the content is there."""

    def __init__(self, directory: Path, found: Sample, *, seed: bool) -> None:
        program = shutil.which("aria2c")
        assert program, "aria2c is needed for this test"
        directory.mkdir()
        self.torrent = found.torrent.v1_only()  # see model/torrent.py
        self.file = directory / NAME
        torrent = directory / "content.torrent"
        torrent.write_bytes(self.torrent.metainfo(""))
        if seed:
            self.file.write_bytes(found.data)
        self.port = free_port()
        self._log = (directory / "log").open("wb")
        options = {
            "dir": directory,
            "listen-port": self.port,
            "interface": "127.0.0.1",
            "enable-dht": "false",
            "bt-enable-lpd": "false",
            "enable-peer-exchange": "false",
            "seed-ratio": "0.0",
            "check-integrity": "true",
            "file-allocation": "none",
            "disable-ipv6": "true",
            "summary-interval": "0",
            "no-conf": "true",
        }
        self._process = subprocess.Popen(
            [program, *(f"--{key}={value}" for key, value in options.items()), torrent],
            stdout=self._log,
            stderr=self._log,
        )
        self.address = ("127.0.0.1", self.port)

    def wait_listening(self) -> None:
        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(self.address, 1):
                return True
            return False

        wait_until(listens, "aria2c to listen")

    def has(self, data: bytes) -> bool:
        return self.file.exists() and self.file.read_bytes() == data

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(60)
        self._log.close()
