"""`p2pdist inspect`: what a package consists of."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from p2pdist.cli import output
from p2pdist.cli.services import asks_origin_first, layout_option, opened_layout, opened_origin, origin_option
from p2pdist.model.errors import printable
from p2pdist.model.manifest import MANIFEST_BYTES_MAX, Descriptor, decode_config, parse_reference


@click.command("inspect")
@click.argument("ref")
@layout_option
@origin_option
@output.json_option
def command(ref: str, layout: Path, origin: str | None, as_json: bool) -> None:
    """Print the layers and the settings of the package REF: as it is at the origin that --origin
    names; without --origin as it is in the local layout, or else at the origin of P2PDIST_ORIGIN.

    \b
    Example:
      p2pdist inspect team/trainer:v1 --origin s3://packages/prod
    """
    document, contents = asyncio.run(_inspect(ref, layout, origin, only_origin=asks_origin_first()))
    if as_json:
        output.print_json(document)
        return
    click.echo(f"{document['reference']}  {document['digest']}")
    click.echo(f"at            {document['at']}")
    click.echo(f"entrypoint    {printable(' '.join(document['entrypoint'])) or '-'}")
    for entry in document["env"]:
        click.echo(f"env           {printable(entry)}")
    if document["working_dir"]:
        click.echo(f"working dir   {printable(document['working_dir'])}")
    for kind, blobs in (("layer", document["layers"]), ("part", document["parts"])):
        for blob in blobs:
            click.echo(f"{kind:13} {blob['digest']}  {output.amount(blob['size'])}  {printable(blob['mediaType'])}")
    click.echo(f"total         {contents}")


async def _inspect(ref: str, layout: Path, origin: str | None, *, only_origin: bool) -> tuple[dict[str, Any], str]:
    """The package for scripts, and what it consists of for people."""
    from p2pdist.package.repository.contract import Repository, read_document, read_manifest

    reference = parse_reference(ref)
    async with opened_layout(layout) as local, opened_origin(origin) as central:
        repositories: list[Repository] = [local, central] if central else [local]
        if central and only_origin:
            repositories = [central]
        described, manifest, repository = await read_manifest(reference, repositories)
        config = decode_config(await read_document(manifest.config.digest, repositories, limit=MANIFEST_BYTES_MAX))
    document = {
        "reference": str(reference),
        "digest": described.digest,
        "at": repository.url,
        "entrypoint": list(config.entrypoint),
        "env": list(config.env),
        "working_dir": config.working_dir,
        "layers": [_layer(layer) for layer in manifest.layers],
        "parts": [_layer(part) for part in manifest.parts],
        "config": manifest.config.digest,
        "bytes_total": sum(blob.size for blob in manifest.blobs),
    }
    return document, output.contents(manifest.layers, manifest.parts)


def _layer(layer: Descriptor) -> dict[str, Any]:
    return {
        "digest": layer.digest,
        "size": layer.size,
        "mediaType": layer.media_type,
        "piece_size": layer.layout.piece_size,
        "pieces": layer.layout.count,
        "pieces_digest": layer.pieces_digest,
    }
