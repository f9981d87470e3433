"""Single chunks of the contents of a package, while the pull of the package brings them.

A chunk comes from the object with its content where that is here, else from a pack or the selection
of one that the pull brings, else from an older object. Pieces of a pack that are not here come
before all others of it (`BlobPull.demand`). A chunk is given once its BLAKE3 has matched; what does
not match is dropped and fetched again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.trees import Sources
from p2pdist.core.demand.reading_queue import Reading
from p2pdist.model.bootstrap import is_named
from p2pdist.model.catalog import Stored
from p2pdist.model.device import DeviceChunk
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError
from p2pdist.model.manifest import Descriptor
from p2pdist.model.messages import Priority
from p2pdist.model.pieces import HASH_SIZE
from p2pdist.model.selection import Selection
from p2pdist.model.tree import content_hash
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.assembly import Decoder, decode_together, wrong_chunk
from p2pdist.store.trees.damage import damaged, drop_wrong
from p2pdist.store.trees.missing_contents import Missing

Asked = Literal["reader", "ahead", "none"]

Buffer = bytes | memoryview
"""What a chunk is given as."""

Placed = tuple[int, Blob, Stored, list[DeviceChunk]]
"""Where a chunk begins in a blob, and what wants it."""

RUN_BYTES = 8 << 20
"""Chunks that lie one behind the other are read together up to so many bytes."""

WRONG_MAX = 3
"""So often in a row a pack may hold pieces that are not what they should be."""


class Fetcher(Protocol):
    """Fetches one blob into the store."""

    async def fetch(
        self, layer: Descriptor, priority: Priority, selection: Selection | None
    ) -> tuple[Blob, BlobPull | None]:
        """The blob, not yet held, and its pull, started or joined; None when it is complete."""


@dataclass(slots=True)
class Whereabouts:
    """Where chunks are that were no objects when the pull of the package began."""

    packs: Mapping[bytes, tuple[Digest, Stored]] = field(default_factory=dict)
    """By chunk: pack, and where in it."""
    objects: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    """By chunk: older object, and offset in it."""
    sources: Sources = field(default_factory=dict)
    replaced: asyncio.Event | None = None
    """Set once others, which know all chunks, have taken the place of these; None: these do."""
    name_bytes: int = HASH_SIZE
    """How much of their names they know chunks by."""

    @classmethod
    def of(cls, incomplete: Sequence[Missing], sources: Sources) -> Whereabouts:
        """Taken before the pull begins: it uses up what it has."""
        packs: dict[bytes, tuple[Digest, Stored]] = {}
        here = cls(packs, sources=sources)
        for missing in incomplete:
            packs.update(missing.located)
            for assembly in missing.assemblies.values():
                old = (part for part in assembly.pending if part.pack is None)
                here.objects.update((part.chunk, (part.source, part.at)) for part in old)
        return here


class Chunks:
    """The chunks of one package. A pull that a chunk begins has this `priority`. On the event loop,
    but for `from_objects`, `here` and `here_together`, which are for threads."""

    _decoders = threading.local()
    """One for each thread: making it takes longer than most chunks do."""

    def __init__(self, store: BlobStore, fetcher: Fetcher, priority: Priority = "preseed") -> None:
        self.whereabouts = Whereabouts()
        """Written by the owner whenever a pull of the package begins."""
        self.lost: Callable[[], None] = lambda: None
        """Called for a chunk that neither object nor pack has any more; the owner sets it."""
        self.awaited: Callable[[], None] = lambda: None
        """Called when a reader waits for whereabouts to be replaced; the owner sets it."""
        self._store, self._fetcher, self._priority = store, fetcher, priority

    async def read(self, chunk: DeviceChunk, reading: Reading | None = None) -> bytes:
        """A chunk, for which a reader waits; with `reading` it comes first while that has a turn.
        Raises P2PDistError: Corrupt for a package that is packed wrongly, NotFound where neither
        store nor pull has it."""
        data = await asyncio.to_thread(self.from_objects, chunk)
        return data if data is not None else await self._from_pack(chunk, reading)

    async def bring(
        self, chunks: Iterable[DeviceChunk], asked: Asked = "ahead", reading: Reading | None = None
    ) -> Mapping[Digest, Blob]:
        """Have the pieces come that hold these chunks; returns the blobs that they are of, by pack.
        `asked` says who asks: "reader", "ahead" of readers, behind whom its pieces come, or nobody,
        "none": then pieces that are not here stay away. For a `reading`, while it has a turn.
        Raises P2PDistError."""
        parts: dict[Digest, list[Stored]] = {}
        sources = self.whereabouts.sources  # others may take their place
        for chunk in chunks:
            located = self.whereabouts.packs.get(chunk.chunk)
            if located is not None and located[0] in sources:
                parts.setdefault(located[0], []).append(located[1])
        coming = (self._bring(sources[pack], stored, asked, reading) for pack, stored in parts.items())
        return dict(zip(parts, await asyncio.gather(*coming), strict=True))

    async def _bring(
        self,
        source: tuple[Descriptor, Selection | None],
        parts: Sequence[Stored],
        asked: Asked,
        reading: Reading | None,
    ) -> Blob:
        descriptor, selection = source
        blob, pull = await self._fetcher.fetch(descriptor, self._priority, selection)
        pieces: dict[int, None] = {}
        for stored in parts if asked != "none" else ():
            start = _start(stored, selection)
            if not blob.holds(start, stored.stored):
                pieces.update(dict.fromkeys(blob.layout.covering(start, start + stored.stored)))
        if pull is not None and pieces:
            with blob.held():
                await pull.demand(tuple(pieces), prefetch=asked == "ahead", reading=reading)
        return blob

    def here(self, chunk: DeviceChunk, blobs: Mapping[Digest, Blob]) -> bytes | None:
        """A chunk from objects or from these held blobs of packs; None where none of them has
        it."""
        data = self.from_objects(chunk)
        place = self._place(chunk, blobs) if data is None else None
        return data if place is None else self._read(*place)

    def here_together(self, chunks: Iterable[DeviceChunk], blobs: Mapping[Digest, Blob]) -> dict[int, Buffer]:
        """Those of the chunks that these held blobs of packs have, by their places in the device,
        read and decoded in one go. What is missing here may be here all the same (`here`): what is
        wrong is left out. They take memory all at once."""
        places: dict[tuple[Digest, int], tuple[Blob, Stored, list[DeviceChunk]]] = {}
        for chunk in chunks:
            place = self._place(chunk, blobs) if chunk.content not in self._store.objects else None
            if place is not None and place[0].holds(place[1], place[3].stored):
                places.setdefault((place[0].digest, place[1]), (place[0], place[3], []))[2].append(chunk)
        ordered = [(start, *places[digest, start]) for digest, start in sorted(places)]
        stored: list[tuple[memoryview, int]] = []
        wanted: list[list[DeviceChunk]] = []
        for run in _runs(ordered):
            begin, blob = run[0][0], run[0][1]
            with suppress(P2PDistError):  # `here` says why
                data = memoryview(blob.read_range(begin, run[-1][0] + run[-1][2].stored - begin))
                for start, _, part, mine in run:
                    stored.append((data[start - begin :][: part.stored], part.length))
                    wanted.append(mine)
        found: dict[int, Buffer] = {}
        for chunk_data, mine in zip(decode_together(stored), wanted, strict=True):
            if chunk_data is not None and is_named(chunk_data, mine[0].chunk):
                found.update((chunk.at, chunk_data) for chunk in mine)
        return found

    def _place(self, chunk: DeviceChunk, blobs: Mapping[Digest, Blob]) -> tuple[Blob, int, Digest, Stored] | None:
        """Where one of these blobs of packs is to have the chunk: the blob, where in it, the pack,
        and where in that."""
        located, sources = self.whereabouts.packs.get(chunk.chunk), self.whereabouts.sources
        if located is None or located[0] not in blobs or located[0] not in sources:
            return None
        (pack, stored), (descriptor, selection) = located, sources[located[0]]
        if blobs[pack].digest != descriptor.digest:  # it came from what other whereabouts named
            return None
        return blobs[pack], _start(stored, selection), pack, stored

    def in_pack(self, chunk: DeviceChunk) -> bool:
        """Whether it is known where in a pack the chunk is, and no object here is to have it."""
        places = self.whereabouts
        return chunk.chunk in places.packs and chunk.content not in self._store.objects

    def from_objects(self, chunk: DeviceChunk) -> bytes | None:
        """The chunk from an object, None where none has it. One that is wrong is dropped."""
        places = [(chunk.content, chunk.offset)]
        if chunk.chunk in self.whereabouts.objects:
            places.append(self.whereabouts.objects[chunk.chunk])
        for content, offset in places:
            if content not in self._store.objects:
                continue
            try:
                with self._store.objects.path(content).open("rb", buffering=0) as file:
                    data = os.pread(file.fileno(), chunk.length, offset)
            except FileNotFoundError:
                continue  # it was evicted
            except OSError:  # such as EIO
                data = b""
            if content_hash(data) == chunk.chunk:
                return data
            self._store.trees.drop_objects({content})
        return None

    async def _from_pack(self, chunk: DeviceChunk, reading: Reading | None) -> bytes:
        """The chunk from its pack, whose pieces are fetched where they are not here. Raises
        P2PDistError."""
        located = self._located(chunk)
        if located is None and self.whereabouts.replaced is not None:
            self.awaited()
            await self.whereabouts.replaced.wait()
            located = self._located(chunk)
            if located is None and (data := await asyncio.to_thread(self.from_objects, chunk)) is not None:
                return data
        source = self.whereabouts.sources.get(located[0]) if located is not None else None
        if located is None or source is None:
            self.lost()
            raise NotFound(f"the content {chunk.content.hex()} is gone from the store", remedy="Pull the package again")
        (pack, stored), (descriptor, selection) = located, source
        for _ in range(WRONG_MAX):
            blob, pull = await self._fetcher.fetch(descriptor, self._priority, selection)
            with blob.held():
                start = _start(stored, selection)
                if pull is not None and reading is not None:
                    piece = start // blob.layout.piece_size
                    pull.turns.reads(reading, piece, now=asyncio.get_running_loop().time())
                if pull is not None and not blob.holds(start, stored.stored):
                    await pull.demand(blob.layout.covering(start, start + stored.stored), reading=reading)
                data = await asyncio.to_thread(self._read, blob, start, pack, stored)
            if data is not None:
                return data
            if pull is not None:  # it does not know that pieces are gone: the next one will
                pull.reject(damaged(blob))
        raise Corrupt(f"the pack {pack} is wrong on the disk again and again", remedy="See dmesg for the disk")

    def _located(self, chunk: DeviceChunk) -> tuple[Digest, Stored] | None:
        """In which pack the chunk is, and where. Raises NotFound for one that was asked for by a
        short name, and has its full one by now: it is not lost, and to be asked for again."""
        located = self.whereabouts.packs.get(chunk.chunk)
        if located is None and len(chunk.chunk) < self.whereabouts.name_bytes:
            raise NotFound(f"the content {chunk.content.hex()} has its full name by now", remedy="Read it again")
        return located

    def _read(self, blob: Blob, start: int, pack: Digest, stored: Stored) -> bytes | None:
        """A chunk of a pack that begins at `start` of a blob. None where pieces are not here, or
        are wrong: these are dropped. Raises Corrupt for a pack that does not hold the chunk."""
        if not blob.holds(start, stored.stored):
            return None
        decoder: Decoder | None = getattr(self._decoders, "decoder", None)
        if decoder is None:
            decoder = self._decoders.decoder = Decoder()
        failure: P2PDistError = wrong_chunk(pack, stored.chunk)
        try:
            data = bytes(
                decoder.decode(pack, stored.chunk, memoryview(blob.read_range(start, stored.stored)), stored.length)
            )
            if is_named(data, stored.chunk):
                return data
        except P2PDistError as error:
            failure = error
        if not drop_wrong(blob, start, stored.stored):
            raise failure
        return None


def _runs(places: Sequence[Placed]) -> Iterator[list[Placed]]:
    """Places that lie one behind the other in one blob, up to RUN_BYTES together, or one alone."""
    run: list[Placed] = []
    for place in places:
        begin, blob, stored, _ = place
        if run and (
            (blob, begin) != (run[-1][1], run[-1][0] + run[-1][2].stored)
            or begin + stored.stored - run[0][0] > RUN_BYTES
        ):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def _start(stored: Stored, selection: Selection | None) -> int:
    """Where a chunk of a pack begins in the blob that is fetched of the pack."""
    return stored.offset if selection is None else selection.position(stored.offset, stored.stored)
