"""`p2pdist rm`: a package leaves this host, or its tag leaves central storage or the local
layout."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from p2pdist.cli import output
from p2pdist.cli.services import elsewhere_options, opened_elsewhere, origin_option, require_no_origin, socket_option
from p2pdist.model.errors import Conflict, NotFound, P2PDistError, UsageError
from p2pdist.model.manifest import Reference, parse_reference


@click.command("rm")
@click.argument("references", metavar="REF...", nargs=-1, required=True)
@elsewhere_options("Remove the tag from")
@origin_option
@socket_option
@output.json_option
def command(
    references: tuple[str, ...],
    *,
    at_origin: bool,
    origin: str | None,
    layout: Path | None,
    socket: Path,
    as_json: bool,
) -> None:
    """Remove the packages REF from the store of this host's agent, with everything that no other
    package there needs. REF may also be a pattern, or the digest (sha256:...) of what p2pdist ls
    lists, such as a blob that is there by itself; its first 12 digits are enough. With several
    --json prints a list.

    A package that is mounted, pinned or being pulled stays, and the command fails when the others
    are gone. The origin is not touched.

    With --at-origin or --layout, remove the tags REF there instead; where one is not there the
    command fails when the others are gone. p2pdist gc removes the blobs that no other tag needs.

    \b
    Example:
      p2pdist rm team/trainer:v1
      p2pdist rm team/trainer:v1 --at-origin --origin s3://packages/prod
    """
    if not at_origin:
        require_no_origin()
    done: list[Any] = []
    failed: list[P2PDistError] = []
    if at_origin or layout:
        for reference in [*map(_tag, references)]:  # a mistyped one removes none
            try:
                done.append(asyncio.run(_untag(reference, at_origin, origin, layout)))
            except NotFound as error:  # the others can go
                failed.append(error)
                continue
            if not as_json:
                output.say(f"{done[-1]['reference']} removed at {done[-1]['at']}; it named {done[-1]['digest']}")
    else:
        from p2pdist.agent.api.client import LocalClient
        from p2pdist.cli.references.search import here

        client = LocalClient(socket)
        named = here(references, client)
        for ref in named:
            try:
                done.append(client.remove(ref))
            except (Conflict, NotFound) as error:  # the others can go
                failed.append(error)
                continue
            if not as_json:
                output.say(f"{done[-1].reference} removed, {output.amount(done[-1].bytes_freed)} freed")
    several = max(len(references), len(done) + len(failed)) > 1
    if as_json and (done or several):
        output.print_json([*done, *(failure.problem() for failure in failed)] if several else done[0])
    for failure in failed[1:]:
        output.line(f"p2pdist: {failure}")
    if failed:
        raise output.Listed(failed[0]) if as_json and several else failed[0]


def _tag(ref: str) -> Reference:
    """Raises UsageError for what is no tag."""
    reference = parse_reference(ref)
    if not reference.tag:
        raise UsageError(f"{ref} is a digest, and only tags are removed there", remedy="Write name:tag")
    return reference


async def _untag(reference: Reference, at_origin: bool, origin: str | None, layout: Path | None) -> dict[str, Any]:
    async with opened_elsewhere(at_origin, origin, layout) as repository:
        removed = await repository.untag(reference)
        return {"reference": str(reference), "digest": removed.digest, "at": repository.url}
