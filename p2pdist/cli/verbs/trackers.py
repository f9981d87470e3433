"""`p2pdist trackers`: the trackers that share the blobs of a fleet."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from p2pdist.cli import output
from p2pdist.cli.services import tracker_client, tracker_named, tracker_option

SHOWN = ("epoch", "me", "trackers", "pins", "problem", "age_s")
"""What a tracker says of its cluster."""


@click.group("trackers", invoke_without_command=True)
@tracker_option
@output.json_option
@click.pass_context
def command(ctx: click.Context, tracker: str, as_json: bool) -> None:
    """List the trackers that share the blobs of a fleet: what each of them owns, how many hosts
    have their home there, and how busy it is. One of them is asked for all.

    \b
    Examples:
      p2pdist trackers --tracker http://10.0.0.5:7070
      p2pdist trackers drain 10.0.0.6-7070
      p2pdist trackers fill 10.0.0.6-7070
    """
    if ctx.invoked_subcommand is not None:
        return
    answer = asyncio.run(_answer(tracker))
    if as_json:
        output.print_json(answer)
    else:
        _show(answer)


@command.command("drain")
@click.argument("tracker_id", metavar="ID")
@tracker_option
@output.json_option
@click.pass_context
def drain(ctx: click.Context, tracker_id: str, tracker: str, as_json: bool) -> None:
    """Have a tracker give all its blobs to the others, as before its machine is taken away. Streams
    go on. It lasts until the tracker starts anew, or p2pdist trackers fill.

    \b
    Example:
      p2pdist trackers drain tracker-2
    """
    asyncio.run(_order("POST", tracker_named(ctx, tracker), tracker_id))
    if output.wants_json(ctx, as_json):
        output.print_json({"tracker": tracker_id, "draining": True})
    else:
        output.say(f"{tracker_id} gives its blobs to the other trackers")


@command.command("fill")
@click.argument("tracker_id", metavar="ID")
@tracker_option
@output.json_option
@click.pass_context
def fill(ctx: click.Context, tracker_id: str, tracker: str, as_json: bool) -> None:
    """Have a tracker that drains take its share of the blobs again, a little at a time.

    \b
    Example:
      p2pdist trackers fill tracker-2
    """
    asyncio.run(_order("DELETE", tracker_named(ctx, tracker), tracker_id))
    if output.wants_json(ctx, as_json):
        output.print_json({"tracker": tracker_id, "draining": False})
    else:
        output.say(f"{tracker_id} takes its share of the blobs again")


def _show(answer: dict[str, Any]) -> None:
    if not answer["trackers"]:
        output.say("this tracker is alone: it shares its blobs with no other")
        return
    output.say(f"epoch {answer['epoch']}, as {answer['me']} sees it")
    output.say(f"{'TRACKER':24} {'STATE':9} {'SHARE':>5} {'SWARMS':>7} {'HOSTS':>7} {'LOAD':>5} {'LAG':>8}  BEAT")
    for row in answer["trackers"]:
        output.say(
            f"{row['id']:24} {row['state']:9} {row['share']:>5.0%} {row['swarms']:>7} {row['hosts']:>7} "
            f"{row['load']:>5.0%} {row['lag_s'] * 1000:>5.0f} ms  {row['beat_s']:.1f} s ago"
        )
    if answer["pins"]:
        output.say(f"{len(answer['pins'])} blobs have an owner of their own")
    if answer["problem"]:
        output.line(f"{answer['problem']}; this is as it was {answer['age_s']:.0f} s ago")


async def _answer(tracker: str) -> dict[str, Any]:
    async with tracker_client(tracker) as client:
        answer: dict[str, Any] = await client.ask("GET", "/v1/trackers", fields=SHOWN)
        return answer


async def _order(method: str, tracker: str, tracker_id: str) -> None:
    """Begin a drain with POST, end it with DELETE."""
    from p2pdist.client.tracker import segment

    async with tracker_client(tracker) as client:
        await client.send(method, f"/v1/trackers/{segment(tracker_id)}/drain", type(None))
