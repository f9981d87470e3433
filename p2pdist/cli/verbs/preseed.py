"""`p2pdist preseed`: hosts shall hold a package by some time."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import click

from p2pdist.cli import output
from p2pdist.cli.connect import hosts_options, tracker_option
from p2pdist.cli.options import parse_share
from p2pdist.model.errors import NotFound, P2PDistError, Unavailable, UsageError
from p2pdist.model.image import canonical_reference
from p2pdist.model.units import parse_duration

if TYPE_CHECKING:
    from p2pdist.cli.connect import TrackerClient

__all__ = ["command", "parse_duration"]

POLL_S = 0.5
AWAY_S_MAX = 120.0
"""How long --wait goes on while no tracker answers, as during a restart."""

SAID_S = 5.0
"""With --wait, what hosts are waited for is printed at most this often, and when it changes."""

WAITING_NAMED_MAX = 5
FAILURES_SHOWN_MAX = 20
ENDED = ("failed", "cancelled", "expired")


@click.command("preseed")
@click.argument("reference", metavar="[REF]", required=False)
@hosts_options
@click.option(
    "--count", type=click.IntRange(1), metavar="N", help="This many hosts: the ones that need the fewest bytes."
)
@click.option("--replicas", type=click.IntRange(1), metavar="N", help="At least this many copies in each zone.")
@click.option(
    "--priority",
    type=click.Choice(["preseed", "start"]),
    default="preseed",
    show_default=True,
    help="preseed: it gives way to starts of jobs. start: it is as urgent as they are.",
)
@click.option("--deadline", metavar="TIME", help="Give up what is not done after this time.")
@click.option("--ttl", metavar="TIME", help="Release the hosts after this time.")
@click.option(
    "--platform",
    metavar="OS/ARCH[/VARIANT]",
    help="Of an image, for all hosts alike  [default: each host's own].",
)
@click.option("--id", "identifier", metavar="ID", help="A name of your own: asking again with it changes nothing.")
@click.option("--wait", is_flag=True, help="Wait until the quorum of hosts holds the package.")
@click.option("--quorum", default="100%", show_default=True, metavar="SHARE", help="With --wait, such as 99.9%.")
@click.option("--cancel", metavar="ID", help="Release the hosts of this preseed.")
@click.option("--list", "listing", is_flag=True, help="List the preseeds.")
@tracker_option
@output.quiet_options
@output.json_option
def command(
    reference: str | None,
    hosts: tuple[str, ...],
    selector: str | None,
    count: int | None,
    replicas: int | None,
    priority: str,
    deadline: str | None,
    ttl: str | None,
    platform: str | None,
    identifier: str | None,
    wait: bool,
    quorum: str,
    cancel: str | None,
    listing: bool,
    tracker: str,
    as_json: bool,
) -> int:
    """Have hosts hold the package or image REF, pinned, until the preseed is cancelled or its time
    is up.

    With --wait the command succeeds only if the quorum was reached.

    \b
    Examples:
      p2pdist preseed team/trainer:v4 --selector zone=a --deadline 10m --wait --quorum 99%
      p2pdist preseed team/weights:v7 --count 200 --replicas 2
      p2pdist preseed docker://registry.example.org/team/trainer:v3 --selector zone=a
      p2pdist preseed hf://org/model --count 8
      p2pdist preseed --cancel nightly-42
    """
    if sum((reference is not None, cancel is not None, listing)) != 1:
        raise UsageError("name a package, or --cancel a preseed, or --list them")
    if reference is None:
        answer = asyncio.run(_ask(tracker, "GET" if listing else "DELETE", cancel))
        _show(answer, as_json=as_json)
        return 0
    share = parse_share(quorum)
    options = {
        "id": identifier,
        "hosts": list(hosts),
        "selector": selector,
        "count": count,
        "replicas": replicas,
        "deadline": parse_duration(deadline) if deadline else None,
        "ttl": parse_duration(ttl) if ttl else None,
        "platform": platform,
    }
    order: dict[str, Any] = {"package": canonical_reference(reference), "priority": priority}
    order |= {key: value for key, value in options.items() if value}
    preseed = asyncio.run(_order(tracker, order, share if wait else None, quiet=as_json))
    if not as_json and wait:
        _show_failures(preseed)
    _show(preseed, as_json=as_json)
    return 0 if not wait or _reached(preseed, share) else P2PDistError.exit_code


def _reached(preseed: dict[str, Any], share: float) -> bool:
    total, done = int(preseed["hosts_total"]), int(preseed["hosts_done"])
    if not preseed["settled"]:
        return False  # the tracker has just started and does not know yet how many hosts there are
    # Not by a hair too many: 0.999 of 1000 is 999, whatever floating point says.
    return total > 0 and done >= math.ceil(share * total - 1e-9)


async def _ask(tracker: str, method: str, identifier: str | None) -> Any:
    from urllib.parse import quote

    from p2pdist.cli.connect import TrackerClient

    async with TrackerClient(tracker) as client:
        return await client.ask(method, f"/v1/preseeds/{quote(identifier, safe='')}" if identifier else "/v1/preseeds")


async def _order(tracker: str, order: dict[str, Any], share: float | None, *, quiet: bool) -> dict[str, Any]:
    """Order the preseed. With a share, wait until this share of hosts is done, or the preseed has
    ended."""
    from p2pdist.cli.connect import TrackerClient

    async with TrackerClient(tracker) as client:
        preseed: dict[str, Any] = await client.ask("POST", "/v1/preseeds", order)
        shown: set[str] = set()
        _show_notes(preseed, shown)
        if share is None:
            return preseed
        said_at, said = asyncio.get_running_loop().time(), ""
        with output.Progress(quiet=quiet) as progress:
            while not _reached(preseed, share) and preseed["state"] not in ENDED:
                progress(preseed["package"].partition("@")[0], preseed["bytes_done"], preseed["bytes_total"])
                await asyncio.sleep(POLL_S)
                preseed = await _again(client, preseed["id"])
                _show_notes(preseed, shown)
                now, waits = asyncio.get_running_loop().time(), _waits_for(preseed)
                if waits != said and now - said_at >= SAID_S:
                    said_at, said = now, waits
                    if not quiet:
                        output.note(f"preseed {preseed['id']}: {waits}")
    return preseed


def _waits_for(preseed: dict[str, Any]) -> str:
    """How many hosts are done, and which ones are not, with the reason where one is known."""
    reasons = {failure["host"]: failure["reason"] for failure in preseed["failures"]}
    left = int(preseed["hosts_total"]) - int(preseed["hosts_done"])
    names = list(dict.fromkeys((*reasons, *preseed.get("waiting", ()))))  # an older tracker has none
    named = [f"{name} ({reasons[name]})" if name in reasons else name for name in names[:WAITING_NAMED_MAX]]
    more = f" and {left - len(named)} more" if named and left > len(named) else ""
    words = f"; waits for {', '.join(named)}{more}" if named else ""
    return f"{preseed['hosts_done']} of {preseed['hosts_total']} hosts done{words}"


async def _again(client: TrackerClient, identifier: str) -> dict[str, Any]:
    """How far the preseed is; waits for a tracker that is away for a while."""
    loop = asyncio.get_running_loop()
    since = loop.time()
    while True:
        try:
            return dict(await client.ask("GET", f"/v1/preseeds/{identifier}"))
        except Unavailable:
            if loop.time() - since > AWAY_S_MAX:
                raise
        except NotFound:
            # Another of several trackers, which has not read of it yet.
            if loop.time() - since > 10 * POLL_S:
                raise
        await asyncio.sleep(POLL_S)


def _show_notes(preseed: dict[str, Any], shown: set[str]) -> None:
    """Print each note of the preseed once, also with --json, whose document comes at the end: it
    may wait for hosts that never come."""
    for note in preseed.get("notes", ()):  # an older tracker has none
        if note not in shown:
            shown.add(note)
            output.line(f"preseed {preseed['id']}: {note}")


def _show_failures(preseed: dict[str, Any]) -> None:
    for failure in preseed["failures"][:FAILURES_SHOWN_MAX]:
        detail = f": {failure['detail']}" if failure["detail"] else ""
        output.line(f"{failure['host']}: {failure['reason']}{detail}")
    if len(preseed["failures"]) > FAILURES_SHOWN_MAX:
        counts = ", ".join(f"{count} {reason}" for reason, count in preseed["failures_by_reason"].items())
        output.line(f"in all: {counts}")


def _show(answer: Any, *, as_json: bool) -> None:
    if as_json:
        output.print_json(answer)
        return
    for preseed in answer if isinstance(answer, list) else [answer]:
        output.say(
            f"{preseed['id']}  {preseed['state']:9}  {preseed['hosts_done']} of {preseed['hosts_total']} hosts  {_package(preseed)}"
        )


def _package(preseed: dict[str, Any]) -> str:
    """The tag that was asked for and the first digits of what it meant; a preseed that is listed,
    or of an older tracker, has only the latter."""
    name, at, digest = str(preseed["package"]).partition("@")
    asked = str(preseed.get("asked") or name)
    return (
        f"{asked} {output.hexes(digest)}"
        if at and "@" not in asked
        else f"{name}@{output.hexes(digest)}"
        if at
        else name
    )
