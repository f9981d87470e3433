"""`p2pdist hosts`: the hosts of a fleet, and draining them."""

from __future__ import annotations

import asyncio

import click

from p2pdist.cli import output
from p2pdist.cli.services import note_unanswered, tracker_client, tracker_named, tracker_option
from p2pdist.model.fleet import HostDetail, HostStatus


@click.group("hosts", invoke_without_command=True)
@tracker_option
@output.json_option
@click.pass_context
def command(ctx: click.Context, tracker: str, as_json: bool) -> None:
    """List the hosts of a fleet, show one, or have one serve no other host for a while, as before
    its machine is worked on.

    \b
    Examples:
      p2pdist hosts --tracker http://10.0.0.5:7070
      p2pdist hosts show node17
      p2pdist hosts drain node17
      p2pdist hosts fill node17
    """
    if ctx.invoked_subcommand is not None:
        return
    found = asyncio.run(_hosts(tracker))
    if as_json:
        output.print_json(found)
        return
    output.say(f"{'HOST':24} {'STATE':10} {'ZONE':12} {'RACK':12} {'BLOBS':>6}  ADDRESS")
    for host in found:
        output.say(
            f"{host.host:24} {_state(host):10} {host.zone:12} {host.rack:12} {host.blobs:>6}  {host.address}".rstrip()
        )


@command.command("show")
@click.argument("host", metavar="HOST")
@tracker_option
@output.json_option
@click.pass_context
def show(ctx: click.Context, host: str, tracker: str, as_json: bool) -> None:
    """Show one host: where it is, how it does, and what it shows.

    \b
    Example:
      p2pdist hosts show r17n04
    """
    found = asyncio.run(_host(tracker_named(ctx, tracker), host))
    if output.wants_json(ctx, as_json):
        output.print_json(found)
        return
    rate = output.amount
    facts = {
        "state": _state(found),
        "place": ", ".join(name for name in (found.site, found.zone, found.rack) if name),
        "address": found.address,
        "version": found.version or "",
        "store": rate(found.store_bytes) if found.store_bytes is not None else "",
        "limit of the store": rate(found.capacity_bytes) if found.capacity_bytes is not None else "",
        "disk free": rate(found.disk_free_bytes) if found.disk_free_bytes is not None else "",
        "uplink": f"{rate(int(found.uplink_bytes_s))}/s" if found.uplink_bytes_s else "",
        "mounts": f"{found.mounts}: {', '.join(found.mounted)}" if found.mounts else "",
        "blobs": str(found.blobs),
        "blamed by": ", ".join(f"{name} ({reason})" for name, reason in found.blamed.items()),
    }
    for name, value in facts.items():
        if value:
            output.say(f"{name + ':':20} {value}")


@command.command("drain")
@click.argument("host", metavar="HOST")
@tracker_option
@output.json_option
@click.pass_context
def drain(ctx: click.Context, host: str, tracker: str, as_json: bool) -> None:
    """Have HOST serve no other host: its children get other parents, and no preseed picks it. It
    goes on to receive, and its agent goes on; p2pdist drain, on the host, ends that. It lasts until
    p2pdist hosts fill, at all trackers, also where they start anew and have a --state.

    \b
    Example:
      p2pdist hosts drain r17n04
    """
    asyncio.run(_drain(tracker_named(ctx, tracker), host, drained=True))
    if output.wants_json(ctx, as_json):
        output.print_json({"host": host, "drained": True})
    else:
        output.say(f"{host} serves no other host")


@command.command("fill")
@click.argument("host", metavar="HOST")
@tracker_option
@output.json_option
@click.pass_context
def fill(ctx: click.Context, host: str, tracker: str, as_json: bool) -> None:
    """Have HOST, which is drained, serve other hosts again.

    \b
    Example:
      p2pdist hosts fill r17n04
    """
    asyncio.run(_drain(tracker_named(ctx, tracker), host, drained=False))
    if output.wants_json(ctx, as_json):
        output.print_json({"host": host, "drained": False})
    else:
        output.say(f"{host} serves other hosts again")


def _state(host: HostStatus) -> str:
    if not host.present:
        return "away"
    return "leaving" if host.leaving else "drained" if host.drained else "connected"


async def _hosts(tracker: str) -> list[HostStatus]:
    async with tracker_client(tracker) as client:
        found = await client.hosts()
        note_unanswered(client)
        return sorted(found, key=lambda host: host.host)


async def _host(tracker: str, name: str) -> HostDetail:
    async with tracker_client(tracker) as client:
        return await client.host(name)


async def _drain(tracker: str, host: str, *, drained: bool) -> None:
    async with tracker_client(tracker) as client:
        await (client.drain(host) if drained else client.fill(host))
