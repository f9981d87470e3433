"""`p2pdist prune`: what nothing keeps leaves this host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.services import socket_option
from p2pdist.cli.verbs.gc import parse_age

if TYPE_CHECKING:
    from p2pdist.model.messages import Pruned


@click.command("prune")
@click.option("-y", "--yes", is_flag=True, help="Remove it without asking.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--all", "tagged", is_flag=True, help="Remove also packages that only a tag keeps.")
@click.option(
    "--unused-for", callback=parse_age, metavar="AGE", help="Spare what was used within this time, such as 12h or 2w."
)
@socket_option
@output.quiet_options
@output.json_option
def command(yes: bool, dry_run: bool, tagged: bool, unused_for: float | None, socket: Path, as_json: bool) -> int:
    """Remove from the store of this host's agent the packages and blobs that no tag, pin, preseed,
    policy, mount or pull keeps: those that were asked for by digest, and what a tag meant before.

    On a terminal the command asks first; elsewhere it only says what would go, unless --yes is
    given. p2pdist du says what keeps the others.

    \b
    Example:
      p2pdist prune
      p2pdist prune --all --unused-for 2w --yes
    """
    from p2pdist.agent.api.client import LocalClient
    from p2pdist.model.messages import PRUNED_MAX, PruneRequest

    client = LocalClient(socket)
    unused_s = unused_for or 0.0
    asked = not yes and not dry_run and not as_json and sys.stdin.isatty()
    pruned = client.prune(PruneRequest(not yes or dry_run, tagged, unused_s))
    if asked and pruned.packages:
        _show(pruned)
        click.confirm("Remove this?", abort=True, err=True)
        agreed = tuple(package.digest for package in pruned.packages[:PRUNED_MAX])
        pruned = client.prune(PruneRequest(False, tagged, unused_s, agreed))
    if as_json:
        output.print_json(pruned)
    else:
        _show(pruned)
        if pruned.dry_run and pruned.packages:
            output.note("Nothing was removed: --yes beside the same options does that")
    return 1 if pruned.stayed else 0


def _show(pruned: Pruned) -> None:
    for package in pruned.packages if not output.is_quiet() else ():
        output.say(
            f"{package.references[0]}  sha256:{output.hexes(package.digest)}  {output.amount(package.bytes_alone)}"
        )
    for reason in pruned.stayed:
        output.line(f"stays: {reason}")
    would = "would be " if pruned.dry_run else ""
    count = output.counted(len(pruned.packages), "package")
    output.say(f"{count} {would}removed, {output.amount(pruned.bytes_freed)} {would}freed")
