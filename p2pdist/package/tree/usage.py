"""What a tree needs of the pool's chunks, brought forward from what the last packing of the
directory needed.

The notes say what each pack had that was needed. Packs that went since and packs that came are
accounted for, then the chunks that directories lost and won; what other directories have as well is
neither. Where something is gone that the tree needed, and where there are no notes, all is counted
from nothing.

Which packs have which chunks, and how many bytes of each pack a tree needs.

A tree has hundreds of thousands of chunks and an edit changes a few of them, so nothing here is
made for each chunk: what is asked for is searched for in the packs' records as they are, and only
for many questions a table is built. For each pack there is the sum of the stored bytes of those of
its chunks that the tree needs and that no other pack has; it does not depend on the order of packs.
The few chunks that several packs have are `shared`, and count for whichever pack comes first.
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
from p2pdist.package.tree import cache
from p2pdist.package.tree.builder import Draft, Known, Looked, split
from p2pdist.package.tree.cache import Block, KnownRecords, Notes, Remembered
from p2pdist.package.tree.packfile import PackWriter
from p2pdist.package.tree.pool import Pool

SEARCHES_MAX = 24
_RECORD = struct.Struct("<32sII")
"""A pack's record of a chunk (catalog.py): BLAKE3, length, stored length."""


class Rows:
    """Rows of `width` bytes that begin with a BLAKE3, to be found by it. Some are searched for; for
    many a table is made."""

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


class Holdings:
    """Packs, by digest, and what of them is needed. `read` are the records of a pack; what is not
    asked for is not read."""

    def __init__(
        self,
        packs: dict[Digest, Callable[[], bytes]] | None = None,
        live: dict[Digest, int] | None = None,
        shared: Shared | None = None,
        needed: Collection[bytes] = (),
    ) -> None:
        self.packs = dict(packs or {})
        self.live = dict(live or {})
        self.shared: Shared = dict(shared or {})
        self.needed = set(needed)
        """Of the shared chunks those that the tree needs."""
        self._rows: Rows | None = None
        self._order: list[Digest] = []
        self._starts: list[int] = []

    def known(self, questions: int) -> Container[bytes]:
        """The chunks that some pack has, for about so many questions, which threads may ask at the
        same time."""
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
        """Packs are not at hand any more. False when the tree needed something that no other has:
        then nothing here is right."""
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

    def learn(self, pack: Digest, records: bytes, in_tree: Callable[[bytes], bool]) -> None:
        """A pack has come; `in_tree` says what the tree needed before."""
        stored_by_name: dict[bytes, int] = {}
        for chunk, _, stored in _RECORD.iter_unpack(records):
            stored_by_name.setdefault(chunk, stored)
        known: Collection[bytes] = ()
        if self.packs:
            rows = self.rows()
            many = len(stored_by_name) > SEARCHES_MAX
            known = rows.table().keys() & stored_by_name.keys() if many else [n for n in stored_by_name if n in rows]
        for chunk in known:
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

    def own(self, pack: Digest, records: bytes, size: int) -> None:
        """A pack was written of chunks that no other has and the tree needs."""
        self.packs[pack] = lambda: records
        self.live[pack] = size
        self._rows = None

    def need(self, chunks: Iterable[bytes]) -> None:
        """The tree needs chunks that it did not need before. What no pack has is left out."""
        self._count(chunks, 1)

    def spare(self, chunks: Iterable[bytes]) -> None:
        """The tree does not need chunks any more."""
        self._count(chunks, -1)

    def live_bytes(self, order: Sequence[Digest]) -> dict[int, int]:
        """Stored bytes that the tree needs of each pack that is needed at all, by its place in
        `order`."""
        places: dict[Digest, int] = {}
        for place, name in enumerate(order):
            places.setdefault(name, place)
        live = {places[name]: count for name, count in self.live.items() if count}
        for chunk in self.needed:
            place, stored = min((places[name], stored) for name, stored in self.shared[chunk].items())
            live[place] = live.get(place, 0) + stored
        return dict(sorted(live.items()))

    def is_first(self, pack: Digest, chunk: bytes, order: Sequence[Digest]) -> bool:
        """Whether of the packs that have a chunk, this one among them, it comes first in
        `order`."""
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


class Ledger:
    """`holdings` say what the packs have and what of it the tree needs: the tree of the last
    packing, until `settle` was called. Raises Damaged, and Corrupt where a catalog is broken."""

    def __init__(self, pool: Pool, notes: Notes) -> None:
        self.known = Known(notes)
        self._pool, self._notes = pool, notes
        self._lists: dict[bytes, bytes] = {}
        self._chunks: dict[int, Iterable[bytes]] = {}
        index = notes.index
        self.holdings = Holdings(
            {Digest(name): partial(notes.read, found.records) for name, found in index.packs.items()},
            {Digest(name): found.live for name, found in index.packs.items()},
            {chunk: {Digest(name): stored for name, stored in held.items()} for chunk, _, held in index.shared},
            {chunk for chunk, needed, _ in index.shared if needed},
        )
        usable = {known.digest: number for number, known in reversed(list(enumerate(pool.packs)))}
        self._complete = bool(index.directories) and self.holdings.forget(self.holdings.packs.keys() - usable.keys())
        if not self._complete:
            self.holdings = Holdings()
        before = Elsewhere(self.known, range(len(index.directories)) if self._complete else ())
        for name in sorted(usable.keys() - self.holdings.packs.keys(), key=lambda name: usable[name]):
            self.holdings.learn(name, pool.pack(usable[name]).records, before)

    def available(self, found: Remembered | File) -> bool:
        """Whether packs have all contents of a directory of the last packing, or of a file in
        one."""
        lists = [name for _, name in found.chunk_lists] if isinstance(found, Remembered) else [found.chunks]
        if any(name and name not in self._pool.chunk_lists for name in lists):
            return False
        if self._complete:
            return True
        if isinstance(found, Remembered):
            return self.holdings.rows().table().keys() >= set(split(self._notes.read(found.chunks)))
        if found.size <= WHOLE_MAX:
            return not found.size or found.content in self.holdings.rows()
        return all(name in self.holdings.rows() for name, _ in ChunkList.decode(self.chunk_list(found.chunks)).chunks)

    def chunk_list(self, name: bytes) -> bytes:
        """The encoded chunk list of a large file."""
        if name not in self._lists:
            block = self._notes.index.chunk_lists.get(name)
            self._lists[name] = self._notes.read(block) if block else self._pool.chunk_list(name)
        return self._lists[name]

    def settle(self, draft: Draft, chunk_lists: dict[bytes, bytes]) -> None:
        """Account for a draft that is complete; `chunk_lists` were made for it."""
        self._lists.update(chunk_lists)
        fresh: dict[bytes, None] = {}
        for looked in draft.looked:
            found = looked.chunks(self.chunk_list)
            self._chunks[id(looked)] = found
            fresh.update(found)
        if not self._complete:
            for kept in draft.kept:
                fresh.update(dict.fromkeys(split(kept.chunks())))
            self.holdings.need(fresh)
            return
        numbers = {kept.number for kept in draft.kept}
        gone: dict[bytes, None] = {}
        for number in range(len(self._notes.index.directories)):
            if number not in numbers:
                gone.update(dict.fromkeys(split(self.known.chunks(number))))
        elsewhere = Elsewhere(self.known, sorted(numbers))
        self.holdings.spare([name for name in gone if name not in fresh and not elsewhere(name)])
        rows = self.holdings.rows()
        new = [name for name in fresh if name not in gone and name in rows]
        self.holdings.need([name for name in new if not elsewhere(name)])

    def needed(self, draft: Draft) -> set[bytes]:
        """All chunks that a draft needs."""
        found: set[bytes] = set()
        for directory in draft.directories:
            found.update(self._chunks[id(directory)] if isinstance(directory, Looked) else split(directory.chunks()))
        return found

    def remember(
        self, draft: Draft, written: tuple[PackWriter, PackWriter], state: cache.Draft
    ) -> tuple[list[Remembered], dict[str, KnownRecords], dict[bytes, Block]]:
        """For the next packing: the directories, the packs with those `written` of new chunks and
        of chunks that moved, the chunk lists."""
        for pack in written[0].packs:
            self.holdings.own(pack.pack.digest, pack.pack.records, pack.pack.size)
        for pack in written[1].packs:
            self.holdings.learn(pack.pack.digest, pack.pack.records, lambda _: True)
        index = self._notes.index
        directories = [
            directory.remember(self._chunks[id(directory)], state)
            if isinstance(directory, Looked)
            else keep(directory.note, state)
            for directory in draft.directories
        ]
        packs: dict[str, KnownRecords] = {}
        for name, read in self.holdings.packs.items():
            known = index.packs.get(name)
            block = state.keep(known.records) if known else state.add(read())
            packs[name] = KnownRecords(block, self.holdings.live[name])
        lists: dict[bytes, Block] = {}
        for chunk_list in draft.chunk_lists():
            held = index.chunk_lists.get(chunk_list)
            lists[chunk_list] = state.keep(held) if held else state.add(self.chunk_list(chunk_list))
        return directories, packs, lists


class Elsewhere:
    """Whether directories of the last packing need a chunk. They are read when that is asked."""

    def __init__(self, known: Known, numbers: Iterable[int]) -> None:
        self._known, self._numbers = known, numbers
        self._rows: Rows | None = None

    def __call__(self, chunk: bytes) -> bool:
        if self._rows is None:
            self._rows = Rows([self._known.chunks(number) for number in self._numbers], HASH_SIZE)
        return chunk in self._rows


def keep(note: Remembered, state: cache.Draft) -> Remembered:
    """The note of a directory that did not change."""
    if not state.anew:
        return note
    return msgspec.structs.replace(note, body=state.keep(note.body), chunks=state.keep(note.chunks))
