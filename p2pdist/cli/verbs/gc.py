"""`p2pdist gc`: garbage collection in the store, central storage or the local layout."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.services import elsewhere_options, opened_elsewhere, origin_option, require_no_origin, socket_option
from p2pdist.model.errors import UsageError

if TYPE_CHECKING:
    from p2pdist.package.repository.gc import Swept

DAY_S = 86_400.0
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S, "w": 7 * DAY_S}
AGE_S_MAX = 100 * 366 * DAY_S
_AGE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhdw])\Z")


def parse_age(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Seconds of an age such as 90s, 30m, 12h, 1d or 2w."""
    if value is None:
        return None
    match = _AGE.match("0s" if value == "0" else value)
    if match is None or (seconds := float(match[1]) * UNITS_S[match[2]]) > AGE_S_MAX:
        raise click.BadParameter(f"{value[:50]!r} is not an age; write 90s, 30m, 12h, 1d or 2w.", ctx, param)
    return seconds


@click.command("gc")
@elsewhere_options("Collect in")
@click.option(
    "--older-than",
    callback=parse_age,
    metavar="AGE",
    help="There, remove only blobs written longer ago than this, such as 12h or 2w.  [default: 1d]",
)
@click.option("--force-age", is_flag=True, help="Allow --older-than 0.")
@click.option("--dry-run", is_flag=True, help="There, only say what would be removed.")
@origin_option
@socket_option
@output.quiet_options
@output.json_option
def command(
    socket: Path,
    *,
    at_origin: bool,
    origin: str | None,
    layout: Path | None,
    older_than: float | None,
    force_age: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove from the store the data that no package needs: remains of interrupted pulls, blobs
    that were pulled by their digest, and blobs of former versions of a tag. Pinned packages and
    packages in use stay.

    An agent does this by itself when it needs room. Pulls and mounts may go on meanwhile.

    With --at-origin or --layout, remove there the blobs that no tag leads to. Packages without a
    tag go too: tag the ones that shall stay. Pushes by p2pdist may go on meanwhile, from any
    machine. Other tools leave no note of blobs that they are about to tag; --older-than spares what
    they wrote lately, so an age of 0 has to be forced: use it only when no other tool writes there.

    \b
    Example:
      p2pdist gc
      p2pdist gc --at-origin --origin s3://packages/prod --dry-run
      p2pdist gc --layout ~/.local/share/p2pdist/layout --older-than 2w
    """
    if not at_origin:
        require_no_origin()
    if at_origin or layout:
        age = DAY_S if older_than is None else older_than
        if not age and not force_age:
            raise UsageError(
                "an age of 0 also removes what another tool wrote a moment ago and has not tagged yet",
                remedy="Give a longer age, or --force-age when nothing but p2pdist writes there",
            )
        with output.Progress(quiet=as_json) as progress:
            swept = asyncio.run(_sweep_elsewhere(at_origin, origin, layout, age, dry_run, progress))
        _show(swept, dry_run=dry_run, as_json=as_json)
        return
    if older_than is not None or force_age or dry_run:
        raise UsageError(
            "--older-than, --force-age and --dry-run are not for the agent's store",
            remedy="Add --at-origin or --layout DIR",
        )
    from p2pdist.agent.api.client import LocalClient

    removed = LocalClient(socket).collect()
    if as_json:
        output.print_json({"bytes_freed": removed.bytes_freed})
        return
    click.echo(f"{output.amount(removed.bytes_freed)} freed")


def _show(done: Swept, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        output.print_json(
            {
                "blobs_removed": done.blobs_removed,
                "bytes_freed": done.bytes_freed,
                "blobs_kept": done.blobs_kept,
                "unfinished_removed": done.unfinished,
                "dry_run": dry_run,
            }
        )
        return
    would = "would be " if dry_run else ""
    click.echo(
        f"{done.blobs_removed} blobs and {done.unfinished} unfinished files {would}removed, "
        f"{output.amount(done.bytes_freed)} {would}freed, {done.blobs_kept} blobs kept"
    )


async def _sweep_elsewhere(
    at_origin: bool, origin: str | None, layout: Path | None, age: float, dry_run: bool, progress: output.Progress
) -> Swept:
    from p2pdist.package.repository.gc import sweep

    async with opened_elsewhere(at_origin, origin, layout) as repository:
        return await sweep(repository, older_than_s=age, dry_run=dry_run, on_progress=progress)
