"""`p2pdist umount`: the end of `p2pdist mount`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from p2pdist.cli import output
from p2pdist.cli.services import socket_option


@click.command("umount")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--force", is_flag=True, help="Take it out of sight although it is in use; its users keep what they have open."
)
@socket_option
@output.json_option
def command(directory: Path, force: bool, socket: Path, as_json: bool) -> None:
    """Take away the package that is shown at DIR.

    \b
    Example:
      p2pdist umount /srv/trainer
    """
    from p2pdist.agent.api.client import LocalClient
    from p2pdist.mount.sight import seen

    path = os.path.abspath(directory)
    LocalClient(socket).unmount(path, force, seen(path))
    if as_json:
        output.print_json({"path": path})
