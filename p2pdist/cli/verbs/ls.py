"""`p2pdist ls`: the packages on this host, in the local layout, or at an origin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from p2pdist.cli import output
from p2pdist.cli.services import (
    TORRENT_PREFIX,
    default_layout,
    elsewhere_options,
    opened_elsewhere,
    origin_option,
    require_no_origin,
    socket_option,
)
from p2pdist.model.errors import NotFound, P2PDistError, Unavailable, UsageError

READS_MAX = 8
"""Manifests that are read at a time for the sizes of packages."""

SORTS = ("name", "size", "date")


def _order(sort: str) -> Callable[[dict[str, Any]], Any]:
    """The key by which packages are listed: the largest, or those used or tagged last, first."""
    match sort:
        case "size":
            return lambda entry: -entry.get("size", 0)
        case "date":
            return lambda entry: -(entry.get("last_used") or entry.get("tagged") or 0.0)
        case _:
            return lambda entry: (_is_blob(entry), entry["reference"])


@click.command("ls")
@click.argument("pattern", required=False)
@elsewhere_options("List what is in")
@click.option("--local", is_flag=True, help="List what was packed here: the layout in the user's data directory.")
@click.option("--sort", type=click.Choice(SORTS), default="name", show_default=True, help="The largest or last first.")
@click.option("--blobs/--no-blobs", default=True, help="List single files as well  [default: list them].")
@origin_option
@socket_option
@output.quiet_options
@output.json_option
def command(
    pattern: str | None,
    at_origin: bool,
    layout: Path | None,
    local: bool,
    sort: str,
    blobs: bool,
    origin: str | None,
    socket: Path,
    as_json: bool,
) -> None:
    """List the packages in the store of this host's agent, then the blobs without a package: pulled
    by their digest, or of a former version of a tag. With a pattern such as 'team/*' list only what
    it matches. With -q print names alone.

    \b
    Example:
      p2pdist ls
      p2pdist ls 'team/*' --sort size
      p2pdist ls --local
      p2pdist ls --at-origin --origin file:///srv/packages
    """
    if local and at_origin:
        raise UsageError("--local and --at-origin name two places", remedy="Give one of them")
    if not at_origin:
        require_no_origin()
    if local and not layout:
        layout = default_layout()
    elsewhere = at_origin or layout is not None
    packages = asyncio.run(_elsewhere(at_origin, origin, layout)) if elsewhere else _here(socket)
    packages = [entry for entry in packages if _is_listed(entry, pattern, blobs)]
    packages.sort(key=lambda entry: entry["reference"])
    packages.sort(key=_order(sort))
    if as_json:
        output.print_json(packages)
        return
    tagged = {entry["digest"] for entry in packages if "@" not in entry["reference"]}
    if not (pattern or "").startswith(TORRENT_PREFIX):
        packages = [entry for entry in packages if not entry["reference"].startswith(TORRENT_PREFIX)]
    # A package that was asked for by its digest too is one package.
    packages = [entry for entry in packages if "@" not in entry["reference"] or entry["digest"] not in tagged]
    if output.is_quiet():
        for entry in packages:
            output.say(entry["reference"])
    elif packages:
        heads = ("PACKAGE", "DIGEST", "SIZE", "TAGGED" if elsewhere else "USED")
        output.table(heads, [_row(entry) for entry in packages], right=(2,))


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    name = entry.get("file") or _blob_digest(entry) or entry["reference"]
    size = output.amount(entry["size"]) if "size" in entry else "-"
    at = entry.get("last_used") or entry.get("tagged")
    ago = f"{output.age(time.time() - at)} ago" if at else "-"
    state = "" if entry.get("complete", True) else "  incomplete"
    pinned = "  pinned" if entry.get("pinned") else ""
    encrypted = "  encrypted" if entry.get("encrypted") else ""
    digest = f"sha256:{output.hexes(_blob_digest(entry) or entry['digest'])}"
    return name, digest, size, f"{ago}{state}{pinned}{encrypted}"


def _is_listed(entry: dict[str, Any], pattern: str | None, blobs: bool) -> bool:
    import fnmatch

    if _is_blob(entry) and not blobs:
        return False
    names = (entry["reference"], entry.get("file", ""))
    return pattern is None or any(fnmatch.fnmatchcase(name, pattern) for name in names if name)


def _is_blob(entry: dict[str, Any]) -> bool:
    """Whether it is a single file: in the store, or with its manifest at an origin."""
    return bool(_blob_digest(entry))


def _blob_digest(entry: dict[str, Any]) -> str:
    """The digest of a single file, by which blob pull takes it; empty for a package."""
    reference = str(entry["reference"])
    return reference.removeprefix("blob:").replace("-", ":", 1) if reference.startswith("blob:sha256-") else ""


def _here(socket: Path) -> list[dict[str, Any]]:
    from p2pdist.agent.api.client import LocalClient

    try:
        return LocalClient(socket).packages()
    except Unavailable as error:
        error.remedy += "; p2pdist ls --local lists what was packed here"
        raise


async def _elsewhere(at_origin: bool, origin: str | None, layout: Path | None) -> list[dict[str, Any]]:
    """The tags of a repository with the sizes of their packages, and when they were set where it
    says so."""
    from p2pdist.model.manifest import MANIFEST_BYTES_MAX, decode_manifest
    from p2pdist.origin.contract import Origin, Tagged

    slots = asyncio.Semaphore(READS_MAX)

    async def entry(tagged: Tagged, repository: Origin) -> dict[str, Any]:
        known: dict[str, Any] = {"reference": tagged.reference, "digest": tagged.descriptor.digest}
        if (created := _seconds(tagged.created)) is not None:
            known["tagged"] = created
        if tagged.title:
            known["file"] = tagged.title
        try:
            async with slots:
                data = await repository.read(tagged.descriptor.digest, limit=MANIFEST_BYTES_MAX)
            manifest = decode_manifest(data)
            known["size"] = sum(blob.size for blob in manifest.blobs)
            if manifest.encrypted:
                known["encrypted"] = True
        except P2PDistError:  # another tool's, or removed: its tag is listed all the same
            known["complete"] = False
        return known

    async with opened_elsewhere(at_origin, origin, layout) as repository:
        try:
            listed = await repository.listing()
        except NotFound:
            if layout is None:
                raise
            return []  # nothing was packed yet
        return list(await asyncio.gather(*(entry(tagged, repository) for tagged in listed)))


def _seconds(text: str) -> float | None:
    """Seconds since the epoch of a time as RFC 3339 writes it; None for anything else."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
