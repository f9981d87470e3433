"""`p2pdist du`: what packages take on the disk of this host."""

from __future__ import annotations

import time
from pathlib import Path

import click

from p2pdist.cli import output
from p2pdist.cli.services import socket_option


@click.command("du")
@socket_option
@output.json_option
def command(socket: Path, as_json: bool) -> None:
    """Print what each package in the store of this host's agent takes on the disk, the largest
    first. ALONE is what becomes free when the package goes; the rest it shares with others. KEPT BY
    says why p2pdist prune leaves it.

    \b
    Example:
      p2pdist du
    """
    from p2pdist.agent.api.client import LocalClient

    use = LocalClient(socket).usage()
    if as_json:
        output.print_json(use)
        return
    now = time.time()
    rows = [
        (
            package.references[0],
            f"sha256:{output.hexes(package.digest)}",
            output.amount(package.bytes_here),
            output.amount(package.bytes_alone),
            f"{output.age(now - package.last_used)} ago",
            ", ".join(package.kept_by) or "nothing",
        )
        for package in sorted(use.packages, key=lambda package: (-package.bytes_alone, package.references))
    ]
    if rows:
        output.table(("PACKAGE", "DIGEST", "SIZE", "ALONE", "USED", "KEPT BY"), rows, right=(2, 3))
    limit = f" of {output.amount(use.capacity)}" if use.capacity is not None else ""
    parts = [f"{output.amount(use.bytes_shared)} shared by several packages"]
    parts += [f"{output.amount(use.bytes_nameless)} of no package"] if use.bytes_nameless else []
    output.say(
        f"{output.amount(use.bytes_total)}{limit} used, {', '.join(parts)}; {output.amount(use.disk_free)} free on the disk"
    )
