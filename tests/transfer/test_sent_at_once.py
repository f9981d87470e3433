"""Blocks that go to the socket without a task being woken for them: the same bytes come out,
whatever the socket takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from authority import Authority
from stream_rig import Pieces, Receiver, SampleBlob, Server, StartApp

from p2pdist.model.messages import StreamRequest
from p2pdist.model.pieces import PieceLayout
from p2pdist.transfer.openssl.server import ServerContext
from p2pdist.transfer.stream.server import Block
from p2pdist.transfer.tls import Tls


class Pushed(Pieces):
    """Its blocks are given to `send` by `push` as long as the kernel takes them whole, and what it
    did not take to who waits."""

    def __init__(self, layout: PieceLayout, wanted: StreamRequest) -> None:
        super().__init__(layout, wanted, block=64 << 10)
        self.send: Callable[[Block], bool] | None = None
        self.at_once_bytes = 0
        self.waited: list[Block] = []
        self._left: asyncio.Queue[Block | None] = asyncio.Queue()

    def at_once(self, send: Callable[[Block], bool] | None) -> None:
        self.send = send
        if send is not None:
            asyncio.get_running_loop().call_soon(self.push)

    def push(self) -> None:
        while self.send is not None and self.todo:
            piece = self.todo.pop(0)
            block = Block(piece, 0, self.layout.length(piece))
            if not self.send(block):
                self.waited.append(block)
                self._left.put_nowait(block)
                return
            self.at_once_bytes += block.length
        if self.send is not None:
            self._left.put_nowait(None)

    async def next_block(self) -> Block | None:
        return await self._left.get()

    def block_sent(self, length: int) -> None:
        super().block_sent(length)
        asyncio.get_running_loop().call_soon(self.push)


async def test_what_the_socket_takes_and_what_it_does_not_make_one_stream(
    server: Server, receiver: Receiver, blob: SampleBlob
) -> None:
    server.make = Pushed
    stream = receiver.open(server.port)
    assert (await receiver.closed(stream)).reason == "done"
    assert receiver.copy.path.read_bytes() == blob.data
    (outgoing,) = server.outgoing
    assert isinstance(outgoing, Pushed)
    assert outgoing.at_once_bytes and outgoing.at_once_bytes + outgoing.sent == len(blob.data)
    assert outgoing.send is None, "the socket is closed"


@pytest.mark.parametrize("slow", [False, True])
async def test_over_tls_blocks_are_given_at_once_as_well(
    receiver: Receiver, blob: SampleBlob, start_app: StartApp, tmp_path: Path, slow: bool
) -> None:
    """A receiver that is slow makes the sender wait, and nothing is sent twice or left out."""
    tls, server = Tls(Authority(tmp_path).issue()), Server(blob, make=Pushed)
    server.port = await start_app("POST", "/v1/streams", server.streams, ServerContext(tls))
    write = receiver.copy.write

    def slowly(piece: int, data: memoryview) -> bool:
        time.sleep(0.01)
        return write(piece, data)

    stream = receiver.open(server.port, tls=tls, write=slowly if slow else None)
    assert (await receiver.closed(stream)).reason == "done"
    assert receiver.copy.path.read_bytes() == blob.data
    (outgoing,) = server.outgoing
    assert isinstance(outgoing, Pushed)
    assert outgoing.at_once_bytes and outgoing.at_once_bytes + outgoing.sent == len(blob.data)


async def test_a_block_that_is_taken_in_part_goes_on_where_it_was(
    server: Server, receiver: Receiver, blob: SampleBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of heads and of data the kernel may take any number of bytes."""
    from p2pdist.transfer.stream.sendfile import Connection

    send_now, send_file_now, turns = Connection.send_now, Connection.send_file_now, iter(range(10**6))

    def little(self: Connection, data: bytes, *, more: bool = False) -> int:
        return (
            send_now(self, data[: next(turns) % 4], more=more) if next(turns) % 5 else send_now(self, data, more=more)
        )

    def part(self: Connection, file: int, offset: int, count: int) -> int:
        return send_file_now(self, file, offset, min(count, 1 + next(turns) * 7919 % (64 << 10)))

    monkeypatch.setattr(Connection, "send_now", little)
    monkeypatch.setattr(Connection, "send_file_now", part)
    server.make = Pushed
    stream = receiver.open(server.port)
    assert (await receiver.closed(stream)).reason == "done"
    assert receiver.copy.path.read_bytes() == blob.data
    (outgoing,) = server.outgoing
    assert isinstance(outgoing, Pushed) and outgoing.waited


async def test_a_file_that_is_too_short_ends_the_stream_although_nobody_waited_for_the_block(
    server: Server, receiver: Receiver, blob: SampleBlob
) -> None:
    blob.path.write_bytes(blob.data[: 3 * (64 << 10) + 5])
    server.make = Pushed
    stream = receiver.open(server.port)
    assert (await receiver.closed(stream)).reason in ("short", "reset")
    assert receiver.received(stream) == [0, 1, 2][: len(receiver.received(stream))]
