"""Pushing: what an origin lacks of a package is sent to it. Content, then manifest, then tag, so a visible reference never dangles."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import NotFound, P2PDistError
from p2pdist.model.package import (
    BLOB_TYPE,
    CONFIG_TYPE,
    MANIFEST_TYPE,
    PIECES_TYPE,
    Config,
    Descriptor,
    Manifest,
    Reference,
    blob_reference,
    encode_config,
    encode_manifest,
)
from p2pdist.package.content import read_content
from p2pdist.package.depot import Depot, LocalDepot, read_manifest
from p2pdist.package.pack import OnProgress

BLOBS_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Pushed:
    """`bytes_sent` and `bytes_skipped` (already there) add up to the package: layers, piece lists, config and manifest."""

    reference: Reference
    digest: Digest
    size: int
    bytes_sent: int
    bytes_skipped: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Difference:
    """What someone who holds A lacks of B: `added` layers, of `bytes_to_move` bytes in all. `removed` layers are in A alone. A `changed`
    layer took the place of another at the same height; it is counted among neither the added nor the removed."""

    bytes_to_move: int
    added: tuple[Digest, ...]
    changed: tuple[Digest, ...]
    removed: tuple[Digest, ...]


class _Sender:
    """Sends blobs to one origin and keeps the sums."""

    def __init__(self, origin: Depot, total: int, on_progress: OnProgress | None) -> None:
        self.sent = self.skipped = 0
        self._origin, self._total, self._on_progress = origin, total, on_progress
        self._done, self._lock = 0, threading.Lock()
        self._turns = asyncio.Semaphore(BLOBS_IN_FLIGHT)

    async def send(self, blob: Descriptor, layout: LocalDepot) -> None:
        """Send a blob from the layout. Raises NotFound when neither side has it."""
        async with self._turns:
            if await self._origin.size(blob.digest) == blob.size:
                self._skip(blob.size)
            elif await layout.size(blob.digest) is None:
                raise NotFound(
                    f"blob {blob.digest} is neither at {layout.url} nor at {self._origin.url}",
                    remedy="Push the base package there first, or pack again",
                )
            else:
                await self.send_file(blob, layout.blob_path(blob.digest))

    async def send_file(self, blob: Descriptor, path: Path) -> None:
        sent = await self._origin.write_blob(blob.digest, path, on_bytes=self._advance)
        self.sent += sent
        if not sent:
            self._skip(blob.size)

    async def send_small(self, data: bytes, media_type: str) -> Descriptor:
        digest = digest_of(data)
        if await self._origin.size(digest) == len(data):
            self._skip(len(data))
        else:
            await self._origin.write_small(data)
            self.sent += len(data)
            self._advance(len(data))
        return Descriptor(media_type, digest, len(data))

    def _skip(self, count: int) -> None:
        self.skipped += count
        self._advance(count)

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            done = min(self._done, self._total)
        if self._on_progress:
            self._on_progress("pushing", done, self._total)


async def push(
    reference: Reference, layout: LocalDepot, origin: Depot, *, on_progress: OnProgress | None = None
) -> Pushed:
    """Send a package from the local layout to the origin. Layers of a base may be at the origin only.

    Raises NotFound when the reference is not in the layout or a blob is nowhere, and Corrupt when a local blob was altered.
    """
    started = time.monotonic()
    described, manifest, _ = await read_manifest(reference, [layout])
    blobs = {blob.digest: blob for blob in (*manifest.blobs, *manifest.small_blobs())}
    total = sum(blob.size for blob in blobs.values()) + described.size
    sender = _Sender(origin, total, on_progress)
    await _all([sender.send(blob, layout) for blob in blobs.values()])
    await sender.send(described, layout)
    if reference.tag:
        await origin.tag(reference, described)
    return Pushed(reference, described.digest, described.size, sender.sent, sender.skipped, time.monotonic() - started)


async def push_blob(file: Path, origin: Depot, *, on_progress: OnProgress | None = None) -> Pushed:
    """Send one file as a blob with its piece list, tagged as blob_reference. `digest` and `size` of the result are the file's."""
    started = time.monotonic()
    stopped = threading.Event()
    try:
        content = await asyncio.to_thread(read_content, file, stopped=stopped)
    finally:
        stopped.set()
    sender = _Sender(origin, content.size, on_progress)
    await sender.send_file(content.descriptor(BLOB_TYPE), file)
    pieces = await sender.send_small(content.pieces.encode(), PIECES_TYPE)
    config = await sender.send_small(encode_config(Config()), CONFIG_TYPE)
    body = encode_manifest(Manifest(config, (content.descriptor(BLOB_TYPE),), (pieces,)))
    manifest = await sender.send_small(body, MANIFEST_TYPE)
    reference = blob_reference(content.digest)
    await origin.tag(reference, manifest)
    return Pushed(reference, content.digest, content.size, sender.sent, sender.skipped, time.monotonic() - started)


def compare(old: Manifest, new: Manifest) -> Difference:
    """What someone who holds `old` lacks of `new`, layer by layer. Catalogs and packs count whole; how much of a pack is needed, and which
    paths differ, is found out by compare_packages (tree_diff.py)."""
    before, after = {layer.digest for layer in old.layers}, {layer.digest: layer for layer in new.layers}
    changed = tuple(
        there.digest
        for here, there in zip(old.layers, new.layers, strict=False)
        if here.digest not in after and there.digest not in before
    )
    replaced = {
        here.digest for here, there in zip(old.layers, new.layers, strict=False) if there.digest in set(changed)
    }
    added = tuple(digest for digest in after if digest not in before and digest not in changed)
    removed = tuple(layer.digest for layer in old.layers if layer.digest not in after and layer.digest not in replaced)
    held = {blob.digest for blob in old.blobs}
    return Difference(sum(blob.size for blob in new.blobs if blob.digest not in held), added, changed, removed)


async def _all(sends: list[Coroutine[Any, Any, None]]) -> None:
    """Await all; the first failure cancels the others and is raised on its own."""
    try:
        async with asyncio.TaskGroup() as group:
            for send in sends:
                group.create_task(send)
    except BaseExceptionGroup as failures:
        known, _ = failures.split(P2PDistError)
        failure: BaseException = known or failures
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        raise failure from None
