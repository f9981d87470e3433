"""The layers of a package as they are handed over to be mounted, and what must hold of a tree
before it is.

The kernel checks nothing of what a tree refers to: an object that is missing or of another size
shows at the first read, as an error or as other bytes than the tree states. So all of them are
looked at beforehand, by one stat each. What is in them was verified when they came into the store.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pdist.model.errors import Corrupt
from p2pdist.model.tree import Entry, File
from p2pdist.mount.erofs.writer import ContentName, is_image, object_name, write_image

_REMEDY = "Run p2pdist verify, which fetches again what is wrong"
_writing = threading.Lock()
"""Two threads may mount the same tree, and write_image is for one at a time; it computes, so
together they would not be faster."""


@dataclass(frozen=True, slots=True)
class SquashfsLayer:
    """An image whose bytes have been verified."""

    path: Path


@dataclass(frozen=True, slots=True)
class TreeLayer:
    """A tree whose contents lie below the directory `objects`, each where `name` says. `entries`
    returns its entries in walking order, checked (`check_entries`); it is called when they are
    needed. `image` is the place of its EROFS image, which is made when it is missing; several
    layers may have the same objects. `variants` is told how many bytes variants of objects take at
    most (see variants.py), and returns the directory to keep them in, on the filesystem of the
    objects, or None to keep none."""

    entries: Callable[[], Sequence[Entry]]
    image: Path
    objects: Path
    variants: Callable[[int], Path | None] | None = None
    name: ContentName = object_name


Layer = SquashfsLayer | TreeLayer


def wrong_object(entry: File, what: str) -> Corrupt:
    """The failure of a tree whose object is not there as stated; `what` says what is."""
    shown = entry.path[:200].decode("utf-8", "backslashreplace")
    content = entry.content.hex()
    return Corrupt(f"the object {content} of the file {shown!r} {what}", remedy=_REMEDY, object=content)


def check_object(entry: File, objects: int, name: bytes = b"") -> os.stat_result:
    """Raises Corrupt unless the object of a file with content, below the descriptor `objects`, is a
    regular file of the stated size. Give its `name` where that is known."""
    try:
        found = os.stat(name or object_name(entry.content), dir_fd=objects, follow_symlinks=False)
    except FileNotFoundError:
        raise wrong_object(entry, "is missing") from None
    if found.st_size != entry.size or not stat.S_ISREG(found.st_mode):
        raise wrong_object(entry, f"has {found.st_size} bytes, not {entry.size}")
    return found


def check_objects(entries: Sequence[Entry], objects: Path, named: ContentName = object_name) -> dict[bytes, int]:
    """Check the objects of all files with content, each once, where `named` says. Returns the bytes
    that each takes on the disk. Raises Corrupt."""
    files: dict[bytes, File] = {}
    for entry in entries:
        if type(entry) is File and entry.size and files.setdefault(entry.content, entry).size != entry.size:
            raise wrong_object(entry, f"is stated with {entry.size} bytes and with {files[entry.content].size}")
    stored: dict[bytes, int] = {}
    below = os.open(objects, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for content, entry in files.items():
            # As check_object does, which says what is wrong; a call for each of 200,000 files would
            # be felt.
            try:
                found = os.stat(named(content), dir_fd=below, follow_symlinks=False)
            except FileNotFoundError:
                found = check_object(entry, below, named(content))
            if found.st_size != entry.size or not stat.S_ISREG(found.st_mode):
                check_object(entry, below, named(content))
            stored[content] = 512 * found.st_blocks
    finally:
        os.close(below)
    return stored


def prepare(layer: TreeLayer, *, checked: bool) -> None:
    """See that the layer's image is there, and all its objects unless the caller has `checked`
    them. Raises Corrupt or OSError."""
    present = is_image(layer.image)
    if present and checked:
        return
    entries = layer.entries()
    if not checked:
        check_objects(entries, layer.objects, layer.name)
    make_image(layer.image, lambda: write_image(entries, layer.image, name=layer.name))


def make_image(image: Path, write: Callable[[], object]) -> None:
    """Have an image written, unless it is there. Raises what `write` raises."""
    with _writing:
        if not is_image(image):
            write()
