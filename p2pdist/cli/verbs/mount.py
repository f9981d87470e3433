"""`p2pdist mount`: a package at a directory."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import click

from p2pdist.cli import output
from p2pdist.cli.services import (
    HOW_HELP,
    check_seen,
    lazy_option,
    lazy_or_pulled,
    pulled_name,
    socket_option,
)
from p2pdist.model.errors import Conflict, NotFound, P2PDistError, Unavailable
from p2pdist.model.messages import MOUNT_METHODS, MountRequest, MountStatus, PullStatus

FILL_POLL_S = 0.25
AWAY_S_MAX = 30.0
"""How long --wait waits for an agent that does not answer, or has not taken the view over yet, as
while it restarts."""

LAZY = "lazy"
"""The method of a lazy view."""

_OTHER_DIRECTORY = "Name a directory that the agent and this process share, or mount it among the host's mounts"


@click.command("mount")
@click.argument("reference", metavar="REF")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--writable", is_flag=True, help="Let programs write there; what they write goes with the mount.")
@click.option("--how", type=click.Choice(MOUNT_METHODS), help=HOW_HELP)
@lazy_option
@click.option("--wait", is_flag=True, help="Return only when a lazy view lacks nothing any more.")
@socket_option
@output.quiet_options
@output.json_option
def command(
    reference: str,
    directory: Path,
    writable: bool,
    how: str | None,
    lazy: bool | None,
    wait: bool,
    socket: Path,
    as_json: bool,
) -> None:
    """Show the package REF at DIR, an empty directory or a new one; it is pulled first where it is
    missing.

    \b
    Example:
      p2pdist mount team/trainer:v3 /srv/trainer
    """
    request = MountRequest(reference, os.path.abspath(directory), writable, how or "")
    status = _mount(request, socket, lazy=lazy, quiet=as_json)
    if wait and status.lazy is not None:
        status = _filled(status, socket, quiet=as_json)
    if as_json:
        output.print_json(
            {
                "path": status.path,
                "how": status.how,
                "why": status.why,
                "reference": status.reference,
                "digest": status.digest,
                "writable": status.writable,
                "lazy": status.lazy,
            }
        )
        return
    output.note(status.why)
    click.echo(status.path)


def _filled(status: MountStatus, socket: Path, *, quiet: bool) -> MountStatus:
    """Wait until a lazy view lacks nothing, also over a restart of the agent. Raises NotFound when
    it is unmounted meanwhile, Unavailable when no agent fills it for AWAY_S_MAX."""
    from p2pdist.agent.api.client import LocalClient

    client, filled_at = LocalClient(socket), time.monotonic()
    with output.Progress(quiet=quiet) as progress:
        while status.how == LAZY and (status.lazy is None or not status.lazy.whole):
            time.sleep(FILL_POLL_S)
            here = None
            with suppress(Unavailable):
                here = [each for each in client.mounts() if each.path == status.path]
            if here == []:
                raise NotFound(f"{status.path} was unmounted", remedy="Mount it again")
            if here and here[0].lazy is not None:
                filled_at = time.monotonic()
                progress(status.reference, here[0].lazy.bytes_filled, here[0].lazy.bytes_total)
            elif time.monotonic() - filled_at > AWAY_S_MAX:
                remedy = "Start the agent, or see its log; p2pdist status says how far it is"
                raise Unavailable(f"no agent fills {status.path}, which stays mounted", remedy=remedy)
            status = here[0] if here else status
    return status


def _mount(request: MountRequest, socket: Path, *, lazy: bool | None, quiet: bool) -> MountStatus:
    from msgspec.structs import replace

    from p2pdist.agent.api.client import LocalClient

    client = LocalClient(socket)
    try:
        shown = lazy_or_pulled(client, request, lazy=lazy, quiet=quiet)
        if isinstance(shown, PullStatus):
            shown = client.mount(replace(request, package=pulled_name(request.package, shown)))
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
