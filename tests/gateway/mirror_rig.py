"""An agent whose mirror serves images of a real registry. Manifests are read from the registry;
bytes of blobs come piece by piece, as a test gives them, so that what a client sees meanwhile can
be told apart."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import tarfile
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from origin_rig import free_port

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.agent.api.mirror import make_mirror_app
from p2pdist.agent.api.server import make_apps
from p2pdist.agent.pull.blob import PieceWaits
from p2pdist.cli.daemon import listen
from p2pdist.core.demand.reading_queue import Reading, ReadingQueue
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import NotFound, P2PDistError, Unavailable
from p2pdist.model.image import ImageName
from p2pdist.model.image_manifest import ImageDocument, TagPage
from p2pdist.model.pieces import PIECE_SIZE_MIN, PieceList
from p2pdist.model.upstream import UpstreamSettings, upstream_of
from p2pdist.store.blobs.blob import Blob

PIECE = PIECE_SIZE_MIN
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"


# -- images, in a registry


@dataclass(frozen=True)
class Image:
    """A pushed image."""

    manifest: bytes
    blobs: dict[Digest, bytes]
    """Config and layers."""

    @property
    def digest(self) -> Digest:
        return digest_of(self.manifest)

    @property
    def layers(self) -> list[Digest]:
        return [Digest(layer["digest"]) for layer in json.loads(self.manifest)["layers"]]


def make_layer(size: int, name: str = "data") -> bytes:
    """A gzip layer of about `size` bytes, none of which compresses."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = size
        tar.addfile(entry, io.BytesIO(os.urandom(size)))
    return gzip.compress(plain.getvalue(), 1, mtime=0)


def push_image(address: str, repository: str, tag: str, layers: list[bytes]) -> Image:
    """Push an image with these gzip layers to an open registry."""
    diffs = [f"sha256:{hashlib.sha256(gzip.decompress(layer)).hexdigest()}" for layer in layers]
    config = json.dumps(
        {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diffs}, "config": {}}
    ).encode()
    blobs = {digest_of(blob): blob for blob in (config, *layers)}
    for digest, blob in blobs.items():
        push_blob(address, repository, digest, blob)
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
        "layers": [{"mediaType": LAYER_TYPE, "digest": digest_of(layer), "size": len(layer)} for layer in layers],
    }
    manifest = json.dumps(document).encode()
    push_manifest(address, repository, tag, manifest, MANIFEST_TYPE)
    return Image(manifest, blobs)


def push_blob(address: str, repository: str, digest: Digest, blob: bytes) -> None:
    begun = urllib.request.Request(f"http://{address}/v2/{repository}/blobs/uploads/", method="POST")
    with urllib.request.urlopen(begun, timeout=60) as answer:
        where = answer.headers["Location"]
    sent = urllib.request.Request(f"{where}&digest={digest}", data=blob, method="PUT")
    sent.add_header("Content-Type", "application/octet-stream")
    urllib.request.urlopen(sent, timeout=30).close()


def push_manifest(address: str, repository: str, target: str, manifest: bytes, media_type: str) -> None:
    sent = urllib.request.Request(f"http://{address}/v2/{repository}/manifests/{target}", data=manifest, method="PUT")
    sent.add_header("Content-Type", media_type)
    urllib.request.urlopen(sent, timeout=60).close()


# -- an agent that serves them


class Arrival:
    """A blob on its way into the store, for clients of a mirror what a BlobPull is."""

    def __init__(self, blob: Blob, data: bytes, *, listed: bool = False) -> None:
        self.vouched = None if listed else self
        """Without a list hosts vouch for its pieces."""
        self.demanded: list[tuple[tuple[int, ...], bool]] = []
        """Pieces that are to come before others, and whether no client waits for them yet."""
        self.blob, self._data, self._waits, self.turns = blob, data, PieceWaits(), ReadingQueue()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def body(self) -> Arrival:
        return self

    async def piece(self, piece: int) -> None:
        """Return once a piece is there."""
        if piece not in self.blob.have:
            await self._waits.wait(piece)

    async def demand(self, pieces: Sequence[int], *, prefetch: bool = False, reading: Reading | None = None) -> None:
        """Return once pieces are there, which are to come first."""
        self.demanded.append((tuple(pieces), prefetch))
        for piece in pieces:
            await self.piece(piece)

    async def proven(self) -> None:
        """Return once the whole has matched."""
        await asyncio.shield(self.done)

    def give(self, *pieces: int) -> None:
        """Pieces arrive."""
        layout = self.blob.layout
        for piece in pieces:
            start = layout.offset(piece)
            assert self.blob.write(piece, self._data[start : start + layout.length(piece)])
            self._waits.stored(piece)

    def match(self) -> None:
        """The SHA-256 of the whole was compared."""
        self.blob.finish()
        self.done.set_result(None)
        self._waits.ended(None)

    def fail(self, error: P2PDistError) -> None:
        """The pull fails."""
        self.done.set_exception(error)
        self.done.exception()
        self._waits.ended(error)


class Confirmed:
    """Asks the registry whether it has a blob in a repository."""

    def __init__(self, ask: Callable[..., Awaitable[tuple[bytes, dict[str, str]]]]) -> None:
        self.asked: list[Digest] = []
        self._ask = ask

    async def require(self, name: ImageName, digest: Digest) -> None:
        self.asked.append(digest)
        await self._ask("HEAD", name, f"blobs/{digest}")


class GivenImages:
    """The images of a registry, as Images of an agent. Blobs in `data` come as the test says."""

    def __init__(self, agent: Agent, registry: str, url: str = "") -> None:
        self.upstreams: tuple[UpstreamSettings, ...] = (upstream_of(registry, url),)
        self.data: dict[Digest, bytes] = {}
        self.arrivals: dict[Digest, Arrival] = {}
        self.fetched: list[Digest] = []
        self.confirmed = Confirmed(self._ask)
        self.listed = False
        """Blobs have piece lists from the beginning."""
        self.silent = False
        """Nothing is answered any more."""
        self.flowing = False
        """Pieces come by themselves, the last ones first."""
        self.failure: P2PDistError | None = None
        self._agent, self._registry = agent, registry
        self._feeding: list[asyncio.Task[None]] = []

    async def _ask(self, method: str, name: ImageName, path: str, **headers: str) -> tuple[bytes, dict[str, str]]:
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        if name.upstream != self._registry:
            raise NotFound(f"{name.upstream} is no upstream here")
        url = f"http://{self._registry}/v2/{name.repository}/{path}"
        async with aiohttp.ClientSession() as http, http.request(method, url, headers=headers) as answer:
            if answer.status != 200:
                raise NotFound(f"{name}: {path} is not there")
            return await answer.read(), dict(answer.headers)

    async def manifest(self, name: ImageName, target: str) -> ImageDocument:
        accept = ", ".join((MANIFEST_TYPE, INDEX_TYPE))
        data, headers = await self._ask("GET", name, f"manifests/{target}", Accept=accept)
        return ImageDocument(data, headers["Content-Type"], digest_of(data))

    async def tags(self, name: ImageName, n: int = 1000, last: str = "") -> TagPage:
        data, _ = await self._ask("GET", name, "tags/list")
        names = sorted(tag for tag in json.loads(data)["tags"] if tag > last)
        return TagPage(tuple(names[:n]), len(names) > n)

    async def referrers(self, name: ImageName, digest: Digest, artifact_type: str = "") -> ImageDocument:
        entries = [{"mediaType": MANIFEST_TYPE, "digest": str(digest), "size": 2, "artifactType": "a/b"}]
        chosen = [entry for entry in entries if artifact_type in ("", entry["artifactType"])]
        data = json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": chosen}).encode()
        return ImageDocument(data, INDEX_TYPE, digest_of(data))

    async def blob_size(self, name: ImageName, digest: Digest) -> int:
        _, headers = await self._ask("HEAD", name, f"blobs/{digest}")
        return int(headers["Content-Length"])

    async def fetch_blob(self, name: ImageName, digest: Digest, priority: str = "start") -> tuple[Blob, Arrival | None]:
        size = await self.blob_size(name, digest)
        self.fetched.append(digest)
        if digest not in self.arrivals:
            if digest not in self.data:
                raise Unavailable("no tracker answers")
            data = self.data[digest]
            assert len(data) == size
            pieces = PieceList.of_stream(io.BytesIO(data), size)
            blob = await asyncio.to_thread(self._agent.store.begin_held, digest, pieces)
            if digest in self.arrivals:  # another request was at it
                blob.release()
                return await self.fetch_blob(name, digest)
            self.arrivals[digest] = Arrival(blob, data, listed=self.listed)
            if self.flowing:
                self._feeding.append(asyncio.create_task(self._feed(self.arrivals[digest])))
        arrival = self.arrivals[digest]
        return arrival.blob, None if arrival.blob.complete else arrival

    async def _feed(self, arrival: Arrival) -> None:
        for piece in reversed(range(arrival.blob.layout.count)):
            await asyncio.sleep(0.001)
            arrival.give(piece)
        arrival.match()

    def tracker_changed(self, present: bool) -> None:
        pass

    async def close(self) -> None:
        await asyncio.gather(*self._feeding)
        for arrival in self.arrivals.values():
            if not arrival.done.done():
                arrival.fail(Unavailable("the agent stops"))
            arrival.blob.release()


@dataclass
class Rig:
    """A listening agent: `url` is its mirror's port on loopback, `public` that for the network."""

    agent: Agent
    images: GivenImages
    registry: str
    url: str
    public: str

    def path(self, repository: str, rest: str) -> str:
        """A path in the shape of containers/image."""
        return f"/v2/{self.registry}/{repository}/{rest}"


@asynccontextmanager
async def running_mirror(directory: Path, registry: str) -> AsyncIterator[Rig]:
    """Start an agent with a mirror of `registry`, and end it."""
    agent = Agent(AgentSettings((), "h1", "127.0.0.1:7071", directory / "store"))
    images = GivenImages(agent, registry)
    agent.images = images  # type: ignore[assignment]
    public, _ = make_apps(agent)
    ports = free_port(), free_port()
    runners = []
    try:
        runners.append(await listen(make_mirror_app(agent), ("127.0.0.1", ports[0])))
        runners.append(await listen(public, ("127.0.0.1", ports[1])))
        await agent.start()
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        yield Rig(agent, images, registry, *urls)
    finally:
        await agent.stop()
        for runner in runners:
            runner._shutdown_timeout = 0.1
            await runner.cleanup()
