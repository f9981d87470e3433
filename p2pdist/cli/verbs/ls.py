"""`p2pdist ls`: the packages on this host, or at an origin."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from p2pdist.cli import output
from p2pdist.cli.connect import origin_option, required_origin, socket_option
from p2pdist.model.errors import printable


@click.command("ls")
@click.option("--at-origin", is_flag=True, help="List what central storage holds instead; needs --origin.")
@origin_option
@socket_option
@output.json_option
def command(at_origin: bool, origin: str | None, socket: Path, as_json: bool) -> None:
    """List the packages in the store of this host's agent, then the blobs without a package: pulled
    by their digest, or of a former version of a tag. p2pdist rm takes such a digest.

    \b
    Example:
      p2pdist ls
      p2pdist ls --at-origin --origin file:///srv/packages
    """
    packages = asyncio.run(_at_origin(origin)) if at_origin else _here(socket)
    if as_json:
        output.print_json(packages)
        return
    tagged = {entry["digest"] for entry in packages if "@" not in entry["reference"]}
    # A package that was asked for by its digest too is one package.
    packages = [entry for entry in packages if "@" not in entry["reference"] or entry["digest"] not in tagged]
    names = ["blob" if _is_blob(entry) else printable(entry["reference"]) for entry in packages]
    width = max(map(len, names), default=0)
    for name, entry in zip(names, packages, strict=True):
        size = output.amount(entry["size"]) if "size" in entry else ""
        state = "" if entry.get("complete", True) else "  incomplete"
        click.echo(f"{name:<{width}}  {entry['digest']}  {size:>10}{state}".rstrip())


def _is_blob(entry: dict[str, Any]) -> bool:
    """Whether it is a single blob: at the origin a blob that was pushed alone is a package."""
    return bool(entry["reference"] == f"blob:{entry['digest'].replace(':', '-')}")


def _here(socket: Path) -> list[dict[str, Any]]:
    from p2pdist.agent.api.client import LocalClient

    return LocalClient(socket).packages()


async def _at_origin(url: str | None) -> list[dict[str, Any]]:
    async with required_origin(url) as origin:
        return [{"reference": name, "digest": manifest.digest} for name, manifest in await origin.tags()]
