"""`p2pdist diff`: what moving from one package to another takes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.depots import layout_option, opened_layout, opened_origin, origin_option
from p2pdist.model.package import parse_reference

if TYPE_CHECKING:
    from p2pdist.package.push import Difference


@click.command("diff")
@click.argument("old", metavar="REF")
@click.argument("new", metavar="REF")
@layout_option
@origin_option
@output.json_option
def command(old: str, new: str, layout: Path, origin: str | None, as_json: bool) -> None:
    """Print which layers of the second package a host that holds the first one lacks.

    \b
    Example:
      p2pdist diff team/trainer:v1 team/trainer:v2
    """
    found = asyncio.run(_compare(old, new, layout, origin))
    if as_json:
        output.print_json(found)
        return
    for word, digests in (("added", found.added), ("changed", found.changed), ("removed", found.removed)):
        for digest in digests:
            click.echo(f"{word:<8} {digest}")
    click.echo(f"{output.amount(found.bytes_to_move)} to move")


async def _compare(old: str, new: str, layout: Path, origin: str | None) -> Difference:
    from p2pdist.package.depot import Depot, read_manifest
    from p2pdist.package.push import compare

    first, second = parse_reference(old), parse_reference(new)
    async with opened_layout(layout) as local, opened_origin(origin) as central:
        depots: list[Depot] = [local, central] if central else [local]
        _, before, _ = await read_manifest(first, depots)
        _, after, _ = await read_manifest(second, depots)
    return compare(before, after)
