"""`p2pdist pull`: a package into the store of this host."""

from __future__ import annotations

from pathlib import Path

import click

from p2pdist.cli import output
from p2pdist.cli.connect import follow_pull, socket_option
from p2pdist.model.messages import Priority


@click.command("pull")
@click.argument("reference", metavar="REF")
@click.option(
    "--priority",
    type=click.Choice(["start", "preseed"]),
    default="start",
    show_default=True,
    help="start: a program or user waits for this pull. preseed: it gives way to starts.",
)
@socket_option
@output.json_option
def command(reference: str, priority: Priority, socket: Path, as_json: bool) -> None:
    """Bring the package or image REF into the store of this host through its agent.

    \b
    Examples:
      p2pdist pull team/trainer:v3
      p2pdist pull team/trainer:v4 --priority preseed
      p2pdist pull docker://registry.example.org/team/trainer:v3
      p2pdist pull hf://org/model@main
    """
    from p2pdist.agent.api.client import LocalClient

    status = follow_pull(LocalClient(socket), reference, quiet=as_json, priority=priority)
    if as_json:
        output.print_json(
            {
                "reference": status.reference,
                "digest": status.digest,
                "bytes_total": status.bytes_total,
                "bytes_origin": status.bytes_origin,
                "bytes_peers": status.bytes_peers,
                "bytes_upstream": status.bytes_upstream,
                "bytes_cached": status.bytes_cached,
                "seconds": round(status.seconds, 3),
            }
        )
        return
    sources = (
        ("peers", status.bytes_peers),
        ("the origin", status.bytes_origin),
        ("its registry", status.bytes_upstream),
        ("the store", status.bytes_cached),
    )
    parts = ", ".join(f"{output.amount(count)} from {source}" for source, count in sources if count)
    output.say(f"{status.reference}  {status.digest}")
    output.say(f"{output.amount(status.bytes_total)} in {status.seconds:.1f} s{': ' if parts else ''}{parts}")
