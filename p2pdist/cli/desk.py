"""Running packages at the desk: from the local layout, without an agent, a tracker or an origin.

What is shown is made for one run and goes with it. A squashfs image is mounted where it lies in the
layout; the files of a tree are first written out of its packs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdist.cli import output
from p2pdist.cli.services import opened_layout
from p2pdist.model.errors import Corrupt, NotFound, Unavailable, UsageError
from p2pdist.model.manifest import (
    MANIFEST_BYTES_MAX,
    SQUASHFS_TYPE,
    TREE_TYPE,
    Config,
    Descriptor,
    Manifest,
    decode_config,
    parse_reference,
)

if TYPE_CHECKING:
    from p2pdist.mount.layers import Layer, TreeLayer
    from p2pdist.mount.program import Program
    from p2pdist.mount.program_root import Bind
    from p2pdist.mount.squashfs import Image
    from p2pdist.origin.layout import LocalLayout


@dataclass(frozen=True, slots=True)
class Run:
    """How a program is to be run. `root`: its package is the root of the file system, in which
    `binds` are seen."""

    arguments: tuple[str, ...]
    writable: bool = False
    how: str | None = None
    root: bool = False
    binds: tuple[Bind, ...] = ()

    def program(self, config: Config, view: Path) -> Program:
        """The program of a package that is seen at `view`. Raises UsageError."""
        from p2pdist.mount.program import program
        from p2pdist.mount.program_root import inner_program

        if self.root:
            return inner_program(config, self.arguments, environ=os.environ)
        return program(config, self.arguments, root=view, environ=os.environ)


def is_directory(text: str) -> bool:
    """Whether what `run` is given is a directory to pack, and no reference: it is written as a
    path, as no reference can be."""
    return text.startswith(("./", "../", "/")) or text in (".", "..") or (text.endswith("/") and "://" not in text)


def run_from_layout(reference: str, directory: Path, run: Run) -> int:
    """Run the program of a package in the local layout; returns its exit code. Raises NotFound for
    a package that is not there, and what showing it raises."""
    import asyncio

    output.silence_event_loop()
    with ExitStack() as stack:
        config, layers = asyncio.run(_laid_out(reference, directory, stack))
        # The event loop and its threads are gone: what follows forks.
        stage = stack.enter_context(_stage(directory))
        return _shown(reference, config, layers, stage, run)


async def _laid_out(reference: str, directory: Path, stack: ExitStack) -> tuple[Config, list[Image | TreeLayer]]:
    """What a package runs, and its layers, bottom to top, with the files of trees written out until
    `stack` ends."""
    from p2pdist.package.repository.contract import read_plain_manifest

    async with opened_layout(directory) as layout:
        _, manifest, _ = await read_plain_manifest(parse_reference(reference), [layout])
        config = decode_config(await layout.read(manifest.config.digest, limit=MANIFEST_BYTES_MAX))
        files = stack.enter_context(layout.temporary_directory())
        return config, await layers_in(manifest, layout, files)


def _stage(directory: Path) -> AbstractContextManager[Path]:
    """A directory on the layout's file system for one run: files of trees become hard links
    there."""
    from p2pdist.origin.layout import LocalLayout

    return LocalLayout(directory).temporary_directory()


def _shown(reference: str, config: Config, layers: list[Image | TreeLayer], stage: Path, run: Run) -> int:
    from p2pdist.mount.layers import SquashfsLayer, TreeLayer
    from p2pdist.mount.squashfs import missing
    from p2pdist.mount.userns import run_inside

    images = [layer.path for layer in layers if not isinstance(layer, TreeLayer)]
    alone = len(images) == len(layers) and (run.how == "userns" or (os.geteuid() != 0 and run.how is None))
    if run.how == "userns" and not alone:
        raise UsageError("a user namespace shows layers of squashfs alone", remedy="Leave out --how")
    if alone and (run.how or not missing()):
        try:
            return run_inside(
                images,
                lambda view: run.program(config, view),
                writable=run.writable,
                announce=output.note,
                entered=run.binds if run.root else None,
            )
        except Unavailable as error:
            if run.how:
                raise
            output.note(f"unpacked: {error.what}")
    views = [layer if isinstance(layer, TreeLayer) else SquashfsLayer(layer.path) for layer in layers]
    return _mounted(reference, config, views, stage, run)


def _mounted(reference: str, config: Config, layers: list[Layer], stage: Path, run: Run) -> int:
    """The exit code of the program, from a view that this process mounts or unpacks. As root it
    does so in a mount namespace of its own, which leaves nothing behind whatever ends it."""
    from p2pdist.mount import kernel
    from p2pdist.mount.views import mount_view, unmount_view

    if os.geteuid() == 0:
        with suppress(OSError):  # not allowed: then mounting is not either
            kernel.unshare(kernel.CLONE_NEWNS)
            kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
    work, target = stage / "work", stage / "view"
    work.mkdir()
    shown = mount_view(layers, target, work=work, writable=run.writable, method=run.how, label=reference)
    output.note(shown.why)
    try:
        return start(run.program(config, shown.path), shown.path, run)
    finally:
        unmount_view(target, work=work, force=True)


def start(program: Program, view: Path, run: Run, *, keep: Sequence[int] = ()) -> int:
    """Run the program of a package that is seen at `view`; returns its exit code. Raises what
    entering the package and executing the program raise."""
    from p2pdist.mount.program import run as run_program

    if not run.root:
        return run_program(program, keep=keep)
    from p2pdist.mount.program_root import enter
    from p2pdist.mount.scratch import scratch_directory
    from p2pdist.removal import remove_tree

    scratch = scratch_directory("p2pdist-root-")
    try:
        return run_program(program, prepare=lambda: enter(view, scratch, run.binds, program.cwd), keep=keep)
    finally:
        remove_tree(scratch)


async def layers_in(manifest: Manifest, layout: LocalLayout, stage: Path) -> list[Image | TreeLayer]:
    """The layers of a package, bottom to top, with what trees refer to written below the directory
    `stage`. Raises Corrupt, UsageError and what reading the layout raises."""
    import threading

    from p2pdist.model.modelpack import is_model
    from p2pdist.mount.layers import TreeLayer
    from p2pdist.mount.squashfs import inspect
    from p2pdist.package.archive.extraction import read_entries, read_packs, write_objects
    from p2pdist.package.thread import stoppable, until

    if is_model(manifest):
        for layer in manifest.layers:
            await _check_blob(layer, layout)
        return [_model_layer(manifest, layout, stage)]
    packs = await read_packs(manifest, layout)
    objects = stage / "objects"
    layers: list[Image | TreeLayer] = []
    for number, layer in enumerate(manifest.layers):
        if layer.media_type == TREE_TYPE:
            entries = await read_entries(layer, packs, layout)
            objects.mkdir(exist_ok=True)
            stopped = threading.Event()
            report = until(stopped, lambda count: None)
            await stoppable(stopped, write_objects, entries, packs, layout, objects, report=report)
            layers.append(TreeLayer(lambda entries=entries: entries, stage / f"{number}.erofs", objects))  # type: ignore[misc]
            continue
        if layer.media_type != SQUASHFS_TYPE:
            raise UsageError(
                f"a layer of type {layer.media_type[:100]!r} can only be pulled",
                remedy="Pull it through an agent: p2pdist pull",
            )
        await _check_blob(layer, layout)
        layers.append(inspect(layout.blob_path(layer.digest)))
    return layers


async def _check_blob(layer: Descriptor, layout: LocalLayout) -> None:
    """Raises Corrupt where the blob in the layout is not what its name says, NotFound."""
    import asyncio

    from p2pdist.package.repository.contract import read_content

    try:
        content = await asyncio.to_thread(read_content, layout.blob_path(layer.digest))
    except NotFound as error:
        raise NotFound(
            f"layer {layer.digest} is not at {layout.url}", remedy="Pack it there, with the base it stands on"
        ) from error
    if content.digest != layer.digest:
        raise Corrupt(f"blob {layer.digest} at {layout.url} was altered", remedy="Delete it and pack again")


def _model_layer(manifest: Manifest, layout: LocalLayout, stage: Path) -> TreeLayer:
    """The files of a model, which are blobs of the layout."""
    from p2pdist.model.modelpack import blob_name, model_entries
    from p2pdist.mount.layers import TreeLayer

    entries = model_entries(manifest.layers)
    blobs = layout.blob_path(manifest.layers[0].digest).parent
    return TreeLayer(lambda: entries, stage / "model.erofs", blobs, name=blob_name)
