"""Makes models (ModelPack, model/modelpack.py) of directories: each file becomes a raw layer, named
by its SHA-256, so that versions of a model, and other models, share the files that they have in
common."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import UsageError, printable
from p2pdist.model.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_TYPE,
    MODEL_LAYERS_MAX,
    PIECES_DIGEST,
    PIECES_SIZE,
    Descriptor,
    Manifest,
    Reference,
    encode_manifest,
)
from p2pdist.model.modelpack import (
    ARTIFACT_TYPE,
    CONFIG_TYPE,
    FILE_PATH,
    check_path,
    encode_config,
    file_annotations,
    layer_type,
)
from p2pdist.package.image.squashfs import check_apart
from p2pdist.package.pack import Packed
from p2pdist.package.repository.contract import Content, LocalRepository, OnProgress, read_content
from p2pdist.package.source.ignore import Ignore
from p2pdist.package.source.links import followed_links, snapshot_blobs
from p2pdist.package.source.scan import DROPPED_SHOWN_MAX, Dropped, source_directory
from p2pdist.package.source.stages import walk
from p2pdist.package.tree.writer import write_document


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the source: its path in the model, where it is, its mode and size."""

    path: str
    source: Path
    mode: int
    size: int


async def pack_model(
    source: Path,
    reference: Reference,
    layout: LocalRepository,
    *,
    ignore: Ignore | None = None,
    follow_links: bool = False,
    piece_lists: bool = True,
    on_progress: OnProgress | None = None,
) -> Packed:
    """Make a model of the directory `source` in `layout`, called `reference`. Hosts pull it as a
    package by the piece lists, which other tools take for layers that they do not know; without
    `piece_lists` it is a model alone. Raises UsageError, NotFound, Corrupt for a file that changes
    meanwhile, DiskFull, Conflict."""
    started, source = time.monotonic(), source_directory(source)
    if not reference.tag:
        raise UsageError(f"{reference} names a digest, which packing decides", remedy="Name the model as name:tag")
    check_apart(source, layout.directory)
    files, dropped = await asyncio.to_thread(_scan, source, ignore, follow_links)
    if not 1 <= len(files) <= MODEL_LAYERS_MAX:
        raise UsageError(
            f"a model of {len(files)} files cannot be made of {source}",
            remedy=f"It must have 1 to {MODEL_LAYERS_MAX}: leave some out with --ignore, or pack a tree",
        )
    total, done, written = sum(file.size for file in files), 0, 0
    async with layout.packing():
        layers: list[Descriptor] = []
        lists: dict[str, Descriptor] = {}
        for file in files:
            content = await _read(file.source)
            if await layout.size(content.digest) != content.size:
                written += await layout.write_blob(content.digest, file.source)
            if piece_lists:
                written += await write_document(layout, content.pieces.encode())
                lists[content.pieces.digest] = content.pieces_descriptor()
            layers.append(_layer(file, content, piece_lists=piece_lists))
            done += file.size
            if on_progress:
                on_progress("packing", min(done, total), total)
        digest, count = await _name(reference, layout, layers, tuple(lists.values()))
    return Packed(
        reference,
        digest,
        tuple(layers),
        len(files),
        sum(layer.size for layer in layers),
        time.monotonic() - started,
        tuple(dropped[:DROPPED_SHOWN_MAX]),
        len(dropped),
        bytes_written=written + count,
    )


async def export_model(
    manifest: Manifest, reference: Reference, source: LocalRepository, target: LocalRepository
) -> str:
    """Write a package that is a model to the layout `target` without its piece lists; returns the
    digest of its manifest. Raises NotFound, Corrupt for an altered blob, DiskFull."""
    config = await source.read(manifest.config.digest, limit=MANIFEST_BYTES_MAX)
    async with target.packing():
        layers = [_without_pieces(layer) for layer in manifest.layers]
        for layer in layers:
            await target.write_blob(layer.digest, source.blob_path(layer.digest))
        digest, _ = await _name(reference, target, layers, (), config)
    return digest


def _without_pieces(layer: Descriptor) -> Descriptor:
    kept = {key: value for key, value in layer.annotations.items() if key not in (PIECES_DIGEST, PIECES_SIZE)}
    return replace(layer, annotations=kept)


async def _read(path: Path) -> Content:
    stopped = threading.Event()
    try:
        return await asyncio.to_thread(read_content, path, stopped=stopped)
    finally:
        stopped.set()


def _layer(file: _File, content: Content, *, piece_lists: bool) -> Descriptor:
    described = content.descriptor(layer_type(file.path, content.size))
    named = file_annotations(file.path, content.size, file.mode)
    return replace(described, annotations={**named, **(described.annotations if piece_lists else {})})


async def _name(
    reference: Reference,
    layout: LocalRepository,
    layers: list[Descriptor],
    lists: tuple[Descriptor, ...],
    config: bytes = b"",
) -> tuple[str, int]:
    """Store config and manifest, and set the tag; returns the manifest's digest, and how many bytes
    were written."""
    paths = ((layer.annotations[FILE_PATH], layer.digest) for layer in layers)
    data = config or encode_config(reference.name, paths)
    written = await write_document(layout, data)
    described = Descriptor(CONFIG_TYPE, digest_of(data), len(data))
    body = encode_manifest(Manifest(described, tuple(layers), lists, (), ARTIFACT_TYPE))
    manifest = Descriptor(MANIFEST_TYPE, digest_of(body), len(body))
    written += await write_document(layout, body)
    await layout.tag(reference, manifest)
    return manifest.digest, written


def _scan(source: Path, ignore: Ignore | None, follow_links: bool) -> tuple[list[_File], list[Dropped]]:
    """The files of a source, by path, and what a model does not carry. Raises UsageError, and
    Corrupt for a name that a model cannot have."""
    entries = list(walk(source, ignore=ignore))
    links = [entry.path for entry in entries if stat.S_ISLNK(entry.status.st_mode)]
    wanted = links if follow_links or snapshot_blobs(source) else []
    followed = followed_links(source, wanted, all_links=follow_links)
    files, dropped = [], []
    for entry in entries:
        path, status = os.path.join(os.fsencode(source), entry.path), entry.status
        if target := followed.get(entry.path):
            path, status = target.path, target.status
        if stat.S_ISREG(status.st_mode):
            name = os.fsdecode(entry.path)
            check_path(name, f"the source {source}")
            files.append(_File(name, Path(os.fsdecode(path)), status.st_mode & 0o777, status.st_size))
        elif not entry.is_directory:
            what = "symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
            dropped.append(Dropped(printable(os.fsdecode(entry.path)), what))
    return files, dropped
