"""A tree between the look at its directory and its pages: of directories that did not change what
the last packing remembers of them, of the others their entries. The entries of a directory come in
runs, between which those of the directories in it stand (walking order).

Pages end behind entries that their paths choose, and where they are full (tree.py). So what is
between two ends of the first kind, a section, has the pages that it had when the same runs of
directories that did not change make it up: then neither its entries nor its pages are looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from p2pdist.model.tree import (
    HASH_SIZE,
    PAGE_ENTRIES_MAX,
    WHOLE_MAX,
    ChunkList,
    Entry,
    File,
    check_entries,
    content_hash,
    ends_page,
)
from p2pdist.package.tree import cache
from p2pdist.package.tree.cache import (
    Body,
    Notes,
    Remembered,
    Section,
    Stamp,
    decode_body,
    decode_entries,
    decode_stamps,
    encode_entries,
)
from p2pdist.package.tree.reader import Read, Wanted


class Known:
    """The directories of the last packing, by number. Reading them raises Damaged."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.numbers = {directory.path: number for number, directory in enumerate(notes.index.directories)}
        self.sections = dict(notes.index.sections)

    def directory(self, number: int) -> Remembered:
        return self._notes.index.directories[number]

    def entries(self, number: int) -> list[Entry]:
        return decode_entries(self._body(number).entries)

    def files(self, number: int) -> dict[bytes, tuple[File, Stamp | None]]:
        """The regular files of a directory and their stamps, by path."""
        body = self._body(number)
        stamps = iter(decode_stamps(body.stamps))
        return {entry.path: (entry, next(stamps)) for entry in decode_entries(body.entries) if type(entry) is File}

    def chunks(self, number: int) -> bytes:
        """The BLAKE3 of every chunk of the directory's files, one behind the other."""
        return self._notes.read(self.directory(number).chunks)

    def _body(self, number: int) -> Body:
        return decode_body(self._notes.read(self.directory(number).body))


class Kept:
    """A directory that did not change; `number` is that of the last packing."""

    __slots__ = ("_entries", "_known", "note", "number", "path")

    def __init__(self, number: int, note: Remembered, known: Known) -> None:
        self.number, self.note, self.path = number, note, note.path
        self._known = known
        self._entries: list[Entry] | None = None

    @property
    def count(self) -> int:
        return self.note.count

    @property
    def entries(self) -> list[Entry]:
        """Read when they are asked for."""
        if self._entries is None:
            self._entries = self._known.entries(self.number)
        return self._entries

    @property
    def ends(self) -> tuple[int, ...]:
        return self.note.ends

    @property
    def chunk_lists(self) -> tuple[tuple[int, bytes], ...]:
        return self.note.chunk_lists

    def chunks(self) -> bytes:
        return self._known.chunks(self.number)


@dataclass(slots=True, eq=False)
class Looked:
    """A directory whose entries were looked at, and what the next packing may be told of them: by
    position in its own entries."""

    path: bytes
    fingerprint: bytes
    entries: list[Entry] = field(default_factory=list)
    stamps: list[Stamp | None] = field(default_factory=list)
    below: list[tuple[int, bytes]] = field(default_factory=list)
    dropped: list[tuple[bytes, str]] = field(default_factory=list)
    settled: bool = True
    linked: bool = False
    ends: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.entries)

    @property
    def chunk_lists(self) -> tuple[tuple[int, bytes], ...]:
        large = ((at, entry) for at, entry in enumerate(self.entries) if type(entry) is File and entry.chunks)
        return tuple((at, entry.chunks) for at, entry in large)

    def chunks(self, chunk_list: Callable[[bytes], bytes]) -> dict[bytes, None]:
        """The chunks of its files; `chunk_list` gives the encoded lists of large ones."""
        found: dict[bytes, None] = {}
        for entry in self.entries:
            if type(entry) is not File or not entry.size:
                continue
            if entry.size <= WHOLE_MAX:
                found[entry.content] = None
            else:
                found.update((name, None) for name, _ in ChunkList.decode(chunk_list(entry.chunks)).chunks)
        return found

    def remember(self, chunks: Iterable[bytes], draft: cache.Draft) -> Remembered:
        """For the next packing."""
        files = [entry for entry in self.entries if type(entry) is File]
        return Remembered(
            self.path,
            # Which name of a file is the first depends on other directories.
            self.fingerprint if self.settled and not self.linked else b"",
            draft.add(encode_entries(Body(encode_entries(self.entries), encode_entries(self.stamps)))),
            draft.add(b"".join(chunks)),
            len(self.entries),
            len(files),
            sum(file.size for file in files),
            tuple(self.below),
            self.ends,
            self.chunk_lists,
            tuple(self.dropped),
        )


Run = tuple[Kept | Looked, int, int]
"""Entries of a directory from one position up to another one; directories stand last in a run."""


@dataclass(slots=True)
class Draft:
    """A tree that lacks the contents of `wanted`; `places` says of each the directory, its position
    in it, and that of its stamp."""

    directories: list[Kept | Looked] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    places: list[tuple[Looked, int, int]] = field(default_factory=list)

    @property
    def looked(self) -> list[Looked]:
        return [directory for directory in self.directories if type(directory) is Looked]

    @property
    def kept(self) -> list[Kept]:
        return [directory for directory in self.directories if type(directory) is Kept]

    @property
    def dropped(self) -> list[tuple[bytes, str]]:
        """Path and kind of what the tree does not carry, sorted."""
        found = [item for directory in self.kept for item in directory.note.dropped]
        return sorted(found + [item for directory in self.looked for item in directory.dropped])

    @property
    def settled(self) -> bool:
        """Whether an equal scan will mean an equal tree."""
        return all(directory.settled for directory in self.looked)

    def counts(self) -> tuple[int, int, int]:
        """Entries, regular files, and bytes in these."""
        kept, files = self.kept, [entry for made in self.looked for entry in made.entries if type(entry) is File]
        return (
            sum(directory.count for directory in self.directories),
            sum(directory.note.files for directory in kept) + len(files),
            sum(directory.note.bytes_total for directory in kept) + sum(file.size for file in files),
        )

    def fill(self, results: list[Read]) -> None:
        """Enter what was read; then the tree is complete and checked. Raises Corrupt."""
        for (directory, position, stamp), read in zip(self.places, results, strict=True):
            draft = directory.entries[position]
            assert isinstance(draft, File)
            directory.entries[position] = File(
                draft.path, draft.mode, draft.mtime_ns, draft.size, read.content, read.chunks, draft.xattrs
            )
            if not read.settled:
                directory.stamps[stamp] = None
                directory.settled = False
        for looked in self.looked:
            looked.ends = tuple(at for at, entry in enumerate(looked.entries) if ends_page(entry.path))
        check_entries(self._unchecked())

    def _unchecked(self) -> list[Entry]:
        """What the last packing has not checked, and the directories above it. Names of hard links
        are never taken over, so this is a tree, too, and when it is one the whole is."""
        above = {b""}
        for looked in self.looked:
            path = looked.path
            while path not in above:
                above.add(path)
                path = path.rpartition(b"/")[0]
        found: list[Entry] = []
        for directory, begin, end in self.runs:
            if type(directory) is Looked:
                found += directory.entries[begin:end]
            elif directory.path in above:
                found += (entry for entry in directory.entries[end - 1 : end] if entry.path in above)
        return found

    def chunk_lists(self) -> list[bytes]:
        """The BLAKE3 of the chunk lists of large files, in walking order."""
        lists = {id(directory): directory.chunk_lists for directory in self.directories}
        return list(
            dict.fromkeys(
                name
                for directory, begin, end in self.runs
                for position, name in lists[id(directory)]
                if begin <= position < end
            )
        )

    def sections(self) -> Iterator[list[Run]]:
        """What is between two ends of pages, in walking order."""
        section: list[Run] = []
        for directory, begin, end in self.runs:
            ends = directory.ends
            start = begin
            for at in ends[bisect_left(ends, begin) : bisect_left(ends, end)]:
                yield [*section, (directory, start, at + 1)]
                section, start = [], at + 1
            if start < end:
                section.append((directory, start, end))
        if section:
            yield section

    def pages(
        self, known: Known, available: Callable[[bytes], bool]
    ) -> tuple[dict[bytes, bytes | None], list[Section]]:
        """The pages of the tree by BLAKE3, None where they were taken over from the last packing
        because they are `available`; and the sections to be remembered."""
        numbers = {id(directory): number for number, directory in enumerate(self.directories)}
        pages: dict[bytes, bytes | None] = {}
        sections: list[Section] = []
        for runs in self.sections():
            names = split(known.sections.get(_key(runs), b""))
            taken = bool(names) and all(map(available, names))
            found: dict[bytes, bytes | None] = dict.fromkeys(names if taken else ())
            found.update((content_hash(page), page) for page in (() if taken else _encoded(runs)))
            pages.update(found)
            key = (item for directory, begin, end in runs for item in (numbers[id(directory)], begin, end))
            sections.append((tuple(key), b"".join(found)))
        return pages, sections


def split(names: bytes) -> list[bytes]:
    """BLAKE3s that stand one behind the other."""
    return [names[at : at + HASH_SIZE] for at in range(0, len(names), HASH_SIZE)]


def _key(runs: list[Run]) -> tuple[int, ...]:
    """What a section was in the last packing; nothing when it has part of a directory that has
    changed."""
    found: list[int] = []
    for directory, begin, end in runs:
        if type(directory) is not Kept:
            return ()
        found += (directory.number, begin, end)
    return tuple(found)


def _encoded(runs: list[Run]) -> Iterator[bytes]:
    entries = [entry for directory, begin, end in runs for entry in directory.entries[begin:end]]
    for at in range(0, len(entries), PAGE_ENTRIES_MAX):
        yield encode_entries(entries[at : at + PAGE_ENTRIES_MAX])
