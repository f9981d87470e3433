"""Variants: what hard links are made to where an object cannot be linked.

An object has one mode and one time. Files of one content often differ in these: an environment has the same stub or table a hundred times,
each with the moment at which it was installed. All but one would be copied each time the tree is shown, which takes four times as long as
links do; and on ext4 without a journal many times as long as that for minutes after many files were removed (recently_deleted in Linux,
fs/ext4/ialloc.c). So the copies that are made when a tree is shown for the first time are kept with it, under another name, and are linked
from then on. Of such a content all files are variants, and the object stays with none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from p2pdist.model.tree import Entry, File, Xattrs

Look = tuple[int, int, Xattrs]
"""Mode, time and attributes of a file."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Variants are kept in a `directory` (a descriptor) for these contents."""

    directory: int
    contents: Collection[bytes]


@dataclass(frozen=True, slots=True)
class Varied:
    """The contents of which a tree has files that look different, and how many bytes variants of them take at most."""

    contents: Collection[bytes]
    bytes_max: int


def varied(entries: Iterable[Entry]) -> Varied:
    """What there is to keep variants of."""
    first: dict[bytes, File] = {}
    looks: dict[bytes, set[Look]] = {}
    for entry in entries:
        if type(entry) is File and entry.size and (other := first.setdefault(entry.content, entry)) is not entry:
            look = _look(entry)
            if look != _look(other):
                looks.setdefault(entry.content, {_look(other)}).add(look)
    return Varied(looks.keys(), sum(len(found) * first[content].size for content, found in looks.items()))


def _look(file: File) -> Look:
    return file.mode, file.mtime_ns, file.xattrs
