"""A package as plain files, which needs no right to mount: squashfs layers unpacked, trees written,
one over the other.

Trying a method with one object shows whether it works: file systems, and the owner of the objects,
decide. Hard links are made only where they are asked for.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from p2pdist.model.errors import DiskFull, P2PDistError
from p2pdist.model.tree import Directory, Entry, File, HardLink
from p2pdist.mount import kernel
from p2pdist.mount.erofs.writer import ContentName, object_name
from p2pdist.mount.files.tree import Given, TreeWriter, finish
from p2pdist.mount.files.unsquashfs import Listing, list_layers, unpack
from p2pdist.mount.files.variants import VariantSource, varied
from p2pdist.mount.layers import TreeLayer, check_object, check_objects
from p2pdist.mount.squashfs import Image

METHODS = ("reflink", "hardlink", "copy")
"""Methods to give the files of trees."""

_UNASKED = ("reflink", "copy")
"""Methods that are chosen without being asked for, best first. A hard link is the store's own file:
root, and the owner of the store after a chmod, can write through it into every package that has the
content."""


@dataclass(frozen=True, slots=True)
class Materialized:
    """The files of a package, written."""

    path: Path
    """Holds the merged files."""
    method: str
    """By which the files of trees were given; unpack when there are no trees."""
    note: str
    """What that means, and why there was no better method."""
    linked: Mapping[bytes, bytes] | None = None
    """Where files of the store were linked: the entries that are hard links in the package, by
    path, with what they link to. Other files with one inode only have equal contents. None where
    files have one inode just when the package says so."""


@dataclass(slots=True)
class _Tree:
    """A tree layer with its entries; `stored` are the bytes that each content takes on the disk,
    once they have been looked at."""

    entries: Sequence[Entry]
    objects: Path
    variants: Callable[[int], Path | None] | None = None
    name: ContentName = object_name
    stored: dict[bytes, int] = field(default_factory=dict)

    def files(self) -> Iterator[File]:
        """The files with content."""
        return (entry for entry in self.entries if type(entry) is File and entry.size)

    def check(self) -> None:
        self.stored = self.stored or check_objects(self.entries, self.objects, self.name)

    @contextmanager
    def variant_source(self, method: str) -> Iterator[VariantSource | None]:
        """The variants that files are linked to, if there are to be any."""
        found = (
            varied(self.entries, root=os.geteuid() == 0) if method == "hardlink" and self.variants is not None else None
        )
        place = self.variants(found.bytes_max) if found and found.contents and self.variants is not None else None
        if found is None or place is None:
            yield None
            return
        directory = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield VariantSource(directory, found.contents)
        finally:
            os.close(directory)


def materialize(
    layers: Sequence[Image | TreeLayer],
    staging: Path,
    *,
    writable: bool,
    method: str | None = None,
    checked: bool = False,
    private: bool = False,
) -> Materialized:
    """Write `layers`, bottom to top, below the empty directory `staging`.

    `method` is the only one to try. Hard links are made only when it says so or the files are
    `private`, seen by the caller alone; and never where files are to be written to. Unless the
    caller has `checked` the objects of the trees, they are checked before anything is written.
    Raises Corrupt, DiskFull, P2PDistError or OSError.
    """
    loaded = [
        _Tree(layer.entries(), layer.objects, layer.variants, layer.name) if isinstance(layer, TreeLayer) else layer
        for layer in layers
    ]
    trees = [layer for layer in loaded if isinstance(layer, _Tree)]
    if not checked:
        for tree in trees:
            tree.check()
    methods = (method,) if method else METHODS if private else _UNASKED
    forced = method is not None or writable
    method, reasons = _choose(trees, staging, methods, writable) if trees else ("unpack", [])
    images = [layer for layer in loaded if isinstance(layer, Image)]
    listings = list_layers(images, lowest=images[0] if images and loaded[0] is images[0] else None) if images else []
    needed = sum(listing.size for listing in listings)
    if method == "copy":
        for tree in trees:
            tree.check()
            needed += sum(tree.stored[file.content] for file in tree.files())
    if needed > (free := shutil.disk_usage(staging).free):
        raise DiskFull(str(staging), needed=needed, free=free)
    try:
        given = _write(loaded, listings, staging, method)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull.on(str(staging), os.statvfs(staging), needed=needed, code=error.errno) from error
        raise
    linked = _linked(trees) if method == "hardlink" else None
    return Materialized(staging / "merged", method, "; ".join([*reasons, _note(method, given, forced=forced)]), linked)


def _linked(trees: Sequence[_Tree]) -> dict[bytes, bytes]:
    """The hard links of trees, one over the other, and what they link to."""
    linked: dict[bytes, bytes] = {}
    for tree in trees:
        for entry in tree.entries:
            if type(entry) is HardLink:
                linked[entry.path] = entry.target
            else:
                linked.pop(entry.path, None)
    return linked


def _write(layers: Sequence[Image | _Tree], listings: Sequence[Listing], staging: Path, method: str) -> Given:
    given = Given()
    directories: list[Directory] = []
    remaining = iter(listings)
    # Where many files were removed a moment ago, as when a package was mounted before, making
    # others is slow (recently_deleted in Linux, fs/ext4/ialloc.c): so the tree is placed elsewhere.
    kernel.spread_below(staging)
    merged = staging / "merged"
    merged.mkdir(mode=0o700)
    top = os.open(merged, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for layer in layers:
            if isinstance(layer, Image):
                directories += unpack(layer, next(remaining), staging / "layer", merged)
                continue
            objects = os.open(layer.objects, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with layer.variant_source(method) as kept:
                    directories += TreeWriter(top, objects, method, given, kept, layer.name).write(layer.entries)
            finally:
                os.close(objects)
        finish(top, directories)
    finally:
        os.close(top)
    return given


def _note(method: str, given: Given, *, forced: bool) -> str:
    if method == "reflink":
        return "files of one's own that share their blocks with the store"
    if method != "hardlink":
        note = "a private copy of the files"
        return note if forced or method == "unpack" else f"{note} (hard links take no space and must be asked for)"
    note = f"{given.files - given.copied} of {given.files} files are those of the store"
    if os.geteuid() != 0:
        note += ", without permission to write to them"
    if given.copied:
        note += f", {given.copied} are copies since mode, time or attributes differ"
    return note if os.geteuid() != 0 else f"{note}; root can write through them into the store"


def _choose(trees: Sequence[_Tree], staging: Path, methods: Sequence[str], writable: bool) -> tuple[str, list[str]]:
    """The first of `methods` that works for all trees, and why those before it do not work."""
    reasons: list[str] = []
    for method in methods:
        reason = "the files may be written to" if method == "hardlink" and writable else _try(method, trees, staging)
        if not reason:
            return method, reasons
        reasons.append(f"no {method} ({reason})")
    raise P2PDistError(
        f"the package cannot be shown by {methods[-1]}: {reasons[-1]}",
        remedy="Let the best way be chosen, or see that store and target are on one file system that can do it",
    )


def _try(method: str, trees: Sequence[_Tree], staging: Path) -> str:
    """Why a method does not work, or "" when it does for one object of each tree."""
    for tree in trees:
        file = next(tree.files(), None)
        if file is None or method == "copy":
            continue
        objects = os.open(tree.objects, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            owner = check_object(file, objects, tree.name(file.content)).st_uid
            if method == "hardlink" and tree.name is not object_name:
                return "blobs of the store are not linked"
            if method == "hardlink" and os.geteuid() not in (0, owner):
                return "the objects belong to another user"
            _probe(method, tree.objects / os.fsdecode(tree.name(file.content)), staging / "probe")
        except OSError as error:
            return error.strerror or str(error)
        finally:
            os.close(objects)
    return ""


def _probe(method: str, source: Path, probe: Path) -> None:
    try:
        if method == "hardlink":
            probe.hardlink_to(source)
        else:
            with source.open("rb") as shared, probe.open("wb") as file:
                fcntl.ioctl(file, kernel.FICLONE, shared.fileno())
    finally:
        probe.unlink(missing_ok=True)
