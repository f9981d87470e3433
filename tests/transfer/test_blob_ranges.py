"""Blobs and ranges of them for any HTTP client, as curl sees them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from stream_rig import PIECE, SampleBlob

from p2pdist.model.errors import P2PDistError, Unavailable
from p2pdist.model.pieces import PieceLayout, PieceSet
from p2pdist.transfer.stream.ranges import PLAIN, RangeOptions, Unsatisfiable, parse_range, parse_ranges, serve_range


@dataclass
class Holder:
    """An agent that holds some pieces and gets others later."""

    blob: SampleBlob
    have: PieceSet | None = None
    port: int = 0
    failure: P2PDistError | None = None
    options: RangeOptions = PLAIN
    waited: list[int] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ended: int = 0

    async def wait_for(self, piece: int) -> None:
        self.waited.append(piece)
        assert self.have is not None
        while piece not in self.have:
            if self.failure is not None:
                raise self.failure
            self.news.clear()
            await self.news.wait()

    async def handler(self, request: web.Request) -> web.StreamResponse:
        try:
            with self.blob.path.open("rb") as file:
                digest, layout = self.blob.digest, self.blob.layout
                return await serve_range(
                    request, digest, file, layout, have=self.have, wait_for=self.wait_for, options=self.options
                )
        finally:
            self.ended += 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/blobs/{self.blob.digest}"


@dataclass
class Answer:
    code: int
    status: int
    headers: dict[str, str]
    body: bytes


@pytest.fixture
async def holder(blob: SampleBlob, start_app) -> Holder:
    holder = Holder(blob)
    holder.port = await start_app("*", "/v1/blobs/{digest}", holder.handler)
    return holder


async def curl(tmp_path: Path, *arguments: str) -> Answer:
    """Run curl; `code` is its exit code (18: the body ended early)."""
    head, body = tmp_path / "head", tmp_path / "body"
    body.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec("curl", "-sS", "-m", "8", "-D", head, "-o", body, *arguments)
    code = await process.wait()
    lines = head.read_text().strip().split("\r\n\r\n")[-1].splitlines()
    fields = dict(line.lower().split(": ", 1) for line in lines[1:])
    return Answer(code, int(lines[0].split()[1]), fields, body.read_bytes() if body.exists() else b"")


async def test_the_whole_blob(holder: Holder, blob: SampleBlob, tmp_path: Path) -> None:
    answer = await curl(tmp_path, holder.url)
    assert (answer.code, answer.status, answer.body) == (0, 200, blob.data)
    assert answer.headers["etag"] == f'"{blob.digest}"'
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-length"] == str(len(blob.data))


@pytest.mark.parametrize(
    "wanted",
    [
        "0-0",
        "0-65535",
        "65535-65536",
        "1000-200000",
        "2622000-",
        "-1",
        "-100000",
        "-99999999",
        "5-99999999",
        "5-18446744073709551615",
    ],
)
async def test_a_range(holder: Holder, blob: SampleBlob, tmp_path: Path, wanted: str) -> None:
    first, _, last = wanted.partition("-")
    size = len(blob.data)
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    answer = await curl(tmp_path, "-r", wanted, holder.url)
    assert (answer.code, answer.status) == (0, 206)
    assert answer.body == blob.data[start:end]
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"


@pytest.mark.parametrize(
    "wanted", ["bytes=5-1", "bytes=a-b", "lines=1-2", "bytes=-", "bytes=0-1,5-6", "bytes 0-1", "0-1"]
)
async def test_a_range_that_is_malformed_or_multiple_gets_the_whole(
    holder: Holder, blob: SampleBlob, tmp_path: Path, wanted: str
) -> None:
    answer = await curl(tmp_path, "-H", f"Range: {wanted}", holder.url)
    assert (answer.status, answer.body) == (200, blob.data)


async def test_a_range_beyond_the_end_is_416(holder: Holder, blob: SampleBlob, tmp_path: Path) -> None:
    for wanted in (f"{len(blob.data)}-", "99999999-", "-0"):
        answer = await curl(tmp_path, "-H", f"Range: bytes={wanted}", holder.url)
        assert answer.status == 416
        assert answer.headers["content-range"] == f"bytes */{len(blob.data)}"
        assert answer.headers["content-type"].startswith("application/problem+json")
        assert json.loads(answer.body)["status"] == 416


async def test_conditions(holder: Holder, blob: SampleBlob, tmp_path: Path) -> None:
    """If-None-Match 304, If-Match 412, If-Range whole unless the entity tag is ours."""
    ours, other = f'"{blob.digest}"', '"sha256:other"'
    for tag in (ours, f"W/{ours}", "*", f"{other}, {ours}"):
        answer = await curl(tmp_path, "-H", f"If-None-Match: {tag}", holder.url)
        assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", ours)
    assert (await curl(tmp_path, "-H", f"If-None-Match: {other}", holder.url)).status == 200
    for tag in (other, f"W/{ours}", "other", "'", ",", f'"a,{blob.digest},b"'):
        assert (await curl(tmp_path, "-H", f"If-Match: {tag}", holder.url)).status == 412
    for tag in (ours, "*", f"{other}, {ours}", str(blob.digest)):  # clients of S3 leave the quotes out
        assert (await curl(tmp_path, "-H", f"If-Match: {tag}", holder.url)).status == 200
    assert (await curl(tmp_path, "-H", f"If-None-Match: {blob.digest}", holder.url)).status == 304
    for tag, status in ((ours, 206), (other, 200), (f"W/{ours}", 200), ("Tue, 15 Nov 1994 12:45:26 GMT", 200)):
        answer = await curl(tmp_path, "-r", "10-19", "-H", f"If-Range: {tag}", holder.url)
        assert (answer.status, answer.body) == (status, blob.data[10:20] if status == 206 else blob.data)


async def test_conditions_with_dates_count_where_the_content_has_one(
    holder: Holder, blob: SampleBlob, tmp_path: Path
) -> None:
    """And where no condition with a tag stands beside them (RFC 9110, 13.2.2)."""
    then, later, before = (f"Tue, 15 Nov 1994 12:45:{second} GMT" for second in (26, 27, 25))
    cases = [
        ("If-Modified-Since", then, 304),
        ("If-Modified-Since", later, 304),
        ("If-Modified-Since", before, 200),
        ("If-Modified-Since", "yesterday", 200),
        ("If-Unmodified-Since", then, 200),
        ("If-Unmodified-Since", before, 412),
    ]
    for name, date, _ in cases:
        assert (await curl(tmp_path, "-H", f"{name}: {date}", holder.url)).status == 200, "it has none"
    holder.options = RangeOptions({"Last-Modified": then})
    for name, date, status in cases:
        assert (await curl(tmp_path, "-H", f"{name}: {date}", holder.url)).status == status, (name, date)
    ours = f'"{blob.digest}"'
    for tag, date in (
        (f"If-Match: {ours}", f"If-Unmodified-Since: {before}"),
        ('If-None-Match: "x"', f"If-Modified-Since: {then}"),
    ):
        assert (await curl(tmp_path, "-H", tag, "-H", date, holder.url)).status == 200


async def test_head_says_the_size_and_waits_for_nothing(holder: Holder, blob: SampleBlob, tmp_path: Path) -> None:
    holder.have = PieceSet(blob.layout.count)
    answer = await curl(tmp_path, "-I", "-r", "0-1", holder.url)
    assert (answer.status, answer.headers["content-length"]) == (200, str(len(blob.data)))
    assert holder.waited == []


async def test_other_methods_and_an_empty_blob(holder: Holder, blob: SampleBlob, tmp_path: Path) -> None:
    blob.layout = PieceLayout(0, PIECE)
    blob.path.write_bytes(b"")
    answer = await curl(tmp_path, holder.url)
    assert (answer.code, answer.status, answer.headers["content-length"]) == (0, 200, "0")
    for wanted in ("0-", "0-0", "-5"):
        answer = await curl(tmp_path, "-r", wanted, holder.url)
        assert (answer.code, answer.status, answer.body) == (0, 200, b""), "as nginx and Go's http.ServeContent answer"
    assert (await curl(tmp_path, "-r", "1-", holder.url)).status == 416


async def test_curl_resumes_a_broken_download(holder: Holder, blob: SampleBlob, tmp_path: Path) -> None:
    output = tmp_path / "resumed"
    output.write_bytes(blob.data[:100_000])
    process = await asyncio.create_subprocess_exec("curl", "-sS", "-C", "-", "-o", output, holder.url)
    assert await process.wait() == 0
    assert output.read_bytes() == blob.data


async def test_one_connection_serves_many_ranges(holder: Holder, blob: SampleBlob, tmp_path: Path) -> None:
    """Sending past the transport leaves it fit for the next request."""
    arguments: list[str] = []
    for number in range(6):
        if number:
            arguments += ["--next", "-sS"]
        arguments += [
            "-r",
            f"{number * 1000}-{number * 300_000 + 5}",
            "-o",
            str(tmp_path / f"part-{number}"),
            holder.url,
        ]
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "-v", *arguments, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    _, log = await process.communicate()
    assert process.returncode == 0
    assert log.count(b"Connected to") == 1
    for number in range(6):
        assert (tmp_path / f"part-{number}").read_bytes() == blob.data[number * 1000 : number * 300_000 + 6]


async def test_missing_pieces_are_sent_as_they_arrive(holder: Holder, blob: SampleBlob, tmp_path: Path) -> None:
    """Only pieces of the range are waited for, and a sparse file's holes never get out."""
    holder.have = have = PieceSet(blob.layout.count)
    for piece in (1, 2, 3, 6):
        have.add(piece)
    blob.path.write_bytes(bytes(len(blob.data)))
    with blob.path.open("r+b") as file:
        for piece in have:
            file.seek(piece * PIECE)
            file.write(blob.piece(piece))
    fetch = asyncio.create_task(curl(tmp_path, "-r", f"{PIECE + 10}-{9 * PIECE - 20}", holder.url))
    for piece in (4, 5, 7, 8):
        async with asyncio.timeout(60):
            while piece not in holder.waited:
                await asyncio.sleep(0.005)
        with blob.path.open("r+b") as file:
            file.seek(piece * PIECE)
            file.write(blob.piece(piece))
        have.add(piece)
        holder.news.set()
    answer = await fetch
    assert (answer.code, answer.status) == (0, 206)
    assert answer.body == blob.data[PIECE + 10 : 9 * PIECE - 19]
    assert holder.waited == [4, 5, 7, 8]


async def test_a_failure_before_the_head_is_a_problem_document(
    holder: Holder, blob: SampleBlob, tmp_path: Path
) -> None:
    holder.have = PieceSet(blob.layout.count)
    holder.failure = Unavailable("nobody holds piece 0", remedy="Try later")
    answer = await curl(tmp_path, holder.url)
    assert (answer.code, answer.status) == (0, 503)
    assert json.loads(answer.body)["detail"] == "nobody holds piece 0"


async def test_a_failure_after_the_head_is_seen_as_truncated(
    holder: Holder, blob: SampleBlob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holder.have = PieceSet(blob.layout.count)
    holder.have.add(0)
    holder.failure = Unavailable("nobody holds piece 1")
    caplog.set_level(logging.INFO)
    answer = await curl(tmp_path, holder.url)
    assert (answer.code, answer.status) in ((18, 200), (56, 200)), "curl reports a partial file"
    assert len(answer.body) <= PIECE
    assert "nobody holds piece 1" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_client_that_goes_away_ends_the_wait(
    holder: Holder, blob: SampleBlob, caplog: pytest.LogCaptureFixture
) -> None:
    holder.have = PieceSet(blob.layout.count)
    for linger in (False, True):
        with socket.create_connection(("127.0.0.1", holder.port)) as connection:
            connection.sendall(f"GET /v1/blobs/{blob.digest} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            async with asyncio.timeout(60):
                while len(holder.waited) <= linger:
                    await asyncio.sleep(0.005)
            if linger:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        async with asyncio.timeout(60):
            while holder.ended <= linger:
                await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert caplog.records == []


def test_ranges_of_headers() -> None:
    """Every form of a single byte range (RFC 9110, 14.1.2) over 100 bytes."""
    forms = {
        "bytes=0-": (0, 100),
        "bytes=99-": (99, 100),
        "bytes=-5": (95, 100),
        "BYTES=1-2": (1, 3),
        "bytes= 1-2 ": (1, 3),
    }
    for text, expected in forms.items():
        assert parse_range(text, 100) == expected
    for text in ("", "bytes=", "bytes=2-1", "bytes=1-2,3-4", "bytes=1-2-3", "bytes=+1-2", "bytes=٣-", "bytes=1" * 30):
        assert parse_range(text, 100) is None
    for text in ("bytes=100-", "bytes=100-200", "bytes=-0"):
        with pytest.raises(Unsatisfiable):
            parse_range(text, 100)
    for text in ("bytes=0-", "bytes=0-0", "bytes=-5"):
        assert parse_range(text, 0) is None, "there is nothing to take a part of"
    with pytest.raises(Unsatisfiable):
        parse_range("bytes=1-", 0)


@dataclass
class LateHolder(Holder):
    """A holder whose route asks for a first byte in time, and takes several ranges."""

    begin_s: float = 0.3
    late_begin: bool = False
    refuses_nothing: bool = False
    unproven: asyncio.Event | None = None
    sent: int = 0

    async def prove(self) -> None:
        if self.unproven is not None:
            await self.unproven.wait()

    def count(self, length: int) -> None:
        self.sent += length

    async def handler(self, request: web.Request) -> web.StreamResponse:
        by = asyncio.get_running_loop().time() + self.begin_s
        with self.blob.path.open("rb") as file:
            late, refuses = self.late_begin, self.refuses_nothing
            options = RangeOptions({"X-Kind": "a"}, 3, by, self.count, late_begin=late, refuses_nothing=refuses)
            digest, layout, have = self.blob.digest, self.blob.layout, self.have
            return await serve_range(
                request,
                digest,
                file,
                layout,
                have=have,
                wait_for=self.wait_for,
                proven=self.prove if have is not None else None,
                options=options,
            )

    def give(self, piece: int) -> None:
        assert self.have is not None
        self.have.add(piece)
        self.news.set()


@pytest.fixture
async def late(blob: SampleBlob, start_app) -> LateHolder:
    holder = LateHolder(blob)
    holder.port = await start_app("*", "/v1/blobs/{digest}", holder.handler)
    return holder


async def test_several_ranges_are_parts_in_the_order_asked_for(
    late: LateHolder, blob: SampleBlob, tmp_path: Path
) -> None:
    answer = await curl(tmp_path, "-H", "Range: bytes=500000-700000,0-9,-5", late.url)
    assert (answer.code, answer.status) == (0, 206)
    boundary = answer.headers["content-type"].partition("boundary=")[2]
    size, parts = len(blob.data), (b"\r\n" + answer.body).split(f"\r\n--{boundary}".encode())
    ranges = [(500000, 700001), (0, 10), (size - 5, size)]
    head = "\r\nContent-Type: application/octet-stream\r\nContent-Range: bytes {}-{}/{}\r\n\r\n"
    expected = [head.format(start, end - 1, size).encode() + blob.data[start:end] for start, end in ranges]
    assert parts == [b"", *expected, b"--\r\n"]
    assert late.sent == len(answer.body) == int(answer.headers["content-length"])
    assert answer.headers["x-kind"] == "a"


async def test_without_a_byte_in_time_the_answer_is_503(late: LateHolder, blob: SampleBlob, tmp_path: Path) -> None:
    late.have = PieceSet(blob.layout.count)
    late.give(3)
    answer = await curl(tmp_path, late.url)
    assert (answer.status, json.loads(answer.body)["status"]) == (503, 503)


async def test_a_range_whose_only_piece_is_not_proven_in_time_is_503(
    late: LateHolder, blob: SampleBlob, tmp_path: Path
) -> None:
    late.have, late.unproven = PieceSet(blob.layout.count), asyncio.Event()
    for piece in range(blob.layout.count):
        late.give(piece)
    answer = await curl(tmp_path, "-r", "0-99", late.url)
    assert answer.status == 503


async def test_the_head_of_a_byte_that_is_not_proven_goes_out_where_clients_ask_again(
    late: LateHolder, blob: SampleBlob
) -> None:
    """Some clients ask for one byte to learn the size. The byte waits for the proof."""
    late.have, late.unproven = PieceSet(blob.layout.count), asyncio.Event()
    late.give(0)
    late.begin_s, late.late_begin = 60.0, True
    async with aiohttp.ClientSession() as http, http.get(late.url, headers={"Range": "bytes=0-0"}) as answer:
        assert (answer.status, answer.headers["Content-Range"]) == (206, f"bytes 0-0/{len(blob.data)}")
        assert late.sent == 0
        late.unproven.set()
        assert await answer.read() == blob.data[:1]


async def test_a_range_of_nothing_is_refused_where_the_protocol_wants_that(
    late: LateHolder, blob: SampleBlob, tmp_path: Path
) -> None:
    blob.layout, late.refuses_nothing = PieceLayout(0, PIECE), True
    blob.path.write_bytes(b"")
    for wanted, status in (("0-0", 416), ("0-", 416), ("-1", 416), ("x-", 200)):
        assert (await curl(tmp_path, "-H", f"Range: bytes={wanted}", late.url)).status == status
    assert (await curl(tmp_path, late.url)).status == 200


async def test_while_pieces_come_the_head_goes_out(late: LateHolder, blob: SampleBlob, tmp_path: Path) -> None:
    late.have, late.begin_s = PieceSet(blob.layout.count), 1.0

    async def feed() -> None:
        for piece in (5, 6, 7):
            await asyncio.sleep(0.2)
            late.give(piece)
        await asyncio.sleep(1.2)
        late.give(0)

    feeding = asyncio.create_task(feed())
    answer = await curl(tmp_path, "-r", "0-99", late.url)
    assert (answer.code, answer.status, answer.body) == (0, 206, blob.data[:100])
    await feeding


@pytest.mark.parametrize("wanted", ["0-99", "0-99,70000-70010", ""])
async def test_nothing_is_sent_whole_that_is_not_proven(
    late: LateHolder, blob: SampleBlob, tmp_path: Path, wanted: str
) -> None:
    """Every byte is here, and the end of no part goes out before the whole has matched."""
    late.have, late.unproven = PieceSet(blob.layout.count), asyncio.Event()
    for piece in range(blob.layout.count):
        late.give(piece)
    request = f"GET /v1/blobs/{blob.digest} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", late.port)
    late.begin_s = 60.0
    writer.write((request + (f"Range: bytes={wanted}\r\n" if wanted else "") + "\r\n").encode())
    got = b""
    with pytest.raises(TimeoutError):
        while True:
            got += await asyncio.wait_for(reader.read(1 << 16), 0.3)
    assert blob.data[-50:] not in got and (not wanted or blob.data[:100] not in got)
    late.unproven.set()
    got += await asyncio.wait_for(reader.read(), 60)
    assert blob.data[:100] in got and (wanted or got.endswith(blob.data[-50:]))
    writer.close()


def test_several_ranges_of_headers() -> None:
    """Over 100 bytes, up to four at once."""
    forms = {
        "bytes=0-1,5-": [(0, 2), (5, 100)],
        "bytes= 0-1 ,\t-5": [(0, 2), (95, 100)],
        "bytes=0-1,,5-6,": [(0, 2), (5, 7)],
        "bytes=,0-1": [(0, 2)],
        "bytes=100-,0-1,200-300": [(0, 2)],
        "bytes=0-9,5-14": [(0, 10), (5, 15)],
        "bytes=0-9,10-19,0-19": [(0, 10), (10, 20), (0, 20)],
        "bytes=90-300": [(90, 100)],
    }
    for text, expected in forms.items():
        assert parse_ranges(text, 100, ranges_max=4) == expected
    many = "bytes=0-0,1-1,2-2,3-3,4-4"
    for text in ("bytes=0-1,x", "bytes=0-1,5-4", "bytes=,", "bytes=0-1;5-6", "items=0-1,5-6", many):
        assert parse_ranges(text, 100, ranges_max=4) is None
    for text in ("bytes=100-,200-", "bytes=0-,0-,0-", "bytes=0-9,9-10,8-9", "bytes=-0,-0"):
        with pytest.raises(Unsatisfiable):
            parse_ranges(text, 100, ranges_max=4)
