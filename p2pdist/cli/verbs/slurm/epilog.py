"""`p2pdist slurm epilog`: what the prolog of a job did on a node is undone.

Slurm runs it on every node of a job that ends, also where the prolog failed or was killed half way.
It goes by what the agent says is shown and pinned for the job, so it may be run again at any time,
and where there is nothing to undo it asks no agent and no tracker.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.options import Seconds
from p2pdist.cli.services import socket_option, tracker_client, tracker_option
from p2pdist.cli.verbs.slurm.job import RECORD, JobRecord, is_job, job_of, read_record
from p2pdist.cli.verbs.slurm.node import (
    TRACKER_S_MAX,
    TimeIsUp,
    agent_wait_option,
    jobs_dir_option,
    time_limit,
    wait_for_agent,
)
from p2pdist.model.errors import Conflict, NotFound, P2PDistError, Unavailable, UsageError

if TYPE_CHECKING:
    from p2pdist.agent.api.client import LocalClient


@click.command("epilog")
@click.option("--job", metavar="JOBID", help="Another job than the one for which Slurm runs this.")
@jobs_dir_option
@click.option(
    "--timeout",
    default=120.0,
    show_default=True,
    type=Seconds(1.0, 86400.0),
    metavar="SECONDS",
    help="How long it may take; less than PrologEpilogTimeout of slurm.conf.",
)
@agent_wait_option
@tracker_option
@socket_option
def epilog(job: str | None, jobs_dir: Path, timeout: float, agent_wait: float, tracker: str, socket: Path) -> int:
    """Unmount and unpin the packages of the job for which Slurm runs this, and cancel its preseeds.

    What a process that outlived the job still has open is taken out of sight. An exit code other
    than 0 is the node's fault, as when its agent is away, and Slurm drains the node; run this once
    more with --job when that is mended.

    \b
    Example:
      p2pdist slurm epilog --job 4711 --tracker http://tracker:7070
    """
    if job is not None and not is_job(job):
        raise UsageError(f"{job[:80]!r} is not the number of a job", remedy="Write it as squeue --format=%A prints it")
    identifier = job if job is not None else job_of(os.environ).id
    directory = jobs_dir / identifier
    record = read_record(directory)
    if record is None:
        return 0
    try:
        with time_limit(timeout):
            undo(record, directory, socket, tracker, agent_wait)
    except TimeIsUp:
        raise Unavailable(
            f"what is shown below {directory} could not be taken away within {timeout:.0f} s",
            remedy="See the agent's log",
        ) from None
    return 0


def undo(record: JobRecord, directory: Path, socket: Path, tracker: str, agent_wait_s: float) -> None:
    """Leave nothing of a job on this node. Raises what the agent reports, or Unavailable when it
    does not answer."""
    from p2pdist.agent.api.client import LocalClient

    client = LocalClient(socket)
    wait_for_agent(client, agent_wait_s)
    _unmount_all(client, directory)
    with suppress(NotFound):  # the prolog did not come so far
        client.unpin(owner=record.owner)
    asyncio.run(_cancel(record, tracker))
    _remove(directory)


def _unmount_all(client: LocalClient, directory: Path) -> None:
    top = Path(os.path.realpath(directory))
    for shown in client.mounts():
        if top not in Path(shown.path).parents:
            continue
        try:
            client.unmount(shown.path)
        except NotFound:
            continue  # another process has unmounted it
        except Conflict as conflict:
            output.line(f"p2pdist: {conflict.what}; processes of the job outlived it and lose sight of the package")
            client.unmount(shown.path, force=True)


async def _cancel(record: JobRecord, tracker: str) -> None:
    """Release the hosts of the preseeds. Where no tracker answers, their time to live does it."""
    if not record.preseeds:
        return
    try:
        async with asyncio.timeout(TRACKER_S_MAX), tracker_client(tracker) as client:
            for preseed in record.preseeds:
                with suppress(NotFound):
                    await client.ask("DELETE", f"/v1/preseeds/{preseed}?brief=1")
    except (P2PDistError, TimeoutError) as error:
        output.line(
            f"p2pdist: {', '.join(record.preseeds)} will end by its time to live: {error or 'no answer in time'}"
        )


def _remove(directory: Path) -> None:
    """Remove the job's directory with the empty ones in it; nothing that has content, so nothing
    that is still shown."""
    for folder, _, _ in os.walk(directory, topdown=False):
        if Path(folder) != directory:
            with suppress(OSError):
                os.rmdir(folder)
    try:
        left = [path.name for path in directory.iterdir() if not path.name.startswith(RECORD)]
        if left:  # with its record, so that this can be done once more
            raise Conflict(f"{directory / left[0]} is not empty", remedy="See what is in it, and run the epilog again")
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        raise P2PDistError(f"{directory} cannot be removed: {error.strerror}", remedy="Run the epilog again") from error
