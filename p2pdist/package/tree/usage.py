"""Which packs have which chunks, and how many bytes of each pack a tree needs.

A tree has hundreds of thousands of chunks and an edit changes a few of them, so nothing is made for
each chunk: a chunk is searched for in the packs' records as they are, and only for many searches a
table is built. For each pack the index keeps the sum of the stored bytes of the chunks that the
tree needs and no other pack has, which does not depend on the order of packs. The few chunks that
several packs have are `shared`, and count for the pack that comes first.

Usage brings these sums forward from the last packing: it accounts for packs that went and came,
then for the chunks that changed directories lost and won and no other directory has. Without a
files cache, or where a pack is gone that the tree needed, it counts everything anew.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import partial
from itertools import accumulate

import msgspec

from p2pdist.model.digest import Digest
from p2pdist.model.tree import HASH_SIZE, WHOLE_MAX, ChunkList, File
from p2pdist.package.tree.builder import CachedTree, Scanned, TreeBuilder, split
from p2pdist.package.tree.cache import Block, CacheBuilder, CachedDirectory, CachedPack, FilesCache
from p2pdist.package.tree.pack_pool import PackPool
from p2pdist.package.tree.packfile import PackWriter

SEARCHES_MAX = 24
_RECORD = struct.Struct("<32sII")
"""A pack's record of a chunk (catalog.py): BLAKE3, length, stored length."""


class Rows:
    """Rows of `width` bytes that begin with a BLAKE3, by which `find` looks them up: by a search at
    first, by a table after SEARCHES_MAX of them."""

    def __init__(self, parts: Sequence[bytes], width: int) -> None:
        self._data = b"".join(parts) if len(parts) != 1 else parts[0]
        self._width = width
        self._searches = 0
        self._table: dict[bytes, int] | None = None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, bytes) and self.find(name) >= 0

    def __len__(self) -> int:
        return len(self._data)

    def add(self, part: bytes) -> None:
        """Put more rows behind the others."""
        if self._table is not None:
            begin, width = len(self._data), self._width
            for at in range(0, len(part), width):
                self._table.setdefault(part[at : at + HASH_SIZE], begin + at)
        self._data += part

    def find(self, name: bytes) -> int:
        """Offset of the first row of this name, -1 when there is none."""
        if self._table is not None:
            return self._table.get(name, -1)
        self._searches += 1
        if self._searches > SEARCHES_MAX:
            return self.table().get(name, -1)
        at = self._data.find(name)
        while at > 0 and at % self._width:
            at = self._data.find(name, at + 1)
        return at

    def stored(self, at: int) -> int:
        """The stored length in the record at an offset."""
        return int(_RECORD.unpack_from(self._data, at)[2])

    def table(self) -> dict[bytes, int]:
        """Offsets of first rows by name."""
        if self._table is None:
            data, width = self._data, self._width
            self._table = {data[at : at + HASH_SIZE]: at for at in range(len(data) - width, -1, -width)}
        return self._table


Shared = dict[bytes, dict[Digest, int]]


class ChunkIndex:
    """Packs by digest, and how much of each a tree needs. Records of packs are read at the first
    search."""

    def __init__(
        self,
        packs: dict[Digest, Callable[[], bytes]] | None = None,
        live: dict[Digest, int] | None = None,
        shared: Shared | None = None,
        needed: Collection[bytes] = (),
    ) -> None:
        self.packs = dict(packs or {})
        """By digest, a function that reads the pack's records."""
        self.live = dict(live or {})
        """Stored bytes that the tree needs of a pack and no other pack has."""
        self.shared: Shared = dict(shared or {})
        """Chunks that several packs have, with their stored length in each."""
        self.needed = set(needed)
        """The shared chunks that the tree needs."""
        self._rows: Rows | None = None
        self._order: list[Digest] = []
        self._starts: list[int] = []

    def lookup(self, questions: int) -> Container[bytes]:
        """The chunks that some pack has, for about so many questions; threads may ask at the same
        time."""
        return self.rows().table() if questions > SEARCHES_MAX else self.rows()

    def rows(self) -> Rows:
        """The records of all packs."""
        if self._rows is None:
            parts = [read() for read in self.packs.values()]
            self._order = list(self.packs)
            self._starts = list(accumulate((len(part) for part in parts), initial=0))[:-1]
            self._rows = Rows(parts, _RECORD.size)
        return self._rows

    def forget(self, gone: Iterable[Digest]) -> bool:
        """Drop packs that are gone. Returns False when the tree needed a chunk that no other pack
        has; then the index is wrong and is to be made anew."""
        names = set(gone)
        if any(self.live[name] for name in names):
            return False
        for name in names:
            del self.packs[name], self.live[name]
        if names:
            self._rows = None
        for chunk, holders in list(self.shared.items()) if names else ():
            left = {name: stored for name, stored in holders.items() if name not in names}
            if chunk in self.needed and not left:
                return False
            self.shared[chunk] = left
            if len(left) < 2:
                del self.shared[chunk]
                if chunk in self.needed:
                    self.needed.discard(chunk)
                    ((name, stored),) = left.items()
                    self.live[name] += stored
        return True

    def add(self, pack: Digest, records: bytes, in_tree: Callable[[bytes], bool]) -> None:
        """Add a pack; `in_tree` says which chunks the tree needed before."""
        stored_by_name: dict[bytes, int] = {}
        for chunk, _, stored in _RECORD.iter_unpack(records):
            stored_by_name.setdefault(chunk, stored)
        common: Collection[bytes] = ()
        if self.packs:
            rows = self.rows()
            many = len(stored_by_name) > SEARCHES_MAX
            common = rows.table().keys() & stored_by_name.keys() if many else [n for n in stored_by_name if n in rows]
        for chunk in common:
            if chunk not in self.shared:
                name, stored = self._holder(rows.find(chunk))
                self.shared[chunk] = {name: stored}
                if in_tree(chunk):
                    self.needed.add(chunk)
                    self.live[name] -= stored
            self.shared[chunk][pack] = stored_by_name[chunk]
        rows = self.rows()
        self._order.append(pack)
        self._starts.append(len(rows))
        rows.add(records)
        self.packs[pack] = lambda: records
        self.live[pack] = 0

    def add_new(self, pack: Digest, records: bytes, size: int) -> None:
        """Add a pack all of whose chunks, `size` bytes, the tree needs and no other pack has."""
        self.packs[pack] = lambda: records
        self.live[pack] = size
        self._rows = None

    def need(self, chunks: Iterable[bytes]) -> None:
        """Count chunks that the tree did not need before. Chunks that no pack has do not count."""
        self._count(chunks, 1)

    def release(self, chunks: Iterable[bytes]) -> None:
        """Count off chunks that the tree needs no more."""
        self._count(chunks, -1)

    def live_bytes(self, order: Sequence[Digest]) -> dict[int, int]:
        """Stored bytes, more than 0, that the tree needs of a pack, by its position in `order`."""
        positions: dict[Digest, int] = {}
        for position, name in enumerate(order):
            positions.setdefault(name, position)
        live = {positions[name]: count for name, count in self.live.items() if count}
        for chunk in self.needed:
            position, stored = min((positions[name], stored) for name, stored in self.shared[chunk].items())
            live[position] = live.get(position, 0) + stored
        return dict(sorted(live.items()))

    def is_first(self, pack: Digest, chunk: bytes, order: Sequence[Digest]) -> bool:
        """Whether `pack`, which has the chunk, comes first in `order` of all packs that have it."""
        holders = self.shared.get(chunk)
        return holders is None or min(holders, key=order.index) == pack

    def _count(self, chunks: Iterable[bytes], sign: int) -> None:
        if not self.packs:
            return
        rows = self.rows()
        for chunk in chunks:
            if chunk in self.shared:
                (self.needed.add if sign > 0 else self.needed.discard)(chunk)
            elif (at := rows.find(chunk)) >= 0:
                name, stored = self._holder(at)
                self.live[name] += sign * stored

    def _holder(self, at: int) -> tuple[Digest, int]:
        """The pack whose record is at an offset of the rows, and the stored length."""
        return self._order[bisect_right(self._starts, at) - 1], self.rows().stored(at)


class Usage:
    """What a tree needs of a pack pool, by its `chunk_index`: the tree of the last packing, until
    `update` counts the new one. Raises Damaged, and Corrupt naming a broken catalog."""

    def __init__(self, pool: PackPool, files_cache: FilesCache) -> None:
        self.cached = CachedTree(files_cache)
        self._pool, self._files_cache = pool, files_cache
        self._lists: dict[bytes, bytes] = {}
        self._chunks: dict[int, Iterable[bytes]] = {}
        index = files_cache.index
        self.chunk_index = ChunkIndex(
            {Digest(name): partial(files_cache.read, pack.records) for name, pack in index.packs.items()},
            {Digest(name): pack.live for name, pack in index.packs.items()},
            {chunk: {Digest(name): stored for name, stored in holders.items()} for chunk, _, holders in index.shared},
            {chunk for chunk, needed, _ in index.shared if needed},
        )
        usable = {pack.digest: number for number, pack in reversed(list(enumerate(pool.packs)))}
        self._complete = bool(index.directories) and self.chunk_index.forget(
            self.chunk_index.packs.keys() - usable.keys()
        )
        if not self._complete:
            self.chunk_index = ChunkIndex()
        needed = UsedBy(self.cached, range(len(index.directories)) if self._complete else ())
        for name in sorted(usable.keys() - self.chunk_index.packs.keys(), key=lambda name: usable[name]):
            self.chunk_index.add(name, pool.pack(usable[name]).records, needed)

    def available(self, item: CachedDirectory | File) -> bool:
        """Whether packs have all contents of a directory of the last packing, or of a file in
        one."""
        lists = [name for _, name in item.chunk_lists] if isinstance(item, CachedDirectory) else [item.chunks]
        if any(name and name not in self._pool.chunk_lists for name in lists):
            return False
        if self._complete:
            return True
        if isinstance(item, CachedDirectory):
            return self.chunk_index.rows().table().keys() >= set(split(self._files_cache.read(item.chunks)))
        if item.size <= WHOLE_MAX:
            return not item.size or item.content in self.chunk_index.rows()
        return all(name in self.chunk_index.rows() for name, _ in ChunkList.decode(self.chunk_list(item.chunks)).chunks)

    def chunk_list(self, name: bytes) -> bytes:
        """The encoded chunk list of a large file."""
        if name not in self._lists:
            block = self._files_cache.index.chunk_lists.get(name)
            self._lists[name] = self._files_cache.read(block) if block else self._pool.chunk_list(name)
        return self._lists[name]

    def update(self, builder: TreeBuilder, chunk_lists: dict[bytes, bytes]) -> None:
        """Count the complete tree of `builder`; `chunk_lists` are the new ones of its large
        files."""
        self._lists.update(chunk_lists)
        fresh: dict[bytes, None] = {}
        for scanned in builder.scanned:
            chunks = scanned.chunks(self.chunk_list)
            self._chunks[id(scanned)] = chunks
            fresh.update(chunks)
        if not self._complete:
            for unchanged in builder.unchanged:
                fresh.update(dict.fromkeys(split(unchanged.chunks())))
            self.chunk_index.need(fresh)
            return
        numbers = {unchanged.number for unchanged in builder.unchanged}
        gone: dict[bytes, None] = {}
        for number in range(len(self._files_cache.index.directories)):
            if number not in numbers:
                gone.update(dict.fromkeys(split(self.cached.chunks(number))))
        elsewhere = UsedBy(self.cached, sorted(numbers))
        self.chunk_index.release([name for name in gone if name not in fresh and not elsewhere(name)])
        rows = self.chunk_index.rows()
        new = [name for name in fresh if name not in gone and name in rows]
        self.chunk_index.need([name for name in new if not elsewhere(name)])

    def needed(self, builder: TreeBuilder) -> set[bytes]:
        """The BLAKE3 of all chunks of the tree."""
        names: set[bytes] = set()
        for directory in builder.directories:
            names.update(self._chunks[id(directory)] if isinstance(directory, Scanned) else split(directory.chunks()))
        return names

    def remember(
        self, builder: TreeBuilder, written: tuple[PackWriter, PackWriter], cache_builder: CacheBuilder
    ) -> tuple[list[CachedDirectory], dict[str, CachedPack], dict[bytes, Block]]:
        """What the files cache keeps: directories, packs, chunk lists. `written` are the packs of
        new chunks and of chunks that moved."""
        for pack in written[0].packs:
            self.chunk_index.add_new(pack.pack.digest, pack.pack.records, pack.pack.size)
        for pack in written[1].packs:
            self.chunk_index.add(pack.pack.digest, pack.pack.records, lambda _: True)
        index = self._files_cache.index
        directories = [
            directory.remember(self._chunks[id(directory)], cache_builder)
            if isinstance(directory, Scanned)
            else keep(directory.cached, cache_builder)
            for directory in builder.directories
        ]
        packs: dict[str, CachedPack] = {}
        for name, read in self.chunk_index.packs.items():
            cached = index.packs.get(name)
            block = cache_builder.keep(cached.records) if cached else cache_builder.add(read())
            packs[name] = CachedPack(block, self.chunk_index.live[name])
        lists: dict[bytes, Block] = {}
        for chunk_list in builder.chunk_lists():
            block_before = index.chunk_lists.get(chunk_list)
            lists[chunk_list] = (
                cache_builder.keep(block_before) if block_before else cache_builder.add(self.chunk_list(chunk_list))
            )
        return directories, packs, lists


class UsedBy:
    """Says whether some directories of the last packing need a chunk; reads them at the first
    call."""

    def __init__(self, cached: CachedTree, numbers: Iterable[int]) -> None:
        self._cached, self._numbers = cached, numbers
        self._rows: Rows | None = None

    def __call__(self, chunk: bytes) -> bool:
        if self._rows is None:
            self._rows = Rows([self._cached.chunks(number) for number in self._numbers], HASH_SIZE)
        return chunk in self._rows


def keep(directory: CachedDirectory, cache_builder: CacheBuilder) -> CachedDirectory:
    """A directory that did not change, for the next cache."""
    if not cache_builder.anew:
        return directory
    body, chunks = cache_builder.keep(directory.body), cache_builder.keep(directory.chunks)
    return msgspec.structs.replace(directory, body=body, chunks=chunks)
