"""`p2pdist mount`: a package at a directory."""

from __future__ import annotations

import os
from pathlib import Path

import click

from p2pdist.cli import output
from p2pdist.cli.connect import (
    HOW_HELP,
    LAZY_HELP,
    check_seen,
    follow_pull,
    mount_lazily,
    pulled_name,
    socket_option,
)
from p2pdist.model.errors import Conflict, NotFound, P2PDistError
from p2pdist.model.messages import MOUNT_METHODS, MountRequest, MountStatus

_OTHER_DIRECTORY = "Name a directory that the agent and this process share, or mount it among the host's mounts"


@click.command("mount")
@click.argument("reference", metavar="REF")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--writable", is_flag=True, help="Let programs write there; what they write goes with the mount.")
@click.option("--how", type=click.Choice(MOUNT_METHODS), help=HOW_HELP)
@click.option("--lazy", is_flag=True, help=LAZY_HELP)
@socket_option
@output.json_option
def command(
    reference: str, directory: Path, writable: bool, how: str | None, lazy: bool, socket: Path, as_json: bool
) -> None:
    """Show the package REF at DIR, an empty directory or a new one; it is pulled first where it is
    missing.

    \b
    Example:
      p2pdist mount team/trainer:v3 /srv/trainer
    """
    request = MountRequest("", os.path.abspath(directory), writable, how or "", lazy=lazy)
    status = _mount(reference, request, socket, quiet=as_json)
    if as_json:
        output.print_json(
            {
                "path": status.path,
                "how": status.how,
                "why": status.why,
                "reference": status.reference,
                "digest": status.digest,
                "writable": status.writable,
            }
        )
        return
    output.line(status.why)
    click.echo(status.path)


def _mount(reference: str, request: MountRequest, socket: Path, *, quiet: bool) -> MountStatus:
    from msgspec.structs import replace

    from p2pdist.agent.api.client import LocalClient

    client = LocalClient(socket)
    try:
        shown = mount_lazily(client, replace(request, package=reference)) if request.lazy else None
        if shown is None:
            pulled = follow_pull(client, reference, quiet=quiet)
            shown = client.mount(replace(request, package=pulled_name(reference, pulled), lazy=False))
    except NotFound as error:
        if os.path.isdir(str(error.details.get("directory", ""))):
            raise NotFound(f"{error.what} where the agent runs, only here", remedy=_OTHER_DIRECTORY) from error
        raise
    try:
        check_seen(shown, _OTHER_DIRECTORY)
    except Conflict as error:
        try:
            client.unmount(shown.path)
        except P2PDistError as failure:
            raise Conflict(f"{error.what}; it stays there: {failure.what}", remedy=failure.remedy) from failure
        raise
    return shown
