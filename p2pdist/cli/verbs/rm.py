"""`p2pdist rm`: a package leaves this host, or its tag leaves central storage or the local
layout."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from p2pdist.cli import output
from p2pdist.cli.connect import elsewhere_options, opened_elsewhere, origin_option, socket_option
from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import parse_reference


@click.command("rm")
@click.argument("ref")
@elsewhere_options("Remove the tag from")
@origin_option
@socket_option
@output.json_option
def command(ref: str, *, at_origin: bool, origin: str | None, layout: Path | None, socket: Path, as_json: bool) -> None:
    """Remove the package REF from the store of this host's agent, with everything that no other
    package there needs. REF may also be the digest of a blob that is there by itself.

    A package that is mounted, pinned or being pulled stays, and the command fails. The origin is
    not touched.

    With --at-origin or --layout, remove the tag REF there instead. p2pdist gc removes the blobs
    that no other tag needs.

    \b
    Example:
      p2pdist rm team/trainer:v1
      p2pdist rm team/trainer:v1 --at-origin --origin s3://packages/prod
    """
    if at_origin or layout:
        done = asyncio.run(_untag(ref, at_origin, origin, layout))
        if as_json:
            output.print_json(done)
            return
        click.echo(f"{done['reference']} removed at {done['at']}; it named {done['digest']}")
        return
    from p2pdist.agent.api.client import LocalClient

    removed = LocalClient(socket).remove(ref)
    if as_json:
        output.print_json(removed)
        return
    click.echo(f"{removed.reference} removed, {output.amount(removed.bytes_freed)} freed")


async def _untag(ref: str, at_origin: bool, origin: str | None, layout: Path | None) -> dict[str, Any]:
    reference = parse_reference(ref)
    if not reference.tag:
        raise UsageError(f"{ref} is a digest, and only tags are removed there", remedy="Write name:tag")
    async with opened_elsewhere(at_origin, origin, layout) as repository:
        removed = await repository.untag(reference)
        return {"reference": str(reference), "digest": removed.digest, "at": repository.url}
