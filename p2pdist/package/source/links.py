"""Symbolic links of a source that do not lead to the same thing on a host: out of the package, or
to nothing.

A relative link that climbs out of the package shows what lies beside the place where a host shows
it. An absolute one leads to this machine's path, which only directories of the operating system are
sure to share. A package has links as they are; what is followed instead is a file that the user
asked for (`--follow-links`), and the files of a Hugging Face snapshot, which are links to the blobs
of its cache (huggingface.co/docs/huggingface_hub, "Understand caching"). No other link is followed
unasked: the source may be a checkout of an untrusted repository, and the link lead to a secret.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.errors import UsageError, printable
from p2pdist.package.source.scan import Link, changed

OUT = "leads out of the package"
NOWHERE = "leads nowhere"
FOLLOWED = "leads to a file that is packed in its place"
_SYSTEM = {
    b"bin",
    b"dev",
    b"etc",
    b"lib",
    b"lib32",
    b"lib64",
    b"libx32",
    b"opt",
    b"proc",
    b"run",
    b"sbin",
    b"sys",
    b"usr",
}
"""Directories that hosts have of their own (Filesystem Hierarchy Standard 3.0)."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A file that is packed in the place of a link: where it is, and its stat(2)."""

    path: bytes
    status: os.stat_result


def strange_links(source: Path, paths: Iterable[bytes], *, target: str = "", whole: bool = True) -> list[Link]:
    """Which of the links `paths` of the directory `source`, shown below `target` of the package,
    lead out of the package, or, if the package is the `whole` of what a host will see, nowhere.
    Raises Corrupt when one vanishes."""
    top, prefix = os.fsencode(source), os.fsencode(target)
    strange = []
    for path in paths:
        full = os.path.join(top, path)
        try:
            text = os.readlink(full)
        except OSError as error:
            raise changed(full) from error
        what = OUT if _leads_out(text, os.path.join(prefix, path)) else NOWHERE
        if what == OUT or (
            whole and not _leads_out(text, path) and not text.startswith(b"/") and not os.path.exists(full)
        ):
            strange.append(Link(os.fsdecode(path), os.fsdecode(text), what))
    return strange


def _leads_out(text: bytes, path: bytes) -> bool:
    if text.startswith(b"/"):
        return os.path.normpath(text).split(b"/")[1] not in _SYSTEM
    return os.path.normpath(os.path.join(os.path.dirname(path), text)).split(b"/")[0] == b".."


def followed_links(
    source: Path, paths: Iterable[bytes], *, target: str = "", all_links: bool = False
) -> dict[bytes, Followed]:
    """The files to pack instead of links of `source`: with `all_links` for each link out of the
    package, otherwise for links of a Hugging Face snapshot to the blobs beside it. Raises
    UsageError, with `all_links`, naming a link that leads to no regular file."""
    blobs = snapshot_blobs(source)
    targets = {}
    for link in strange_links(source, paths, target=target, whole=False):
        full = os.path.join(os.fsencode(source), os.fsencode(link.path))
        real = os.path.realpath(full)
        status = _status(real)
        if status is not None and stat.S_ISREG(status.st_mode):
            if all_links or (blobs is not None and real.startswith(blobs + b"/")):
                targets[os.fsencode(link.path)] = Followed(real, status)
        elif all_links:
            kind = "nothing" if status is None else "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise UsageError(
                f"the link {printable(link.path)} -> {printable(link.target)} leads to {kind} and cannot be followed",
                remedy="Leave it out with --ignore, or put the directory there as a layer of p2pdist.toml",
            )
    return targets


def snapshot_blobs(source: Path) -> bytes | None:
    """The directory of blobs of the cache that `source` is a Hugging Face snapshot of, None where
    it is none."""
    blobs = source.parent.parent / "blobs"
    return (
        os.fsencode(blobs) if source.parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink() else None
    )


def _status(path: bytes) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
