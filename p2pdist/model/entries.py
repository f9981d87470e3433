"""The entries of a tree, page by page: versions of a tree share the pages that they have in common,
and nothing is copied for it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import overload

from p2pdist.model.tree import Entry


class Entries(Sequence[Entry]):
    """The entries of all `pages`, in order. Equal to any sequence of equal entries. Several users
    share one as long as there is one."""

    __hash__ = None  # type: ignore[assignment]  # it is compared by what is in it
    __slots__ = ("__weakref__", "_ends", "pages")

    def __init__(self, pages: Iterable[Sequence[Entry]]) -> None:
        self.pages = tuple(pages)
        self._ends = tuple(accumulate(map(len, self.pages)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self.pages)

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | Sequence[Entry]:
        if isinstance(index, slice):
            return list(self)[index]
        at = range(len(self))[index]
        page = bisect_right(self._ends, at)
        return self.pages[page][at - self._ends[page]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == another for one, another in zip(self, other, strict=True))
