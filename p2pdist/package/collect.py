"""Collection: blobs that no tag leads to, and no push is about to name, leave a place.

The order is: list blobs; mark what leases and tags lead to (lease.py, mark.py); then, batch by
batch, leave a removal note, read leases and then tags again, and delete what of the batch is still
not needed. Why no blob of a visible tag can get lost is argued in lease.py. A package that is being
packed cannot say beforehand which old packs it will draw on; in a directory packers hold a lock
instead, and a batch waits until none does.

The age that is spared is a second guard, for writers that leave no lease: other tools, or a copy of
files by hand. Ages are by the clock of the storage. A blob that is listed was written before the
marking, so what arrives later is out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Unavailable
from p2pdist.package.lease import (
    LEASE,
    LEASE_S,
    REMOVAL,
    REMOVAL_S,
    START_S,
    NoteBoard,
    clock,
    encode_note,
    note_name,
    read_note,
)
from p2pdist.package.mark import Marked, Marks

OLDER_THAN_S = 86_400.0
BATCH_BLOBS = 500
"""Removed under one note: what a push may have to wait for."""

OnProgress = Callable[[str, int, int], None]


class Collectable(Marked, NoteBoard, Protocol):
    """A place that can be collected in; see Origin for the contract."""

    async def blobs(self) -> list[tuple[Digest, int, float]]: ...

    async def remove(self, digests: Sequence[Digest]) -> None: ...

    async def remove_unfinished(self, *, dry_run: bool = False) -> tuple[int, int]: ...

    def packing(self, *, alone: bool = False) -> AbstractAsyncContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Collected:
    """`unfinished` counts what killed writers left, files or directories of them; `bytes_freed`
    counts blobs and these."""

    blobs_removed: int
    bytes_freed: int
    blobs_kept: int
    unfinished: int


async def collect(
    place: Collectable,
    *,
    older_than_s: float = OLDER_THAN_S,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Collected:
    """Remove the blobs that nothing needs and that were written more than `older_than_s` ago. With
    `dry_run` only count them.

    Raises NotFound when the place is no layout; when a tag leads to what cannot be read, an error
    that names the tag, and nothing was removed; Conflict while packages are being packed.
    """
    collection = _Collection(place, on_progress)
    now = await collection.now()
    listed = await place.blobs()
    kept = await collection.needed(now)
    victims = sorted(
        (size, digest) for digest, size, written in listed if digest not in kept and now - written > older_than_s
    )
    # Small ones first: a manifest goes before what it leads to, so that what a killed collection
    # leaves cannot be taken for a package.
    if not dry_run:
        victims = await collection.remove(victims, now)
    count, unfinished_bytes = await place.remove_unfinished(dry_run=dry_run)
    freed = sum(size for size, _ in victims) + unfinished_bytes
    return Collected(len(victims), freed, len(listed) - len(victims), count)


class _Collection:
    def __init__(self, place: Collectable, on_progress: OnProgress | None) -> None:
        self._place, self._on_progress = place, on_progress
        self._marks = Marks(place)
        self._leases: dict[tuple[str, float], frozenset[Digest]] = {}

    async def now(self) -> float:
        """The time by the clock of the storage. Raises NotFound when it is no layout, before
        anything is written there."""
        await self._place.roots()
        name = note_name(REMOVAL)
        await self._place.write_note(name, b"")
        try:
            return await self._written(name)
        finally:
            await self._place.remove_notes([name])

    async def needed(self, now: float) -> set[Digest]:
        """What leases and tags lead to. Leases are read first: one that is gone when it is read has
        left a tag."""
        leased: set[Digest] = set()
        for name, written in await self._place.notes():
            if name.startswith(LEASE) and now - written <= LEASE_S:
                if (name, written) not in self._leases:
                    self._leases[name, written] = await read_note(self._place, name)
                leased |= self._leases[name, written]
        return leased | await self._marks.reached()

    async def remove(self, victims: list[tuple[int, Digest]], now: float) -> list[tuple[int, Digest]]:
        """Remove them in batches, those that are needed by now excepted; returns what was
        removed."""
        total, done, removed = sum(size for size, _ in victims), 0, list[tuple[int, Digest]]()
        for start in range(0, len(victims), BATCH_BLOBS):
            batch = victims[start : start + BATCH_BLOBS]
            async with self._place.packing(alone=True):
                removed += await self._remove_batch(batch)
            done += sum(size for size, _ in batch)
            if self._on_progress:
                self._on_progress("removing", done, total)
        notes = await self._place.notes()
        void = [name for name, written in notes if name.startswith(LEASE) and now - written > LEASE_S]
        void += [name for name, written in notes if name.startswith(REMOVAL) and now - written > REMOVAL_S]
        await self._place.remove_notes(void)
        return removed

    async def _remove_batch(self, batch: list[tuple[int, Digest]]) -> list[tuple[int, Digest]]:
        name, begun_at, is_open = note_name(REMOVAL), clock(), False
        try:
            await self._place.write_note(name, encode_note(digest for _, digest in batch))
            needed = await self.needed(await self._written(name))
            gone = [(size, digest) for size, digest in batch if digest not in needed]
            if clock() - begun_at > START_S:
                raise Unavailable(
                    f"{self._place.url} took over {START_S:.0f} s to say what is needed",
                    remedy="Try again when it is less busy; what has been removed so far was needed by nothing",
                )
            is_open = True
            await self._place.remove([digest for _, digest in gone])
            is_open = False
        finally:
            # A request that failed or was broken off may yet be carried out: then the note stays
            # until it is void.
            if not is_open:
                await self._place.remove_notes([name])
        return gone

    async def _written(self, name: str) -> float:
        found = dict(await self._place.notes()).get(name)
        if found is None:
            raise Unavailable(f"{self._place.url} does not list what was just written", remedy="Try again")
        return found
