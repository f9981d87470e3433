"""`p2pdist blob`: single files by their digest or, where an origin keeps it, by their name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdist.cli import output
from p2pdist.cli.options import FilePath
from p2pdist.cli.services import GOES_ON, encrypt_option, origin_option, required_origin, socket_option
from p2pdist.files import own_descriptor
from p2pdist.model.digest import Digest, hex_of, is_digest, parse_digest
from p2pdist.model.errors import Conflict, NotFound, P2PDistError, UsageError, from_problem
from p2pdist.model.messages import PullRequest, PullStatus

if TYPE_CHECKING:
    from p2pdist.origin.contract import Tagged
    from p2pdist.package.repository.push import Pushed

FILES_MAX = 10_000
"""Files of one command."""

NOWHERE = Path(os.devnull)
"""The output of a pull that brings a blob to the agent's store alone."""


@click.group("blob")
def command() -> None:
    """Push or pull single files by their digest or name.

    \b
    Example:
      p2pdist blob push model.safetensors --origin s3://packages/prod
      p2pdist blob pull model.safetensors -d ./models --origin s3://packages/prod
    """


@command.command("push")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@origin_option
@encrypt_option(refused="a file that is pushed alone is not encrypted")
@click.option(
    "--torrent/--no-torrent",
    default=None,
    help="Make its torrent as well, for swarms  [default: make it, but at a registry, which keeps none].",
)
@output.quiet_options
@output.json_option
def push(files: tuple[Path, ...], origin: str | None, torrent: bool | None, as_json: bool) -> None:
    """Send each FILE to an origin and print its digest. The origin keeps its name, by which
    p2pdist blob pull finds it; a registry keeps the digest alone. With several files --json prints
    a list.

    Its torrent is kept there, too: hosts need it to go on from a BitTorrent swarm where no tracker
    plans.

    \b
    Example:
      p2pdist blob push weights.safetensors --origin s3://packages/prod
    """
    documents = []
    for file in files:
        with output.Progress(quiet=as_json) as progress:
            pushed, document = asyncio.run(_push(file, origin, torrent, progress))
        if not as_json:
            click.echo(pushed.digest)
            output.note(
                f"{file}: {output.amount(pushed.size)}, {output.amount(pushed.bytes_sent)} sent, "
                f"{output.amount(pushed.bytes_skipped)} already there, {pushed.seconds:.1f} s"
            )
        documents.append(
            {
                "digest": pushed.digest,
                "size": pushed.size,
                "reference": str(pushed.reference),
                "file": file.name,
                "bytes_sent": pushed.bytes_sent,
                "bytes_skipped": pushed.bytes_skipped,
                "seconds": round(pushed.seconds, 3),
                "torrent": document,
            }
        )
    if as_json:
        output.print_json(documents if len(files) > 1 else documents[0])


async def _push(
    file: Path, origin: str | None, torrent: bool | None, progress: output.Progress
) -> tuple[Pushed, Digest | None]:
    from p2pdist.package.repository.push import push_blob
    from p2pdist.package.repository.torrents import check_keeps_torrents, keeps_torrents, make_file_torrent

    async with required_origin(origin) as central:
        if torrent:
            check_keeps_torrents(central)
        pushed = await push_blob(file, central, on_progress=progress)
        wanted = torrent is None and keeps_torrents(central)
        return pushed, await make_file_torrent(pushed.digest, file, central) if torrent or wanted else None


@command.command("pull")
@click.argument("names", metavar="DIGEST|NAME...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    "target",
    type=FilePath(),
    help="Where to put the file; /dev/null: the store alone.",
)
@click.option(
    "-d",
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to put files by their names, or a file without a name by its digest; it is made.",
)
@origin_option
@socket_option
@output.quiet_options
@output.json_option
def pull(
    names: tuple[str, ...],
    target: Path | None,
    directory: Path | None,
    origin: str | None,
    socket: Path,
    as_json: bool,
) -> None:
    """Bring blobs to files through the agent of this host: each by its digest, or by the name that
    the file had when it was pushed to the origin. Names may be patterns. With --directory, --json
    prints a list.

    \b
    Example:
      p2pdist blob pull sha256:9f86d0... -o weights.safetensors
      p2pdist blob pull 'model-*.safetensors' config.json -d model --origin s3://packages/prod
    """
    if (target is None) == (directory is None):
        raise UsageError("say where to put it", remedy="Give -o FILE for one file, or -d DIRECTORY")
    wanted = _wanted(names, directory, target, origin)
    if directory is not None:
        _make(directory)
    documents = [_bring(one, socket, as_json=as_json) for one in wanted]
    if as_json:
        output.print_json(documents if directory is not None else documents[0])


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A blob and the file that it is to become."""

    blob: Digest
    target: Path


def _wanted(names: Sequence[str], directory: Path | None, target: Path | None, origin: str | None) -> list[_Wanted]:
    """The blobs that the words of a command line mean. Raises NotFound, and UsageError where two
    are to become one file."""
    from p2pdist.cli.references.search import is_part

    for name in names:
        if name.startswith("sha256:") and not is_part(name):
            parse_digest(name)
    # Digests with -o need nothing of the origin; with -d it says their names, if it is named.
    listed: list[Tagged] = []
    if not all(map(is_digest, names)) or (directory is not None and origin):
        listed = asyncio.run(_listed(origin))
    titles = {entry.reference.removeprefix("blob:").replace("-", ":", 1): entry.title for entry in listed}
    chosen: dict[Digest, str] = {}
    for name in names:
        chosen |= {Digest(name): titles.get(name, "")} if is_digest(name) else _named(name, titles)
    if len(chosen) > FILES_MAX:
        raise UsageError(f"{len(chosen)} files are over the limit of {FILES_MAX}", remedy="Name fewer at a time")
    if target is not None:
        target = named_file(target)
        if len(chosen) > 1:
            raise UsageError(f"{len(chosen)} files cannot become {target}", remedy="Give -d DIRECTORY")
        return [_Wanted(digest, target) for digest in chosen]
    assert directory is not None
    files = {directory / _file_name(digest, title): digest for digest, title in chosen.items()}
    if len(files) < len(chosen):
        raise UsageError("two of the files have one name", remedy="Name them by digest, each with -o FILE")
    return [_Wanted(digest, file) for file, digest in files.items()]


async def _listed(origin: str | None) -> list[Tagged]:
    """The single files at the origin."""
    async with required_origin(origin) as central:
        return [entry for entry in await central.listing() if entry.reference.startswith("blob:sha256-")]


def _named(name: str, titles: dict[str, str]) -> dict[Digest, str]:
    """Digests and names of the files that a name, a pattern or the first digits of a digest mean.
    Raises NotFound."""
    import fnmatch

    from p2pdist.cli.references.search import HEX_DIGITS_MIN

    begins = name.startswith("sha256:") and len(name) >= len("sha256:") + HEX_DIGITS_MIN
    found = {
        Digest(digest): title
        for digest, title in titles.items()
        if fnmatch.fnmatchcase(title, name) or (begins and digest.startswith(name))
    }
    if not found:
        import difflib

        if titles and not begins and not any(titles.values()):
            raise NotFound(
                f"the files at the origin have no names, so none is called {name}: a registry keeps none",
                remedy="Name it by the digest that blob push printed; p2pdist ls --at-origin lists them",
            )
        near = difflib.get_close_matches(name, titles.values(), n=1)
        raise NotFound(
            f"no file at the origin is called {name}",
            remedy=f"Did you mean {near[0]}?" if near else "p2pdist ls --at-origin lists the files, by name",
        )
    return found


def _file_name(digest: Digest, title: str) -> str:
    """A name below the directory and nowhere else, whatever the origin says."""
    safe = title not in ("", ".", "..") and "/" not in title and "\0" not in title
    return title if safe else hex_of(digest)


def named_file(target: Path) -> Path:
    """The file that --output names, or that a link of this name leads to; NOWHERE by any name of
    it. Raises UsageError for what is no file, as another name of standard output is, also where
    that leads to a file: this would get a new file in its place, which the caller does not see."""
    if target.exists() and target.samefile(NOWHERE):
        return NOWHERE
    stream = target.exists() and not target.is_file() and not target.is_dir()
    if str(target) == "-" or stream or own_descriptor(target) is not None:
        raise UsageError(
            f"{target} is no file but standard output, a device or a pipe", remedy="Name a file; - is one as ./-"
        )
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise P2PDistError(
            f"cannot make the directory {directory}: {error.strerror}", remedy="Name another one with -d"
        ) from error


def _bring(wanted: _Wanted, socket: Path, *, as_json: bool) -> dict[str, Any]:
    """Bring a blob to its file; returns the JSON document. Raises what the pull raises."""
    blob, target = wanted.blob, wanted.target
    before, stored = _seen(target), target == NOWHERE
    to_file = None if stored else str(target.absolute())
    with output.Progress(quiet=as_json) as progress:
        status = _pull(PullRequest(blob=blob, output=to_file), socket, progress, quiet=as_json)
    if status.error is not None:
        raise from_problem(status.error)
    if status.state != "done":
        raise P2PDistError(
            f"the agent gave up on {blob}: {status.note or status.state}",
            remedy="See the log of the agent, and pull it again",
        )
    if not stored and _seen(target) in (None, before):
        raise Conflict(
            f"the agent wrote {target.absolute()}, where this process does not see it: it has mounts or a root of its own",
            remedy="Name a file in a directory that the agent and this process share",
        )
    if status.warning:
        output.line(f"{blob}: {status.warning}. Run p2pdist doctor on the hosts that are named")
    if not as_json:
        figures = "" if output.is_quiet() else f"  {output.amount(status.bytes_total)}, {status.seconds:.1f} s"
        output.say(f"{target}{figures}")
    return {
        "digest": blob,
        "size": status.bytes_total,
        "output": str(target),
        "bytes_origin": status.bytes_origin,
        "bytes_peers": status.bytes_peers,
        "bytes_cached": status.bytes_cached,
        "seconds": round(status.seconds, 3),
    }


def _seen(file: Path) -> tuple[int, int, int] | None:
    """Differs between a file and its successor of the same name."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _pull(request: PullRequest, socket: Path, progress: output.Progress, *, quiet: bool) -> PullStatus:
    from p2pdist.agent.api.client import LocalClient

    noted, begun = "", False

    def show(status: PullStatus) -> None:
        nonlocal noted, begun
        begun = True
        if status.note and status.note != noted and not quiet:
            output.note(status.note)
        noted = status.note
        progress(Path(request.output or request.blob or "").name, status.bytes_done, status.bytes_total)

    try:
        return LocalClient(socket).pull(request, show)
    except KeyboardInterrupt:
        if begun:
            output.note(f"{request.blob}: {GOES_ON}")
        raise
