"""`p2pdist resolve`: which package a tag names now."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from p2pdist.cli import output
from p2pdist.cli.services import layout_option, opened_layout, opened_origin, origin_option
from p2pdist.model.manifest import Reference, parse_reference


@click.command("resolve")
@click.argument("ref")
@layout_option
@origin_option
@output.json_option
def command(ref: str, layout: Path, origin: str | None, as_json: bool) -> None:
    """Print the reference by digest of the package that REF names now: at the origin if one is
    given, else in the local layout.

    A job that is started with this reference runs the same bytes on every host, whatever the tag
    names later.

    \b
    Example:
      p2pdist run "$(p2pdist resolve trainer:warm --origin s3://packages/prod)"
    """
    resolved = asyncio.run(_resolve(ref, layout, origin))
    if as_json:
        output.print_json(resolved)
        return
    click.echo(resolved["reference"])


async def _resolve(ref: str, layout: Path, origin: str | None) -> dict[str, Any]:
    reference = parse_reference(ref)
    async with opened_layout(layout) as local, opened_origin(origin) as central:
        repository = central or local
        described = await repository.resolve(reference)
    fixed = Reference(reference.name, digest=described.digest)
    return {"reference": str(fixed), "tag": reference.tag, "digest": described.digest, "at": repository.url}
