"""`p2pdist cache`: compile caches of one host for all others like it."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from p2pdist.cli import output
from p2pdist.cli.services import (
    encrypt_option,
    layout_option,
    opened_layout,
    origin_option,
    required_origin,
    socket_option,
)
from p2pdist.cli.verbs.cache.directory import BYTES_MAX, FILES_MAX, default_directory, restore
from p2pdist.cli.verbs.cache.key import VARIABLES, CacheKey, cache_key
from p2pdist.model.errors import NotFound, TooLarge

Function = TypeVar("Function", bound=Callable[..., Any])


def _key_options(function: Function) -> Function:
    """NAMESPACE, --python and --dir."""
    for option in (
        click.option(
            "--python",
            default="python3",
            show_default=True,
            help="The interpreter of the programs: its version and its torch, triton, vLLM and numba count.",
        ),
        click.option(
            "--dir",
            "directory",
            type=click.Path(path_type=Path, file_okay=False),
            help="Where the caches are.  [default: below p2pdist/caches in XDG_CACHE_HOME or ~/.cache]",
        ),
        click.argument("namespace"),
    ):
        function = option(function)
    return function


@click.group("cache")
def command() -> None:
    """Bring what one host has compiled to all hosts like it: the caches of Triton, torch.compile,
    vLLM, numba and the CUDA driver.

    A cache is a package NAMESPACE/KEY. The key follows from processor, GPU, driver, Python and the
    versions of the compilers. What is in a cache is executed: name a namespace that only hosts you
    trust may push to.

    \b
    Example:
      p2pdist cache save cache --origin s3://packages/prod
      p2pdist run --cache cache team/trainer:v3
    """


@command.command("key")
@_key_options
@output.json_option
def key(namespace: str, directory: Path | None, python: str, as_json: bool) -> None:
    """Print which package has the cache for this host.

    \b
    Example:
      p2pdist cache key cache --python /srv/venv/bin/python
    """
    found = cache_key(namespace, python)
    if as_json:
        output.print_json(_described(found, directory or default_directory(found)))
        return
    click.echo(str(found.reference))
    for name, value in found.facts.items():
        output.line(f"{name}: {value}")


@command.command("save")
@_key_options
@layout_option
@origin_option
@encrypt_option()
@output.json_option
def save(
    namespace: str,
    directory: Path | None,
    python: str,
    layout: Path,
    origin: str | None,
    encrypt_to: str | None,
    as_json: bool,
) -> None:
    """Push the caches of this host to the origin.

    \b
    Example:
      p2pdist cache save cache --origin s3://packages/prod
    """
    from p2pdist.cli.verbs.push import push_to
    from p2pdist.package.layers import Layer, PackOptions, pack_layers
    from p2pdist.package.source.scan import source_directory

    found = cache_key(namespace, python)
    place = directory or default_directory(found)
    files, size = _measure(place)
    source = source_directory(place)

    async def work(progress: output.Progress) -> tuple[str, int]:
        async with opened_layout(layout) as local, required_origin(origin) as central:
            layers = [Layer(source, "tree", ignore=_is_other, warn=False)]
            options = PackOptions(world_readable=True)
            await pack_layers(layers, found.reference, local, options, origin=central, on_progress=progress)
            pushed = await push_to(found.reference, local, central, encrypt_to, progress)
            return pushed.digest, pushed.bytes_sent

    with output.Progress(quiet=as_json) as progress:
        digest, sent = asyncio.run(work(progress))
    if as_json:
        counted = {"digest": digest, "files": files, "bytes_total": size, "bytes_sent": sent}
        output.print_json({**_described(found, place), **counted})
        return
    click.echo(f"{found.reference}  {digest}")
    click.echo(f"{output.counted(files, 'file')}, {output.amount(size)}, {output.amount(sent)} sent")


@command.command("restore")
@_key_options
@socket_option
@output.json_option
def restore_command(namespace: str, directory: Path | None, python: str, socket: Path, as_json: bool) -> None:
    """Bring the caches for this host through its agent, and print the environment variables that
    lead programs to them. Where there are none yet, the directories are empty.

    \b
    Example:
      eval "$(p2pdist cache restore cache)"
    """
    from p2pdist.agent.api.client import LocalClient

    found = cache_key(namespace, python)
    place = (directory or default_directory(found)).absolute()
    done = restore(found, place, LocalClient(socket), quiet=as_json)
    if as_json:
        output.print_json(
            {**_described(found, place), "found": done.found, "files": done.files, "bytes_total": done.size}
        )
        return
    if not done.found:
        output.line(f"there is no {found.reference} yet")
    for name, value in found.variables(place).items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _described(key: CacheKey, directory: Path) -> dict[str, Any]:
    return {
        "reference": str(key.reference),
        "key": key.digits,
        "facts": dict(key.facts),
        "directory": str(directory),
        "env": key.variables(directory),
    }


def _is_other(path: bytes, _is_directory: bool) -> bool:
    """Whether an entry of the directory is none of its caches."""
    return path.partition(b"/")[0].decode(errors="replace") not in VARIABLES.values()


def _measure(directory: Path) -> tuple[int, int]:
    """Files and bytes of the caches. Raises NotFound where there is nothing to be saved,
    TooLarge."""
    files = size = 0
    for part in VARIABLES.values():
        for above, _, names in os.walk(directory / part):
            files += len(names)
            size += sum(os.lstat(os.path.join(above, name)).st_size for name in names)
    if not files:
        raise NotFound(
            f"there is no cache in {directory}", remedy="Run the program first, with the variables of cache restore"
        )
    if files > FILES_MAX or size > BYTES_MAX:
        raise TooLarge(
            f"{directory} has {files} files of {size} bytes", remedy=f"Keep it below {FILES_MAX} and {BYTES_MAX}"
        )
    return files, size
