"""Images made without a network: layers of files, in several compressions, pushed to a real
registry by plain HTTP as clients do; and a small registry that behaves badly on purpose."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import zstandard
from aiohttp import web
from registry_rig import PASSWORD, USER, Registry, free_port

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.image_manifest import DOCKER_INDEX_TYPE, DOCKER_MANIFEST_TYPE, INDEX_TYPE
from p2pdist.model.manifest import MANIFEST_TYPE

COMPRESSIONS: Mapping[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("application/vnd.oci.image.layer.v1.tar+gzip", lambda data: gzip.compress(data, 1, mtime=0)),
    "zstd": ("application/vnd.oci.image.layer.v1.tar+zstd", lambda data: zstandard.compress(data)),
    "plain": ("application/vnd.oci.image.layer.v1.tar", lambda data: data),
}
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A layer of these files; those below bin/ can be run."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), 0o755 if name.startswith("bin/") else 0o644, 0
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


@dataclass(frozen=True)
class Made:
    """An image: its manifest, and the blobs that it names."""

    data: bytes
    media_type: str
    blobs: Mapping[Digest, bytes]

    @property
    def digest(self) -> Digest:
        return digest_of(self.data)

    @property
    def size(self) -> int:
        return sum(map(len, self.blobs.values()))


def described(data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data), **more}


def make_image(
    *layers: Mapping[str, bytes],
    compressions: tuple[str, ...] = ("gzip",),
    docker: bool = False,
    architecture: str = "amd64",
    entrypoint: tuple[str, ...] = ("/bin/true",),
    **more: Any,
) -> Made:
    """An image of these layers, in the OCI form or that of Docker's schema 2."""
    tars = [tar_of(files) for files in layers]
    packed = []
    for number, data in enumerate(tars):
        kind, compress = COMPRESSIONS[compressions[number % len(compressions)]]
        packed.append((DOCKER_LAYER if docker else kind, compress(data)))
    config = json.dumps(
        {
            "os": "linux",
            "architecture": architecture,
            "config": {"Entrypoint": list(entrypoint), "Env": ["GREETING=hello"]},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(data) for data in tars]},
        }
    ).encode()
    kind = "application/vnd.docker.container.image.v1+json" if docker else "application/vnd.oci.image.config.v1+json"
    media_type = DOCKER_MANIFEST_TYPE if docker else MANIFEST_TYPE
    document = {
        "schemaVersion": 2,
        "mediaType": media_type,
        "config": described(config, kind),
        "layers": [described(data, layer) for layer, data in packed],
        **more,
    }
    blobs = {digest_of(data): data for data in (config, *(data for _, data in packed))}
    return Made(json.dumps(document).encode(), media_type, blobs)


def make_index(images: Mapping[str, Made], *, docker: bool = False) -> Made:
    """An index of images by architecture; its blobs are the manifests."""
    kind = DOCKER_INDEX_TYPE if docker else INDEX_TYPE
    manifests = [
        described(image.data, image.media_type, platform={"os": "linux", "architecture": architecture})
        for architecture, image in images.items()
    ]
    data = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": manifests}).encode()
    return Made(data, kind, {image.digest: image.data for image in images.values()})


def push_image(registry: Registry, repository: str, tag: str, *images: Made) -> None:
    """Push images to a registry by their digests, and the last one by the tag as well."""
    base = f"http://{registry.address}/v2/{repository}"
    token = _token(registry, repository)

    def send(method: str, url: str, data: bytes = b"", **headers: str) -> Any:
        request = urllib.request.Request(url, data=data, method=method, headers={**token, **headers})
        return urllib.request.urlopen(request, timeout=30)

    for image in images:
        for digest, data in image.blobs.items():
            if image.media_type in (INDEX_TYPE, DOCKER_INDEX_TYPE):
                continue  # manifests, which were pushed as images
            with send("POST", f"{base}/blobs/uploads/") as answer:
                location = answer.headers["Location"]
            mark = "&" if "?" in location else "?"
            send(
                "PUT", f"{location}{mark}digest={digest}", data, **{"Content-Type": "application/octet-stream"}
            ).close()
        for target in (image.digest, *([tag] if image is images[-1] else [])):
            send("PUT", f"{base}/manifests/{target}", image.data, **{"Content-Type": image.media_type}).close()


def _token(registry: Registry, repository: str) -> dict[str, str]:
    if registry.realm is None:
        return {}
    token = registry.realm.token([f"repository:{repository}:pull,push"], True)
    return {"Authorization": f"Bearer {token}"}


def docker_config(registry: Registry, user: str = USER, password: str = PASSWORD) -> str:
    """What docker login writes."""
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    return json.dumps({"auths": {registry.address: {"auth": auth}}})


def reads(registry: Registry, method: str, part: str) -> int:
    """How many requests of a method, for paths with `part` in them, the registry has logged."""
    time.sleep(0.05)  # it logs a request after it has answered it
    return sum(f'"{method} ' in line and part in line for line in registry.log.read_text().splitlines())


# -- a registry that behaves badly


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Odd:
    """A small registry of this process. `answers` win over what it has, by the end of the path."""

    address: str = ""
    documents: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """By `repository/manifests/target` media type and bytes."""
    blobs: dict[Digest, bytes] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    ranges: bool = True
    requests: list[tuple[str, str]] = field(default_factory=list)
    bytes_sent: int = 0

    def put(self, repository: str, tag: str, image: Made) -> None:
        for target in (tag, image.digest):
            self.documents[f"{repository}/manifests/{target}"] = (image.media_type, image.data)
        self.blobs.update(image.blobs)

    def count(self, method: str, part: str) -> int:
        return sum(asked == method and part in path for asked, path in self.requests)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/v2/")
        self.requests.append((request.method, request.raw_path))
        for end, answer in self.answers.items():
            if path.endswith(end):
                return await answer(request)
        if path in self.documents:
            kind, data = self.documents[path]
            digest = digest_of(data)
            headers = {"Docker-Content-Digest": digest, "ETag": f'"{digest}"', "Content-Type": kind}
            if request.headers.get("If-None-Match") == f'"{digest}"':
                return web.Response(status=304, headers=headers)
            return web.Response(body=data, headers=headers)
        blob = self.blobs.get(Digest(path.rpartition("/")[2]))
        if blob is None or "/blobs/" not in path:
            return web.json_response({"errors": [{"code": "UNKNOWN", "message": "not here"}]}, status=404)
        return await self._blob(request, blob)

    async def _blob(self, request: web.Request, blob: bytes) -> web.StreamResponse:
        chosen, status, headers = blob, 200, {}
        if self.ranges and "Range" in request.headers:
            part = request.http_range
            chosen, status = blob[part], 206
            start = part.start or 0
            headers = {"Content-Range": f"bytes {start}-{start + len(chosen) - 1}/{len(blob)}"}
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(chosen)
        await response.prepare(request)
        if request.method != "HEAD":
            for start in range(0, len(chosen), 1 << 16):
                await response.write(chosen[start : start + (1 << 16)])
                self.bytes_sent += len(chosen[start : start + (1 << 16)])
        return response


@asynccontextmanager
async def odd_registry() -> AsyncIterator[Odd]:
    """Start a registry of this process on a port of its own."""
    odd, app = Odd(), web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", odd.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    odd.address = f"127.0.0.1:{port}"
    try:
        yield odd
    finally:
        await runner.cleanup()
