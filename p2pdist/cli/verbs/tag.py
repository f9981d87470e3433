"""`p2pdist tag`: another name for a package."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from p2pdist.cli import output
from p2pdist.cli.services import layout_option, opened_layout, opened_origin, origin_option
from p2pdist.model.errors import NotFound, UsageError
from p2pdist.model.manifest import parse_reference


@click.command("tag")
@click.argument("ref")
@click.argument("alias")
@layout_option
@origin_option
@output.json_option
def command(ref: str, alias: str, layout: Path, origin: str | None, as_json: bool) -> None:
    """Let ALIAS name the package that REF names now: at the origin if one is given, else in the
    local layout.

    What ALIAS named before stays where it is, under its digest and its other tags.

    \b
    Example:
      p2pdist tag trainer:v3 trainer:warm --origin s3://packages/prod
    """
    done = asyncio.run(_tag(ref, alias, layout, origin))
    if as_json:
        output.print_json(done)
        return
    click.echo(f"{done['reference']}  {done['digest']}  at {done['at']}")


async def _tag(ref: str, alias: str, layout: Path, origin: str | None) -> dict[str, Any]:
    from p2pdist.package.repository.contract import read_manifest
    from p2pdist.package.repository.notes import PushLease

    reference, name = parse_reference(ref), parse_reference(alias)
    if not name.tag:
        raise UsageError(f"{alias} is a digest, which nothing else can be named", remedy="Write name:tag")
    async with opened_layout(layout) as local, opened_origin(origin) as central:
        repository = central or local
        described, manifest, _ = await read_manifest(reference, [repository])
        blobs = (*manifest.blobs, *manifest.documents())
        async with PushLease(repository, [described.digest, *(blob.digest for blob in blobs)]):
            for blob in (described, *blobs):  # no tag had to lead to them so far
                if await repository.size(blob.digest) is None:
                    raise NotFound(
                        f"{blob.digest} of {reference} is not at {repository.url}", remedy="Push it there first"
                    )
            await repository.tag(name, described)
    return {"reference": str(name), "digest": described.digest, "at": repository.url}
