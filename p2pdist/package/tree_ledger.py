"""What a tree needs of the pool's chunks, brought forward from what the last packing of the
directory needed.

The notes say what each pack had that was needed. Packs that went since and packs that came are
accounted for, then the chunks that directories lost and won; what other directories have as well is
neither. Where something is gone that the tree needed, and where there are no notes, all is counted
from nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec

from p2pdist.model.digest import Digest
from p2pdist.model.tree import HASH_SIZE, WHOLE_MAX, ChunkList, File
from p2pdist.package import tree_state
from p2pdist.package.holdings import Holdings, Rows
from p2pdist.package.pack_writer import PackWriter
from p2pdist.package.pool import Pool
from p2pdist.package.tree_draft import Draft, Known, Looked, split
from p2pdist.package.tree_state import Block, KnownRecords, Notes, Remembered


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
        self, draft: Draft, written: tuple[PackWriter, PackWriter], state: tree_state.Draft
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


def keep(note: Remembered, state: tree_state.Draft) -> Remembered:
    """The note of a directory that did not change."""
    if not state.anew:
        return note
    return msgspec.structs.replace(note, body=state.keep(note.body), chunks=state.keep(note.chunks))
