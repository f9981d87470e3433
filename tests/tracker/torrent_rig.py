"""A tracker over a real layout, in which blobs and packages were published with their torrent
documents, and peers to run against it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web
from formats_rig import package_torrent_info, torrent_info
from yarl import URL

from p2pdist.model.bencode import decode
from p2pdist.model.digest import Digest, digest_of, hex_of
from p2pdist.model.manifest import (
    BLOB_TYPE,
    CONFIG_TYPE,
    MANIFEST_TYPE,
    PIECES_DIGEST,
    PIECES_SIZE,
    PIECES_TYPE,
    Config,
    Descriptor,
    Manifest,
    Reference,
    blob_reference,
    encode_config,
    encode_manifest,
)
from p2pdist.model.pieces import PieceList
from p2pdist.model.torrent import TORRENT_TYPE, torrent_reference
from p2pdist.origin.contract import Origin
from p2pdist.origin.drivers import open_origin
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.service import Service


class TorrentSite:
    """A tracker on loopback, its origin below `directory`, and a client of it."""

    def __init__(self, directory: Path, origin: Origin, service: Service, http: aiohttp.ClientSession) -> None:
        self.directory, self.origin, self.service, self.http = directory, origin, service, http
        self.url = ""

    async def publish(self, data: bytes, *, name: str = "weights.bin", torrent: bool = True) -> Digest:
        """Push a blob alone, as `p2pdist blob push` does."""
        blob, pieces = await self._layer(data, name, torrent=torrent)
        await self._tag(blob_reference(blob.digest), await self._config(), [blob], [pieces])
        return blob.digest

    async def publish_package(self, reference: Reference, blobs: list[bytes], *, torrent: bool = True) -> Digest:
        """Push a package of these layers; returns the manifest's digest."""
        layers = [await self._layer(data, hex_of(digest_of(data)), torrent=torrent) for data in blobs]
        files = [(hex_of(digest_of(data)), len(data), BytesIO(data)) for data in blobs]
        document = package_torrent_info(sorted(files, key=lambda file: file[0]), sum(map(len, blobs)))
        named = await self._tag(
            reference, await self._config(), [layer for layer, _ in layers], [pieces for _, pieces in layers]
        )
        if torrent:
            await self.attach(named, document)
        return named

    async def attach(self, subject: Digest, document: bytes) -> None:
        """Publish a torrent document about a blob or package."""
        described = Descriptor(TORRENT_TYPE, await self.origin.write_document(document), len(document))
        await self.origin.tag(torrent_reference(subject), described)

    async def _layer(self, data: bytes, name: str, *, torrent: bool) -> tuple[Descriptor, Descriptor]:
        digest = await self.origin.write_document(data)
        pieces = PieceList.of_stream(BytesIO(data), len(data))
        annotations = {PIECES_DIGEST: pieces.digest, PIECES_SIZE: str(pieces.layout.piece_size)}
        if torrent:
            await self.attach(digest, torrent_info(BytesIO(data), len(data), name))
        listed = await self.origin.write_document(pieces.encode())
        return Descriptor(BLOB_TYPE, digest, len(data), annotations), Descriptor(
            PIECES_TYPE, listed, len(pieces.encode())
        )

    async def _config(self) -> Descriptor:
        body = encode_config(Config())
        return Descriptor(CONFIG_TYPE, await self.origin.write_document(body), len(body))

    async def _tag(
        self, reference: Reference, config: Descriptor, layers: list[Descriptor], pieces: list[Descriptor]
    ) -> Digest:
        body = encode_manifest(Manifest(config, tuple(layers), tuple(pieces)))
        digest = await self.origin.write_document(body)
        await self.origin.tag(reference, Descriptor(MANIFEST_TYPE, digest, len(body)))
        return digest

    async def get(self, path: str) -> bytes:
        async with self.http.get(self.url + path) as answer:
            body = await answer.read()
            assert answer.status == 200, body
            return body

    async def problem(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.http.get(self.url + path) as answer:
            return answer.status, await answer.json(content_type="application/problem+json")

    async def ask(self, path: str, query: str) -> dict[bytes, Any]:
        """What /announce or /scrape answers to a query that is sent as it is."""
        async with self.http.get(URL(f"{self.url}{path}?{query}", encoded=True)) as answer:
            assert answer.status == 200 and answer.content_type == "text/plain"
            found: Any = decode(await answer.read())
            assert isinstance(found, dict)
            return found


@asynccontextmanager
async def torrent_site(directory: Path, *, web_origin: str = "") -> AsyncIterator[TorrentSite]:
    """A tracker that runs while the context lasts."""
    layout = directory / "origin"
    layout.mkdir(exist_ok=True)
    origin = open_origin(layout.as_uri())
    loop = asyncio.get_running_loop()
    fleet = Fleet(started_at=loop.time() - 100, origin=layout.as_uri(), report_interval_s=0.1)
    service = Service(fleet, Content(origin), web_origin=web_origin)
    runner = web.AppRunner(make_app(service), shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    clock = asyncio.create_task(service.run())
    try:
        async with aiohttp.ClientSession() as http:
            site = TorrentSite(directory, origin, service, http)
            site.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield site
    finally:
        clock.cancel()
        await runner.cleanup()
        await origin.close()


def announce_query(info_hash: bytes, **fields: Any) -> str:
    """The query of an announce by a peer that lacks something."""
    said = {"peer_id": b"-XX0001-" + bytes(range(12)), "port": 6881, "left": 1} | fields
    texts = {name: quote(value if isinstance(value, bytes) else str(value), safe="") for name, value in said.items()}
    return "&".join([f"info_hash={quote(info_hash, safe='')}", *(f"{name}={text}" for name, text in texts.items())])


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(f"{size} {seed}").randbytes(size)


@asynccontextmanager
async def running(*words: str, output: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that ends with the context."""
    with output.open("ab") as log:
        process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 60)
            except TimeoutError:
                process.kill()
                await process.wait()
