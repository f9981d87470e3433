"""Splitting a virtual environment into layers: third-party distributions below, one's own code on
top.

The lower layer stays the same while only one's own code changes, so hosts that have it fetch the
upper one alone. To the lower one go the files that the RECORD of a distribution lists and the
environment's own furniture (interpreter links, pyvenv.cfg, activation scripts). To the upper one
goes everything else: distributions installed from a directory (editable ones, direct_url.json with
dir_info), those named as first-party, and files that no distribution lists. What was compiled from
files of the lower layer and is in no RECORD gets a layer of its own between them: an interpreter
writes it when a module is first imported, and neither the lower layer may change by that nor the
upper one carry it with each edit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.errors import UsageError
from p2pdist.package.distributions import Distribution, distributions, normal_name, site_directories
from p2pdist.package.ignore import Ignore
from p2pdist.package.stage import walk, with_parents

_CACHED = re.compile(rb"(.*/|)__pycache__/([^/]+?)\.[^/]+\.pyc\Z", re.DOTALL)
_FURNITURE = re.compile(
    rb"(pyvenv\.cfg|\.gitignore|lib64|lib|include(/.*)?|bin|bin/(python[0-9.]*|[Aa]ctivate(\.[a-z0-9]+)?)|lib/python[0-9.]+)\Z",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Split:
    """What goes to each layer, directories included: paths relative to the source. Names of the
    distributions in each, and notes."""

    lower: frozenset[bytes]
    compiled: frozenset[bytes]
    upper: frozenset[bytes]
    third_party: tuple[str, ...]
    first_party: tuple[str, ...]
    notes: tuple[str, ...]


def split(source: Path, *, first_party: Collection[str] = (), ignore: Ignore | None = None) -> Split:
    """Divide `source`, which is a virtual environment or has some right in it. Raises UsageError
    when there is none, or when a name in `first_party` is not installed."""
    environments = list(_environments(source))
    if not environments:
        raise UsageError(
            f"{source} is no virtual environment and has none right in it: there is no pyvenv.cfg",
            remedy="Name a virtual environment, or leave --split away",
        )
    installed = [
        each
        for place in environments
        for site in site_directories(source, place)
        for each in distributions(source, site)
    ]
    named = {normal_name(name) for name in first_party}
    if unknown := named - {each.name for each in installed}:
        raise UsageError(
            f"{', '.join(sorted(unknown))} is not installed in {source}",
            remedy="Check the names given with --first-party",
        )
    ours = [each for each in installed if each.local or each.name in named or each.files is None]
    theirs = [each for each in installed if each not in ours]
    return Split(
        *_divide(source, environments, ours, theirs, ignore),
        tuple(sorted(each.name for each in theirs)),
        tuple(sorted(each.name for each in ours)),
        tuple(f"{each.name} has no RECORD and goes to the upper layer" for each in ours if each.files is None),
    )


def _environments(source: Path) -> Iterator[bytes]:
    if (source / "pyvenv.cfg").is_file():
        yield b""
        return
    with os.scandir(os.fsencode(source)) as entries:
        for entry in sorted(entries, key=lambda item: item.name):
            if entry.is_dir(follow_symlinks=False) and os.path.isfile(os.path.join(entry.path, b"pyvenv.cfg")):
                yield entry.name


def _divide(
    source: Path,
    environments: list[bytes],
    ours: list[Distribution],
    theirs: list[Distribution],
    ignore: Ignore | None,
) -> tuple[frozenset[bytes], frozenset[bytes], frozenset[bytes]]:
    """What goes to the lower layer, to that of compiled files, and to the upper one."""
    listed = {path for each in theirs for path in each.files or ()} - {
        path for each in ours for path in each.files or ()
    }
    infos = {each.info for each in theirs}

    def is_lower(path: bytes) -> bool:
        return (
            path in listed
            or os.path.dirname(path) in infos
            or any(_is_furniture(path, place) for place in environments)
        )

    def is_compiled(path: bytes) -> bool:
        cached = _CACHED.match(path)
        return bool(cached and cached[1] + cached[2] + b".py" in listed)

    lower: set[bytes] = set()
    compiled: set[bytes] = set()
    upper: set[bytes] = set()
    directories: set[bytes] = set()
    for found in walk(source, ignore=ignore):
        if found.is_directory and not any(_is_furniture(found.path, place) for place in environments):
            directories.add(found.path)
        else:
            layer = lower if is_lower(found.path) else compiled if is_compiled(found.path) else upper
            layer.add(found.path)
    below, between, above = with_parents(lower), with_parents(compiled), with_parents(upper)
    # A directory in which nothing lies is nobody's but ours.
    return below, between, above | with_parents(directories - below - between - above)


def _is_furniture(path: bytes, environment: bytes) -> bool:
    if environment:
        if not path.startswith(environment + b"/"):
            return False
        path = path[len(environment) + 1 :]
    return bool(_FURNITURE.match(path))
