"""Fills the device of a lazy view: finds the bytes of a chunk, compares their BLAKE3, writes them.

A chunk comes from the object with its content where that is here, else from a pack or the selection
of one that the pull of the package brings, else from an older object. Pieces of a pack that are
not here come before all others of it (`BlobPull.demand`). What does not verify is dropped and
fetched again, and never written: a device holds verified bytes and holes. A cell of the device gets
its head once all its chunks are written; before that the kernel cannot read it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from p2pdist.agent.pull.blob import BlobPull
from p2pdist.agent.pull.trees import Sources
from p2pdist.model.catalog import Stored
from p2pdist.model.device import Cells, DeviceChunk, DeviceLayout
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Unavailable
from p2pdist.model.manifest import Descriptor
from p2pdist.model.messages import Priority
from p2pdist.model.selection import Selection
from p2pdist.model.tree import content_hash
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.disk import pwrite_all
from p2pdist.store.store import BlobStore
from p2pdist.store.trees.assembly import Decoder, wrong_chunk
from p2pdist.store.trees.missing import Missing

PAUSE_S, PAUSE_S_MAX = 0.1, 2.0
"""Between two attempts to get a chunk: this at first, then twice as long each time."""

AGAIN_S, AGAIN_S_MAX = 1.0, 60.0
"""Between two attempts to fill the whole device."""

AT_ONCE = 64
"""Cells that are filled in one go while no reader waits for them."""

WRONG_MAX = 3
"""So often in a row a pack may hold pieces that are not what they should be."""

logger = logging.getLogger(__name__)


class Fetcher(Protocol):
    """Fetches one blob into the store."""

    async def fetch(
        self, layer: Descriptor, priority: Priority, selection: Selection | None
    ) -> tuple[Blob, BlobPull | None]:
        """The blob, not yet held, and its pull, started or joined; None when it is complete."""


@dataclass(slots=True)
class Whereabouts:
    """Where chunks are that were no objects when the pull of the package began."""

    packs: dict[bytes, tuple[Digest, Stored]] = field(default_factory=dict)
    """By chunk: pack, and where in it."""
    objects: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    """By chunk: older object, and offset in it."""
    sources: Sources = field(default_factory=dict)

    @classmethod
    def of(cls, incomplete: Sequence[Missing], sources: Sources) -> Whereabouts:
        """Taken before the pull begins: it uses up what it has."""
        here = cls(sources=sources)
        for missing in incomplete:
            for need in missing.needs:
                here.packs.update((stored.chunk, (need.pack, stored)) for stored in need.chunks)
            for assembly in missing.assemblies.values():
                old = (part for part in assembly.pending if part.pack is None)
                here.objects.update((part.chunk, (part.source, part.at)) for part in old)
        return here


class DeviceFile:
    """The device, open for writing. Thread-safe: it is closed once no thread writes any more."""

    def __init__(self) -> None:
        self.cells = Cells(headed=True)
        """Written by the owner before the device is open."""
        self._lock = threading.Lock()
        self._descriptor = self._group = -1
        self._writers = 0
        self._closing = False

    def take(self, descriptor: int, group: int) -> None:
        """Write to this descriptor of the device, and hold the group that is asked about it, unless
        there are some; they are closed here."""
        with self._lock:
            if self._descriptor < 0 and not self._closing:
                self._descriptor, self._group = descriptor, group
                return
        os.close(descriptor)
        os.close(group)

    @property
    def held(self) -> tuple[int, ...]:
        """The descriptors of device and group, none while there are none."""
        return (self._descriptor, self._group) if self._descriptor >= 0 else ()

    def write(self, data: bytes, at: int) -> None:
        """Write bytes of the contents. Raises OSError, EBADF once it is closed."""
        view = memoryview(data)
        with self._writing() as descriptor:
            for offset, begin, end in self.cells.places(at, len(data)):
                pwrite_all(descriptor, view[begin:end], offset)

    def finish(self, cells: Iterable[int]) -> None:
        """Let the kernel read these cells, of which everything is written. Raises OSError."""
        with self._writing() as descriptor:
            for cell in cells:
                offset, head = self.cells.head(cell)
                pwrite_all(descriptor, head, offset)

    def flush(self) -> None:
        """Bring it to the disk. Raises OSError."""
        with self._writing() as descriptor:
            os.fsync(descriptor)

    def close(self) -> None:
        """Close it as soon as that may be. Idempotent."""
        with self._lock:
            self._closing = True
            self._release()

    @contextmanager
    def _writing(self) -> Iterator[int]:
        with self._lock:
            if self._closing or self._descriptor < 0:
                raise OSError(errno.EBADF, "the device of a lazy view is not open")
            self._writers += 1
        try:
            yield self._descriptor
        finally:
            with self._lock:
                self._writers -= 1
                self._release()

    def _release(self) -> None:
        if self._closing and not self._writers and self._descriptor >= 0:
            os.close(self._descriptor)
            os.close(self._group)
            self._descriptor = self._group = -1


class Filler:
    """Fills one device. On the event loop; disks are for threads."""

    def __init__(self, store: BlobStore, fetcher: Fetcher) -> None:
        self.layout: DeviceLayout | None = None
        """Written by the owner before anything is filled."""
        self.whereabouts = Whereabouts()
        """Written by the owner whenever a pull of the package begins."""
        self.device = DeviceFile()
        self.bytes_filled = 0
        self._store, self._fetcher = store, fetcher
        self._filled: set[int] = set()
        """Where in the device chunks are that were written."""
        self._filling: dict[int, asyncio.Task[None]] = {}
        self._finished: set[int] = set()
        """Cells that the kernel can read."""
        self._finishing: dict[int, asyncio.Task[None]] = {}

    def has(self, chunk: DeviceChunk) -> bool:
        """Whether the chunk was written."""
        return chunk.at in self._filled

    def has_cell(self, cell: int) -> bool:
        """Whether the kernel can read the cell."""
        return cell in self._finished

    async def fill_cell(self, cell: int) -> None:
        """Have everything of a cell written, and let the kernel read it. It is tried for as long as
        the caller waits. Raises Corrupt for a package that is packed wrongly."""
        if cell in self._finished:
            return
        task = self._finishing.get(cell)
        if task is None:
            task = self._finishing[cell] = asyncio.create_task(self._fill_cell(cell))
            task.add_done_callback(lambda _: self._finishing.pop(cell, None))
        await asyncio.shield(task)

    async def _fill_cell(self, cell: int) -> None:
        missing = [chunk for chunk in self._chunks((cell,)) if not self.has(chunk)]
        await asyncio.gather(*map(self.fill, missing))
        await asyncio.to_thread(self.device.finish, (cell,))
        self._finished.add(cell)

    def _chunks(self, cells: Iterable[int]) -> list[DeviceChunk]:
        """The chunks of cells, each once."""
        assert self.layout is not None
        return list({chunk.at: chunk for cell in cells for chunk in self.layout.cell_chunks(cell)}.values())

    async def fill(self, chunk: DeviceChunk) -> None:
        """Have a chunk written. It is tried for as long as the caller waits. Raises Corrupt for a
        package that is packed wrongly."""
        if self.has(chunk):
            return
        task = self._filling.get(chunk.at)
        if task is None:
            task = self._filling[chunk.at] = asyncio.create_task(self._fill(chunk))
            task.add_done_callback(lambda _: self._filling.pop(chunk.at, None))
        await asyncio.shield(task)

    def close(self) -> None:
        """End what is under way."""
        for task in (*self._filling.values(), *self._finishing.values()):
            task.cancel()
        self.device.close()
        self.layout, self.whereabouts = None, Whereabouts()
        self._filled.clear()

    async def _fill(self, chunk: DeviceChunk) -> None:
        data = await asyncio.to_thread(self._from_objects, chunk)
        if data is None:
            data = await self._from_pack(chunk)
        await asyncio.to_thread(self.device.write, data, chunk.at)
        self._wrote(chunk)

    def _wrote(self, chunk: DeviceChunk) -> None:
        if chunk.at not in self._filled:
            self._filled.add(chunk.at)
            self.bytes_filled += chunk.length

    async def fill_from_objects(self, cells: Sequence[int]) -> list[int]:
        """Fill cells for which no reader waits; returns those of which no object has something.
        Raises OSError."""
        missing = [chunk for chunk in self._chunks(cells) if not self.has(chunk)]
        for chunk in await asyncio.to_thread(self._copy, missing):
            self._wrote(chunk)
        await self._finish(cells)
        return [cell for cell in cells if cell not in self._finished]

    def _copy(self, chunks: Sequence[DeviceChunk]) -> list[DeviceChunk]:
        written = []
        for chunk in chunks:
            data = self._from_objects(chunk)
            if data is not None:
                self.device.write(data, chunk.at)
                written.append(chunk)
        return written

    async def bring(self, cells: Sequence[int]) -> Mapping[Digest, Blob]:
        """Have the pieces come that hold these cells, behind those for which readers wait; returns
        the blobs that they are of, by pack. Raises P2PDistError."""
        parts: dict[Digest, list[Stored]] = {}
        for chunk in self._chunks(cells):
            located = self.whereabouts.packs.get(chunk.chunk)
            if located is not None and located[0] in self.whereabouts.sources and not self.has(chunk):
                parts.setdefault(located[0], []).append(located[1])
        return dict(zip(parts, await asyncio.gather(*(self._bring(*needed) for needed in parts.items())), strict=True))

    async def _bring(self, pack: Digest, parts: Sequence[Stored]) -> Blob:
        descriptor, selection = self.whereabouts.sources[pack]
        blob, pull = await self._fetcher.fetch(descriptor, "preseed", selection)
        pieces: dict[int, None] = {}
        for stored in parts:
            start = _start(stored, selection)
            if not blob.holds(start, stored.stored):
                pieces.update(dict.fromkeys(blob.layout.covering(start, start + stored.stored)))
        if pull is not None and pieces:
            with blob.held():
                await pull.demand(tuple(pieces), prefetch=True)
        return blob

    async def fill_in_order(self, cells: Sequence[int], blobs: Mapping[Digest, Blob]) -> list[int]:
        """Fill cells, one after the other, whose bytes are in objects or in these blobs of packs;
        returns those that were filled. Raises OSError, NotFound for a blob that was evicted, and
        Corrupt."""
        missing = [chunk for chunk in self._chunks(cells) if not self.has(chunk)]
        with ExitStack() as holds:
            for blob in blobs.values():
                holds.enter_context(blob.held())
            written = await asyncio.to_thread(self._write, missing, blobs)
        for chunk in written:
            self._wrote(chunk)
        return await self._finish([cell for cell in cells if cell not in self._finished])

    def _write(self, chunks: Sequence[DeviceChunk], blobs: Mapping[Digest, Blob]) -> list[DeviceChunk]:
        written, here = [], self.whereabouts
        for chunk in chunks:
            data, located = self._from_objects(chunk), here.packs.get(chunk.chunk)
            if data is None and located is not None and located[0] in blobs and located[0] in here.sources:
                pack, stored = located
                data = _read(blobs[pack], _start(stored, here.sources[pack][1]), pack, stored)
            if data is not None:
                self.device.write(data, chunk.at)
                written.append(chunk)
        return written

    async def _finish(self, cells: Sequence[int]) -> list[int]:
        """Let the kernel read those of the cells of which everything is written; returns them."""
        whole = [cell for cell in cells if all(map(self.has, self._chunks((cell,))))]
        await asyncio.to_thread(self.device.finish, whole)
        self._finished.update(whole)
        return whole

    def _from_objects(self, chunk: DeviceChunk) -> bytes | None:
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
            if content_hash(data) == chunk.chunk:
                return data
            self._store.trees.drop_object(content)
        return None

    async def _from_pack(self, chunk: DeviceChunk) -> bytes:
        """The chunk from its pack, whose pieces are fetched where they are not here. Raises
        P2PDistError."""
        located = self.whereabouts.packs.get(chunk.chunk)
        source = self.whereabouts.sources.get(located[0]) if located is not None else None
        if located is None or source is None:
            raise NotFound(f"the content {chunk.content.hex()} is gone from the store", remedy="Pull the package again")
        (pack, stored), (descriptor, selection) = located, source
        for _ in range(WRONG_MAX):
            blob, pull = await self._fetcher.fetch(descriptor, "preseed", selection)
            with blob.held():
                start = _start(stored, selection)
                if pull is not None and not blob.holds(start, stored.stored):
                    await pull.demand(blob.layout.covering(start, start + stored.stored))
                data = await asyncio.to_thread(_read, blob, start, pack, stored)
            if data is not None:
                return data
            if pull is not None:  # it does not know that pieces are gone: the next one will
                pull.reject(Unavailable(f"pieces of {descriptor.digest} were wrong on the disk"))
        raise Corrupt(f"the pack {pack} is wrong on the disk again and again", remedy="See dmesg for the disk")


def _start(stored: Stored, selection: Selection | None) -> int:
    """Where a chunk of a pack begins in the blob that is fetched of the pack."""
    return stored.offset if selection is None else selection.position(stored.offset, stored.stored)


def _read(blob: Blob, start: int, pack: Digest, stored: Stored) -> bytes | None:
    """A chunk of a pack that begins at `start` of a blob. None where pieces are not here, or are
    wrong: these are dropped. Raises Corrupt for a pack that does not hold the chunk."""
    if not blob.holds(start, stored.stored):
        return None
    try:
        data = bytes(
            Decoder().decode(pack, stored.chunk, memoryview(blob.read_range(start, stored.stored)), stored.length)
        )
        if content_hash(data) == stored.chunk:
            return data
    except Corrupt:
        pass
    pieces, layout = blob.pieces, blob.layout
    wrong = [
        piece
        for piece in layout.covering(start, start + stored.stored)
        if not pieces.verify(piece, blob.read_range(layout.offset(piece), layout.length(piece)))
    ]
    if not wrong:
        raise wrong_chunk(pack, stored.chunk)
    blob.drop(wrong)
    return None


async def keep_trying(filler: Filler, cell: int, failed: list[str]) -> None:
    """Have a cell filled, however often that fails: until the caller waits no longer. `failed` gets
    the reason of each failure. Raises Corrupt for a package that is packed wrongly."""
    pause_s = PAUSE_S
    while True:
        try:
            return await filler.fill_cell(cell)
        except Corrupt:
            raise
        except (P2PDistError, OSError) as error:
            failed.append(error.what if isinstance(error, P2PDistError) else str(error))
            del failed[:-1]
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


async def fill_all(filler: Filler, cells: Sequence[int]) -> None:
    """Fill those of the cells that are missing, and bring the device to the disk. Raises OSError,
    and Corrupt for a package that is packed wrongly; what was filled by then stays."""
    for first in range(0, len(cells), AT_ONCE):
        batch = [cell for cell in cells[first : first + AT_ONCE] if not filler.has_cell(cell)]
        rest = await filler.fill_from_objects(batch)
        await asyncio.gather(*(keep_trying(filler, cell, [""]) for cell in rest))
    await asyncio.to_thread(filler.device.flush)


async def keep_filling(filler: Filler, cells: Sequence[int], check: Callable[[], None], name: str) -> None:
    """Fill all of the cells of the view of `name`, however often that fails, until `check` raises
    nothing, either; it is called in a thread."""
    pause_s = AGAIN_S
    while True:
        try:
            await fill_all(filler, cells)
            return await asyncio.to_thread(check)
        except (P2PDistError, OSError) as error:
            logger.warning("the lazy view of %s still lacks something: %s", name, error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, AGAIN_S_MAX)
