"""`p2pdist slurm sweep`: what jobs left behind for which no epilog ran, as on a node that crashed.

Pins outlive an agent and its node, so a job on a node that went down would keep its packages there
for ever.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from p2pdist.cli import output
from p2pdist.cli.services import socket_option, tracker_option
from p2pdist.cli.verbs.slurm import controller
from p2pdist.cli.verbs.slurm.epilog import undo
from p2pdist.cli.verbs.slurm.job import OWNER, JobRecord, is_job, read_record
from p2pdist.cli.verbs.slurm.node import agent_wait_option, jobs_dir_option, wait_for_agent


@click.command("sweep")
@jobs_dir_option
@agent_wait_option
@tracker_option
@socket_option
def sweep(jobs_dir: Path, agent_wait: float, tracker: str, socket: Path) -> None:
    """Undo on this node what the prologs of jobs did that are here no longer, where no epilog has.

    Run it when the agent has started. Slurm is asked only where there is anything of a job; the
    node is the one that the agent is named after.

    \b
    Example:
      p2pdist slurm sweep --tracker http://tracker:7070
    """
    from p2pdist.agent.api.client import LocalClient

    client = LocalClient(socket)
    node = str(wait_for_agent(client, agent_wait)["host"])
    pinned = {pin.owner.removeprefix(OWNER) for pin in client.pins() if pin.owner.startswith(OWNER)}
    with suppress(FileNotFoundError):
        pinned.update(each.name for each in jobs_dir.iterdir())
    left = {name for name in pinned if is_job(name)}
    # Asked after the look: a job that began its prolog since is in neither, or in both.
    for name in sorted(left - controller.jobs_on(node) if left else left):
        record = read_record(jobs_dir / name) or JobRecord(OWNER + name, ())
        undo(record, jobs_dir / name, socket, tracker, agent_wait)
        output.line(f"p2pdist: job {name} left packages behind, which are released")
