"""`p2pdist diff`: what moving from one package to another takes."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.services import asks_origin_first, layout_option, opened_layout, opened_origin, origin_option
from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import parse_reference

if TYPE_CHECKING:
    from p2pdist.package.repository.push import Difference
    from p2pdist.package.tree.diff import Change

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
@click.option("--stat", is_flag=True, help="Print the largest changes with their sizes, and what changed.")
@layout_option
@origin_option
@output.json_option
def command(
    old: str, new: str, only_used: tuple[Path, ...], stat: bool, layout: Path, origin: str | None, as_json: bool
) -> None:
    """Print what the second package has and the first does not, and how many bytes a host with the
    first one fetches for the second.

    Packages with tree layers are compared path by path, others layer by layer. They are looked up
    in the local layout and then at the origin; with --origin on the command line at this origin and
    then in the layout.

    \b
    Example:
      p2pdist diff team/trainer:v1 team/trainer:v2 --stat
      p2pdist diff team/trainer:v1 team/trainer:v2 --only-used train.json
    """
    difference, changes = asyncio.run(_compare(old, new, layout, origin, origin_first=asks_origin_first()))
    layers = dict(zip(KINDS, (difference.added, difference.changed, difference.removed), strict=True))
    if only_used:
        if changes is None:
            raise UsageError(
                "packages without tree layers are not compared path by path", remedy="Leave out --only-used"
            )
        used = _used(only_used)
        changes = [change for change in changes if _text(change.path) in used]
    if as_json:
        named = layers if changes is None else _by_kind(changes)
        details = {} if changes is None else {"changes": list(map(_fields, changes))}
        output.print_json({"bytes_to_move": difference.bytes_to_move, **named, "layers": layers, **details})
        return
    moved = f"{output.amount(difference.bytes_to_move)} to move"
    if changes is None:
        for kind, names in layers.items():
            for name in names:
                output.say(f"{kind:<8} {name}")
        output.say(moved)
        return
    if stat:
        _show_largest(changes)
    else:
        _show_all(changes)
    output.say(f"{_summary(changes)}; {moved}" if changes else moved)


def _show_all(changes: Sequence[Change]) -> None:
    """SHOWN_MAX paths of each kind; directories that came or went are told by their files."""
    shown = [change for change in changes if not (change.directory and change.what != "changed")]
    for kind in KINDS:
        of_kind = [change for change in shown if change.what == kind]
        for change in of_kind[:SHOWN_MAX]:
            aspects = f"  ({', '.join(change.aspects)})" if change.aspects else ""
            output.say(f"{kind:<8} {_text(change.path)}{aspects}")
        if len(of_kind) > SHOWN_MAX:
            output.say(f"{kind:<8} {len(of_kind) - SHOWN_MAX} more; --json has all")


def _show_largest(changes: Sequence[Change]) -> None:
    """The SHOWN_MAX paths with the most bytes that came, changed or went."""

    def weight(change: Change) -> int:
        if change.what == "changed" and "content" not in change.aspects:
            return 0
        return max(change.size_before or 0, change.size_after or 0)

    files = sorted(
        (change for change in changes if not change.directory), key=lambda change: (-weight(change), change.path)
    )
    rows = []
    for change in files[:SHOWN_MAX]:
        sizes = [output.amount(size) for size in (change.size_before, change.size_after) if size is not None]
        what = ", ".join(change.aspects) or change.what
        rows.append((_text(change.path), " -> ".join(dict.fromkeys(sizes)), what))
    if rows:
        output.table(("PATH", "SIZE", "WHAT"), rows, right=(1,))
    if len(files) > SHOWN_MAX:
        output.say(f"{len(files) - SHOWN_MAX} more; --json has all")


def _summary(changes: Sequence[Change]) -> str:
    """`3 added (1.2 MiB), 7 changed (6 content, 1 mode), 1 removed (20 B)`, of files and links."""
    parts = []
    for kind in KINDS:
        of_kind = [change for change in changes if change.what == kind and not change.directory]
        aspects = Counter(aspect for change in of_kind for aspect in change.aspects)
        size = output.amount(sum((change.size_after or change.size_before or 0) for change in of_kind))
        words = ", ".join(f"{count} {aspect}" for aspect, count in aspects.items()) if kind == "changed" else size
        if of_kind:
            parts.append(f"{len(of_kind)} {kind} ({words})")
    return ", ".join(parts) or "only directories differ"


def _fields(change: Change) -> dict[str, object]:
    """A change in the JSON document."""
    return {
        "path": _text(change.path),
        "what": change.what,
        "size_before": change.size_before,
        "size_after": change.size_after,
        "aspects": change.aspects,
    }


def _by_kind(changes: Sequence[Change]) -> dict[str, tuple[str, ...]]:
    return {kind: tuple(_text(change.path) for change in changes if change.what == kind) for kind in KINDS}


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def _used(traces: tuple[Path, ...]) -> set[str]:
    from p2pdist.package.source.trace import merge, read_trace

    return {_text(os.fsencode(file)) for file in merge([read_trace(trace) for trace in traces]).files}


async def _compare(
    old: str, new: str, layout: Path, origin: str | None, *, origin_first: bool
) -> tuple[Difference, list[Change] | None]:
    from p2pdist.package.repository.contract import Repository, read_plain_manifest
    from p2pdist.package.tree.diff import compare_in_detail

    first, second = parse_reference(old), parse_reference(new)
    async with opened_layout(layout) as local, opened_origin(origin) as central:
        repositories: list[Repository] = [local, central] if central else [local]
        if origin_first:
            repositories.reverse()
        _, before, _ = await read_plain_manifest(first, repositories)
        _, after, _ = await read_plain_manifest(second, repositories)
        return await compare_in_detail(before, after, repositories)
