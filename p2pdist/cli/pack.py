"""`p2pdist pack`: a directory becomes a package in the local layout."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from p2pdist.cli import output
from p2pdist.cli.depots import layout_option, opened_layout, opened_origin, origin_option
from p2pdist.model.errors import UsageError
from p2pdist.model.package import Descriptor, parse_reference

if TYPE_CHECKING:
    from p2pdist.package.pack import Packed

DROPPED_SHOWN_MAX = 20


@click.command("pack")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-t", "--tag", required=True, metavar="NAME:TAG", help="What to call the package.")
@click.option("--base", metavar="REF", help="A package to stack on, from the layout or else the origin.")
@click.option("--format", "form", type=click.Choice(["squashfs"]), default="squashfs", show_default=True)
@click.option("--entrypoint", metavar="JSON", help="Program and arguments, as a JSON list of strings.")
@click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="An environment entry; may be repeated.")
@click.option("--working-dir", metavar="DIR", help="Where the program starts, within the package.")
@click.option("--mtime", type=int, metavar="SECONDS", help="Give all files this modification time (since 1970).")
@click.option("--level", type=int, help="zstd level, 1 to 22.  [default: 6]")
@layout_option
@origin_option
@output.json_option
def command(
    source: Path,
    *,
    tag: str,
    base: str | None,
    form: str,
    entrypoint: str | None,
    env: tuple[str, ...],
    working_dir: str | None,
    mtime: int | None,
    level: int | None,
    layout: Path,
    origin: str | None,
    as_json: bool,
) -> None:
    """Pack the directory SOURCE as a package into the local layout.

    Equal files, modes and modification times give an equal package. Device nodes, sockets, FIFOs and setuid bits are left out and named.

    \b
    Example:
      p2pdist pack ./env -t team/env:2024-05
      p2pdist pack ./app -t team/trainer:v1 --base team/env:2024-05 --entrypoint '["python", "-m", "train"]'
    """
    from p2pdist.package.pack import Settings, pack
    from p2pdist.package.squashfs import LEVEL

    reference = parse_reference(tag)
    below = parse_reference(base) if base else None
    settings = Settings(_parse_entrypoint(entrypoint), env, working_dir)

    async def work(progress: output.Progress) -> Packed:
        async with opened_layout(layout) as local, opened_origin(origin) as central:
            return await pack(
                source,
                reference,
                local,
                base=below,
                origin=central,
                settings=settings,
                level=LEVEL if level is None else level,
                mtime=mtime,
                on_progress=progress,
            )

    with output.Progress(quiet=as_json) as progress:
        packed = asyncio.run(work(progress))
    _show(packed, as_json=as_json)


def _parse_entrypoint(text: str | None) -> list[str] | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise UsageError(
            f"the entrypoint {text[:100]!r} is not a JSON list of strings",
            remedy="""Write it as '["python", "-m", "train"]'""",
        ) from error


def layer_fields(layer: Descriptor) -> dict[str, object]:
    return {"digest": layer.digest, "size": layer.size, "mediaType": layer.media_type}


def _show(packed: Packed, *, as_json: bool) -> None:
    from p2pdist.package.scan import printable

    for item in packed.dropped[:DROPPED_SHOWN_MAX]:
        output.line(f"left out: {printable(item.path)} ({item.what})")
    if packed.dropped_total > DROPPED_SHOWN_MAX:
        output.line(f"left out: {packed.dropped_total - DROPPED_SHOWN_MAX} more")
    if as_json:
        output.print_json(
            {
                "reference": str(packed.reference),
                "digest": packed.digest,
                "layers": [layer_fields(layer) for layer in packed.layers],
                "files": packed.files,
                "bytes_total": packed.bytes_total,
                "seconds": round(packed.seconds, 3),
                "dropped": [{"path": printable(item.path), "what": item.what} for item in packed.dropped],
                "dropped_total": packed.dropped_total,
            }
        )
        return
    click.echo(f"{packed.reference}  {packed.digest}")
    click.echo(
        f"{packed.files} files, {output.amount(packed.bytes_total)} -> layer {output.amount(packed.layers[-1].size)}, "
        f"{len(packed.layers)} {'layer' if len(packed.layers) == 1 else 'layers'}, {packed.seconds:.1f} s"
    )
