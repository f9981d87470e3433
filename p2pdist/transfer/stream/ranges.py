"""Serves a blob, or ranges of it, to any HTTP client (RFC 9110: ranges, conditional requests).

Several ranges are a multipart/byteranges body, whose parts come in the order in which the client
names them and are never joined: clients of lazily read layers match them one by one. No byte is
sent more than RANGE_OVERLAP times to one request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import BinaryIO, Protocol

from aiohttp import web

from p2pdist.model.digest import Digest
from p2pdist.model.entity_tag import names_tag
from p2pdist.model.errors import P2PDistError, Unavailable
from p2pdist.model.pieces import PieceLayout
from p2pdist.transfer.stream.sendfile import Connection
from p2pdist.transfer.stream.server import UNSENT_BYTES, descriptor_of

RUN_BYTES = 16 << 20
"""Longest run of pieces that one send takes, so that the set of available pieces is read again now
and then."""

BLOCK_BYTES = 1 << 20
"""Most that a reader sends each time the uplink schedules it."""

RANGE_OVERLAP = 2
"""How many ranges of one request may ask for the same byte."""

CONTENT_TYPE = "application/octet-stream"

logger = logging.getLogger(__name__)
_UNIT = re.compile(r"bytes=(?=[ \t,0-9-])", re.IGNORECASE)
_RANGE = re.compile(r"[ \t]*([0-9]{0,20})-([0-9]{0,20})[ \t]*\Z")

WaitFor = Callable[[int], Awaitable[None]]


class ReaderFlow(Protocol):
    """Schedules the blocks of one reader on the uplink."""

    async def wait(self, length: int) -> None:
        """Wait until `length` bytes may be sent. A P2PDistError ends the answer as truncated. May
        be cancelled, when the reader goes away."""

    def block_sent(self, length: int) -> None:
        """The kernel has taken `length` bytes."""


class HeldPieces(Protocol):
    """The live set of pieces that may be sent."""

    def __contains__(self, piece: int, /) -> bool: ...
    def __len__(self) -> int: ...


class Content(Protocol):
    """Bytes that are sent as they become available."""

    async def begin(self, position: int, end: int, by: float | None) -> None:
        """Wait until a body of the bytes from `position` to `end` may begin; see
        RangeOptions.begin_by."""

    async def send(self, connection: Connection, start: int, end: int) -> None:
        """Send the bytes from `start` to `end` as they come, and count them (RangeOptions.sent)."""


class Unsatisfiable(Exception):
    """No range begins within the blob, or too many ask for the same bytes (416)."""


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """Start and end (exclusive) of a Range header over `size` bytes; None when the whole is to be
    sent: the header is absent, malformed, of another unit, or names several ranges (RFC 9110,
    14.2). Raises Unsatisfiable."""
    if "," in text:
        return None
    ranges = parse_ranges(text, size, ranges_max=1)
    return ranges[0] if ranges else None


def parse_ranges(text: str, size: int, *, ranges_max: int) -> list[tuple[int, int]] | None:
    """Starts and ends (exclusive) of the ranges in a Range header, in its order and without those
    beyond the end; None when the whole is to be sent, as for more than `ranges_max` ranges: a
    server may ignore the field (RFC 9110, 14.2). So it is where there is nothing to take a part of,
    and the range begins at 0: clients ask so for any file, to learn its size or to go on with a
    download. Raises Unsatisfiable."""
    if (unit := _UNIT.match(text)) is None:
        return None
    parts = [part for part in text[unit.end() :].split(",") if part.strip(" \t")]
    if len(parts) > ranges_max:
        return None
    ranges = []
    for part in parts:
        match = _RANGE.match(part)
        if match is None or not (match[1] or match[2]):
            return None
        if not match[1]:
            start, end = max(0, size - int(match[2])), size
        else:
            start, end = int(match[1]), int(match[2]) + 1 if match[2] else size
            if end <= start and match[2]:
                return None
        if start < min(end, size):
            ranges.append((start, min(end, size)))
        elif not size and not start:
            return None
    if not parts:
        return None
    if not ranges or _overlap(ranges) > RANGE_OVERLAP:
        raise Unsatisfiable
    return ranges


def requested_part(text: str, size: int, *, ranges_max: int = 1) -> tuple[int, int, int]:
    """Where what a Range header asks for begins and ends, of `size` bytes, and how many bytes that
    is."""
    try:
        ranges = parse_ranges(text, size, ranges_max=ranges_max)
    except Unsatisfiable:
        ranges = None  # the answer says so
    ranges = ranges or [(0, size)]
    return min(ranges)[0], max(end for _, end in ranges), sum(end - start for start, end in ranges)


def _overlap(ranges: list[tuple[int, int]]) -> int:
    """How many ranges ask for the byte that most of them ask for."""
    depth = deepest = 0
    for _, step in sorted([(start, 1) for start, _ in ranges] + [(end, -1) for _, end in ranges]):
        depth += step
        deepest = max(deepest, depth)
    return deepest


@dataclass(frozen=True, slots=True)
class RangeOptions:
    """What a route asks for beyond a plain answer."""

    headers: Mapping[str, str]
    """More fields of the head."""

    ranges_max: int = 1
    """Ranges that one request may name; one that names more gets the whole blob."""

    begin_by: float | None = None
    """In the event loop's time. When the first byte is not there by then, and no piece of the blob
    has come since the request did, Unavailable is raised; where pieces do come, the head goes out,
    and the body follows."""

    sent: Callable[[int], None] = lambda length: None
    """Hears how many bytes of the body the kernel has taken."""

    idle_s: float | None = None
    """A client that takes nothing for so long, while there is something for it, is left; None: as
    long as it acknowledges that it lives."""

    late_begin: bool = False
    """The head goes out then even where no piece has come: for clients that ask again when a body
    stands still, and not when its head is a failure. It does not wait for the proof of the body's
    first byte: a client that asks for one byte to learn the size has that from the head."""

    refuses_nothing: bool = False
    """A range of an empty content is refused (416), wherever it begins."""

    etag: str = ""
    """The entity tag, where clients know the content by another one than its digest."""


PLAIN = RangeOptions({})


async def serve_range(
    request: web.Request,
    digest: Digest,
    blob_file: BinaryIO | int,
    layout: PieceLayout,
    *,
    have: HeldPieces | None = None,
    wait_for: WaitFor | None = None,
    proven: Callable[[], Awaitable[None]] | None = None,
    flow: ReaderFlow | None = None,
    dead_after_s: float = 300.0,
    disk: bool = True,
    options: RangeOptions = PLAIN,
) -> web.StreamResponse:
    """Answer GET or HEAD for a blob: whole, or the ranges that the request names.

    `have` is the live set of pieces that may be sent (None: all); for any other piece
    `wait_for(piece)` is awaited, which returns once the piece is in the file and verified. If it
    raises before the head has been sent, the error goes to the caller (a problem document); later,
    the connection is broken so that the client sees a truncated body. `proven` is awaited before
    the last piece of the body is sent, and raises where what was sent is wrong. With `flow` every
    block waits for `flow.wait`, and the kernel holds little unsent. `blob_file` stays open until
    this returns. `dead_after_s`: the kernel drops a client that acknowledges nothing for so long.
    `disk`: the file is on a disk, whose reads may hang.
    """
    body = _Body(descriptor_of(blob_file), layout, have, wait_for, flow, options, proven)
    return await serve_content(
        request,
        options.etag or digest,
        layout.size,
        body,
        flow=flow,
        dead_after_s=dead_after_s,
        disk=disk,
        options=options,
    )


async def serve_content(
    request: web.Request,
    tag: str,
    size: int,
    content: Content,
    *,
    flow: ReaderFlow | None = None,
    dead_after_s: float = 300.0,
    disk: bool = True,
    options: RangeOptions = PLAIN,
) -> web.StreamResponse:
    """Answer GET or HEAD for a content of `size` bytes whose entity tag is `tag`: whole, or the
    ranges that the request names. What `content` raises before the head has been sent goes to the
    caller; later, the connection is broken. `flow`, `dead_after_s` and `disk` are those of
    serve_range."""
    headers = {"ETag": f'"{tag}"', "Accept-Ranges": "bytes", **options.headers}
    early = _precondition(request, tag, headers)
    if early is not None:
        return early
    ranges = _ranges(request, tag, size, headers, options)
    parts = _parts(ranges, size, headers)
    response = web.StreamResponse(status=206 if ranges else 200, headers=headers)
    response.content_length = sum(len(part.head) + part.end - part.start for part in parts)
    if request.method == "HEAD" or not response.content_length:
        await response.prepare(request)
        return response
    connection = _connection(request, flow, dead_after_s, options.idle_s, disk=disk)
    try:
        with connection:
            await content.begin(parts[0].start, parts[0].end, options.begin_by)
            await response.prepare(request)
            await connection.flushed()
            for part in parts:
                if part.head:
                    await connection.send(part.head, more=part.end > part.start)
                    options.sent(len(part.head))
                await content.send(connection, part.start, part.end)
    except ConnectionError:
        connection.gone = True
    except Exception as error:
        if not response.prepared:
            raise
        if isinstance(error, P2PDistError):
            logger.info("sending %s to %s ends early: %s", tag, request.remote, error)
        else:
            logger.exception("sending %s to %s fails", tag, request.remote)
        connection.abort()
    if connection.gone:
        connection.abort()
    return response


def document_response(request: web.Request, tag: str, data: bytes) -> web.StreamResponse:
    """The answer to GET or HEAD for a content that is in memory, as `serve_content` gives it for
    one that is not. Raises HTTPException."""
    headers = {"ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
    early = _precondition(request, tag, headers)
    if early is not None:
        return early
    ranges = _ranges(request, tag, len(data), headers, PLAIN)
    (part,) = _parts(ranges, len(data), headers)
    return web.Response(status=206 if ranges else 200, body=data[part.start : part.end], headers=headers)


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a body: `head`, then those of the blob from `start` to `end`."""

    head: bytes
    start: int
    end: int


def _parts(ranges: list[tuple[int, int]] | None, size: int, headers: dict[str, str]) -> list[_Part]:
    """What the body is made of, of which `headers` say then what a client must know (RFC 9110,
    15.3.7)."""
    headers["Content-Type"] = CONTENT_TYPE
    if ranges is None:
        return [_Part(b"", 0, size)]
    if len(ranges) == 1:
        start, end = ranges[0]
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return [_Part(b"", start, end)]
    boundary = os.urandom(16).hex()
    headers["Content-Type"] = f"multipart/byteranges; boundary={boundary}"
    parts, before = [], ""
    for start, end in ranges:
        head = f"{before}--{boundary}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        parts.append(_Part(f"{head}Content-Range: bytes {start}-{end - 1}/{size}\r\n\r\n".encode(), start, end))
        before = "\r\n"
    return [*parts, _Part(f"\r\n--{boundary}--\r\n".encode(), size, size)]


def _ranges(
    request: web.Request, tag: str, size: int, headers: dict[str, str], options: RangeOptions
) -> list[tuple[int, int]] | None:
    """Starts and ends of the ranges that a GET asks for; None for the whole blob. Raises
    HTTPRequestRangeNotSatisfiable."""
    text = request.headers.get("Range", "")
    if request.method != "GET" or not text or not _range_applies(request, tag):
        return None
    if options.ranges_max == 1 and "," in text:
        return None
    try:
        if not size and options.refuses_nothing and parse_ranges(text, 1, ranges_max=options.ranges_max):
            raise Unsatisfiable
        return parse_ranges(text, size, ranges_max=options.ranges_max)
    except Unsatisfiable:
        headers["Content-Range"] = f"bytes */{size}"
        raise web.HTTPRequestRangeNotSatisfiable(headers=headers) from None


def _connection(
    request: web.Request, flow: ReaderFlow | None, dead_after_s: float, idle_s: float | None, *, disk: bool
) -> Connection:
    """With `flow` the kernel holds little unsent: what it holds is out of the scheduler's hands."""
    unsent_max, small = (UNSENT_BYTES, True) if flow is not None else (None, False)
    return Connection(
        request, unsent_max=unsent_max, small_buffer=small, dead_after_s=dead_after_s, idle_s=idle_s, disk=disk
    )


def _precondition(request: web.Request, own: str, headers: dict[str, str]) -> web.StreamResponse | None:
    """The response when a condition decides the request (RFC 9110, 13.2.2). One with a date counts
    beside a Last-Modified, where the request has none with a tag of its kind."""
    if_match, if_none_match = (request.headers.get(name, "") for name in ("If-Match", "If-None-Match"))
    modified = parsedate_to_datetime(headers["Last-Modified"]) if "Last-Modified" in headers else None
    if if_match and not names_tag(if_match, own):
        raise web.HTTPPreconditionFailed(headers=headers)
    if modified and not if_match and (since := request.if_unmodified_since) is not None and modified > since:
        raise web.HTTPPreconditionFailed(headers=headers)
    if if_none_match and names_tag(if_none_match, own, weakly=True):
        return web.Response(status=304, headers=headers)
    if modified and not if_none_match and (since := request.if_modified_since) is not None and modified <= since:
        return web.Response(status=304, headers=headers)
    return None


def _range_applies(request: web.Request, tag: str) -> bool:
    """Whether If-Range lets a range apply: only when it names the content's entity tag, strongly. A
    date never matches, as responses have none."""
    condition = request.headers.get("If-Range")
    return condition is None or condition.strip() == f'"{tag}"'


class _Body:
    """The bytes of a blob as they become available."""

    def __init__(
        self,
        file: int,
        layout: PieceLayout,
        have: HeldPieces | None,
        wait_for: WaitFor | None,
        flow: ReaderFlow | None,
        options: RangeOptions,
        proven: Callable[[], Awaitable[None]] | None,
    ) -> None:
        assert have is None or wait_for is not None, "missing pieces can be waited for"
        self._file = file
        self._layout = layout
        self._have = have
        self._wait_for = wait_for
        self._flow, self._proven = flow, proven
        self._sent, self._late = options.sent, options.late_begin
        self._run_bytes = RUN_BYTES if flow is None else BLOCK_BYTES

    def _has(self, piece: int) -> bool:
        return self._have is None or piece in self._have

    async def available(self, position: int) -> None:
        """Wait for the piece that holds byte `position`."""
        piece = position // self._layout.piece_size
        if not self._has(piece):
            assert self._wait_for is not None
            await self._wait_for(piece)

    def _held_back(self, end: int) -> int:
        """Where the bytes of a body that ends at `end` begin that are sent once it is proven."""
        return end if self._proven is None else self._layout.offset((end - 1) // self._layout.piece_size)

    async def _prove(self) -> None:
        if self._proven is not None:
            await self._proven()

    async def begin(self, position: int, end: int, by: float | None) -> None:
        """Wait until a body of the bytes from `position` to `end` may begin; see
        RangeOptions.begin_by and late_begin."""
        before = len(self._have) if self._have is not None else 0
        try:
            async with asyncio.timeout_at(by):
                await self.available(position)
                if position >= self._held_back(end) and not self._late:
                    await self._prove()
        except TimeoutError:
            if not self._late and (self._have is None or len(self._have) <= before):
                raise Unavailable("no byte has come in the time that a client may wait", remedy="Ask again") from None

    async def send(self, connection: Connection, start: int, end: int) -> None:
        """Send the bytes from `start` to `end` as they come."""
        held_back = self._held_back(end)
        while start < end:
            await self.available(start)
            if start >= held_back:
                await self._prove()
            limit = held_back if start < held_back else end
            run_end = self._run_end(start, min(limit, start + self._run_bytes))
            if self._flow is not None:
                await self._flow.wait(run_end - start)
            await connection.send_file(self._file, start, run_end - start)
            if self._flow is not None:
                self._flow.block_sent(run_end - start)
            self._sent(run_end - start)
            start = run_end

    def _run_end(self, start: int, end: int) -> int:
        """The end of the run of available pieces from `start`, whose own piece is available."""
        piece = start // self._layout.piece_size + 1
        while self._layout.offset(piece) < end and self._has(piece):
            piece += 1
        return min(end, self._layout.offset(piece))
