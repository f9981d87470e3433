"""`p2pdist key`: keys of namespaces, by which hosts open encrypted packages; on a tracker's
machine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.services import origin_option, required_origin
from p2pdist.cli.verbs.access import access_option, present_directory
from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import parse_reference

if TYPE_CHECKING:
    from tracker.access.directory import AccessDirectory


@click.group("key")
def command() -> None:
    """Make and rotate the keys of namespaces whose packages are encrypted. A key is an age identity
    beside the tracker's access file; packages are pushed to its recipient, which is no secret.

    \b
    Examples:
      p2pdist key create team-a --access /etc/p2pdist/access.toml
      p2pdist push team-a/trainer:v1 --encrypt-to age1...
      p2pdist key list
      p2pdist key rotate team-a
      p2pdist key rewrap team-a team-a/trainer:v1 --origin s3://packages/prod
    """


@command.command("create")
@click.argument("name")
@access_option
@output.json_option
def create(name: str, access: Path, as_json: bool) -> None:
    """Make the key NAME, and print its recipient. The access file then says what it opens:
    [sealed."team-a/*"] with key = "NAME".

    \b
    Example:
      p2pdist key create team-a
    """
    directory = present_directory(access)
    if name in directory.key_names():
        raise UsageError(f"there is a key {name} already", remedy=f"p2pdist key rotate {name} makes its next identity")
    _made(directory, name, as_json)


@command.command("rotate")
@click.argument("name")
@access_option
@output.json_option
def rotate(name: str, access: Path, as_json: bool) -> None:
    """Make another identity of the key NAME, and print its recipient, for pushes from now on. What
    was pushed before opens by the identities before, as long as their files are there; `p2pdist key
    rewrap` makes it open by the new one.

    \b
    Example:
      p2pdist key rotate team-a
    """
    directory = present_directory(access)
    directory.identities(name)
    _made(directory, name, as_json)


@command.command("list")
@access_option
@output.json_option
def listing(access: Path, as_json: bool) -> None:
    """Print the keys here, each with its recipients, the present one first, and what it opens.

    \b
    Example:
      p2pdist key list
    """
    from p2pdist.encryption import recipient_of

    directory = present_directory(access)
    patterns = {rule.key: pattern for pattern, rule in directory.rules().sealed.items() if rule.key}
    rows = [
        {
            "name": name,
            "opens": patterns.get(name, ""),
            "recipients": [recipient_of(identity) for identity in directory.identities(name)],
        }
        for name in directory.key_names()
    ]
    if as_json:
        output.print_json(rows)
        return
    for row in rows:
        present, *before = row["recipients"]
        old = f"  and {len(before)} before it" if before else ""
        output.say(f"{row['name']}  {row['opens'] or 'opens nothing'}  {present}{old}")


@command.command("rewrap")
@click.argument("name")
@click.argument("refs", nargs=-1, required=True, metavar="REF...")
@access_option
@origin_option
@output.quiet_options
@output.json_option
def rewrap(name: str, refs: tuple[str, ...], access: Path, origin: str | None, as_json: bool) -> None:
    """Wrap the keys of the packages REF at an origin for the present recipient of the key NAME.
    Their tags lead to a new manifest; no content is read or written, and hosts that have a package
    fetch nothing of it.

    \b
    Example:
      p2pdist key rewrap team-a team-a/trainer:v1 --origin s3://packages/prod
    """
    from p2pdist.encryption import recipient_of, unwrap
    from p2pdist.package.repository.sealed_push import rewrap as rewrap_package

    identities = present_directory(access).identities(name)
    references = [parse_reference(ref) for ref in refs]
    if any(reference.digest for reference in references):
        raise UsageError("a package that a digest names cannot change", remedy="Name it as name:tag")

    async def work() -> dict[str, str]:
        async with required_origin(origin) as central:
            recipient = recipient_of(identities[0])
            done = {}
            for reference in references:
                changed = await rewrap_package(reference, central, lambda key: unwrap(key, identities), recipient)
                done[str(reference)] = str(changed or "")
            return done

    done = asyncio.run(work())
    if as_json:
        output.print_json(done)
        return
    for reference, digest in done.items():
        output.say(f"{reference}  {digest or 'is wrapped for the present recipient already'}")


def _made(directory: AccessDirectory, name: str, as_json: bool) -> None:
    recipient = directory.new_identity(name, now=time.time())
    patterns = [pattern for pattern, rule in directory.rules().sealed.items() if rule.key == name]
    if as_json:
        output.print_json({"name": name, "recipient": recipient, "opens": patterns[0] if patterns else ""})
        return
    if not patterns:
        output.line(f'say what it opens in {directory.path}: [sealed."{name}/*"] with key = "{name}"')
    output.say(recipient)
