"""Serves a blob, or a range of it, to any HTTP client (RFC 9110: ranges, conditional requests)."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import BinaryIO, Protocol

from aiohttp import web

from p2pdist.model.digest import Digest
from p2pdist.model.errors import P2PDistError
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.transfer.stream.sendfile import Connection
from p2pdist.transfer.stream.server import UNSENT_BYTES, descriptor_of

RUN_BYTES = 16 << 20
"""Longest run of pieces that one send takes, so that the set of available pieces is read again now
and then."""

BLOCK_BYTES = 1 << 20
"""Most that a reader sends each time the uplink schedules it."""

logger = logging.getLogger(__name__)
_ONE_RANGE = re.compile(r"bytes=[ \t]*([0-9]{0,19})-([0-9]{0,19})[ \t]*\Z", re.IGNORECASE)

WaitFor = Callable[[int], Awaitable[None]]


class ReaderFlow(Protocol):
    """Schedules the blocks of one reader on the uplink."""

    async def wait(self, length: int) -> None:
        """Wait until `length` bytes may be sent. A P2PDistError ends the answer as truncated. May
        be cancelled, when the reader goes away."""

    def block_sent(self, length: int) -> None:
        """The kernel has taken `length` bytes."""


class Unsatisfiable(Exception):
    """The range begins beyond the end of the blob (416)."""


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """Start and end (exclusive) of a Range header over `size` bytes; None when the whole is to be
    sent: the header is absent, malformed, of another unit, or names several ranges (RFC 9110,
    14.2). Raises Unsatisfiable."""
    match = _ONE_RANGE.match(text)
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, end = max(0, size - int(match[2])), size
    else:
        start, end = int(match[1]), int(match[2]) + 1 if match[2] else size
        if end <= start and match[2]:
            return None
    if start >= size or start >= end:
        raise Unsatisfiable
    return start, min(end, size)


async def serve_range(
    request: web.Request,
    digest: Digest,
    blob_file: BinaryIO | int,
    layout: PieceLayout,
    *,
    have: PieceSet | None = None,
    wait_for: WaitFor | None = None,
    proven: Callable[[], Awaitable[None]] | None = None,
    flow: ReaderFlow | None = None,
    dead_after_s: float = 300.0,
    disk: bool = True,
) -> web.StreamResponse:
    """Answer GET or HEAD for a blob: whole, or the one range that the request names.

    `have` is the live set of pieces that may be sent (None: all); for any other piece
    `wait_for(piece)` is awaited, which returns once the piece is in the file and verified. If it
    raises before the head has been sent, the error goes to the caller (a problem document); later,
    the connection is broken so that the client sees a truncated body. `proven` is awaited before
    the last piece of the body is sent, and raises where what was sent is wrong. With `flow` every
    block waits for `flow.wait`, and the kernel holds little unsent. `blob_file` stays open until
    this returns. `dead_after_s`: the kernel drops a client that acknowledges nothing for so long.
    `disk`: the file is on a disk, whose reads may hang.
    """
    headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
    early = _precondition(request, digest, headers)
    if early is not None:
        return early
    part = _part(request, digest, layout.size, headers)
    start, end = part or (0, layout.size)
    response = web.StreamResponse(status=206 if part else 200, headers=headers)
    response.content_type = "application/octet-stream"
    response.content_length = end - start
    if request.method == "HEAD" or start == end:
        await response.prepare(request)
        return response
    body = _Body(descriptor_of(blob_file), layout, have, wait_for, flow, proven)
    connection = _connection(request, flow, dead_after_s, disk=disk)
    try:
        with connection:
            await body.available(start)
            await response.prepare(request)
            await connection.flushed()
            await body.send(connection, start, end)
    except ConnectionError:
        connection.gone = True
    except Exception as error:
        if not response.prepared:
            raise
        if isinstance(error, P2PDistError):
            logger.info("sending %s to %s ends early: %s", digest, request.remote, error)
        else:
            logger.exception("sending %s to %s fails", digest, request.remote)
        connection.abort()
    if connection.gone:
        connection.abort()
    return response


def _part(request: web.Request, digest: Digest, size: int, headers: dict[str, str]) -> tuple[int, int] | None:
    """Start and end of the range that a GET asks for, which `headers` state then; None for the
    whole blob. Raises HTTPRequestRangeNotSatisfiable."""
    if request.method != "GET" or not _range_applies(request, digest):
        return None
    try:
        part = parse_range(request.headers.get("Range", ""), size)
    except Unsatisfiable:
        headers["Content-Range"] = f"bytes */{size}"
        raise web.HTTPRequestRangeNotSatisfiable(headers=headers) from None
    if part is not None:
        headers["Content-Range"] = f"bytes {part[0]}-{part[1] - 1}/{size}"
    return part


def _connection(request: web.Request, flow: ReaderFlow | None, dead_after_s: float, *, disk: bool) -> Connection:
    """With `flow` the kernel holds little unsent: what it holds is out of the scheduler's hands."""
    unsent_max, small = (UNSENT_BYTES, True) if flow is not None else (None, False)
    return Connection(request, unsent_max=unsent_max, small_buffer=small, dead_after_s=dead_after_s, disk=disk)


def _precondition(request: web.Request, digest: Digest, headers: dict[str, str]) -> web.StreamResponse | None:
    """The response when If-Match or If-None-Match decides the request (RFC 9110, 13.2.2)."""
    if_match, if_none_match = request.if_match, request.if_none_match
    if if_match and not any(tag.value in (digest, "*") and not tag.is_weak for tag in if_match):
        raise web.HTTPPreconditionFailed(headers=headers)
    if if_none_match and any(tag.value in (digest, "*") for tag in if_none_match):
        return web.Response(status=304, headers=headers)
    return None


def _range_applies(request: web.Request, digest: Digest) -> bool:
    """Whether If-Range lets a range apply: only when it names the blob's entity tag, strongly. A
    date never matches, as responses have none."""
    condition = request.headers.get("If-Range")
    return condition is None or condition.strip() == f'"{digest}"'


class _Body:
    """The bytes of a blob as they become available."""

    def __init__(
        self,
        file: int,
        layout: PieceLayout,
        have: PieceSet | None,
        wait_for: WaitFor | None,
        flow: ReaderFlow | None,
        proven: Callable[[], Awaitable[None]] | None,
    ) -> None:
        assert have is None or wait_for is not None, "missing pieces can be waited for"
        self._file = file
        self._layout = layout
        self._have = have
        self._wait_for = wait_for
        self._flow, self._proven = flow, proven
        self._run_bytes = RUN_BYTES if flow is None else BLOCK_BYTES

    def _has(self, piece: int) -> bool:
        return self._have is None or piece in self._have

    async def available(self, position: int) -> None:
        """Wait for the piece that holds byte `position`."""
        piece = position // self._layout.piece_size
        if not self._has(piece):
            assert self._wait_for is not None
            await self._wait_for(piece)

    async def send(self, connection: Connection, start: int, end: int) -> None:
        """Send the bytes from `start` to `end` as they come."""
        held_back = end
        if self._proven is not None:
            held_back = self._layout.offset((end - 1) // self._layout.piece_size)
        while start < end:
            await self.available(start)
            if start >= held_back and self._proven is not None:
                await self._proven()
            limit = held_back if start < held_back else end
            run_end = self._run_end(start, min(limit, start + self._run_bytes))
            if self._flow is not None:
                await self._flow.wait(run_end - start)
            await connection.send_file(self._file, start, run_end - start)
            if self._flow is not None:
                self._flow.block_sent(run_end - start)
            start = run_end

    def _run_end(self, start: int, end: int) -> int:
        """The end of the run of available pieces from `start`, whose own piece is available."""
        piece = start // self._layout.piece_size + 1
        while self._layout.offset(piece) < end and self._has(piece):
            piece += 1
        return min(end, self._layout.offset(piece))
