"""`p2pdist gc`: what nothing names leaves the store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.local import socket_option

if TYPE_CHECKING:
    from p2pdist.model.messages import Removed


@click.command("gc")
@socket_option
@output.json_option
def command(socket: Path, as_json: bool) -> None:
    """Remove from the store what no package needs, such as the remains of pulls that were broken off.

    An agent does this by itself when it needs room. Pulls and mounts may go on meanwhile.

    \b
    Example:
      p2pdist gc
    """
    removed = asyncio.run(_collect(socket))
    if as_json:
        output.print_json({"bytes_freed": removed.bytes_freed})
        return
    click.echo(f"{output.amount(removed.bytes_freed)} freed")


async def _collect(socket: Path) -> Removed:
    from p2pdist.agent.client import LocalClient

    async with LocalClient(socket) as client:
        return await client.collect()
