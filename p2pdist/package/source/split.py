"""Splits a virtual environment into layers: third-party distributions below, first-party code on
top.

The lower layer stays the same while only first-party code changes, so a host that has it fetches
the upper one alone. The lower layer gets the files in the RECORD of a distribution
(packaging.python.org, "Recording installed projects") and the environment's own files (interpreter
links, pyvenv.cfg, activation scripts). The upper layer gets all others: distributions installed
from a directory (editable ones, direct_url.json with dir_info), distributions named as first-party,
and files in no RECORD. Compiled files of the lower layer that are in no RECORD get a layer between
the two: an interpreter writes them at the first import, which must neither change the lower layer
nor add to the upper one at each edit.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from p2pdist.files import NotRegular, read_content
from p2pdist.model.errors import TooLarge, UsageError, printable
from p2pdist.package.source.ignore import Ignore
from p2pdist.package.source.scan import unreadable, with_parents
from p2pdist.package.source.stages import walk

METADATA_BYTES_MAX = 64 << 20
SITE_NAMES = (b"site-packages", b"dist-packages")
_INFO = re.compile(rb"([^/]+?)(?:-[^/-]+)?\.dist-info\Z")


@dataclass(frozen=True, slots=True)
class Distribution:
    """`name` as it is compared (PEP 503); `info` its .dist-info directory; `files` what RECORD
    lists, None without one; `local`: it was installed from a directory, as an editable one is.
    Paths are relative to the source."""

    name: str
    info: bytes
    files: frozenset[bytes] | None
    local: bool


def normal_name(name: str) -> str:
    """PEP 503: how names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def site_directories(source: Path, environment: bytes) -> list[bytes]:
    """The site-packages directories of the virtual environment at `environment` (b"" is `source`
    itself), relative to `source`."""
    directories = []
    library = os.path.join(environment, b"lib")
    for name in _names(source, library):
        site = os.path.join(library, name, b"site-packages")
        if name.startswith(b"python") and os.path.isdir(os.path.join(os.fsencode(source), site)):
            directories.append(site)
    return directories


def distributions(source: Path, site: bytes) -> Iterator[Distribution]:
    """The distributions installed in the directory `site` of `source`, by name. Raises TooLarge,
    and P2PDistError naming what cannot be read."""
    for name in _names(source, site):
        if match := _INFO.match(name):
            info = os.path.join(site, name)
            yield Distribution(
                normal_name(os.fsdecode(match[1])), info, _record(source, site, info), _is_local(source, info)
            )


def _names(source: Path, directory: bytes) -> list[bytes]:
    try:
        return sorted(os.listdir(os.path.join(os.fsencode(source), directory)))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _record(source: Path, site: bytes, info: bytes) -> frozenset[bytes] | None:
    file = os.path.join(info, b"RECORD")
    data = _read(source, file)
    if data is None:
        return None
    paths = set()
    try:
        for row in csv.reader(os.fsdecode(data).splitlines()):
            path = os.path.normpath(os.path.join(site, os.fsencode(row[0]))) if row else b""
            if path and not path.startswith((b"/", b"../")) and b"\0" not in path:
                paths.add(path)
    except csv.Error as error:
        raise UsageError(
            f"{printable(str(source / os.fsdecode(file)))} is no list of files: {error}",
            remedy="Install that distribution anew",
        ) from error
    return frozenset(paths)


def _is_local(source: Path, info: bytes) -> bool:
    """Whether direct_url.json (PEP 610) names a directory."""
    data = _read(source, os.path.join(info, b"direct_url.json"))
    try:
        origin = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return False
    return isinstance(origin, dict) and "dir_info" in origin


def _read(source: Path, path: bytes) -> bytes | None:
    """None where there is no such file, or something else in its place."""
    full = os.path.join(os.fsencode(source), path)
    try:
        data = read_content(full, METADATA_BYTES_MAX).data
    except (FileNotFoundError, NotADirectoryError, NotRegular):
        return None
    except OSError as error:
        raise unreadable(os.fsdecode(full), error) from error
    if len(data) > METADATA_BYTES_MAX:
        raise TooLarge(
            f"{source / os.fsdecode(path)} is over {METADATA_BYTES_MAX} bytes", remedy="Install that distribution anew"
        )
    return data


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
        distribution
        for place in environments
        for site in site_directories(source, place)
        for distribution in distributions(source, site)
    ]
    named = {normal_name(name) for name in first_party}
    if unknown := named - {distribution.name for distribution in installed}:
        raise UsageError(
            f"{', '.join(sorted(unknown))} is not installed in {source}",
            remedy="Check the names given with --first-party",
        )
    ours = [
        distribution
        for distribution in installed
        if distribution.local or distribution.name in named or distribution.files is None
    ]
    theirs = [distribution for distribution in installed if distribution not in ours]
    return Split(
        *_divide(source, environments, ours, theirs, ignore),
        tuple(sorted(distribution.name for distribution in theirs)),
        tuple(sorted(distribution.name for distribution in ours)),
        tuple(
            f"{distribution.name} has no RECORD and goes to the upper layer"
            for distribution in ours
            if distribution.files is None
        ),
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
    source: Path, environments: list[bytes], ours: list[Distribution], theirs: list[Distribution], ignore: Ignore | None
) -> tuple[frozenset[bytes], frozenset[bytes], frozenset[bytes]]:
    """What goes to the lower layer, to that of compiled files, and to the upper one."""
    listed = {path for distribution in theirs for path in distribution.files or ()} - {
        path for distribution in ours for path in distribution.files or ()
    }
    infos = {distribution.info for distribution in theirs}

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
    for entry in walk(source, ignore=ignore):
        if entry.is_directory and not any(_is_furniture(entry.path, place) for place in environments):
            directories.add(entry.path)
        else:
            layer = lower if is_lower(entry.path) else compiled if is_compiled(entry.path) else upper
            layer.add(entry.path)
    below, between, above = with_parents(lower), with_parents(compiled), with_parents(upper)
    # An empty directory belongs to no distribution.
    return below, between, above | with_parents(directories - below - between - above)


def _is_furniture(path: bytes, environment: bytes) -> bool:
    if environment:
        if not path.startswith(environment + b"/"):
            return False
        path = path[len(environment) + 1 :]
    return bool(_FURNITURE.match(path))
