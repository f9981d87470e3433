"""Serves stripe streams: the pieces of one stripe as frames, with sendfile (StreamRequest in
model/messages.py).

The caller decides what to send next, and when: it passes an Outgoing, which waits until the uplink
schedules the stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import BinaryIO, Protocol

import msgspec
from aiohttp import web

from p2pdist.model.digest import parse_digest
from p2pdist.model.errors import UNDECODABLE, P2PDistError, TooLarge, UsageError
from p2pdist.model.messages import STREAM_END, StreamRequest
from p2pdist.model.pieces import PIECES_LIMIT, PieceLayout
from p2pdist.transfer.stream.frames import FRAME, STREAM_TYPE, WAITS_FIELD
from p2pdist.transfer.stream.sendfile import Connection

REQUEST_BYTES_MAX = PIECES_LIMIT // 6 + (64 << 10)
"""Largest body of POST /v1/streams: a bitmap of PIECES_LIMIT bits in base64, and room for the
rest."""

STRIPES_MAX = 1024
UNSENT_BYTES = 64 << 10

logger = logging.getLogger(__name__)


class Block(msgspec.Struct, frozen=True, gc=False):
    """What to send next: `length` bytes of a piece from `offset` within it. The block at offset 0
    goes out after the head of the frame; blocks of one piece follow each other without another
    piece between them, up to the piece's end."""

    piece: int
    offset: int
    length: int


class Outgoing(Protocol):
    """Decides what one stream sends."""

    async def next_block(self) -> Block | None:
        """Wait until the uplink schedules this stream. None: everything asked for has been sent. A
        P2PDistError ends the stream as truncated. May be cancelled at any time, when the child goes
        away."""

    def block_sent(self, length: int) -> None:
        """The kernel has taken the last block, of `length` bytes."""

    def at_once(self, send: Callable[[Block], bool] | None) -> None:
        """Allow, while a task waits in `next_block`, to call `send` with a block instead, which
        returns whether the kernel took all of it; if not, `next_block` returns that block. None:
        forbid it again."""


class _FrameResponse(web.StreamResponse):
    """A response without chunks, ended by its length or by the end of the connection (RFC 9112,
    6.3)."""

    _length_check = False


async def read_stream_request(request: web.Request) -> StreamRequest:
    """Decode the body of POST /v1/streams; raises UsageError, or TooLarge. PieceSet checks later
    whether `have` fits the blob."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > REQUEST_BYTES_MAX:
            raise TooLarge(f"a stream request is longer than {REQUEST_BYTES_MAX} bytes")
    try:
        decoded = msgspec.json.decode(body, type=StreamRequest)
    except UNDECODABLE as error:
        raise UsageError(f"malformed stream request: {error}") from error
    parse_digest(decoded.blob)
    if not 0 <= decoded.stripe < decoded.stripes <= STRIPES_MAX or len(decoded.host) > 255:
        raise UsageError(f"a stream request asks for stripe {decoded.stripe} of {decoded.stripes}")
    return decoded


def descriptor_of(blob_file: BinaryIO | int) -> int:
    return blob_file if isinstance(blob_file, int) else blob_file.fileno()


async def serve_stream(
    request: web.Request,
    stream: Outgoing,
    blob_file: BinaryIO | int,
    layout: PieceLayout,
    *,
    length: int | None = None,
    waits: bool = False,
    unsent_max: int = UNSENT_BYTES,
    dead_after_s: float = 30.0,
    disk: bool = True,
) -> web.StreamResponse:
    """Respond to a stream request with the blocks that `stream` names, until it names no more or
    the child goes away.

    `length` is how many bytes the whole stream has (frames.py), where the connection serves further
    requests; without it the stream ends with the connection. `waits`: the child is told that there
    is no piece for it yet. `blob_file` stays open until this
    returns. The kernel holds at most `unsent_max` bytes unsent and a small send buffer, since what
    it holds is out of the uplink's hands; it drops a child that acknowledges nothing for
    `dead_after_s`. `disk`: the file is on a disk, whose reads may hang. Never raises for what the
    network does; a failure on this side is logged, and the child sees a truncated stream.
    """
    response = _FrameResponse(headers={"Content-Type": STREAM_TYPE, "Cache-Control": "no-store"})
    if waits:
        response.headers[WAITS_FIELD] = "1"
    if length is None:
        response.force_close()
    else:
        response.content_length = length
    file = descriptor_of(blob_file)
    connection = Connection(
        request, unsent_max=unsent_max, small_buffer=True, dead_after_s=dead_after_s, strict=True, disk=disk
    )
    try:
        with connection:
            await response.prepare(request)
            await connection.flushed()
            await _send_frames(connection, stream, file, layout)
    except ConnectionError:
        connection.gone = True
    except P2PDistError as error:
        logger.info("a stream to %s ends early: %s", request.remote, error)
        connection.abort()
    except Exception:
        logger.exception("a stream to %s fails", request.remote)
        connection.abort()
    if connection.gone:
        connection.abort()
    return response


async def _send_frames(connection: Connection, stream: Outgoing, file: int, layout: PieceLayout) -> None:
    frames = _Frames(connection, file, layout)
    # A task that is woken for each block costs more than giving the block to a socket that has room
    # for it, as most have.
    stream.at_once(frames.send_now)
    try:
        while (block := await stream.next_block()) is not None:
            await frames.send(block)
            stream.block_sent(block.length)
    finally:
        stream.at_once(None)
    frames.check_end()
    await connection.send(FRAME.pack(STREAM_END, 0))


class _Frames:
    """Gives blocks to a connection, and a frame's head before the first block of a piece."""

    def __init__(self, connection: Connection, file: int, layout: PieceLayout) -> None:
        self._connection, self._file, self._layout = connection, file, layout
        self._piece, self._expected = -1, 0
        self._head = b""
        self._offset = self._left = 0
        self._draining = False
        """Whether the transport holds a part of a block that `send_now` gave to it."""

    def send_now(self, block: Block) -> bool:
        """Give a block to the kernel without waiting. False when the kernel did not take all of it,
        or cannot: `send` goes on then, or raises why."""
        self._begin(block)
        try:
            match self._connection.encrypt_now(self._head, self._file, self._offset, self._left):
                case "some" | "all" as taken:
                    self._head, self._left, self._draining = b"", 0, taken == "some"
                    return not self._draining
            if self._head:
                self._head = self._head[self._connection.send_now(self._head, more=True) :]
            if not self._head:
                sent = self._connection.send_file_now(self._file, self._offset, self._left)
                self._offset += sent
                self._left -= sent
        except (OSError, P2PDistError) as error:
            logger.debug("a block cannot be sent at once: %r", error)
        return not self._left

    async def send(self, block: Block) -> None:
        """Send all of a block, or the rest of it. Raises what Connection.send_file raises."""
        if self._draining:
            self._draining = False
            await self._connection.drained()
            return
        if not self._left:
            self._begin(block)
        (head, self._head), (left, self._left) = (self._head, b""), (self._left, 0)
        await self._connection.send_block(head, self._file, self._offset, left)

    def check_end(self) -> None:
        assert self._expected == 0, "the stream ends within a piece"

    def _begin(self, block: Block) -> None:
        length = self._layout.length(block.piece)
        if block.offset == 0:
            assert self._expected == 0, "a piece begins before the last one has ended"
            self._head = FRAME.pack(block.piece, length)
        else:
            assert (block.piece, block.offset) == (self._piece, self._expected), (
                "blocks of a piece do not follow each other"
            )
        end = block.offset + block.length
        assert block.length > 0 and end <= length, "a block reaches beyond its piece"
        self._piece, self._expected = block.piece, end if end < length else 0
        self._offset, self._left = self._layout.offset(block.piece) + block.offset, block.length
