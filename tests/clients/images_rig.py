"""Container images made without a network, whose program runs without anything else, and pushing
them to a registry."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import platform
import struct
import tarfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote, urljoin

import zstandard
from registry_rig import Registry

SAYS = "hello from the image"
OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
Kind = Literal["oci", "docker"]
CHUNK = 1 << 20


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Document:
    """A blob or manifest."""

    data: bytes
    media_type: str

    @functools.cached_property
    def digest(self) -> str:
        return digest_of(self.data)

    @property
    def descriptor(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.data)}


@dataclass
class Image:
    """What a registry holds of an image: its manifest, config and layers; `index` where a tag names
    an index of which this is one."""

    manifest: Document
    config: Document
    layers: list[Document]
    index: Document | None = None
    others: list[Image] = field(default_factory=list)
    """Of other platforms in the same index."""

    @property
    def blobs(self) -> list[Document]:
        return [self.config, *self.layers]

    @property
    def top(self) -> Document:
        """What the tag names."""
        return self.index or self.manifest


def program(text: str = SAYS) -> bytes:
    """An ELF program for x86-64 that prints a line, and needs no library."""
    message = text.encode() + b"\n"
    code = (
        bytes.fromhex("b801000000 bf01000000 488d35")
        + struct.pack("<i", 16)
        + b"\xba"
        + struct.pack("<I", len(message))
    )
    code += bytes.fromhex("0f05 b83c000000 31ff 0f05")
    offset, address = 64 + 56, 0x400000
    size = offset + len(code) + len(message)
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, address + offset, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, address, address, size, size, 0x1000)
    return head + segment + code + message


def layer_tar(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def compressed(data: bytes, how: str) -> bytes:
    return gzip.compress(data, 1, mtime=0) if how == "gzip" else zstandard.compress(data, 1)


def make_image(
    kind: Kind, compressions: Sequence[str] = ("gzip", "gzip", "gzip"), size: int = 3 << 20, *, index: bool = False
) -> Image:
    """An image of three layers: the program, random bytes, and a small file above them."""
    contents = [{"bin/hello": program()}, {"data/random": os.urandom(size)}, {"etc/note": b"above"}]
    plain = [layer_tar(files) for files in contents]
    types = {
        "oci": (f"{OCI}.manifest.v1+json", f"{OCI}.config.v1+json", f"{OCI}.layer.v1.tar+%s", f"{OCI}.index.v1+json"),
        "docker": (
            f"{DOCKER}.distribution.manifest.v2+json",
            f"{DOCKER}.container.image.v1+json",
            f"{DOCKER}.image.rootfs.diff.tar.%s",
            f"{DOCKER}.distribution.manifest.list.v2+json",
        ),
    }[kind]
    layers = [Document(compressed(tar, how), types[2] % how) for tar, how in zip(plain, compressions, strict=True)]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": "2026-01-01T00:00:00Z",
        "config": {"Entrypoint": ["/bin/hello"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(tar) for tar in plain]},
        "history": [{"created_by": "a test"} for _ in plain],
    }
    image = _image(config, layers, types)
    if index:
        other = _image(config | {"architecture": "arm64"}, layers[:1], types)
        entries = [
            each.manifest.descriptor | {"platform": {"architecture": architecture, "os": "linux"}}
            for each, architecture in ((other, "arm64"), (image, "amd64"))
        ]
        body = {"schemaVersion": 2, "mediaType": types[3], "manifests": entries}
        image.index, image.others = Document(json.dumps(body).encode(), types[3]), [other]
    return image


def _image(config: dict[str, Any], layers: list[Document], types: tuple[str, ...]) -> Image:
    document = Document(json.dumps(config).encode(), types[1])
    manifest = {
        "schemaVersion": 2,
        "mediaType": types[0],
        "config": document.descriptor,
        "layers": [layer.descriptor for layer in layers],
    }
    return Image(Document(json.dumps(manifest).encode(), types[0]), document, layers)


def runs_here() -> bool:
    """Whether the images' program is one for this machine."""
    return platform.machine() == "x86_64"


# -- pushing


def push_image(registry: Registry, repository: str, tag: str, image: Image) -> None:
    """As the distribution specification has it: blobs, manifests, the tag last."""
    for each in (*image.others, image):
        for blob in each.blobs:
            _push_blob(registry, repository, blob)
        _put_manifest(registry, repository, each.manifest.digest, each.manifest)
    _put_manifest(registry, repository, tag, image.top)


def call(registry: Registry, method: str, path: str, repository: str, data: bytes = b"", **headers: str) -> Any:
    """An answer of the registry, with the token of its realm where it has one."""
    if registry.realm is not None:
        headers["Authorization"] = f"Bearer {registry.realm.token([f'repository:{repository}:pull,push'], True)}"
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(urljoin(f"http://{registry.address}", path), data or None, given, method=method)
    return urllib.request.urlopen(request, timeout=60)


def _push_blob(registry: Registry, repository: str, blob: Document) -> None:
    with call(registry, "POST", f"/v2/{repository}/blobs/uploads/", repository, Content_Length="0") as answer:
        place = answer.headers["Location"]
    place += f"{'&' if '?' in place else '?'}digest={quote(blob.digest)}"
    call(registry, "PUT", place, repository, blob.data, Content_Type="application/octet-stream").close()


def _put_manifest(registry: Registry, repository: str, target: str, manifest: Document) -> None:
    path = f"/v2/{repository}/manifests/{target}"
    call(registry, "PUT", path, repository, manifest.data, Content_Type=manifest.media_type).close()
