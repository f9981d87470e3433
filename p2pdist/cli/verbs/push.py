"""`p2pdist push`: a package goes from the local layout to an origin."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.services import encrypt_option, layout_option, opened_layout, origin_option, required_origin
from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import Reference, parse_reference

if TYPE_CHECKING:
    from p2pdist.origin.contract import Origin
    from p2pdist.origin.layout import LocalLayout
    from p2pdist.package.repository.push import Pushed
    from p2pdist.package.repository.torrents import Made


@click.command("push")
@click.argument("ref")
@layout_option
@origin_option
@click.option("--torrent", is_flag=True, help="Make the torrents of the package and of its blobs as well.")
@encrypt_option()
@output.quiet_options
@output.json_option
def command(ref: str, layout: Path, origin: str | None, torrent: bool, encrypt_to: str | None, as_json: bool) -> None:
    """Send the package REF from the local layout to an origin. What is there already is not sent
    again.

    With --encrypt-to, storage, trackers and hosts on the way see encrypted blobs, and only hosts
    that may read REF get its key from their tracker. Nothing of it remains open but its name and
    its sizes.

    With --torrent, hosts can go on from BitTorrent swarms where no tracker plans, and any
    BitTorrent client can fetch the package. What has a torrent already is not read again.

    \b
    Example:
      p2pdist push team/trainer:v1 --origin s3://packages/prod
    """
    if torrent and encrypt_to:
        raise UsageError(
            "an encrypted package has no torrents: its namespace is not public", remedy="Leave --torrent away"
        )
    reference = parse_reference(ref)
    pushed, made = push_package(reference, layout, origin, torrent=torrent, quiet=as_json, encrypt_to=encrypt_to)
    if as_json:
        output.print_json(
            {
                "reference": str(pushed.reference),
                "digest": pushed.digest,
                "bytes_sent": pushed.bytes_sent,
                "bytes_skipped": pushed.bytes_skipped,
                "seconds": round(pushed.seconds, 3),
                "encrypted": bool(encrypt_to),
                "torrents": {each.subject: each.document for each in made},
            }
        )
        return
    click.echo(f"{pushed.reference}  {pushed.digest}{'  encrypted' if encrypt_to else ''}")
    if output.is_quiet():
        return
    click.echo(
        f"{output.amount(pushed.bytes_sent)} sent, {output.amount(pushed.bytes_skipped)} already there, {pushed.seconds:.1f} s"
    )
    if torrent:
        click.echo(f"{len(made)} torrents made")


def push_package(
    reference: Reference, layout: Path, origin: str | None, *, torrent: bool, quiet: bool, encrypt_to: str | None
) -> tuple[Pushed, list[Made]]:
    """Send a package from the local layout to the origin, encrypted for a recipient where one is
    given; returns also the torrents that were made. Raises what pushing raises."""

    async def work(progress: output.Progress) -> tuple[Pushed, list[Made]]:
        async with required_origin(origin) as central, opened_layout(layout) as local:
            if torrent:
                from p2pdist.package.repository.torrents import check_keeps_torrents, make_torrents

                check_keeps_torrents(central)
            pushed = await push_to(reference, local, central, encrypt_to, progress)

            def hashed(done: int, total: int) -> None:
                progress("hashing", done, total)

            if not torrent:
                return pushed, []
            return pushed, await make_torrents(reference, local, central, on_progress=hashed)

    with output.Progress(quiet=quiet) as progress:
        return asyncio.run(work(progress))


async def push_to(
    reference: Reference, local: LocalLayout, central: Origin, encrypt_to: str | None, progress: output.Progress
) -> Pushed:
    """Send a package, encrypted where a recipient is given. Raises what pushing raises."""
    if encrypt_to is None:
        from p2pdist.package.repository.push import push

        return await push(reference, local, central, on_progress=progress)
    from p2pdist.package.repository.sealed_push import push_encrypted

    return await push_encrypted(reference, local, central, encrypt_to, on_progress=progress)
