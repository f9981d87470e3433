"""`p2pdist slurm prolog`: a node of a job gets the job's packages before the job starts.

Theory. Every node of a job asks the tracker for the same preseeds, of the job's packages on the
job's nodes, so that however many ask, there is one order for each package, which says which version
its tag means on all of them; the node then waits for its own agent alone. Its pin lasts as long as
the job; the preseed is cancelled with it, or ends by its time to live. An order names all nodes, so
one that every node of a large job gave would cost the tracker the square of their number: the first
node gives it at once, the others ask whether it was given, and give it themselves, one after the
other, when it is not there after a while.

Slurm knows one failure of a prolog, any exit code but 0: it drains the node, and requeues a batch
job in a held state (without holding it under SchedulerParameters=nohold_on_prolog_fail) and cancels
any other. So a failure that is not the node's fault must not end so, or a job that names an absent
package drains a cluster: then the job is held or cancelled by Slurm's commands, and the exit code
is 0. The epilog runs in either case and undoes what was done.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from p2pdist.cli import output
from p2pdist.cli.options import Seconds
from p2pdist.cli.services import follow_pull, pulled_name, socket_option, tracker_client, tracker_option
from p2pdist.cli.verbs.slurm import controller
from p2pdist.cli.verbs.slurm.job import Job, JobRecord, job_of, packages_of, places_of, write_record
from p2pdist.cli.verbs.slurm.node import (
    TRACKER_S_MAX,
    TimeIsUp,
    agent_wait_option,
    jobs_dir_option,
    time_limit,
    wait_for_agent,
)
from p2pdist.model.errors import Corrupt, DiskFull, NotFound, P2PDistError, Refused, Unavailable, UsageError
from p2pdist.model.messages import MountRequest, PullStatus
from p2pdist.model.preseed import ENDED, PreseedRequest, canonical, fingerprint
from p2pdist.model.units import parse_duration

if TYPE_CHECKING:
    from p2pdist.agent.api.client import LocalClient
    from p2pdist.client.tracker import Tracker
    from p2pdist.model.manifest import Reference

OF_THE_PACKAGE = (UsageError, NotFound, Corrupt, Refused)
"""Failures that any other node would meet as well."""

PROBE_S_MAX = 5.0
"""An agent that has not answered by then does not answer."""


FIRST_S, NEXT_S, GIVE_S_MAX = 1.0, 0.005, 10.0
"""How long nodes wait for another one to give an order: the second, each one after it longer than
the one before, and at most."""

LOOK_S = 0.25

CACHE_S_MAX = 60.0
"""How long a job waits for compile caches, without which it runs as well."""


@dataclass(frozen=True, slots=True)
class _Settings:
    tracker: str
    socket: Path
    jobs_dir: Path
    mount: bool
    ttl_s: float
    timeout_s: float
    agent_wait_s: float


@click.command("prolog")
@click.option(
    "--packages", default="", metavar="REF,REF", help="Packages of every job here, beside the ones that it names."
)
@click.option("--mount/--no-mount", default=True, show_default=True, help="Show the packages to the job.")
@jobs_dir_option
@click.option(
    "--timeout",
    default=300.0,
    show_default=True,
    type=Seconds(1.0, 86400.0),
    metavar="SECONDS",
    help="How long to wait for the packages; a minute less than PrologEpilogTimeout of slurm.conf.",
)
@click.option(
    "--ttl", default="7d", show_default=True, metavar="TIME", help="When a preseed ends that is not cancelled."
)
@click.option(
    "--on-failure",
    type=click.Choice(["hold", "cancel", "drain"]),
    default="hold",
    show_default=True,
    help="What to do with a job whose packages are missing through no fault of the node.",
)
@click.option(
    "--cache",
    metavar="NAMESPACE",
    help="Bring the compile caches of this node too, for jobs that run --cache; they go on without.",
)
@click.option(
    "--cache-python", default="python3", show_default=True, metavar="PATH", help="The interpreter of such jobs."
)
@agent_wait_option
@tracker_option
@socket_option
def prolog(
    packages: str,
    mount: bool,
    jobs_dir: Path,
    timeout: float,
    ttl: str,
    on_failure: str,
    agent_wait: float,
    cache: str | None,
    cache_python: str,
    tracker: str,
    socket: Path,
) -> int:
    """Wait for the packages of the job for which Slurm runs this, pin them while it runs, and show
    them at JOBS_DIR/JOBID/NAME.

    The job names them in its comment: --comment "p2pdist:team/trainer:v3,team/weights:v7". A job
    that names none goes on at once. Where the packages cannot be had through no fault of this node,
    as when there is none of that name or the tracker is away, a batch job is requeued and held, and
    any other cancelled; its AdminComment says why, and the exit code is 0. Any other exit code is
    the node's fault, as when its agent is away or its disk is full of other things, and Slurm
    drains the node.

    \b
    Example, the script that Prolog= of slurm.conf names (PrologFlags=Alloc,DeferBatch):
      #!/bin/sh
      exec /opt/p2pdist/bin/p2pdist slurm prolog --tracker http://tracker:7070
    """
    job = job_of(os.environ)
    ttl_s = parse_duration(ttl)
    if not job.nodes:
        job = controller.ask_for(job)
    settings = _Settings(tracker, socket, jobs_dir, mount, ttl_s, timeout, agent_wait)
    try:
        if _prepare(job, packages, settings) and cache:
            _bring_caches(job, cache, cache_python, socket)
    except P2PDistError as error:
        if on_failure == "drain" or error.details.get("node_at_fault"):
            raise
        outcome = controller.prevent(job, f"{job.node}: {error}", "cancel" if on_failure == "cancel" else "hold")
        output.line(f"p2pdist: job {job.id} was {outcome}: {error}")
    return 0


def _prepare(job: Job, always: str, settings: _Settings) -> bool:
    """Bring the packages here; returns whether there are any. Raises why not, with the detail
    `node_at_fault`."""
    packages = packages_of(job, always)
    if not packages:
        return False
    places = places_of(packages, settings.jobs_dir / job.id)
    try:
        hosts = controller.host_names(job.nodes or job.node)
        record = JobRecord(job.owner, tuple(map(job.preseed, range(len(packages)))))
        write_record(settings.jobs_dir / job.id, record)
    except P2PDistError as error:
        error.details["node_at_fault"] = True
        raise
    _bring_all(job, hosts, places, settings)
    return True


def _bring_caches(job: Job, namespace: str, python: str, socket: Path) -> None:
    """Have the compile caches for this node in the agent's store. A job runs without them, too, so
    what is wrong is only said."""
    from p2pdist.agent.api.client import LocalClient
    from p2pdist.cli.verbs.cache.key import cache_key

    try:
        with time_limit(CACHE_S_MAX):
            name = str(cache_key(namespace, python).reference)
            pulled = follow_pull(LocalClient(socket), name, quiet=False)
        output.line(f"p2pdist: job {job.id}: {name} was here after {pulled.seconds:.1f} s")
    except TimeIsUp:
        output.line(f"p2pdist: job {job.id} goes on without caches: they were not there after {CACHE_S_MAX:g} s")
    except P2PDistError as error:
        output.line(f"p2pdist: job {job.id} goes on without caches: {error}")


def _bring_all(job: Job, hosts: Sequence[str], places: dict[Reference, Path], settings: _Settings) -> None:
    from p2pdist.agent.api.client import LocalClient

    client = LocalClient(settings.socket)
    try:
        with time_limit(settings.timeout_s):
            status = wait_for_agent(client, settings.agent_wait_s)
            if status["host"] != job.node:
                output.line(f"p2pdist: the agent of {job.node} calls itself {status['host']}: start it with --name")
            versions = asyncio.run(_order(job, list(places), hosts, settings))
            for version, place in zip(versions, places.values(), strict=True):
                _bring(client, job, version, place, settings)
    except TimeIsUp:
        late = Unavailable(
            f"the packages of job {job.id} were not there after {settings.timeout_s:g} s",
            remedy="What has arrived is kept: release the job to go on, or give the prolog a longer --timeout",
        )
        late.details["node_at_fault"] = _at_fault(late, settings.socket)
        raise late from None
    except P2PDistError as error:
        too_many = (
            isinstance(error, DiskFull) and not error.never_fits and _never_fit(client, job, list(places), settings)
        )
        error.details["node_at_fault"] = not too_many and _at_fault(error, settings.socket)
        raise


def _never_fit(client: LocalClient, job: Job, packages: Sequence[Reference], settings: _Settings) -> bool:
    """Whether a job names more packages than a store of this capacity can hold together, though
    each of them alone would fit. Without an answer of tracker and agent that is not so."""

    async def bytes_of_all() -> int:
        async with asyncio.timeout(TRACKER_S_MAX), tracker_client(settings.tracker) as tracker:
            body = {"packages": list(map(str, packages)), "hosts": [job.node]}
            return int((await tracker.ask("POST", "/v1/rank", body))[0]["bytes_total"])

    try:
        capacity = int(client.status()["store"]["capacity"])
        return len(packages) > 1 and asyncio.run(bytes_of_all()) > capacity
    except (P2PDistError, TimeoutError) as error:
        output.line(f"p2pdist: whether the packages of job {job.id} fit together is not known: {error}")
        return False


async def _order(job: Job, packages: list[Reference], hosts: Sequence[str], settings: _Settings) -> list[str]:
    """Ask for the preseeds, which the first node makes and the others find made; returns which
    versions the packages are, for all nodes the same. Without a tracker every agent finds its
    packages as it can."""
    ordered: list[str] = []
    try:
        async with asyncio.timeout(TRACKER_S_MAX), tracker_client(settings.tracker) as client:
            for number, package in enumerate(packages):
                request = PreseedRequest(str(package), None, tuple(hosts), priority="start", ttl=settings.ttl_s)
                preseed = await _preseed(client, job, job.preseed(number), request)
                if preseed["state"] in ENDED:
                    output.line(f"p2pdist: the preseed {preseed['id']} is {preseed['state']}; pulling without it")
                ordered.append(preseed["package"])
    except (P2PDistError, TimeoutError) as error:
        if isinstance(error, OF_THE_PACKAGE):
            raise
        output.line(f"p2pdist: no preseed for job {job.id}, pulling without: {error or 'the tracker takes too long'}")
    return ordered + list(map(str, packages[len(ordered) :]))


async def _preseed(client: Tracker, job: Job, name: str, request: PreseedRequest) -> dict[str, str]:
    """A preseed that was given, by this node if need be."""
    hosts, path = request.hosts or (), f"/v1/preseeds/{name}"
    place = hosts.index(job.node) if job.node in hosts else 0
    give_at = time.monotonic() + (min(FIRST_S + place * NEXT_S, GIVE_S_MAX) if place else 0.0)
    while True:
        try:
            preseed: dict[str, str] = await client.ask("GET", path + "?brief=1")
            if preseed.get("fingerprint") == fingerprint(canonical(request)):
                return preseed
            break  # it is of another owner, as the order will say
        except NotFound:
            if time.monotonic() >= give_at:
                break
        await asyncio.sleep(LOOK_S)
    given: dict[str, str] = await client.ask("PUT", path, msgspec.to_builtins(request))
    return given


def _bring(client: LocalClient, job: Job, version: str, place: Path, settings: _Settings) -> None:
    """Have one package here, pinned and shown. Its preseed fetches the remaining bytes."""
    pulled = _pull(client, version, settings.agent_wait_s)
    name = pulled_name(version, pulled)
    client.pin(name, job.owner)
    if settings.mount and not _is_shown(client, place, pulled.digest):
        place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        client.mount(MountRequest(name, os.path.abspath(place)))
    where = f", shown at {place}" if settings.mount else ""
    output.line(f"p2pdist: job {job.id}: {name} was here after {pulled.seconds:.1f} s{where}")


def _pull(client: LocalClient, version: str, wait_s: float) -> PullStatus:
    try:
        return follow_pull(client, version, quiet=False)
    except (NotFound, Unavailable):
        # An agent that was restarted meanwhile knows nothing of the pull, and one that still starts
        # does not answer.
        wait_for_agent(client, wait_s)
        return follow_pull(client, version, quiet=False)


def _is_shown(client: LocalClient, place: Path, digest: str) -> bool:
    """Whether an earlier prolog of the job came so far."""
    path = os.path.realpath(place)
    return any(shown.path == path and shown.digest == digest for shown in client.mounts())


def _at_fault(error: P2PDistError, socket: Path) -> bool:
    """Whether the node is to blame: its agent does not answer or failed, its disk is full, it
    cannot mount. Not for what the user named, nor for a tracker or an origin that is away, which
    its agent reports."""
    from p2pdist.agent.api.client import LocalClient

    if "socket" in error.details:
        return True  # the prolog's user may not use the agent's socket
    if isinstance(error, OF_THE_PACKAGE) or (isinstance(error, DiskFull) and error.never_fits):
        return False
    if not isinstance(error, Unavailable):
        return True
    try:
        LocalClient(socket, answer_s=PROBE_S_MAX).status()
    except Unavailable:
        return True
    return False
