"""Pulls as they go: a live table on a terminal, a line every two seconds elsewhere. The figures are
the agents' own metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import aiohttp
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2pdist.cli.verbs.demo.cluster import Cluster, Host, Received
from p2pdist.cli.verbs.demo.figures import Pull, megabytes

LIVE_INTERVAL_S = 0.25
LINE_INTERVAL_S = 2.0


class PullProgress:
    """What is known of pulls that run: the `missing` bytes that each agent awaits, and since
    when."""

    def __init__(self, hosts: Sequence[Host], missing: int, before: dict[str, Received]) -> None:
        self.hosts = hosts
        self.missing = missing
        self.before = before
        self.now = dict(before)
        self.done: dict[str, Pull] = {}
        self.began = time.monotonic()

    def arrived(self, host: Host) -> Received:
        """Bytes that reached an agent since the pulls began."""
        before, now = self.before[host.name], self.now[host.name]
        return Received(now.origin - before.origin, now.peers - before.peers)

    def line(self) -> str:
        """One line for logs."""
        arrived = [self.arrived(host) for host in self.hosts]
        return (
            f"  {time.monotonic() - self.began:5.1f} s  {len(self.done)} of {len(self.hosts)} agents done, "
            f"from origin {megabytes(sum(one.origin for one in arrived))}, from peers {megabytes(sum(one.peers for one in arrived))}"
        )

    def table(self) -> Group:
        """One row for each agent, for terminals."""
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=8)
        table.add_column(width=30)
        for _ in range(3):
            table.add_column(justify="right", min_width=11)
        table.add_row("agent", "", "from origin", "from peers", "", style="bold")
        for host in self.hosts:
            one, pull = self.arrived(host), self.done.get(host.name)
            share = 1.0 if pull else min(1.0, (one.origin + one.peers) / max(1, self.missing))
            state = f"{pull.seconds:.2f} s" if pull else f"{share:.0%}"
            bar = ProgressBar(total=1.0, completed=share, width=30)
            table.add_row(host.name, bar, megabytes(one.origin), megabytes(one.peers), state)
        return Group(table, Text(self.line()))


async def _refresh(cluster: Cluster, client: aiohttp.ClientSession, progress: PullProgress) -> None:
    """Read every agent's metrics."""
    received = await asyncio.gather(*(cluster.received(client, host) for host in cluster.hosts))
    progress.now = {host.name: one for host, one in zip(cluster.hosts, received, strict=True)}


async def _show(console: Console, cluster: Cluster, client: aiohttp.ClientSession, progress: PullProgress) -> None:
    """Show the pulls until cancelled."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_INTERVAL_S)
            await _refresh(cluster, client, progress)
            console.print(progress.line(), highlight=False)
    with Live(progress.table(), console=console, auto_refresh=False) as live:
        try:
            while True:
                await asyncio.sleep(LIVE_INTERVAL_S)
                await _refresh(cluster, client, progress)
                live.update(progress.table(), refresh=True)
        finally:
            live.update(progress.table(), refresh=True)


async def pull_everywhere(
    console: Console, cluster: Cluster, client: aiohttp.ClientSession, reference: str, missing: int
) -> tuple[tuple[Pull, ...], float]:
    """Pull on all agents at once. Returns the pulls in order of agents, and the seconds from the
    first start to the last end."""
    before = [await cluster.received(client, host) for host in cluster.hosts]
    progress = PullProgress(
        cluster.hosts, missing, {host.name: one for host, one in zip(cluster.hosts, before, strict=True)}
    )

    async def pull(host: Host) -> Pull:
        status = await cluster.pull(client, host, reference)
        progress.done[host.name] = status
        return status

    shown = asyncio.create_task(_show(console, cluster, client, progress))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pull(host)) for host in cluster.hosts]
        makespan = time.monotonic() - progress.began
        await _refresh(cluster, client, progress)
    finally:
        shown.cancel()
        await asyncio.wait([shown])
    if not shown.cancelled() and (failure := shown.exception()):
        raise failure
    if not console.is_terminal:
        console.print(progress.line(), highlight=False)
    return tuple(task.result() for task in tasks), makespan
