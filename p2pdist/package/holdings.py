"""Which packs have which chunks, and how many bytes of each pack a tree needs.

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
from itertools import accumulate

from p2pdist.model.digest import Digest
from p2pdist.model.tree import HASH_SIZE

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
