"""`p2pdist import`: a tar or a container image becomes a package in the local layout."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdist.cli import output
from p2pdist.cli.depots import layout_option, opened_layout
from p2pdist.cli.pack import format_option, parse_entrypoint, settings_options, show_packed
from p2pdist.model.package import Config, parse_reference

if TYPE_CHECKING:
    from p2pdist.package.archive import Unpacked
    from p2pdist.package.pack import Packed, Settings
    from p2pdist.package.project import Format


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-t", "--tag", required=True, metavar="NAME:TAG", help="What to call the package.")
@click.option("--image", default="", metavar="NAME", help="Which image, where there are several: name, tag or digest.")
@click.option(
    "--platform", default="", metavar="OS/ARCH[/VARIANT]", help="Which platform's image.  [default: this machine's]"
)
@format_option
@settings_options
@layout_option
@output.json_option
def command(
    source: Path,
    *,
    tag: str,
    image: str,
    platform: str,
    form: Format | None,
    layout: Path,
    as_json: bool,
    **settings: Any,
) -> None:
    """Make a package of SOURCE: a directory, a tar (also .gz, .zst, .xz, .bz2), an OCI image layout, or what docker save writes,
    unpacked or not.

    The layers of an image are merged into one. Its entrypoint, command, environment and working directory are kept; options win over
    them. Owners, devices and setuid bits are not kept. Of the images of an index the first that this machine runs is taken.

    \b
    Example:
      docker save team/trainer:v3 -o trainer.tar
      p2pdist import trainer.tar -t team/trainer:v3 --format tree
    """
    from p2pdist.package.archive import unpack_source
    from p2pdist.package.pack import pack

    reference = parse_reference(tag)
    parse_entrypoint(settings["entrypoint"])

    async def work(progress: output.Progress) -> tuple[Packed, Unpacked]:
        async with opened_layout(layout) as local:
            with local.staging(f"{source.absolute()} imported") as stage:
                found = await asyncio.to_thread(
                    unpack_source, source, stage, image=image, platform=platform, report=progress
                )
                chosen = _settings(found.config, **settings)
                packed = await pack(
                    found.root,
                    reference,
                    local,
                    settings=chosen,
                    format=form or "squashfs",
                    modes=found.modes,
                    on_progress=progress,
                )
        dropped = (*found.seen.dropped, *packed.dropped)
        total = found.seen.dropped_total + packed.dropped_total
        return replace(packed, dropped=dropped, dropped_total=total), found

    with output.Progress(quiet=as_json) as progress:
        packed, found = asyncio.run(work(progress))
    show_packed(packed, list(found.notes), as_json=as_json, kind=found.kind)


def _settings(config: Config, *, entrypoint: str | None, env: tuple[str, ...], working_dir: str | None) -> Settings:
    from p2pdist.package.pack import Settings

    program = parse_entrypoint(entrypoint)
    return Settings(
        config.entrypoint if program is None else program,
        (*config.env, *env),
        config.working_dir if working_dir is None else working_dir,
    )
