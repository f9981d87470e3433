"""`p2pdist rm`: a package leaves this host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.local import socket_option

if TYPE_CHECKING:
    from p2pdist.model.messages import Removed


@click.command("rm")
@click.argument("ref")
@socket_option
@output.json_option
def command(ref: str, socket: Path, as_json: bool) -> None:
    """Remove the package REF from the store of this host's agent, with everything that no other package there needs.

    A package that is shown, pinned or being pulled stays, and this says so. What lies at the origin is not touched.

    \b
    Example:
      p2pdist rm team/trainer:v1
    """
    removed = asyncio.run(_remove(ref, socket))
    if as_json:
        output.print_json(removed)
        return
    click.echo(f"{removed.reference} removed, {output.amount(removed.bytes_freed)} freed")


async def _remove(ref: str, socket: Path) -> Removed:
    from p2pdist.agent.client import LocalClient

    async with LocalClient(socket) as client:
        return await client.remove(ref)
