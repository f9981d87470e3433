"""Variants: what hard links are made to where an object cannot be linked.

An object has one mode and one time. Files of one content often differ in these: an environment has
the same stub or table a hundred times, each with the moment at which it was installed. All but one
would be copied each time the tree is mounted, which takes longer than links, and on ext4 without a
journal much longer still after many files were removed (recently_deleted in Linux,
fs/ext4/ialloc.c). So the copies that are made when a tree is mounted for
the first time are kept with it, beside the objects, and are linked from then on. Of such a content
all files are variants, and none of them is the object.

They are made where they are kept, so they have nothing of the directory at which the tree is
mounted first, such as its group or its ACL.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from p2pdist.model.tree import Entry, File, variant_bytes


@dataclass(frozen=True, slots=True)
class VariantSource:
    """Where variants are kept, and for which contents."""

    directory: int
    """A descriptor."""
    contents: Collection[bytes]


@dataclass(frozen=True, slots=True)
class Varied:
    """The contents of which a tree has files to be linked that look different, and how many bytes
    variants of them count at most."""

    contents: Collection[bytes]
    bytes_max: int


def linked_mode(entry: File, *, root: bool) -> int | None:
    """The mode that a file has when it is a link; None when it cannot be one: it has attributes,
    its owner, which serves it to others, cannot read it, or others may write to it. Without root no
    user may write to it."""
    mode = entry.mode if root else entry.mode & ~0o222
    return mode if mode & 0o422 == 0o400 and not entry.xattrs else None


def varied(entries: Iterable[Entry], *, root: bool) -> Varied:
    """The contents of which variants are to be kept."""
    first: dict[bytes, File] = {}
    looks: dict[bytes, set[tuple[int, int]]] = {}
    for entry in entries:
        if type(entry) is File and entry.size and (mode := linked_mode(entry, root=root)) is not None:
            other = first.setdefault(entry.content, entry)
            if other.mtime_ns != entry.mtime_ns or other.mode != entry.mode:
                before = linked_mode(other, root=root)
                assert before is not None, "it was looked at"
                looks.setdefault(entry.content, {(before, other.mtime_ns)}).add((mode, entry.mtime_ns))
    several = {content: found for content, found in looks.items() if len(found) > 1}
    needed = sum(len(found) * variant_bytes(first[content].size) for content, found in several.items())
    return Varied(several.keys(), needed)
