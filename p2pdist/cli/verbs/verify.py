"""`p2pdist verify`: is what is stored still what its name says?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.options import parse_rate
from p2pdist.cli.services import socket_option
from p2pdist.model.errors import Corrupt
from p2pdist.model.messages import VerifyRequest

if TYPE_CHECKING:
    from p2pdist.model.messages import Verified


@click.command("verify")
@click.option("--no-repair", is_flag=True, help="Drop what is wrong, but do not fetch it again.")
@click.option("--limit", metavar="RATE", help="Read no faster than this, such as 200MB/s.")
@socket_option
@output.quiet_options
@output.json_option
def command(no_repair: bool, limit: str | None, socket: Path, as_json: bool) -> None:
    """Read everything in the store of this host's agent and compare it with its name; fetch again
    what is wrong.

    The exit code is 6 when something was wrong and could not be fetched again. What is shown
    meanwhile may keep what was wrong until it is unmounted: it is named.

    \b
    Example:
      p2pdist verify --limit 200MB/s
    """
    request = VerifyRequest(not no_repair, parse_rate(limit) if limit is not None else None)
    with output.Progress(quiet=as_json) as progress:
        verified = _verify(request, socket, progress)
    if as_json:
        output.print_json(verified)
    else:
        for name in verified.wrong:
            output.say(f"wrong     {name}")
        for name in verified.repaired:
            output.say(f"repaired  {name}")
        for path in verified.shown:
            output.say(f"shown at {path}: unmount it and mount it again")
        output.say(
            f"{output.counted(verified.checked, 'thing')}, {output.amount(verified.bytes_checked)} verified, {len(verified.wrong)} wrong"
        )
    if verified.failed or (verified.wrong and no_repair):
        failure = Corrupt(
            f"{len(verified.wrong)} things in the store were wrong and are gone",
            remedy="; ".join(verified.failed) or "Pull the packages again",
        )
        raise output.Listed(failure) if as_json else failure


def _verify(request: VerifyRequest, socket: Path, progress: output.Progress) -> Verified:
    from p2pdist.agent.api.client import LocalClient

    client = LocalClient(socket)
    usage = client.status()["store"]["usage"]
    total = usage["bytes_complete"] + usage["bytes_objects"] + usage["bytes_variants"]
    return client.verify(
        request, lambda found: progress("verifying", found.bytes_checked, max(total, found.bytes_checked))
    )
