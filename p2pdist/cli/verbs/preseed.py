"""`p2pdist preseed`: hosts shall hold a package by some time."""

from __future__ import annotations

import asyncio
import re

import click

from p2pdist.cli import output
from p2pdist.cli.options import parse_share
from p2pdist.cli.services import filled, hosts_options, tracker_option
from p2pdist.model.errors import P2PDistError, Unavailable, UsageError
from p2pdist.model.image import canonical_reference
from p2pdist.model.messages import PRESEED_ID
from p2pdist.model.preseed import COUNT_MAX, REPLICAS_MAX, PreseedRequest, PreseedSummary, Progress
from p2pdist.model.units import parse_duration

__all__ = ["command", "parse_duration"]

WAIT_S = 2.0
"""With --wait the bar and the notes are drawn anew this often."""

SAID_S = 5.0
"""With --wait, what hosts are waited for is printed at most this often, and when it changes."""

ENDED = ("failed", "cancelled", "expired")
"""States of a preseed that brings nothing to any host any more."""

WAITING_NAMED_MAX = 5
FAILURES_SHOWN_MAX = 20


def _checked(ctx: click.Context, param: click.Parameter, identifier: str | None) -> str | None:
    """The name that a preseed is given. Raises UsageError for what cannot be one."""
    filled(ctx, param, identifier)
    if identifier and not re.match(PRESEED_ID, identifier):
        raise UsageError(
            f"{identifier[:200]!r} cannot be the ID of a preseed",
            remedy="Write up to 128 letters, digits, dots, underscores and hyphens, such as nightly-42",
        )
    return identifier


@click.command("preseed")
@click.argument("reference", metavar="[REF]", required=False)
@hosts_options
@click.option(
    "--count",
    type=click.IntRange(1, COUNT_MAX),
    metavar="N",
    help="This many hosts: the ones that need the fewest bytes.",
)
@click.option(
    "--replicas", type=click.IntRange(1, REPLICAS_MAX), metavar="N", help="At least this many copies in each zone."
)
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
    callback=filled,
    help="Of an image, for all hosts alike  [default: each host's own].",
)
@click.option(
    "--callback",
    metavar="URL",
    callback=filled,
    help="Have the tracker tell this URL of the end; it must allow the host.",
)
@click.option(
    "--id",
    "identifier",
    metavar="ID",
    callback=_checked,
    help="A name of your own: asking again with it changes nothing.",
)
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
    callback: str | None,
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
        raise UsageError("it is not said what to do", remedy="Name a package, or --cancel a preseed, or --list them")
    if reference is None:
        _show(asyncio.run(_ask(tracker, cancel)), as_json=as_json)
        return 0
    share = parse_share(quorum)
    order = PreseedRequest(
        canonical_reference(reference),
        identifier or None,
        hosts or None,
        selector or None,
        count,
        replicas,
        "start" if priority == "start" else "preseed",
        parse_duration(deadline) if deadline is not None else None,
        parse_duration(ttl) if ttl is not None else None,
        platform or None,
        callback or None,
    )
    preseed = asyncio.run(_order(tracker, order, share if wait else None, quiet=as_json))
    if not as_json and wait:
        _show_failures(preseed)
    _show(preseed, as_json=as_json)
    from p2pdist.client.tracker import is_reached

    succeeded = is_reached(preseed, share) if wait else preseed.state not in ENDED
    return 0 if succeeded else P2PDistError.exit_code


async def _ask(tracker: str, cancel: str | None) -> list[PreseedSummary] | Progress:
    """Cancel a preseed, or list them all."""
    from p2pdist.cli.services import tracker_client

    async with tracker_client(tracker) as client:
        return await client.cancel(cancel) if cancel is not None else await client.preseeds()


async def _order(tracker: str, order: PreseedRequest, share: float | None, *, quiet: bool) -> Progress:
    """Order the preseed. With a share, wait until this share of hosts is done, or the preseed has
    ended."""
    from p2pdist.cli.services import tracker_client
    from p2pdist.client.tracker import is_over

    async with tracker_client(tracker) as client:
        preseed = await client.preseed(order)
        if order.id is not None and preseed.state in ENDED:
            output.line(
                f"preseed {preseed.id}: it was ordered before, and is {preseed.state}; order it by another --id"
            )
        shown: set[str] = set()
        _show_notes(preseed, shown)
        if share is None or is_over(preseed, share):
            return preseed
        said_at, said, is_away = asyncio.get_running_loop().time(), "", False
        with output.Progress(quiet=quiet) as bar:

            def report(found: Progress) -> None:
                nonlocal said_at, said, is_away
                is_away = False
                bar(found.package.partition("@")[0], found.bytes_done, found.bytes_total)
                _show_notes(found, shown)
                now, waits = asyncio.get_running_loop().time(), _waits_for(found)
                if waits != said and now - said_at >= SAID_S:
                    said_at, said = now, waits
                    if not quiet:
                        output.note(f"preseed {found.id}: {waits}")

            def away(error: Unavailable) -> None:
                nonlocal is_away
                if not is_away and not quiet:
                    output.note(f"preseed {preseed.id}: {error.what}; waiting for it")
                is_away = True

            bar(preseed.package.partition("@")[0], preseed.bytes_done, preseed.bytes_total)
            try:
                return await client.wait(preseed.id, quorum=share, pause_s=WAIT_S, told=report, away=away)
            except asyncio.CancelledError:
                output.note(f"preseed {preseed.id} goes on without this command; --cancel {preseed.id} ends it")
                raise


def _waits_for(preseed: Progress) -> str:
    """How many hosts are done, and which ones are not, with the reason where one is known."""
    reasons = {failure.host: failure.reason for failure in preseed.failures}
    left = preseed.hosts_total - preseed.hosts_done
    names = list(dict.fromkeys((*reasons, *preseed.waiting)))
    named = [f"{name} ({reasons[name]})" if name in reasons else name for name in names[:WAITING_NAMED_MAX]]
    more = f" and {left - len(named)} more" if named and left > len(named) else ""
    words = f"; waits for {', '.join(named)}{more}" if named else ""
    return f"{preseed.hosts_done} of {preseed.hosts_total} hosts done{words}"


def _show_notes(preseed: Progress, shown: set[str]) -> None:
    """Print each note of the preseed once, also with --json, whose document comes at the end: it
    may wait for hosts that never come."""
    for note in preseed.notes:
        if note not in shown:
            shown.add(note)
            output.line(f"preseed {preseed.id}: {note}")


def _show_failures(preseed: Progress) -> None:
    for failure in preseed.failures[:FAILURES_SHOWN_MAX]:
        detail = f": {failure.detail}" if failure.detail else ""
        output.line(f"{failure.host}: {failure.reason}{detail}")
    if len(preseed.failures) > FAILURES_SHOWN_MAX:
        counts = ", ".join(f"{count} {reason}" for reason, count in preseed.failures_by_reason.items())
        output.line(f"in all: {counts}")


def _show(answer: list[PreseedSummary] | Progress, *, as_json: bool) -> None:
    if as_json:
        output.print_json(answer)
        return
    for preseed in answer if isinstance(answer, list) else [answer]:
        output.say(
            f"{preseed.id}  {preseed.state:9}  {preseed.hosts_done} of {preseed.hosts_total} hosts  {_package(preseed)}"
        )


def _package(preseed: PreseedSummary | Progress) -> str:
    """The tag that was asked for and the first digits of what it meant; a preseed that is listed,
    or of an older tracker, has only the latter."""
    name, at, digest = preseed.package.partition("@")
    asked = (preseed.asked if isinstance(preseed, Progress) else "") or name
    return (
        f"{asked} {output.hexes(digest)}"
        if at and "@" not in asked
        else f"{name}@{output.hexes(digest)}"
        if at
        else name
    )
