"""`p2pdist pin`: a package stays on this host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.services import socket_option
from p2pdist.model.errors import UsageError

if TYPE_CHECKING:
    from p2pdist.model.messages import PinStatus


@click.command("pin")
@click.argument("ref", required=False)
@click.option("--remove", is_flag=True, help="Unpin it.")
@click.option("--list", "listing", is_flag=True, help="Print the pinned packages and their owners.")
@socket_option
@output.json_option
def command(ref: str | None, remove: bool, listing: bool, socket: Path, as_json: bool) -> None:
    """Bring the package REF to this host, if it is not there, and keep it from being evicted or
    removed.

    \b
    Example:
      p2pdist pin team/base:v7
      p2pdist pin --remove team/base:v7
    """
    if listing == (ref is not None):
        raise UsageError("say which package, or --list", remedy="p2pdist pin REF, or p2pdist pin --list")
    pins = _pins(ref, remove, socket)
    if as_json:
        output.print_json(pins if listing else pins[0])
        return
    if listing:
        rows = [
            (
                ", ".join(pin.packages) or "?",
                output.amount(pin.size),
                output.counted(len(pin.layers), "layer"),
                pin.owner,
            )
            for pin in pins
        ]
        if rows:
            output.table(("PACKAGE", "SIZE", "LAYERS", "PINNED BY"), rows, right=(1,))
        return
    for pin in pins:
        word = "unpinned" if remove else "pinned"
        output.say(f"{word} {pin.owner}  {output.counted(len(pin.layers), 'layer')}")


def _pins(ref: str | None, remove: bool, socket: Path) -> list[PinStatus]:
    from p2pdist.agent.api.client import LocalClient
    from p2pdist.cli.references.search import here

    client = LocalClient(socket)
    if ref is None:
        return client.pins()
    (ref, *more) = here([ref], client)
    if more:
        raise UsageError("a pattern names several packages", remedy="Pin them one by one")
    return [client.unpin(ref) if remove else client.pin(ref)]
