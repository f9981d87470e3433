"""`p2pdist rank`: which hosts need the fewest bytes for packages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import click

from p2pdist.cli import output
from p2pdist.cli.services import hosts_options, tracker_option
from p2pdist.model.errors import NotFound, UsageError
from p2pdist.model.fleet import Assignment, Ranked
from p2pdist.model.image import canonical_reference
from p2pdist.model.preseed import RankRequest, Role


@click.command("rank")
@click.argument("references", metavar="[REF...]", nargs=-1)
@hosts_options
@click.option("--count", type=click.IntRange(1), metavar="N", help="Only the N best hosts.")
@click.option("--coherent", type=click.Choice(["rack"]), help="Take the N hosts from as few racks as possible.")
@click.option(
    "--role",
    "roles",
    type=(str, click.IntRange(1), str),
    multiple=True,
    metavar="NAME N REF[,REF...]",
    help="Instead of packages: one part of a job, N hosts that need these packages; may be repeated.",
)
@tracker_option
@output.json_option
def command(
    references: tuple[str, ...],
    hosts: tuple[str, ...],
    selector: str | None,
    count: int | None,
    coherent: str | None,
    roles: tuple[tuple[str, int, str], ...],
    tracker: str,
    as_json: bool,
) -> None:
    """Print the hosts by the bytes that they lack of the packages or images REF, best first. What
    packages share is counted once.

    For a job with several roles, say which hosts each of them gets: distinct ones that lack little
    of what their role needs.

    \b
    Examples:
      p2pdist rank team/trainer:v3 team/weights:v7 --count 64
      p2pdist rank team/trainer:v3 --selector zone=a --count 64 --coherent rack
      p2pdist rank --role trainer 64 team/trainer:v3,team/weights:v7 --role reader 8 team/reader:v1
    """
    if bool(references) == bool(roles):
        raise UsageError("name packages, or roles with --role", remedy="See p2pdist rank --help")
    request = RankRequest(
        _names(references) or None,
        tuple(Role(name, _names(packages.split(",")), number) for name, number, packages in roles) or None,
        hosts or None,
        selector or None,
        count,
        "rack" if coherent else None,
    )
    answer = asyncio.run(_ask(tracker, request))
    if references and not answer:
        what = asyncio.run(_nobody(tracker, selector))
        asks = what.endswith("?")  # which says already what to do
        raise NotFound(what, remedy="" if asks else "p2pdist status --tracker URL says which hosts there are")
    if as_json:
        output.print_json(answer)
    elif isinstance(answer, list):
        _show(answer)
    else:
        for role in answer.assignment:
            output.say(f"{role.role}:")
            _show(role.hosts)


def _names(references: Iterable[str]) -> tuple[str, ...]:
    return tuple(canonical_reference(each) for each in references)


def _show(ranked: Iterable[Ranked]) -> None:
    for row in ranked:
        away = "" if row.present else "  not connected"
        output.say(
            f"{row.host:24} lacks {output.amount(row.bytes_missing):>10} of {output.amount(row.bytes_total)}, "
            f"about {row.seconds_estimated:.1f} s{away}"
        )


async def _nobody(tracker: str, selector: str | None) -> str:
    """Why there is no host to rank."""
    from p2pdist.cli.services import tracker_client
    from tracker.core.host import Host
    from tracker.core.preseeds.selectors import no_match, parse_selector

    async with tracker_client(tracker) as client:
        rows = [row for row in await client.hosts() if row.present]
    if selector is None or not rows:
        return "no host is connected to this tracker"
    return no_match(
        parse_selector(selector), [Host(row.host, zone=row.zone, rack=row.rack, site=row.site) for row in rows]
    )


async def _ask(tracker: str, request: RankRequest) -> list[Ranked] | Assignment:
    from p2pdist.cli.services import note_unanswered, tracker_client

    async with tracker_client(tracker) as client:
        ranked = await (client.rank(request) if request.roles is None else client.assign(request))
        note_unanswered(client)
        return ranked
