"""Any web server over a layout as an origin: nginx, and sockets that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from origin_rig import Web, free_port, store_file

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Refused, Unavailable, Unsuitable, UsageError
from p2pdist.model.manifest import Descriptor, parse_reference
from p2pdist.origin import bucket
from p2pdist.origin.contract import Origin
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LocalLayout, blob_key

StartWeb = Callable[..., Web]
V1 = parse_reference("app:v1")


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Origin]:
    origin = open_origin(url)
    try:
        yield origin
    finally:
        await origin.close()


@pytest.fixture
async def stored(tmp_path: Path, payload: Path) -> AsyncIterator[tuple[Path, Digest, Descriptor]]:
    layout = LocalLayout(tmp_path / "served")
    layout.scratch()
    digest, manifest = await store_file(layout, payload, "app:v1")
    yield layout.directory, digest, manifest
    await layout.close()


Stored = tuple[Path, Digest, Descriptor]


async def test_a_plain_web_server_is_an_origin(web: StartWeb, stored: Stored, payload: Path) -> None:
    directory, digest, manifest = stored
    async with opened(web(directory).url) as origin:
        found = await origin.resolve(V1)
        assert found == manifest
        assert digest_of(await origin.read(found.digest)) == manifest.digest
        assert await origin.size(digest) == 300_000
        assert await origin.read_range(digest, 100_000, 1000) == payload.read_bytes()[100_000:101_000]
        with pytest.raises(NotFound, match=origin.url):
            await origin.resolve(parse_reference("app:v2"))
        with pytest.raises(NotFound, match=origin.url):
            await origin.read_range(digest_of(b"absent"), 0, 10)


async def test_a_range_is_one_request_on_a_kept_connection(web: StartWeb, stored: Stored) -> None:
    directory, digest, _ = stored
    server = web(directory)
    async with opened(server.url) as origin:
        for start in range(0, 10_000, 1000):
            await origin.read_range(digest, start, 1000)
        await asyncio.gather(*[origin.read_range(digest, start, 1000) for start in range(0, 32_000, 1000)])
    requests = server.requests(42)
    assert [request[1:] for request in requests[:2]] == [
        ["GET", "206", "bytes=0-999"],
        ["GET", "206", "bytes=1000-1999"],
    ]
    assert len(requests) == 42
    # A connection returns to the pool a moment after its answer was read: now and then a second one
    # is opened.
    assert len({request[0] for request in requests[:10]}) <= 3
    assert len({request[0] for request in requests}) <= 18


async def test_a_sub_directory_and_a_trailing_slash(web: StartWeb, stored: Stored) -> None:
    directory, digest, manifest = stored
    server = web(directory.parent)
    async with opened(server.url + "/served/") as origin:
        assert await origin.resolve(V1) == manifest
        assert await origin.size(digest) == 300_000


async def test_truncated_and_altered_blobs_are_corrupt(web: StartWeb, stored: Stored) -> None:
    directory, digest, manifest = stored
    path = directory / blob_key(digest)
    path.write_bytes(path.read_bytes()[:5000])
    async with opened(web(directory).url) as origin:
        for start in (4000, 5000, 250_000):
            with pytest.raises(Corrupt, match=digest) as caught:
                await origin.read_range(digest, start, 2000)
            assert origin.url in str(caught.value)
        (directory / blob_key(manifest.digest)).write_bytes(b"{}")
        with pytest.raises(Corrupt, match=manifest.digest):
            await origin.read(manifest.digest)


@pytest.mark.parametrize(
    ("status", "kind", "exit_code"),
    [
        (401, Refused, 4),
        (403, Refused, 4),
        (404, NotFound, 3),
        (405, Refused, 4),
        (500, Unavailable, 5),
        (503, Unavailable, 5),
    ],
)
async def test_what_a_server_answers_decides_the_failure(
    web: StartWeb, stored: Stored, status: int, kind: type[P2PDistError], exit_code: int
) -> None:
    directory, digest, _ = stored
    async with opened(web(directory, f"location /blobs {{ return {status}; }}").url) as origin:
        for attempt in (origin.read(digest), origin.read_range(digest, 0, 10)):
            with pytest.raises(kind) as caught:
                await attempt
            assert origin.url in str(caught.value)
            assert caught.value.remedy
            assert caught.value.exit_code == exit_code


async def test_an_index_that_may_not_be_read_is_not_one_that_is_not_there(web: StartWeb, stored: Stored) -> None:
    async with opened(web(stored[0], "location /index.json { return 405; }").url) as origin:
        with pytest.raises(Refused, match="405"):
            await origin.resolve(V1)


async def test_a_server_that_knows_no_head_gives_sizes(web: StartWeb, stored: Stored) -> None:
    async with opened(web(stored[0], "if ($request_method = HEAD) { return 405; }").url) as origin:
        assert await origin.size(stored[1]) == 300_000


async def test_a_server_without_ranges_is_told_apart(web: StartWeb, stored: Stored) -> None:
    directory, digest, _ = stored
    async with opened(web(directory, "max_ranges 0;").url) as origin:
        with pytest.raises(Unsuitable, match="byte ranges") as caught:
            await origin.read_range(digest, 10, 10)
    assert caught.value.exit_code == Unavailable.exit_code


async def test_a_range_that_is_not_there_is_no_refusal(web: StartWeb, stored: Stored) -> None:
    """A file may be shorter than it was, or the server may know none of its ranges: no credentials
    help."""
    directory, digest, _ = stored
    async with opened(web(directory, "location /blobs { if ($http_range) { return 416; } }").url) as origin:
        for start in (0, 10):
            with pytest.raises(Unsuitable, match="no such range") as caught:
                await origin.read_range(digest, start, 10)
            assert "credentials" not in caught.value.remedy
    (directory / blob_key(digest)).write_bytes(b"")
    async with opened(web(directory).url) as origin:
        for start in (0, 10):
            with pytest.raises(Corrupt, match="truncated"):
                await origin.read_range(digest, start, 10)


async def test_nobody_listens() -> None:
    async with opened(f"http://127.0.0.1:{free_port()}/x") as origin:
        with pytest.raises(Unavailable, match="connection refused") as caught:
            await origin.resolve(V1)
        assert origin.url in str(caught.value)
        assert caught.value.exit_code == 5


async def test_an_unknown_host_name() -> None:
    async with opened("http://origin.invalid/x") as origin:
        with pytest.raises(Unavailable, match=r"http://origin\.invalid/x"):
            await origin.resolve(V1)


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def socket_server(answer: Answer) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_an_answer_that_breaks_off_is_not_taken_for_complete() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 206 Partial Content\r\nContent-Length: 100\r\nContent-Range: bytes 0-99/300\r\n\r\n" + b"x" * 50
        )
        await writer.drain()

    async with socket_server(answer) as url, opened(url) as origin:
        with pytest.raises(Unavailable):
            await origin.read_range(digest_of(b""), 0, 100)


async def test_other_bytes_than_asked_for_are_not_taken() -> None:
    """A server that answers with another range is not believed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 206 Partial Content\r\nContent-Length: 100\r\nContent-Range: bytes 100-199/300\r\n\r\n"
            + b"x" * 100
        )
        await writer.drain()

    async with socket_server(answer) as url, opened(url) as origin:
        with pytest.raises(Unavailable):
            await origin.read_range(digest_of(b""), 0, 100)


async def test_an_endless_answer_is_cut_off_at_the_limit() -> None:
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 40))
        while sent < 1 << 30:
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()

    async with socket_server(answer) as url, opened(url) as origin:
        with pytest.raises(P2PDistError, match="limit"):
            await origin.read(digest_of(b""), limit=1 << 20)
    assert sent < 64 << 20


async def test_an_endless_range_is_cut_off_at_what_was_asked_for() -> None:
    """A server states the right range and sends on and on: it takes no memory."""
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        head = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-99/300\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (1 << 40))
        while sent < 256 << 20:
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()

    async with socket_server(answer) as url, opened(url) as origin:
        with pytest.raises(Corrupt, match="more than the 100 bytes"):
            await origin.read_range(digest_of(b""), 0, 100)
    assert sent < 64 << 20


async def test_an_answer_of_unknown_length_is_said() -> None:
    """No wait makes that server state lengths."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        await writer.drain()

    async with socket_server(answer) as url, opened(url) as origin:
        with pytest.raises(Unsuitable, match="how long its answer is"):
            await origin.tags()


async def test_a_range_of_a_file_of_unknown_size_is_said() -> None:
    """Such as behind a proxy that does not know the size (RFC 9110, 14.4)."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 3\r\nContent-Range: bytes 0-2/*\r\n\r\nabc")
        await writer.drain()

    async with socket_server(answer) as url, opened(url) as origin:
        with pytest.raises(Unsuitable, match=r"bytes 0-2/\*"):
            await origin.read_range(digest_of(b""), 0, 3)


async def test_where_a_redirect_fails_is_said(web: StartWeb, stored: Stored) -> None:
    directory, digest, _ = stored
    port = free_port()
    async with opened(web(directory, f"location /blobs {{ return 302 http://127.0.0.1:{port}/x; }}").url) as origin:
        with pytest.raises(Unavailable, match=f"connection refused at 127.0.0.1:{port}, to which it redirects"):
            await origin.read_range(digest, 0, 3)


async def test_an_index_that_comes_compressed_is_said(web: StartWeb, stored: Stored) -> None:
    directory, _, _ = stored
    (directory / "index.json").write_bytes(gzip.compress((directory / "index.json").read_bytes()))
    async with opened(web(directory).url) as origin:
        with pytest.raises(Corrupt, match="compressed"):
            await origin.resolve(V1)


async def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "READ_TIMEOUT_S", 1)
    monkeypatch.setattr(bucket, "RETRY_TIMEOUT_S", 1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with socket_server(answer) as url, opened(url) as origin:
        with pytest.raises(Unavailable, match="no answer in time"):
            await origin.read_range(digest_of(b""), 0, 100)


async def test_it_cannot_be_written_to(web: StartWeb, stored: Stored) -> None:
    directory, _, manifest = stored
    async with opened(web(directory).url) as origin:
        with pytest.raises(UsageError, match="cannot be written"):
            await origin.write_document(b"new")
        with pytest.raises(UsageError, match="cannot be written"):
            await origin.tag(V1, manifest)


async def test_credentials_are_used_and_never_shown(web: StartWeb, stored: Stored, tmp_path: Path) -> None:
    directory, _, manifest = stored
    hashed = subprocess.run(
        ["openssl", "passwd", "-apr1", "s3cret/+"], capture_output=True, text=True, check=True
    ).stdout
    (tmp_path / "users").write_text(f"reader:{hashed}")
    server = web(directory, f"auth_basic on; auth_basic_user_file {tmp_path}/users;")
    host = server.url.removeprefix("http://")
    async with opened(f"http://reader:s3cret%2F%2B@{host}/?token=abc") as origin:
        assert origin.url == f"http://{host}"
        assert await origin.resolve(V1) == manifest
    async with opened(f"http://reader:wrong-secret@{host}") as origin:
        with pytest.raises(Refused) as caught:
            await origin.resolve(V1)
        assert "wrong-secret" not in str(caught.value)
    async with opened(f"http://reader:wrong-secret@127.0.0.1:{free_port()}") as origin:
        with pytest.raises(Unavailable) as failure:
            await origin.resolve(V1)
        assert "wrong-secret" not in str(failure.value)


@pytest.mark.slow
def test_a_process_that_read_an_origin_exits_cleanly(web: StartWeb, tmp_path: Path) -> None:
    """The client's threads must not abort the interpreter while it ends; this did happen, in about
    one run of four."""
    (tmp_path / "d").mkdir()
    server = web(tmp_path / "d")
    script = """
import asyncio, sys
from p2pdist.model.digest import digest_of
from p2pdist.origin.drivers import open_origin
async def work(url):
    origin = open_origin(url)
    await asyncio.gather(*[origin.size(digest_of(b"%d" % n)) for n in range(20)])
for url in sys.argv[1:]:
    try:
        asyncio.run(work(url))
    except Exception:
        pass
"""
    command = [sys.executable, "-c", script, server.url, f"http://127.0.0.1:{free_port()}"]
    assert {subprocess.run(command, check=False).returncode for _ in range(3)} == {0}
