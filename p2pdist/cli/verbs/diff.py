"""`p2pdist diff`: what moving from one package to another takes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.connect import asks_origin_first, layout_option, opened_layout, opened_origin, origin_option
from p2pdist.model.errors import UsageError, printable
from p2pdist.model.manifest import parse_reference

if TYPE_CHECKING:
    from p2pdist.package.repository.push import Difference
    from p2pdist.package.tree.diff import PathChanges

SHOWN_MAX = 50
"""Lines of each kind for people; --json has all."""

KINDS = ("added", "changed", "removed")


@click.command("diff")
@click.argument("old", metavar="REF")
@click.argument("new", metavar="REF")
@click.option(
    "--only-used",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    metavar="TRACE",
    help="Name only files that a run used, as p2pdist trace recorded it; may be repeated.",
)
@layout_option
@origin_option
@output.json_option
def command(old: str, new: str, only_used: tuple[Path, ...], layout: Path, origin: str | None, as_json: bool) -> None:
    """Print what the second package has and the first does not, and how many bytes a host with the
    first one fetches for the second.

    Packages with tree layers are compared path by path, others layer by layer. They are looked up
    in the local layout and then at the origin; with --origin on the command line at this origin and
    then in the layout.

    \b
    Example:
      p2pdist diff team/trainer:v1 team/trainer:v2
      p2pdist diff team/trainer:v1 team/trainer:v2 --only-used train.json
    """
    difference, paths = asyncio.run(_compare(old, new, layout, origin, origin_first=asks_origin_first()))
    layers = dict(zip(KINDS, (difference.added, difference.changed, difference.removed), strict=True))
    shown = layers if paths is None else dict(zip(KINDS, map(_texts, paths), strict=True))
    if only_used:
        if paths is None:
            raise UsageError(
                "packages without tree layers are not compared path by path", remedy="Leave out --only-used"
            )
        used = _used(only_used)
        shown = {kind: tuple(name for name in names if name in used) for kind, names in shown.items()}
    if as_json:
        output.print_json({"bytes_to_move": difference.bytes_to_move, **shown, "layers": layers})
        return
    for kind, names in shown.items():
        for name in names[:SHOWN_MAX]:
            click.echo(f"{kind:<8} {printable(name)}")
        if len(names) > SHOWN_MAX:
            click.echo(f"{kind:<8} {len(names) - SHOWN_MAX} more; --json has all")
    click.echo(f"{output.amount(difference.bytes_to_move)} to move")


def _texts(paths: tuple[bytes, ...]) -> tuple[str, ...]:
    return tuple(path.decode("utf-8", "backslashreplace") for path in paths)


def _used(traces: tuple[Path, ...]) -> set[str]:
    from p2pdist.package.source.trace import merge, read_trace

    return set(_texts(tuple(map(os.fsencode, merge([read_trace(trace) for trace in traces]).files))))


async def _compare(
    old: str, new: str, layout: Path, origin: str | None, *, origin_first: bool
) -> tuple[Difference, PathChanges | None]:
    from p2pdist.package.repository.contract import Repository, read_manifest
    from p2pdist.package.tree.diff import compare_packages

    first, second = parse_reference(old), parse_reference(new)
    async with opened_layout(layout) as local, opened_origin(origin) as central:
        repositories: list[Repository] = [local, central] if central else [local]
        if origin_first:
            repositories.reverse()
        _, before, _ = await read_manifest(first, repositories)
        _, after, _ = await read_manifest(second, repositories)
        return await compare_packages(before, after, repositories)
