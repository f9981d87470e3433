"""`p2pdist blob`: single files by their digest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pdist.cli import output
from p2pdist.cli.connect import origin_option, required_origin, socket_option
from p2pdist.model.digest import Digest, parse_digest
from p2pdist.model.errors import Conflict, P2PDistError, from_problem
from p2pdist.model.messages import PullRequest, PullStatus

if TYPE_CHECKING:
    from p2pdist.package.repository.push import Pushed


@click.group("blob")
def command() -> None:
    """Push or pull a single file by its digest."""


@command.command("push")
@click.argument("file", type=click.Path(path_type=Path))
@origin_option
@click.option("--torrent/--no-torrent", default=True, help="Make its torrent as well, for swarms [default: make it].")
@output.json_option
def push(file: Path, origin: str | None, torrent: bool, as_json: bool) -> None:
    """Send FILE to an origin and print its digest.

    Its torrent is kept there, too: hosts need it to go on from a BitTorrent swarm where no tracker
    plans.

    \b
    Example:
      p2pdist blob push weights.safetensors --origin s3://packages/prod
    """
    from p2pdist.package.repository.push import push_blob
    from p2pdist.package.repository.torrents import make_file_torrent

    async def work(progress: output.Progress) -> tuple[Pushed, Digest | None]:
        async with required_origin(origin) as central:
            pushed = await push_blob(file, central, on_progress=progress)
            return pushed, await make_file_torrent(pushed.digest, file, central) if torrent else None

    with output.Progress(quiet=as_json) as progress:
        pushed, document = asyncio.run(work(progress))
    if as_json:
        output.print_json(
            {
                "digest": pushed.digest,
                "size": pushed.size,
                "reference": str(pushed.reference),
                "bytes_sent": pushed.bytes_sent,
                "bytes_skipped": pushed.bytes_skipped,
                "seconds": round(pushed.seconds, 3),
                "torrent": document,
            }
        )
    else:
        click.echo(pushed.digest)


@command.command("pull")
@click.argument("digest")
@click.option("-o", "--output", "target", required=True, type=click.Path(path_type=Path), help="Where to put the file.")
@socket_option
@output.json_option
def pull(digest: str, target: Path, socket: Path, as_json: bool) -> None:
    """Bring the blob DIGEST to a file through the agent of this host.

    \b
    Example:
      p2pdist blob pull sha256:9f86d0... -o weights.safetensors
    """
    blob = parse_digest(digest)
    before = _seen(target)
    with output.Progress(quiet=as_json) as progress:
        status = _pull(PullRequest(blob=blob, output=str(target.absolute())), socket, progress, quiet=as_json)
    if status.error is not None:
        raise from_problem(status.error)
    if status.state != "done":
        raise P2PDistError(f"the agent gave up on {blob}: {status.note or status.state}")
    if _seen(target) in (None, before):
        raise Conflict(
            f"the agent wrote {target.absolute()}, where this process does not see it: it has mounts or a root of its own",
            remedy="Name a file in a directory that the agent and this process share",
        )
    if status.warning:
        output.line(f"{blob}: {status.warning}. Run p2pdist doctor on the hosts that are named")
    if as_json:
        output.print_json(
            {
                "digest": blob,
                "size": status.bytes_total,
                "output": str(target),
                "bytes_origin": status.bytes_origin,
                "bytes_peers": status.bytes_peers,
                "bytes_cached": status.bytes_cached,
                "seconds": round(status.seconds, 3),
            }
        )
    else:
        click.echo(f"{target}  {output.amount(status.bytes_total)}, {status.seconds:.1f} s")


def _seen(file: Path) -> tuple[int, int, int] | None:
    """Differs between a file and its successor of the same name."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _pull(request: PullRequest, socket: Path, progress: output.Progress, *, quiet: bool) -> PullStatus:
    from p2pdist.agent.api.client import LocalClient

    noted = ""

    def show(status: PullStatus) -> None:
        nonlocal noted
        if status.note and status.note != noted and not quiet:
            output.line(status.note)
        noted = status.note
        progress("pulling", status.bytes_done, status.bytes_total)

    return LocalClient(socket).pull(request, show)
