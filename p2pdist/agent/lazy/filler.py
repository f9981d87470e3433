"""Fills the device of a lazy view with chunks (chunks.py).

What does not verify is never written: a device holds verified bytes and holes. A cell of the device
gets its head once all its chunks are written; before that the kernel cannot read it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from p2pdist.agent.lazy.chunks import Asked, Buffer, Chunks, Fetcher, Whereabouts
from p2pdist.model.catalog import Stored
from p2pdist.model.device import BLOCK_BYTES, Cells, DeviceChunk, DeviceLayout
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, P2PDistError
from p2pdist.store.blobs.blob import Blob
from p2pdist.store.disk import pwrite_all
from p2pdist.store.store import BlobStore

PAUSE_S, PAUSE_S_MAX = 0.1, 2.0
"""Between two attempts to get a chunk: this at first, then twice as long each time."""

AGAIN_S, AGAIN_S_MAX = 1.0, 60.0
"""Between two attempts to fill the whole device."""

AT_ONCE = 64
"""Cells that are filled in one go while no reader waits for them."""

TOGETHER_BYTES = 4 << 20
"""Chunks of about so many bytes are read and decoded in one go."""

logger = logging.getLogger(__name__)


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

    def write_all(self, chunks: Sequence[tuple[Buffer, int]]) -> None:
        """As `write`, of chunks that follow each other: no other lies between them. Raises
        OSError."""
        parts: list[tuple[int, memoryview]] = []
        for data, at in chunks:
            view = memoryview(data)
            parts += ((offset, view[begin:end]) for offset, begin, end in self.cells.places(at, len(data)))
        with self._writing() as descriptor:
            for offset, run in _adjoining(parts):
                pwrite_all(descriptor, run[0] if len(run) == 1 else b"".join(run), offset)

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


def _adjoining(parts: Iterable[tuple[int, memoryview]]) -> Iterator[tuple[int, list[Buffer]]]:
    """Parts of a file, each with its offset, that follow each other, as runs that are written at
    once: where the next one begins with the next block there are zeros between them."""
    first, end, run = 0, 0, list[Buffer]()
    for offset, view in parts:
        padding = -end % BLOCK_BYTES
        if not run or offset != end + padding:
            if run:
                yield first, run
            first, run = offset, []
        elif padding:
            run.append(bytes(padding))
        run.append(view)
        end = offset + len(view)
    if run:
        yield first, run


class Filler:
    """Fills one device. On the event loop; disks are for threads."""

    def __init__(self, store: BlobStore, fetcher: Fetcher) -> None:
        self.layout: DeviceLayout | None = None
        """Known before anything is filled; `arrange`."""
        self.chunks = Chunks(store, fetcher)
        self.device = DeviceFile()
        self.bytes_filled = 0
        self._filled: set[int] = set()
        """Where in the device chunks are that were written."""
        self._filling: dict[int, asyncio.Task[None]] = {}
        self._finished: set[int] = set()
        """Cells that the kernel can read."""
        self._finishing: dict[int, asyncio.Task[None]] = {}
        self._failures = 0
        """How often a flush failed. What was written, or begun, before the last one may be lost and
        counts no more."""
        self._cut: dict[int, tuple[DeviceChunk, ...]] = {}
        """The chunks of cells that were looked at and are not finished: what lies around readers is
        looked at again and again."""

    def arrange(self, layout: DeviceLayout) -> None:
        """From now on contents are those of this layout, in the places where they were."""
        self.layout = layout
        self._cut.clear()

    def has(self, chunk: DeviceChunk) -> bool:
        """Whether the chunk was written."""
        return chunk.at in self._filled

    def has_cell(self, cell: int) -> bool:
        """Whether the kernel can read the cell."""
        return cell in self._finished

    async def fill_cell(self, cell: int) -> None:
        """Have everything of a cell written, and let the kernel read it. It is tried for as long as
        the caller waits. Raises Corrupt for a package that is packed wrongly."""
        while cell not in self._finished:  # again where a flush failed meanwhile
            task = self._finishing.get(cell)
            if task is None:
                task = self._finishing[cell] = asyncio.create_task(self._fill_cell(cell))
                task.add_done_callback(partial(_forget, self._finishing, cell))
            await asyncio.shield(task)

    async def _fill_cell(self, cell: int) -> None:
        failures = self._failures
        missing = [chunk for chunk in self._chunks((cell,)) if not self.has(chunk)]
        if packed := [chunk for chunk in missing if self.chunks.in_pack(chunk)]:
            # All at once, since a cell may have many chunks; what is wrong is left for one by one.
            if await self.fill_in_order((cell,), await self.chunks.bring(packed, "reader")):
                return
            missing = [chunk for chunk in missing if not self.has(chunk)]
        await asyncio.gather(*map(self.fill, missing))
        await asyncio.to_thread(self.device.finish, (cell,))
        self._finish_all((cell,), failures)

    def _chunks(self, cells: Iterable[int]) -> list[DeviceChunk]:
        """The chunks of cells, each once."""
        return list({chunk.at: chunk for cell in cells for chunk in self._chunks_of(cell)}.values())

    def _chunks_of(self, cell: int) -> tuple[DeviceChunk, ...]:
        assert self.layout is not None
        chunks = self._cut.get(cell)
        if chunks is None:
            chunks = tuple(self.layout.cell_chunks(cell))
            if cell not in self._finished:
                self._cut[cell] = chunks
        return chunks

    def _finish_all(self, cells: Iterable[int], failures: int) -> None:
        """The kernel can read these; `failures` of flushes came before their chunks were looked
        at."""
        for cell in cells if failures == self._failures else ():
            self._finished.add(cell)
            self._cut.pop(cell, None)

    def without_neighbours(
        self, cells: Iterable[tuple[int, DeviceChunk]], hold: Callable[[Digest, Stored], bool]
    ) -> list[int]:
        """Of cells that were chosen for a chunk each, every one once, but for those of which `hold`
        says that the chunk lies in what comes, and others of the cell do not."""
        packs = self.chunks.whereabouts.packs

        def comes(chunk: DeviceChunk) -> bool:
            place = packs.get(chunk.chunk)
            return place is not None and hold(*place)

        chosen = (cell for cell, chunk in cells if not comes(chunk) or all(map(comes, self._chunks_of(cell))))
        return list(dict.fromkeys(chosen))

    def bytes_packed(self, cells: Iterable[int]) -> int:
        """As how many bytes the chunks of cells lie in packs."""
        located = map(self.chunks.whereabouts.packs.get, {chunk.chunk for chunk in self._chunks(cells)})
        return sum(place[1].stored for place in located if place is not None)

    async def fill(self, chunk: DeviceChunk) -> None:
        """Have a chunk written. It is tried for as long as the caller waits. Raises Corrupt for a
        package that is packed wrongly."""
        while not self.has(chunk):  # again where a flush failed meanwhile
            task = self._filling.get(chunk.at)
            if task is None:
                task = self._filling[chunk.at] = asyncio.create_task(self._fill(chunk))
                task.add_done_callback(partial(_forget, self._filling, chunk.at))
            await asyncio.shield(task)

    async def flush(self) -> None:
        """Bring the device to the disk. Raises OSError; then all is to be written again: the kernel
        says once that a disk has failed to take something, and not what."""
        try:
            await asyncio.to_thread(self.device.flush)
        except OSError:
            self._failures += 1
            self._filled.clear()
            self._finished.clear()
            self.bytes_filled = 0
            raise

    def close(self) -> None:
        """End what is under way."""
        for task in (*self._filling.values(), *self._finishing.values()):
            task.cancel()
        self.device.close()
        self.layout, self.chunks.whereabouts = None, Whereabouts()
        self._filled.clear()
        self._cut.clear()

    async def _fill(self, chunk: DeviceChunk) -> None:
        data, failures = await self.chunks.read(chunk), self._failures
        await asyncio.to_thread(self.device.write, data, chunk.at)
        self._wrote(chunk, failures)

    def _wrote(self, chunk: DeviceChunk, failures: int) -> None:
        """The chunk was written; `failures` of flushes came before."""
        if chunk.at not in self._filled and failures == self._failures:
            self._filled.add(chunk.at)
            self.bytes_filled += chunk.length

    async def fill_from_objects(self, cells: Sequence[int]) -> list[int]:
        """Fill cells for which no reader waits; returns those of which no object has something.
        Raises OSError."""
        missing, failures = [chunk for chunk in self._chunks(cells) if not self.has(chunk)], self._failures
        for chunk in await asyncio.to_thread(self._copy, missing):
            self._wrote(chunk, failures)
        await self._finish(cells)
        return [cell for cell in cells if cell not in self._finished]

    def _copy(self, chunks: Sequence[DeviceChunk]) -> list[DeviceChunk]:
        written = []
        for chunk in chunks:
            data = self.chunks.from_objects(chunk)
            if data is not None:
                self.device.write(data, chunk.at)
                written.append(chunk)
        return written

    async def bring(self, cells: Sequence[int], asked: Asked = "ahead") -> Mapping[Digest, Blob]:
        """Have the pieces come that hold these cells (Chunks.bring); returns the blobs that they
        are of, by pack. Raises P2PDistError."""
        return await self.chunks.bring((chunk for chunk in self._chunks(cells) if not self.has(chunk)), asked)

    async def fill_in_order(self, cells: Sequence[int], blobs: Mapping[Digest, Blob]) -> list[int]:
        """Fill cells, one after the other, whose bytes are in objects or in these blobs of packs;
        returns those that were filled. Raises OSError, NotFound for a blob that was evicted, and
        Corrupt."""
        missing = {cell: self._chunks_of(cell) for cell in cells if cell not in self._finished}
        failures = self._failures
        if not missing:
            return []
        with ExitStack() as holds:
            for blob in blobs.values():
                holds.enter_context(blob.held())
            written, whole = await asyncio.to_thread(self._write, missing, blobs)
        for chunk in written:
            self._wrote(chunk, failures)
        self._finish_all(whole, failures)
        return whole

    def _write(
        self, cells: Mapping[int, Sequence[DeviceChunk]], blobs: Mapping[Digest, Blob]
    ) -> tuple[list[DeviceChunk], list[int]]:
        """Write those of the cells' chunks that are here, and let the kernel read the cells that
        are whole by it; returns both."""
        written: dict[int, DeviceChunk] = {}
        whole = []
        for some in _some(cells, TOGETHER_BYTES):
            lacking = {chunk.at: chunk for chunks in some.values() for chunk in chunks if not self.has(chunk)}
            for at in written:
                lacking.pop(at, None)
            come = self.chunks.here_together(lacking.values(), blobs)
            for cell, chunks in some.items():
                fresh: list[list[tuple[Buffer, int]]] = [[]]
                for chunk in chunks:
                    data = None
                    if not self.has(chunk) and chunk.at not in written:
                        data = come.pop(chunk.at, None) or self.chunks.here(chunk, blobs)
                    if data is None:
                        fresh.append([])
                    else:
                        fresh[-1].append((data, chunk.at))
                        written[chunk.at] = chunk
                for following in filter(None, fresh):
                    self.device.write_all(following)
                if all(self.has(chunk) or chunk.at in written for chunk in chunks):
                    self.device.finish((cell,))
                    whole.append(cell)
        return list(written.values()), whole

    async def _finish(self, cells: Sequence[int]) -> list[int]:
        """Let the kernel read those of the cells of which everything is written; returns them."""
        whole, failures = [cell for cell in cells if all(map(self.has, self._chunks_of(cell)))], self._failures
        await asyncio.to_thread(self.device.finish, whole)
        self._finish_all(whole, failures)
        return whole


def _some(cells: Mapping[int, Sequence[DeviceChunk]], length: int) -> Iterator[dict[int, Sequence[DeviceChunk]]]:
    """Cells with their chunks, in order, as many at a time as have about so many bytes."""
    some: dict[int, Sequence[DeviceChunk]] = {}
    left = length
    for cell, chunks in cells.items():
        some[cell] = chunks
        left -= sum(chunk.length for chunk in chunks)
        if left <= 0:
            yield some
            some, left = {}, length
    if some:
        yield some


def _forget(tasks: dict[int, asyncio.Task[None]], key: int, task: asyncio.Task[None]) -> None:
    """Forget a task that has ended, and its failure, where no caller waits for it any more."""
    tasks.pop(key, None)
    if not task.cancelled():
        task.exception()


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
    await filler.flush()


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
