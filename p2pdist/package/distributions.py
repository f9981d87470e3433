"""Installed Python distributions, as their metadata in site-packages tells (packaging.python.org,
"Recording installed projects")."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.errors import TooLarge
from p2pdist.package.regular import NotRegular, open_regular
from p2pdist.package.scan import unreadable

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
    found = []
    library = os.path.join(environment, b"lib")
    for name in _names(source, library):
        site = os.path.join(library, name, b"site-packages")
        if name.startswith(b"python") and os.path.isdir(os.path.join(os.fsencode(source), site)):
            found.append(site)
    return found


def distributions(source: Path, site: bytes) -> Iterator[Distribution]:
    """Those installed in the directory `site` of `source`, by name. Raises TooLarge, and
    P2PDistError naming what cannot be read."""
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
    data = _read(source, os.path.join(info, b"RECORD"))
    if data is None:
        return None
    found = set()
    for row in csv.reader(os.fsdecode(data).splitlines()):
        path = os.path.normpath(os.path.join(site, os.fsencode(row[0]))) if row else b""
        if path and not path.startswith((b"/", b"../")) and b"\0" not in path:
            found.add(path)
    return frozenset(found)


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
        with open_regular(full) as stream:
            data = stream.read(METADATA_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError, NotRegular):
        return None
    except OSError as error:
        raise unreadable(os.fsdecode(full), error.strerror or str(error)) from error
    if len(data) > METADATA_BYTES_MAX:
        raise TooLarge(f"{source / os.fsdecode(path)} is over {METADATA_BYTES_MAX} bytes")
    return data
