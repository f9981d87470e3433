"""What the tests of collection share: packages of several blobs, and a look at whether tags lead to
all they name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from p2pdist.model.digest import Digest
from p2pdist.model.errors import NotFound
from p2pdist.model.manifest import (
    BLOB_TYPE,
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Config,
    Descriptor,
    Manifest,
    Reference,
    decode_manifest,
    encode_config,
    encode_manifest,
    parse_reference,
)
from p2pdist.origin.layout import NOTES, LayoutOrigin, LocalLayout, blob_key
from p2pdist.package.repository.contract import read_content

CHILD = Path(__file__).with_name("collect_child.py")


async def make_package(layout: LocalLayout, blobs: list[bytes], *tags: str) -> list[Digest]:
    """Store a package of these layers in the layout under all tags; returns its digests, layers
    first, the manifest last."""
    layers, lists = [], []
    for data in blobs:
        file = layout.scratch() / "draft"
        file.write_bytes(data)
        content = read_content(file)
        await layout.import_file(content.digest, file)
        await layout.write_document(content.pieces.encode())
        layers.append(content.descriptor(BLOB_TYPE))
        lists.append(content.pieces_descriptor())
    config = encode_config(Config())
    described = Descriptor(CONFIG_TYPE, await layout.write_document(config), len(config))
    body = encode_manifest(Manifest(described, tuple(layers), tuple(lists)))
    manifest = Descriptor(MANIFEST_TYPE, await layout.write_document(body), len(body))
    for tag in tags:
        await layout.tag(parse_reference(tag), manifest)
    return [layer.digest for layer in layers] + [item.digest for item in (*lists, described, manifest)]


async def missing(origin: LayoutOrigin) -> list[str]:
    """What tags lead to and is not there. A tag is used once in these tests, so one that is there
    before and after a look was visible all the time between."""
    found = []
    for name, described in await origin.tags():
        lost: list[str] = []
        try:
            manifest = decode_manifest(await origin.read(described.digest))
            blobs = (*manifest.blobs, *manifest.documents())
            lost += [blob.digest for blob in blobs if await origin.size(blob.digest) != blob.size]
        except NotFound:
            lost.append(described.digest)
        if lost and (name, described) in await origin.tags():
            found.append(f"{name}: {lost}")
    return found


async def check_contents(origin: LayoutOrigin) -> int:
    """Read all that tags lead to, verified; returns how many tags there are."""
    tags = await origin.tags()
    for _, described in tags:
        manifest = decode_manifest(await origin.read(described.digest))
        for blob in (*manifest.blobs, *manifest.documents()):
            await origin.read(blob.digest)
    return len(tags)


def backdate(root: Path, seconds: float, *, kind: str) -> int:
    """Let what lies in a folder of the layout (`notes`, `blobs`) be older; returns how many files
    that were."""
    folder = root / {"notes": NOTES, "blobs": "blobs/sha256"}[kind]
    files = list(folder.iterdir())
    for file in files:
        os.utime(file, (time.time() - seconds,) * 2)
    return len(files)


def holds(root: Path, digest: Digest) -> bool:
    return (root / blob_key(digest)).exists()


def named(tag: str) -> Reference:
    return parse_reference(tag)


def start_child(*words: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(CHILD), *map(str, words)], text=True, stderr=subprocess.PIPE)
