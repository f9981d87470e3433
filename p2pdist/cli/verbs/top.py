"""`p2pdist top`: the health of swarms in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.services import tracker_option
from p2pdist.model.errors import Unavailable, UsageError
from p2pdist.model.url import tracker_urls

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from p2pdist.cli.fleet_watch import FleetState, HostState
    from tracker.core.views.fleet_view import SwarmRow

RETRY_S = 2.0
SWARMS_SHOWN, RACKS_SHOWN, TROUBLED_SHOWN, STORY_SHOWN, TREE_SHOWN, PRESEEDS_SHOWN = 8, 16, 8, 10, 24, 5
CELLS_MAX = 60
PLAIN_WIDTH = 160
"""Of what is not printed to a terminal."""

RAMP = ("#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838")


@click.command("top")
@tracker_option
@click.option("--swarm", default="", metavar="DIGEST", help="Show the tree of this blob as well.")
@click.option("--stripe", default=0, type=click.IntRange(0, 999), help="Of which stripe.")
@click.option("--once", is_flag=True, help="Print how things are now, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON documents, one a line: one a second, or --once one.")
def command(tracker: str, swarm: str, stripe: int, once: bool, as_json: bool) -> None:
    """Show the swarms of a fleet: progress, hosts by zone and rack, slow and blamed hosts and why,
    and what happens. Any of several trackers shows the swarms of all, and which of them it lacks.

    \b
    Examples:
      p2pdist top --tracker http://tracker:7070
      p2pdist top --once --json
    """
    urls = tracker_urls(tracker.split(","))
    if not urls:
        raise UsageError("--tracker names no tracker", remedy="Write http://host:7070")
    if once:
        asyncio.run(_once(urls, swarm, stripe, as_json=as_json))
        return
    if not as_json:
        _require_screen()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(urls, swarm, stripe, as_json=as_json))


def _require_screen() -> None:
    """Raises UsageError where nothing can be drawn: it would be silent for ever."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        raise UsageError(
            "standard output is no terminal on which a picture can change",
            remedy="Give --once for one picture, or --json for a document a second",
        )


async def _once(urls: list[str], swarm: str, stripe: int, *, as_json: bool) -> None:
    """Looks twice: a rate takes two looks."""
    import aiohttp

    from p2pdist.cli.fleet_watch import follow
    from p2pdist.cli.tracker_access import TrackerAccess
    from p2pdist.client.pulse import Pulse

    failure: Unavailable | None = None
    async with aiohttp.ClientSession() as http, Pulse(TrackerAccess.current()) as pulse:
        for url in urls:
            seen, states = 0, follow(http, url, swarm, stripe)
            try:
                async for state in pulse.each(url, states) if len(urls) > 1 else states:
                    seen += 1
                    if seen == 2:
                        _print(state, as_json=as_json)
                        return
            except Unavailable as error:
                failure = error
    assert failure is not None
    raise failure


def _print(state: FleetState, *, as_json: bool) -> None:
    if as_json:
        output.print_json(state.document())
        return
    from rich.console import Console

    terminal, text = sys.stdout.isatty(), io.StringIO()
    Console(file=text, force_terminal=terminal, width=None if terminal else PLAIN_WIDTH).print(picture(state))
    click.echo(text.getvalue(), nl=False)


async def _watch(urls: list[str], swarm: str, stripe: int, *, as_json: bool) -> None:
    """Follow the first tracker that answers, for ever. Raises what goes wrong before anything was
    seen."""
    import aiohttp
    from rich.live import Live

    from p2pdist.cli.fleet_watch import follow
    from p2pdist.cli.tracker_access import TrackerAccess
    from p2pdist.client.pulse import Pulse

    with contextlib.ExitStack() as screen:
        live = None if as_json else screen.enter_context(Live(screen=True, auto_refresh=False))
        seen, number = False, 0
        async with aiohttp.ClientSession() as http, Pulse(TrackerAccess.current()) as pulse:
            while True:
                url = urls[number % len(urls)]
                states = follow(http, url, swarm, stripe)
                try:
                    async for state in pulse.each(url, states) if len(urls) > 1 else states:
                        seen = True
                        if live is None:
                            output.print_json(state.document())
                        else:
                            live.update(picture(state), refresh=True)
                except Unavailable as error:
                    number += 1
                    if not seen and number >= len(urls):
                        raise
                    if live is None:
                        output.line(f"p2pdist: {error}")
                    else:
                        live.update(f"{error}\n\nTrying again.", refresh=True)
                    await asyncio.sleep(RETRY_S if seen else 0)


# -- the picture


def picture(state: FleetState) -> RenderableType:
    """The fleet for a terminal; names come from the network and are never read as markup."""
    from rich.console import Group
    from rich.text import Text

    missing = [Text(f"without the tracker {name}: {why}", style="bold red") for name, why in state.silent]
    parts: list[RenderableType] = [_totals(state), *missing, "", _swarms(state.swarms), ""]
    parts += [_racks(list(state.hosts.values())), ""]
    if state.tree:
        parts += [Text("tree of the stripe", style="bold"), *(Text(line) for line in _tree(state)), ""]
    if state.troubled:
        parts.append(Text("slow, blamed and missing hosts", style="bold"))
        parts += [Text(f"  {state.name(number):24} {why}") for number, why in state.troubled[:TROUBLED_SHOWN]]
        more = len(state.troubled) - TROUBLED_SHOWN
        parts += [Text(f"  and {more} more", style="dim")] * (more > 0) + [""]
    if state.preseeds:
        parts.append(Text("preseeds", style="bold"))
        for preseed in state.preseeds[-PRESEEDS_SHOWN:]:
            parts.append(
                Text(
                    f"  {preseed['package']}  {preseed['state']}  {preseed['hosts_done']} of {preseed['hosts_total']} hosts"
                )
            )
        parts.append("")
    parts.append(Text("what happens", style="bold"))
    parts += [Text(line) for line in _story(state)]
    return Group(*parts)


def _totals(state: FleetState) -> Text:
    from rich.text import Text

    totals = state.totals
    if totals is None:
        return Text("nothing is known yet")
    text = Text.assemble((output.counted(totals.hosts, "host"), "bold"), f", {totals.receiving} receiving")
    for count, word, style in (
        (totals.away, "away", "red"),
        (totals.slow, "slow", "yellow"),
        (totals.blamed, "blamed", "magenta"),
    ):
        text.append(f", {count} {word}", style if count else "dim")
    text.append(f"   {output.counted(totals.swarms, 'swarm')}, {totals.running} running")
    if totals.stalled:
        text.append(f", {totals.stalled} stalled", "bold red")
    text.append(f"   origin leases {totals.origin_leases}   delivered {output.amount(totals.rate_bytes_s)}/s")
    return text


def _swarms(rows: list[SwarmRow]) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("swarm", "size", "state", "hosts done", "progress", "", "rate", "time left", "leases"):
        table.add_column(name, no_wrap=True)
    for row in rows[:SWARMS_SHOWN]:
        share = row.bytes_held / row.bytes_wanted if row.bytes_wanted else 1.0
        running = row.state != "seeded"
        table.add_row(
            row.digest.removeprefix("sha256:")[:12],
            output.amount(row.size),
            Text(row.state, style={"stalled": "bold red", "seeded": "green"}.get(row.state, "")),
            f"{row.complete} of {row.hosts}",
            ProgressBar(total=1.0, completed=share, width=20),
            f"{int(share * 1000) / 10:.1f} %",
            f"{output.amount(row.rate_bytes_s)}/s" if running else "",
            _left(row.eta_s) if running else "",
            str(row.origin_leases),
        )
    if len(rows) > SWARMS_SHOWN:
        table.add_row(Text(f"and {len(rows) - SWARMS_SHOWN} more", style="dim"))
    return table


def _left(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def _racks(hosts: list[HostState]) -> Table:
    """A line a rack, a square a host; the racks that lack most come first."""
    from rich.table import Table
    from rich.text import Text

    racks: dict[tuple[str, str], list[HostState]] = {}
    for host in hosts:
        racks.setdefault((host.zone, host.rack), []).append(host)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("zone", "rack", "hosts", "done", ""):
        table.add_column(name, no_wrap=True)
    urgent = sorted(racks.items(), key=lambda item: (min(_standing(host) for host in item[1]), item[0]))
    for (zone, rack), members in urgent[:RACKS_SHOWN]:
        members.sort(key=lambda host: host.name)
        cells = Text.assemble(*(("■", _style(host)) for host in members[:CELLS_MAX]))
        if len(members) > CELLS_MAX:
            cells.append(f" and {len(members) - CELLS_MAX}")
        done = sum(host.done for host in members) / len(members) / 10
        table.add_row(Text(zone or "-"), Text(rack or "-"), str(len(members)), f"{done:.0f} %", cells)
    if len(urgent) > RACKS_SHOWN:
        table.add_row(Text(f"and {len(urgent) - RACKS_SHOWN} more", style="dim"))
    return table


def _standing(host: HostState) -> int:
    from tracker.core.views.fleet_view import AWAY

    return -1 if host.flags & AWAY else host.done


def _style(host: HostState) -> str:
    from tracker.core.views.fleet_view import AWAY, BLAMED, SLOW

    if host.flags & AWAY:
        return "red"
    if host.flags & BLAMED:
        return "magenta"
    return "yellow" if host.flags & SLOW else RAMP[host.done * (len(RAMP) - 1) // 1000]


def _tree(state: FleetState) -> Iterator[str]:
    """The first TREE_SHOWN hosts from the top, each once: a complete host still shows its last
    parent, so there may be circles."""
    from tracker.core.views.tree_view import NO_PARENT, ORIGIN

    children: dict[int, list[int]] = {}
    for number, (_, parent) in state.tree.items():
        attached = parent == ORIGIN or parent in state.tree
        children.setdefault(parent if attached else NO_PARENT, []).append(number)
    tops = [*children.get(ORIGIN, ()), *children.get(NO_PARENT, ())]
    open_ends = [(number, 1) for number in reversed(tops)]
    shown: set[int] = set()
    yield "  origin"
    while open_ends and len(shown) < TREE_SHOWN:
        number, depth = open_ends.pop()
        if number in shown:
            continue
        shown.add(number)
        yield f"  {'  ' * depth}{state.name(number)}  {state.tree[number][0] / 10:.1f} %"
        open_ends += [(child, depth + 1) for child in reversed(children.get(number, ()))]
    if len(state.tree) > len(shown):
        yield f"  and {len(state.tree) - len(shown)} more"


def _story(state: FleetState) -> Iterator[str]:
    for line in list(state.story)[-STORY_SHOWN:]:
        at = time.strftime("%H:%M:%S", time.localtime(line.at))
        swarm = f"{line.swarm.removeprefix('sha256:')[:6]}: " if line.swarm else ""
        yield f"  {at}  {swarm}{line.event}"
