"""What the verbs that talk to the agent of this host share: how it is found, and following a
pull."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from p2pdist.cli import output
from p2pdist.model.errors import Conflict
from p2pdist.model.manifest import parse_reference
from p2pdist.model.messages import MountStatus, Priority, PullRequest, PullStatus

if TYPE_CHECKING:
    from p2pdist.agent.client import LocalClient

Function = TypeVar("Function", bound=Callable[..., Any])

HOW_HELP = (
    "Force a way instead of the best that works. overlay: whatever is mounted. unpack: the best that is not. "
    "For packages with trees also erofs, reflink, hardlink and copy."
)


def socket_option(function: Function) -> Function:
    return click.option(
        "--socket",
        # Whether this user may use it the call says, with the group that may.
        type=click.Path(path_type=Path, readable=False),
        default=Path("/run/p2pdist/agent.sock"),
        show_default=True,
        help="The agent's socket. Also from P2PDIST_SOCKET.",
    )(function)


def follow_pull(client: LocalClient, reference: str, *, quiet: bool, priority: Priority = "start") -> PullStatus:
    """Pull a package and show how far it is, by source. A reference without a tag means
    `latest`."""
    name = str(parse_reference(reference))
    noted = ""

    with output.Progress(quiet=quiet) as progress:

        def show(status: PullStatus) -> None:
            nonlocal noted
            if status.note and status.note != noted and not quiet:
                output.line(f"{name}: {status.note}")
            noted = status.note
            progress(name, status.bytes_done, status.bytes_total)
            for source, count in (("  from peers", status.bytes_peers), ("  from the origin", status.bytes_origin)):
                if count:
                    progress(source, count, status.bytes_total - status.bytes_cached)

        status = client.pull(PullRequest(package=name, priority=priority), show)
    if status.warning:
        output.line(f"{name}: {status.warning}. Run p2pdist doctor on the hosts that are named")
    return status


def check_seen(shown: MountStatus, remedy: str) -> None:
    """Raises Conflict when this process does not see what the agent shows."""
    from p2pdist.mount.sight import differs

    if shown.how == "images":
        hidden = next((image for image in shown.images if not os.path.lexists(image)), "")
    else:
        hidden = shown.path if differs(shown.path, (shown.device, shown.inode)) else ""
    if hidden:
        raise Conflict(
            f"the agent shows the package at {hidden}, where this process does not see it: it has mounts or a root of its own "
            f"(a container, chroot, PrivateTmp of systemd, job_container/tmpfs of Slurm)",
            remedy=remedy,
        )


def pulled_name(reference: str, pulled: PullStatus) -> str:
    """The very version that was pulled, so that a tag which moves meanwhile does not matter, nor a
    tracker that is away."""
    return f"{parse_reference(reference).name}@{pulled.digest}"
