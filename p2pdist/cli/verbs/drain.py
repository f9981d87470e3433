"""`p2pdist drain`: the agent of this host hands over its receivers, and ends."""

from __future__ import annotations

from pathlib import Path

import click

from p2pdist.cli import output
from p2pdist.cli.options import Seconds
from p2pdist.cli.services import socket_option
from p2pdist.model.messages import DRAIN_S_MAX


@click.command("drain")
@click.option(
    "--seconds",
    type=Seconds(0.0, DRAIN_S_MAX),
    metavar="SECONDS",
    help="How long it may take [default: the agent's own --drain-seconds].",
)
@socket_option
@output.json_option
def command(seconds: float | None, socket: Path, as_json: bool) -> None:
    """Let the agent of this host hand over its receivers to other agents, and end.

    It fetches nothing more, and serves until no agent receives from it or the time is up. SIGTERM
    does the same.

    \b
    Example:
      p2pdist drain
      p2pdist drain --seconds 60
    """
    from p2pdist.agent.api.client import LocalClient

    drained = LocalClient(socket).drain(seconds)
    if as_json:
        output.print_json(drained)
    elif drained.streams:
        click.echo(f"the agent ends after {drained.seconds:.1f} s; {drained.streams} streams were left and break off")
    else:
        click.echo(f"the agent ends; all was handed over in {drained.seconds:.1f} s")
