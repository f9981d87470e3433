"""Pushing: sends to an origin the blobs of a package that it does not have, then the manifest, then
sets the tag, so a visible tag never dangles.

A push skips blobs that are there already, and a garbage collection may be about to remove just
these because no tag leads to them. A push lease (notes.py) keeps both apart: the push takes it on
all blobs of the package before it looks at any, and looks at all of them once more after the tag is
set."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Conflict, NotFound, P2PDistError
from p2pdist.model.manifest import (
    BLOB_TYPE,
    CONFIG_TYPE,
    MANIFEST_TYPE,
    PIECES_TYPE,
    TITLE,
    Config,
    Descriptor,
    Manifest,
    Reference,
    blob_reference,
    encode_config,
    encode_manifest,
)
from p2pdist.package.repository.contract import LocalRepository, OnProgress, Repository, read_content, read_manifest
from p2pdist.package.repository.notes import NoteBoard, PushLease

BLOBS_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Pushed:
    """A pushed package. `bytes_sent` and `bytes_skipped` (already there) add up to its layers,
    piece lists, config and manifest; a blob that was removed meanwhile and sent again counts
    twice."""

    reference: Reference
    digest: Digest
    size: int
    bytes_sent: int
    bytes_skipped: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The way from one package to another, in layers."""

    bytes_to_move: int
    """Bytes that a host with the first package fetches for the second."""
    added: tuple[Digest, ...]
    changed: tuple[Digest, ...]
    """Layers that replace another one at the same height; neither added nor removed."""
    removed: tuple[Digest, ...]


class Target(Repository, NoteBoard, Protocol):
    """A repository that packages are pushed to."""


@dataclass(frozen=True, slots=True)
class Item:
    """A blob to send: its bytes, or the file that holds it, which may be absent while the origin
    has the blob."""

    blob: Descriptor
    source: Path | bytes


class Sender:
    """Sends blobs to one origin and keeps the sums."""

    def __init__(self, origin: Target, home: str, total: int, on_progress: OnProgress | None) -> None:
        self.sent = self.skipped = 0
        self._origin, self._home, self._total, self._on_progress = origin, home, total, on_progress
        self._done, self._lock = 0, threading.Lock()
        self._slots = asyncio.Semaphore(BLOBS_IN_FLIGHT)

    async def deliver(
        self, content: list[Item], manifest: Item, reference: Reference, *, replaces: Digest | None = None
    ) -> None:
        """Send the missing blobs, then the manifest, then set the tag, if `reference` has one, all
        under a lease. Raises Conflict where the tag is to be taken from the manifest `replaces`,
        and names another one by now."""
        names = [item.blob.digest for item in (*content, manifest)]
        async with PushLease(self._origin, names, on_wait=self._wait) as lease:
            await self._send_all(content, manifest)
            while lease.in_doubt:
                await lease.take()
                await self._send_all(content, manifest, again=True)
            if replaces is not None and (await self._origin.resolve(reference)).digest != replaces:
                raise Conflict(f"{reference} was pushed anew meanwhile", remedy="Do it again")
            if reference.tag:
                await self._origin.tag(reference, manifest.blob)
            await self._send_all(content, manifest, again=True)

    async def _send_all(self, content: list[Item], manifest: Item, *, again: bool = False) -> None:
        await _all([self._send(item, again) for item in content])
        await self._send(manifest, again)

    async def _send(self, item: Item, again: bool) -> None:
        """Send a blob unless it is there. `again`: it was sent or found there before. Raises
        NotFound when neither side has it."""
        async with self._slots:
            blob, source = item.blob, item.source
            if await self._origin.size(blob.digest) == blob.size:
                count = 0
            elif isinstance(source, bytes):
                await self._origin.write_document(source)
                self._advance(count := blob.size)
            elif not source.exists():
                raise NotFound(
                    f"blob {blob.digest} is neither at {self._home} nor at {self._origin.url}",
                    remedy="Push the base package there first, or pack again",
                )
            else:
                count = await self._origin.write_blob(blob.digest, source, on_bytes=self._advance)
            self.sent += count
            if not count and not again:
                self.skipped += blob.size
                self._advance(blob.size)

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            done = min(self._done, self._total)
        if self._on_progress:
            self._on_progress("pushing", done, self._total)

    def _wait(self) -> None:
        if self._on_progress:
            self._on_progress("waiting for a collection at the origin", 0, self._total)


async def push(
    reference: Reference, layout: LocalRepository, origin: Target, *, on_progress: OnProgress | None = None
) -> Pushed:
    """Send a package from the local layout to the origin. Layers of a base may be at the origin
    only.

    Raises NotFound when the reference is not in the layout or a blob is nowhere, and Corrupt when a
    local blob was altered.
    """
    started = time.monotonic()
    described, manifest, _ = await read_manifest(reference, [layout])
    blobs = {blob.digest: blob for blob in (*manifest.blobs, *manifest.documents())}
    total = sum(blob.size for blob in blobs.values()) + described.size
    sender = Sender(origin, layout.url, total, on_progress)
    items = [Item(blob, layout.blob_path(blob.digest)) for blob in (*blobs.values(), described)]
    await sender.deliver(items[:-1], items[-1], reference)
    return Pushed(reference, described.digest, described.size, sender.sent, sender.skipped, time.monotonic() - started)


async def push_blob(file: Path, origin: Target, *, on_progress: OnProgress | None = None) -> Pushed:
    """Send one file as a blob with its piece list, tagged as blob_reference. `digest` and `size` of
    the result are the file's."""
    started = time.monotonic()
    stopped = threading.Event()
    try:
        content = await asyncio.to_thread(read_content, file, stopped=stopped)
    finally:
        stopped.set()
    pieces = document_item(content.pieces.encode(), PIECES_TYPE)
    config = document_item(encode_config(Config()), CONFIG_TYPE)
    layer = content.descriptor(BLOB_TYPE)
    manifest = document_item(encode_manifest(Manifest(config.blob, (layer,), (pieces.blob,))), MANIFEST_TYPE)
    # Of the tag alone: the same bytes are one package, whatever a file of them is called.
    manifest = replace(
        manifest, blob=replace(manifest.blob, annotations={TITLE: os.fsencode(file.name).decode("utf-8", "replace")})
    )
    reference = blob_reference(content.digest)
    sender = Sender(origin, str(file.parent), content.size, on_progress)
    await sender.deliver([Item(layer, file), pieces, config], manifest, reference)
    return Pushed(reference, content.digest, content.size, sender.sent, sender.skipped, time.monotonic() - started)


def document_item(data: bytes, media_type: str) -> Item:
    return Item(Descriptor(media_type, digest_of(data), len(data)), data)


def compare(old: Manifest, new: Manifest) -> Difference:
    """What a host with `old` fetches for `new`, layer by layer. Catalogs and packs count whole;
    compare_packages (tree/diff.py) says how much of a pack is needed and which paths differ."""
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
        expected, _ = failures.split(P2PDistError)
        failure: BaseException = expected or failures
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        raise failure from None
