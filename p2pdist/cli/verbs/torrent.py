"""`p2pdist torrent`: what any BitTorrent client needs to fetch a package."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.options import OutputFile
from p2pdist.cli.services import origin_option, required_origin
from p2pdist.model.digest import is_digest, parse_digest
from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import Reference, blob_reference, parse_reference

if TYPE_CHECKING:
    from p2pdist.package.repository.torrents import Made


@click.command("torrent")
@click.argument("ref")
@origin_option
@click.option(
    "--tracker", metavar="URL", help="With -o: the tracker that the file shall name, such as http://tracker:7070."
)
@click.option("-o", "--output", "file", type=OutputFile(), help="Also write a .torrent file.")
@click.option(
    "--version",
    type=click.Choice(["1", "2"]),
    default="2",
    help="With -o: 1 leaves out BEP 52, as aria2 up to 1.36 needs.",
)
@output.quiet_options
@output.json_option
def command(ref: str, origin: str | None, tracker: str | None, file: Path | None, version: str, as_json: bool) -> None:
    """Make the torrent of REF, a package or the digest of a blob that was pushed alone, and keep it
    at the origin.

    Trackers then serve it at /v1/packages/REF/torrent and /v1/blobs/DIGEST/torrent, and answer
    the peers that announce themselves with it. The content is read once.

    \b
    Example:
      p2pdist torrent team/trainer:v3 --origin s3://packages/prod
      curl -O http://tracker:7070/v1/packages/team%2Ftrainer:v3/torrent
    """
    from p2pdist.package.archive.export import new_file

    reference = blob_reference(parse_digest(ref)) if is_digest(ref) else parse_reference(ref)
    if (file is None) != (tracker is None):
        raise UsageError("a .torrent file names a tracker", remedy="Give both -o and --tracker, or neither")
    with output.Progress(quiet=as_json) as progress:
        made = asyncio.run(_make(reference, origin, progress))
    if file is not None and tracker is not None:
        kind = "blob" if is_digest(ref) else "package"
        torrent = made.torrent.v1_only() if version == "1" else made.torrent
        data = torrent.metainfo(f"{tracker.rstrip('/')}/announce?{kind}={made.subject}")
        with new_file(file, needed=len(data), mode=0o666) as stream:
            stream.write(data)
    document = {
        "subject": made.subject,
        "document": made.document,
        "size": made.torrent.size,
        "info_hash_v1": made.torrent.info_hash_v1.hex(),
        "info_hash_v2": made.torrent.info_hash_v2.hex(),
    }
    if as_json:
        output.print_json(document)
        return
    click.echo(f"{ref}  btih:{document['info_hash_v1']}  btmh:1220{document['info_hash_v2']}")
    click.echo(f"{output.amount(made.torrent.size)} in {output.counted(len(made.torrent.files), 'file')}")


async def _make(reference: Reference, origin: str | None, progress: output.Progress) -> Made:
    from p2pdist.package.repository.torrents import make_torrent

    async with required_origin(origin) as central:
        return await make_torrent(reference, central, on_progress=lambda done, total: progress("hashing", done, total))
