"""`p2pdist import`: a tar or a container image becomes a package in the local layout."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdist.cli import output
from p2pdist.cli.depots import layout_option, opened_layout
from p2pdist.cli.pack import content_options, format_option, parse_entrypoint, settings_options, show_packed
from p2pdist.model.errors import UsageError
from p2pdist.model.package import Config, parse_reference

if TYPE_CHECKING:
    from p2pdist.package.pack import Packed, Settings
    from p2pdist.package.project import Format


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-t", "--tag", required=True, metavar="NAME:TAG", help="What to call the package.")
@click.option("--image", default="", metavar="NAME", help="Which image, where the archive holds several.")
@format_option
@settings_options
@content_options
@layout_option
@output.json_option
def command(
    source: Path,
    *,
    tag: str,
    image: str,
    form: Format | None,
    follow_links: bool,
    world_readable: bool,
    layout: Path,
    as_json: bool,
    **settings: Any,
) -> None:
    """Make a package of SOURCE: a directory, a tar (also .gz, .zst, .xz, .bz2), an OCI image layout, or what docker save writes,
    unpacked or not.

    The layers of an image are merged into one. Its entrypoint, command, environment and working directory are kept; options win over
    them. Owners, devices and setuid bits are not kept.

    \b
    Example:
      docker save team/trainer:v3 -o trainer.tar
      p2pdist import trainer.tar -t team/trainer:v3 --format tree
    """
    from p2pdist.package.archive import unpack_source
    from p2pdist.package.layering import Layer, Making, pack_layers
    from p2pdist.package.scan import source_directory, source_path

    reference = parse_reference(tag)
    parse_entrypoint(settings["entrypoint"])
    source = source_path(source, "directory or archive")

    async def work(progress: output.Progress) -> tuple[Packed, list[str], str]:
        async with opened_layout(layout) as local:
            with local.staging(f"{source.absolute()} imported") as stage:
                found = await asyncio.to_thread(unpack_source, source, stage, image=image, report=progress)
                if follow_links and found.kind != "directory":
                    raise UsageError(
                        f"the links of an archive ({source}) are not followed", remedy="Leave --follow-links away"
                    )
                making = Making(
                    settings=_settings(found.config, **settings),
                    world_readable=world_readable,
                    follow_links=follow_links,
                )
                # In an image modes and absolute links are meant for a system of its own.
                told = found.kind in ("directory", "tar")
                layer = Layer(source_directory(found.root), form or "squashfs", told=told)
                packed, notes = await pack_layers([layer], reference, local, making, on_progress=progress)
        dropped = (*found.seen.dropped, *packed.dropped)
        total = found.seen.dropped_total + packed.dropped_total
        return replace(packed, dropped=dropped, dropped_total=total), notes, found.kind

    with output.Progress(quiet=as_json) as progress:
        packed, notes, kind = asyncio.run(work(progress))
    show_packed(packed, notes, as_json=as_json, kind=kind)


def _settings(config: Config, *, entrypoint: str | None, env: tuple[str, ...], working_dir: str | None) -> Settings:
    from p2pdist.package.pack import Settings

    program = parse_entrypoint(entrypoint)
    return Settings(
        config.entrypoint if program is None else program,
        (*config.env, *env),
        config.working_dir if working_dir is None else working_dir,
    )
