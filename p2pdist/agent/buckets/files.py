"""The files that a package shows, as the objects of a bucket.

Layers are put together as an overlay shows them: what a layer has hides what is below it, whiteouts
and opaque directories hide it without having anything. A hard link is an object of its own. A
symbolic link is the file that it leads to within the package, by what its target says; one that
leads nowhere, outside or through another link of a directory is left out, and so is a name that is
no key: not UTF-8, or over KEY_BYTES_MAX bytes.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Mapping, Sequence

from p2pdist.gateway.s3.contract import ObjectInfo
from p2pdist.gateway.s3.names import KEY_BYTES_MAX
from p2pdist.model.errors import TooLarge
from p2pdist.model.tree import Directory, Entry, File, HardLink, Symlink

OBJECTS_MAX = 1_000_000
LINKS_MAX = 8
"""Symbolic links that are followed one after the other."""

logger = logging.getLogger(__name__)


class PackageFiles:
    """The objects of one version of a package."""

    def __init__(self, files: Mapping[bytes, File]) -> None:
        self._files = files
        self.keys: Sequence[bytes] = sorted(files)

    def describe(self, key: bytes) -> ObjectInfo | None:
        """What is known of an object: its tag is the BLAKE3 of its content."""
        file = self._files.get(key)
        return ObjectInfo(file.size, file.content.hex(), file.mtime_ns / 1e9) if file is not None else None

    def file(self, key: bytes) -> File:
        """The file of an object that is there."""
        return self._files[key]


def files_of(layers: Sequence[Sequence[Entry]], name: str) -> dict[bytes, File]:
    """The files that a package of these layers, bottom to top, shows, by key; `name` is for the
    log. Raises TooLarge. In a thread."""
    files: dict[bytes, File] = {}
    links: dict[bytes, bytes] = {}
    for number, layer in enumerate(layers):
        if number:
            _hide(files, links, layer)
        own: dict[bytes, File] = {}
        for entry in layer:
            if type(entry) is File:
                own[entry.path] = entry
            elif type(entry) is HardLink and entry.target in own:
                own[entry.path] = own[entry.target]
            elif type(entry) is Symlink:
                links[entry.path] = entry.target
        files.update(own)
    led = {path: file for path in links if (file := _target(path, files, links)) is not None}
    shown = {path: file for path, file in (files | led).items() if _is_key(path)}
    if left := len(files) + len(links) - len(shown):
        logger.warning("%d files and links of %s are no objects: their names or targets are none", left, name)
    if len(shown) > OBJECTS_MAX:
        raise TooLarge(f"{name} has {len(shown)} files, over the limit of {OBJECTS_MAX} of a bucket")
    return shown


def _hide(files: dict[bytes, File], links: dict[bytes, bytes], layer: Sequence[Entry]) -> None:
    """Take out of what lower layers show what a layer hides."""
    replaced = {entry.path for entry in layer}
    """Whatever is below is another entry, or none."""
    emptied = {entry.path for entry in layer if type(entry) is not Directory or entry.opaque}
    for shown in (files, links):
        for path in [path for path in shown if path in replaced or _is_below(path, emptied)]:
            del shown[path]


def _is_below(path: bytes, directories: set[bytes]) -> bool:
    while (path := path.rpartition(b"/")[0]) and directories:
        if path in directories:
            return True
    return False


def _target(path: bytes, files: Mapping[bytes, File], links: Mapping[bytes, bytes]) -> File | None:
    """The file that a symbolic link leads to within the package."""
    for _ in range(LINKS_MAX):
        target = links[path]
        if target.startswith(b"/"):
            return None
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if path in files:
            return files[path]
        if path not in links:
            return None
    return None


def _is_key(path: bytes) -> bool:
    try:
        path.decode()
    except UnicodeDecodeError:
        return False
    return len(path) <= KEY_BYTES_MAX
