"""Packing: a directory becomes the top layer of a package in the local layout. Content, then manifest, then tag."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.errors import UsageError
from p2pdist.model.package import (
    CONFIG_TYPE,
    LAYERS_MAX,
    MANIFEST_BYTES_MAX,
    MANIFEST_TYPE,
    SQUASHFS_TYPE,
    Config,
    Descriptor,
    Manifest,
    Reference,
    decode_config,
    encode_config,
    encode_manifest,
)
from p2pdist.package.content import Content, read_content
from p2pdist.package.depot import Depot, LocalDepot, read_manifest, read_small
from p2pdist.package.scan import Dropped, scan
from p2pdist.package.squashfs import LEVEL, build_image, check_apart

OnProgress = Callable[[str, int, int], None]
"""Called with what is going on, and bytes done and in all; possibly on another thread."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run. None keeps what the base says; entries of `env` (NAME=value) replace the base's of the same name."""

    entrypoint: Sequence[str] | None = None
    env: Sequence[str] = ()
    working_dir: str | None = None

    def over(self, base: Config) -> Config:
        for entry in self.env:
            if not entry.partition("=")[0] or "=" not in entry or "\0" in entry:
                raise UsageError(f"{entry[:100]!r} is not an environment entry", remedy="Write NAME=value")
        named = dict(entry.split("=", 1) for entry in (*base.env, *self.env))
        return Config(
            base.entrypoint if self.entrypoint is None else tuple(self.entrypoint),
            tuple(f"{name}={value}" for name, value in named.items()),
            base.working_dir if self.working_dir is None else self.working_dir,
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """What came of it. `files` and `bytes_total` count the regular files of the source; `layers` are the content layers, bottom to top;
    `dropped` holds the first of the `dropped_total` things that the layer does not carry."""

    reference: Reference
    digest: str
    layers: tuple[Descriptor, ...]
    files: int
    bytes_total: int
    seconds: float
    dropped: tuple[Dropped, ...]
    dropped_total: int


async def pack(
    source: Path,
    reference: Reference,
    layout: LocalDepot,
    *,
    base: Reference | None = None,
    origin: Depot | None = None,
    settings: Settings | None = None,
    level: int = LEVEL,
    mtime: int | None = None,
    on_progress: OnProgress | None = None,
) -> Packed:
    """Pack the directory `source` as `reference` into `layout`, on top of `base` (looked up in the layout, then at the origin).

    The base's layers are named, not copied; its piece lists are copied. Raises NotFound, UsageError, DiskFull and what build_image raises.
    """
    started = time.monotonic()
    if not reference.tag:
        raise UsageError(f"{reference} names a digest, which packing decides", remedy="Name the package as name:tag")
    found = await asyncio.to_thread(scan, source)
    check_apart(source, layout.directory)
    below, config = await _read_base(base, layout, origin)
    config = (settings or Settings()).over(config)
    report = _reporter(on_progress, found.bytes_total)
    content = await _add_image(source, layout, level, mtime, found.bytes_total, report)
    layers = (*below.layers, content.descriptor(SQUASHFS_TYPE)) if below else (content.descriptor(SQUASHFS_TYPE),)
    if len(layers) > LAYERS_MAX:
        raise UsageError(f"{reference} would have {len(layers)} layers, over the limit of {LAYERS_MAX}")
    lists = {item.digest: item for item in (*(below.piece_lists if below else ()), content.pieces_descriptor())}
    await layout.write_small(content.pieces.encode())
    data = encode_config(config)
    described = Descriptor(CONFIG_TYPE, await layout.write_small(data), len(data))
    body = encode_manifest(Manifest(described, layers, tuple(lists.values())))
    manifest = Descriptor(MANIFEST_TYPE, await layout.write_small(body), len(body))
    await layout.tag(reference, manifest)
    return Packed(
        reference,
        manifest.digest,
        layers,
        found.files,
        found.bytes_total,
        time.monotonic() - started,
        tuple(found.dropped),
        found.dropped_total,
    )


async def _read_base(
    base: Reference | None, layout: LocalDepot, origin: Depot | None
) -> tuple[Manifest | None, Config]:
    """The base's manifest and config; its piece lists are brought into the layout."""
    if base is None:
        return None, Config()
    depots: list[Depot] = [layout, origin] if origin else [layout]
    _, manifest, _ = await read_manifest(base, depots)
    data = await read_small(manifest.config.digest, depots, limit=MANIFEST_BYTES_MAX)
    await layout.write_small(data)
    for pieces in manifest.piece_lists:
        if await layout.size(pieces.digest) != pieces.size:
            await layout.write_small(await read_small(pieces.digest, depots))
    return manifest, decode_config(data)


async def _add_image(
    source: Path,
    layout: LocalDepot,
    level: int,
    mtime: int | None,
    size_estimate: int,
    report: Callable[[str, int], None],
) -> Content:
    """Build the image, hash it and move it into the layout."""
    image = (await asyncio.to_thread(layout.scratch)) / secrets.token_hex(12)
    stopped = threading.Event()
    try:
        await build_image(
            source,
            image,
            level=level,
            mtime=mtime,
            size_estimate=size_estimate,
            on_bytes=lambda count: report("packing", count),
        )
        content = await asyncio.to_thread(read_content, image, stopped=stopped)
        await asyncio.to_thread(_sync, image)
        await layout.adopt(content.digest, image)
    finally:
        stopped.set()
        image.unlink(missing_ok=True)
    return content


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reporter(on_progress: OnProgress | None, total: int) -> Callable[[str, int], None]:
    done = 0

    def report(what: str, count: int) -> None:
        nonlocal done
        done = min(total, done + count)
        if on_progress:
            on_progress(what, done, total)

    return report
