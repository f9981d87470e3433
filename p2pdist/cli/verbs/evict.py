"""`p2pdist evict`: a package leaves the stores of a fleet's hosts."""

from __future__ import annotations

import asyncio

import click

from p2pdist.cli import output
from p2pdist.cli.options import Seconds
from p2pdist.cli.services import hosts_options, tracker_client, tracker_option
from p2pdist.model.errors import Conflict, P2PDistError, Unavailable, UsageError
from p2pdist.model.fleet import EVICTION_S_MAX, Eviction, EvictRequest
from p2pdist.model.hub import is_hub
from p2pdist.model.image import canonical_reference

LINES_MAX = 20


@click.command("evict")
@click.argument("reference", metavar="REF")
@hosts_options
@click.option("--everywhere", is_flag=True, help="From all hosts that are connected.")
@click.option(
    "--seconds",
    "wait_s",
    type=Seconds(0.0, EVICTION_S_MAX),
    default=20.0,
    show_default=True,
    help="How long to wait for the answers of hosts.",
)
@tracker_option
@output.json_option
def command(
    reference: str,
    hosts: tuple[str, ...],
    selector: str | None,
    everywhere: bool,
    wait_s: float,
    tracker: str,
    as_json: bool,
) -> None:
    """Remove the package REF from the stores of hosts: of those that are named, that match a
    selector, or of all. p2pdist rm does so on this host.

    A package that is mounted, pinned or being pulled on a host stays there, and the command fails
    when the others are gone. The origin is not touched.

    \b
    Examples:
      p2pdist evict team/trainer:v1 --everywhere
      p2pdist evict team/trainer:v1 --selector zone=eu-1
      p2pdist evict team/trainer:v1 --host node17
    """
    if bool(hosts) + bool(selector) + everywhere != 1:
        raise UsageError("say from which hosts", remedy="Give one of --host, --selector and --everywhere")
    if is_hub(reference):
        raise UsageError(
            f"{reference} is a model of a hub, and hosts have its files as blobs of their own",
            remedy="Cancel its preseeds, and run p2pdist gc on the hosts, which removes what nothing keeps",
        )
    name, _, digest = canonical_reference(reference).rpartition("@")
    request = EvictRequest(
        canonical_reference(reference), digest if name else "", hosts, selector or "", everywhere, wait_s
    )
    eviction = asyncio.run(_evict(tracker, request))
    if as_json:
        output.print_json(eviction)
    else:
        _show(eviction)
    if (failure := _failure(eviction)) is not None:
        raise output.Listed(failure) if as_json else failure


def _failure(eviction: Eviction) -> P2PDistError | None:
    if eviction.silent or eviction.unanswered:
        silent = ", ".join([*eviction.unanswered, *eviction.silent_hosts][:LINES_MAX])
        return Unavailable(f"no answer from {silent}", remedy="Evict it again when they answer")
    if eviction.absent_hosts:
        named = ", ".join(eviction.absent_hosts[:LINES_MAX])
        more = f" and {len(eviction.absent_hosts) - LINES_MAX} more" if len(eviction.absent_hosts) > LINES_MAX else ""
        return Unavailable(
            f"not connected: {named}{more}; {eviction.package} stays there",
            remedy="p2pdist hosts lists those that are; evict it again when they are back",
        )
    if eviction.stayed:
        first = eviction.stayed_hosts[0]
        what = f"{eviction.package} stays on {_hosts(eviction.stayed)}, such as {first.host}: {first.reason}"
        return Conflict(what, remedy="End what keeps it there first")
    return None


def _hosts(count: int) -> str:
    return "one host" if count == 1 else f"{count} hosts"


def _show(eviction: Eviction) -> None:
    freed = output.amount(eviction.bytes_freed)
    lacked = f", {_hosts(eviction.lacked)} did not have it" if eviction.lacked else ""
    output.say(f"{eviction.package} evicted from {_hosts(eviction.evicted)}, {freed} freed{lacked}")
    for host in eviction.stayed_hosts[:LINES_MAX]:
        output.line(f"{host.host}: {host.reason}")


async def _evict(tracker: str, request: EvictRequest) -> Eviction:
    async with tracker_client(tracker) as client:
        return await client.evict(request)
