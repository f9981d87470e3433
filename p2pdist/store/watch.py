"""Notices when files of a store are written to, moved or removed (inotify(7)).

A file that is written to in place has another content under its old name, and to find that by
stat(2) takes a call for each file: 0.1 s for a package of 43,000. The kernel says it for nothing.
It does not say what happens while the store is closed, what happens below the file system, and what
is written through a hard link elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.model.digest import Digest, is_digest
from p2pdist.model.tree import HASH_SIZE

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 16

_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _IGNORED, _ONLYDIR = 0x4000, 0x8000, 0x0100_0000
_INIT_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_HEAD = struct.Struct("=iIII")
_OF_OBJECTS = _MODIFY | _DELETE | _MOVED_FROM | _MOVED_TO
_OF_IMAGES = _MODIFY | _CREATE | _MOVED_FROM | _MOVED_TO
_DRAFT = ".partial"
"""The agent writes an image in its directory under a name that ends so, and renames it when it is
whole."""

MOVES_MAX = 64
_BLOBS, _IMAGES, _OBJECTS = "blobs", "images", "objects"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Changes:
    """What was changed by name."""

    blobs: set[Digest] = field(default_factory=set)
    images: set[Digest] = field(default_factory=set)
    """The roots of trees whose metadata image was changed."""
    contents: set[bytes] = field(default_factory=set)
    unknown: bool = False
    """More may have changed than what is named: the kernel dropped events, or cannot watch."""


class Watch:
    """Watches complete blobs, objects and metadata images of one store. Used by one thread at a
    time. Writing a new object by its name, as on Btrfs, counts as a change."""

    def __init__(self, blobs: Path, images: Path, objects: Path) -> None:
        """Begin to watch what is there. `add` says of each further directory of objects."""
        self._objects = objects
        self._directories: dict[int, str] = {}
        """By watch descriptor: _BLOBS, _IMAGES, _OBJECTS, or the two digits of a directory of
        objects."""
        self._moves: dict[int, str] = {}
        """By the number of a renaming: the name that an image had before it."""
        self.works = False
        """Whether the kernel tells of changes; else every call of `changes` says `unknown`."""
        self._fd = _libc.inotify_init1(_INIT_FLAGS)
        if self._fd < 0:
            self._give_up(ctypes.get_errno())
            return
        try:
            self._add(blobs, _MODIFY, _BLOBS)
            self._add(images, _OF_IMAGES, _IMAGES)
            self._add(objects, _CREATE | _MOVED_TO, _OBJECTS)
            for prefix in filter(_is_prefix, os.listdir(objects)):
                self._add(objects / prefix, _OF_OBJECTS, prefix)
        except OSError as error:
            self._give_up(error.errno or errno.EIO)
        else:
            self.works = True

    def changes(self) -> Changes:
        """What was changed since the last call. Returns at once and waits for no disk."""
        found = Changes(unknown=not self.works)
        while self.works:
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                break
            for watch, mask, number, name in _events(data):
                self._note(found, watch, mask, number, name)
        return found

    def add(self, prefix: str) -> None:
        """Watch a new directory of objects, in which nothing is yet that counts."""
        if self.works:
            self._add_objects(prefix)

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        self.works = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _note(self, found: Changes, watch: int, mask: int, number: int, name: str) -> None:
        directory = self._directories.get(watch, "")
        if mask & _OVERFLOW:
            found.unknown = True
        elif mask & _IGNORED:
            self._directories.pop(watch, None)
            if len(directory) == 2:  # a directory of objects is gone, with all that was in it
                found.unknown = True
                self._add_objects(directory)
        elif directory == _OBJECTS:
            if name not in self._directories.values():  # the store says of those that it makes
                found.unknown = True
                self._add_objects(name)
        elif directory == _IMAGES:
            self._note_image(found, mask, number, name)
        elif directory == _BLOBS:
            if is_digest(digest := f"sha256:{name}"):
                found.blobs.add(Digest(digest))
        elif len(name) == 2 * HASH_SIZE - 2:
            with suppress(ValueError):  # no object's name
                found.contents.add(bytes.fromhex(directory + name))

    def _note_image(self, found: Changes, mask: int, number: int, name: str) -> None:
        """An image that comes to its name in another way than the agent's own was changed."""
        if mask & _MOVED_FROM:
            self._moves[number] = name
            if len(self._moves) > MOVES_MAX:
                del self._moves[next(iter(self._moves))]
            return
        made_here = mask & _MOVED_TO and self._moves.pop(number, "").endswith(_DRAFT)
        if not made_here and is_digest(digest := f"sha256:{name}"):
            found.images.add(Digest(digest))

    def _add_objects(self, prefix: str) -> None:
        """Watch a directory of objects, if it is one and is there."""
        if _is_prefix(prefix):
            try:
                self._add(self._objects / prefix, _OF_OBJECTS, prefix)
            except (FileNotFoundError, NotADirectoryError):
                pass  # the store says when it makes it
            except OSError as error:
                self._give_up(error.errno or errno.EIO)

    def _add(self, path: Path, mask: int, directory: str) -> None:
        watch = _libc.inotify_add_watch(self._fd, os.fsencode(path), ctypes.c_uint32(mask | _ONLYDIR))
        if watch < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(path))
        self._directories[watch] = directory

    def _give_up(self, code: int) -> None:
        logger.warning(
            "changes to files of the store cannot be watched (%s), so mounting a tree looks at each of its files; "
            "raise fs.inotify.max_user_watches or fs.inotify.max_user_instances",
            os.strerror(code),
        )
        self.close()


def _is_prefix(name: str) -> bool:
    """Whether a directory of objects is called so."""
    return len(name) == 2 and not set(name) - set("0123456789abcdef")


def _events(data: bytes) -> Iterator[tuple[int, int, int, str]]:
    """Watch descriptor, mask, number of the renaming and name of each event."""
    at = 0
    while at < len(data):
        watch, mask, number, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size + length
        yield watch, mask, number, os.fsdecode(data[at - length : at].rstrip(b"\0"))
