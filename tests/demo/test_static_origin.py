"""The demo's origin serves what any static server would, and counts exactly what it sent."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from p2pdist.cli.verbs.demo.origin import SERVED_PATH, StaticOrigin

CONTENT = os.urandom(700_001)


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A running origin over a directory with one file; a secret lies beside the directory."""
    (tmp_path / "secret").write_text("secret")
    directory = tmp_path / "origin"
    (directory / "blobs").mkdir(parents=True)
    (directory / "blobs" / "one").write_bytes(CONTENT)
    (directory / "way out").symlink_to(tmp_path / "secret")
    runner = web.AppRunner(StaticOrigin(directory).application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def served(client: aiohttp.ClientSession, url: str) -> int:
    async with client.get(url + SERVED_PATH) as response:
        return int((await response.json())["bytes"])


async def test_a_whole_file_is_served_and_counted(url: str) -> None:
    """GET gives all bytes with a size, an entity tag and a time; HEAD gives the same head and sends
    nothing."""
    async with aiohttp.ClientSession() as client:
        async with client.get(url + "/blobs/one") as response:
            assert response.status == 200
            assert await response.read() == CONTENT
            head = {name: response.headers[name] for name in ("Content-Length", "ETag", "Last-Modified")}
        assert await served(client, url) == len(CONTENT)
        async with client.head(url + "/blobs/one") as response:
            assert {name: response.headers[name] for name in head} == head
        assert await served(client, url) == len(CONTENT)


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-300000", 5, 300_001),
        ("bytes=700000-", 700_000, 700_001),
        ("bytes=-10", 699_991, 700_001),
        ("bytes=699999-9999999", 699_999, 700_001),
    ],
)
async def test_a_range_is_served_and_only_it_is_counted(url: str, asked: str, start: int, stop: int) -> None:
    """Status 206 with exactly the bytes asked for, cut at the end of the file."""
    async with aiohttp.ClientSession() as client:
        async with client.get(url + "/blobs/one", headers={"Range": asked}) as response:
            assert response.status == 206
            assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(CONTENT)}"
            assert await response.read() == CONTENT[start:stop]
        assert await served(client, url) == stop - start


@pytest.mark.parametrize("asked", ["bytes=700001-", "bytes=nonsense", "bytes=9-3"])
async def test_an_impossible_range_is_refused_with_the_size(url: str, asked: str) -> None:
    """Status 416; nothing is sent."""
    async with aiohttp.ClientSession() as client:
        async with client.get(url + "/blobs/one", headers={"Range": asked}) as response:
            assert response.status == 416
            assert response.headers["Content-Range"] == f"bytes */{len(CONTENT)}"
        assert await served(client, url) == 0


@pytest.mark.parametrize(
    "path", ["/none", "/blobs", "/way%20out", "/..%2fsecret", "/blobs/%2e%2e/%2e%2e/secret", "/a%00b", "//etc/passwd"]
)
async def test_nothing_outside_the_directory_is_served(url: str, path: str) -> None:
    """Missing files, directories, links and names that lead out are all 404."""
    from yarl import URL

    async with aiohttp.ClientSession() as client, client.get(URL(url + path, encoded=True)) as response:
        assert response.status == 404
        assert b"secret" not in await response.read()
