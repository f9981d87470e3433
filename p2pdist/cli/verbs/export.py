"""`p2pdist export`: a package as one file that mounts itself, a tar, or a directory."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

import click

from p2pdist.cli import output
from p2pdist.cli.desk import layers_in
from p2pdist.cli.services import layout_option, opened_layout
from p2pdist.cli.verbs.pack import dropped_fields, show_dropped
from p2pdist.model.errors import DiskFull, P2PDistError, UsageError, remedy_of
from p2pdist.model.manifest import (
    MANIFEST_BYTES_MAX,
    SQUASHFS_TYPE,
    Config,
    Manifest,
    Reference,
    decode_config,
    parse_reference,
)
from p2pdist.model.modelpack import is_model

if TYPE_CHECKING:
    from p2pdist.mount.files.materialization import Materialized
    from p2pdist.origin.layout import LocalLayout
    from p2pdist.package.pack import Packed

Args = ParamSpec("Args")
Result = TypeVar("Result")
Kind = Literal["xar", "tar", "dir", "modelpack"]
KINDS: tuple[Kind, ...] = ("xar", "tar", "dir", "modelpack")


@click.command("export")
@click.argument("ref")
@click.option("--xar", is_flag=True, help="One executable file that mounts itself and runs the program.")
@click.option("--tar", is_flag=True, help="A tar; `-o -` writes it to standard output.")
@click.option("--dir", is_flag=True, help="A new directory.")
@click.option("--modelpack", is_flag=True, help="A new OCI image layout with a model (ModelPack) for other tools.")
@click.option("-o", "--output", "target", type=click.Path(path_type=Path), required=True, help="What to write.")
@click.option("--level", type=int, help="zstd level of the image in a self-mounting file, 1 to 22.  [default: 6]")
@layout_option
@output.quiet_options
@output.json_option
def command(ref: str, target: Path, level: int | None, layout: Path, as_json: bool, **kinds: bool) -> None:
    """Write the package REF, all layers merged, from the local layout.

    A self-mounting file needs no p2pdist where it runs: root, or squashfuse. Its arguments follow
    the package's entrypoint. Equal packages give equal files and tars.

    \b
    Example:
      p2pdist export team/trainer:v3 --xar -o trainer
      ./trainer --epochs 3
    """
    named = [kind for kind in KINDS if kinds[kind]]
    if len(named) != 1:
        what = "no format is named" if not named else "several formats are named"
        raise UsageError(what, remedy="Give one of --xar, --tar, --dir and --modelpack")
    (kind,) = named
    if kind == "tar" and _is_standard_output(target):
        target = Path("-")
    if str(target) == "-" and (kind != "tar" or as_json):
        raise UsageError("only a tar can go to standard output, and not with --json", remedy="Name a file with -o")
    if str(target) == "-" and sys.__stdout__ is None:  # launch.py has put /dev/null in its place
        raise P2PDistError("standard output is closed", remedy="Name a file with -o")
    with output.Progress(quiet=as_json) as progress:
        done = asyncio.run(_Export(kind, target, level, progress).run(ref, layout))
    if as_json:
        output.print_json(done)
    elif str(target) != "-":
        click.echo(f"{done['reference']} -> {target}")


def _is_standard_output(target: Path) -> bool:
    """Whether a path is another name of standard output, such as /dev/stdout."""
    try:
        return os.path.samestat(target.stat(), os.fstat(sys.stdout.fileno()))
    except OSError:
        return False


class _Export:
    """One package to be written in one way."""

    def __init__(self, kind: Kind, target: Path, level: int | None, progress: output.Progress) -> None:
        from p2pdist.package.thread import until

        self._kind, self._target, self._level, self._progress = kind, target, level, progress
        self._stopped = threading.Event()
        self._report = until(self._stopped, progress)
        self._model: Packed | None = None
        """The model that was made of a package that is none."""

    async def _stoppable(self, function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """Run a function on a thread, which has ended before what it writes to is removed."""
        from p2pdist.package.thread import stoppable

        return await stoppable(self._stopped, function, *args, **kwargs)

    async def run(self, ref: str, directory: Path) -> dict[str, Any]:
        """What was written, for --json."""
        from p2pdist.package.repository.contract import read_plain_manifest

        reference = parse_reference(ref)
        async with opened_layout(directory) as layout:
            described, manifest, _ = await read_plain_manifest(reference, [layout])
            config = decode_config(await layout.read(manifest.config.digest, limit=MANIFEST_BYTES_MAX))
            with self._stage(layout, f"{described.digest} exported as {self._kind}") as stage:
                try:
                    if self._kind == "modelpack":
                        await self._write_model(reference, manifest, layout, stage)
                    else:
                        await self._write(manifest, config, layout, stage)
                except DiskFull as error:
                    raise error.of_stage() from error
        document: dict[str, Any] = {"reference": str(reference), "digest": described.digest, "kind": self._kind}
        if self._model is not None:
            show_dropped(self._model)
            document |= dropped_fields(self._model)
        if str(self._target) != "-":
            document["path"] = str(self._target)
            if self._kind in ("xar", "tar") and self._target.is_file():
                document["size"] = self._target.stat().st_size
        return document

    def _stage(self, layout: LocalLayout, purpose: str) -> AbstractContextManager[Path]:
        """A directory for what is made on the way: in the layout or, where that may only be read,
        beside what is written."""
        from p2pdist.origin.temporary_files import stage_directory
        from p2pdist.package.archive.export import is_stream

        if os.access(layout.directory, os.W_OK):
            return layout.stage_directory(purpose)
        streamed = str(self._target) == "-" or is_stream(self._target)
        place = Path(tempfile.gettempdir()) if streamed else self._target.absolute().parent
        return stage_directory(place, f"{purpose} from {layout.url} to {self._target}")

    async def _write(self, manifest: Manifest, config: Config, layout: LocalLayout, stage: Path) -> None:
        from p2pdist.package.archive.export import write_xar

        (only, *more) = manifest.layers
        if self._kind == "xar" and not more and only.media_type == SQUASHFS_TYPE:
            image = (await layers_in(manifest, layout, stage))[0].path  # type: ignore[union-attr]
        elif self._kind == "dir":
            await self._write_directory(manifest, layout)
            return
        else:
            merged = await self._merged(manifest, layout, stage / "merged", writable=False)
            if self._kind == "tar":
                await self._stoppable(self._write_tar, merged)
                return
            image = await self._image(merged.path, stage / "image")
        await self._stoppable(write_xar, image, config, self._target, report=self._report)

    async def _write_model(self, reference: Reference, manifest: Manifest, layout: LocalLayout, stage: Path) -> None:
        from p2pdist.origin.layout import LocalLayout
        from p2pdist.package.modelpack import export_model, pack_model

        target = self._target.absolute()
        named = Reference(reference.name, reference.tag or "latest")
        with _beside(target) as work:
            made = LocalLayout(work / "layout")
            try:
                if is_model(manifest):
                    await export_model(manifest, named, layout, made)
                else:
                    tree = (await self._merged(manifest, layout, stage / "merged", writable=False)).path
                    self._model = await pack_model(tree, named, made, piece_lists=False, on_progress=self._progress)
            finally:
                await made.close()
            (work / "layout").rename(target)

    async def _image(self, tree: Path, image: Path) -> Path:
        from p2pdist.package.archive.export import make_readable
        from p2pdist.package.image.preflight import preflight
        from p2pdist.package.image.squashfs import LEVEL, build_image
        from p2pdist.package.source.scan import scan_tree

        modes = await self._stoppable(make_readable, tree)
        checked = preflight(await self._stoppable(scan_tree, tree), times_kept=True)
        level = LEVEL if self._level is None else self._level
        await build_image(
            tree, image, level=level, exclude=checked.excluded, modes=modes, size_estimate=checked.bytes_total
        )
        return image

    async def _write_directory(self, manifest: Manifest, layout: LocalLayout) -> None:
        target = self._target.absolute()
        with _beside(target) as stage:
            merged = await self._merged(manifest, layout, stage, writable=True)
            merged.path.rename(target)

    def _write_tar(self, merged: Materialized) -> None:
        from p2pdist.package.archive.export import make_readable, new_file, write_tar
        from p2pdist.package.image.preflight import preflight
        from p2pdist.package.source.scan import scan_tree
        from p2pdist.package.thread import PipeWriter

        tree = merged.path
        modes = make_readable(tree)
        checked, done = preflight(scan_tree(tree)), 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            self._report("exporting", done, checked.bytes_total)

        if str(self._target) == "-":
            try:
                sys.stdout.flush()
                writer = PipeWriter(sys.stdout.fileno(), self._stopped)
                write_tar(tree, cast(IO[bytes], writer), modes=modes, linked=merged.linked, report=report)
            except OSError as error:
                if error.filename is not None or isinstance(error, BrokenPipeError):
                    raise
                raise P2PDistError(
                    f"standard output cannot be written: {error.strerror}", remedy="Make room, or name a file with -o"
                ) from error
            return
        with new_file(self._target, needed=checked.bytes_total, mode=0o666) as file:
            write_tar(tree, file, modes=modes, linked=merged.linked, report=report)

    async def _merged(self, manifest: Manifest, layout: LocalLayout, stage: Path, *, writable: bool) -> Materialized:
        """All layers merged, below `stage`. As another user than root hard links would lose the
        permission to write."""
        from p2pdist.mount.files.materialization import materialize

        stage.mkdir(exist_ok=True)
        layers = await layers_in(manifest, layout, stage)
        (stage / "files").mkdir()
        try:
            private = not writable and os.geteuid() == 0
            return await self._stoppable(materialize, layers, stage / "files", writable=writable, private=private)
        except OSError as error:
            raise P2PDistError(
                f"cannot unpack the package: {error.strerror}",
                remedy=remedy_of(error),
            ) from error


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A directory beside the new one `target`, which appears whole, by a renaming, or not at all.
    Raises UsageError, and P2PDistError where it cannot be written."""
    from p2pdist.origin.temporary_files import stage_directory

    if os.path.lexists(target):
        raise UsageError(f"{target} exists", remedy="Name a new directory")
    try:
        with stage_directory(target.parent, f"{target} exported") as stage:
            yield stage
    except OSError as error:
        raise P2PDistError(f"cannot write {target}: {error.strerror}", remedy="Name another one with -o") from error
