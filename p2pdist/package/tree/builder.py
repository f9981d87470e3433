"""A tree on its way from a scan to pages: an unchanged directory stands as the files cache
remembers it, a scanned one as its entries.

The entries of a directory come in runs; the entries of its subdirectories lie between two runs
(walking order). Pages end behind entries that their paths choose, and where they are full
(p2pdist/model/tree.py). A section is what lies between two ends of the first kind. It has the same
pages as in the last packing when it consists of the same runs of unchanged directories; then
neither its entries nor its pages are decoded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from p2pdist.model.tree import (
    HASH_SIZE,
    PAGE_BYTES_MAX,
    PAGE_ENTRIES_MAX,
    WHOLE_MAX,
    ChunkList,
    Entry,
    File,
    check_entries,
    content_hash,
    ends_page,
)
from p2pdist.package.tree.cache import (
    Body,
    CacheBuilder,
    CachedDirectory,
    FilesCache,
    Section,
    Stamp,
    decode_body,
    decode_entries,
    decode_stamps,
    encode_entries,
)
from p2pdist.package.tree.reader import FileToRead, Read


class CachedTree:
    """The directories of the last packing, by number, from the files cache. Reads raise Damaged."""

    def __init__(self, files_cache: FilesCache) -> None:
        self._files_cache = files_cache
        self.numbers = {directory.path: number for number, directory in enumerate(files_cache.index.directories)}
        self.sections = dict(files_cache.index.sections)

    def directory(self, number: int) -> CachedDirectory:
        """The directory with this number."""
        return self._files_cache.index.directories[number]

    def entries(self, number: int) -> list[Entry]:
        """The entries of a directory, decoded."""
        return decode_entries(self._body(number).entries)

    def files(self, number: int) -> dict[bytes, tuple[File, Stamp | None]]:
        """The regular files of a directory and their stamps, by path."""
        body = self._body(number)
        stamps = iter(decode_stamps(body.stamps))
        return {entry.path: (entry, next(stamps)) for entry in decode_entries(body.entries) if type(entry) is File}

    def chunks(self, number: int) -> bytes:
        """The BLAKE3 of every chunk of the directory's files, one behind the other."""
        return self._files_cache.read(self.directory(number).chunks)

    def _body(self, number: int) -> Body:
        return decode_body(self._files_cache.read(self.directory(number).body))


class Unchanged:
    """A directory that did not change; `number` is its number in the last packing."""

    __slots__ = ("_entries", "_tree", "cached", "number", "path")

    def __init__(self, number: int, tree: CachedTree) -> None:
        self.number, self.cached = number, tree.directory(number)
        self.path = self.cached.path
        self._tree = tree
        self._entries: list[Entry] | None = None

    @property
    def count(self) -> int:
        """Entries."""
        return self.cached.count

    @property
    def entries(self) -> list[Entry]:
        """Its entries, decoded at the first call."""
        if self._entries is None:
            self._entries = self._tree.entries(self.number)
        return self._entries

    @property
    def ends(self) -> tuple[int, ...]:
        """Positions behind which a page ends."""
        return self.cached.ends

    @property
    def chunk_lists(self) -> tuple[tuple[int, bytes], ...]:
        """Position of each large file, and the BLAKE3 of its chunk list."""
        return self.cached.chunk_lists

    def chunks(self) -> bytes:
        """The BLAKE3 of every chunk of its files, concatenated."""
        return self._tree.chunks(self.number)


@dataclass(slots=True, eq=False)
class Scanned:
    """A directory that is new or changed, and what the next packing may know of it. Positions count
    its own entries."""

    path: bytes
    fingerprint: bytes
    """BLAKE3 of its rows in the scan."""
    entries: list[Entry] = field(default_factory=list)
    stamps: list[Stamp | None] = field(default_factory=list)
    """Of each regular file, in order; None where the next packing must read the file again."""
    below: list[tuple[int, bytes]] = field(default_factory=list)
    """Position and name of each subdirectory."""
    dropped: list[tuple[bytes, str]] = field(default_factory=list)
    """Path and kind of what the tree does not carry."""
    stable: bool = True
    """Whether an equal fingerprint will mean equal entries."""
    linked: bool = False
    """Whether a file in it has several names; which one is the first depends on other
    directories."""
    ends: tuple[int, ...] = ()
    """Positions behind which a page ends; set by TreeBuilder.fill."""

    @property
    def count(self) -> int:
        """Entries."""
        return len(self.entries)

    @property
    def chunk_lists(self) -> tuple[tuple[int, bytes], ...]:
        """Position of each large file, and the BLAKE3 of its chunk list."""
        large = ((at, entry) for at, entry in enumerate(self.entries) if type(entry) is File and entry.chunks)
        return tuple((at, entry.chunks) for at, entry in large)

    def chunks(self, chunk_list: Callable[[bytes], bytes]) -> dict[bytes, None]:
        """The BLAKE3 of the chunks of its files; `chunk_list` returns the encoded chunk list of a
        large file."""
        names: dict[bytes, None] = {}
        for entry in self.entries:
            if type(entry) is not File or not entry.size:
                continue
            if entry.size <= WHOLE_MAX:
                names[entry.content] = None
            else:
                names.update((name, None) for name, _ in ChunkList.decode(chunk_list(entry.chunks)).chunks)
        return names

    def remember(self, chunks: Iterable[bytes], cache_builder: CacheBuilder) -> CachedDirectory:
        """What the files cache keeps of this directory, whose contents consist of `chunks`."""
        files = [entry for entry in self.entries if type(entry) is File]
        return CachedDirectory(
            self.path,
            self.fingerprint if self.stable and not self.linked else b"",
            cache_builder.add(encode_entries(Body(encode_entries(self.entries), encode_entries(self.stamps)))),
            cache_builder.add(b"".join(chunks)),
            len(self.entries),
            len(files),
            sum(file.size for file in files),
            tuple(self.below),
            self.ends,
            self.chunk_lists,
            tuple(self.dropped),
        )


Run = tuple[Unchanged | Scanned, int, int]
"""A directory, the position of its first entry in the run, and the position behind the last one; a
subdirectory is the last entry of a run."""


@dataclass(slots=True)
class TreeBuilder:
    """A tree to which the contents of `unread` are missing until `fill`."""

    directories: list[Unchanged | Scanned] = field(default_factory=list)
    """In walking order."""
    runs: list[Run] = field(default_factory=list)
    """In walking order."""
    unread: list[FileToRead] = field(default_factory=list)
    positions: list[tuple[Scanned, int, int]] = field(default_factory=list)
    """Of each unread file its directory, its position there, and the position of its stamp."""

    @property
    def scanned(self) -> list[Scanned]:
        """The directories that are new or changed."""
        return [directory for directory in self.directories if type(directory) is Scanned]

    @property
    def unchanged(self) -> list[Unchanged]:
        """The directories that come from the files cache."""
        return [directory for directory in self.directories if type(directory) is Unchanged]

    @property
    def dropped(self) -> list[tuple[bytes, str]]:
        """Path and kind of what the tree does not carry, sorted."""
        items = [item for directory in self.unchanged for item in directory.cached.dropped]
        return sorted(items + [item for directory in self.scanned for item in directory.dropped])

    @property
    def stable(self) -> bool:
        """Whether an equal scan will mean an equal tree."""
        return all(directory.stable for directory in self.scanned)

    def counts(self) -> tuple[int, int, int]:
        """Entries, regular files, and bytes in these."""
        unchanged, files = (
            self.unchanged,
            [entry for made in self.scanned for entry in made.entries if type(entry) is File],
        )
        return (
            sum(directory.count for directory in self.directories),
            sum(directory.cached.files for directory in unchanged) + len(files),
            sum(directory.cached.bytes_total for directory in unchanged) + sum(file.size for file in files),
        )

    def fill(self, results: list[Read]) -> None:
        """Enter the contents of the unread files, in their order, and check the tree, which is
        complete then. Raises Corrupt."""
        for (directory, position, stamp), read in zip(self.positions, results, strict=True):
            file = directory.entries[position]
            assert isinstance(file, File)
            directory.entries[position] = File(
                file.path, file.mode, file.mtime_ns, file.size, read.content, read.chunks, file.xattrs
            )
            if not read.stable:
                directory.stamps[stamp] = None
                directory.stable = False
        for scanned in self.scanned:
            scanned.ends = tuple(at for at, entry in enumerate(scanned.entries) if ends_page(entry.path))
        check_entries(self._unchecked())

    def _unchecked(self) -> list[Entry]:
        """The entries that the last packing has not checked, and the directories above them. A
        directory with hard links is always scanned, so these entries form a tree, and the whole is
        valid when they are."""
        above = {b""}
        for scanned in self.scanned:
            path = scanned.path
            while path not in above:
                above.add(path)
                path = path.rpartition(b"/")[0]
        entries: list[Entry] = []
        for directory, begin, end in self.runs:
            if type(directory) is Scanned:
                entries += directory.entries[begin:end]
            elif directory.path in above:
                entries += (entry for entry in directory.entries[end - 1 : end] if entry.path in above)
        return entries

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
        """The runs between two ends of pages, in walking order."""
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
        self, cached: CachedTree, available: Callable[[bytes], bool]
    ) -> tuple[dict[bytes, bytes | None], list[Section]]:
        """The pages of the tree by BLAKE3, and its sections for the files cache. A page is None
        where a section of the last packing has it and it is `available` in a catalog."""
        numbers = {id(directory): number for number, directory in enumerate(self.directories)}
        pages: dict[bytes, bytes | None] = {}
        sections: list[Section] = []
        for runs in self.sections():
            names = split(cached.sections.get(_key(runs), b""))
            taken = bool(names) and all(map(available, names))
            section: dict[bytes, bytes | None] = dict.fromkeys(names if taken else ())
            section.update((content_hash(page), page) for page in (() if taken else _encoded(runs)))
            pages.update(section)
            key = (item for directory, begin, end in runs for item in (numbers[id(directory)], begin, end))
            sections.append((tuple(key), b"".join(section)))
        return pages, sections


def split(names: bytes) -> list[bytes]:
    """The BLAKE3s in a concatenation of them."""
    return [names[at : at + HASH_SIZE] for at in range(0, len(names), HASH_SIZE)]


def _key(runs: list[Run]) -> tuple[int, ...]:
    """The key of a section in the last packing; empty when a scanned directory is in it."""
    numbers: list[int] = []
    for directory, begin, end in runs:
        if type(directory) is not Unchanged:
            return ()
        numbers += (directory.number, begin, end)
    return tuple(numbers)


def _encoded(runs: list[Run]) -> Iterator[bytes]:
    entries = [entry for directory, begin, end in runs for entry in directory.entries[begin:end]]
    for at in range(0, len(entries), PAGE_ENTRIES_MAX):
        yield from _pages_of(entries[at : at + PAGE_ENTRIES_MAX])


def _pages_of(entries: list[Entry]) -> Iterator[bytes]:
    """One page, or several, halved until none is longer than hosts take."""
    data = encode_entries(entries)
    if len(data) <= PAGE_BYTES_MAX or len(entries) == 1:
        yield data
        return
    middle = len(entries) // 2
    yield from _pages_of(entries[:middle])
    yield from _pages_of(entries[middle:])
