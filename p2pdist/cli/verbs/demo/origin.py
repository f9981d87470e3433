"""The demo's central storage: a small static HTTP server that counts what it sends.

`python -m p2pdist.cli.verbs.demo.origin --directory DIR --listen HOST:PORT` serves the files below
DIR to GET and HEAD, with one byte range (RFC 9110, section 14), entity tags and modification times.
GET /-/served answers {"bytes", "requests"}: the bytes of bodies that were handed to the kernel, so
the demo knows what left the origin without asking any agent. Any web server would do in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path

from aiohttp import web

from p2pdist.model.address import parse_address

BLOCK = 256 << 10
SERVED_PATH = "/-/served"


class StaticOrigin:
    """Serves one directory, read only. `bytes_sent` and `requests` count file bodies and requests
    for files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.bytes_sent = 0
        self.requests = 0

    def application(self) -> web.Application:
        """The aiohttp application; HEAD comes with GET."""
        app = web.Application()
        app.router.add_get(SERVED_PATH, self.served)
        app.router.add_get("/{path:.*}", self.file)
        return app

    async def served(self, _request: web.Request) -> web.Response:
        return web.json_response({"bytes": self.bytes_sent, "requests": self.requests})

    def find(self, name: str) -> Path | None:
        """The regular file of that name below the directory; None also for names that lead out of
        it."""
        if "\0" in name:
            return None
        path = (self.directory / name.lstrip("/")).resolve()
        return path if path.is_relative_to(self.directory) and path.is_file() else None

    async def file(self, request: web.Request) -> web.StreamResponse:
        """A file or one range of it: 200, 206, 404, or 416 with the size."""
        self.requests += 1
        path = self.find(request.match_info["path"])
        if path is None:
            return web.Response(status=404, text="no such file\n")
        modified = path.stat().st_mtime
        tag = f'"{path.stat().st_size:x}-{int(modified * 1e9):x}"'
        return await self.send(request, path, {"ETag": tag, "Last-Modified": formatdate(modified, usegmt=True)})

    def count(self, path: Path, length: int) -> None:
        """So many bytes of a file were handed to the kernel."""
        self.bytes_sent += length

    async def send(self, request: web.Request, path: Path, fields: Mapping[str, str]) -> web.StreamResponse:
        """Send a file or one range of it, with these fields in the head."""
        with path.open("rb") as file:
            size = path.stat().st_size
            headers = {"Accept-Ranges": "bytes", **fields}
            try:
                start, stop, _step = request.http_range.indices(size)
            except ValueError:
                start, stop = size, 0
            ranged = "Range" in request.headers
            if ranged and start >= stop:
                return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
            if ranged:
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            response = web.StreamResponse(status=206 if ranged else 200, headers=headers)
            response.content_length = stop - start
            response.content_type = "application/octet-stream"
            await response.prepare(request)
            if request.method != "HEAD":
                file.seek(start)
                while start < stop and (block := file.read(min(BLOCK, stop - start))):
                    await response.write(block)
                    self.count(path, len(block))
                    start += len(block)
            await response.write_eof()
            return response


async def serve(origin: StaticOrigin, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    runner = web.AppRunner(origin.application(), access_log=None, shutdown_timeout=2)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await runner.cleanup()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description="Serve a directory over HTTP, with ranges, and count the bytes")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    options = parser.parse_args()
    asyncio.run(serve(StaticOrigin(options.directory), *parse_address(options.listen)))


if __name__ == "__main__":
    main()
